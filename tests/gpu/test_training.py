"""Both trainers on a GPU: the first steps are those of float64 on the CPU, and none of them waits for the host."""

from functools import cache
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

CONFIG = vit_spec.get("vit_s16", num_classes=10).replace(depth=2)
STEPS, IMAGES = 5, 16


def make_batch(seed: int) -> Batch:
    """Return a batch of random images and classes."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (IMAGES, *CONFIG.image_size, 3), np.uint8)
    return Batch(images, rng.integers(0, 10, IMAGES).astype(np.int32), np.arange(IMAGES), np.ones(IMAGES, bool))


@cache
def start_weights() -> Any:
    """Return the initial weights, float32.  The first call must be before torch's default dtype is changed."""
    return perturbed_params(CONFIG)


def make(engine: Any, weights_dtype: Any = np.float32, **changes: Any) -> Any:
    """Return an engine of the model, with the same weights each time.  changes: fields of the recipe."""
    weights = jax.tree.map(lambda leaf: np.asarray(leaf, weights_dtype), start_weights())
    return engine(
        CONFIG,
        Recipe(batch_size=IMAGES, **changes),
        task="classes",
        learning_rate=lambda step: 1e-4,
        initial_weights=as_checkpoint(weights, CONFIG, "jax"),
        folder=Path("unused"),
    )


def metrics(engine: Any) -> np.ndarray:
    """Return losses and norms of the gradient of the first steps, (STEPS, 2)."""
    steps = [engine.step(make_batch(n)) for n in range(STEPS)]
    return np.array([[float(step[name]) for name in ("loss", "grad_norm")] for step in steps])


@cache
def metrics_of(engine: Any, dtype: Any) -> np.ndarray:
    """Return the metrics of an engine without rematerialization.  Compilation takes most of the time of these tests."""
    return metrics(make(engine, dtype=dtype))


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    """Return the metrics of the PyTorch trainer in float64 on the CPU."""
    start_weights()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        torch.set_default_dtype(torch.float64)
        try:
            return metrics(make(TorchEngine, np.float64))
        finally:
            torch.set_default_dtype(torch.float32)


# Ten times the largest errors of these steps on a CPU, 1.8e-7 and 9.3e-4: kernels of GPUs add in other orders.  TF32 would
# make errors of its unit roundoff, 5e-4.
TOLERANCES = {"float32": 2e-6, "bfloat16": 0.009}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("engine", [JaxEngine, TorchEngine])
def test_the_first_steps_are_those_of_float64(engine: Any, dtype: Any, expected: np.ndarray) -> None:
    np.testing.assert_allclose(metrics_of(engine, dtype), expected, rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("remat", ["dots", "full"])
@pytest.mark.parametrize("engine", [JaxEngine, TorchEngine])
def test_rematerialization_does_not_change_the_steps(engine: Any, remat: Any) -> None:
    plain = metrics_of(engine, "float32")
    np.testing.assert_allclose(metrics(make(engine, remat=remat)), plain, rtol=TOLERANCES["float32"])


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
