"""timm's format compared with timm: the twins compute its outputs from its folders, and it opens folders written here."""

import argparse
import functools
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
from timm.layers import GELUTanh, QuickGELU, RmsNorm
from timm.models import save_for_hf

import parity
from benchmarks.timm_architectures import TABLE, table
from parity.checkpoints import write_target
from parity.checkpoints.formats import timm_arguments, timm_config
from parity.checkpoints.formats.timm import FORMAT
from parity.checkpoints.writing import write
from tests.goldens.golden import noise
from parity.comparison.tolerances import FLOAT64_TOLERANCE
from tests.peers.proof import record_block_outputs, prove, relrms, torch_logits
import vit_torch
from vit_spec import InputError, ViTConfig, get

PEER = f"timm {timm.__version__}"
SMALL = {
    "img_size": (12, 20),
    "patch_size": 4,
    "embed_dim": 12,
    "depth": 2,
    "num_heads": 3,
    "mlp_ratio": 1.5,
    "num_classes": 5,
}
ROTARY = {**SMALL, "embed_dim": 16, "num_heads": 2}

MAP = {"global_pool": "map", "qk_norm": True, "class_token": False, "num_reg_tokens": 0}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("vit_base_patch16_224", {}),
    "rectangles": ("vit_base_patch16_224", {"img_size": (8, 24), "patch_size": (4, 8), "in_chans": 5}),
    "features": ("vit_base_patch16_224", {"num_classes": 0}),
    "distilled": ("deit_base_distilled_patch16_224", {}),
    "deit3": ("deit3_base_patch16_224", {}),
    "dinov2": ("vit_base_patch14_dinov2", {}),
    "dinov2_reg": ("vit_base_patch14_reg4_dinov2", {"reg_tokens": 2, "num_classes": 0}),
    "dinov2_giant": ("vit_giant_patch14_reg4_dinov2", {"reg_tokens": 2, "mlp_ratio": 3}),
    "fc_norm": ("vit_base_patch16_224", {"global_pool": "avg"}),
    "fc_norm_of_token": ("vit_base_patch16_224", {"fc_norm": True}),
    "gap": ("vit_base_patch16_gap_224", {}),
    "reg_gap": ("vit_base_patch16_reg4_gap_256", {"reg_tokens": 2}),
    "reg_map": ("vit_so150m_patch16_reg4_map_256", {"reg_tokens": 2}),
    "clip": ("vit_base_patch16_clip_224", {}),
    "clip_quickgelu": ("vit_base_patch16_clip_quickgelu_224", {}),
    "siglip": ("vit_base_patch16_siglip_224", {"num_classes": 0}),
    "siglip_tanh": ("vit_so400m_patch16_siglip_256", {"num_classes": 0}),
    "siglip_gap": ("vit_base_patch16_siglip_gap_224", {"num_classes": 0}),
    "every_token": ("vit_base_patch16_224", {"global_pool": "", "pos_embed": "none", "act_layer": "relu"}),
    "qk_norm": ("vit_base_patch16_224", {"qk_norm": True, "qkv_bias": False, "class_token": False, "global_pool": "avg"}),
    "no_final_norm": ("vit_base_patch16_224", {"final_norm": False, "act_layer": "identity"}),
    "eva": ("eva_giant_patch14_224", {"init_values": 0.1}),
    "rope_none": ("vit_small_patch16_rope_ape_224", {"use_rot_pos_emb": False}),
    "dinov3": ("vit_base_patch16_dinov3", ROTARY),
    "dinov3_qkvb": ("vit_base_patch16_dinov3_qkvb", {**ROTARY, "global_pool": "token", "num_classes": 0}),
    "dinov3_plus": ("vit_small_plus_patch16_dinov3_qkvb", {**ROTARY, "global_pool": "token"}),
    "dinov3_map": ("vit_base_patch16_dinov3", {**ROTARY, **MAP}),
    "eva02": ("eva02_base_patch14_224", {**ROTARY, "ref_feat_shape": (2, 7)}),
    "eva02_clip": ("eva02_base_patch16_clip_224", ROTARY),
    "eva02_packed": ("eva02_tiny_patch14_224", ROTARY),
    "eva02_enormous": ("eva02_enormous_patch14_clip_224", {}),
    "pe_core": ("vit_pe_core_base_patch16_224", {**ROTARY, "attn_pool_num_heads": 4, "attn_pool_mlp_ratio": 1.5}),
    "pe_lang": ("vit_pe_lang_large_patch14_448", {**ROTARY, "num_classes": 0}),
    "pe_spatial": ("vit_pe_spatial_base_patch16_512", {**ROTARY, "num_classes": 0}),
    "rope": ("vit_small_patch16_rope_224", ROTARY),
    "rope_ape": ("vit_small_patch16_rope_ape_224", ROTARY),
    "rope_mixed": ("vit_small_patch16_rope_mixed_224", ROTARY),
    "rope_mixed_ape": ("vit_small_patch16_rope_mixed_ape_224", ROTARY),
    "rope_reg_gap": ("vit_medium_patch16_rope_reg1_gap_256", ROTARY),
    "sapiens2": ("vit_base_patch16_sapiens2", {**ROTARY, "num_kv_heads": (2, 2)}),
    "rms": ("test_vit4", {}),
    "pooled_prefix": ("test_vit3", {}),
    "beit3": ("beit3_base_patch16_224", {}),
    "res_post": ("vit_base_patch16_rpn_224", {}),
    "parallel": ("vit_pwee_patch16_reg1_gap_256", {}),
    "parallel_rms": ("vit_base_patch16_xp_224", {}),
    "aimv2": ("aimv2_large_patch14_224", {}),
    "no_biases": ("vit_base_patch16_224", {"proj_bias": False, "act_layer": "silu", "embed_norm_layer": "layernorm"}),
    "beit": ("beit_base_patch16_224", {}),
    "beit_no_scale": ("beitv2_base_patch16_224", {"init_values": None, "global_pool": "token", "qkv_bias": False}),
    "beit_shared": ("beit_base_patch16_224", {"use_rel_pos_bias": False, "use_shared_rel_pos_bias": True}),
    "beit_absolute": ("beit_base_patch16_224", {"use_abs_pos_emb": True, "swiglu_mlp": True, "scale_mlp": True}),
    "beit_not_relative": ("beit_base_patch16_224", {"use_abs_pos_emb": True, "use_rel_pos_bias": False}),
    "relative": ("vit_relpos_small_patch16_224", {}),
    "relative_prefix": ("vit_relpos_medium_patch16_cls_224", {"rel_pos_dim": 9, "qk_norm": True, "qkv_bias": True}),
    "relative_clsgap": ("vit_relpos_base_patch16_clsgap_224", {"rel_pos_dim": 9, "init_values": None}),
    "relative_shared": ("vit_srelpos_small_patch16_224", {"rel_pos_dim": 9, "global_pool": ""}),
    "relative_res_post": ("vit_relpos_base_patch16_rpn_224", {"rel_pos_dim": 9}),
    "relative_table": ("vit_relpos_base_patch16_cls_224", {"rel_pos_type": "bias"}),
    "relative_table_shared": ("vit_srelpos_medium_patch16_224", {"rel_pos_type": "bias", "num_classes": 0}),
    "mish": ("vit_base_patch16_224", {"act_layer": "mish"}),
    "cropped": ("vit_base_patch16_224", {"img_size": (14, 22)}),
}

