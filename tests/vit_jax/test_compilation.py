"""The options with which programs of the JAX twin are fast."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import vit_jax
import vit_spec
from vit_jax import compilation

CONFIG = vit_spec.get("vit_s16", num_classes=10, depth=2)  # real widths: XLA leaves small products to other libraries
BATCH = 8


@pytest.fixture(autouse=True)
def cpu() -> Iterator[None]:
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "FEWEST_FLOPS", 0)  # two blocks have few
    if not compilation.has_onednn():
        pytest.skip("this XLA has no oneDNN")


def test_large_batches_of_large_models_are_computed_by_onednn(large: None) -> None:
    deep = vit_spec.get("vit_s16", num_classes=10)
    assert vit_jax.compiler_options(deep, 8) == compilation.ONEDNN
    assert vit_jax.compiler_options(deep, 4) is None


def test_small_models_have_the_default_options() -> None:
    assert vit_jax.compiler_options(vit_spec.get("vit_s16", num_classes=10, image_size=(32, 32), width=96), 128) is None


def test_outputs_and_gradients_with_onednn_differ_by_rounding_alone_and_are_the_same_in_each_run(large: None) -> None:
    params, model = vit_jax.init(CONFIG), vit_jax.ViT(CONFIG, vit_jax.Execution(precision="highest"))
    images = np.random.default_rng(0).normal(size=(BATCH, 224, 224, 3))

    def loss(params: Any, images: Any) -> Any:
        outputs: Any = model.apply({"params": params}, images)
        return (outputs**2).mean(), outputs

    def run(dtype: str, options: Any) -> list[np.ndarray]:
        cast = jax.tree.map(lambda x: np.asarray(x, dtype), (params, images))
        program = jax.jit(jax.grad(loss, has_aux=True), compiler_options=options).lower(*cast).compile()
        assert ("__onednn_fusion" in program.as_text()) == (options is not None)
        return [np.asarray(leaf) for leaf in jax.tree.leaves(program(*cast))]

    def errors(found: list[np.ndarray]) -> np.ndarray:
        pairs = zip(found, exact, strict=True)
        return np.array([np.linalg.norm(a.astype(float) - b) / np.linalg.norm(b) for a, b in pairs if b.size > 1])

    with jax.enable_x64(True):
        exact = run("float64", None)
    default = run("float32", None)
    with_onednn, again = (run("float32", vit_jax.compiler_options(CONFIG, BATCH)) for _ in range(2))
    assert all(np.array_equal(one, other) for one, other in zip(with_onednn, again, strict=True))
    # Another order of the same sums: as far as the twins may part, see `parity.comparison.training.trajectories`.
    assert np.all(errors(with_onednn) < 3 * np.maximum(errors(default), 1e-6))


def test_other_devices_have_the_default_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "default_device", lambda: SimpleNamespace(platform="gpu"))
    assert vit_jax.compiler_options(vit_spec.get("vit_b16"), 256) is None


def test_versions_that_do_not_know_the_options_have_the_default_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "ONEDNN", {"xla_cpu_no_such_option": True})
    compilation.has_onednn.cache_clear()
    try:
        assert vit_jax.compiler_options(vit_spec.get("vit_b16"), 256) is None
    finally:
        compilation.has_onednn.cache_clear()
