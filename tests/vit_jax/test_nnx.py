"""`vit_jax.nnx`: the JAX twin as an NNX module computes, trains and converts as the linen module does."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp
import optax
from flax import nnx

import parity
import vit_jax
import vit_spec
from tests import ROOT
from tests.twins import random_images, small_config
from vit_spec import InputError, ViTConfig

PLAIN = small_config(vit_spec.get("vit_s16"))
RICH = small_config(vit_spec.get("dinov3_s16plus")).replace(head={"pool": "attention", "hidden": 6}, num_classes=5)
NOISY = PLAIN.replace(regularisation={"pos_drop": 0.1, "attn_drop": 0.2, "mlp_drop": 0.3, "drop_path": 0.4})
PAGE = ROOT / "docs" / "guides" / "train.md"

cached_params = cache(vit_jax.init)


@cache
def linen(config: ViTConfig) -> Any:
    """Return the compiled `apply` of the linen module."""
    return jax.jit(vit_jax.ViT(config).apply, static_argnames="train")


def linen_outputs(config: ViTConfig, params: Any, images: Any, **options: Any) -> Any:
    return linen(config)({"params": params}, images, **options)


@nnx.jit
def compiled(model: Any, images: Any) -> Any:
    return model(images)


def assert_equal_trees(given: Any, expected: Any) -> None:
    """Assert that two pytrees have the same structure, and leaves of the same dtypes and bits."""
    assert jax.tree.structure(given) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(given), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("config", [PLAIN, RICH, vit_spec.get("vit_ti16")], ids=["plain", "rich", "vit_ti16"])
def test_the_module_computes_the_logits_of_the_linen_module(config: ViTConfig) -> None:
    params, images = cached_params(config), random_images(config)
    np.testing.assert_array_equal(compiled(vit_jax.nnx(config, params), images), linen_outputs(config, params, images))


def train_linen(config: ViTConfig, params: Any, images: Any, labels: Any, tx: Any, keys: Any, steps: int) -> Any:
    """Return the parameters after some steps of linen's `apply` with optax, with a dropout key for each step."""

    @jax.jit
    def step(params: Any, state: Any, key: Any) -> Any:
        def loss(params: Any) -> Any:
            logits = vit_jax.ViT(config).apply({"params": params}, images, train=True, rngs={"dropout": key})
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        updates, state = tx.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(steps):
        params, state = step(params, state, keys())
    return params


def train_nnx(model: Any, images: Any, labels: Any, tx: Any, steps: int) -> None:
    """Train an NNX module in place."""
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any) -> None:
        def loss(model: Any) -> Any:
            return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

        optimizer.update(model, nnx.grad(loss)(model))

    model.train()
    for _ in range(steps):
        step(model, optimizer)
    model.eval()


@pytest.mark.parametrize("config", [NOISY, RICH], ids=["with-dropout", "rich"])
def test_steps_of_an_nnx_optimizer_equal_those_of_linen_and_optax(config: ViTConfig) -> None:
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), cached_params(config))
        images, labels = jnp.asarray(random_images(config), jnp.float64), jnp.array([1, 3])
        # The gradient of key biases is 0 up to rounding, which Adam with a smaller eps would amplify.
        tx, rngs = optax.adamw(1e-2, eps=1e-3, weight_decay=0.1), nnx.Rngs(dropout=7)
        expected = train_linen(config, params, images, labels, tx, nnx.Rngs(dropout=7).fork().dropout, steps=4)
        model = vit_jax.nnx(config, params, rngs=rngs)
        train_nnx(model, images, labels, tx, steps=4)
        trained = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        for path, leaf in jax.tree_util.tree_leaves_with_path(expected):
            found = trained
            for entry in path:
                found = found[entry.key]
            assert found.dtype == jnp.float64
            assert np.linalg.norm(found - leaf) <= 1e-12 * np.linalg.norm(leaf), path
        moved = jax.tree.map(lambda one, other: np.abs(one - other).max() > 1e-4, params, expected)
        assert all(jax.tree.leaves(moved))


