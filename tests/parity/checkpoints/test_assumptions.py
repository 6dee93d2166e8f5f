"""Properties that a file does not state are reported as assumptions; stated properties are used or refused, not ignored."""

import contextlib
import json
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import parity
import vit_spec
from parity.checkpoints.assumptions import Assumption
from parity.checkpoints.containers.container import StoredArray
from parity.checkpoints.conversion import converted_arrays
from parity.checkpoints.formats import formats, get
from parity.checkpoints.recognition import recognise
from parity.comparison import reproducible_init
from tests.twins import perturbed_params, random_images
from vit_spec import InputError, ViTConfig

jax, torch = pytest.importorskip("jax"), pytest.importorskip("torch")

import vit_jax
import vit_torch

CONFIG = vit_spec.get("vit_ti16", depth=1, num_classes=7, image_size=(48, 64), norms={"eps": 1e-5})


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    return parity.to_torch(perturbed_params(CONFIG), CONFIG)


@pytest.fixture
def bare_file(tmp_path: Path, state: dict[str, Any]) -> Path:
    """Save a state dict without a config, and return its path."""
    torch.save(state, tmp_path / "bare.pth")
    return tmp_path / "bare.pth"


@pytest.fixture
def folder(tmp_path: Path, state: dict[str, Any]) -> Path:
    """Write a folder as timm does, without the metadata of this project, and return its path."""
    parity.write(parity.Checkpoint(CONFIG, "torch", state), f"{tmp_path / 'timm'}/", "timm")
    weights = tmp_path / "timm/model.safetensors"
    save_file(load_file(weights), weights, {"format": "pt"})
    return tmp_path / "timm"


def edit_config_json(folder: Path, **fields: Any) -> Path:
    """Set fields in the config.json of a folder, and return the folder."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def edit_model_args(folder: Path, **arguments: Any) -> Path:
    """Set arguments in the `model_args` of a folder's config.json, and return the folder."""
    given = json.loads((folder / "config.json").read_text())["model_args"]
    return edit_config_json(folder, model_args=given | arguments)


# Files without a config -----------------------------------------------------------------------------------------------


ASSUMED_FIELDS = {
    "norms.eps",
    "mlp.activation",
    "head.pool",
    "num_heads",
    "positions.rotary",
    "attention.scale",
    "pixels.mean",
    "pixels.std",
    "resampling.kernel",
    "resampling.antialias",
    "norms.kind",
    "norms.order",
    "residual connections",
    "norms without weights",
    "queries, keys and values",
    "attention pattern",
    "patch extraction",
    "use of blocks",
    "further operations",
    "use of positions",
    "outputs",
    "mean pooling",
}


def test_every_property_that_tensors_do_not_show_is_an_assumption(bare_file: Path) -> None:
    found = parity.load(bare_file, given={"image_size": CONFIG.image_size})
    assert ASSUMED_FIELDS <= {each.field for each in found.assumed}


def test_the_reason_for_no_positions_is_that_the_weights_have_none(tmp_path: Path, state: dict[str, Any]) -> None:
    """Most models have positions: they are no reason."""
    torch.save({key: tensor for key, tensor in state.items() if key != "pos_embed"}, tmp_path / "a.pth")
    assumed = {each.field: each for each in parity.load(tmp_path / "a.pth").assumed}
    assert assumed["positions.kind"].value == "none"
    assert assumed["positions.kind"].why == "the weights have no table of positions"


# Models that formats which cannot store a plain ViT are made for, or changes of one.
MODELS: dict[str, str | dict[str, Any]] = {
    "timm-naflex": "naflex_b16",
    "hf-deit": "deit_ti16_distilled",
    "hf-dinov2": "dinov2_s14",
    "hf-dinov2-reg": {
        "tokens": {"registers": 4},
        "positions": {"covers": "class"},
        "norms": {"layer_scale": 1.0},
        "num_classes": 0,
    },
    "hf-dinov3": "dinov3_s16",
    "hf-siglip": "siglip_b32",
    "hf-clip": "clip_b32",
    "hf-vit-mae": "mae_b16",
    "hf-beit": "beit_b16",
    "hf-data2vec": "beit_b16",
    "dino": "dino_s16",
    "dinov2": "dinov2_s14",
    "dinov3": "dinov3_s16",
    "openai-clip": "clip_b32",
    "lucidrains": {"attention": {"qkv_bias": "none"}, "norms": {"after_blocks": False, "after_pool": True}},
    "big_vision": "vit_s16_plain",
    "hf-flax-dinov2": "dinov2_s14",
    "hf-flax-clip": "clip_b32",
    "bonsai-vit": {"mlp": {"activation": "gelu_tanh"}},
    "bonsai-dinov3": {
        "positions": {"kind": "none", "rotary": "dinov3"},
        "mlp": {"activation": "gelu_tanh"},
        "norms": {"layer_scale": 1.0},
        "num_classes": 0,
    },
}
# Fields that no tensor shows: other code with the same keys may have other values.
HIDDEN = {
    *("positions.rotary", "attention.scale", "attention.value_skip", "mlp.activation", "norms.kind", "norms.order"),
    *("norms.eps", "head.pool"),
}
SHOWN = {"hf-siglip": {"head.pool"}, "dinov3": {"positions.rotary"}}  # by further tensors of a format
BEHAVIOUR = {
    "residual connections",
    "norms without weights",
    "attention pattern",
    "patch extraction",
    "use of blocks",
    "further operations",
}


