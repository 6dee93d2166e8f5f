"""What the compiled training step of `JaxEngine` contains on CPUs, at the real width and number of tokens of ViT-S/16."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("grain")

import vit_spec
from parity.checkpoints.weights import as_checkpoint
from train.jax import one_cpu
from train.jax.engine import JaxEngine
from train.jax.parameter_tree import tree
from train.recipes import Recipe

if jax.default_backend() != "cpu":
    pytest.skip("is about the program for CPUs", allow_module_level=True)

DEPTH, BATCH = 3, 2
CONFIG = vit_spec.get("vit_s16", depth=DEPTH, num_classes=10)
ZEROS = tree(CONFIG, lambda parameter: np.zeros([CONFIG.sizes.get(word, 1) for word in parameter.axes], np.float32))
START = as_checkpoint(ZEROS, CONFIG, "jax")  # zeros need no compilation
LOOP, STACKED = " while(", re.compile(rf"f32\[{DEPTH},{BATCH},")


def compiled_step(batch_size: int = BATCH, **changes: Any) -> Any:
    recipe = Recipe(batch_size=batch_size, **changes)
    engine: Any = JaxEngine(
        CONFIG, recipe, task="classes", learning_rate=lambda step: 1e-3, initial_weights=START, folder=Path("unused")
    )
    return engine.compiled_step


@pytest.fixture(scope="module")
def long_step() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_cpu, "LONG_STEP", 0)
        return compiled_step()


def test_long_steps_have_no_loop_and_no_stacked_activations(long_step: Any) -> None:
    assert LOOP not in long_step.as_text() and not STACKED.search(long_step.as_text())


def test_short_steps_have_a_loop_which_compiles_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_cpu, "LONG_STEP", 1e12)
    step = compiled_step().as_text()
    assert LOOP in step and STACKED.search(step)


def test_steps_that_compute_activations_again_have_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_cpu, "LONG_STEP", 0)
    assert LOOP in compiled_step(remat="full").as_text()


def test_memory_of_a_long_step_is_that_of_its_activations(long_step: Any) -> None:
    """Norms and activation functions are computed again, although the compiler sees both computations at once."""
    estimate = vit_spec.memory(CONFIG, fused_attention=False)
    gradient = 4 * vit_spec.count(CONFIG)
    assert long_step.memory_analysis().temp_size_in_bytes < 1.2 * (BATCH * estimate.activations + gradient)


def test_memory_of_a_large_batch_is_that_of_a_part_and_of_two_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_cpu, "LONG_STEP", 0)
    part, estimate = 8, vit_spec.memory(CONFIG, fused_attention=False)
    gradient, images = 4 * vit_spec.count(CONFIG), 4 * part * 3 * 224 * 224
    step = compiled_step(batch_size=4 * part)
    assert step.memory_analysis().temp_size_in_bytes < 1.2 * (part * estimate.activations + 2 * gradient + images)
    assert step.as_text().count(LOOP) == 1  # over the parts, not over the blocks


def test_a_step_updates_weights_and_moments_in_place(long_step: Any) -> None:
    weights = re.compile(rf"= f32\[{DEPTH},384,1536\]\S* copy\(")
    assert not weights.search(long_step.as_text())
    assert long_step.memory_analysis().alias_size_in_bytes >= 3 * 4 * vit_spec.count(CONFIG)


def test_gradients_of_biases_are_sums_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum of bfloat16 is several passes of reduce-window on CPUs, which took an eighth of a step."""
    monkeypatch.setattr(one_cpu, "LONG_STEP", 0)
    assert not re.search(r"f32\[1,\d+,(1536|384|3,6,64)\]\S* reduce-window", compiled_step(dtype="bfloat16").as_text())
