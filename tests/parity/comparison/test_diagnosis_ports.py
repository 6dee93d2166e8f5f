"""Mistakes of other implementations, planted by hand in a copy of the PyTorch twin, are the first that are named."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("jax")

import torch.nn.functional as F

import vit_spec
import vit_torch
from parity.checkpoints.surgery.edit import float64
from parity.checkpoints.weights import parameter
from parity.comparison.diagnosis import Diagnosis, diagnose, expected
from parity.comparison.diagnosis.score_bias import score_biases
from parity.comparison.diagnosis.trial import Trial
from tests.parity.comparison.test_diagnosis import PLAIN, ROTARY, answers, checkpoint, pictures
from tests.twins import small
from vit_spec import ViTConfig, rows

LAYERS, MODEL = vit_torch.layers, vit_torch.model
MEAN = PLAIN.replace(head={"pool": "mean"})
REGISTERS = small(vit_spec.get("dinov2_s14_reg4"))
DINOV3 = small(vit_spec.get("dinov3_s16"))
RIGHT_ROTATE, RIGHT_TABLES = LAYERS.rotate, vit_spec.rotary_tables


def _rms(self: Any, x: Any) -> Any:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def _res_post_norm(self: Any, x: Any, rate: float, tables: Any) -> Any:
    x = x + self.norm1(self.attn(x, tables))
    return x + self.norm2(self.mlp(x))


def _of(function: Callable[[Any], Any]) -> Callable[[Any, str], Any]:
    return lambda x, kind: function(x)


def _low_scores(part: Any, q: Any, k: Any, v: Any, rate: float) -> Any:
    scores = torch.einsum("bthd,bshd->bhts", q, k) * part.config.scale
    return torch.einsum("bhts,bshd->bthd", scores.bfloat16().to(v.dtype).softmax(-1), v)


def _low_rotate(x: Any, tables: Any, kind: str) -> Any:
    low = tuple(table.to(torch.bfloat16) for table in tables)
    return RIGHT_ROTATE(x.to(torch.bfloat16), low, kind).to(x.dtype)


def _swapped_tables(config: ViTConfig, grid: tuple[int, int]) -> Any:
    """Rows for columns: what `meshgrid` gives whose indexing is the other way round."""
    height, width = grid
    theta = np.repeat(config.positions.rotary_base ** (-4 * np.arange(1, config.head_dim // 4 + 1) / config.head_dim), 2)
    angles = [np.r_[(y + 1) * theta, (x + 1) * theta] for y in range(height) for x in range(width)]
    whole = np.r_[np.zeros((config.num_prefix, config.head_dim)), np.array(angles)]
    return np.cos(whole)[None, :, None], np.sin(whole)[None, :, None]


def _phased_tables(config: ViTConfig, grid: tuple[int, int]) -> Any:
    cos, sin = (np.array(table).reshape(-1, config.head_dim) for table in RIGHT_TABLES(config, grid))
    turn = cos[-1].copy(), sin[-1].copy()
    cos[: config.num_prefix], sin[: config.num_prefix] = turn
    return cos[None, :, None], sin[None, :, None]


def _pooled_with_prefix(self: Any, x: Any) -> Any:
    return x.amax(1)


def _pooled_twice(self: Any, x: Any) -> Any:
    return (x[:, 0] + x[:, self.config.num_prefix :].mean(1)) / 2


PORTS: dict[str, tuple[str, ViTConfig, Any, str, Any]] = {
    "RMSNorm": ("LayerNorm formula", PLAIN, LAYERS.LayerNorm, "forward", _rms),
    "res-post-norm": ("norms of a block", PLAIN, MODEL.Block, "forward", _res_post_norm),
    "silu": ("activation", PLAIN, MODEL, "activation", _of(F.silu)),
    "mish": ("activation", PLAIN, MODEL, "activation", _of(F.mish)),
    "relu": ("activation", PLAIN, MODEL, "activation", _of(F.relu)),
    "x sigmoid(1.7 x)": ("activation", PLAIN, MODEL, "activation", _of(lambda x: x * torch.sigmoid(1.7 * x))),
    "scores rounded": ("precision of the softmax", PLAIN, MODEL, "attention", _low_scores),
    "rotary in bfloat16": ("precision of rotary positions", ROTARY, MODEL, "rotate", _low_rotate),
    "rows and columns swapped": ("rotary angles", ROTARY, MODEL, "rotary_tables", _swapped_tables),
    "a phase of prefix tokens": ("rotary phase of prefix tokens", DINOV3, MODEL, "rotary_tables", _phased_tables),
    "prefix tokens in the maximum": ("pooling", MEAN, MODEL.ViT, "pool", _pooled_with_prefix),
    "pooled twice": ("pooling", MEAN, MODEL.ViT, "pool", _pooled_twice),
}


def planted(config: ViTConfig, owner: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> Diagnosis:
    file, images = checkpoint(config), pictures(config)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, wrong)
        logits = answers(config, file.arrays, images)
    return diagnose(file, expected(images, logits, config), pairs=20)


@pytest.mark.parametrize("case", PORTS)
def test_a_mistake_of_another_implementation_is_named(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, config, owner, name, wrong = PORTS[case]
    found = planted(config, owner, name, wrong, monkeypatch)
    named = {families for cause in found.matched for families in cause.families}
    assert family in named and found.discarded == (), found.verdict


def _registers_first(self: Any, images: Any) -> Any:
    x, tables = RIGHT_EMBED(self, images)
    last = 1 + self.config.tokens.registers
    return torch.cat([x[:, 1:last], x[:, :1], x[:, last:]], 1), tables


RIGHT_EMBED = vit_torch.ViT.embed
FIRST, SECOND = "registers come ahead of the class token", "pooling takes the second token"


def test_registers_ahead_of_the_class_token_are_told_with_what_they_cannot_be_told_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = planted(REGISTERS, MODEL.ViT, "embed", _registers_first, monkeypatch)
    named = " ".join(name for cause in found.matched for name in cause.names)
    assert FIRST in named and SECOND in named and found.apart.startswith("no image of this size tells")


@pytest.mark.parametrize("first", [True, False])
def test_an_intermediate_tells_registers_ahead_of_the_class_token_from_pooling_the_second(
    first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, images = checkpoint(REGISTERS), pictures(REGISTERS)
    with monkeypatch.context() as patch:
        if first:
            patch.setattr(MODEL.ViT, "embed", _registers_first)
        else:
            patch.setattr(MODEL.ViT, "pool", lambda self, x: x[:, 1])
        logits = answers(REGISTERS, file.arrays, images)
        model = vit_torch.ViT(REGISTERS).eval()
        model.load_state_dict(dict(file.arrays))
        seen: list[Any] = []
        model.blocks[0].register_forward_hook(lambda module, inputs, output: seen.append(output))
        with torch.no_grad():
            pixels = torch.tensor(images / 255, dtype=torch.float32).permute(0, 3, 1, 2)
            model((pixels - MEANS) / STDS)
    inner = {"blocks.0": seen[0].numpy()}
    found = diagnose(file, expected(images, logits, REGISTERS, inner), pairs=20)
    assert all((FIRST if first else SECOND) in str(cause) for cause in found.matched) and found.matched, found


MEANS, STDS = (torch.tensor(values)[:, None, None] for values in (REGISTERS.pixels.mean, REGISTERS.pixels.std))


def _biased(config: ViTConfig, shared: bool, seen: list[Any]) -> Any:
    """Attention with a table of relative positions, as BEiT and Swin have it; `seen` gets its weights."""
    (height, width), rng = config.grid, np.random.default_rng(5)
    y, x = np.indices(config.grid).reshape(2, -1)
    dy, dx = (place[:, None] - place for place in (y, x))
    tables = rng.normal(0, 1, (config.depth, config.num_heads, 2 * height - 1, 2 * width - 1))
    bias = rng.normal(0, 1, (config.depth, config.num_heads, config.num_tokens, config.num_tokens))
    bias[:, :, config.num_prefix :, config.num_prefix :] = tables[:, :, dy, dx]

    def attention(part: Any, q: Any, k: Any, v: Any, rate: float) -> Any:
        scores = torch.einsum("bthd,bshd->bhts", q, k) * part.config.scale
        own = bias[0 if shared else len(seen) % config.depth]
        weights = (scores + torch.tensor(own, dtype=scores.dtype)).softmax(-1)
        seen.append(weights)
        return torch.einsum("bhts,bshd->bthd", weights, v)

    return attention


@pytest.mark.parametrize("shared", [False, True])
def test_a_dropped_bias_of_relative_positions_is_named_where_weights_of_attention_are_expected(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks' weights are given where the tables differ; of shared tables the first block's are enough."""
    file, images, seen = checkpoint(PLAIN), pictures(PLAIN), list[Any]()
    with monkeypatch.context() as patch:
        patch.setattr(MODEL, "attention", _biased(PLAIN, shared, seen))
        logits = answers(PLAIN, file.arrays, images)
    inner = {f"blocks.{n}.attn.weights": weights.numpy() for n, weights in enumerate(seen[: 1 if shared else None])}
    found = diagnose(file, expected(images, logits, PLAIN, inner), pairs=20)
    assert [cause.families for cause in found.matched] == [("bias of the scores",)], found.verdict
    assert "every block" in found.verdict and found.discarded == ()


def test_weights_of_attention_on_one_image_tell_no_bias() -> None:
    config, images = PLAIN, pictures(PLAIN)[:1]
    weights = {name: float64(parameter(checkpoint(config), name)) for name in rows(config)}
    alone = expected(
        images, np.ones((1, config.num_classes)), config, {"blocks.0.attn.weights": np.full((1, 2, 7, 7), 1 / 7)}
    )
    assert not list(score_biases(Trial(config, weights, alone.images, None), alone))
