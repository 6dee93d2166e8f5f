"""Diagnosis of mistakes that other implementations make: they are patched into the PyTorch twin and must be named."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("jax")

import torch.nn.functional as F

import vit_spec
import vit_torch
from parity.checkpoints.conversion import parameter
from parity.checkpoints.surgery.edit import to_float64
from parity.comparison.diagnosis import Diagnosis, diagnose, expected_outputs
from parity.comparison.diagnosis.hypothesis import Trial
from parity.comparison.diagnosis.score_bias import score_biases
from tests.parity.comparison.test_diagnosis import PLAIN, ROTARY, checkpoint, model_outputs, uint8_images
from tests.twins import small_config
from vit_spec import ViTConfig, rows

LAYERS, MODEL = vit_torch.layers, vit_torch.model
MEAN = PLAIN.replace(head={"pool": "mean"})
REGISTERS = small_config(vit_spec.get("dinov2_s14_reg4"))
DINOV3 = small_config(vit_spec.get("dinov3_s16"))
ORIGINAL_ROTARY, ORIGINAL_TABLES = vit_torch.attention.apply_rotary, vit_spec.rotary_tables


def _rms(self: Any, x: Any) -> Any:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def _res_post_norm(self: Any, x: Any, rate: float, tables: Any, noise: Any = None) -> Any:
    x = x + self.norm1(self.attn(x, tables))
    return x + self.norm2(self.mlp(x))


def _activation(function: Callable[[Any], Any]) -> Callable[[Any, str], Any]:
    return lambda x, kind: function(x)


def _bfloat16_scores(part: Any, q: Any, k: Any, v: Any, scale: float, rate: float, noise: Any, bias: Any = None) -> Any:
    scores = torch.einsum("bthd,bshd->bhts", q, k) * part.config.scale
    return torch.einsum("bhts,bshd->bthd", scores.bfloat16().to(v.dtype).softmax(-1), v)


def _bfloat16_rotary(x: Any, tables: Any, kind: str) -> Any:
    low = tuple(table.to(torch.bfloat16) for table in tables)
    return ORIGINAL_ROTARY(x.to(torch.bfloat16), low, kind).to(x.dtype)


def _swapped_tables(config: ViTConfig, grid: tuple[int, int]) -> Any:
    """Return rotary tables with rows and columns swapped, as `meshgrid` with the other indexing gives them."""
    height, width = grid
    theta = np.repeat(config.positions.rotary_base ** (-4 * np.arange(1, config.head_dim // 4 + 1) / config.head_dim), 2)
    angles = [np.r_[(y + 1) * theta, (x + 1) * theta] for y in range(height) for x in range(width)]
    whole = np.r_[np.zeros((config.num_prefix, config.head_dim)), np.array(angles)]
    return np.cos(whole)[None, :, None], np.sin(whole)[None, :, None]


def _tables_with_prefix_phase(config: ViTConfig, grid: tuple[int, int]) -> Any:
    cos, sin = (np.array(table).reshape(-1, config.head_dim) for table in ORIGINAL_TABLES(config, grid))
    last_patch = cos[-1].copy(), sin[-1].copy()
    cos[: config.num_prefix], sin[: config.num_prefix] = last_patch
    return cos[None, :, None], sin[None, :, None]


def _pooled_with_prefix(self: Any, x: Any, noise: Any) -> Any:
    return x.amax(1)


def _pooled_twice(self: Any, x: Any, noise: Any) -> Any:
    return (x[:, 0] + x[:, self.config.num_prefix :].mean(1)) / 2


MISTAKES: dict[str, tuple[str, ViTConfig, Any, str, Any]] = {
    "RMSNorm": ("LayerNorm formula", PLAIN, LAYERS.Norm, "forward", _rms),
    "res-post-norm": ("norms of a block", PLAIN, MODEL.Block, "forward", _res_post_norm),
    "silu": ("activation", PLAIN, MODEL, "activation", _activation(F.silu)),
    "mish": ("activation", PLAIN, MODEL, "activation", _activation(F.mish)),
    "relu": ("activation", PLAIN, MODEL, "activation", _activation(F.relu)),
    "x sigmoid(1.7 x)": ("activation", PLAIN, MODEL, "activation", _activation(lambda x: x * torch.sigmoid(1.7 * x))),
    "scores rounded": ("precision of the softmax", PLAIN, MODEL, "attention", _bfloat16_scores),
    "rotary in bfloat16": ("precision of rotary positions", ROTARY, MODEL, "apply_rotary", _bfloat16_rotary),
    "rows and columns swapped": ("rotary angles", ROTARY, MODEL, "rotary_tables", _swapped_tables),
    "a phase of prefix tokens": (
        "rotary phase of prefix tokens",
        DINOV3,
        MODEL,
        "rotary_tables",
        _tables_with_prefix_phase,
    ),
    "prefix tokens in the maximum": ("pooling", MEAN, MODEL.ViT, "pool", _pooled_with_prefix),
    "pooled twice": ("pooling", MEAN, MODEL.ViT, "pool", _pooled_twice),
}


def diagnose_mistake(config: ViTConfig, owner: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> Diagnosis:
    file, images = checkpoint(config), uint8_images(config)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, wrong)
        logits = model_outputs(config, file.arrays, images)
    return diagnose(file, expected_outputs(images, logits, config), pairs=20)


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_of_another_implementation_is_named(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, config, owner, name, wrong = MISTAKES[case]
    diagnosis = diagnose_mistake(config, owner, name, wrong, monkeypatch)
    names = {families for cause in diagnosis.matched for families in cause.families}
    assert family in names and diagnosis.discarded == (), diagnosis.verdict


def _registers_first(self: Any, images: Any, noise: Any = None) -> Any:
    x, tables = ORIGINAL_EMBED(self, images)
    last = 1 + self.config.tokens.registers
    return torch.cat([x[:, 1:last], x[:, :1], x[:, last:]], 1), tables


ORIGINAL_EMBED = vit_torch.ViT.embed
REGISTERS_FIRST, SECOND_TOKEN = "registers come before the class token", "pooling takes the second token"


def test_registers_first_and_the_equivalent_pooling_are_both_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    diagnosis = diagnose_mistake(REGISTERS, MODEL.ViT, "embed", _registers_first, monkeypatch)
    names = " ".join(name for cause in diagnosis.matched for name in cause.names)
    assert REGISTERS_FIRST in names and SECOND_TOKEN in names and diagnosis.apart.startswith("no image of this size tells")


@pytest.mark.parametrize("first", [True, False])
def test_an_intermediate_distinguishes_registers_first_from_pooling_the_second_token(
    first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, images = checkpoint(REGISTERS), uint8_images(REGISTERS)
    with monkeypatch.context() as patch:
        if first:
            patch.setattr(MODEL.ViT, "embed", _registers_first)
        else:
            patch.setattr(MODEL.ViT, "pool", lambda self, x, noise: x[:, 1])
        logits = model_outputs(REGISTERS, file.arrays, images)
        model = vit_torch.ViT(REGISTERS).eval()
        model.load_state_dict(dict(file.arrays))
        recorded: list[Any] = []
        model.blocks[0].register_forward_hook(lambda module, inputs, output: recorded.append(output))
        with torch.no_grad():
            pixels = torch.tensor(images / 255, dtype=torch.float32).permute(0, 3, 1, 2)
            model((pixels - MEANS) / STDS)
    inner = {"blocks.0": recorded[0].numpy()}
    diagnosis = diagnose(file, expected_outputs(images, logits, REGISTERS, inner), pairs=20)
    assert (
        all((REGISTERS_FIRST if first else SECOND_TOKEN) in str(cause) for cause in diagnosis.matched) and diagnosis.matched
    ), diagnosis


MEANS, STDS = (torch.tensor(values)[:, None, None] for values in (REGISTERS.pixels.mean, REGISTERS.pixels.std))


def _attention_with_bias(config: ViTConfig, shared: bool, recorded: list[Any]) -> Any:
    """Return attention with a relative position bias, as in BEiT and Swin; its weights are appended to `recorded`."""
    (height, width), rng = config.grid, np.random.default_rng(5)
    y, x = np.indices(config.grid).reshape(2, -1)
    dy, dx = (coordinate[:, None] - coordinate for coordinate in (y, x))
    tables = rng.normal(0, 1, (config.depth, config.num_heads, 2 * height - 1, 2 * width - 1))
    bias = rng.normal(0, 1, (config.depth, config.num_heads, config.num_tokens, config.num_tokens))
    bias[:, :, config.num_prefix :, config.num_prefix :] = tables[:, :, dy, dx]

    def attention(part: Any, q: Any, k: Any, v: Any, scale: float, rate: float, noise: Any, own_bias: Any = None) -> Any:
        scores = torch.einsum("bthd,bshd->bhts", q, k) * part.config.scale
        block_bias = bias[0 if shared else len(recorded) % config.depth]
        weights = (scores + torch.tensor(block_bias, dtype=scores.dtype)).softmax(-1)
        recorded.append(weights)
        return torch.einsum("bhts,bshd->bthd", weights, v)

    return attention


@pytest.mark.parametrize("shared", [False, True])
def test_a_missing_relative_position_bias_is_named_from_attention_weights(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the blocks have different tables, the weights of all blocks are given; for a shared table, those of the first."""
    file, images, recorded = checkpoint(PLAIN), uint8_images(PLAIN), list[Any]()
    with monkeypatch.context() as patch:
        patch.setattr(MODEL, "attention", _attention_with_bias(PLAIN, shared, recorded))
        logits = model_outputs(PLAIN, file.arrays, images)
    inner = {f"blocks.{n}.attn.weights": weights.numpy() for n, weights in enumerate(recorded[: 1 if shared else None])}
    diagnosis = diagnose(file, expected_outputs(images, logits, PLAIN, inner), pairs=20)
    assert [cause.families for cause in diagnosis.matched] == [("bias of the scores",)], diagnosis.verdict
    assert "every block" in diagnosis.verdict and diagnosis.discarded == ()


def test_attention_weights_of_one_image_give_no_bias() -> None:
    config, images = PLAIN, uint8_images(PLAIN)[:1]
    weights = {name: to_float64(parameter(checkpoint(config), name)) for name in rows(config)}
    alone = expected_outputs(
        images, np.ones((1, config.num_classes)), config, {"blocks.0.attn.weights": np.full((1, 2, 7, 7), 1 / 7)}
    )
    assert not list(score_biases(Trial(config, weights, alone.images, None), alone))