@pytest.mark.parametrize("own", [False, True])
def test_rotary_positions_that_are_given_have_the_same_assumptions_in_every_file(
    tmp_path: Path, bare_file: Path, own: bool
) -> None:
    """The base of their kind is not the default of `ViTConfig`."""
    given: dict[str, Any] = {"image_size": CONFIG.image_size, "positions.rotary": "dinov3"}
    if own:
        parity.convert(bare_file, tmp_path / "own.safetensors", "torch", given={"image_size": CONFIG.image_size})
    found = parity.load(tmp_path / "own.safetensors" if own else bare_file, given=given)
    assert found.config.positions.rotary_base == 100.0
    assert {"positions.rotary_base", "rotation"} <= {each.field for each in found.assumed}
    assert parity.load(bare_file, given={**given, "positions.rotary_base": 50.0}).config.positions.rotary_base == 50.0


def test_another_kind_of_rotary_positions_replaces_the_assumptions_about_the_stored_one(
    tmp_path: Path, bare_file: Path
) -> None:
    given = {"image_size": CONFIG.image_size, "positions.rotary": "eva"}
    parity.convert(bare_file, tmp_path / "own.safetensors", "torch", given=given)
    found = parity.load(tmp_path / "own.safetensors", given={"positions.rotary": "dinov3"})
    assumed = [each.field for each in found.assumed]
    assert len(assumed) == len(set(assumed)) and found.config.positions.rotary_grid is None
    values = {each.field: each.value for each in found.assumed}
    assert (values["positions.rotary_base"], values["rotation"][:9]) == (100.0, "of halves")
    without = parity.load(tmp_path / "own.safetensors", given={"positions.rotary": "none"})
    assert not [each.field for each in without.assumed if "rota" in each.field]


@pytest.mark.parametrize("own", [False, True])
def test_a_given_field_that_does_not_exist_is_refused(tmp_path: Path, bare_file: Path, own: bool) -> None:
    if own:
        parity.convert(bare_file, tmp_path / "own.safetensors", "torch", given={"image_size": CONFIG.image_size})
    path = tmp_path / "own.safetensors" if own else bare_file
    for name, value in {"norms.epss": 1e-5, "num_head": 3, "norms": {"eps": 1e-5}}.items():
        with pytest.raises(InputError, match=f"unknown config field {name}"):
            parity.load(path, given={name: value})


def test_weights_in_the_dictionary_of_pytorchs_tutorial_are_read(tmp_path: Path, state: dict[str, Any]) -> None:
    """https://docs.pytorch.org/tutorials/recipes/recipes/saving_and_loading_a_general_checkpoint.html"""
    torch.save({"epoch": 5, "model_state_dict": state, "optimizer_state_dict": {}, "loss": 0.4}, tmp_path / "a.pth")
    found = parity.load(tmp_path / "a.pth", given={"image_size": CONFIG.image_size})
    assert parity.to_torch(found).keys() == state.keys()


@pytest.mark.parametrize("format", formats())
def test_in_every_format_weights_alone_prove_no_property_that_tensors_do_not_show(tmp_path: Path, format: str) -> None:
    model = MODELS.get(format, format if format.startswith("article") else {})
    config = vit_spec.get(model, depth=1) if isinstance(model, str) else vit_spec.get("vit_ti16", depth=1, **model)
    arrays = converted_arrays(reproducible_init.weights(config, 0), format)
    save_file({key: np.ascontiguousarray(array) for key, array in arrays}, tmp_path / "a.safetensors")
    given = {"num_heads": config.num_heads, "image_size": config.image_size}
    found = {each.field for each in parity.load(tmp_path / "a.safetensors", format=format, given=given).assumed}
    assert (HIDDEN - SHOWN.get(format, set())) | BEHAVIOUR <= found