# The variant of each case whose keys are not those of the plain `VisionTransformer`.
VARIANTS = {
    **dict.fromkeys(("eva", "rope_none", "eva02_enormous"), "eva"),
    **{name: "eva" for name in CASES if name.startswith(("dinov3", "pe_", "rope", "beit_")) or name == "beit"},
    **dict.fromkeys(("eva02", "eva02_clip"), "eva-split-qkv"),
    "eva02_packed": "eva-packed-gate",
    "sapiens2": "eva-split-qkv-packed-gate",
    "parallel": "parallel",
    "parallel_rms": "parallel-no-qkv-bias",
    "aimv2": "vit-split-gate",
}


HIDDEN: dict[str, list[np.ndarray]] = {}  # case -> the outputs of its blocks


@functools.cache
def saved_by_timm(folder: Path, name: str) -> tuple[Path, np.ndarray, np.ndarray]:
    """Return a folder that timm wrote, images, and timm's logits for them, all in float64."""
    architecture, options = CASES[name]
    rng = rng_for(name)
    with float64():
        model = timm.create_model(architecture, **{**SMALL, **options}).eval()
        fill(model, rng)
        images = noise(rng, (2, model.in_chans, *model.patch_embed.img_size), 1.0)
        with record_block_outputs(model, 2) as HIDDEN[name]:
            logits = model(torch.tensor(images)).numpy()
        save_for_hf(model, folder / name, safe_serialization=True)
    return folder / name, images, logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("timm")


