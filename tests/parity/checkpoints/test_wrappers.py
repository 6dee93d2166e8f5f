"""Wrappers of training scripts, and the keys beside a model: known, given by --strip and --ignore, or refused."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parity
import vit_jax
import vit_spec
from parity.__main__ import main
from parity.checkpoints import ignored_keys
from parity.checkpoints.conversion import converted_arrays
from parity.checkpoints.weights import Checkpoint
from tests.twins import perturbed_params, random_images, small_config
from vit_spec import InputError, ViTConfig

torch = pytest.importorskip("torch")

from torch import Tensor, nn

import vit_torch

CONFIG = small_config(vit_spec.get("vit_b16")).replace(image_size=32, width=64, num_heads=1)
State = dict[str, Any]


@pytest.fixture(scope="module")
def state() -> State:
    """Return a state dict with timm's names."""
    return parity.to_torch(perturbed_params(CONFIG), CONFIG)


@pytest.fixture(scope="module")
def features(state: State) -> State:
    """Return a state dict with timm's names and without a classifier."""
    return {key: tensor for key, tensor in state.items() if not key.startswith("head.")}


def save(tmp_path: Path, content: Any) -> Path:
    torch.save(content, tmp_path / "a.pth")
    return tmp_path / "a.pth"


def add_prefix(prefix: str, state: State) -> State:
    return {prefix + key: tensor for key, tensor in state.items()}


def same_weights(checkpoint: Checkpoint, state: State) -> bool:
    """Return whether a checkpoint has the weights of a state dict, bit for bit."""
    found = dict(converted_arrays(checkpoint, "torch"))
    return found.keys() == state.keys() and all(np.array_equal(found[key], state[key].numpy()) for key in state)