@pytest.mark.parametrize("load", [vit_torch.load, vit_jax.load], ids=["torch", "jax"])
def test_both_twins_warn_once_about_all_assumptions_at_the_callers_line(bare_file: Path, load: Callable[..., Any]) -> None:
    with pytest.warns(parity.AssumptionWarning) as caught:
        load(bare_file, given={"image_size": CONFIG.image_size})
    [warning] = caught
    assert warning.filename == __file__
    assert all(name in str(warning.message) for name in ASSUMED_FIELDS) and "\n" not in str(warning.message)


def test_a_given_field_is_not_assumed_and_is_used(bare_file: Path, state: dict[str, Any]) -> None:
    given = {"image_size": CONFIG.image_size, "norms.eps": 1e-5}
    with pytest.warns(parity.AssumptionWarning) as caught:
        model = vit_torch.load(bare_file, given=given, format="timm")
    assert "norms.eps" not in str(caught[0].message)
    expected = vit_torch.ViT(CONFIG).eval()
    expected.load_state_dict(state)
    images = torch.tensor(random_images(CONFIG)).permute(0, 3, 1, 2)
    assert torch.equal(model(images), expected(images))


def test_a_given_scale_of_attention_scores_is_used(tmp_path: Path) -> None:
    """The small model of timm 0.3 has another scale, but the keys of later versions."""
    config = CONFIG.replace(image_size=48, attention={"scale": 0.1})
    torch.save(parity.to_torch(perturbed_params(config), config), tmp_path / "a.pth")
    assert parity.load(tmp_path / "a.pth").config.attention.scale is None  # an assumption: it is in `ASSUMED_FIELDS`
    assert parity.load(tmp_path / "a.pth", given={"attention.scale": 0.1}).config.attention.scale == 0.1


def test_a_parallel_order_that_the_user_gives_is_used(tmp_path: Path) -> None:
    """Blocks with one norm may also share it between attention and MLP."""
    config = CONFIG.replace(image_size=48, norms={"order": "parallel"})
    torch.save(parity.to_torch(perturbed_params(config), config), tmp_path / "a.pth")
    given = {"norms.order": "parallel", "norms.eps": config.norms.eps, "num_heads": config.num_heads}
    assert parity.load(tmp_path / "a.pth", format="torch", given=given).config == config


def test_fields_that_contradict_each_other_beside_the_number_of_heads_are_one_line(
    tmp_path: Path, state: dict[str, Any]
) -> None:
    torch.save(state, tmp_path / "a.pth")
    given = {"num_heads": 3, "norms.kind": "rms", "image_size": CONFIG.image_size}
    with pytest.raises(InputError, match="RMS norms have no bias"):
        parity.load(tmp_path / "a.pth", given=given)


def test_one_head_is_an_assumption_if_the_norm_of_queries_is_as_wide_as_the_model(tmp_path: Path) -> None:
    """Such a norm normalizes one head of the width of the model, or all heads together."""
    config = CONFIG.replace(image_size=48, num_heads=1, attention={"qk_norm": True})
    torch.save(parity.to_torch(perturbed_params(config), config), tmp_path / "a.pth")
    assert Assumption("num_heads", 1, "as wide as the norm of queries") in parity.load(tmp_path / "a.pth").assumed
    with pytest.raises(InputError, match=r"q_norm\.weight \(192,\), expected dim \(64,\)"):
        parity.load(tmp_path / "a.pth", given={"num_heads": 3})


def test_the_absence_of_rotary_positions_from_clips_image_tower_is_an_assumption(tmp_path: Path) -> None:
    """Perception Encoders that pool a class token have the keys of CLIP's image tower, and rotary positions."""
    config = vit_spec.get("clip_b16", depth=1, num_classes=7)
    tower = converted_arrays(reproducible_init.weights(config, 0), "openai-clip:tower")
    torch.save({key: torch.tensor(array) for key, array in tower}, tmp_path / "a.pth")
    assert "positions.rotary" in {each.field for each in parity.load(tmp_path / "a.pth").assumed}


