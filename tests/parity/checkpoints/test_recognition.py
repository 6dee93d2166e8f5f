"""A file is recognised by its keys: wrappers are removed, other content is reported, incomplete models are refused."""

import json
from itertools import product

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import parity
import vit_spec
from parity.checkpoints.config_overrides import parse_overrides
from parity.checkpoints.conversion import converted_arrays
from parity.checkpoints.formats import get
from parity.checkpoints.weights import Checkpoint
from tests.twins import small_config
from vit_spec import InputError

torch = pytest.importorskip("torch")
vit_torch = pytest.importorskip("vit_torch")

CONFIG = small_config(vit_spec.get("vit_b16")).replace(image_size=32, width=64, num_heads=1)


@pytest.fixture(scope="module")
def state():
    """Return a state dict with timm's names."""
    rng = np.random.default_rng(0)
    return {
        key: torch.tensor(rng.standard_normal(layout.shape(CONFIG.sizes), np.float32))
        for layout in get("torch").layouts(CONFIG).values()
        for key in layout.keys(CONFIG.sizes)
    }


def save(tmp_path, content):
    """Save a file with torch, and return its path."""
    torch.save(content, tmp_path / "a.pth")
    return tmp_path / "a.pth"


def add_prefix(prefix, state):
    return {prefix + key: tensor for key, tensor in state.items()}


def same_weights(checkpoint, state):
    """Return whether a checkpoint has the weights of a state dict."""
    found = dict(converted_arrays(checkpoint, "torch"))
    return found.keys() == state.keys() and all(np.array_equal(found[key], state[key].numpy()) for key in state)


