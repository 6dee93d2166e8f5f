"""`vit_jax.compile_forward`: the same outputs, without copies of the weights."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import vit_jax
import vit_spec
from tests.twins import perturbed_params

CONFIG = vit_spec.get("vit_s16", depth=3, num_classes=10)  # the real width
SMALL = CONFIG.replace(
    image_size=(8, 12),
    patch_size=4,
    width=32,
    num_heads=4,
    mlp_dim=48,
    norms={"layer_scale": 1e-5},
    positions={"rotary": "dinov3"},
)


@pytest.fixture(autouse=True)
def cpu() -> Iterator[None]:
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def test_outputs_are_those_of_the_model_in_float64() -> None:
    params, images = perturbed_params(SMALL), np.random.default_rng(0).normal(size=(2, 8, 12, 3))
    model = vit_jax.ViT(SMALL)
    with jax.enable_x64(True):
        doubles = jax.tree.map(lambda x: np.asarray(x, float), params)
        expected = model.apply({"params": doubles}, images)
        for given in (doubles, jax.device_put(doubles)):  # as `vit_jax.load` and as `vit_jax.init` return them
            found = vit_jax.compile_forward(model, given, batch_size=2)(images)
            assert found.dtype == np.float64
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13 * np.abs(expected).max())


def test_the_function_does_not_need_the_given_parameters_any_more() -> None:
    params, image = vit_jax.init(SMALL), np.ones((1, 8, 12, 3), np.float32)
    expected = np.asarray(vit_jax.ViT(SMALL).apply({"params": params}, image))
    forward = vit_jax.compile_forward(vit_jax.ViT(SMALL), params, batch_size=1)
    jax.tree.map(lambda leaf: leaf.delete(), params)  # as a training step does to which they are donated
    np.testing.assert_allclose(forward(image), expected, rtol=0, atol=1e-6)


def test_execution_options_of_the_model_are_kept() -> None:
    model = vit_jax.ViT(SMALL, vit_jax.Execution(dtype="bfloat16", remat="full", unroll=3))
    logits = vit_jax.compile_forward(model, perturbed_params(SMALL), batch_size=1)(np.zeros((1, 8, 12, 3), np.float32))
    assert logits.dtype == "bfloat16"


def test_no_weights_are_copied() -> None:
    params, images = vit_jax.init(CONFIG), np.zeros((1, 224, 224, 3), np.float32)
    forward: Any = vit_jax.compile_forward(vit_jax.ViT(CONFIG), params, batch_size=1)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params["blocks"]))

    def temporary(program: Any, *arguments: Any) -> int:
        return int(program.lower(*arguments).compile().memory_analysis().temp_size_in_bytes)

    plain = jax.jit(vit_jax.ViT(CONFIG, vit_jax.Execution(unroll=CONFIG.depth)).apply)
    assert temporary(plain, {"params": params}, images) > size
    assert temporary(forward.func, *forward.args, images) < size / 4