@pytest.mark.parametrize("name", CASES)
def test_the_twins_compute_timms_outputs_and_gradients_from_its_folder(folder: Path, name: str) -> None:
    path, images, logits = saved_by_timm(folder, name)
    with float64():
        model = timm.create_model(f"local-dir:{path}", pretrained=True).eval()
    format = f"timm:{VARIANTS.get(name, 'vit')}"
    prove(path, images, logits, format=format, peer=PEER, hidden=HIDDEN[name], model=model)


@pytest.mark.parametrize("name", CASES)
def test_timm_opens_a_written_folder_and_computes_the_same_bits(folder: Path, name: str, tmp_path: Path) -> None:
    path, images, logits = saved_by_timm(folder, name)
    parity.convert(path, tmp_path / "ours.safetensors", "jax")
    parity.convert(tmp_path / "ours.safetensors", f"{tmp_path / 'back'}/", "timm")
    with float64():
        model = timm.create_model(f"local-dir:{tmp_path / 'back'}", pretrained=True).eval()
        assert np.array_equal(model(torch.tensor(images)).numpy(), logits)


@pytest.mark.parametrize("name", ["plain", "distilled", "reg_map", "dinov2_giant", "dinov3_plus"])
def test_a_written_state_dict_has_exactly_timms_keys(folder: Path, name: str, tmp_path: Path) -> None:
    path, _, _ = saved_by_timm(folder, name)
    parity.convert(path, tmp_path / "ours.npz", "jax")
    parity.convert(tmp_path / "ours.npz", tmp_path / "back.pth", "timm")
    architecture, options = CASES[name]
    model = timm.create_model(architecture, **{**SMALL, **options}).double()
    model.load_state_dict(torch.load(tmp_path / "back.pth", weights_only=True), strict=True)


# config.json --------------------------------------------------------------------------------------------------------


def rotary(model: torch.nn.Module) -> str:
    """Return the kind of rotary positions of a model of timm, as in `ViTConfig`."""
    rope = getattr(model, "rope", None)
    if rope is None:
        return "none"
    kinds = {"RotaryEmbeddingDinoV3": "dinov3", "RotaryEmbeddingMixed": "mixed"}
    return kinds.get(type(rope).__name__) or {"ij": "eva", "xy": "rope_vit"}[rope.grid_indexing]


def config_fields(name: str) -> dict[str, Any] | None:
    """Return the config fields that parity reads for an architecture; None if it is refused."""
    data = json.loads(json.dumps(timm.get_pretrained_cfg(name).to_dict()))
    try:
        config = {"architecture": name, "pretrained_cfg": data}
        return {**timm_arguments.config_fields(config, 3), **timm_arguments.changed_fields({"config.json": config})}
    except InputError:
        return None


MODULES = ("vision_transformer", "deit", "eva", "beit", "vision_transformer_relpos")
NAMES = sorted({name for module in MODULES for name in timm.list_models(module=module)})
VITS = [name for name in NAMES if config_fields(name)]


def test_most_architectures_are_read() -> None:
    assert len(VITS) > 190