def test_a_complete_folder_is_read_without_a_warning(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert vit_torch.load(folder).config == CONFIG.replace(regularisation=vit_spec.Regularisation())


@pytest.mark.parametrize("positions", [True, False])
def test_mean_pooling_is_an_assumption_with_a_norm_after_the_pool_or_without_a_class_token(
    tmp_path: Path, positions: bool
) -> None:
    config = CONFIG.replace(
        image_size=48,
        tokens={"class_token": positions},
        head={"pool": "mean"},
        norms={"after_pool": positions, "after_blocks": not positions},
    )
    torch.save(parity.to_torch(perturbed_params(config), config), tmp_path / "bare.pth")
    found = parity.load(tmp_path / "bare.pth")
    assert found.config.head.pool == "mean" and "head.pool" in {each.field for each in found.assumed}


def test_a_position_table_of_patches_only_is_read_with_registers_and_no_class_token(tmp_path: Path) -> None:
    tokens = {"class_token": False, "registers": 4}
    config = vit_spec.get("vit_ti16", depth=1, tokens=tokens, positions={"covers": "none"}, head={"pool": "mean"})
    torch.save(parity.to_torch(perturbed_params(config), config), tmp_path / "a.pth")
    found = parity.load(tmp_path / "a.pth").config
    assert (found.tokens, found.positions, found.image_size) == (config.tokens, config.positions, config.image_size)


def test_a_choice_among_several_weights_in_one_file_is_an_assumption_and_is_stored(tmp_path: Path, state: Any) -> None:
    averaged = {key: tensor + 1 for key, tensor in state.items()}
    torch.save({"model": state, "model_ema": averaged, "optimizer": {"moment": torch.ones(3)}}, tmp_path / "both.pth")
    given = {"image_size": CONFIG.image_size}
    with pytest.warns(parity.AssumptionWarning, match=r"weights='model_ema' \(not model, of the same file"):
        vit_torch.load(tmp_path / "both.pth", given=given)
    parity.convert(tmp_path / "both.pth", tmp_path / "one.safetensors", "jax", given=given)
    [choice] = [each for each in parity.load(tmp_path / "one.safetensors").assumed if each.field == "weights"]
    assert choice.value == "model_ema"


@pytest.mark.parametrize("part", ["predictor.weight", "decoder.layers.0.weight"])
def test_ignored_layers_that_may_follow_the_backbone_are_an_assumption(tmp_path: Path, state: Any, part: str) -> None:
    whole = {f"backbone.{key}": tensor for key, tensor in state.items()} | {part: torch.ones(3, 7)}
    torch.save(whole, tmp_path / "whole.pth")
    with pytest.warns(parity.AssumptionWarning, match=f"weights='backbone' .not {part.partition('.')[0]},"):
        vit_torch.load(tmp_path / "whole.pth", given={"image_size": CONFIG.image_size})


# A new head or image size ---------------------------------------------------------------------------------------------


def test_a_new_head_or_image_size_causes_a_warning(folder: Path) -> None:
    with pytest.warns(parity.SurgeryWarning) as caught:
        model = vit_torch.load(folder, num_classes=3, image_size=np.int64(64))
    assert [str(each.message).partition(": ")[2].split()[0] for each in caught] == ["image_size", "num_classes"]
    assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 3)
    with pytest.warns(parity.SurgeryWarning, match="num_classes 7 -> 0"):
        functional, params = vit_jax.load(folder, num_classes=0)
    assert functional.apply({"params": params}, np.zeros((1, 48, 64, 3), np.float32)).shape == (1, 192)


def test_giving_the_head_and_image_size_of_the_file_causes_no_warning(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert vit_torch.load(folder, num_classes=7, image_size=(48, 64)).config.num_classes == 7


# Files beside the weights ---------------------------------------------------------------------------------------------

UNSUPPORTED_ARGUMENTS = [
    {"global_pool": "avgmax"},
    {"act_layer": "hard_mish"},
    {"norm_layer": "simplenorm"},
    {"embed_norm_layer": "rmsnorm"},
    {"block_fn": "ParallelThingsBlock"},
    {"attn_layer": "diff"},
    {"use_naflex": True},
    {"an_unknown_argument": 1},
    {"num_heads": "three"},
]


@pytest.mark.parametrize("arguments", UNSUPPORTED_ARGUMENTS, ids=str)
def test_unsupported_model_arguments_are_refused_in_every_format(folder: Path, arguments: Any) -> None:
    for format in (None, "timm", "torch", "deit"):
        with pytest.raises(InputError) as error:
            parity.load(edit_model_args(folder, **arguments), format=format)
        assert "\n" not in str(error.value)
        # A config.json of timm is refused beside weights in the formats torch and deit, whatever its arguments are.
        assert format in ("torch", "deit") or list(arguments)[-1] in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        ({"act_layer": "gelu_tanh"}, "mlp.activation", "gelu_tanh"),
        ({"norm_layer": "layernorm"}, "norms.eps", 1e-6),
        ({"num_heads": 6}, "num_heads", 6),
        ({"dynamic_img_pad": True, "dynamic_img_size": True}, "tokens.pad", True),
        ({"drop_path_rate": 0.3}, "norms.eps", 1e-5),
    ],
)
def test_model_arguments_go_into_the_config(folder: Path, arguments: Any, field: str, value: Any) -> None:
    assert parity.load(edit_model_args(folder, **arguments)).config.at(field) == value


