"""`parity.derive_table` with Flax classes of strangers."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("flax")

import jax.numpy as jnp
from flax import linen

import parity
import vit_jax
from parity.checkpoints.format_file import parse_format
from parity.checkpoints.formats import registered
from parity.comparison.own_model import DerivedTable, derive_table
from parity.comparison.own_model.construct import build
from parity.comparison.own_model.derive import _make_model
from parity.comparison.own_model.images import image_shapes
from parity.comparison.own_model.model import ImageShape
from parity.comparison.own_model.proof import random_weights
from parity.comparison.tolerances import FLOAT64_TOLERANCE, ErrorNorms
from vit_spec import InputError

MODULE, MORE = "tests.strangers.flax_models", "tests.strangers.more_flax_models"
ROTARY = f"{MORE}:Attending(rotary=True, gated=True)"
# Fields of the classes that are refused: without them, each hypothesis compiles a twin.  The impostors of test_own_model.py
# are refused although none of these fields is given.
SHARED: dict[str, Any] = {"image_size": (16, 24), "norms.eps": 1e-6}


def derived(like: str, folder: Path, extra: dict[str, Any] | None = None, **options: Any) -> tuple[DerivedTable, Any]:
    """Return the table of a class and its model, with noise on the weights of the checkpoint."""
    like = like if ":" in like else f"{MODULE}:{like}"
    model = _make_model(build(like))
    assert model.fit(ImageShape(16, 24, 3, True)) == ""
    rng = np.random.default_rng(0)
    arrays = {
        key: (array + 0.1 * rng.standard_normal(array.shape)).astype(np.float32) for key, array in model.weights.items()
    }
    stored = {f"params/{key}": array for key, array in arrays.items()} | model.constants | (extra or {})
    np.savez(folder / "theirs.npz", **stored)
    model.weights = arrays
    return derive_table(like, folder / "theirs.npz", **options), model


STRANGERS = {
    "Compact": [
        "layer{block}/MultiHeadDotProductAttention_0/{qkv}/kernel | width head dim",
        "set: mlp.activation=gelu_tanh",
    ],
    "Scanned": ["blocks/qkv/kernel | block width qkv head dim", "project/kernel | (ph pw rgb) width", "fc_norm"],
    "Buffered": ["set: positions.table=sincos_2d_mae", "constant: constants/table"],
    "Nnx": [
        "blocks/{block}/attn/{qkv}/kernel",
        "positions/embedding",
        "set: mlp.activation=silu",
        "ignore: blocks/\\d+/dropout/rngs/count the state of a random number generator",
    ],
    f"{MORE}:BigVision": [
        "attn_pool.kv.weight | MAPHead_0/MultiHeadDotProductAttention_0/{kv}/kernel | width pool_head pool_dim",
        "words: kv = key value",
        "set: head.pool_heads=2",
        "set: head.pool_prefix=True",
    ],
    f"{MORE}:NnxPlain": ["blocks/{block}/attn/{qkv}/kernel | width head dim", "set: mlp.activation=gelu_tanh"],
    ROTARY: [
        "set: positions.rotary=eva",
        "set: positions.rotary_grid=None",
        "blocks.mlp.fc1.weight[glu=0] | block{block}/up/kernel | width (ff glu=1)",
    ],
}
# Tests of PyTorch classes find these fields.
GIVEN: dict[str, dict[str, Any]] = {
    "Scanned": {"image_size": (16, 24), "norms.eps": 1e-5},
    ROTARY: {"norms.eps": 1e-6, "positions.rotary_base": 10000.0, "positions.rotary_start": 0.0},
}


@pytest.mark.parametrize("like", STRANGERS)
def test_the_table_of_a_flax_class_is_found_and_proven(like: str, tmp_path: Path) -> None:
    # States of random number generators are not read.
    generator = {"params/blocks/0/dropout/rngs/count": np.zeros((1,), np.uint32)} if like == "Nnx" else {}
    table, model = derived(like, tmp_path, generator, given=GIVEN.get(like))
    assert table.proof.largest <= FLOAT64_TOLERANCE
    text = re.sub(" +", " ", table.text)
    assert [line for line in STRANGERS[like] if line not in text] == [], table.text
    parity.write(table.checkpoint, tmp_path / "ours.safetensors", "jax")
    with pytest.warns(parity.AssumptionWarning, match="pixels.mean"):
        twin, params = vit_jax.load(tmp_path / "ours.safetensors")
    assert {each.field.partition(".")[0] for each in table.checkpoint.assumed} <= {"pixels", "resampling"}
    images = np.random.default_rng(7).standard_normal((2, 16, 24, 3))
    expected = model.run(model.weights, images)
    found = jax.jit(twin.apply)({"params": params}, jnp.asarray(images, jnp.float32))
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-3, atol=1e-3)
    format = parse_format(table.text, "table.txt")
    with registered(format):
        parity.convert(tmp_path / "ours.safetensors", tmp_path / "back.npz", format.name)
    with np.load(tmp_path / "back.npz") as back:
        assert all(np.array_equal(back[key], array) for key, array in model.weights.items())


def test_a_class_is_read_alike_where_the_caller_has_disabled_jit(tmp_path: Path) -> None:
    """JAX_DISABLE_JIT=1 and `jax.disable_jit` unroll scans: a trace would have an operation for each block."""
    model = _make_model(build(f"{MODULE}:Scanned"))
    assert model.fit(ImageShape(16, 24, 3, True)) == ""
    weights, images = random_weights(model.weights, 0), np.random.default_rng(0).standard_normal((2, 16, 24, 3))
    order = model.trace(weights, images).order
    with jax.disable_jit():
        assert model.trace(weights, images).order == order


def test_rounding_errors_of_gradients_are_measured() -> None:
    """Perturbed operations change outputs and gradients, also those within a scan, by little where nothing cancels."""

    class Repeated(linen.Module):
        @linen.compact
        def __call__(self, images: Any) -> Any:
            weight = self.param("weight", linen.initializers.normal(), (4, 4))
            x = images.reshape(len(images), 4)
            return jax.lax.scan(lambda x, _: (jax.nn.softmax(x @ weight), None), x, length=2)[0]

    model = _make_model(build(Repeated()))
    assert model.fit(ImageShape(2, 2, 1, True)) == ""
    weights, images = random_weights(model.weights, 0), np.random.default_rng(0).standard_normal((2, 2, 2, 1))
    target = np.eye(2, 4)
    (output, gradients), (other, others) = (
        model.gradients(weights, images, target),
        model.perturbed_gradients(weights, images, target, 0),
    )
    assert others.keys() == gradients.keys()
    for first, second in ((output, other), (gradients["weight"], others["weight"])):
        assert 1e-16 < ErrorNorms.of(second, first).relative_rms() < 1e-13


def test_a_table_of_positions_gives_the_size_of_images() -> None:
    """As of a linen class that makes its positions for the images that initialize it; an MLP has longer weights."""
    shapes = {"patches": (8, 8, 3, 48), "positions": (1, 17, 48), "up": (48, 200), "down": (200, 48)}
    assert next(iter(image_shapes([], shapes, {}, True))) == ImageShape(32, 32, 3, True)


def test_the_size_of_images_with_the_fewest_other_shapes_is_named(tmp_path: Path) -> None:
    """Sizes for a table with a row for a class token are tried first, and this class has none."""
    model = _make_model(build(f"{MODULE}:Resizable"))
    assert model.fit(ImageShape(32, 64, 3, True)) == ""
    np.savez(tmp_path / "theirs.npz", **model.weights | {"head/bias": np.zeros(9)})
    with pytest.raises(InputError, match=r"for images of 32x64, .* 1 of another shape: head/bias \(9,\), in the class"):
        derive_table(f"{MODULE}:Resizable", tmp_path / "theirs.npz", given={"in_channels": 3})


def test_a_flax_class_that_is_no_vit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no config of ViTConfig computes the same function"):
        derived("Reversed", tmp_path, given={**SHARED, "positions.kind": "none"})


def test_a_softmax_that_is_always_in_float32_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"1 hypothesis tried.*computes an array .* in float32; .*jax.nn.dot_product_attention"
    ):
        derived(f"{MORE}:Attending(fused=True)", tmp_path, given={**SHARED, "positions.kind": "learned"})


def test_a_changed_constant_of_a_collection_is_refused(tmp_path: Path) -> None:
    changed = {"constants/table": np.ones((12, 48))}
    with pytest.raises(InputError, match="constants/table of the checkpoint is not a parameter"):
        derived("Buffered", tmp_path, extra=changed, given={"image_size": (16, 24)})


def test_a_collection_that_the_checkpoint_lacks_is_an_assumption(tmp_path: Path) -> None:
    model = _make_model(build(f"{MODULE}:Buffered"))
    assert model.fit(ImageShape(16, 24, 3, True)) == ""
    np.savez(tmp_path / "theirs.npz", **{f"params/{key}": array for key, array in random_weights(model.weights, 0).items()})
    table = derive_table(f"{MODULE}:Buffered", tmp_path / "theirs.npz", given={"image_size": (16, 24)})
    (found,) = (each for each in table.checkpoint.assumed if each.why == "the checkpoint lacks them")
    assert found.field == "values of a newly built model" and found.value == "constants/table"


def test_a_table_of_positions_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    given = {**SHARED, "norms.eps": 1e-5, "positions.kind": "fixed", "positions.table": "sincos_2d_mae"}
    with pytest.raises(InputError, match=r"pooling, classifier. differ by"):
        derived("Buffered(factor=2.0)", tmp_path, given=given)