def test_the_recorded_architectures_are_those_of_timm() -> None:
    assert table() == json.loads(TABLE.read_text()), "python -m benchmarks.timm_architectures --write"


@pytest.mark.parametrize("part", range(8))
def test_the_fields_of_each_architecture_are_those_of_timms_model(part: int) -> None:
    activations = {torch.nn.GELU: "gelu", GELUTanh: "gelu_tanh", QuickGELU: "quick_gelu", torch.nn.SiLU: "swiglu"}
    pools = {"token": "token", "avg": "mean", "map": "attention"}
    orders = {"Block": "pre", "EvaBlock": "pre", "ResPostBlock": "res_post", "EvaBlockPostNorm": "res_post"}
    orders |= {"ParallelScalingBlock": "parallel", "RelPosBlock": "pre", "ResPostRelPosBlock": "res_post"}
    for name in VITS[part::8]:
        heads = {"num_kv_heads": (12,)} if "sapiens2" in name else {}
        model = timm.create_model(name, depth=1, device="meta", **heads)
        [block], norms = model.blocks, (torch.nn.LayerNorm, RmsNorm)
        parallel, act = hasattr(block, "in_norm"), next(m for m in model.blocks.modules() if type(m) in activations)
        positions = getattr(model, "pos_embed", None)
        prefixed = positions is not None and model.num_prefix_tokens > 0
        expected = {
            "image_size": model.patch_embed.img_size,
            "patch_size": model.patch_embed.patch_size,
            "width": model.embed_dim,
            "num_heads": getattr(block, "attn", block).num_heads,
            "mlp_dim": (block.mlp_out_proj if parallel else block.mlp.fc2).in_features,
            "norms.eps": (block.in_norm if parallel else block.norm1).eps,
            "norms.kind": "rms" if isinstance(block.in_norm if parallel else block.norm1, RmsNorm) else "layer",
            "norms.order": orders[type(block).__name__],
            "norms.before_blocks": isinstance(getattr(model, "norm_pre", None), norms),
            "norms.after_blocks": isinstance(model.norm, norms),
            "norms.after_pool": isinstance(model.fc_norm, norms),
            "head.pool": pools[model.global_pool],
            "mlp.activation": activations[type(act)],
            "tokens.registers": 0
            if model.num_prefix_tokens == 0 or "distilled" in name
            else model.reg_token.shape[1]
            if getattr(model, "reg_token", None) is not None
            else 0,
            "positions.kind": "none" if positions is None else "learned",
            "positions.rotary": rotary(model),
        }
        if prefixed:
            expected["positions.covers"] = "none" if model.no_embed_class else "all"
        found = config_fields(name)
        assert found and {key: found.get(key) for key in expected} == expected, name


@pytest.mark.parametrize(
    ("architecture", "arguments", "names"),
    [
        ("resnet50", {}, "resnet50"),
        ("vit_small_patch16_18x2_224", {}, "block_fn='ParallelThingsBlock'"),
        ("vit_base_patch16_224", {"norm_layer": "simplenorm"}, "norm_layer"),
        ("vit_base_patch16_224", {"norm_layer": "rmsnorm"}, "norms.bias=False, but its tensors show True"),
        ("vit_base_patch16_224", {"act_layer": "hard_mish"}, "act_layer"),
        ("vit_base_patch16_224", {"global_pool": "avgmax"}, "global_pool"),
        ("vit_base_patch16_224", {"act_layer": "gelu_10"}, "act_layer"),
        ("vit_base_patch16_224", {"an_argument_of_next_year": 1}, "an_argument_of_next_year"),
        ("vit_large_patch16_sapiens2", {}, "num_kv_heads"),
        ("vit_base_patch16_of_next_year", {}, "no ViT of timm 1.0.31"),
    ],
)
def test_a_config_json_of_another_function_is_refused_by_name(
    folder: Path, tmp_path: Path, architecture: str, arguments: dict[str, Any], names: str
) -> None:
    path, _, _ = saved_by_timm(folder, "plain")
    config = json.loads((path / "config.json").read_text())
    config["architecture"] = architecture
    config["model_args"] |= arguments
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    with pytest.raises(InputError, match=names):
        parity.load(tmp_path)