def test_training_mode_draws_new_numbers_for_each_call() -> None:
    params, images = cached_params(PLAIN), random_images(PLAIN)
    model, keys = vit_jax.nnx(NOISY, params, rngs=nnx.Rngs(dropout=3)), nnx.Rngs(dropout=3).fork()
    model.train()
    for _ in range(2):
        expected = linen_outputs(NOISY, params, images, train=True, rngs={"dropout": keys.dropout()})
        np.testing.assert_array_equal(compiled(model, images), expected)
    model.eval()
    np.testing.assert_array_equal(compiled(model, images), linen_outputs(NOISY, params, images))


def test_the_argument_train_overrides_the_mode() -> None:
    model, images = vit_jax.nnx(NOISY, cached_params(PLAIN), rngs=nnx.Rngs(0)), random_images(PLAIN)
    assert not (model(images, train=True) == model(images)).all()
    model.train()
    np.testing.assert_array_equal(model(images, train=False), model(images, train=False))


def test_images_may_be_a_keyword_argument_in_either_mode() -> None:
    model, images = vit_jax.nnx(NOISY, cached_params(PLAIN), rngs=nnx.Rngs(dropout=0)), random_images(PLAIN)
    np.testing.assert_array_equal(model(images=images), model(images))
    model.train()
    assert not (model(images=images) == model(images=images)).all()


def test_a_module_that_contains_it_sets_its_mode() -> None:
    class Outer(nnx.Module):
        def __init__(self) -> None:
            self.backbone = vit_jax.nnx(NOISY, cached_params(PLAIN), rngs=nnx.Rngs(dropout=0))
            self.head = nnx.Linear(PLAIN.num_classes, 2, rngs=nnx.Rngs(0))

        def __call__(self, images: Any) -> Any:
            return self.head(self.backbone(images))

    model, images = Outer(), random_images(PLAIN)
    still = model(images)
    model.train()
    assert not (model(images) == model(images)).all()
    model.eval()
    np.testing.assert_array_equal(model(images), still)


def test_a_module_survives_split_and_merge() -> None:
    model = vit_jax.nnx(NOISY, cached_params(PLAIN), rngs=nnx.Rngs(dropout=0))
    model.train()
    expected = compiled(nnx.clone(model), images := random_images(PLAIN))
    graph, weights, rest = nnx.split(model, nnx.Param, ...)
    np.testing.assert_array_equal(compiled(nnx.merge(graph, weights, rest), images), expected)


def test_its_parameters_are_those_of_vit_jax() -> None:
    model = vit_jax.nnx(RICH, cached_params(RICH), rngs=nnx.Rngs(dropout=0))
    assert_equal_trees(nnx.to_pure_dict(nnx.state(model, nnx.Param)), cached_params(RICH))


STATES = {
    "parameters": lambda model: nnx.state(model, nnx.Param),
    "state with random numbers": nnx.state,
    "pure dict": lambda model: nnx.to_pure_dict(nnx.state(model, nnx.Param)),
    "pure dict with random numbers": lambda model: nnx.to_pure_dict(nnx.state(model)),
}


@pytest.mark.parametrize("kind", STATES)
def test_parity_converts_its_state(kind: str) -> None:
    pytest.importorskip("torch")
    params = cached_params(RICH)
    state = STATES[kind](vit_jax.nnx(RICH, params, rngs=nnx.Rngs(dropout=0)))
    state_dict = parity.to_torch(state, RICH)
    expected = parity.to_torch(params, RICH)
    assert state_dict.keys() == expected.keys()
    assert all((state_dict[key] == expected[key]).all() for key in expected)
    assert_equal_trees(nnx.to_pure_dict(nnx.state(vit_jax.nnx(RICH, parity.to_jax(state_dict, RICH)), nnx.Param)), params)