# Some of the arguments that timm's train.py always stores; a checkpoint with them was written by train.py.
TRAIN_PY = {"eval_metric": "top1", "checkpoint_hist": 10, "recovery_interval": 0, "train_interpolation": "random"}


def test_arguments_in_a_checkpoint_of_timms_training_go_into_the_config(tmp_path: Path, state: dict[str, Any]) -> None:
    sizes = {"img_size": [48, 64], "embed_dim": 192, "depth": 1, "num_heads": 3}
    given = {**TRAIN_PY, "model": "vit_small_patch16_224", "model_kwargs": {"act_layer": "quick_gelu", **sizes}}
    content = {"arch": "vit_small_patch16_224", "state_dict": state, "args": given, "epoch": 3, "version": 2}
    torch.save(content, tmp_path / "a.pth")
    found = parity.load(tmp_path / "a.pth")
    assert (found.config.norms.eps, found.config.mlp.activation, found.config.num_heads) == (1e-6, "quick_gelu", 3)
    assert {each.field for each in found.assumed} <= {"pixels.mean", "pixels.std"}
    given["model_kwargs"]["act_layer"] = "hard_mish"
    torch.save(content, tmp_path / "b.pth")
    with pytest.raises(InputError, match="act_layer='hard_mish'"):
        parity.load(tmp_path / "b.pth")


def test_arguments_of_a_fork_of_timms_training_make_the_architecture_an_assumption(
    tmp_path: Path, state: dict[str, Any]
) -> None:
    """A fork may pass its own arguments to create_model, or change the model by them."""
    sizes = {"img_size": [48, 64], "embed_dim": 192, "depth": 1, "num_heads": 3}
    given = {**TRAIN_PY, "model": "vit_base_patch16_siglip_224", "gp": "avg", "model_kwargs": sizes | {"fc_norm": False}}
    content = {"arch": given["model"], "state_dict": state, "args": {**given, "relu_mlp": True}, "epoch": 3, "version": 2}
    torch.save(content, tmp_path / "a.pth")
    found = parity.load(tmp_path / "a.pth")
    assumed = {each.field: each.value for each in found.assumed}
    assert HIDDEN | BEHAVIOUR | {"num_heads"} <= assumed.keys()
    assert assumed["arguments"] == "without effect on the model: relu_mlp, which timm's train.py does not have"
    assert (found.config.num_heads, found.config.head.pool) == (3, "mean")


def test_an_activation_that_a_version_of_timm_changed_is_an_assumption(folder: Path) -> None:
    """Until timm 1.0.14 this architecture had the exact GELU."""
    arguments = json.loads((folder / "config.json").read_text())["model_args"]
    unstated = {name: value for name, value in arguments.items() if name != "act_layer"}
    edit_config_json(folder, architecture="vit_so400m_patch16_siglip_gap_256", model_args={**unstated, "class_token": True})
    assert Assumption("mlp.activation", "gelu_tanh", "as in models of format timm") in parity.load(folder).assumed
    assert parity.load(folder, given={"mlp.activation": "gelu"}).config.mlp.activation == "gelu"
    assert not parity.load(edit_model_args(folder, act_layer="gelu_tanh")).assumed


def test_an_image_size_whose_remainder_the_library_drops_is_cropped(folder: Path) -> None:
    found = parity.load(edit_model_args(folder, img_size=[50, 70]))
    assert (found.config.image_size, found.config.tokens.crop, found.config.grid) == ((50, 70), True, (3, 4))
    assert not found.assumed
    assert parity.load(folder, given={"image_size": (48, 64), "tokens.crop": False}).config.image_size == (48, 64)


def test_a_position_table_shows_that_the_remainder_of_an_image_is_cropped(bare_file: Path) -> None:
    found = parity.load(bare_file, given={"image_size": (50, 70)})
    assert (found.config.tokens.crop, found.config.grid) == (True, (3, 4))