@pytest.mark.parametrize("arguments", [{"use_rot_pos_emb": False}, {"rope_type": "dinov3", "rope_rotate_half": True}])
def test_rotary_positions_in_config_json_replace_those_of_other_models_with_a_norm_before_the_blocks(
    tmp_path: Path, arguments: dict[str, Any]
) -> None:
    """Such a norm is a sign of a Perception Encoder, which counts rows and columns from 1."""
    options = {**ROTARY, "use_pre_transformer_norm": True, "use_rot_pos_emb": True, **arguments}
    with float64():
        model = timm.create_model("eva02_tiny_patch14_224", **options).eval()
        fill(model, rng_for("norm before"))
        images = noise(rng_for("images"), (2, 3, *SMALL["img_size"]), 1.0)
        logits = model(torch.tensor(images)).numpy()
        save_for_hf(model, tmp_path, safe_serialization=True)
    assert relrms(torch_logits(parity.load(tmp_path), images), logits) < FLOAT64_TOLERANCE


def test_a_bare_file_of_mixed_rotary_positions_is_read_with_a_norm_before_the_blocks(tmp_path: Path) -> None:
    options = {"use_pre_transformer_norm": True, "use_rot_pos_emb": True, "rope_type": "mixed", "rope_grid_indexing": "xy"}
    with float64():
        model = timm.create_model("eva02_tiny_patch14_224", **{**ROTARY, **options}).eval()
        fill(model, rng_for("norm before"))
        images = noise(rng_for("images"), (2, 3, *SMALL["img_size"]), 1.0)
        logits = model(torch.tensor(images)).numpy()
    torch.save(model.state_dict(), tmp_path / "eva.pth")
    checkpoint = parity.load(tmp_path / "eva.pth", given={"image_size": SMALL["img_size"], "num_heads": 2})
    assert relrms(torch_logits(checkpoint, images), logits) < FLOAT64_TOLERANCE


# Checkpoints of train.py ----------------------------------------------------------------------------------------------

TRAIN_PY = {"eval_metric": "top1", "checkpoint_hist": 10, "recovery_interval": 0, "train_interpolation": "random"}


@pytest.mark.parametrize(
    ("architecture", "pool", "arguments"),
    [
        ("vit_base_patch16_lingbot", "avg", {}),
        ("vit_base_patch16_lingbot", None, {}),
        ("vit_base_patch16_siglip_224", "avg", {}),
        ("vit_medium_patch16_gap_256", None, {"fc_norm": None}),
        ("vit_medium_patch16_gap_256", "token", {"class_token": True}),
        ("vit_base_patch16_gap_224", "", {}),
        ("vit_base_patch16_224", "", {}),
        ("deit3_base_patch16_224", "avg", {"fc_norm": False}),
        ("eva_large_patch14_196", "token", {"patch_size": 14, "img_size": 56}),
        ("eva_giant_patch14_clip_224", "avg", {"patch_size": 14, "img_size": 56}),
        ("eva_giant_patch14_clip_224", "", {"patch_size": 14, "img_size": 56}),
    ],
)
def test_gp_of_train_py_overrides_the_pooling_of_the_architecture(
    tmp_path: Path, architecture: str, pool: str | None, arguments: dict[str, Any]
) -> None:
    """An empty gp is no pooling.  create_model drops arguments that are None, so they leave the architecture's own."""
    arguments = {"img_size": 64, "patch_size": 16, "embed_dim": 192, "depth": 2, "num_heads": 3, **arguments}
    passed = {"global_pool": pool, **arguments} if pool is not None else arguments
    with float64():
        model = timm.create_model(architecture, num_classes=7, **passed).eval()
        fill(model, rng_for(f"{architecture} {pool}"))
        images = noise(rng_for(architecture), (2, 3, *model.patch_embed.img_size), 1.0)
        logits = model(torch.tensor(images)).numpy()
    args = argparse.Namespace(**TRAIN_PY, model=architecture, gp=pool, model_kwargs=arguments, num_classes=7, img_size=None)
    content = {"arch": architecture, "state_dict": model.state_dict(), "args": args, "epoch": 3, "version": 2}
    torch.save(content, tmp_path / "model_best.pth.tar")
    found = parity.load(tmp_path / "model_best.pth.tar")
    assert {each.field for each in found.assumed} <= {"pixels.mean", "pixels.std", "image_size"}
    ours = torch_logits(found, images)
    assert ours.shape == logits.shape and relrms(ours, logits) < FLOAT64_TOLERANCE


