"""Both trainers on a GPU: the first steps are those of float64 on the CPU, and none of them waits for the host."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
pytest.importorskip("grain")

import vit_spec
from parity.checkpoints.weights import as_checkpoint
from tests.twins import perturbed_params
from train.data.batches import Batch
from train.jax.engine import JaxEngine
from train.recipes import Recipe
from train.torch.engine import TorchEngine

CONFIG = vit_spec.get("vit_s16", num_classes=10).replace(depth=4)
STEPS, IMAGES = 5, 16


def make_batch(seed: int) -> Batch:
    """Return a batch of random images and classes."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (IMAGES, *CONFIG.image_size, 3), np.uint8)
    return Batch(images, rng.integers(0, 10, IMAGES).astype(np.int32), np.arange(IMAGES), np.ones(IMAGES, bool))


def make(engine: Any, **changes: Any) -> Any:
    """Return an engine of the model, with the same weights each time."""
    return engine(
        CONFIG,
        Recipe(batch_size=IMAGES, **changes),
        task="classes",
        learning_rate=lambda step: 1e-4,
        initial_weights=as_checkpoint(perturbed_params(CONFIG), CONFIG, "jax"),
        folder=Path("unused"),
    )


def metrics(engine: Any) -> np.ndarray:
    """Return losses and norms of the gradient of the first steps, (STEPS, 2)."""
    steps = [engine.step(make_batch(n)) for n in range(STEPS)]
    return np.array([[float(step[name]) for name in ("loss", "grad_norm")] for step in steps])


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    """Return the metrics of the PyTorch trainer in float64 on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        torch.set_default_dtype(torch.float64)
        try:
            weights = jax.tree.map(lambda x: np.asarray(x, np.float64), perturbed_params(CONFIG))
            engine = TorchEngine(
                CONFIG,
                Recipe(batch_size=IMAGES),
                task="classes",
                learning_rate=lambda step: 1e-4,
                initial_weights=as_checkpoint(weights, CONFIG, "jax"),
                folder=Path("unused"),
            )
            return metrics(engine)
        finally:
            torch.set_default_dtype(torch.float32)


# Unit roundoffs are 6e-8 and 4e-3.  Rounding errors of four blocks, their gradients and five steps are about ten of them.
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.04)])
@pytest.mark.parametrize("engine", [JaxEngine, TorchEngine])
def test_the_first_steps_are_those_of_float64(engine: Any, dtype: Any, tolerance: float, expected: np.ndarray) -> None:
    np.testing.assert_allclose(metrics(make(engine, dtype=dtype)), expected, rtol=tolerance)


@pytest.mark.parametrize("remat", ["dots", "full"])
@pytest.mark.parametrize("engine", [JaxEngine, TorchEngine])
def test_rematerialization_does_not_change_the_steps(engine: Any, remat: Any) -> None:
    plain, other = (metrics(make(engine, remat=each)) for each in ("none", remat))
    np.testing.assert_allclose(other, plain, rtol=1e-5)


def test_a_step_in_pytorch_does_not_wait_for_the_host() -> None:
    """PyTorch raises where a call waits for the GPU."""
    engine = make(TorchEngine, dtype="bfloat16")
    float(engine.step(make_batch(0))["loss"])  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        for n in range(1, 3):
            engine.step(make_batch(n))
    finally:
        torch.cuda.set_sync_debug_mode("default")
