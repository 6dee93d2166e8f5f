"""Diagnosis of outputs of models to which known causes were applied: it must name these causes first."""

import json
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("jax")

import torch.nn.functional as F

import parity
import vit_spec
import vit_torch
from parity import Checkpoint
from parity.__main__ import main
from parity.checkpoints.assumptions import Assumption
from parity.checkpoints.conversion import parameter
from parity.checkpoints.formats import get
from parity.checkpoints.surgery.edit import to_float64
from parity.checkpoints.weights import flatten
from parity.comparison.diagnosis import (
    CommandLineSource,
    Diagnosis,
    diagnose,
    diagnose_against,
    expected_outputs,
    layer_search,
    read_expected_outputs,
)
from parity.comparison.diagnosis.catalogue import catalogue
from parity.comparison.diagnosis.evaluator import Evaluator, Result
from parity.comparison.diagnosis.hypothesis import Hypothesis, Runner, Trial
from parity.comparison.diagnosis.layer_hypotheses import operations, single_block_hypotheses
from parity.comparison.diagnosis.numeric_hypotheses import scale_factors
from parity.comparison.diagnosis.patches import Inapplicable, confine_to_block
from parity.comparison.diagnosis.repair import repair
from parity.comparison.diagnosis.search import CauseSearch
from parity.comparison.diagnosis.weight_hypotheses import rotary_orders
from parity.comparison.own_model.twin import Twin
from tests.twins import perturbed_params, small_config
from vit_spec import InputError, ViTConfig

PLAIN = small_config(vit_spec.get("vit_s16"))
MEAN = PLAIN.replace(head={"pool": "mean"})
SCALED = small_config(vit_spec.get("deit3_s16"))
GATED = small_config(vit_spec.get("dinov2_g14"))
ROTARY = small_config(vit_spec.get("article_xray_rope"))
DISTILLED = small_config(vit_spec.get("deit_s16_distilled"))
FIXED = PLAIN.replace(positions={"kind": "fixed", "table": "sincos_2d_mae"})
NORMED = PLAIN.replace(attention={"qk_norm": True})
FACTORIZED = PLAIN.replace(image_size=(32, 32), patch_size=(8, 8), positions={"covers": "none", "factorized": True})

State = dict[str, Any]  # of the PyTorch twin
Change = Callable[[State], None]


def checkpoint(config: ViTConfig = PLAIN, seed: int = 0) -> Checkpoint:
    return Checkpoint(config, "torch", {name: tensor.clone() for name, tensor in _weights(config, seed).items()})


@cache
def _weights(config: ViTConfig, seed: int) -> State:
    return parity.to_torch(perturbed_params(config, seed), config)


def uint8_images(config: ViTConfig = PLAIN, size: tuple[int, int] | None = None) -> np.ndarray:
    """Return eight uint8 images (B, H, W, C) in which all channels and positions differ."""
    height, width = size or config.image_size
    rng = np.random.default_rng(3)
    slope = np.arange(config.in_channels) * 15 + np.linspace(0, 60, height)[:, None, None]
    return (rng.integers(0, 150, (8, height, width, config.in_channels)) + slope).astype(np.uint8)


def model_outputs(
    config: ViTConfig,
    state: State,
    images: np.ndarray,
    execution: Any = None,
    change_model: Callable[[Any], None] | None = None,
) -> np.ndarray:
    """Return the float32 outputs of the PyTorch twin, with a change of its modules, for uint8 images."""
    model = vit_torch.ViT(config, execution).eval()
    if change_model:
        change_model(model)
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    pixels = [np.array(values) for values in (config.pixels.mean, config.pixels.std)]
    x = torch.tensor((images / 255 - pixels[0]) / pixels[1], dtype=torch.float32).permute(0, 3, 1, 2)
    with torch.no_grad():
        return model(x).float().numpy()


def diagnose_with(config: ViTConfig, right: ViTConfig, change_weights: Change | None = None, **options: Any) -> Diagnosis:
    """Diagnose a checkpoint of `config` whose outputs should be those of the config `right` with changed weights."""
    file, images = checkpoint(config), uint8_images(config, options.pop("size", None))
    state = {name: tensor.clone() for name, tensor in file.arrays.items()}
    if change_weights:
        change_weights(state)
    logits = model_outputs(right, state, images, options.pop("execution", None))
    return diagnose(file, expected_outputs(images, logits, config), **{"pairs": 100, **options})


# One cause ------------------------------------------------------------------------------------------------------------

FIELDS: dict[str, tuple[ViTConfig, dict[str, Any]]] = {
    "activation": (PLAIN, {"mlp": {"activation": "gelu_tanh"}}),
    "LayerNorm eps": (PLAIN, {"norms": {"eps": 1e-3}}),
    "score scale": (PLAIN, {"attention": {"scale": 0.25}}),
    "number of heads": (PLAIN, {"num_heads": 4}),
    "normalization": (PLAIN, {"pixels": {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}}),
    "pooling": (PLAIN, {"head": {"pool": "mean"}}),
    "norm around the pooling": (PLAIN, {"norms": {"after_blocks": False}}),
    "shared norm": (PLAIN, {"norms": {"shared_norm": True}}),
    "norm of queries": (NORMED, {"attention": {"qk_norm": False}}),
    "position table": (FIXED, {"positions": {"table": "sincos_2d_timm"}}),
    "tokens with a position": (FIXED.replace(positions={"table": "sincos_1d"}), {"positions": {"covers": "none"}}),
    "rotary base": (ROTARY, {"positions": {"rotary_base": 100.0}}),
    "rotary layout": (ROTARY, {"positions": {"rotary": "dinov3"}}),
}


@pytest.mark.parametrize("family", FIELDS)
def test_a_wrong_field_of_the_config_is_named(family: str) -> None:
    config, change = FIELDS[family]
    diagnosis = diagnose_with(config, config.replace(**change))
    assert diagnosis.matched and diagnosis.matched[0].families == (family,), diagnosis.verdict


