"""A cause is planted in a model, and must be the first that is named for its outputs."""

import json
import re
import shlex
from collections.abc import Callable
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
from parity.checkpoints.formats import get
from parity.checkpoints.surgery.edit import float64
from parity.checkpoints.weights import flatten, parameter
from parity.comparison.diagnosis import Diagnosis, Source, against, diagnose, expected, read
from parity.comparison.diagnosis.catalogue import catalogue
from parity.comparison.diagnosis.local import in_blocks, operations
from parity.comparison.diagnosis.mend import mend
from parity.comparison.diagnosis.search import Search
from parity.comparison.diagnosis.trial import Hypothesis, Trial
from tests.twins import perturbed, small
from vit_spec import InputError, ViTConfig

PLAIN = small(vit_spec.get("vit_s16"))
MEAN = PLAIN.replace(head={"pool": "mean"})
SCALED = small(vit_spec.get("deit3_s16"))
GATED = small(vit_spec.get("dinov2_g14"))
ROTARY = small(vit_spec.get("article_xray_rope"))
DISTILLED = small(vit_spec.get("deit_s16_distilled"))
FIXED = PLAIN.replace(positions={"kind": "fixed", "table": "sincos_2d_mae"})
NORMED = PLAIN.replace(attention={"qk_norm": True})

State = dict[str, Any]  # of the PyTorch twin
Plant = Callable[[State], None]


def checkpoint(config: ViTConfig = PLAIN, seed: int = 0) -> Checkpoint:
    return Checkpoint(config, "torch", parity.to_torch(perturbed(config, seed), config))


def pictures(config: ViTConfig = PLAIN, size: tuple[int, int] | None = None) -> np.ndarray:
    """Eight pictures (B, H, W, C) of uint8, in which neither channels nor places are alike."""
    height, width = size or config.image_size
    rng = np.random.default_rng(3)
    slope = np.arange(config.in_channels) * 15 + np.linspace(0, 60, height)[:, None, None]
    return (rng.integers(0, 150, (8, height, width, config.in_channels)) + slope).astype(np.uint8)


def answers(config: ViTConfig, state: State, images: np.ndarray, execution: Any = None) -> np.ndarray:
    """What the twin makes of pictures, in float32."""
    model = vit_torch.ViT(config, execution).eval()
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    pixels = [np.array(values) for values in (config.pixels.mean, config.pixels.std)]
    x = torch.tensor((images / 255 - pixels[0]) / pixels[1], dtype=torch.float32).permute(0, 3, 1, 2)
    with torch.no_grad():
        return model(x).float().numpy()


def diagnosis(config: ViTConfig, right: ViTConfig, plant: Plant | None = None, **options: Any) -> Diagnosis:
    """The diagnosis of a file whose outputs should be those of `right`, with the planted change of the weights."""
    file, images = checkpoint(config), pictures(config, options.pop("size", None))
    state = {name: tensor.clone() for name, tensor in file.arrays.items()}
    if plant:
        plant(state)
    logits = answers(right, state, images, options.pop("execution", None))
    return diagnose(file, expected(images, logits, config), **{"pairs": 100, **options})


# One cause ------------------------------------------------------------------------------------------------------------