@pytest.mark.parametrize("architecture", ["vit_base_patch16_radio_v3", "vit_large_patch16_radio_v3"])
def test_positions_of_radio_are_resampled_as_timm_does(tmp_path: Path, architecture: str) -> None:
    """timm aligns the corners for C-RADIOv3's base and huge models, and not for its large one."""
    arguments = {"img_size": 64, "embed_dim": 192, "depth": 1, "num_heads": 3}
    model = timm.create_model(architecture, num_classes=7, **arguments)
    with torch.no_grad():
        fill(model, rng_for(architecture))
    save_for_hf(model, tmp_path / "timm", model_config={"model_args": arguments, "num_classes": 7})
    larger = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True, img_size=112)
    with pytest.warns(parity.SurgeryWarning):
        ours = vit_torch.load(tmp_path / "timm", image_size=112).pos_embed.detach().numpy()
    assert relrms(ours, larger.state_dict()["pos_embed"].numpy()) < 1e-6  # timm resamples in float32


# Written folders ----------------------------------------------------------------------------------------------------


def test_timm_computes_every_hidden_width_from_the_written_mlp_ratio() -> None:
    wrong = []
    for mlp_dim in range(1, 60):
        config = get("vit_s16", width=57, num_heads=3, mlp_dim=mlp_dim)
        arguments = timm_config.json_files(config)["config.json"]["model_args"]
        if int(arguments["embed_dim"] * arguments["mlp_ratio"]) != mlp_dim:
            wrong.append(mlp_dim)
    assert not wrong


@pytest.mark.parametrize("eps", [1e-6, 1e-5])
@pytest.mark.parametrize("name", ["vit_ti16", "dinov3_s16"])
def test_a_written_folder_states_eps(tmp_path: Path, name: str, eps: float) -> None:
    config = tiny(name).replace(norms={"eps": eps})
    write(random_checkpoint(config), f"{tmp_path / 'timm'}/", "timm")
    model = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True)
    assert {m.eps for m in model.modules() if isinstance(m, torch.nn.LayerNorm)} == {eps}


def test_an_eps_that_no_architecture_has_is_refused_for_a_folder() -> None:
    with pytest.raises(InputError, match=r"norms\.eps=1e-12"):
        timm_config.json_files(get("vit_ti16", norms={"eps": 1e-12}))


def test_zeros_are_written_for_the_classifier_bias_that_clip_does_not_have(tmp_path: Path) -> None:
    config = tiny("clip_b32")
    write(random_checkpoint(config), f"{tmp_path / 'timm'}/", "timm")
    model = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True)
    assert not model.head.bias.any()


def test_a_config_that_timm_cannot_express_is_refused_for_a_folder(tmp_path: Path) -> None:
    config = tiny("vit_ti16").replace(positions={"kind": "none", "relative": "table"}, norms={"order": "parallel"})
    checkpoint = parity.Checkpoint(config, "torch", vit_torch.ViT(config).state_dict())
    with pytest.raises(InputError, match=r"blocks\.attn\.rel_pos\.table"):
        write(checkpoint, f"{tmp_path / 'timm'}/", "timm")


