"""The format of Equimo compared with its own Equinox class, from the installed package."""

import functools
import importlib.metadata
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
jax, eqx = pytest.importorskip("jax"), pytest.importorskip("equinox")
vit, checkpointing = pytest.importorskip("equimo.models.vit"), pytest.importorskip("orbax.checkpoint")
from equimo import io as equimo_io
from equimo.layers import attention, posemb
from safetensors.numpy import load_file, save_file

import parity
from tests import ROOT
from tests.goldens.golden import noise
from tests.goldens.peers import rng_for
from tests.peers.jax_libraries import assert_gradients, draw, float64
from tests.peers.proof import prove
from vit_spec import InputError

PEER = f"equimo {importlib.metadata.version('equimo')}"
GUIDE = ROOT / "docs" / "guides" / "convert.md"
EXACT_PERIODS = {"strategy": "period", "base": 100.0, "periods_dtype": np.float64, "dtype": np.float64}
SIZES: dict[str, Any] = {
    "img_size": 12,
    "in_channels": 3,
    "dim": 24,
    "patch_size": 4,
    "num_heads": 3,
    "depths": [2],
    "mlp_ratio": 1.5,
    "reg_tokens": 0,
    "num_classes": 5,
    "eps": 1e-5,
}
ROTARY = {
    "use_global_pos_embed": False,
    "use_local_pos_embed": True,
    "local_pos_embed_config_patch": EXACT_PERIODS,
    "reg_tokens": 4,
    "init_values": 1e-5,
    "act_layer": "exactgelu",
    "use_mask_token": True,
    "dynamic_img_size": True,
    "num_classes": 0,
}
DINOV2 = {"reg_tokens": 4, "init_values": 1e-5, "act_layer": "exactgelu", "eps": 1e-6, "use_mask_token": True}
PLAIN: dict[str, Any] = {"norms.eps": 1e-5, "num_heads": 3}
SMALL: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # name -> format, arguments, fields that are given
    "vit": ("mlp", {}, PLAIN),
    "vit_token": ("mlp", {"global_pool": "token"}, {**PLAIN, "head.pool": "token"}),
    "no_biases": ("mlp", {"qkv_bias": False, "proj_bias": False, "qk_norm": True}, PLAIN),
    "siglip": (
        "mlp",
        {"class_token": False, "global_pos_embed_cls": False, "num_classes": 0, "eps": 1e-6},
        {"num_heads": 3},
    ),
    "patches_only": ("mlp", {"global_pos_embed_cls": False}, {**PLAIN, "image_size": (12, 12)}),
    "dinov2": ("mlp", DINOV2, {"num_heads": 3}),
    "dinov2_fused": ("swiglufused", {**DINOV2, "ffn_layer": "swiglufused", "global_pos_embed_reg": True}, {"num_heads": 3}),
    "dinov3": ("mlp", ROTARY, {"image_size": (12, 20)}),
    "dinov3_gated": (
        "swiglu",
        {**ROTARY, "ffn_layer": "swiglu", "untie_global_and_local_cls_norm": True},
        {"image_size": (12, 20)},
    ),
}
BUILDERS = {  # published sizes
    "vit_small_patch16_224": ("mlp", vit.vit_small_patch16_224, {}),
    "dinov3_vits16": (
        "mlp",
        functools.partial(vit.dinov3_vits16_pretrain_lvd1689m, local_pos_embed_config_patch=EXACT_PERIODS),
        {"image_size": (224, 224)},
    ),
}


def is_array(leaf: Any) -> bool:
    """Return whether a leaf is an array, or the shape of one."""
    return eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)


def named(model: Any) -> dict[str, Any]:
    """Return the arrays of a module by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(model, is_array))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def with_arrays(model: Any, arrays: dict[str, Any]) -> Any:
    """Return a module with other arrays."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: arrays.get(jax.tree_util.keystr(path, simple=True, separator="/"), leaf), model
    )


@functools.cache
def model(name: str) -> Any:
    """Return a module with random weights in float64; rotary periods stay as the module computes them."""
    with float64(attention, posemb):
        small = functools.partial(vit.VisionTransformer, **SIZES, key=jax.random.key(0))
        build = BUILDERS[name][1] if name in BUILDERS else functools.partial(small, **SMALL[name][1])
        empty, kept = eqx.filter_eval_shape(build), "local_pos_embed/patch_rope/freqs"  # without drawing weights
        rng, shapes = rng_for(name), {key: leaf.shape for key, leaf in named(empty).items()}
        drawn = {key: draw(rng, key, shape, kernels_first=False) for key, shape in shapes.items() if key != kept}
        arrays = {key: jax.numpy.asarray(value) for key, value in drawn.items()}
        if kept in shapes:
            arrays[kept] = eqx.filter_jit(lambda: named(build())[kept])()  # compiles the periods alone
        return with_arrays(empty, arrays)


@eqx.filter_jit
def run(module: Any, images: Any) -> Any:
    return jax.vmap(lambda image: module(image, key=jax.random.key(0), inference=True))(images)


def outputs(name: str, x: np.ndarray) -> np.ndarray:
    with float64(attention, posemb):
        return np.asarray(run(model(name), x))


def images(name: str, given: dict[str, Any]) -> np.ndarray:
    count, default = (2, (12, 12)) if name in SMALL else (1, (224, 224))
    return noise(rng_for(name), (count, 3, *given.get("image_size", default)), 1.0)


