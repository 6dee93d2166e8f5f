"""timm's NaFlexVit compared with timm: the twins compute its outputs from its folders, and it opens written folders."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

for package in ("torch", "torchvision", "timm", "jax"):
    if importlib.util.find_spec(package) is None:  # tests.goldens.peers must import torchvision first
        pytest.skip(f"needs {package}", allow_module_level=True)

from tests.goldens.peers import fill, float64, rng_for  # noqa: I001  # first: it makes torchvision importable
import timm
import torch
from timm.models import list_models, save_for_hf

import parity
from parity.checkpoints.formats import timm_arguments
from parity.checkpoints.formats.timm_naflex import FORMAT, json_files
from tests.goldens.golden import noise
from tests.peers.proof import prove, prove_gradients, record_block_outputs, relrms, torch_logits
from vit_spec import InputError, get

PEER = f"timm {timm.__version__}"
SMALL = {"patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 3, "mlp_ratio": 1.5, "num_classes": 5}
SMALL |= {"pos_embed_grid_size": (3, 5)}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gap": ("naflexvit_base_patch16_gap", {}),
    "par": ("naflexvit_base_patch16_par_gap", {"patch_size": (4, 8), "in_chans": 5}),
    "parfac": ("naflexvit_base_patch16_parfac_gap", {"pos_embed_grid_size": (4, 4)}),
    "factorized": ("naflexvit_base_patch16_gap", {"pos_embed": "factorized", "class_token": True, "global_pool": "token"}),
    "map": ("naflexvit_base_patch16_map", {"attn_pool_num_heads": 4, "pool_include_prefix": True}),
    "siglip": ("naflexvit_base_patch16_siglip", {"num_classes": 0}),
    "no_qkv_bias": ("naflexvit_so150m2_patch16_reg1_gap", {"qk_norm": True}),
    "radio": ("naflexvit_base_patch16_radio_v3", {"num_classes": 0}),
    "clip": ("naflexvit_base_patch16_gap", {"pre_norm": True, "act_layer": "quick_gelu", "fc_norm": False}),
    "sub_norms": (
        "naflexvit_base_patch16_gap",
        {"scale_mlp_norm": True, "scale_attn_inner_norm": True, "norm_layer": "rmsnorm", "embed_norm_layer": "rmsnorm"},
    ),
    "every_token": ("naflexvit_base_patch16_gap", {"global_pool": "", "pos_embed": "none", "final_norm": False}),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, np.ndarray, np.ndarray, list[np.ndarray]]]:
    """For each case the folder that timm wrote, images, and timm's logits and block outputs for them, in float64."""
    found = {}
    for name, (architecture, options) in CASES.items():
        path, rng, arguments = tmp_path_factory.mktemp(name), rng_for(f"naflex {name}"), {**SMALL, **options}
        with float64():
            model = timm.create_model(architecture, **arguments).eval()
            fill(model, rng)
            size = [n * side for n, side in zip(arguments["pos_embed_grid_size"], model.embeds.patch_size, strict=True)]
            images = noise(rng, (2, model.in_chans, *size), 1.0)
            with record_block_outputs(model, 2) as hidden:
                logits = model(torch.tensor(images)).numpy()
            save_for_hf(model, path, safe_serialization=True, model_args=arguments)
        found[name] = path, images, logits, hidden
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_twins_compute_timms_outputs_from_its_folder(saved: Any, name: str) -> None:
    path, images, logits, hidden = saved[name]
    given = {"image_size": images.shape[2:]} if name == "every_token" else None  # no table shows the size
    prove(path, images, logits, format="timm-naflex", peer=PEER, hidden=hidden, given=given)


@pytest.mark.parametrize("name", CASES)
def test_timm_opens_a_written_folder_and_computes_the_same_bits(saved: Any, name: str, tmp_path: Path) -> None:
    path, images, logits, _ = saved[name]
    parity.convert(path, tmp_path / "ours.safetensors", "jax")
    parity.convert(tmp_path / "ours.safetensors", f"{tmp_path / 'back'}/", "timm-naflex")
    with float64():
        model = timm.create_model(f"local-dir:{tmp_path / 'back'}", pretrained=True).eval()
        assert np.array_equal(model(torch.tensor(images)).numpy(), logits)


def test_the_order_of_channels_in_a_patch_is_an_assumption_without_config_json(tmp_path: Path) -> None:
    with float64():
        arguments = {"depth": 1, "embed_dim": 16, "num_heads": 2, "pos_embed_grid_size": (2, 2), "patch_size": 4}
        model = timm.create_model("naflexvit_base_patch16_gap", patchify_channels_last=False, **arguments).eval()
        fill(model, rng_for("channels first"))
        images = noise(rng_for("images"), (2, 3, 8, 8), 1.0)
        logits = model(torch.tensor(images)).numpy()
    torch.save(model.state_dict(), tmp_path / "bare.pth")
    checkpoint = parity.load(tmp_path / "bare.pth", given={"num_heads": 2})
    assert relrms(torch_logits(checkpoint, images), logits) > 1e-2
    found = {each.field: each.value for each in checkpoint.assumed}
    assert found["patch extraction"].endswith("; the channels of a pixel are adjacent")


