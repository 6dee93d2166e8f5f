"""open_clip_config.json beside OpenCLIP's weights is read or refused; with it, no property is assumed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import parity
from parity.checkpoints.conversion import converted_arrays
from parity.checkpoints.preprocessing import center_crop
from parity.comparison import reproducible_init
from vit_spec import InputError, ViTConfig, get

CONFIG = get(
    "clip_b16",
    depth=1,
    width=192,
    num_heads=6,
    mlp_dim=518,
    num_classes=40,
    image_size=(32, 48),
    norms={"eps": 1e-3},
    mlp={"activation": "gelu_tanh"},
    pixels={"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)},
)
TOWER: dict[str, Any] = {
    "image_size": [32, 48],
    "layers": 1,
    "width": 192,
    "head_width": 32,
    "mlp_ratio": 2.7,
    "patch_size": 16,
    "norm_kwargs": {"eps": 1e-3},
    "act_kwargs": {"approximate": "tanh"},
}
TEXT = {"context_length": 77, "vocab_size": 49408, "width": 512, "heads": 8, "layers": 12}
IMAGES: dict[str, Any] = {
    "mean": [0.1, 0.2, 0.3],
    "std": [0.4, 0.5, 0.6],
    "interpolation": "bicubic",
    "resize_mode": "shortest",
}


TEXT_TOWER = {"token_embedding.weight": np.ones((7, 4), np.float32), "logit_scale": np.ones((), np.float32)}


def folder(path: Path, tower: Any = None, images: Any = None, **model: Any) -> Path:
    """Write a folder as OpenCLIP's push_to_hf_hub.py does, with the first array of the text tower."""
    keys = dict(converted_arrays(reproducible_init.weights(CONFIG, 0), "openai-clip"))
    save_file({**keys, **TEXT_TOWER}, path / "open_clip_model.safetensors")
    cfg = {"embed_dim": 40, "vision_cfg": {**TOWER, **(tower or {})}, "text_cfg": TEXT, **model}
    content = {"model_cfg": cfg, "preprocess_cfg": {**IMAGES, **(images or {})}}
    (path / "open_clip_config.json").write_text(json.dumps(content))
    return path


def test_the_file_determines_the_config_and_the_preprocessing(tmp_path: Path) -> None:
    found = parity.load(folder(tmp_path))
    names = "image_size patch_size width depth num_heads mlp_dim num_classes head.pool mlp.activation norms.eps pixels.mean"
    assert all(found.config.at(name) == CONFIG.at(name) for name in [*names.split(), "pixels.std"])
    assert not found.assumed
    assert found.preprocessing == center_crop((32, 48), filter="bicubic")


def test_a_value_that_the_format_cannot_have_is_refused_with_the_way_to_a_format_file(tmp_path: Path) -> None:
    (folder(tmp_path) / "open_clip_config.json").unlink()
    given = {"image_size": (32, 48), "num_heads": 6}
    assert parity.load(tmp_path, given={**given, "head.pool": "mean"}).config.head.pool == "mean"
    with pytest.raises(InputError, match=r"no key for attn_pool.*: give other values, or change the file that"):
        parity.load(tmp_path, given={**given, "head.pool": "attention"})


def test_layers_with_names_of_the_text_tower_are_an_assumption_without_a_text_tower(tmp_path: Path) -> None:
    """Such a file is of another module, which contains an image tower as `visual`."""
    weights = folder(tmp_path) / "open_clip_model.safetensors"
    tower = {key: array for key, array in load_file(weights).items() if key.startswith("visual.")}
    layers = {"transformer.linear1.weight": np.ones(3, np.float32), "text.weight": np.ones(3, np.float32)}
    save_file({**tower, **layers}, weights)
    found = {each.field for each in parity.load(tmp_path).assumed}
    assert {"transformer", "text", "code around the model", "further operations", "outputs"} <= found


def test_a_file_of_openai_beside_another_activation_is_refused(tmp_path: Path) -> None:
    weights = folder(tmp_path, {"act_kwargs": None}) / "open_clip_model.safetensors"
    save_file({**load_file(weights), "vocab_size": np.ones((), np.int64)}, weights)
    with pytest.raises(InputError, match=r"says mlp\.activation='gelu', but the weights are a file of OpenAI"):
        parity.load(tmp_path)