def assumed(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the assumptions about which weights are read, what is around them, and what the user ignores."""
    fields = ("weights", "code around the model", "ignored keys")
    return {each.field: f"{each.value} {each.why}" for each in checkpoint.assumed if each.field in fields}


# Known wrappers -------------------------------------------------------------------------------------------------------

WRAPPED: dict[str, Callable[[State], Any]] = {
    "model_state": lambda state: {"epoch": 3, "model_state": state, "optimizer_state": {"state": {0: torch.ones(3)}}},
    "weights": lambda state: {"weights": state},
    "ema_state_dict": lambda state: {"ema_state_dict": add_prefix("module.", state)},
    "ema_params": lambda state: {"ema_params": state},
    "SWA": lambda state: {
        "swa_state_dict": None,
        "state_dict": {"n_averaged": torch.tensor(3), **add_prefix("module.", state)},
    },
    "SWA of DDP": lambda state: {"n_averaged": torch.tensor(3), **add_prefix("module.module.", state)},
}


@pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)
def test_wrappers_of_training_scripts_are_removed_without_an_assumption(
    tmp_path: Path, state: State, wrap: Callable[[State], Any]
) -> None:
    checkpoint = parity.load(save(tmp_path, wrap(state)))
    assert same_weights(checkpoint, state) and not assumed(checkpoint)


def test_compiled_blocks_are_read(tmp_path: Path, state: State) -> None:
    model = vit_torch.ViT(CONFIG)
    model.load_state_dict(state)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend="eager")
    compiled = model.state_dict()
    assert "blocks.0._orig_mod.norm1.weight" in compiled
    checkpoint = parity.load(save(tmp_path, compiled))
    assert same_weights(checkpoint, state) and not assumed(checkpoint)


# Words that modules around a module put into keys -> where they are.
AROUND_MODULES: dict[str, tuple[str, str]] = {
    "FSDP": ("_fsdp_wrapped_module.", r"^|(?<=blocks\.\d\.)"),
    "checkpointing": ("_checkpoint_wrapped_module.", r"(?<=blocks\.1\.)|(?<=mlp\.)"),
    "both": ("_fsdp_wrapped_module._checkpoint_wrapped_module.", r"(?<=blocks\.0\.)"),
    "every module": ("_orig_mod.", r"(?<=\.)"),
    "the projection": ("_orig_mod.", r"(?<=patch_embed\.)"),
    "in a wrapper": ("_orig_mod.", r"^|(?<=attn\.)"),
}


@pytest.mark.parametrize("case", AROUND_MODULES)
def test_modules_around_modules_of_the_model_add_nothing(tmp_path: Path, state: State, case: str) -> None:
    words, places = AROUND_MODULES[case]

    def save_wrapped(state: State) -> Path:
        wrapped = {re.sub(places, words, key): tensor for key, tensor in state.items()}
        assert wrapped.keys() != state.keys()
        return save(tmp_path, {"state_dict": add_prefix("module.", wrapped)} if case == "in a wrapper" else wrapped)

    checkpoint = parity.load(save_wrapped(state))
    assert same_weights(checkpoint, state) and not assumed(checkpoint)
    path = save_wrapped({**state, "blocks.0.adapter.weight": torch.ones(3)})
    with pytest.raises(InputError, match=r"unexpected blocks\.0\.adapter\.weight"):
        parity.load(path)
    assert same_weights(parity.load(path, ignore=[r".*adapter\.weight"]), state)


def test_a_model_beside_its_copy_with_such_modules_is_not_merged_with_it(tmp_path: Path, state: State) -> None:
    copy = {key.replace("blocks.0.", "blocks.0._orig_mod."): tensor + 1 for key, tensor in state.items()}
    with pytest.raises(InputError, match=r"unexpected blocks\.0\._orig_mod\."):
        parity.load(save(tmp_path, {**copy, **state}))


@pytest.mark.parametrize("averaged", ["ema_state_dict", "ema_params"])
@pytest.mark.parametrize("other", ["model_state", "weights", "state_dict", "params"])
def test_averaged_weights_are_preferred_to_the_others_and_these_reported(
    tmp_path: Path, state: State, averaged: str, other: str
) -> None:
    shifted = {key: tensor + 1 for key, tensor in state.items()}
    checkpoint = parity.load(save(tmp_path, {other: state, averaged: shifted}))
    assert same_weights(checkpoint, shifted)
    assert assumed(checkpoint)["weights"].startswith(f"{averaged} not {other}, of the same file")


def test_the_weights_that_lightning_averages_are_preferred_to_the_current_ones(tmp_path: Path, state: State) -> None:
    """The entries are those of Lightning 2.6's callback WeightAveraging."""
    averaged = {key: tensor + 1 for key, tensor in state.items()}
    content = {
        "state_dict": add_prefix("model.", averaged),
        "current_model_state": add_prefix("model.", state),
        "averaging_state": {"n_averaged": torch.tensor(3)},
        "callbacks": {"WeightAveraging": {"latest_update_step": 3}},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(3)}}}],
    }
    checkpoint = parity.load(save(tmp_path, content))
    assert same_weights(checkpoint, averaged)
    assert assumed(checkpoint)["weights"].startswith("state_dict.model not current_model_state,")


@pytest.mark.parametrize("prefix", ["vit.", "model.vit.", "module.vit.", "weights.", "timm_model."])
def test_a_wrapper_that_may_be_a_module_is_reported_as_one(tmp_path: Path, state: State, prefix: str) -> None:
    checkpoint = parity.load(save(tmp_path, add_prefix(prefix, state)))
    module = prefix.removeprefix("module.").removesuffix(".")
    assert same_weights(checkpoint, state)
    assert f"the module that contains {module!r}" in assumed(checkpoint)["code around the model"]


def test_a_folder_of_transformers_timm_wrapper_is_refused_with_what_works(tmp_path: Path, state: State) -> None:
    path = save(tmp_path, add_prefix("timm_model.", state))
    content = {"model_type": "timm_wrapper", "architecture": "vit_base_patch16_224", "model_args": {}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"TimmWrapper: save the model inside it by timm\.models\.save_for_hf\(") as caught:
        parity.load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["weights.weight", "weights", "vit.proj.weight", "vit.scale", "weights.0", "model_state"])
def test_a_layer_with_the_name_of_a_wrapper_is_refused(tmp_path: Path, state: State, key: str) -> None:
    with pytest.raises(InputError, match=f"unexpected {key}") as caught:
        parity.load(save(tmp_path, {**add_prefix("backbone.", state), key: torch.ones(3)}))
    assert "--ignore REGEX" in str(caught.value)


