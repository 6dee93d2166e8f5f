"""Batch invariance of both twins on the weights of a checkpoint: `python -m parity check SRC --invariance`."""

from dataclasses import dataclass
from typing import Any

from parity.checkpoints.conversion import to_jax, to_torch
from parity.checkpoints.weights import Checkpoint
from parity.comparison.forward_backward import noise_images
from parity.comparison.invariance.measurement import Dtype, invariance
from parity.comparison.invariance.report import InvarianceReport
from parity.comparison.progress import StepProgress
from vit_spec.missing_packages import require_packages

BATCH = 8  # images


@dataclass(frozen=True)
class TwinsInvariance:
    """The reports of both twins; `str` gives one after the other."""

    jax: InvarianceReport
    torch: InvarianceReport

    @property
    def passed(self) -> bool:
        """Whether the outputs of both twins change by rounding alone."""
        return self.jax.passed and self.torch.passed

    def facts(self) -> dict[str, Any]:
        """Return everything for JSON."""
        return {
            "passed": self.passed,
            "bit_equal": self.jax.bit_equal and self.torch.bit_equal,
            "jax": self.jax.facts(),
            "torch": self.torch.facts(),
        }

    def __str__(self) -> str:
        return f"jax: {self.jax}\n\ntorch: {self.torch}"


def twins_invariance(
    checkpoint: Checkpoint, *, seed: int = 0, dtype: Dtype = "float32", progress: StepProgress = lambda what: None
) -> TwinsInvariance:
    """Test both twins in inference mode on `BATCH` images of normal noise; see `invariance`.

    Raises:
        InputError: a framework is not installed, the seed is negative, or `invariance` refuses the outputs.
    """
    require_packages("the comparison runs both twins", "jax", "flax", "torch")
    import torch

    import vit_jax
    import vit_torch

    config, images = checkpoint.config, noise_images(checkpoint.config, seed, BATCH)
    params = {"params": to_jax(checkpoint)}
    jax_report = invariance(vit_jax.ViT(config), images, params, dtype=dtype, progress=progress)
    del params
    with torch.device("meta"):
        model = vit_torch.ViT(config).eval()
    model.load_state_dict(to_torch(checkpoint), assign=True)
    return TwinsInvariance(jax_report, invariance(model, images.transpose(0, 3, 1, 2), dtype=dtype, progress=progress))