@pytest.mark.parametrize(
    ("pool", "arguments", "message"),
    [
        ("avgmax", {}, "global_pool='avgmax'"),
        ("avg", {"global_pool": "token"}, "say gp='avg', but its model_kwargs say global_pool='token': remove one"),
        ("", {"global_pool": "token"}, "say gp='', but its model_kwargs say global_pool='token': remove one"),
    ],
)
def test_a_pooling_in_gp_that_cannot_be_read_is_refused(
    tmp_path: Path, state: dict[str, Any], pool: str, arguments: Any, message: str
) -> None:
    sizes = {"img_size": [48, 64], "embed_dim": 192, "depth": 1, "num_heads": 3}
    given = {**TRAIN_PY, "model": "vit_small_patch16_224", "gp": pool, "model_kwargs": {**sizes, **arguments}}
    content = {"arch": "vit_small_patch16_224", "state_dict": state, "args": given, "epoch": 3, "version": 2}
    torch.save(content, tmp_path / "a.pth")
    with pytest.raises(InputError, match=message) as error:
        parity.load(tmp_path / "a.pth")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"act_layer": "relu"}, "say mlp.activation='relu', but the config.json beside it says 'gelu'"),
        ({"num_heads": 6}, "say num_heads=6, but the config.json beside it says 3"),
        ({}, ""),
    ],
)
def test_a_checkpoint_of_timms_training_that_contradicts_the_config_json_beside_it_is_refused(
    folder: Path, state: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    config = json.loads((folder / "config.json").read_text())
    arguments = config["model_args"] | changes
    name = f"{config['architecture']}.augreg_in21k"  # with the tag of the weights that training began with
    given = {**TRAIN_PY, "model": name, "gp": arguments.pop("global_pool"), "model_kwargs": arguments}
    content = {"arch": name, "state_dict": state, "args": given, "epoch": 3, "version": 2}
    torch.save(content, folder / "last.pth.tar")
    if message:
        with pytest.raises(InputError, match=message):
            parity.load(folder / "last.pth.tar")
    else:
        assert parity.load(folder / "last.pth.tar").config == parity.load(folder).config
    torch.save({**content, "arch": "my_vit", "args": {**given, "model": "my_vit"}}, folder / "last.pth.tar")
    with pytest.raises(InputError, match=r"its arch 'my_vit' is no ViT of timm 1\.0\.31, so it may be another model"):
        parity.load(folder / "last.pth.tar")


def test_a_pool_of_the_saved_model_that_its_arguments_do_not_give_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="says global_pool 'avg', but its model_args and architecture give another pool"):
        parity.load(edit_config_json(folder, global_pool="avg"))


def test_a_config_json_is_an_assumption_for_a_file_that_its_library_does_not_open(folder: Path, state: Any) -> None:
    torch.save(state, folder / "other.pth")
    found = parity.load(folder / "other.pth")
    assert found.config == parity.load(folder).config
    assert [(each.field, each.value) for each in found.assumed] == [("use of config.json", "for other.pth")]
    (folder / "model.safetensors").unlink()
    assert not parity.load(folder / "other.pth").assumed


AROUND = ("code around the model", "further operations", "residual connections", "mean pooling", "outputs")
MODULES = {  # wrapped weights, and the module that they show
    "attribute": (lambda state: {f"model.{key}": tensor for key, tensor in state.items()}, "model"),
    "distributed": (
        lambda state: {"state_dict": {f"module.backbone.{key}": tensor for key, tensor in state.items()}},
        "backbone",
    ),
    "dictionaries": (lambda state: {"model": {"encoder": state}}, "encoder"),
    "compiled": (lambda state: {"model": {f"_orig_mod.{key}": tensor for key, tensor in state.items()}}, ""),
    "module": (lambda state: {f"module.{key}": tensor for key, tensor in state.items()}, ""),
}


@pytest.mark.parametrize("case", MODULES)
def test_a_module_around_the_model_of_a_config_json_is_an_assumption(
    folder: Path, state: dict[str, Any], case: str
) -> None:
    """Its code may use the model in any way, for example normalize the images or the outputs."""
    wrap, module = MODULES[case]
    (folder / "model.safetensors").unlink()
    torch.save(wrap(state), folder / "pytorch_model.bin")
    found = {each.field: str(each.value) for each in parity.load(folder).assumed}
    assert found.keys() >= (set(AROUND) if module else set()) and bool(found) == bool(module)
    assert repr(module) in found.get("code around the model", "''")


CLIP = "vit_base_patch16_clip_224"


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"args": {"model": "vit_base_patch16_224", "lr": 0.1}},
        {"args": {"arch": CLIP, "lr": 0.1}},  # other scripts may give the model arguments that they do not store
        {"args": {"model": CLIP, "lr": 0.1}, "version": 2},
        {"args": {**TRAIN_PY, "model": CLIP}},
        {"args": {**TRAIN_PY, "model": "vit_base_patch16_224"}, "version": 2},
    ],
)
def test_an_architecture_without_its_arguments_replaces_no_assumption(
    tmp_path: Path, state: dict[str, Any], more: Any
) -> None:
    content = {"arch": CLIP, "state_dict": state, **more}
    torch.save(content, tmp_path / "a.pth")
    found = parity.load(tmp_path / "a.pth", given={"image_size": CONFIG.image_size})
    assert ASSUMED_FIELDS <= {each.field for each in found.assumed}