WRAPPED = {
    "model": lambda state: {"model": state},
    "distributed": lambda state: {"state_dict": add_prefix("module.", state)},
    "compiled": lambda state: {"state_dict": add_prefix("model._orig_mod.", state)},
    "teacher": lambda state: {"teacher": add_prefix("backbone.", state)},
    "flat": lambda state: add_prefix("_orig_mod.module.", state),
    "averaged": lambda state: {"epoch": 3, "model_ema": state},
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_wrappers_are_removed(tmp_path, state, wrap):
    assert same_weights(parity.load(save(tmp_path, wrap(state))), state)


@pytest.mark.parametrize("wrap", [dict, lambda averaged: {"module": averaged}], ids=["flat", "module"])
def test_averaged_weights_are_preferred_and_the_others_reported(tmp_path, state, wrap):
    averaged = {key: tensor + 1 for key, tensor in state.items()}
    checkpoint = parity.load(save(tmp_path, {"model": state, "model_ema": wrap(averaged)}))
    assert same_weights(checkpoint, averaged)
    assert checkpoint.left == (f"model ({len(state)} arrays): beside the weights",)


def test_training_state_beside_the_weights_is_reported_and_not_read(tmp_path, state):
    run = {"optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}}, "scaler": {"scale": torch.ones(())}, "epoch": 7}
    checkpoint = parity.load(save(tmp_path, {"model": state, **run}))
    assert same_weights(checkpoint, state)
    assert checkpoint.left == ("optimizer (1 array): beside the weights", "scaler (1 array): beside the weights")


COUNTERS = {
    "torch.distributed": lambda state: {"model": state, "optim": {"state": {"cls_token": {"exp_avg": torch.ones(3)}}}},
    "examples of PyTorch": lambda state: {"state_dict": add_prefix("module.", state), "best_acc1": torch.tensor(70.5)},
    "torch.optim.swa_utils.AveragedModel": lambda state: {**add_prefix("module.", state), "n_averaged": torch.tensor(3)},
    "big_vision": lambda state: {"params": state, "extra": {"accum_train_time": torch.tensor(3.0)}},
    "scenic": lambda state: {"params": state, "accum_train_time": torch.tensor(3)},
}


@pytest.mark.parametrize("wrap", COUNTERS.values(), ids=COUNTERS)
def test_counters_of_a_run_are_not_an_assumption(tmp_path, state, wrap):
    assert same_weights(checkpoint := parity.load(save(tmp_path, wrap(state))), state)
    assert not reasons_for_weights(checkpoint)


@pytest.mark.parametrize(
    "more", ["head2.weight", "extra.weight", "blocks.0.attn.lora_a", "encoder_norm.bias", "head.weight"]
)
def test_unknown_keys_beside_the_weights_are_refused(tmp_path, state, more):
    features = {key: tensor for key, tensor in state.items() if not key.startswith("head.")}
    with pytest.raises(InputError, match=rf"unexpected {more}"):
        parity.load(save(tmp_path, {**add_prefix("encoder.", features), more: torch.ones(3)}))


def reasons_for_weights(checkpoint):
    """Return the reasons of the assumptions about which of the file's weights are read."""
    return [each.why for each in checkpoint.assumed if each.field == "weights"]


@pytest.mark.parametrize(
    "more",
    [
        *("head.mlp.0.weight", "scaler.weight", "center", "state.mean", "cache.keys", "text_head.bias", "b"),
        *("logit_scale", "logit_bias", "text.weight", "text_projection.weight", "txt.head.bias"),
    ],
)
def test_keys_that_may_be_a_part_of_the_model_are_an_assumption(tmp_path, state, more):
    part = more.split(".")[0]
    checkpoint = parity.load(save(tmp_path, {**add_prefix("backbone.", state), more: torch.ones(3)}))
    assert reasons_for_weights(checkpoint) == [f"not {part}, of the same file: save that alone to read it"]


@pytest.mark.parametrize(
    "more",
    [
        *("config.weight", "step.bias", "args.head.weight", "epoch_layer.weight", "scheduler.fc.weight"),
        *("dino_head.weight", "dino_proj.weight", "ibot_classifier.bias"),
    ],
)
def test_layers_with_the_name_of_an_entry_of_a_training_run_are_refused(tmp_path, state, more):
    with pytest.raises(InputError, match=f"unexpected {more}"):
        parity.load(save(tmp_path, {**add_prefix("backbone.", state), more: torch.ones(3)}))


@pytest.mark.parametrize("key", ["step", "epoch", "args.mean", "config.std", "rng_state"])
def test_arrays_of_a_training_run_are_not_an_assumption(tmp_path, state, key):
    assert not reasons_for_weights(parity.load(save(tmp_path, {**add_prefix("model.", state), key: torch.ones(3)})))


def test_replicated_parameters_are_named(tmp_path, state):
    replicated = {key: torch.stack([tensor] * 8) for key, tensor in state.items()}
    with pytest.raises(InputError, match=r"an axis of length 8, as those that jax\.pmap replicates: save one"):
        parity.load(save(tmp_path, replicated))


def test_an_array_that_is_there_nested_and_joined_is_refused(tmp_path, state):
    with pytest.raises(InputError, match=r"the file has model\.head\.weight twice"):
        parity.load(save(tmp_path, {"model": state, "model.head.weight": 2 * state["head.weight"]}))


def test_a_text_tower_beside_the_weights_is_not_an_assumption(tmp_path, state):
    tower = {f"text.blocks.{n}.{word}": torch.ones(3) for n in range(4) for word in ("a", "b", "c")}
    checkpoint = parity.load(save(tmp_path, {**add_prefix("model.", state), **tower, "logit_scale": torch.ones(())}))
    assert not reasons_for_weights(checkpoint)


def test_the_extra_state_of_a_module_is_refused(tmp_path, state):
    with pytest.raises(InputError, match=r"unexpected temperature\._extra_state"):
        parity.load(save(tmp_path, {**state, "temperature._extra_state": {"value": 3.0}}))


def test_heads_of_pre_training_are_not_an_assumption(tmp_path, state):
    head = {"head.mlp.0.weight": torch.ones(3), "head.last_layer.weight_g": torch.ones(3)}
    head |= {f"{name}_{key}": tensor for name in ("dino", "ibot") for key, tensor in head.items()}
    head |= {"dino_loss.center": torch.ones(3), "ibot_patch_loss.center": torch.ones(3)}
    assert not reasons_for_weights(
        parity.load(save(tmp_path, {"teacher": {**add_prefix("backbone.", state), **head}, "epoch": 3}))
    )


def test_averaged_weights_in_a_callback_are_an_assumption_and_moments_are_not(tmp_path, state):
    run = {
        "optimizer_states": [add_prefix("model.", state)],
        "callbacks": {"EMA": {"weights": add_prefix("model.", state)}},
    }
    checkpoint = parity.load(save(tmp_path, {"state_dict": add_prefix("model.", state), **run}))
    assert reasons_for_weights(checkpoint) == ["not callbacks, of the same file: save that alone to read it"]


def test_missing_and_unexpected_keys_are_listed(tmp_path, state):
    damaged = {key: tensor for key, tensor in state.items() if key != "blocks.1.norm2.bias"} | {"extra": torch.ones(2)}
    with pytest.raises(InputError) as error:
        parity.load(save(tmp_path, damaged))
    assert "missing blocks.1.norm2.bias" in str(error.value) and "unexpected extra" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("missing", ["blocks.0.mlp.fc2.weight", "blocks.1.mlp.fc2.bias", "blocks.0."])
def test_missing_keys_of_a_block_are_listed(tmp_path, state, missing):
    rest = {key: tensor for key, tensor in state.items() if not key.startswith(missing)}
    with pytest.raises(InputError, match=rf"except for .*missing {missing}.*\. Fetch or save the weights again") as caught:
        parity.load(save(tmp_path, rest))
    assert "no known format; the nearest is" in str(caught.value)


@pytest.mark.parametrize("number", ["01", "\uff11"], ids=["leading zero", "full-width digit"])
@pytest.mark.parametrize("is_first", [False, True])
def test_of_two_keys_of_one_block_the_one_that_no_format_has_is_named(tmp_path, state, number, is_first):
    key = f"blocks.{number}.norm1.weight"
    other = {key: state["blocks.1.norm1.weight"] + 1}
    path = save(tmp_path, {**other, **state} if is_first else {**state, **other})
    with pytest.raises(InputError, match=rf"except for unexpected {key}\. Remove those keys"):
        parity.load(path)
    assert same_weights(parity.load(path, ignore=[key]), state)


@pytest.mark.parametrize("width", [2, 3])
def test_leading_zeros_in_all_keys_are_named(tmp_path, state, width):
    padded = {
        ".".join(word.zfill(width) if word.isdigit() else word for word in key.split(".")): array
        for key, array in state.items()
    }
    zeros = "0" * (width - 1)
    with pytest.raises(
        InputError, match=rf"blocks\.{zeros}0\.(.*) has a number with leading zeros.*rename .* blocks\.0\.\1"
    ):
        parity.load(save(tmp_path, padded))


def test_empty_arrays_are_named(tmp_path, state):
    empty = {f"module.{key}": torch.zeros(0) for key in state}
    with pytest.raises(
        InputError, match=rf"{len(state)} of its {len(state)} arrays are empty, such as .*: gather the weights"
    ):
        parity.load(save(tmp_path, empty))


def test_a_given_format_must_match(tmp_path, state):
    path = save(tmp_path, state)
    assert parity.load(path, format="torch").format == "torch"
    with pytest.raises(InputError, match="format 'google' has no such keys"):
        parity.load(path, format="google")
    with pytest.raises(InputError, match="unknown format 'goggle'; did you mean 'google'"):
        parity.load(path, format="goggle")


def test_weights_of_another_model_match_no_format(tmp_path):
    path = save(tmp_path, {"conv1.weight": torch.ones(3), "fc.bias": torch.ones(3)})
    own = "a format file (--format-file, parity.register_format) or its class (convert --like, parity.derive_table)"
    with pytest.raises(InputError, match=r"no format has such keys: conv1.weight, fc.bias; `python -m parity") as caught:
        parity.load(path)
    assert str(caught.value).endswith(f"; for a model of your own, give {own}")
    with pytest.raises(InputError, match=r"format 'timm' has no such keys: .* where their keys are$"):
        parity.load(path, format="timm")


def test_an_unknown_number_of_heads_has_to_be_given(tmp_path, state):
    config = CONFIG.replace(width=48, num_heads=3)
    arrays = dict(converted_arrays(Checkpoint(config, "torch", zeros(config)), "torch"))
    path = save(tmp_path, {key: torch.tensor(array) for key, array in arrays.items()})
    with pytest.raises(InputError, match="give it with --set num_heads=N"):
        parity.load(path)
    assert parity.load(path, given={"num_heads": 3}).config.num_heads == 3
    with pytest.raises(InputError, match="5 heads do not divide 48"):
        parity.load(path, given={"num_heads": 5})


def test_heads_that_are_not_as_wide_as_the_model_together_are_not_those_of_a_published_model(tmp_path):
    """ViT-S has 6 heads of 64; a model of its width and depth with 8 heads of 64 is no ViT-S."""
    config = vit_spec.get("vit_s16", num_classes=3, image_size=32, num_heads=8, attention={"head_dim": 64})
    np.savez(tmp_path / "a.npz", **zeros(config))
    checkpoint = parity.load(tmp_path / "a.npz")
    assert (checkpoint.config.num_heads, checkpoint.config.head_dim) == (8, 64)
    assert [each.why for each in checkpoint.assumed if each.field == "num_heads"] == [
        "as in most models, whose heads are 64 wide"
    ]
    np.savez(tmp_path / "b.npz", **zeros(config.replace(num_heads=5, attention={"head_dim": 40})))
    with pytest.raises(InputError, match="the tensors do not show the number of heads: give it with --set num_heads=N"):
        parity.load(tmp_path / "b.npz")


def test_heads_that_rotary_positions_cannot_have_are_asked_for(tmp_path):
    config = vit_spec.get("article_xray_rope", width=48, num_heads=3, depth=2, mlp_dim=64)
    format = get("article_xray_rope")
    arrays = dict(converted_arrays(Checkpoint(config, "torch", zeros(config)), "article_xray_rope"))
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(InputError, match=r"8 heads of width 6 have no rotary positions, .*: give --set num_heads=N"):
        parity.load(tmp_path / "a.npz")
    assert format.assumed["num_heads"] == 8
    assert parity.load(tmp_path / "a.npz", given={"num_heads": 3}).config.num_heads == 3


def zeros(config):
    return {
        key: np.zeros(layout.shape(config.sizes), np.float32)
        for layout in get("torch").layouts(config).values()
        for key in layout.keys(config.sizes)
    }


def test_sharded_bin_files_are_one_checkpoint(tmp_path, state):
    keys = list(state)
    parts = {"pytorch_model-00001-of-00002.bin": keys[:9], "pytorch_model-00002-of-00002.bin": keys[9:]}
    for name, part in parts.items():
        torch.save({key: state[key] for key in part}, tmp_path / name)
    index = {"metadata": {}, "weight_map": {key: name for name, part in parts.items() for key in part}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert same_weights(parity.load(tmp_path), state)


# Malformed values -----------------------------------------------------------------------------------------------------

INVALID_OVERRIDES = ["num_heads=four", "num_heads=0", "image_size=big", "image_size=0", "patch_size=0", "width=x"]
INVALID_OVERRIDES += ["tokens.registers=x", "norms.eps=x", "positions.covers=2", "head.pool=men", "pixels.mean=grey"]


@pytest.mark.parametrize("text", INVALID_OVERRIDES)
def test_a_value_that_a_field_cannot_have_is_refused_in_one_line(tmp_path, state, text):
    with pytest.raises(InputError) as error:
        parity.load(save(tmp_path, state), given=parse_overrides([text]))
    assert "\n" not in str(error.value) and "a.pth: " in str(error.value)


INVALID_VALUES = ["x", -1, 0, 1e300, None, [], {}, [1, "x"], {"a": 1}, True]


@pytest.mark.parametrize("name", ["hf-vit", "timm"])
def test_a_config_json_with_an_invalid_value_is_read_or_refused(tmp_path, state, name):
    checkpoint = parity.load(save(tmp_path, state))
    parity.write(checkpoint, f"{tmp_path / 'folder'}/", name)
    path = tmp_path / "folder" / "config.json"
    file = tmp_path / "folder" / "model.safetensors"
    save_file(load_file(file), file, {"format": "pt"})  # as its own library writes it: without the metadata of this project
    content = json.loads(path.read_text())
    failures = []
    for key, value in product(content, INVALID_VALUES):
        path.write_text(json.dumps(content | {key: value}))
        try:
            if (depth := parity.load(tmp_path / "folder").config.depth) != CONFIG.depth:
                failures.append(f"{key}={value!r} is read with depth={depth}")
        except InputError:
            continue
        except Exception as error:
            failures.append(f"{key}={value!r} raises {error!r}")
    assert not failures, "\n".join(failures)


def test_entries_of_other_programs_named_config_and_format_are_ignored(tmp_path, state):
    others = {"config": 3, "format": 7, "config.json": "vit.yaml"}
    assert same_weights(parity.load(save(tmp_path, {"model": state, **others})), state)


@pytest.mark.parametrize("class_token", [True, False])
def test_the_image_size_follows_from_a_square_table_of_relative_positions(tmp_path, class_token):
    head, tokens = {"pool": "token" if class_token else "mean"}, {"class_token": class_token}
    relative = {"kind": "none", "relative": "table", "relative_shared": True}
    config = CONFIG.replace(image_size=24, patch_size=8, positions=relative, tokens=tokens, head=head)
    state = vit_torch.ViT(config).state_dict()
    assert parity.load(save(tmp_path, state)).config.image_size == (24, 24)
    state = vit_torch.ViT(config.replace(image_size=(16, 24))).state_dict()
    with pytest.raises(InputError, match="do not fit a square grid: give --set image_size=HxW"):
        parity.load(save(tmp_path, state))
    assert parity.load(save(tmp_path, state), given={"image_size": (16, 24)}).config.grid == (2, 3)