@pytest.mark.parametrize("name", ["gap", "parfac", "map", "sub_norms"])
def test_the_gradients_of_the_twins_are_those_of_timm(saved: Any, name: str) -> None:
    path, images, _, _ = saved[name]
    with float64():
        model = timm.create_model(f"local-dir:{path}", pretrained=True).eval()
    prove_gradients(parity.load(path), images, model)


@pytest.mark.parametrize("size", [(7, 4), (2, 9), (3, 8)])
@pytest.mark.parametrize("name", ["gap", "par", "parfac", "factorized", "siglip", "radio"])
def test_positions_are_resized_as_timm_does(saved: Any, name: str, size: tuple[int, int]) -> None:
    path, images, _, _ = saved[name]
    checkpoint = parity.load(path)
    pixels = [n * side for n, side in zip(size, checkpoint.config.patch_size, strict=True)]
    images = noise(rng_for(f"{name} {size}"), (1, images.shape[1], *pixels), 1.0)
    with float64():
        model = timm.create_model(f"local-dir:{path}", pretrained=True).eval()
        logits = model(torch.tensor(images)).numpy()
    assert relrms(torch_logits(checkpoint, images), logits) < 1e-6  # timm resizes in float32


def test_every_architecture_is_read_or_refused_by_name() -> None:
    refused = {}
    for name in list_models(module="naflexvit"):
        with torch.device("meta"):
            model = timm.create_model(name)
        assert type(model).__name__ == "NaFlexVit"
        config = {"architecture": name, "pretrained_cfg": json.loads(json.dumps(timm.get_pretrained_cfg(name).to_dict()))}
        try:
            found = timm_arguments.config_fields(config, 3)
        except InputError as error:
            refused[name] = str(error)
            continue
        assert (found["width"], found["patch_size"]) == (model.embed_dim, tuple(model.embeds.patch_size))
        assert found["positions.factorized"] == (model.embeds.pos_embed_y is not None)
        assert found["resampling.square"] == model.embeds.pos_embed_ar_preserving
    assert refused == {}


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"rope_type": "axial"}, "rope_type='axial'"),
        ({"embed_proj_type": "conv"}, "embed_proj_type='conv'"),
        ({"patchify_channels_last": False}, "patchify_channels_last=False"),
        ({"swiglu_mlp": True}, "swiglu_mlp=True"),
        ({"attn_gated": True}, "attn_gated=True"),
        ({"global_pool": "avgmax"}, "global_pool='avgmax'"),
        ({"block_fn": "ParallelScalingBlock"}, "block_fn"),
        ({"next_year": 1}, "next_year"),
        ({"pos_embed": "factorized", "pos_embed_ar_preserving": True}, "pos_embed_ar_preserving=True"),
    ],
)
def test_a_config_json_of_another_function_is_refused_by_name(
    saved: Any, tmp_path: Path, arguments: dict[str, Any], names: str
) -> None:
    path, *_ = saved["gap"]
    config = json.loads((path / "config.json").read_text())
    config["model_args"] |= arguments
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    with pytest.raises(InputError, match=names):
        parity.load(tmp_path)


@pytest.mark.parametrize(("architecture", "of"), [("vit_base_patch16_224", "gap"), ("naflexvit_base_patch16_gap", "plain")])
def test_a_config_json_of_the_other_class_is_refused(saved: Any, tmp_path: Path, architecture: str, of: str) -> None:
    path, *_ = saved["gap"]
    config = json.loads((path / "config.json").read_text())
    if of == "plain":
        with float64():
            plain = timm.create_model("vit_base_patch16_224", img_size=16, patch_size=4, embed_dim=12, depth=2, num_heads=3)
        save_for_hf(plain, tmp_path, safe_serialization=True)
    else:
        (tmp_path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes())
        config |= {"model_args": {}, "global_pool": "token"}
    (tmp_path / "config.json").write_text(json.dumps({**config, "architecture": architecture}))
    with pytest.raises(InputError, match=r"NaFlexVit"):
        parity.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"positions": {"covers": "all"}}, "positions.covers='all'"),
        ({"positions": {"covers": "none", "rotary": "axial"}}, "positions.rotary"),
        ({"mlp": {"activation": "swiglu"}}, "mlp.activation"),
        ({"tokens": {"patch_bias": False}}, "tokens.patch_bias=False"),
        ({"norms": {"after_pool": True}}, "norms.after_blocks=True with norms.after_pool"),
        ({"positions": {"covers": "none", "factorized": True}}, "positions.factorized=True with resampling 'bicubic'"),
        ({"attention": {"qkv_bias": "qv"}}, "attention.qkv_bias"),
    ],
)
def test_a_config_that_the_class_cannot_express_is_refused_by_field(changes: dict[str, Any], names: str) -> None:
    with pytest.raises(InputError, match=names):
        FORMAT.layouts(get("vit_ti16", **{"positions": {"covers": "none"}, **changes}))


def test_an_eps_that_json_cannot_express_is_refused_for_a_folder() -> None:
    with pytest.raises(InputError, match=r"norms\.eps=1e-12"):
        json_files(get("naflex_b16", norms={"eps": 1e-12}))