def save(name: str, path: Path) -> Path:
    """Save the named arrays of a module in float64."""
    with float64():
        save_file({key: np.ascontiguousarray(leaf) for key, leaf in named(model(name)).items()}, path)
    return path


@pytest.mark.parametrize("name", SMALL)
def test_the_twins_compute_the_outputs_and_gradients_of_equimo(name: str, tmp_path: Path) -> None:
    variant, _, given = SMALL[name]
    x = images(name, given)
    expected = outputs(name, x)
    path = save(name, tmp_path / "theirs.safetensors")
    checkpoint = prove(path, x, expected, format=f"equimo:{variant}", peer=PEER, given=given)
    direction = noise(rng_for(f"direction {name}"), expected.shape, 1.0)
    with float64(attention, posemb):
        gradients = named(eqx.filter_jit(eqx.filter_grad(lambda model: (run(model, x) * direction).sum()))(model(name)))
    assert_gradients(checkpoint, x, direction, {key: np.asarray(leaf) for key, leaf in gradients.items()})


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILDERS)
def test_the_twins_compute_the_outputs_of_the_published_sizes(name: str, tmp_path: Path) -> None:
    variant, _, given = BUILDERS[name]
    x = images(name, given)
    prove(save(name, tmp_path / "x.safetensors"), x, outputs(name, x), format=f"equimo:{variant}", peer=PEER, given=given)


def test_the_twins_resample_positions_as_equimo_does(tmp_path: Path) -> None:
    with float64(attention, posemb):
        build = functools.partial(vit.VisionTransformer, **SIZES, dynamic_img_size=True, key=jax.random.key(0))
        larger = eqx.filter_eval_shape(build)
        x = noise(rng_for("larger"), (2, 3, 20, 24), 1.0)
        expected = np.asarray(run(with_arrays(larger, named(model("vit"))), x))
    path = save("vit", tmp_path / "theirs.safetensors")
    prove(path, x, expected, format="equimo:mlp", peer=PEER, given=PLAIN)


@pytest.mark.parametrize("name", ["vit", "dinov3_gated"])
def test_orbax_checkpoints_of_the_arrays_have_the_same_weights(name: str, tmp_path: Path) -> None:
    given = SMALL[name][2]
    with float64(), checkpointing.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "theirs", eqx.filter(model(name), eqx.is_array))
    found = parity.load(tmp_path / "theirs", given=given)
    expected = parity.load(save(name, tmp_path / "theirs.safetensors"), given=given)
    assert found.format == expected.format and found.config == expected.config
    theirs, ours = parity.to_torch(expected), parity.to_torch(found)
    assert theirs.keys() == ours.keys() and all((theirs[key] == ours[key]).all() for key in theirs)


@pytest.mark.parametrize("name", SMALL)
def test_equimo_computes_the_same_bits_with_a_written_file(name: str, tmp_path: Path) -> None:
    variant, _, given = SMALL[name]
    parity.convert(save(name, tmp_path / "theirs.safetensors"), tmp_path / "ours.safetensors", "jax", given=given)
    parity.convert(tmp_path / "ours.safetensors", tmp_path / "back.safetensors", f"equimo:{variant}")
    written, x = load_file(tmp_path / "back.safetensors"), images(name, given)
    with float64(attention, posemb):
        assert named(model(name)).keys() - written.keys() <= {"mask_token", "local_cls_norm/weight", "local_cls_norm/bias"}
        arrays = {key: jax.numpy.asarray(value) for key, value in written.items() if "freqs" not in key}
        np.testing.assert_array_equal(run(with_arrays(model(name), arrays), x), outputs(name, x))


def test_rounded_periods_are_read_as_exact_ones_and_reported(tmp_path: Path) -> None:
    defaults = {"dim": 192, "local_pos_embed_config_patch": {"strategy": "period", "base": 100.0}}
    published = vit.VisionTransformer(**{**SIZES, **ROTARY, **defaults}, key=jax.random.key(0))
    save_file({key: np.asarray(leaf) for key, leaf in named(published).items()}, tmp_path / "theirs.safetensors")
    checkpoint = parity.load(tmp_path / "theirs.safetensors", given={"image_size": (12, 12)})
    assert checkpoint.config.positions.rotary_base == 100.0 and checkpoint.config.num_heads == 3
    assert "bfloat16" in {each.field: each.value for each in checkpoint.assumed}["rotary periods"]


def test_files_without_names_are_refused_with_what_to_do(tmp_path: Path) -> None:
    equimo_io.save_model(tmp_path / "theirs", model("vit"), {}, compression=True)
    equimo_io.save_model(tmp_path / "folder", model("vit"), {}, compression=False)
    for path in ("theirs.tar.lz4", "folder", "folder/weights.eqx"):
        with pytest.raises(InputError, match=r"without names.*tree_leaves_with_path") as raised:
            parity.load(tmp_path / path)
        assert "\n" not in str(raised.value)


def test_the_example_in_the_guide_names_the_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_example, load_example = re.findall(
        r"```python\n(.*?)```", GUIDE.read_text().partition("## Equinox")[2], re.DOTALL
    )[:2]
    source = {"model": vit.VisionTransformer(**SIZES, key=jax.random.key(0))}
    exec(save_example, source)
    assert parity.load("equimo.safetensors", given=PLAIN).format == "equimo:mlp"
    target = {"model": vit.VisionTransformer(**SIZES, key=jax.random.key(1))}
    exec(load_example, target)
    assert all((leaf == named(source["model"])[key]).all() for key, leaf in named(target["model"]).items())
