"""`vit_jax.compile_forward`: the same outputs, without copies of the weights."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
flax = pytest.importorskip("flax")

import vit_jax
import vit_spec
from vit_jax.api import _forward_program

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


@cache
def noisy_params(config: vit_spec.ViTConfig) -> Any:
    random = np.random.default_rng(1)
    return jax.tree.map(lambda x: np.asarray(x + 0.1 * random.normal(size=x.shape), x.dtype), vit_jax.init(config))


def test_outputs_are_those_of_the_model_in_float64() -> None:
    params, images = noisy_params(SMALL), np.random.default_rng(0).normal(size=(2, 8, 12, 3))
    model = vit_jax.ViT(SMALL)
    with jax.enable_x64(True):
        doubles = jax.tree.map(lambda x: np.asarray(x, float), params)
        expected = jax.jit(model.apply)({"params": doubles}, images)
        # As `vit_jax.load` and as `vit_jax.init` return them, and as older versions of flax do.
        for given in (doubles, jax.device_put(doubles), flax.core.freeze(doubles)):
            found = vit_jax.compile_forward(model, given, batch_size=2)(images)
            assert found.dtype == np.float64
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13 * np.abs(expected).max())


def test_the_function_does_not_need_the_given_parameters_any_more() -> None:
    params, image = jax.device_put(noisy_params(SMALL)), np.ones((1, 8, 12, 3), np.float32)
    forward = vit_jax.compile_forward(vit_jax.ViT(SMALL), params, batch_size=1)
    before = np.asarray(forward(image))
    jax.tree.map(lambda leaf: leaf.delete(), params)  # as a training step does to which they are donated
    np.testing.assert_array_equal(forward(image), before)


def test_the_function_can_be_part_of_another_program() -> None:
    images = np.random.default_rng(0).normal(size=(2, 8, 12, 3)).astype(np.float32)
    forward = vit_jax.compile_forward(vit_jax.ViT(SMALL), noisy_params(SMALL), batch_size=10**6)  # has compiler options
    exported = jax.export.export(jax.jit(forward))(jax.ShapeDtypeStruct(images.shape, images.dtype))
    for found in (jax.jit(forward)(images), exported.call(images)):
        np.testing.assert_allclose(found, forward(images), rtol=0, atol=1e-5)


def assert_as_accurate(config: vit_spec.ViTConfig, dtype: str | None) -> None:
    """Assert that the error of the function is at most twice that of `jax.jit(model.apply)`, against float64."""
    params, images = noisy_params(config), np.random.default_rng(0).normal(size=(4, 8, 12, 3)).astype(np.float32)
    with jax.enable_x64(True):
        doubles = jax.tree.map(lambda x: np.asarray(x, float), params)
        exact = np.asarray(jax.jit(vit_jax.ViT(config).apply)({"params": doubles}, images.astype(float)))
    model = vit_jax.ViT(config, vit_jax.Execution(dtype=dtype))
    found = vit_jax.compile_forward(model, params, batch_size=4)(images)
    plain = jax.jit(model.apply)({"params": params}, images)
    assert found.dtype == plain.dtype == (dtype or "float32")
    errors = [float(np.linalg.norm(np.asarray(each, float) - exact)) for each in (found, plain)]
    assert 0 < errors[0] <= 2 * errors[1]


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_outputs_are_as_accurate_as_those_of_the_model_and_have_its_dtype(dtype: str | None) -> None:
    assert_as_accurate(SMALL, dtype)


@pytest.mark.parametrize("depth", [2, 5])
def test_parameters_of_another_depth_are_refused(depth: int) -> None:
    params = jax.eval_shape(lambda: vit_jax.init(CONFIG))
    with pytest.raises(ValueError, match="leading axis"):
        vit_jax.compile_forward(vit_jax.ViT(CONFIG.replace(depth=depth)), params, batch_size=1)


def test_the_weights_of_the_blocks_are_not_copied() -> None:
    shapes, images = jax.eval_shape(lambda: vit_jax.init(CONFIG)), np.zeros((1, 224, 224, 3), np.float32)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    program, own = _forward_program(vit_jax.ViT(CONFIG), params, batch_size=1)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params["blocks"]))
    assert program.lower(own, images).compile().memory_analysis().temp_size_in_bytes < weights / 4


def test_matrices_are_rounded_once_except_those_that_are_used_in_float32() -> None:
    config = SMALL.replace(positions={"rotary": "none", "relative": "mlp", "relative_dim": 8})
    model, params = vit_jax.ViT(config, vit_jax.Execution(dtype="bfloat16")), noisy_params(config)
    _, own = _forward_program(model, params, batch_size=1)
    dtypes = {jax.tree_util.keystr(path): leaf.dtype for path, leaf in jax.tree_util.tree_leaves_with_path(own)}
    kernels = {name for name in dtypes if "kernel" in name}
    in_float32 = {name for name in kernels if "rel_pos" in name}
    assert in_float32 and all(dtypes[name] == ("float32" if name in in_float32 else "bfloat16") for name in kernels)
    assert all(dtype == "float32" for name, dtype in dtypes.items() if name not in kernels)
    assert_as_accurate(config, "bfloat16")
