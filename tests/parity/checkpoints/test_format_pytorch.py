"""The formats of PyTorch libraries other than Hugging Face's, without these libraries: recognition and refusals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parity
from parity.checkpoints.conversion import converted_arrays
from parity.checkpoints.formats import get as get_format
from parity.checkpoints.formats import timm_config
from parity.checkpoints.formats.dinov3 import periods
from parity.checkpoints.weights import Checkpoint
from parity.checkpoints.writing import write
from vit_spec import InputError, ViTConfig, get

torch = pytest.importorskip("torch")


def small(name: str, **changes: Any) -> ViTConfig:
    """Return the config of a named model with small sizes and square images."""
    patch = get(name).patch_size[0]
    sizes = {"image_size": 3 * patch, "width": 16, "depth": 2, "num_heads": 2, "mlp_dim": 24}
    return get(name, **sizes).replace(**{"num_classes": min(get(name).num_classes, 5), **changes})


def random_arrays(config: ViTConfig, format: str, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Return random arrays for every key of a format, and its constants."""
    rng, layouts = np.random.default_rng(0), get_format("torch").layouts(config)
    arrays = {
        key: rng.normal(size=layout.shape(config.sizes)).astype(dtype)
        for layout in layouts.values()
        for key in layout.keys(config.sizes)
    }
    return dict(converted_arrays(Checkpoint(config, "torch", arrays), format))


def save_pth(tmp_path: Path, content: Any) -> Path:
    """Save arrays as tensors in a .pth file, and return its path."""
    torch.save(to_tensors(content), tmp_path / "theirs.pth")
    return tmp_path / "theirs.pth"


def to_tensors(content: Any) -> Any:
    """Return nested dictionaries with tensors instead of arrays."""
    if isinstance(content, dict):
        return {key: to_tensors(value) for key, value in content.items()}
    return torch.from_numpy(content) if isinstance(content, np.ndarray) else content


# Wrappers -----------------------------------------------------------------------------------------------------------

# Format -> name of a model that it can store.
FORMATS = {
    "timm:vit": "vit_b16",
    "timm:eva": "dinov3_b16",
    "dinov2:mlp": "dinov2_s14",
    "dinov2:swiglu": "dinov2_g14",
    "dinov3:mlp": "dinov3_s16",
    "dinov3:swiglu": "dinov3_s16plus",
    "deit:deit3": "deit3_s16",
    "torchvision:mlp": "vit_b16",
    "torchvision:legacy": "vit_b16",
    "openai-clip:clip": "clip_b32",
    "openai-clip:tower": "clip_b32",
    "tutorial": "vit_b16",
}
WRAPPERS = {
    "flat": lambda state: state,
    "model": lambda state: {"model": state, "epoch": 3},
    "state_dict": lambda state: {"state_dict": state, "optimizer": {"state": {}}},
    "module": lambda state: {f"module.{key}": value for key, value in state.items()},
    "compiled": lambda state: {f"_orig_mod.{key}": value for key, value in state.items()},
    "both": lambda state: {"state_dict": {f"module.{key}": value for key, value in state.items()}},
}


@pytest.mark.parametrize(
    ("format", "wrapper"),
    [*((format, "flat") for format in FORMATS), *(("timm:vit", wrapper) for wrapper in WRAPPERS if wrapper != "flat")],
)
def test_a_state_dict_in_a_wrapper_is_recognised(format: str, wrapper: str, tmp_path: Path) -> None:
    state = random_arrays(small(FORMATS[format]), format)
    found = parity.load(save_pth(tmp_path, WRAPPERS[wrapper](state)), given={"num_heads": 2})
    assert found.format == format
    assert all(np.array_equal(found.arrays[key], state[key]) for key in found.arrays)


def test_blocks_in_chunks_are_read_as_blocks(tmp_path: Path) -> None:
    config = small("dinov2_s14")
    state = random_arrays(config, "dinov2")
    chunked = {key.replace("blocks.0.", "blocks.0.0.").replace("blocks.1.", "blocks.1.1."): state[key] for key in state}
    found = parity.load(save_pth(tmp_path, chunked), given={"num_heads": 2})
    assert (found.format, found.config.depth) == ("dinov2:mlp", 2)
    assert np.array_equal(found.arrays["blocks.1.attn.qkv.weight"], state["blocks.1.attn.qkv.weight"])


@pytest.mark.parametrize("part", ["adapter.down.weight", "mlp.c_fc.lora_A", "ln_attn.weight", "attn.head_scale"])
def test_an_unknown_key_of_a_bare_image_tower_is_not_mistaken_for_the_text_tower(tmp_path: Path, part: str) -> None:
    key = f"transformer.resblocks.0.{part}"
    path = save_pth(tmp_path, {**random_arrays(small("clip_b32"), "openai-clip:tower"), key: np.ones(3, np.float32)})
    with pytest.raises(InputError, match=f"unexpected {key}|{key} belongs to an adapter"):
        parity.load(path, given={"num_heads": 2})