def test_a_file_that_contradicts_our_metadata_is_refused(tmp_path: Path) -> None:
    found = parity.load(folder(tmp_path))
    (tmp_path / "open_clip_model.safetensors").unlink()
    parity.write(found, tmp_path / "open_clip_model.safetensors", "openai-clip")
    assert parity.load(tmp_path).config == found.config
    content = json.loads((tmp_path / "open_clip_config.json").read_text())
    content["model_cfg"]["vision_cfg"]["act_kwargs"] = None
    (tmp_path / "open_clip_config.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"open_clip_config\.json says mlp\.activation='gelu', but the config stored"):
        parity.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"tower": {"act_kwargs": None}}, "mlp.activation", "gelu"),
        ({"tower": {"act_kwargs": None}, "quick_gelu": True}, "mlp.activation", "quick_gelu"),
        ({"tower": {"norm_kwargs": None}}, "norms.eps", 1e-5),
        ({"tower": {"head_width": 64}}, "num_heads", 3),
        ({"images": {"mean": [0.5, 0.5, 0.5]}}, "pixels.mean", (0.5,)),
        ({"images": {"std": None}}, "pixels.std", get("clip_b16").pixels.std),
        ({"tower": {"final_ln_after_pool": True, "patch_dropout": 0.5}}, "head.pool", "token"),
        ({"tower": {"pool_type": "avg"}}, "head.pool", "mean"),
        ({"tower": {"pool_type": "none", "final_ln_after_pool": True}}, "head.pool", "none"),
    ],
)
def test_fields_of_the_file_go_into_the_config(tmp_path: Path, changes: dict[str, Any], field: str, value: Any) -> None:
    assert parity.load(folder(tmp_path, **changes)).config.at(field) == value


def test_a_tower_without_a_norm_before_the_blocks_is_read(tmp_path: Path) -> None:
    weights = folder(tmp_path, {"no_ln_pre": True}) / "open_clip_model.safetensors"
    save_file({key: array for key, array in load_file(weights).items() if ".ln_pre." not in key}, weights)
    found = parity.load(tmp_path)
    assert not found.config.norms.before_blocks and not found.assumed


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"tower": {"pool_type": "avg", "final_ln_after_pool": True}},
            "final_ln_after_pool True with pool_type 'avg', which",
        ),
        ({"tower": {"pool_type": "max"}}, "vision_cfg.pool_type 'max', which this format does not read: if ViTConfig can"),
        ({"tower": {"no_ln_pre": True}}, "says norms.before_blocks=False, but its tensors show True"),
        ({"tower": {"no_ln_pre": 1}}, "vision_cfg.no_ln_pre 1"),
        ({"tower": {"qk_norm": True}}, "vision_cfg.qk_norm True"),
        ({"tower": {"timm_model_name": "test_vit"}}, "vision_cfg.timm_model_name 'test_vit'"),
        ({"tower": {"act_kwargs": {"slope": 1}}}, "vision_cfg.act_kwargs"),
        ({"tower": {"a_word_of_tomorrow": 1}}, "'a_word_of_tomorrow' in vision_cfg, which is not supported"),
        ({"tower": {"layers": [3, 4, 6, 3]}}, "vision_cfg.layers"),
        ({"tower": {"width": "192"}}, "vision_cfg.width '192'"),
        ({"tower": {"mlp_ratio": 4.0}}, "open_clip_config.json says mlp_dim=768, but its tensors show 518"),
        ({"tower": {"layers": 2}}, "open_clip_config.json says depth=2, but its tensors show 1"),
        ({"vision_cfg": None}, "says vision_cfg None: an object was expected"),
        ({"fused": True}, "'fused' in model_cfg"),
        ({"images": {"mean": "grey"}}, "says mean 'grey': 3 numbers were expected"),
    ],
)
def test_unsupported_fields_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as error:
        parity.load(folder(tmp_path, **changes))
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "images", [{"resize_mode": "longest"}, {"interpolation": "nearest"}, {"interpolation": "bilinear"}], ids=str
)
def test_unsupported_preprocessing_is_reported_as_unread(tmp_path: Path, images: dict[str, str]) -> None:
    found = parity.load(folder(tmp_path, images=images))
    assert found.preprocessing is None and next(iter(images)) in found.left[-1]


def test_a_config_json_of_transformers_beside_it_is_ignored(tmp_path: Path) -> None:
    (folder(tmp_path) / "config.json").write_text(json.dumps({"model_type": "clip", "vision_config": {"hidden_size": 192}}))
    assert parity.load(tmp_path).config.norms.eps == 1e-3