PICTURED = PLAIN.replace(pixels={"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)})
IMAGES: dict[
    str, tuple[ViTConfig, Any]
] = {  # what is wrong -> the config of the expected outputs, and a change of the images
    "images are normalized by the standard deviation as mean and the mean as standard deviation": (
        PICTURED.replace(pixels={"mean": PICTURED.pixels.std, "std": PICTURED.pixels.mean}),
        None,
    ),
    "images are mirrored left to right": (PICTURED, lambda images: images[:, :, ::-1]),
    "images are upside down": (PICTURED, lambda images: images[:, ::-1]),
}


@pytest.mark.parametrize("name", IMAGES)
def test_wrong_images_are_named(name: str) -> None:
    right, change = IMAGES[name]
    file, images = checkpoint(PICTURED), uint8_images(PICTURED)
    logits = model_outputs(right, file.arrays, images if change is None else change(images).copy())
    diagnosis = diagnose(file, expected_outputs(images, logits, PICTURED), pairs=100)
    assert diagnosis.matched and diagnosis.matched[0].names == (name,), diagnosis.verdict


@pytest.mark.parametrize("mode", [{"antialias": False}, {"kernel": "bilinear", "antialias": False, "align_corners": True}])
def test_a_wrong_resampling_of_positions_is_named(mode: dict[str, Any]) -> None:
    diagnosis = diagnose_with(PLAIN, PLAIN.replace(resampling=mode), size=(80, 64))
    assert diagnosis.matched[0].families == ("resampling",), diagnosis.verdict


def test_an_uncommon_eps_is_solved_for() -> None:
    diagnosis = diagnose_with(PLAIN, PLAIN.replace(norms={"eps": 3.7e-4}))
    assert diagnosis.matched[0].names == ("LayerNorm eps is 0.00037",), diagnosis.verdict


def test_the_normalization_of_another_data_set_is_solved_for() -> None:
    right = PICTURED.replace(pixels={"mean": (0.4914, 0.4822, 0.4465), "std": (0.2023, 0.1994, 0.201)})
    logits = model_outputs(right, checkpoint(PICTURED).arrays, uint8_images())
    diagnosis = diagnose(checkpoint(PICTURED), expected_outputs(uint8_images(), logits, PICTURED), pairs=0)
    name = "images are normalized by mean (0.4914, 0.4822, 0.4465) and standard deviation (0.2023, 0.1994, 0.201)"
    assert diagnosis.matched and diagnosis.matched[0].names == (name,), diagnosis.verdict
    assert "--set 'pixels.std=(0.2023, 0.1994, 0.201,)'" in diagnosis.remedy


VIT_TI = vit_spec.get("vit_ti16", image_size=(64, 64), num_classes=20, depth=3)


@pytest.mark.parametrize(
    ("config", "block", "eps", "norm"),
    [
        (VIT_TI, "", 1e-5, "norm1"),
        (VIT_TI, "", 1e-3, "norm2"),
        (PLAIN, "0.", 1e-3, "norm2"),
        (PLAIN, "1.", 1e-3, "norm1"),
    ],
)
def test_another_eps_of_one_norm_of_the_blocks_is_named(config: ViTConfig, block: str, eps: float, norm: str) -> None:
    def change_eps(model: Any) -> None:
        for name, module in model.named_modules():
            if name.startswith(f"blocks.{block}") and name.endswith(f".{norm}"):
                module.eps = eps

    file, images = checkpoint(config), uint8_images(config)
    logits = model_outputs(config, file.arrays, images, change_model=change_eps)
    diagnosis = diagnose(file, expected_outputs(images, logits, config), pairs=0)
    where = f"in block {block[0]} alone, " if block else ""
    assert [cause.names for cause in diagnosis.matched] == [(f"{where}eps of {norm} alone is {eps:g}",)], diagnosis.verdict


def _change_tensors(end: str, change: Callable[[Any], Any]) -> Change:
    """Return the change of every tensor whose name ends with `end`."""

    def change_weights(state: State) -> None:
        for name in [name for name in state if name.endswith(end)]:
            state[name] = change(state[name]).reshape(state[name].shape)

    return change_weights


def _compose(*changes: Change) -> Change:
    def change_weights(state: State) -> None:
        for change in changes:
            change(state)

    return change_weights


def _transpose_in_block_1(state: State) -> None:
    state["blocks.1.attn.proj.weight"] = state["blocks.1.attn.proj.weight"].T


def _swap_q_and_k(state: State) -> None:
    _change_tensors("attn.qkv.weight", lambda w: torch.cat([w[16:32], w[:16], w[32:]]))(state)
    _change_tensors("attn.qkv.bias", lambda b: torch.cat([b[16:32], b[:16], b[32:]]))(state)


def _add_class_position_twice(state: State) -> None:
    state["cls_token"] = state["cls_token"] + state["pos_embed"][:, :1]


def _swap_tokens(state: State) -> None:
    state["cls_token"], state["dist_token"] = state["dist_token"], state["cls_token"]


def _zero(end: str) -> Change:
    return _change_tensors(end, torch.zeros_like)


def _swap_positions(state: State) -> None:
    state["pos_embed_y"], state["pos_embed_x"] = state["pos_embed_x"], state["pos_embed_y"]


def _reverse_blocks(state: State) -> None:
    for name in [name for name in state if name.startswith("blocks.0.")]:
        other = name.replace("blocks.0.", "blocks.1.")
        state[name], state[other] = state[other], state[name]


WEIGHTS: dict[str, tuple[str, ViTConfig, Change]] = {
    "q and k swapped": ("order of q, k, v", PLAIN, _swap_q_and_k),
    "rows of qkv split as (dim head)": (
        "head split of qkv",
        PLAIN,
        _compose(
            *(
                _change_tensors(f"attn.qkv.{kind}", lambda w: w.view(3, 8, 2, -1).transpose(1, 2))
                for kind in ("weight", "bias")
            )
        ),
    ),
    "columns of proj split as (dim head)": (
        "head split of proj",
        PLAIN,
        _change_tensors("attn.proj.weight", lambda w: w.view(16, 8, 2).transpose(1, 2)),
    ),
    "a square matrix transposed": ("transposed attn.proj", PLAIN, _change_tensors("attn.proj.weight", lambda w: w.T)),
    "queries transposed": (
        "transposed attn.qkv",
        PLAIN,
        _change_tensors("attn.qkv.weight", lambda w: torch.cat([w[:16].T, w[16:]])),
    ),
    "pixels of a patch in another order": (
        "order in a patch",
        PLAIN,
        _change_tensors("patch_embed.proj.weight", lambda w: w.view(16, 16, 16, 3).permute(0, 3, 1, 2)),
    ),
    "channels reversed": ("channel order", PLAIN, _change_tensors("patch_embed.proj.weight", lambda w: w.flip(1))),
    "the class position added twice": ("class position", PLAIN, _add_class_position_twice),
    "the class row last": ("rows of positions", PLAIN, _change_tensors("pos_embed", lambda w: w.roll(1, 1))),
    "positions one place early": ("rows of positions", PLAIN, _change_tensors("pos_embed", lambda w: w.roll(-1, 1))),
    "positions left out": ("rows of positions", FACTORIZED, _compose(*(_zero(f"pos_embed_{axis}") for axis in "yx"))),
    "positions of rows and columns swapped": ("rows of positions", FACTORIZED, _swap_positions),
    "layer scale left out": ("layer scale", SCALED, _change_tensors("gamma", torch.ones_like)),
    "layer scale on one branch": ("layer scale", SCALED, _change_tensors("ls1.gamma", torch.ones_like)),
    "layer scale squared": ("layer scale", SCALED, _change_tensors("gamma", torch.square)),
    "halves of swiglu swapped": (
        "halves of swiglu",
        GATED,
        _compose(
            *(_change_tensors(f"mlp.fc1.{kind}", lambda w: torch.cat([w[24:], w[:24]])) for kind in ("weight", "bias"))
        ),
    ),
    "a bias dropped": ("bias of attn.proj", PLAIN, _change_tensors("attn.proj.bias", torch.zeros_like)),
    "the bias of the head dropped": ("bias of head", PLAIN, _change_tensors("head.bias", torch.zeros_like)),
    "tokens swapped": ("distillation token", DISTILLED, _swap_tokens),
    "blocks reversed": ("order of blocks", PLAIN, _reverse_blocks),
    "weights rounded to bfloat16": ("dtype rounding", PLAIN, _change_tensors("", lambda w: w.bfloat16().float())),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_a_wrong_layout_of_the_weights_is_named(case: str) -> None:
    family, config, change_weights = WEIGHTS[case]
    diagnosis = diagnose_with(config, config, change_weights)
    assert diagnosis.matched and diagnosis.matched[0].families == (family,), diagnosis.verdict


# Other implementations ------------------------------------------------------------------------------------------------


def _softmax_over_queries(
    part: Any, q: Any, k: Any, v: Any, scale: float, rate: float, noise: Any, bias: Any = None
) -> Any:
    weights = torch.softmax(torch.einsum("bthd,bshd->bhts", q, k) * part.config.scale, dim=2)
    return torch.einsum("bhts,bshd->bthd", weights, v)


def _unbiased(self: Any, x: Any) -> Any:
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().sum(-1, keepdim=True) / (x.shape[-1] - 1)
    return centred * torch.rsqrt(variance + self.eps) * self.weight + self.bias


def _post_norm(self: Any, x: Any, rate: float, tables: Any, noise: Any) -> Any:
    x = self.norm1(x + self.attn(x, tables))
    return self.norm2(x + self.mlp(x))


def _no_residual(self: Any, x: Any, rate: float, tables: Any, noise: Any) -> Any:
    x = self.attn(self.norm1(x), tables)
    return x + self.mlp(self.norm2(x))


def _all_tokens(self: Any, x: Any, noise: Any) -> Any:
    return x.mean(1)


def _first_head(self: Any, x: Any, *_: Any) -> Any:
    return self.head(x[:, 0])


def _tf32_linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """Apply a linear layer with both factors rounded to eleven significant bits."""

    def rounded(a: Any) -> Any:
        mantissa, exponent = torch.frexp(a.double())
        return torch.ldexp(torch.round(mantissa * 2**11) / 2**11, exponent).float()

    return torch.nn.functional.conv1d(rounded(x).flatten(0, -2)[..., None], rounded(weight)[..., None], bias).view(
        *x.shape[:-1], -1
    )


MISTAKES: dict[str, tuple[str, ViTConfig, Any, str, Any]] = {
    "softmax axis": ("softmax", PLAIN, vit_torch.model, "attention", _softmax_over_queries),
    "variance formula": ("LayerNorm formula", PLAIN, vit_torch.layers.Norm, "forward", _unbiased),
    "post-norm": ("norms of a block", PLAIN, vit_torch.model.Block, "forward", _post_norm),
    "missing residual": ("sums of a block", PLAIN, vit_torch.model.Block, "forward", _no_residual),
    "all tokens pooled": ("pooling", MEAN, vit_torch.model.ViT, "pool", _all_tokens),
    "one of two heads": ("distillation head", DISTILLED, vit_torch.model.ViT, "classify", _first_head),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_of_the_reference_implementation_is_named(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, config, owner, name, wrong = MISTAKES[case]
    file, images = checkpoint(config), uint8_images(config)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, wrong)
        logits = model_outputs(config, file.arrays, images)
    diagnosis = diagnose(file, expected_outputs(images, logits, config), pairs=20)
    assert diagnosis.matched and diagnosis.matched[0].families == (family,), diagnosis.verdict


def test_tf32_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    file, images = checkpoint(), uint8_images()
    with monkeypatch.context() as patch:
        patch.setattr(F, "linear", _tf32_linear)
        logits = model_outputs(PLAIN, file.arrays, images)
    diagnosis = diagnose(file, expected_outputs(images, logits, PLAIN), pairs=20)
    assert diagnosis.matched and diagnosis.matched[0].families == ("TF32",), diagnosis.verdict


def test_outputs_in_bfloat16_match_and_the_rounding_is_named() -> None:
    diagnosis = diagnose_with(PLAIN, PLAIN, execution=vit_torch.Execution(dtype=torch.bfloat16))
    assert (diagnosis.dtype, diagnosis.passed, diagnosis.matched[0].families) == ("bfloat16", True, ("dtype rounding",))


# Two causes, no known cause, no cause ---------------------------------------------------------------------------------

PAIRS: dict[tuple[str, str], tuple[ViTConfig, Change | None]] = {
    ("activation", "LayerNorm eps"): (PLAIN.replace(mlp={"activation": "gelu_tanh"}, norms={"eps": 1e-3}), None),
    ("normalization", "order of q, k, v"): (PLAIN.replace(pixels={"mean": (0.0,), "std": (1.0,)}), _swap_q_and_k),
    ("channel order", "pooling"): (MEAN, _change_tensors("patch_embed.proj.weight", lambda w: w.flip(1))),
}


@pytest.mark.parametrize("families", PAIRS)
def test_two_causes_are_named(families: tuple[str, str]) -> None:
    right, change_weights = PAIRS[families]
    diagnosis = diagnose_with(PLAIN, right, change_weights, pairs=1000)
    assert diagnosis.matched and sorted(diagnosis.matched[0].families) == sorted(families), diagnosis.verdict


def test_pairs_that_the_outputs_do_not_distinguish_are_all_named() -> None:
    diagnosis = diagnose_with(PLAIN, PLAIN.replace(norms={"eps": 1e-12}, mlp={"activation": "gelu_tanh"}), pairs=1000)
    numbers = [cause.names[1].removeprefix("LayerNorm eps is ") for cause in diagnosis.matched]
    assert numbers[0] == "1e-12" and {"1e-09", "1e-10"} < set(numbers), diagnosis.verdict


def _add_noise(state: State) -> None:
    generator = torch.Generator().manual_seed(0)
    name = "blocks.1.mlp.fc2.weight"
    state[name] = state[name] + 0.1 * torch.randn(state[name].shape, generator=generator)


@pytest.mark.usefixtures("without_layers")
def test_pairs_with_a_rare_cause_are_tried_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rare causes come first in this catalogue, so that they are tried last only because they are rare."""
    common = ("activation is relu", "LayerNorm eps is 0.001", "one norm serves both halves", "the class token is zero")
    trial = Trial(PLAIN, {}, np.zeros((1, PLAIN.in_channels, *PLAIN.image_size)), None)
    causes = sorted(
        (cause for cause in catalogue(trial) if cause.name in {*RARE, *common}), key=lambda cause: cause.name not in RARE
    )
    tried: list[tuple[str, ...]] = []
    original = Evaluator.try_causes

    def record(self: Evaluator, causes: tuple[Hypothesis, ...], *others: Any) -> Any:
        tried.append(tuple(cause.name for cause in causes))
        return original(self, causes, *others)

    monkeypatch.setattr(Evaluator, "try_causes", record)
    monkeypatch.setattr("parity.comparison.diagnosis.search.catalogue", lambda trial: causes)
    diagnose_with(PLAIN, PLAIN, _add_noise)
    rare_in_pair = [sum(name in RARE for name in pair) for pair in tried if len(pair) == 2 and {*pair} <= {*RARE, *common}]
    assert rare_in_pair == sorted(rare_in_pair) and set(rare_in_pair) == {0, 1, 2}


RARE = (
    "softmax runs over all pairs of tokens",
    "softmax has one more term exp(0) in its denominator",
    "norms do not divide by the standard deviation",
    "the weights of norms are zero-centred: 1 is added to them",
    "the bias of norms is added before the weight is applied",
    "attention is added to twice the tokens",
    "the MLP is added to twice the tokens",
    "activation is tanh",
    "pooling takes the first patch",
    "images are rounded to bfloat16",
)


@pytest.fixture
def without_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the search for a change in a single layer run few models, in tests of other stages."""
    monkeypatch.setattr(layer_search, "MAX_MODELS", 1)


@pytest.fixture(scope="module")
def unknown() -> Diagnosis:
    """Return the diagnosis of noise on one matrix, for which all stages of the search run."""
    return diagnose_with(PLAIN, PLAIN, _add_noise, pairs=20)


def test_a_cause_outside_the_catalogue_is_unknown(unknown: Diagnosis) -> None:
    assert (unknown.matched, unknown.verdict[:8], unknown.passed) == ((), "UNKNOWN:", False)
    assert "noise" not in str(unknown)  # the difference is the same in every run


def test_causes_and_layers_that_explain_little_are_not_named(unknown: Diagnosis) -> None:
    assert unknown.runners_up == () and "nearest cause" not in unknown.verdict
    assert unknown.suspect.startswith("the logits alone do not identify the layer. To identify it, add intermediates")


def test_a_cause_that_explains_most_of_the_difference_is_the_nearest() -> None:
    diagnosis = diagnose_with(PLAIN, PLAIN.replace(head={"pool": "mean"}), _add_noise, pairs=0)
    nearest = diagnosis.runners_up[0]
    assert diagnosis.matched == () and nearest.error < diagnosis.before / 2
    assert f"nearest cause: {nearest} (relRMS {nearest.error:.1e})" in diagnosis.verdict


@pytest.mark.usefixtures("without_layers")
def test_intermediates_name_the_first_layer_that_differs() -> None:
    other = checkpoint()
    _add_noise(other.arrays)  # type: ignore[arg-type]
    assert diagnose_against(checkpoint(), other, pairs=0).suspect.startswith(
        "the first layer that differs is blocks.1.mlp.fc2, "
    )


@pytest.mark.usefixtures("without_layers")
def test_a_layer_of_another_shape_is_the_first_that_differs() -> None:
    other = Checkpoint(PLAIN.replace(num_heads=4), "torch", checkpoint().arrays)
    first = "blocks.0.attn.scores, which has shape (4, 4, 7, 7), not (4, 2, 7, 7); blocks.0.attn.v agrees"
    assert diagnose_against(other, checkpoint(), pairs=0).suspect == f"the first layer that differs is {first}"


@pytest.mark.usefixtures("without_layers")
def test_active_dropout_is_detected_from_equal_images() -> None:
    images, file = uint8_images()[[0, 0, 1]], checkpoint()
    logits = model_outputs(PLAIN, file.arrays, images)
    logits[0] *= 1.01
    diagnosis = diagnose(file, expected_outputs(images, logits, PLAIN), pairs=0)
    assert any("dropout was left on" in remark and "equal" in remark for remark in diagnosis.remarks)


@pytest.mark.usefixtures("without_layers")
def test_equal_images_with_different_outputs_suggest_wrong_images() -> None:
    images = np.zeros_like(uint8_images())
    diagnosis = diagnose(
        checkpoint(), expected_outputs(images, model_outputs(PLAIN, checkpoint().arrays, uint8_images()), PLAIN), pairs=0
    )
    assert any("or the outputs are of other images" in remark for remark in diagnosis.remarks)


@pytest.mark.usefixtures("without_layers")
def test_intermediates_that_the_model_lacks_are_reported() -> None:
    logits, other = model_outputs(PLAIN, checkpoint().arrays, uint8_images()), np.ones((8, 3))
    inner = {"tokens": other, "blocks.99": other, "blocks.0.norm2": np.ones((8, *_tokens(PLAIN)))}
    diagnosis = diagnose(checkpoint(), expected_outputs(uint8_images(), logits, PLAIN, inner), pairs=0)
    assert (
        "'blocks.99', 'tokens': ignored, because this model has no intermediate of that name and shape" in diagnosis.remarks
    )


def _tokens(config: ViTConfig) -> tuple[int, int]:
    return config.num_tokens, config.width


@pytest.mark.parametrize("name", ["logits", "images", "tokens"])
def test_values_too_large_for_a_model_are_refused(name: str) -> None:
    logits = model_outputs(PLAIN, checkpoint().arrays, uint8_images())
    arrays: dict[str, Any] = {"images": uint8_images(), "logits": logits, "tokens": np.ones((8, *_tokens(PLAIN)))}
    arrays[name] = np.full(arrays[name].shape, 1e300)
    with pytest.raises(InputError, match=f"{name} have entries as large as 1e\\+300"):
        expected_outputs(arrays["images"], arrays["logits"], PLAIN, {"tokens": arrays["tokens"]})


def test_a_correct_model_matches() -> None:
    diagnosis = diagnose_with(PLAIN, PLAIN)
    assert diagnosis.passed and diagnosis.verdict.startswith("MATCH: nothing is wrong")


def test_causes_that_no_image_distinguishes_are_all_named() -> None:
    file = checkpoint()
    _change_tensors("attn.qkv.bias", torch.zeros_like)(file.arrays)  # so that the order of its parts has no effect
    state = dict(file.arrays)
    _swap_q_and_k(state)
    diagnosis = diagnose(file, expected_outputs(uint8_images(), model_outputs(PLAIN, state, uint8_images()), PLAIN))
    assert len(diagnosis.matched) > 1 and {cause.families for cause in diagnosis.matched} == {("order of q, k, v",)}
    assert diagnosis.apart.startswith("no image of this size tells these causes apart")
    two = replace(diagnosis, matched=diagnosis.matched[:2])
    assert ", or another that these images cannot tell apart from it;" in two.verdict


def test_causes_that_differ_by_less_than_the_tolerance_are_not_called_the_same_function() -> None:
    diagnosis = diagnose_with(PLAIN, PLAIN.replace(norms={"eps": 1e-12}))
    assert len(diagnosis.matched) > 1 and "same function" not in diagnosis.apart
    assert re.fullmatch(
        r"on images of noise their outputs differ by \d\.\de-\d\d, .* float64 would tell.*", diagnosis.apart
    )


def test_a_diagnosis_is_deterministic(unknown: Diagnosis) -> None:
    again = diagnose_with(PLAIN, PLAIN, _add_noise, pairs=20)
    assert (json.dumps(again.facts()), str(again)) == (json.dumps(unknown.facts()), str(unknown))


# Another checkpoint ---------------------------------------------------------------------------------------------------


def test_another_checkpoint_shows_the_transposed_parameter() -> None:
    other = checkpoint()
    _change_tensors("attn.proj.weight", lambda w: w.T)(other.arrays)  # type: ignore[arg-type]
    diagnosis = diagnose_against(checkpoint(), other)
    assert diagnosis.evidence == (
        "blocks.attn.proj.weight equals the other checkpoint's if attn.proj lies as (inputs outputs)",
    )


def test_another_checkpoint_shows_the_field_that_differs() -> None:
    other = Checkpoint(PLAIN.replace(norms={"eps": 1e-3}), "torch", checkpoint().arrays)
    diagnosis = diagnose_against(checkpoint(), other)
    assert (diagnosis.evidence, diagnosis.matched[0].families) == (
        ("norms.eps is 1e-06, and 0.001 in the other checkpoint",),
        ("LayerNorm eps",),
    )


@pytest.mark.parametrize("eps", [1e-9, 1e-6])
def test_a_large_model_is_not_said_to_be_another_one_because_float32_hides_a_difference(
    eps: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["parity.comparison.diagnosis.diagnose"], "MAX_FLOAT64_PARAMETERS", 0)
    arrays = {name: 3 * array for name, array in checkpoint().arrays.items()}  # activations of the size of trained models
    one, other = (Checkpoint(PLAIN.replace(norms={"eps": each}), "torch", arrays) for each in (eps, 1e-12))
    diagnosis = diagnose_against(one, other, pairs=0)
    assert diagnosis.evidence == (f"norms.eps is {eps}, and 1e-12 in the other checkpoint",)
    if eps == 1e-9:
        assert diagnosis.passed and diagnosis.before == 0
        assert "nothing is wrong" not in diagnosis.verdict and "--against" in diagnosis.verdict
    else:
        assert {"LayerNorm eps is 1e-12", "LayerNorm eps is 1e-10"} <= {str(cause) for cause in diagnosis.matched}
        assert re.fullmatch(r"on images of noise their outputs differ by .*, less than the tolerance, .*", diagnosis.apart)


# Remedies -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["field", "rotary", "weights", "structure", "one block"])
def test_the_printed_command_fixes_the_checkpoint(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turned = ROTARY.replace(positions={"rotary": "dinov3", "rotary_base": 50.0})
    wrong = turned if case == "rotary" else PLAIN
    right, change_weights = {
        "rotary": (turned.replace(positions={"rotary": "eva"}), None),  # and not with the published base and grid of EVA-02
        "field": (PLAIN.replace(pixels={"mean": (0.0,), "std": (1.0,)}, norms={"eps": 1e-3}), None),
        "weights": (PLAIN.replace(norms={"eps": 1e-3}), _swap_q_and_k),
        "structure": (PLAIN.replace(norms={"after_blocks": False}), None),
        "one block": (PLAIN, _transpose_in_block_1),
    }[case]
    images = uint8_images(wrong)
    parity.save(tmp_path / "vit.safetensors", dict(checkpoint(wrong).arrays), wrong, "torch")
    diagnosis = diagnose_with(wrong, right, change_weights, source=CommandLineSource("vit.safetensors"))
    words = shlex.split(diagnosis.remedy)
    monkeypatch.chdir(tmp_path)
    assert words[:3] == ["python", "-m", "parity"] and main(words[3:]) == 0
    state = {name: tensor.clone() for name, tensor in checkpoint(wrong).arrays.items()}
    if change_weights:
        change_weights(state)
    mended = parity.load("FIXED.safetensors")
    assert diagnose(mended, expected_outputs(images, model_outputs(right, state, images), right)).passed


def test_repair_keeps_the_format_of_the_checkpoint() -> None:
    file = checkpoint()
    mended, lines = repair(Checkpoint(PLAIN, "jax", flatten(parity.to_jax(file), get("jax"))), [REVERSED_CHANNELS])
    assert (mended.format, lines) == ("jax", [f"mended: {REVERSED_CHANNELS}"])
    before, after = (parity.to_torch(each) for each in (file, mended))
    assert torch.equal(after.pop("patch_embed.proj.weight"), before.pop("patch_embed.proj.weight").flip(1))
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_repair_preserves_every_bit_that_it_moves(dtype: torch.dtype) -> None:
    file = checkpoint()
    file.arrays["patch_embed.proj.weight"] = file.arrays["patch_embed.proj.weight"].to(dtype)
    file.arrays["norm.weight"][0] = 1e5  # infinite in float16
    wrong = "queries, keys and values lie in the order k q v"
    mended = parity.to_torch(repair(file, [wrong, "the norm comes after the pooling, not before it"])[0])
    weight, bias = (file.arrays[f"blocks.0.attn.qkv.{kind}"] for kind in ("weight", "bias"))
    for name, before in (("weight", weight), ("bias", bias)):
        k, q, v = before.chunk(3)
        assert torch.equal(mended[f"blocks.0.attn.qkv.{name}"], torch.cat([q, k, v]))
    assert torch.equal(mended["fc_norm.weight"], file.arrays["norm.weight"])
    assert mended["patch_embed.proj.weight"].dtype == dtype


def test_repair_renews_the_assumptions_about_rotary_positions() -> None:
    rotary = [Assumption("positions.rotary", "axial", ""), Assumption("positions.rotary_base", 10000.0, "")]
    assumed = (*rotary, Assumption("rotation", "of neighbouring pairs", ""), Assumption("patch extraction", "", ""))
    file = replace(checkpoint(ROTARY), assumed=assumed)
    left = {
        kind: {each.field: each.value for each in repair(file, [f"rotary layout is {kind}"])[0].assumed} for kind in KINDS
    }
    halves = "of halves, over rows and columns of patches about the centre"
    assert left["dinov3"] == {"positions.rotary_base": 10000.0, "rotation": halves, "patch extraction": ""}
    assert left["none"] == {"patch extraction": ""}


KINDS = ("dinov3", "none")
REVERSED_CHANNELS = "channels come in reverse, BGR"


@pytest.mark.parametrize(
    ("cause", "message"), [("channels come in reverse", "did you mean"), ("zzz", "as `python -m parity")]
)
def test_an_unknown_cause_is_refused(cause: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        repair(checkpoint(), [cause])


# Every hypothesis runs ------------------------------------------------------------------------------------------------

STRUCTURES = {
    "plain": PLAIN,
    "layer scale": SCALED,
    "gated": GATED,
    "rotary": ROTARY,
    "rotary of DINOv3": small_config(vit_spec.get("dinov3_s16")),
    "distilled": DISTILLED,
    "fixed positions": FIXED,
    "positions of a sequence": FIXED.replace(positions={"table": "sincos_1d"}),
    "factorized positions": FACTORIZED,
    "norms of queries": NORMED,
    "attention pooling": small_config(vit_spec.get("siglip_b16")),
    "hidden layer": PLAIN.replace(head={"hidden": 12}),
    "features": PLAIN.replace(num_classes=0, head={"pool": "none"}),
}


@cache
def single_causes(name: str) -> tuple[CauseSearch, list[Hypothesis], list[Result]]:
    """Return the search in a structure, its catalogue, and the result of each cause that could be run."""
    config = STRUCTURES[name]
    images = uint8_images(config)[:1]
    logits = model_outputs(config, checkpoint(config).arrays, images) + 1
    expectations = expected_outputs(images, logits, config)
    trial = Trial(
        config, {n: to_float64(parameter(checkpoint(config), n)) for n in vit_spec.rows(config)}, expectations.images, None
    )
    search, causes = CauseSearch(trial, expectations), catalogue(trial)
    return search, causes, [result for cause in causes if (result := search.evaluator.try_causes((cause,)))]


@pytest.mark.parametrize("name", STRUCTURES)
def test_every_cause_of_the_catalogue_can_be_run(name: str) -> None:
    """Each runs separately, and in one of six structures together with a cause that removes the part it changes."""
    search, causes, results = single_causes(name)
    assert len(results) > len(causes) / 2
    number = list(STRUCTURES).index(name)
    for one in [cause for cause in causes if REMOVES_PARTS.search(cause.name)]:
        for other in causes[number % 6 :: 12 if one.patch else 6]:
            search.evaluator.try_causes((one, other))
    for cause in [*single_block_hypotheses(STRUCTURES[name], causes), *operations(STRUCTURES[name])][::5]:
        search.evaluator.try_causes((cause,))
    assert search.evaluator.discarded == []


def test_every_family_of_causes_has_one_whose_outputs_no_other_family_gives() -> None:
    """Such a cause is found: the error of no other cause is as small."""
    families, told_apart = set(), set()
    for name in STRUCTURES:
        search, causes, results = single_causes(name)
        families |= {cause.family for cause in causes}
        outputs = [(result.causes[0].family, result.outputs) for result in results]
        for family, own in outputs:
            others = [search.baseline.outputs, *(output for other, output in outputs if other != family)]
            distances = [np.linalg.norm(own - output) for output in others if output.shape == own.shape]
            if min(distances, default=np.inf) > 1e-5 * np.linalg.norm(own):
                told_apart.add(family)
    # A bias of all keys adds the same number to all scores of a query, which a softmax ignores.
    assert families - told_apart == {"bias of attn.k_norm"}


REMOVES_PARTS = re.compile(
    r"TF32 was used by all|^activations are bf|layout is none|no final norm|first block|no norm ahead|no class"
)


def test_a_change_of_one_layer_gives_the_same_outputs_whether_unchanged_parts_are_reused_or_run() -> None:
    config = NORMED.replace(norms={"layer_scale": 0.1}, tokens={"registers": 1})
    file, images = checkpoint(config), uint8_images(config)[:2]
    weights = {name: to_float64(parameter(file, name)) for name in vit_spec.rows(config)}
    trial = Trial(config, weights, images.transpose(0, 3, 1, 2) / 255, None)
    reusing = Runner()
    reusing.run(trial)
    causes = catalogue(trial)
    factors = [family.hypothesis_at((0.5,), 3) for family in scale_factors(config)]
    for cause in [*causes, *single_block_hypotheses(config, causes), *operations(config), *factors][::4]:
        changed = cause.apply(trial)
        if changed is not None and (changed.unchanged_parts or cause.blocks_unchanged):
            assert np.array_equal(reusing.run(changed), Runner().run(changed), equal_nan=True), cause.name


@pytest.mark.usefixtures("without_layers")
def test_a_cause_in_a_block_that_another_cause_removes_does_not_apply() -> None:
    with pytest.raises(Inapplicable, match="this model has no block 99"):
        confine_to_block(lambda model: None, 99)(vit_torch.ViT(PLAIN))


def test_a_hypothesis_that_raises_is_discarded_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: Any) -> None:
        raise RuntimeError("a patch that fits no model")

    causes = [Hypothesis("it is broken", "broken", patch=broken)]
    monkeypatch.setattr("parity.comparison.diagnosis.search.catalogue", lambda trial: [*catalogue(trial)[:5], *causes])
    diagnosis = diagnose_with(PLAIN, PLAIN, _add_noise, pairs=5)
    assert diagnosis.discarded[0] == "it is broken: RuntimeError: a patch that fits no model"
    assert "causes could not be run, the first: it is broken" in str(diagnosis)


def round_to_5_digits(x: np.ndarray) -> np.ndarray:
    """Return numbers as "%.4e" prints them."""
    return np.array([float(f"{value:.4e}") for value in x.ravel()]).reshape(x.shape)


# Precision ------------------------------------------------------------------------------------------------------------


def float64_outputs(config: ViTConfig, state: State, images: np.ndarray) -> np.ndarray:
    model = vit_torch.ViT(config).eval().double()
    model.load_state_dict({name: tensor.double() for name, tensor in state.items()})
    pixels = [np.array(values) for values in (config.pixels.mean, config.pixels.std)]
    with torch.no_grad():
        return model(torch.tensor((images / 255 - pixels[0]) / pixels[1]).permute(0, 3, 1, 2)).numpy()


def weights_rounded_afterwards() -> tuple[State, Checkpoint]:
    """Return float64 weights, and the checkpoint that stores them as float32."""
    generator = torch.Generator().manual_seed(1)
    state = {
        name: tensor.double() * (1 + 1e-7 * torch.rand(tensor.shape, generator=generator, dtype=torch.float64))
        for name, tensor in checkpoint().arrays.items()
    }
    return state, Checkpoint(PLAIN, "torch", {name: tensor.float() for name, tensor in state.items()})


def test_a_cause_is_found_although_the_weights_were_rounded_to_float32() -> None:
    state, file = weights_rounded_afterwards()
    right = PLAIN.replace(mlp={"activation": "quick_gelu"})
    diagnosis = diagnose(
        file, expected_outputs(uint8_images(), float64_outputs(right, state, uint8_images()), PLAIN), pairs=20
    )
    assert diagnosis.matched[0].names == ("activation is quick_gelu",), diagnosis.verdict
    assert 1e-9 < diagnosis.after < diagnosis.tolerance < 5e-6 and "rounding to float32" in diagnosis.precision


def test_weights_rounded_to_float32_match() -> None:
    state, file = weights_rounded_afterwards()
    diagnosis = diagnose(
        file, expected_outputs(uint8_images(), float64_outputs(PLAIN, state, uint8_images()), PLAIN), pairs=20
    )
    assert (
        diagnosis.passed and 1e-9 < diagnosis.before < diagnosis.tolerance and "rounding to float32" in diagnosis.precision
    )


@pytest.mark.usefixtures("without_layers")
def test_a_cause_is_found_although_the_weights_were_rounded_to_bfloat16() -> None:
    state = checkpoint().arrays
    file = Checkpoint(PLAIN, "torch", {name: tensor.bfloat16() for name, tensor in state.items()})
    swapped = {name: tensor.clone() for name, tensor in state.items()}
    _swap_q_and_k(swapped)
    diagnosis = diagnose(
        file, expected_outputs(uint8_images(), model_outputs(PLAIN, swapped, uint8_images()), PLAIN), pairs=20
    )
    assert diagnosis.matched[0].families == ("order of q, k, v",), diagnosis.verdict
    assert "the rounding of the weights to bfloat16" in diagnosis.precision


def test_a_small_cause_is_distinguished_from_rounding_of_exact_outputs() -> None:
    right = PLAIN.replace(norms={"eps": 1.1e-6})
    logits = float64_outputs(right, checkpoint().arrays, uint8_images())
    diagnosis = diagnose(checkpoint(), expected_outputs(uint8_images(), logits, PLAIN), pairs=20)
    assert diagnosis.before < 5e-6 and diagnosis.matched[0].names == ("LayerNorm eps is 1.1e-06",), diagnosis.verdict


SMALL_EPS = PLAIN.replace(norms={"eps": 1e-7})


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_a_fault_within_the_float32_tolerance_is_named(activation: str) -> None:
    """Alone, or as a second fault beside a larger one; eps differs by 3e-6, and the rounding errors are 1e-7."""
    diagnosis = diagnose_with(SMALL_EPS, SMALL_EPS.replace(norms={"eps": 1e-12}, mlp={"activation": activation}))
    families = ("LayerNorm eps",) if activation == "gelu" else ("activation", "LayerNorm eps")
    assert not diagnosis.passed and diagnosis.matched[0].families == families, diagnosis.verdict
    assert "LayerNorm eps is 1e-12" in diagnosis.matched[0].names and diagnosis.after < 2e-7


def test_a_difference_above_the_rounding_errors_is_not_called_right() -> None:
    logits = model_outputs(PLAIN, checkpoint().arrays, uint8_images())
    noise = np.random.default_rng(0).standard_normal(logits.shape)
    logits = (logits + 2e-6 * noise * np.linalg.norm(logits) / np.linalg.norm(noise)).astype(np.float32)
    diagnosis = diagnose(checkpoint(), expected_outputs(uint8_images(), logits, PLAIN))
    assert diagnosis.passed and not diagnosis.matched and "the rounding to float32 could cause" in diagnosis.verdict


def test_a_cause_that_leaves_more_than_rounding_errors_suggests_a_second_fault() -> None:
    def scale_head(state: State) -> None:
        state["head.weight"] = state["head.weight"] * (1 + 3e-6)
        state["head.weight"][0] *= 1 + 3e-6

    diagnosis = diagnose_with(PLAIN, PLAIN.replace(mlp={"activation": "relu"}), scale_head)
    assert diagnosis.matched[0].names == ("activation is relu",)
    assert any("there may be a second, smaller fault" in remark for remark in diagnosis.remarks)


@pytest.mark.parametrize(
    ("change", "digits"), [(lambda x: x.round(4), "4 decimals"), (round_to_5_digits, "5 significant digits")]
)
def test_printed_outputs_are_compared_to_their_digits(change: Callable[[Any], Any], digits: str) -> None:
    logits = change(float64_outputs(PLAIN, checkpoint().arrays, uint8_images()))
    diagnosis = diagnose(checkpoint(), expected_outputs(uint8_images(), logits, PLAIN), pairs=20)
    assert diagnosis.passed and digits in diagnosis.precision


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_the_dtype_of_outputs_is_recognised_in_a_wider_dtype(kind: Any) -> None:
    logits = model_outputs(PLAIN, checkpoint().arrays, uint8_images()).astype(kind).astype(np.float64)
    assert expected_outputs(uint8_images(), logits, PLAIN).dtype == np.dtype(kind).name


# Image size from expected images --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(32, 48), (64, 16)])
def test_the_size_of_a_model_is_that_of_the_expected_images(size: tuple[int, int], tmp_path: Path, capsys: Any) -> None:
    config = PLAIN.replace(image_size=size, num_heads=2)
    file, images = checkpoint(config), uint8_images(config)
    right = config.replace(norms={"eps": 1e-3})
    torch.save({name: tensor.clone() for name, tensor in file.arrays.items()}, tmp_path / "vit.pth")
    np.savez(tmp_path / "expected.npz", images=images, logits=model_outputs(right, file.arrays, images))
    source = ["diagnose", str(tmp_path / "vit.pth"), "--logits", str(tmp_path / "expected.npz"), "--set", "num_heads=2"]
    assert main([*source, "--pairs", "5"]) == 1
    printed = capsys.readouterr().out
    assert f"--set image_size={size[0]}x{size[1]}" in printed and "FOUND: LayerNorm eps is 0.001" in printed


# Expected outputs -----------------------------------------------------------------------------------------------------


def write_npz(folder: Path, **arrays: Any) -> Path:
    np.savez(folder / "expected.npz", **arrays)
    return folder / "expected.npz"


VALID_ARRAYS = {"images": uint8_images(), "logits": np.ones((8, 5), np.float32)}


def test_an_npz_file_is_read(tmp_path: Path) -> None:
    outputs = read_expected_outputs(write_npz(tmp_path, **VALID_ARRAYS, labels=np.zeros(8, int)), PLAIN)
    assert (outputs.images.shape, outputs.is_normalized) == ((8, 3, *PLAIN.image_size), False)
    assert outputs.remarks[-1] == "labels in expected.npz: ignored"


def test_images_may_have_their_channels_first(tmp_path: Path) -> None:
    first = read_expected_outputs(
        write_npz(tmp_path, **VALID_ARRAYS | {"images": VALID_ARRAYS["images"].transpose(0, 3, 1, 2)}), PLAIN
    )
    assert np.array_equal(first.images, read_expected_outputs(write_npz(tmp_path, **VALID_ARRAYS), PLAIN).images)


INVALID_ARRAYS: dict[str, tuple[dict[str, Any], str]] = {
    "no logits": ({"images": VALID_ARRAYS["images"]}, "no 'logits'"),
    "other outputs": (VALID_ARRAYS | {"logits": np.ones((8, 7))}, r"logits have shape \(8, 7\)"),
    "a checkpoint": ({f"w{i}": np.ones(1) for i in range(9)}, r"\(it contains 'w0', 'w1', 'w2', 'w3' and 5 more\)"),
    "other number": (VALID_ARRAYS | {"logits": np.ones((7, 5))}, "8 images and 7 rows"),
    "NaN": (VALID_ARRAYS | {"logits": np.full((8, 5), np.nan)}, "logits have 40 entries that are NaN"),
    "other channels": (VALID_ARRAYS | {"images": np.ones((8, 32, 48, 1))}, r"expected \(B, H, W, 3\)"),
    "other size": (VALID_ARRAYS | {"images": np.ones((8, 33, 48, 3))}, "not a multiple of the patch"),
}


@pytest.mark.parametrize("case", INVALID_ARRAYS)
def test_invalid_arrays_are_refused_in_one_line(case: str, tmp_path: Path) -> None:
    arrays, message = INVALID_ARRAYS[case]
    with pytest.raises(InputError, match=message) as error:
        read_expected_outputs(write_npz(tmp_path, **arrays), PLAIN)
    assert "\n" not in str(error.value)


def test_a_model_that_gives_nan_is_refused() -> None:
    file = checkpoint()
    file.arrays["head.bias"][0] = torch.nan
    with pytest.raises(InputError, match="gives NaN or infinite outputs"):
        diagnose(file, expected_outputs(**VALID_ARRAYS, config=PLAIN))


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = write_npz(tmp_path, **VALID_ARRAYS)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(InputError, match=r"expected\.npz"):
        read_expected_outputs(path, PLAIN)


@pytest.mark.parametrize("attention", [{"qk_norm": True}, {"qkv_bias": "qv"}])
def test_the_order_of_rotary_pairs_includes_norms_and_the_bias_of_queries(attention: dict[str, Any]) -> None:
    """Columns and rows of the image are exchanged in the entries of a head, and back in the positions."""
    config = ROTARY.replace(attention=attention, positions={"rotary": "eva", "rotary_grid": None, "rotary_start": 0.0})
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal(row.shape) for name, row in vit_spec.rows(config).items()}
    cause = next(each for each in rotary_orders(config) if "columns and rows" in each.name)
    images = rng.standard_normal((1, *config.image_size, config.in_channels))
    trial = cause.apply(Trial(config, weights, images, None))
    assert trial is not None
    twin, other = Twin("torch"), config.replace(positions={"rotary": "rope_vit"})
    np.testing.assert_allclose(twin.run(other, trial.weights, images), twin.run(config, weights, images), rtol=1e-9)