@pytest.mark.parametrize("key", ["decoder_head.weight", "decoder_conv.0.weight", "decoder_embed.2.weight"])
def test_a_decoder_that_is_not_that_of_mae_is_refused(tmp_path: Path, key: str) -> None:
    path = save_pth(tmp_path, {**random_arrays(small("vit_b16", num_classes=0), "timm"), key: np.ones(3, np.float32)})
    with pytest.raises(InputError, match=f"unexpected {key}"):
        parity.load(path, given={"num_heads": 2})


# DINOv3's constants -------------------------------------------------------------------------------------------------


def dinov3_file(tmp_path: Path, **arrays: np.ndarray | None) -> Path:
    """Write a DINOv3 file with some arrays replaced or left out, and return its path."""
    state = {
        **random_arrays(small("dinov3_s16"), "dinov3"),
        **{key.replace("__", "."): value for key, value in arrays.items()},
    }
    return save_pth(tmp_path, {key: value for key, value in state.items() if value is not None})


def test_periods_rounded_to_bfloat16_are_read_as_their_base(tmp_path: Path) -> None:
    rounded = torch.tensor(periods(100.0, 8)).bfloat16().float().numpy()
    found = parity.load(dinov3_file(tmp_path, rope_embed__periods=rounded))
    assert (found.config.positions.rotary_base, found.config.num_heads) == (100.0, 2)


def test_another_base_is_read_from_the_periods(tmp_path: Path) -> None:
    other = periods(37.0, 8).astype(np.float32)
    assert parity.load(dinov3_file(tmp_path, rope_embed__periods=other)).config.positions.rotary_base == 37.0


def test_periods_that_no_base_yields_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"rope_embed\.periods"):
        parity.load(dinov3_file(tmp_path, rope_embed__periods=np.array([0.5, 10.0], np.float32)))


@pytest.mark.parametrize(
    "mask", [None, np.ones(48, np.float32), np.full(48, np.nan, np.float32)], ids=["none", "ones", "not filled"]
)
def test_a_key_bias_that_is_not_masked_is_refused(tmp_path: Path, mask: np.ndarray | None) -> None:
    path = dinov3_file(tmp_path, blocks__1__attn__qkv__bias_mask=mask)
    with pytest.raises(InputError, match=r"attn\.qkv\.bias_mask"):
        parity.load(path)


def test_the_masked_part_of_the_bias_may_have_any_value(tmp_path: Path) -> None:
    bias = np.concatenate([np.ones(16), np.full(16, np.nan), np.full(16, 2.0)]).astype(np.float32)
    weights = parity.to_jax(parity.load(dinov3_file(tmp_path, blocks__0__attn__qkv__bias=bias)))["blocks"]["attn"]
    assert (weights["q_bias"][0] == 1).all() and (weights["v_bias"][0] == 2).all()


# Precision ----------------------------------------------------------------------------------------------------------


def test_half_precision_of_openais_files_is_kept(tmp_path: Path) -> None:
    state = random_arrays(small("clip_b32"), "openai-clip", np.float16)
    path = save_pth(tmp_path, {**state, "vocab_size": np.array(9)})
    parity.convert(path, tmp_path / "ours.safetensors", "jax", given={"num_heads": 2})
    parity.convert(tmp_path / "ours.safetensors", tmp_path / "back.safetensors", "openai-clip")
    back = parity.load(tmp_path / "back.safetensors").arrays
    assert all(back[key].dtype == np.float16 and np.array_equal(back[key], state[key]) for key in state)


def test_the_activation_of_openais_own_file_is_not_an_assumption(tmp_path: Path) -> None:
    state = {**random_arrays(small("clip_b32"), "openai-clip"), "vocab_size": np.array(9)}
    found = parity.load(save_pth(tmp_path, state), given={"num_heads": 2})
    assert "mlp.activation" not in {each.field for each in found.assumed}


# Old versions of timm -----------------------------------------------------------------------------------------------


def test_a_hidden_layer_of_old_timm_is_read(tmp_path: Path) -> None:
    config = small("vit_b16", head={"hidden": 7})
    found = parity.load(save_pth(tmp_path, random_arrays(config, "timm:legacy")), given={"num_heads": 2})
    assert (found.format, found.config.head.hidden) == ("timm:legacy", 7)