def test_two_models_with_such_names_are_reported(tmp_path: Path, state: State) -> None:
    both = {**add_prefix("vit.", {key: tensor + 1 for key, tensor in state.items()}), **add_prefix("backbone.", state)}
    checkpoint = parity.load(save(tmp_path, both))
    assert same_weights(checkpoint, state) and assumed(checkpoint)["weights"].startswith("backbone not vit,")


# A classifier beside a backbone ---------------------------------------------------------------------------------------


class BackboneAndHead(nn.Module):
    """A network as in fine-tuning scripts: the backbone without its classifier, and a linear layer."""

    def __init__(self, config: ViTConfig, name: str, *, bias: bool = True) -> None:
        super().__init__()
        self.backbone = vit_torch.ViT(config.replace(num_classes=0))
        setattr(self, name, nn.Linear(config.width, config.num_classes, bias=bias))
        self.name = name

    def forward(self, images: Tensor) -> Tensor:
        return getattr(self, self.name)(self.backbone(images))


@pytest.mark.parametrize("name", ["head", "classifier", "fc"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_beside_a_backbone_is_its_classifier_and_an_assumption(
    tmp_path: Path, name: str, bias: bool
) -> None:
    config = vit_spec.get("vit_s16", depth=2, num_classes=7, image_size=64)  # of real width
    torch.manual_seed(0)
    network = BackboneAndHead(config, name, bias=bias).double()
    path = save(tmp_path, {"state_dict": add_prefix("module.", network.state_dict()), "epoch": 3})
    with pytest.warns(parity.AssumptionWarning, match=f"none but the classifier .*{name}"):
        model = vit_torch.load(path)
    images = torch.from_numpy(np.asarray(random_images(config), np.float64)).permute(0, 3, 1, 2)
    with torch.no_grad():
        expected, found = network(images), model.double()(images)
    assert torch.linalg.norm(found - expected) <= 1e-12 * torch.linalg.norm(expected)


def test_a_classifier_beside_a_pytree_of_flax_is_read(tmp_path: Path) -> None:
    params = perturbed_params(CONFIG)
    classifier = params.pop("head")
    flat = {"/".join(("backbone", *path)): leaf for path, leaf in flatten(params)}
    flat |= {f"classifier/{name}": np.asarray(leaf) for name, leaf in classifier.items()}
    np.savez(tmp_path / "a.npz", **flat)
    checkpoint = parity.load(tmp_path / "a.npz")
    expected = {**params, "head": classifier}
    found = parity.to_jax(checkpoint)
    assert all(
        np.array_equal(np.asarray(a), np.asarray(b))
        for (_, a), (_, b) in zip(flatten(expected), flatten(found), strict=True)
    )
    assert "the classifier 'classifier'" in assumed(checkpoint)["code around the model"]


def flatten(tree: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Return the leaves of nested dictionaries with their paths, in order of the paths."""
    if not isinstance(tree, dict):
        return [(path, tree)]
    return [leaf for key in sorted(tree) for leaf in flatten(tree[key], (*path, key))]


WEIGHT, BIAS = torch.ones(CONFIG.num_classes, CONFIG.width), torch.ones(CONFIG.num_classes)
NO_CLASSIFIERS: dict[str, tuple[State, str]] = {  # further keys, and words of the message
    "a norm": ({"head.weight": torch.ones(64), "head.bias": torch.ones(64)}, "unexpected head.weight"),
    "a convolution": ({"head.weight": torch.ones(7, 64, 1), "head.bias": BIAS}, "unexpected head.weight"),
    "an MLP": ({"head.0.weight": WEIGHT, "head.0.bias": BIAS, "head.2.weight": WEIGHT}, "only weights without head"),
    "another word": ({"projector.weight": WEIGHT, "projector.bias": BIAS}, "unexpected projector.weight"),
    "a bias alone": ({"head.bias": BIAS}, "unexpected head.bias"),
    "two classifiers": ({"head.weight": WEIGHT, "fc.weight": WEIGHT}, "unexpected head.weight"),
    "two levels": ({"head.weight": WEIGHT, "model.head.weight": WEIGHT}, "unexpected head.weight"),
    "a further parameter": (
        {"head.weight": WEIGHT, "head.bias": BIAS, "head.scale": torch.ones(())},
        "unexpected head.scale",
    ),
    "a norm between": ({"head.weight": WEIGHT, "neck.weight": torch.ones(64)}, "unexpected neck.weight"),
}


@pytest.mark.parametrize("case", NO_CLASSIFIERS)
def test_what_may_be_no_classifier_of_the_backbone_is_refused(tmp_path: Path, features: State, case: str) -> None:
    more, words = NO_CLASSIFIERS[case]
    with pytest.raises(InputError, match=words):
        parity.load(save(tmp_path, {**add_prefix("model.backbone.", features), **more}))


def test_a_second_classifier_after_that_of_the_backbone_is_refused(tmp_path: Path, state: State) -> None:
    with pytest.raises(InputError, match=r"unexpected head\.weight"):
        parity.load(save(tmp_path, {**add_prefix("backbone.", state), "head.weight": WEIGHT, "head.bias": BIAS}))


def test_a_classifier_of_another_width_is_refused(tmp_path: Path, features: State) -> None:
    with pytest.raises(InputError, match=r"head\.weight \(7, 65\)"):
        parity.load(save(tmp_path, {**add_prefix("backbone.", features), "head.weight": torch.ones(7, 65)}))


# Metrics and losses of Lightning --------------------------------------------------------------------------------------

COUNTS = torch.zeros(10, dtype=torch.int64)
METRICS: dict[str, State] = {  # states that torchmetrics 1.9 stores after persistent(True)
    "MulticlassAccuracy": {f"train_acc.{word}": COUNTS for word in ("tp", "fp", "tn", "fn")},
    "MetricCollection": {f"metrics.f1.{word}": COUNTS for word in ("tp", "fp", "tn", "fn")},
    "Accuracy before 0.8": {f"val_acc.{word}": COUNTS.sum() for word in ("correct", "total")},
    "MulticlassConfusionMatrix": {"val.confmat": torch.zeros((10, 10), dtype=torch.int64)},
}


@pytest.mark.parametrize("case", METRICS)
def test_counts_of_metrics_beside_the_model_are_no_assumption(tmp_path: Path, state: State, case: str) -> None:
    content = {"state_dict": {**add_prefix("model.", state), **METRICS[case]}, "pytorch-lightning_version": "2.6.6"}
    checkpoint = parity.load(save(tmp_path, content))
    assert same_weights(checkpoint, state) and "weights" not in assumed(checkpoint)
    assert any(line.startswith(f"state_dict.{next(iter(METRICS[case])).split('.')[0]} (") for line in checkpoint.left)


BUFFERS: dict[str, State] = {
    "MeanMetric": {"val_loss.mean_value": torch.ones(()), "val_loss.weight": torch.ones(())},
    "MeanSquaredError": {"mse.sum_squared_error": torch.ones(1), "mse.total": torch.tensor(3)},
    "CrossEntropyLoss": {"criterion.weight": torch.ones(7)},
    "BCEWithLogitsLoss": {"loss_fn.pos_weight": torch.ones(7)},
    "BCEWithLogitsLoss of another name": {"objective.pos_weight": torch.ones(7)},
    "CrossEntropyLoss of another name": {"cross_entropy.weight": torch.ones(7)},
    "DINOLoss": {"criterion.center": torch.ones(1, 64)},
    "a loss in a loss": {"train_loss.ce.weight": torch.ones(7)},
}


@pytest.mark.parametrize("case", BUFFERS)
def test_buffers_that_are_probably_of_metrics_and_losses_are_an_assumption(tmp_path: Path, state: State, case: str) -> None:
    checkpoint = parity.load(save(tmp_path, {"state_dict": {**add_prefix("model.", state), **BUFFERS[case]}}))
    word = next(iter(BUFFERS[case])).split(".")[0]
    assert same_weights(checkpoint, state) and f"not {word}, of the same file" in assumed(checkpoint)["weights"]


LAYERS: dict[str, State] = {  # layers of a model that have the names of metrics and losses
    "criterion is a linear layer": {"criterion.weight": torch.ones(7, 64), "criterion.bias": torch.ones(7)},
    "criterion is a linear layer without bias": {"criterion.weight": torch.ones(7, 64)},
    "criterion is a norm": {"criterion.weight": torch.ones(64), "criterion.bias": torch.ones(64)},
    "loss is an MLP": {"loss.0.weight": torch.ones(7, 64), "loss.0.bias": torch.ones(7)},
    "prototypes of ArcFace": {"loss_fn.weight": torch.ones(7, 64)},
    "a matrix of this name": {"gate.pos_weight": torch.ones(7, 64)},
    "a layer of positions": {"gate.pos_weight": torch.ones(64), "gate.bias": torch.ones(64)},
    "a layer scale": {"criterion.gamma": torch.ones(64)},
    "learned counts": {f"gate.{word}": torch.ones(10) for word in ("tp", "fp", "tn", "fn")},
    "counts and a weight": {"gate.correct": COUNTS, "gate.total": COUNTS, "gate.weight": torch.ones(64, 64)},
    "vectors of means": {"shift.mean_value": torch.ones(64), "shift.weight": torch.ones(64)},
    "a scale": {"scale.weight": torch.ones(()), "scale.total": torch.ones(())},
}


@pytest.mark.parametrize("case", LAYERS)
def test_layers_with_the_names_of_metrics_and_losses_are_refused(tmp_path: Path, state: State, case: str) -> None:
    with pytest.raises(InputError, match=f"unexpected state_dict.{next(iter(LAYERS[case]))}"):
        parity.load(save(tmp_path, {"state_dict": {**add_prefix("model.", state), **LAYERS[case]}}))


# --strip --------------------------------------------------------------------------------------------------------------

STRIPPED: dict[str, tuple[str, Callable[[State], Any]]] = {
    "alone": ("image_tower.", lambda state: add_prefix("image_tower.", state)),
    "without its dot": ("image_tower", lambda state: add_prefix("image_tower.", state)),
    "after wrappers": ("image_tower.", lambda state: {"state_dict": add_prefix("module.image_tower.", state)}),
    "before wrappers": ("image_tower.", lambda state: {"image_tower": {"model": state}}),
    "with wrappers": ("state_dict.module.image_tower.", lambda s: {"state_dict": add_prefix("module.image_tower.", s)}),
    "with a slash": ("nets/image_tower/", lambda state: {"nets": {"image_tower": state}}),
    "of two words": ("towers.image.", lambda state: add_prefix("towers.image.", state)),
    "within a word": ("m_", lambda state: add_prefix("m_", state)),
}


@pytest.mark.parametrize("case", STRIPPED)
def test_a_given_prefix_is_stripped_and_its_module_reported(tmp_path: Path, state: State, case: str) -> None:
    prefix, wrap = STRIPPED[case]
    path = save(tmp_path, wrap(state))
    with pytest.raises(InputError):
        parity.load(path)
    checkpoint = parity.load(path, strip=prefix)
    assert same_weights(checkpoint, state)
    assert "the module that contains" in assumed(checkpoint)["code around the model"]


def test_the_message_about_an_unknown_wrapper_gives_the_option_that_reads_it(tmp_path: Path, state: State) -> None:
    path = save(tmp_path, {"state_dict": add_prefix("nets.image_tower.", state)})
    with pytest.raises(InputError, match=r"--strip state_dict\.nets\.image_tower\. reads the model"):
        parity.load(path)
    assert same_weights(parity.load(path, strip="state_dict.nets.image_tower."), state)


def test_the_message_about_unknown_wrappers_names_each_and_what_to_ignore(tmp_path: Path, state: State) -> None:
    """As MoCo v3 stores two encoders and a predictor."""
    both = {**add_prefix("base_encoder.", state), **add_prefix("momentum_encoder.", {k: v + 1 for k, v in state.items()})}
    path = save(tmp_path, {"state_dict": {**both, "predictor_of_moco.0.weight": torch.zeros(4, 4)}})
    with pytest.raises(InputError) as caught:
        parity.load(path)
    options = dict(re.findall(r"--strip (\S+) with --ignore '(\S+)'", str(caught.value)))
    assert list(options) == ["state_dict.base_encoder.", "state_dict.momentum_encoder."]
    first, _ = (parity.load(path, strip=prefix, ignore=[pattern]) for prefix, pattern in options.items())
    assert same_weights(first, state)


@pytest.mark.parametrize("key", ["stem.conv1.weight", "stages.0.patch_embed.proj.weight", "blocks.0.conv1.weight"])
def test_the_message_about_another_model_gives_no_prefix_that_reads_nothing(tmp_path: Path, key: str) -> None:
    arrays = {key: torch.zeros(8, 3, 2, 2), "stages.0.attn.qkv.weight": torch.zeros(24, 8), "head.fc.bias": torch.zeros(3)}
    with pytest.raises(InputError, match=r"no format has such keys: .* lists the formats") as caught:
        parity.load(save(tmp_path, arrays))
    assert "--strip" not in str(caught.value)


def test_a_classifier_beside_a_given_prefix_is_read(tmp_path: Path, state: State, features: State) -> None:
    beside = {**add_prefix("image_tower.", features), "fc.weight": state["head.weight"], "fc.bias": state["head.bias"]}
    assert same_weights(parity.load(save(tmp_path, beside), strip="image_tower."), state)


def test_a_given_prefix_of_flax_is_stripped(tmp_path: Path) -> None:
    params = perturbed_params(CONFIG)
    flat = {"/".join(("params", "image_tower", *path)): np.asarray(leaf) for path, leaf in flatten(params)}
    np.savez(tmp_path / "a.npz", **flat)
    for prefix in ("image_tower/", "image_tower", "params/image_tower/", "params.image_tower."):
        found = parity.to_jax(parity.load(tmp_path / "a.npz", strip=prefix))
        assert all(np.array_equal(a, np.asarray(b)) for (_, a), (_, b) in zip(flatten(found), flatten(params), strict=True))


def test_a_given_prefix_selects_one_of_several_models(tmp_path: Path, state: State) -> None:
    averaged = {key: tensor + 1 for key, tensor in state.items()}
    path = save(tmp_path, {"model": state, "model_ema": averaged})
    assert same_weights(parity.load(path), averaged)
    assert same_weights(parity.load(path, strip="model."), state)


INVALID_PREFIXES = {
    "imge_tower.": "--strip 'imge_tower.' is not the beginning of a key; did you mean 'image_tower.'?",
    "zzz": "--strip 'zzz' is not the beginning of a key, such as image_tower.",
    "": "--strip '' is empty: give the beginning of the keys",
    "image_tower.blocks.": "--strip 'image_tower.blocks.': the keys under it have no patch projection",
}


@pytest.mark.parametrize("prefix", INVALID_PREFIXES)
def test_a_prefix_that_has_no_weights_is_refused(tmp_path: Path, state: State, prefix: str) -> None:
    with pytest.raises(InputError) as caught:
        parity.load(save(tmp_path, add_prefix("image_tower.", state)), strip=prefix)
    assert INVALID_PREFIXES[prefix] in str(caught.value) and "\n" not in str(caught.value)


def test_a_stripped_prefix_excuses_no_other_key(tmp_path: Path, state: State) -> None:
    with pytest.raises(InputError, match=r"unexpected adapter\.weight"):
        parity.load(save(tmp_path, {**add_prefix("image_tower.", state), "adapter.weight": WEIGHT}), strip="image_tower.")


# --ignore -------------------------------------------------------------------------------------------------------------

MORE = {"aux.weight": torch.ones(3), "aux.bias": torch.ones(3)}
IGNORED: dict[str, tuple[str, Callable[[State], Any]]] = {
    "beside the weights": (r"aux\..*", lambda state: {**add_prefix("backbone.", state), **MORE}),
    "among the weights": (r"aux\..*", lambda state: {**state, **MORE}),
    "in a wrapper": (r"aux\..*", lambda state: {"model": {**state, **MORE}}),
    "with the wrapper": (r"model\.aux\..*", lambda state: {"model": {**state, **MORE}}),
    "by a slash": (r"net/aux/(weight|bias)", lambda state: {"net": {**state, "aux": {"weight": WEIGHT, "bias": BIAS}}}),
}


@pytest.mark.parametrize("case", IGNORED)
def test_ignored_keys_are_listed_and_an_assumption(tmp_path: Path, state: State, case: str) -> None:
    pattern, wrap = IGNORED[case]
    if "/" in pattern:
        pattern = pattern.replace("/", r"\.")
    path = save(tmp_path, wrap(state))
    with pytest.raises(InputError, match=r"unexpected .*aux\.weight"):
        parity.load(path)
    checkpoint = parity.load(path, ignore=[pattern])
    [line] = [line for line in checkpoint.left if "aux" in line]
    assert same_weights(checkpoint, state)
    assert line.endswith(f" and 1 more: ignored by --ignore '{pattern}'")
    assert f"--ignore '{pattern}'" in assumed(checkpoint)["ignored keys"]


def test_several_expressions_ignore_the_keys_of_each(tmp_path: Path, state: State) -> None:
    path = save(tmp_path, {**add_prefix("backbone.", state), **MORE, "neck.weight": torch.ones(3)})
    with pytest.raises(InputError, match=r"except for unexpected neck\.weight\."):
        parity.load(path, ignore=[r"aux\..*"])
    assert same_weights(parity.load(path, ignore=[r"aux\..*", r"neck\.weight"]), state)


def test_ignored_keys_are_recorded_with_a_written_file(tmp_path: Path, state: State) -> None:
    path = save(tmp_path, {**add_prefix("backbone.", state), **MORE})
    parity.convert(path, tmp_path / "b.safetensors", "jax", ignore=[r"aux\..*"])
    assert "aux.weight and 1 more" in assumed(parity.load(tmp_path / "b.safetensors"))["ignored keys"]


def test_ignoring_other_weights_selects_those_that_remain(tmp_path: Path, state: State) -> None:
    averaged = {key: tensor + 1 for key, tensor in state.items()}
    checkpoint = parity.load(save(tmp_path, {"model": state, "model_ema": averaged}), ignore=[r"model_ema\..*"])
    assert same_weights(checkpoint, state) and "weights" not in assumed(checkpoint)


PARAMETERS = [
    r"head\..*",
    r"cls_token",
    r".*\.bias",
    r"blocks\.1\..*",
    r"pos_embed",
    r"norm\.weight",
    r"blocks\.0\.norm1\.bias",
]


@pytest.mark.parametrize("pattern", PARAMETERS)
@pytest.mark.parametrize("prefix", ["", "model.", "backbone."])
def test_a_parameter_is_never_ignored(tmp_path: Path, state: State, pattern: str, prefix: str) -> None:
    """Without these, the file would be that of another model: without a classifier, class token, bias or block."""
    with pytest.raises(
        InputError, match=r"--ignore matches .*, a parameter of format timm: ignore only other keys"
    ) as caught:
        parity.load(save(tmp_path, add_prefix(prefix, state)), ignore=[pattern])
    assert "\n" not in str(caught.value)


INVALID_EXPRESSIONS = {
    "aux(": r"--ignore 'aux\(' is not a regular expression \(.*unterminated subpattern.*\): correct it",
    "a{99999999999}": "is not a regular expression",
    "aux": "--ignore 'aux' matches no key, and of aux.weight only a part: match a whole key",
    "extra.*": "--ignore 'extra..' matches no key: leave it out",
    ".*": "--ignore matches all keys of the weights",
    "": "--ignore '' matches no key",
}


@pytest.mark.parametrize("pattern", INVALID_EXPRESSIONS)
def test_an_invalid_expression_is_refused_in_one_line(tmp_path: Path, state: State, pattern: str) -> None:
    with pytest.raises(InputError, match=INVALID_EXPRESSIONS[pattern]) as caught:
        parity.load(save(tmp_path, {**state, **MORE}), ignore=[pattern])
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("error")
def test_an_expression_that_python_warns_about_is_matched(tmp_path: Path, state: State) -> None:
    assert same_weights(parity.load(save(tmp_path, {**state, **MORE}), ignore=["aux[[.].*"]), state)


@pytest.mark.parametrize("pattern", [r"(.*\.)*center", r"(a+)+b", r"(\w|\w\w)*\."])
def test_an_expression_that_takes_exponential_time_is_stopped(
    tmp_path: Path, state: State, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ignored_keys, "_MAX_SECONDS", 1)
    hostile = {"." * 60: torch.ones(3), "a" * 60: torch.ones(3)}
    with pytest.raises(InputError, match="takes more than 1 s for the keys of this file"):
        parity.load(save(tmp_path, {**state, **hostile}), ignore=[pattern])


def test_one_text_for_several_expressions_is_refused(tmp_path: Path, state: State) -> None:
    with pytest.raises(InputError, match="a list of expressions was expected"):
        parity.load(save(tmp_path, {**state, **MORE}), ignore="aux.*")


@pytest.mark.parametrize("options", [{"strip": "blocks."}, {"ignore": ["head.*"]}])
def test_a_file_that_this_project_wrote_takes_neither_option(tmp_path: Path, options: Any) -> None:
    parity.save(tmp_path / "a.safetensors", perturbed_params(CONFIG), CONFIG, "jax")
    with pytest.raises(InputError, match=r"leave --strip \(strip=\) and --ignore \(ignore=\) out"):
        parity.load(tmp_path / "a.safetensors", **options)


# Everywhere that a source is read -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wrapped_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of ViT-S/16, 22 million parameters, that needs both options."""
    config = vit_spec.get("vit_s16")
    state = parity.to_torch(vit_jax.init(config), config)
    return save(tmp_path_factory.mktemp("wrapped"), {"nets": {**add_prefix("image_tower.", state), **MORE}})


FLAGS = ["--strip", "nets.image_tower.", "--ignore", r"nets\.aux\..*"]
OPTIONS: Any = {"strip": "nets.image_tower.", "ignore": [r"nets\.aux\..*"]}


def test_the_command_line_reads_a_model_of_real_size_with_both_options(
    wrapped_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(wrapped_file), *FLAGS, str(tmp_path / "b.safetensors"), "--to", "torch"]) == 0
    text = capsys.readouterr().out
    assert r"not read: nets.aux.weight and 1 more: ignored by --ignore 'nets\.aux\..*'" in text
    assert same_weights(
        parity.load(tmp_path / "b.safetensors"),
        {
            key.removeprefix("image_tower."): tensor
            for key, tensor in torch.load(wrapped_file)["nets"].items()
            if key.startswith("image_tower.")
        },
    )
    assert main(["inspect", str(wrapped_file), *FLAGS, "--no-values", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["width"] == 384
    assert main(["inspect", str(wrapped_file)]) == 2


@pytest.mark.filterwarnings("ignore::parity.AssumptionWarning")
def test_both_twins_load_with_both_options(wrapped_file: Path) -> None:
    _, params = vit_jax.load(wrapped_file, **OPTIONS)
    state = parity.to_torch(params, vit_spec.get("vit_s16"))
    model = vit_torch.load(wrapped_file, **OPTIONS)
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())


def test_golden_record_and_diagnose_take_both_options(
    tmp_path: Path, state: State, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(tmp_path, {"nets": {**add_prefix("image_tower.", state), **MORE}})
    assert main(["golden", "record", str(path), str(tmp_path / "g.npz"), *FLAGS]) == 0
    images = torch.from_numpy(np.asarray(random_images(CONFIG), np.float32))
    wrong = vit_torch.ViT(CONFIG.replace(norms={"eps": 1e-2}))
    wrong.load_state_dict(state)
    with torch.no_grad():
        logits = wrong.eval()(images.permute(0, 3, 1, 2)).numpy()
    np.savez(tmp_path / "expected.npz", images=images.numpy(), logits=logits)
    capsys.readouterr()
    assert main(["diagnose", str(path), "--logits", str(tmp_path / "expected.npz"), *FLAGS]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert r"--strip nets.image_tower. --ignore 'nets\.aux\..*'" in text  # the command that it suggests