def test_a_hidden_layer_that_timm_ignores_is_refused_in_its_folder(folder: Path) -> None:
    weights = folder / "model.safetensors"
    hidden = {"pre_logits.fc.weight": np.ones((192, 192), np.float32), "pre_logits.fc.bias": np.ones(192, np.float32)}
    save_file(load_file(weights) | hidden, weights, {"format": "pt"})
    with pytest.raises(InputError, match=r"which timm 1\.0 drops if it opens a folder with config\.json"):
        parity.load(folder)
    (folder / "config.json").unlink()
    assert parity.load(folder, given={"image_size": CONFIG.image_size}).config.head.hidden == 192


def test_a_number_of_classes_that_contradicts_the_arguments_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="says num_classes 9, its model_args 7: correct one of the two"):
        parity.load(edit_model_args(edit_config_json(folder, num_classes=9), num_classes=7))


def test_an_unknown_architecture_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match=r"'vit_base_patch16_2240', which is no ViT of timm 1.0.31: it cannot be read"):
        parity.load(edit_config_json(folder, architecture="vit_base_patch16_2240"))  # none has a depth of 1


def test_an_architecture_with_the_size_of_the_tensors_and_a_similar_name_is_suggested(tmp_path: Path) -> None:
    parity.write(reproducible_init.weights(CONFIG.replace(depth=12), 0), f"{tmp_path / 'timm'}/", "timm")
    weights = tmp_path / "timm/model.safetensors"
    save_file(load_file(weights), weights, {"format": "pt"})
    with pytest.raises(InputError, match=r"no ViT of timm 1.0.31; did you mean 'vit_tiny_patch16_224'\?"):
        parity.load(edit_config_json(tmp_path / "timm", architecture="vit_tiny_patch16_2240"))


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        (
            "maxvit_tiny_tf_224",
            "its config.json names timm's 'maxvit_tiny_tf_224', which is no ViT of timm 1.0.31: it cannot",
        ),
        ("samvit_base_patch16", "a VisionTransformerSAM, which ViTConfig cannot express"),
        (
            "vit_base_patch16_224",
            "is of architecture 'vit_base_patch16_224', which has other keys than stem.0.weight: give",
        ),
    ],
)
def test_an_architecture_that_cannot_be_read_is_named_before_the_keys(folder: Path, architecture: str, words: str) -> None:
    """The weights may be those of the architecture: the advice to give their config.json would be wrong."""
    save_file({"stem.0.weight": np.zeros(3, np.float32)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=words):
        parity.load(edit_config_json(folder, architecture=architecture))


def test_an_architecture_may_have_the_tag_of_its_weights(folder: Path) -> None:
    expected = parity.load(folder).config
    name = json.loads((folder / "config.json").read_text())["architecture"]
    assert parity.load(edit_config_json(folder, architecture=f"{name}.augreg_in21k")).config == expected


def test_a_config_json_of_an_unknown_library_is_refused(bare_file: Path) -> None:
    (bare_file.parent / "config.json").write_text(json.dumps({"hidden_size": 192, "num_heads": 6}))
    with pytest.raises(InputError, match="names neither a model_type of transformers nor an architecture of timm"):
        parity.load(bare_file)
    (bare_file.parent / "config.json").write_text(json.dumps({"compilerOptions": {}}))  # a file of another program
    assert parity.load(bare_file, given={"image_size": CONFIG.image_size}).config.num_heads == 3


def test_a_config_json_that_contradicts_our_metadata_is_refused(tmp_path: Path, state: Any) -> None:
    parity.write(parity.Checkpoint(CONFIG, "torch", state), f"{tmp_path / 'timm'}/", "timm")
    assert parity.load(tmp_path / "timm").config == CONFIG
    with pytest.raises(InputError, match="says num_heads=6, but the config stored with its weights says 3"):
        parity.load(edit_model_args(tmp_path / "timm", num_heads=6))


def test_a_config_json_with_a_field_that_is_not_written_but_contradicts_our_metadata_is_refused(tmp_path: Path) -> None:
    config = vit_spec.get("dinov3_s16", depth=1, image_size=(64, 64))
    parity.write(reproducible_init.weights(config, 0), f"{tmp_path / 'timm'}/", "timm")
    assert parity.load(tmp_path / "timm").config == config
    with pytest.raises(
        InputError, match=r"says positions\.rotary_base=20\.0, but the config stored with its weights says 100"
    ):
        parity.load(edit_model_args(tmp_path / "timm", rope_temperature=20.0))


@pytest.mark.parametrize(
    "name",
    ["vit_s16", "deit_s16", "deit_s16_distilled", "deit3_s16", "dinov2_s14_reg4", "dinov3_s16", "siglip_b16", "clip_b16"],
)
def test_folders_that_were_written_are_read_as_the_same_config(tmp_path: Path, name: str) -> None:
    config = vit_spec.get(name, depth=1, image_size=(56, 112), patch_size=14, resampling={"antialias": False})
    checkpoint = reproducible_init.weights(config, 0)
    read = []
    for target in ("timm", "hf-vit", "hf-deit", "hf-dinov2", "hf-siglip", "hf-clip"):
        with contextlib.suppress(InputError):  # not every library has every model
            parity.write(checkpoint, f"{tmp_path / target}/", target)
            read.append(parity.load(tmp_path / target).config)
    assert read and all(found == config for found in read)


def test_a_file_with_a_stored_format_is_not_read_as_another(tmp_path: Path, state: Any) -> None:
    parity.save(tmp_path / "a.safetensors", state, CONFIG, "torch")
    assert parity.load(tmp_path / "a.safetensors", format="torch").config == CONFIG
    message = r"says that it is in format 'torch', not 'timm': leave --from \(format=\) out"
    with pytest.raises(InputError, match=message):
        parity.load(tmp_path / "a.safetensors", format="timm")
    with pytest.raises(InputError, match="unknown format 'timmm'; did you mean 'timm'"):
        parity.load(tmp_path / "a.safetensors", format="timmm")


@pytest.mark.parametrize(
    ("given", "message"), [({"norms.eps": -1e-3}, "norms.eps is -0.001: give a positive"), ({"depth": -1}, "depth")]
)
def test_an_invalid_value_of_the_user_is_named(bare_file: Path, given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parity.load(bare_file, given={"image_size": CONFIG.image_size, **given})


# Cost of recognition --------------------------------------------------------------------------------------------------


class ShapeOnly(StoredArray):
    """An array that has a shape but no values."""

    def __init__(self, *shape: int) -> None:
        self.shape, self.dtype = shape, np.dtype(np.float32)

    def read(self, start: int, stop: int) -> Any:
        raise AssertionError("recognition reads no array")


def plain_keys(count: int) -> Iterator[str]:
    return (f"layer{n}.weight" for n in range(count))


def nested_keys(count: int) -> Iterator[str]:
    return ("model." * n + "x" for n in range(count))


def block_keys(count: int) -> Iterator[str]:
    return (f"blocks.{n // 2}.{'norm1' if n % 2 else 'mlp.fc2'}.weight" for n in range(count))


@pytest.mark.parametrize("keys", [plain_keys, nested_keys, block_keys])
def test_the_time_of_recognition_is_proportional_to_the_number_of_keys(keys: Callable[[int], Iterator[str]]) -> None:
    def calls(count: int) -> int:
        arrays = {(key,): ShapeOnly(4, 4) for key in keys(count)} | {("patch_embed.proj.weight",): ShapeOnly(4, 3, 2, 2)}
        total = 0

        def count_call(*event: Any) -> None:
            nonlocal total
            total += 1

        sys.setprofile(count_call)
        try:
            with pytest.raises(InputError):
                recognise(arrays, {})
        finally:
            sys.setprofile(None)
        return total

    calls(10)  # fill the caches
    few, many = calls(300), calls(1200)
    assert many < 5 * few


def test_files_of_the_main_formats_are_recognised() -> None:
    for name in ("timm", "hf-vit", "google", "jax"):
        config = ViTConfig(image_size=32, width=64, depth=1, num_heads=1, mlp_dim=64, num_classes=3)
        layouts = get(name).layouts(config)
        arrays = {
            (key,): ShapeOnly(*layout.shape(config.sizes))
            for layout in layouts.values()
            for key in layout.keys(config.sizes)
        }
        assert recognise(arrays, {})[0].format.name == name


def test_arrays_without_data_in_an_orbax_checkpoint_are_assumed_to_be_zero(tmp_path: Path, state: dict[str, Any]) -> None:
    pytest.importorskip("orbax.checkpoint")
    parity.write(parity.Checkpoint(CONFIG, "torch", state), f"{tmp_path / 'orbax'}/", "jax", container="orbax")
    (tree_file,) = tmp_path.rglob("_METADATA")
    tree = json.loads(tree_file.read_text())
    del tree["store_array_data_equal_to_fill_value"]  # older versions of Orbax do not say that they store all chunks
    tree_file.write_text(json.dumps(tree))
    assert parity.load(tmp_path / "orbax").assumed == ()
    shutil.rmtree(tree_file.parent / "head.kernel/c")
    zeros = Assumption("arrays of zeros", "head/kernel", "as older versions of Orbax leave out the data of arrays of zeros")
    assert parity.load(tmp_path / "orbax").assumed == (zeros,)
    parity.convert(tmp_path / "orbax", tmp_path / "timm.safetensors", "timm")
    assert parity.load(tmp_path / "timm.safetensors").assumed == (zeros,)