def test_a_hidden_layer_that_timm_would_ignore_is_not_written(tmp_path: Path) -> None:
    config = small("vit_b16", head={"hidden": 7})
    checkpoint = Checkpoint(config, "torch", random_arrays(config, "torch"))
    with pytest.raises(InputError, match=r"no key for pre_logits\.weight"):
        write(checkpoint, tmp_path / "weights.safetensors", "timm")


def test_a_model_that_timm_cannot_express_is_read_as_the_twins_format(tmp_path: Path) -> None:
    config = small("vit_b16", norms={"after_pool": True}, head={"hidden": 7})
    found = parity.load(save_pth(tmp_path, random_arrays(config, "torch")), given={"num_heads": 2, "head.pool": "mean"})
    assert found.format == "torch"


# Configs that a format cannot store ---------------------------------------------------------------------------------

UNSUPPORTED = [
    ("dino", "dino_s16", {"num_classes": 5}, "num_classes=5"),
    ("dino", "dino_s16", {"tokens": {"registers": 2}}, "reg_token"),
    ("dino", "dino_s16", {"mlp": {"activation": "swiglu"}}, "mlp.activation='swiglu'"),
    ("dino", "dino_s16", {"attention": {"qkv_bias": "none"}}, "attention.qkv_bias='none'"),
    ("dino", "dino_s16", {"attention": {"head_dim": 4}}, "attention.head_dim=4"),
    ("dinov2", "dinov2_s14", {"tokens": {"registers": 2}}, "positions.covers='all'"),
    ("dinov2", "dinov2_s14_reg4", {}, "positions.covers='none'"),
    ("dinov2", "dinov2_s14", {"num_classes": 5}, "num_classes=5"),
    ("dinov3", "dinov3_s16", {"positions": {"rotary": "none"}}, "positions.rotary='none'"),
    ("dinov3", "dinov3_s16", {"attention": {"qkv_bias": "qkv"}}, "attention.qkv_bias='qkv'"),
    ("dinov3", "dinov3_s16", {"head": {"pool": "mean"}}, "head.pool='mean'"),
    ("mae", "mae_b16", {"head": {"pool": "mean"}}, "head.pool='mean'"),
    ("mae", "mae_b16", {"positions": {"covers": "none"}}, "positions.covers='none'"),
    ("deit", "deit_s16", {"positions": {"covers": "none"}}, "positions.covers='none'"),
    ("deit", "deit3_s16", {"positions": {"covers": "all"}}, "positions.covers='all'"),
    ("torchvision", "vit_b16", {"image_size": (32, 48)}, "image_size=(32, 48)"),
    ("torchvision", "vit_b16", {"in_channels": 1}, "in_channels=1"),
    ("torchvision", "vit_b16", {"tokens": {"registers": 2}}, "reg_token"),
    ("torchvision", "siglip_b16", {}, "tokens.class_token=False"),
    ("torchvision", "vit_b16", {"attention": {"qk_norm": True}}, "attention.qk_norm=True"),
    ("openai-clip", "vit_b16", {}, "tokens.patch_bias=True"),
    ("openai-clip", "clip_b32", {"head": {"bias": True}}, "head.bias=True"),
    ("lucidrains", "vit_b16", {}, "attention.qkv_bias='qkv'"),
    ("tutorial", "vit_b16", {"norms": {"layer_scale": 1e-5}}, "norms.layer_scale=1e-05"),
    ("tutorial", "vit_b16", {"positions": {"rotary": "axial"}}, "positions.rotary='axial'"),
]


@pytest.mark.parametrize(("format", "name", "changes", "what"), UNSUPPORTED)
def test_a_config_that_the_format_cannot_store_is_refused_by_field(
    format: str, name: str, changes: dict[str, Any], what: str
) -> None:
    with pytest.raises(InputError) as error:
        get_format(format).layouts(small(name, **changes))
    assert what in str(error.value)


SPLIT_GATE: dict[str, Any] = {"mlp": {"activation": "swiglu", "bias": False}, "attention": {"proj_bias": False}}


def test_an_eps_is_a_remedy_only_if_timm_has_it_with_norms_of_the_same_kind() -> None:
    for changes, end in ({"norms": {"eps": 1e-12}}, "or set norms.eps=1e-06"), (SPLIT_GATE, "instead of a folder"):
        with pytest.raises(InputError, match=f"cannot express norms.eps=.* {end}$"):
            timm_config.json_files(small("vit_b16", **changes))


def test_an_eps_that_readers_of_the_format_do_not_expect_is_remarked(tmp_path: Path) -> None:
    config = small("vit_b16", norms={"eps": 1e-12})
    written = write(Checkpoint(config, "torch", random_arrays(config, "torch")), tmp_path / "w.safetensors", "torchvision")
    assert any("norms.eps=1e-12" in line for line in written.remarks)