@pytest.mark.parametrize("kind", STATES)
def test_parity_reads_its_state_from_an_orbax_checkpoint(kind: str, tmp_path: Path) -> None:
    checkpointing = pytest.importorskip("orbax.checkpoint")
    params = cached_params(RICH)
    with checkpointing.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "saved", STATES[kind](vit_jax.nnx(RICH, params, rngs=nnx.Rngs(dropout=0))))
    given = {"num_heads": RICH.num_heads, "image_size": RICH.image_size, "positions.rotary": "dinov3"}
    checkpoint = parity.load(tmp_path / "saved", given=given)
    assert checkpoint.format == "jax"
    assert any("random number generators" in line for line in checkpoint.left) == ("random" in kind)
    assert_equal_trees(parity.to_jax(checkpoint), jax.tree.map(np.asarray, params))


def test_parity_names_the_state_that_it_needs_of_a_module() -> None:
    model = vit_jax.nnx(PLAIN, cached_params(PLAIN), rngs=nnx.Rngs(dropout=0))
    with pytest.raises(InputError, match=re.escape("nnx.state(model, nnx.Param)")):
        parity.to_torch(model, PLAIN)


def test_training_without_random_numbers_names_the_argument() -> None:
    model = vit_jax.nnx(NOISY, cached_params(PLAIN))
    model(random_images(PLAIN))
    with pytest.raises(InputError, match=re.escape("vit_jax.nnx(..., rngs=nnx.Rngs(dropout=SEED))")):
        model(random_images(PLAIN), train=True)


def without(params: Any, *names: str) -> Any:
    return {name: value for name, value in params.items() if name not in names}


INVALID_PARAMS = {
    "none": (lambda params: None, "params are a NoneType: give nested dictionaries"),
    "another depth": (
        lambda params: {**params, "blocks": jax.tree.map(lambda leaf: leaf[:1], params["blocks"])},
        "blocks/attn/proj/bias is (1, 16), expected",
    ),
    "missing": (lambda params: without(params, "head"), "head/bias is missing; head/kernel is missing."),
    "linen variables": (lambda params: {"params": params}, "; and "),
    "unexpected": (lambda params: {**params, "batch_stats": np.zeros(3)}, "batch_stats is unexpected"),
    "float64": (lambda params: jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params), "jax_enable_x64"),
}


@pytest.mark.parametrize("case", INVALID_PARAMS)
def test_wrong_parameters_are_an_error_of_one_line(case: str) -> None:
    change, expected = INVALID_PARAMS[case]
    with pytest.raises(InputError, match=re.escape(expected)) as raised:
        vit_jax.nnx(PLAIN, change(cached_params(PLAIN)))
    assert "\n" not in str(raised.value)


def test_numpy_parameters_are_not_changed_by_the_module() -> None:
    params = jax.tree.map(np.array, cached_params(PLAIN))
    before = jax.tree.map(np.copy, params)
    model = vit_jax.nnx(PLAIN, params)
    model.cls_token[...] = model.cls_token + 1
    train_nnx(model, random_images(PLAIN), jnp.array([1, 3]), optax.sgd(1.0), steps=1)
    assert_equal_trees(params, before)


def test_the_example_in_the_guide_runs() -> None:
    pytest.importorskip("torch")
    [example] = re.findall(r"```python\n(.*?)```", PAGE.read_text().partition("## Train with NNX")[2], re.DOTALL)
    found: dict[str, Any] = {"images": random_images(PLAIN), "labels": np.array([1, 3])}
    assert 'config = vit_spec.get("vit_s16", num_classes=10)' in example
    found["config"] = PLAIN
    exec(re.sub(r"^config = .*$", "", example, flags=re.MULTILINE), found)  # a smaller model than that of the page
    assert found["state_dict"].keys() == parity.to_torch(cached_params(PLAIN), PLAIN).keys()


def test_flax_nnx_is_imported_on_first_use() -> None:
    code = "import sys, vit_jax; before = 'flax.nnx' in sys.modules; vit_jax.nnx; print(before, 'flax.nnx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False True\n"
    with pytest.raises(AttributeError, match="module 'vit_jax' has no attribute 'nxn'"):
        vit_jax.__getattr__("nxn")