FIELDS: dict[str, tuple[ViTConfig, dict[str, Any]]] = {
    "activation": (PLAIN, {"mlp": {"activation": "gelu_tanh"}}),
    "LayerNorm eps": (PLAIN, {"norms": {"eps": 1e-3}}),
    "score scale": (PLAIN, {"attention": {"scale": 0.25}}),
    "number of heads": (PLAIN, {"num_heads": 4}),
    "normalisation": (PLAIN, {"pixels": {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}}),
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
    found = diagnosis(config, config.replace(**change))
    assert found.matched and found.matched[0].families == (family,), found.verdict


@pytest.mark.parametrize("mode", [{"antialias": False}, {"kernel": "bilinear", "antialias": False, "align_corners": True}])
def test_the_way_in_which_positions_are_resampled_is_named(mode: dict[str, Any]) -> None:
    found = diagnosis(PLAIN, PLAIN.replace(resampling=mode), size=(80, 64))
    assert found.matched[0].families == ("resampling",), found.verdict


def test_an_eps_that_nobody_uses_is_solved_for() -> None:
    found = diagnosis(PLAIN, PLAIN.replace(norms={"eps": 3.7e-4}))
    assert found.matched[0].names == ("LayerNorm eps is 0.00037",), found.verdict


def _each(end: str, change: Callable[[Any], Any]) -> Plant:
    """Change every tensor whose name ends so."""

    def plant(state: State) -> None:
        for name in [name for name in state if name.endswith(end)]:
            state[name] = change(state[name]).reshape(state[name].shape)

    return plant


def _both(*plants: Plant) -> Plant:
    def plant(state: State) -> None:
        for one in plants:
            one(state)

    return plant


def _transpose_in_block_1(state: State) -> None:
    state["blocks.1.attn.proj.weight"] = state["blocks.1.attn.proj.weight"].T


def _swap_q_and_k(state: State) -> None:
    _each("attn.qkv.weight", lambda w: torch.cat([w[16:32], w[:16], w[32:]]))(state)
    _each("attn.qkv.bias", lambda b: torch.cat([b[16:32], b[:16], b[32:]]))(state)


def _fold_twice(state: State) -> None:
    state["cls_token"] = state["cls_token"] + state["pos_embed"][:, :1]


def _swap_tokens(state: State) -> None:
    state["cls_token"], state["dist_token"] = state["dist_token"], state["cls_token"]


def _reverse_blocks(state: State) -> None:
    for name in [name for name in state if name.startswith("blocks.0.")]:
        other = name.replace("blocks.0.", "blocks.1.")
        state[name], state[other] = state[other], state[name]


WEIGHTS: dict[str, tuple[str, ViTConfig, Plant]] = {
    "q and k swapped": ("order of q, k, v", PLAIN, _swap_q_and_k),
    "rows of qkv split as (dim head)": (
        "head split of qkv",
        PLAIN,
        _both(*(_each(f"attn.qkv.{kind}", lambda w: w.view(3, 8, 2, -1).transpose(1, 2)) for kind in ("weight", "bias"))),
    ),
    "columns of proj split as (dim head)": (
        "head split of proj",
        PLAIN,
        _each("attn.proj.weight", lambda w: w.view(16, 8, 2).transpose(1, 2)),
    ),
    "a square matrix transposed": ("transposed attn.proj", PLAIN, _each("attn.proj.weight", lambda w: w.T)),
    "queries transposed": ("transposed attn.qkv", PLAIN, _each("attn.qkv.weight", lambda w: torch.cat([w[:16].T, w[16:]]))),
    "pixels of a patch in another order": (
        "order in a patch",
        PLAIN,
        _each("patch_embed.proj.weight", lambda w: w.view(16, 16, 16, 3).permute(0, 3, 1, 2)),
    ),
    "channels reversed": ("channel order", PLAIN, _each("patch_embed.proj.weight", lambda w: w.flip(1))),
    "the class position added twice": ("class position", PLAIN, _fold_twice),
    "the class row last": ("rows of positions", PLAIN, _each("pos_embed", lambda w: w.roll(1, 1))),
    "positions one place early": ("rows of positions", PLAIN, _each("pos_embed", lambda w: w.roll(-1, 1))),
    "layer scale left out": ("layer scale", SCALED, _each("gamma", torch.ones_like)),
    "layer scale on one branch": ("layer scale", SCALED, _each("ls1.gamma", torch.ones_like)),
    "layer scale squared": ("layer scale", SCALED, _each("gamma", torch.square)),
    "halves of swiglu swapped": (
        "halves of swiglu",
        GATED,
        _both(*(_each(f"mlp.fc1.{kind}", lambda w: torch.cat([w[24:], w[:24]])) for kind in ("weight", "bias"))),
    ),
    "a bias dropped": ("bias of attn.proj", PLAIN, _each("attn.proj.bias", torch.zeros_like)),
    "the bias of the head dropped": ("bias of head", PLAIN, _each("head.bias", torch.zeros_like)),
    "tokens swapped": ("distillation token", DISTILLED, _swap_tokens),
    "blocks reversed": ("order of blocks", PLAIN, _reverse_blocks),
    "weights rounded to bfloat16": ("dtype rounding", PLAIN, _each("", lambda w: w.bfloat16().float())),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_a_wrong_reading_of_the_weights_is_named(case: str) -> None:
    family, config, plant = WEIGHTS[case]
    found = diagnosis(config, config, plant)
    assert found.matched and found.matched[0].families == (family,), found.verdict


# Other implementations ------------------------------------------------------------------------------------------------


def _softmax_over_queries(part: Any, q: Any, k: Any, v: Any, rate: float) -> Any:
    weights = torch.softmax(torch.einsum("bthd,bshd->bhts", q, k) * part.config.scale, dim=2)
    return torch.einsum("bhts,bshd->bthd", weights, v)


def _unbiased(self: Any, x: Any) -> Any:
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().sum(-1, keepdim=True) / (x.shape[-1] - 1)
    return centred * torch.rsqrt(variance + self.eps) * self.weight + self.bias


def _post_norm(self: Any, x: Any, rate: float, tables: Any) -> Any:
    x = self.norm1(x + self.attn(x, tables))
    return self.norm2(x + self.mlp(x))


def _no_residual(self: Any, x: Any, rate: float, tables: Any) -> Any:
    x = self.attn(self.norm1(x), tables)
    return x + self.mlp(self.norm2(x))


def _all_tokens(self: Any, x: Any) -> Any:
    return x.mean(1)


def _first_head(self: Any, x: Any) -> Any:
    return self.head(x[:, 0])


def _tf32_linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """Both factors rounded to eleven digits, by way of their mantissas."""

    def rounded(a: Any) -> Any:
        mantissa, exponent = torch.frexp(a.double())
        return torch.ldexp(torch.round(mantissa * 2**11) / 2**11, exponent).float()

    return torch.nn.functional.conv1d(rounded(x).flatten(0, -2)[..., None], rounded(weight)[..., None], bias).view(
        *x.shape[:-1], -1
    )


PORTS: dict[str, tuple[str, ViTConfig, Any, str, Any]] = {
    "softmax axis": ("softmax", PLAIN, vit_torch.model, "attention", _softmax_over_queries),
    "variance formula": ("LayerNorm formula", PLAIN, vit_torch.layers.LayerNorm, "forward", _unbiased),
    "post-norm": ("norms of a block", PLAIN, vit_torch.model.Block, "forward", _post_norm),
    "missing residual": ("sums of a block", PLAIN, vit_torch.model.Block, "forward", _no_residual),
    "all tokens pooled": ("pooling", MEAN, vit_torch.model.ViT, "pool", _all_tokens),
    "one of two heads": ("distillation head", DISTILLED, vit_torch.model.ViT, "classify", _first_head),
}


@pytest.mark.parametrize("case", PORTS)
def test_a_mistake_of_the_other_implementation_is_named(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, config, owner, name, wrong = PORTS[case]
    file, images = checkpoint(config), pictures(config)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, wrong)
        logits = answers(config, file.arrays, images)
    found = diagnose(file, expected(images, logits, config), pairs=20)
    assert found.matched and found.matched[0].families == (family,), found.verdict


def test_tf32_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    file, images = checkpoint(), pictures()
    with monkeypatch.context() as patch:
        patch.setattr(F, "linear", _tf32_linear)
        logits = answers(PLAIN, file.arrays, images)
    found = diagnose(file, expected(images, logits, PLAIN), pairs=20)
    assert found.matched and found.matched[0].families == ("TF32",), found.verdict


def test_outputs_in_bfloat16_are_told_from_a_wrong_model() -> None:
    found = diagnosis(PLAIN, PLAIN, execution=vit_torch.Execution(dtype=torch.bfloat16))
    assert (found.dtype, found.passed, found.matched[0].families) == ("bfloat16", True, ("dtype rounding",))


# Two causes, and none -------------------------------------------------------------------------------------------------

PAIRS: dict[tuple[str, str], tuple[ViTConfig, Plant | None]] = {
    ("activation", "LayerNorm eps"): (PLAIN.replace(mlp={"activation": "gelu_tanh"}, norms={"eps": 1e-3}), None),
    ("normalisation", "order of q, k, v"): (PLAIN.replace(pixels={"mean": (0.0,), "std": (1.0,)}), _swap_q_and_k),
    ("channel order", "pooling"): (MEAN, _each("patch_embed.proj.weight", lambda w: w.flip(1))),
}


@pytest.mark.parametrize("families", PAIRS)
def test_two_causes_are_named(families: tuple[str, str]) -> None:
    right, plant = PAIRS[families]
    found = diagnosis(PLAIN, right, plant, pairs=1000)
    assert found.matched and sorted(found.matched[0].families) == sorted(families), found.verdict


def _noise(state: State) -> None:
    generator = torch.Generator().manual_seed(0)
    name = "blocks.1.mlp.fc2.weight"
    state[name] = state[name] + 0.1 * torch.randn(state[name].shape, generator=generator)


def test_what_is_in_no_catalogue_is_said_to_be_unknown() -> None:
    found = diagnosis(PLAIN, PLAIN, _noise, pairs=20)
    assert (found.matched, found.verdict[:8], found.passed) == ((), "UNKNOWN:", False)


def test_without_intermediates_a_layer_is_suspected() -> None:
    assert "explain" in diagnosis(PLAIN, PLAIN, _noise, pairs=20).suspect


def test_intermediates_name_the_first_layer_that_differs() -> None:
    other = checkpoint()
    _noise(other.arrays)  # type: ignore[arg-type]
    assert against(checkpoint(), other, pairs=20).suspect.startswith("the first layer that differs is blocks.1.mlp.fc2, ")


def test_dropout_that_was_left_on_is_seen_in_equal_images() -> None:
    images, file = pictures()[[0, 0, 1]], checkpoint()
    logits = answers(PLAIN, file.arrays, images)
    logits[0] *= 1.01
    found = diagnose(file, expected(images, logits, PLAIN), pairs=20)
    assert any("dropout was left on" in remark and "equal" in remark for remark in found.remarks)


def test_equal_images_with_different_outputs_may_be_the_wrong_images() -> None:
    images = np.zeros_like(pictures())
    found = diagnose(checkpoint(), expected(images, answers(PLAIN, checkpoint().arrays, pictures()), PLAIN), pairs=0)
    assert any("or the outputs are of other images" in remark for remark in found.remarks)


def test_intermediates_that_are_compared_with_nothing_are_told() -> None:
    logits, other = answers(PLAIN, checkpoint().arrays, pictures()), np.ones((8, 3))
    inner = {"tokens": other, "blocks.99": other, "blocks.0.norm2": np.ones((8, *_tokens(PLAIN)))}
    found = diagnose(checkpoint(), expected(pictures(), logits, PLAIN, inner), pairs=0)
    assert "'blocks.99', 'tokens': left out, as this model has none of that name and shape" in found.remarks


def _tokens(config: ViTConfig) -> tuple[int, int]:
    return config.num_tokens, config.width


@pytest.mark.parametrize("name", ["logits", "images", "tokens"])
def test_numbers_that_no_model_gives_are_refused(name: str) -> None:
    logits = answers(PLAIN, checkpoint().arrays, pictures())
    arrays: dict[str, Any] = {"images": pictures(), "logits": logits, "tokens": np.ones((8, *_tokens(PLAIN)))}
    arrays[name] = np.full(arrays[name].shape, 1e300)
    with pytest.raises(InputError, match=f"{name} have entries as large as 1e\\+300"):
        expected(arrays["images"], arrays["logits"], PLAIN, {"tokens": arrays["tokens"]})


def test_a_model_without_fault_has_none() -> None:
    found = diagnosis(PLAIN, PLAIN)
    assert found.passed and found.verdict.startswith("MATCH: nothing is wrong")


def test_causes_that_no_image_tells_apart_are_all_named() -> None:
    file = checkpoint()
    _each("attn.qkv.bias", torch.zeros_like)(file.arrays)  # so that it matters to nobody where it lies
    state = dict(file.arrays)
    _swap_q_and_k(state)
    found = diagnose(file, expected(pictures(), answers(PLAIN, state, pictures()), PLAIN))
    assert len(found.matched) > 1 and {cause.families for cause in found.matched} == {("order of q, k, v",)}
    assert found.apart.startswith("no image of this size tells these causes apart")


def test_a_diagnosis_is_the_same_twice() -> None:
    first, second = (diagnosis(PLAIN, PLAIN, _noise, pairs=20) for _ in range(2))
    assert (json.dumps(first.facts()), str(first)) == (json.dumps(second.facts()), str(second))


# Against another file -------------------------------------------------------------------------------------------------


def test_another_file_shows_which_parameter_was_transposed() -> None:
    other = checkpoint()
    _each("attn.proj.weight", lambda w: w.T)(other.arrays)  # type: ignore[arg-type]
    found = against(checkpoint(), other)
    assert found.evidence == ("blocks.attn.proj.weight is the other's where attn.proj lies as (inputs outputs)",)


def test_another_file_shows_which_field_differs() -> None:
    other = Checkpoint(PLAIN.replace(norms={"eps": 1e-3}), "torch", checkpoint().arrays)
    found = against(checkpoint(), other)
    assert (found.evidence, found.matched[0].families) == (
        ("norms.eps is 1e-06, the other's 0.001",),
        ("LayerNorm eps",),
    )


# Remedies -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["field", "weights", "structure", "one block"])
def test_the_command_that_is_told_mends_the_file(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, plant = {
        "field": (PLAIN.replace(pixels={"mean": (0.0,), "std": (1.0,)}, norms={"eps": 1e-3}), None),
        "weights": (PLAIN.replace(norms={"eps": 1e-3}), _swap_q_and_k),
        "structure": (PLAIN.replace(norms={"after_blocks": False}), None),
        "one block": (PLAIN, _transpose_in_block_1),
    }[case]
    images = pictures()
    parity.save(tmp_path / "vit.safetensors", dict(checkpoint().arrays), PLAIN, "torch")
    found = diagnosis(PLAIN, right, plant, source=Source("vit.safetensors"))
    words = shlex.split(found.remedy)
    monkeypatch.chdir(tmp_path)
    assert words[:3] == ["python", "-m", "parity"] and main(words[3:]) == 0
    state = {name: tensor.clone() for name, tensor in checkpoint().arrays.items()}
    if plant:
        plant(state)
    mended = parity.load("FIXED.safetensors")
    assert diagnose(mended, expected(images, answers(right, state, images), right)).passed


def test_weights_are_mended_by_a_cause_in_the_format_that_they_are_in() -> None:
    file = checkpoint()
    mended, lines = mend(Checkpoint(PLAIN, "jax", flatten(parity.to_jax(file), get("jax"))), [BGR])
    assert (mended.format, lines) == ("jax", [f"mended: {BGR}"])
    before, after = (parity.to_torch(each) for each in (file, mended))
    assert torch.equal(after.pop("patch_embed.proj.weight"), before.pop("patch_embed.proj.weight").flip(1))
    assert all(torch.equal(after[name], before[name]) for name in before)


BGR = "channels come in reverse, BGR"


@pytest.mark.parametrize(
    ("cause", "message"), [("channels come in reverse", "did you mean"), ("zzz", "as `python -m parity")]
)
def test_a_cause_that_is_none_is_refused(cause: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        mend(checkpoint(), [cause])


# Every hypothesis runs ------------------------------------------------------------------------------------------------

STRUCTURES = {
    "plain": PLAIN,
    "layer scale": SCALED,
    "gated": GATED,
    "rotary": ROTARY,
    "rotary of DINOv3": small(vit_spec.get("dinov3_s16")),
    "distilled": DISTILLED,
    "fixed positions": FIXED,
    "norms of queries": NORMED,
    "attention pooling": small(vit_spec.get("siglip_b16")),
    "hidden layer": PLAIN.replace(head={"hidden": 12}),
    "features": PLAIN.replace(num_classes=0, head={"pool": "none"}),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_every_cause_of_the_catalogue_can_be_run(name: str) -> None:
    """By itself, and together with one that takes away what it is about; see `Attempts.attempt`."""
    config = STRUCTURES[name]
    images = pictures(config)[:1]
    logits = answers(config, checkpoint(config).arrays, images) + 1
    expectations = expected(images, logits, config)
    trial = Trial(
        config, {n: float64(parameter(checkpoint(config), n)) for n in vit_spec.rows(config)}, expectations.images, None
    )
    search = Search(trial, expectations)
    causes = catalogue(trial)
    assert len([cause for cause in causes if search.attempts.attempt((cause,))]) > len(causes) / 2
    for one in [cause for cause in causes if TAKES_AWAY.search(cause.name)]:
        for other in causes[:: 3 if one.patch else 1]:
            search.attempts.attempt((one, other))
    for cause in [*in_blocks(config, causes), *operations(config)][::5]:
        search.attempts.attempt((cause,))
    assert search.attempts.discarded == []


TAKES_AWAY = re.compile(
    r"TF32 was used by all|^activations are bf|layout is none|no final norm|first block|no norm ahead|no class"
)


def test_a_hypothesis_that_fails_is_discarded_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(model: Any) -> None:
        raise RuntimeError("a patch that fits no model")

    causes = [Hypothesis("it is broken", "broken", patch=broken)]
    monkeypatch.setattr("parity.comparison.diagnosis.search.catalogue", lambda trial: [*catalogue(trial)[:5], *causes])
    found = diagnosis(PLAIN, PLAIN, _noise, pairs=5)
    assert found.discarded[0] == "it is broken: RuntimeError: a patch that fits no model"
    assert "causes could not be run, the first: it is broken" in str(found)


def short(x: np.ndarray) -> np.ndarray:
    """Numbers as "%.4e" prints them."""
    return np.array([float(f"{value:.4e}") for value in x.ravel()]).reshape(x.shape)


# Precision ------------------------------------------------------------------------------------------------------------


def in_float64(config: ViTConfig, state: State, images: np.ndarray) -> np.ndarray:
    model = vit_torch.ViT(config).eval().double()
    model.load_state_dict({name: tensor.double() for name, tensor in state.items()})
    pixels = [np.array(values) for values in (config.pixels.mean, config.pixels.std)]
    with torch.no_grad():
        return model(torch.tensor((images / 255 - pixels[0]) / pixels[1]).permute(0, 3, 1, 2)).numpy()


def finer() -> tuple[State, Checkpoint]:
    """Weights in float64, and the file that holds them in float32."""
    generator = torch.Generator().manual_seed(1)
    state = {
        name: tensor.double() * (1 + 1e-7 * torch.rand(tensor.shape, generator=generator, dtype=torch.float64))
        for name, tensor in checkpoint().arrays.items()
    }
    return state, Checkpoint(PLAIN, "torch", {name: tensor.float() for name, tensor in state.items()})


def test_weights_that_were_rounded_afterwards_leave_what_rounding_explains() -> None:
    state, file = finer()
    right = PLAIN.replace(mlp={"activation": "quick_gelu"})
    found = diagnose(file, expected(pictures(), in_float64(right, state, pictures()), PLAIN), pairs=20)
    assert found.matched[0].names == ("activation is quick_gelu",), found.verdict
    assert 1e-9 < found.after < found.bar < 5e-6 and "rounding to float32" in found.precision


def test_weights_that_were_rounded_afterwards_match() -> None:
    state, file = finer()
    found = diagnose(file, expected(pictures(), in_float64(PLAIN, state, pictures()), PLAIN), pairs=20)
    assert found.passed and 1e-9 < found.before < found.bar and "rounding to float32" in found.precision


def test_weights_that_were_rounded_to_bfloat16_match_as_far_as_they_can() -> None:
    state = checkpoint().arrays
    file = Checkpoint(PLAIN, "torch", {name: tensor.bfloat16() for name, tensor in state.items()})
    plant = {name: tensor.clone() for name, tensor in state.items()}
    _swap_q_and_k(plant)
    found = diagnose(file, expected(pictures(), answers(PLAIN, plant, pictures()), PLAIN), pairs=20)
    assert found.matched[0].families == ("order of q, k, v",), found.verdict
    assert "the rounding of the weights to bfloat16" in found.precision


def test_a_small_cause_is_told_from_rounding_where_the_outputs_are_exact() -> None:
    right = PLAIN.replace(norms={"eps": 1.1e-6})
    logits = in_float64(right, checkpoint().arrays, pictures())
    found = diagnose(checkpoint(), expected(pictures(), logits, PLAIN), pairs=20)
    assert found.before < 5e-6 and found.matched[0].names == ("LayerNorm eps is 1.1e-06",), found.verdict


@pytest.mark.parametrize(("change", "digits"), [(lambda x: x.round(4), "4 decimals"), (short, "5 significant digits")])
def test_outputs_that_were_printed_are_judged_by_their_digits(change: Callable[[Any], Any], digits: str) -> None:
    logits = change(in_float64(PLAIN, checkpoint().arrays, pictures()))
    found = diagnose(checkpoint(), expected(pictures(), logits, PLAIN), pairs=20)
    assert found.passed and digits in found.precision


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_outputs_of_a_narrower_type_are_recognised_in_a_wider_one(kind: Any) -> None:
    logits = answers(PLAIN, checkpoint().arrays, pictures()).astype(kind).astype(np.float64)
    assert expected(pictures(), logits, PLAIN).dtype == np.dtype(kind).name


# Images that say their size -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(32, 48), (64, 16)])
def test_the_size_of_a_model_is_that_of_the_expected_images(size: tuple[int, int], tmp_path: Path, capsys: Any) -> None:
    config = PLAIN.replace(image_size=size, num_heads=2)
    file, images = checkpoint(config), pictures(config)
    right = config.replace(norms={"eps": 1e-3})
    torch.save({name: tensor.clone() for name, tensor in file.arrays.items()}, tmp_path / "vit.pth")
    np.savez(tmp_path / "expected.npz", images=images, logits=answers(right, file.arrays, images))
    source = ["diagnose", str(tmp_path / "vit.pth"), "--logits", str(tmp_path / "expected.npz"), "--set", "num_heads=2"]
    assert main([*source, "--pairs", "5"]) == 1
    told = capsys.readouterr().out
    assert f"--set image_size={size[0]}x{size[1]}" in told and "FOUND: LayerNorm eps is 0.001" in told


# What is given --------------------------------------------------------------------------------------------------------


def written(folder: Path, **arrays: Any) -> Path:
    np.savez(folder / "expected.npz", **arrays)
    return folder / "expected.npz"


GOOD = {"images": pictures(), "logits": np.ones((8, 5), np.float32)}


def test_a_file_is_read(tmp_path: Path) -> None:
    found = read(written(tmp_path, **GOOD, labels=np.zeros(8, int)), PLAIN)
    assert (found.images.shape, found.normalised) == ((8, 3, *PLAIN.image_size), False)
    assert found.remarks[-1] == "labels in expected.npz: left out"


def test_images_may_have_their_channels_first(tmp_path: Path) -> None:
    first = read(written(tmp_path, **GOOD | {"images": GOOD["images"].transpose(0, 3, 1, 2)}), PLAIN)
    assert np.array_equal(first.images, read(written(tmp_path, **GOOD), PLAIN).images)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no logits": ({"images": GOOD["images"]}, "no 'logits'"),
    "other outputs": (GOOD | {"logits": np.ones((8, 7))}, r"logits have shape \(8, 7\)"),
    "other number": (GOOD | {"logits": np.ones((7, 5))}, "8 images and 7 rows"),
    "NaN": (GOOD | {"logits": np.full((8, 5), np.nan)}, "logits have 40 entries that are NaN"),
    "other channels": (GOOD | {"images": np.ones((8, 32, 48, 1))}, r"expected \(B, H, W, 3\)"),
    "other size": (GOOD | {"images": np.ones((8, 33, 48, 3))}, "not a multiple of the patch"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_compared_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    arrays, message = BAD[case]
    with pytest.raises(InputError, match=message) as error:
        read(written(tmp_path, **arrays), PLAIN)
    assert "\n" not in str(error.value)


def test_a_model_that_gives_nan_is_refused() -> None:
    file = checkpoint()
    file.arrays["head.bias"][0] = torch.nan
    with pytest.raises(InputError, match="gives NaN or infinite outputs"):
        diagnose(file, expected(**GOOD, config=PLAIN))


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, **GOOD)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(InputError, match=r"expected\.npz"):
        read(path, PLAIN)
