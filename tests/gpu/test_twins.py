"""On a GPU both twins pass the checks of `parity check`, at the size of real models; float64 runs on the CPU."""

from typing import Any

import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")

import vit_spec
from parity.comparison.twins import compare
from tests.twins import perturbed_params

DEPTH = 2  # of the twelve blocks, for speed; all other sizes are those of the named model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["vit_s16", "dinov3_s16", "siglip_b16"])
def test_both_twins_are_equally_precise(name: str, dtype: Any) -> None:
    config = vit_spec.get(name).replace(depth=DEPTH)
    report = compare(config, perturbed_params(config), dtype=dtype)
    assert report.passed, report.verdict


def test_tf32_is_off_in_the_check_and_is_found_without_strict_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX rounds the operands of float32 products to TF32 by default; PyTorch does where it is told to."""
    config = vit_spec.get("vit_s16").replace(depth=DEPTH)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    errors = {}
    for strict in (True, False):
        report = compare(config, perturbed_params(config), backward=False, strict=strict)
        assert report.passed or not strict, report.verdict
        (logits,) = (measure for measure in report.measures if measure.name == "logits")
        assert logits.jax is not None and logits.torch is not None
        errors[strict] = [side.relative_rms(0) for side in (logits.jax, logits.torch)]
    for rounded, full in zip(errors[False], errors[True], strict=True):
        assert rounded > 50 * full  # TF32 rounds 2^13 times as coarsely; sums and norms are in float32 in both