def test_timm_opens_a_folder_of_gated_blocks_with_norms_after_their_halves(tmp_path: Path) -> None:
    config = tiny("dinov3_s16").replace(mlp={"activation": "swiglu"}, norms={"order": "res_post", "layer_scale": None})
    write(random_checkpoint(config), f"{tmp_path / 'timm'}/", "timm", dtype="float64")
    with float64():
        model = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
        images = noise(rng_for("gated"), (2, 3, 16, 16), 1.0)
        logits = model(torch.tensor(images)).numpy()
    assert relrms(torch_logits(parity.load(tmp_path / "timm"), images), logits) < FLOAT64_TOLERANCE
    with pytest.raises(InputError, match="swiglu"):
        FORMAT.with_variant("eva").layouts(config)


@pytest.mark.parametrize(
    ("name", "variant", "message"),
    [
        ("dinov3_s16", "eva-split-qkv", "write timm:eva, or a file"),
        ("vit_ti16", "eva-split-qkv", "write timm:vit, or a file"),
        ("vit_ti16", "legacy", ""),
    ],
)
def test_a_folder_has_the_keys_of_the_layers_that_timm_builds(
    tmp_path: Path, name: str, variant: str, message: str
) -> None:
    checkpoint = random_checkpoint(tiny(name))
    if message:
        with pytest.raises(InputError, match=message):
            write(checkpoint, f"{tmp_path / 'timm'}/", f"timm:{variant}")
        write(checkpoint, tmp_path / "weights.safetensors", f"timm:{variant}")
    else:
        write(checkpoint, f"{tmp_path / 'timm'}/", f"timm:{variant}")
        timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True)


def test_a_folder_of_timm_has_one_file_of_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """timm reads model.safetensors alone, however large the model is."""
    monkeypatch.setattr(write_target, "SHARD_BYTES", 1000)
    write(random_checkpoint(tiny("vit_ti16")), f"{tmp_path / 'timm'}/", "timm")
    timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True)
    with pytest.raises(InputError, match="one file of weights: leave --shard"):
        write(random_checkpoint(tiny("vit_ti16")), f"{tmp_path / 'other'}/", "timm", shard=1000)


def tiny(name: str) -> ViTConfig:
    return get(name, image_size=16, patch_size=8, width=16, depth=1, num_heads=2, mlp_dim=24, num_classes=3)


def random_checkpoint(config: ViTConfig) -> parity.Checkpoint:
    layouts, rng = FORMAT.layouts(config), np.random.default_rng(0)
    arrays = {
        key: rng.normal(size=layout.shape(config.sizes)).astype(np.float32)
        for layout in layouts.values()
        for key in layout.keys(config.sizes)
    }
    return parity.Checkpoint(config, FORMAT.full_name(config), arrays)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"norms": {"after_pool": True}}, "norms.after_blocks=True with norms.after_pool"),
        ({"tokens": {"patch_bias": False}}, "tokens.patch_bias"),
        ({"attention": {"head_dim": 5}}, "attention.head_dim"),
        ({"attention": {"scale": 0.5}}, "attention.scale"),
        ({"attention": {"proj_bias": False}}, "attention.proj_bias"),
        ({"tokens": {"registers": 2}, "positions": {"covers": "class"}}, "positions.covers"),
        ({"positions": {"kind": "fixed", "table": "sincos_2d_mae"}}, "positions.kind"),
        ({"positions": {"rotary": "axial"}}, "positions.rotary"),
        ({"positions": {"relative": "table"}}, "positions.relative='table' with positions.kind='learned'"),
        ({"positions": {"kind": "none", "relative": "table"}, "tokens": {"registers": 2}}, "tokens.registers=2"),
        ({"positions": {"relative": "mlp", "relative_dim": 8}, "attention": {"qkv_bias": "qv"}}, "rel_pos.fc1.weight"),
        ({"head": {"pool": "token_mean"}}, "head.pool"),
        ({"head": {"hidden": 7}}, "pre_logits"),
        ({"head": {"pool": "attention"}, "mlp": {"activation": "swiglu"}}, "swiglu"),
    ],
)
def test_a_config_that_timm_cannot_express_is_refused_by_field(changes: dict[str, Any], names: str) -> None:
    with pytest.raises(InputError, match=names):
        FORMAT.layouts(get("vit_ti16", **changes))