def test_weights_of_another_library_beside_it_are_refused(tmp_path: Path) -> None:
    folder(tmp_path)
    save_file(
        dict(converted_arrays(reproducible_init.weights(CONFIG, 0), "torch")), tmp_path / "open_clip_model.safetensors"
    )
    with pytest.raises(InputError, match=r"open_clip_config\.json describes a model that has other keys"):
        parity.load(tmp_path)
    with pytest.raises(InputError, match=r"open_clip_config\.json is not for format 'torch': leave --from \(format=\) out"):
        parity.load(tmp_path, format="torch")


# Image towers of timm --------------------------------------------------------------------------------------------------

TRUNK = ViTConfig(
    image_size=(32, 48), width=64, depth=6, num_heads=2, mlp_dim=192, num_classes=5, pixels=CONFIG.pixels
)  # timm's test_vit
TRUNK_CFG = {"timm_model_name": "test_vit", "timm_pool": "token", "timm_proj": None, "image_size": [32, 48]}


def timm_folder(path: Path, tower: Any = None, wrapper: str = "", **more: np.ndarray) -> Path:
    """Write a folder of OpenCLIP whose image tower is timm's test_vit, with the first arrays of the text tower."""
    cfg = {**TRUNK_CFG, **(tower or {})}
    trunk = dict(converted_arrays(reproducible_init.weights(TRUNK, 0), "timm"))
    if cfg["timm_proj"] == "linear":
        del trunk["head.bias"]
        more["visual.head.proj.weight"] = trunk.pop("head.weight")
    keys = {**{f"visual.trunk.{key}": array for key, array in trunk.items()}, **TEXT_TOWER, **more}
    save_file({f"{wrapper}{key}": array for key, array in keys.items()}, path / "open_clip_model.safetensors")
    content = {"model_cfg": {"embed_dim": 5, "vision_cfg": cfg, "text_cfg": TEXT}, "preprocess_cfg": IMAGES}
    (path / "open_clip_config.json").write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("options", [{}, {"strip": "visual.trunk."}, {"format": "timm"}], ids=str)
@pytest.mark.parametrize("wrapper", ["", "module."])
@pytest.mark.parametrize("projection", [None, "linear"])
def test_an_image_tower_of_timm_is_read_as_timms(
    tmp_path: Path, projection: str | None, wrapper: str, options: dict[str, str]
) -> None:
    found = parity.load(timm_folder(tmp_path, {"timm_proj": projection}, wrapper), **options)
    assert found.format == "timm:vit" and not found.assumed
    assert found.config == TRUNK.with_fields(
        {"head.bias": projection is None, "norms.eps": 1e-6, "positions.table": found.config.positions.table}
    )
    expected = dict(converted_arrays(reproducible_init.weights(TRUNK, 0), "timm"))
    assert all(np.array_equal(array, expected[key]) for key, array in converted_arrays(found, "timm") if key != "head.bias")
    assert found.preprocessing == center_crop((32, 48), filter="bicubic")
    assert found.left == ("logit_scale and 1 more: the text tower",)


def test_a_tower_without_a_projection_has_no_classifier(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"whose config\.json is made from its open_clip_config\.json: .* says num_classes=0"
    ):
        parity.load(timm_folder(tmp_path, {"timm_proj": "none"}))


def test_a_projection_beside_a_classifier_of_the_trunk_is_refused(tmp_path: Path) -> None:
    second = {"visual.head.proj.weight": np.ones((5, 64), np.float32)}
    with pytest.raises(InputError, match=r"unexpected visual\.(head\.proj|trunk\.head)\.weight"):
        parity.load(timm_folder(tmp_path, **second))


@pytest.mark.parametrize(
    ("tower", "said"),
    [
        ({"timm_model_name": "vit_base_mci_224"}, "timm's vit_base_mci_224 with embed_layer='HybridEmbed"),
        ({"timm_model_name": "vitamin_small_224"}, "timm's 'vitamin_small_224', which is no ViT of timm"),
        ({"timm_proj": "mlp"}, "vision_cfg.timm_proj 'mlp'"),
        ({"timm_pool": "rot_attn"}, "global_pool='rot_attn'"),
        ({"timm_pool": "avg"}, "says norms.after_blocks=False, but its tensors show True"),
        ({"image_size": 64}, "64x64 has 16 patches of 16x16, the position table 7 rows"),
    ],
    ids=str,
)
def test_an_image_tower_of_timm_that_differs_is_refused(tmp_path: Path, tower: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as error:
        parity.load(timm_folder(tmp_path, tower))
    assert said in str(error.value) and "\n" not in str(error.value)
