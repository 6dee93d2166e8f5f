"""Golden files of the five articles that implement a ViT from scratch.

Each model is implemented here a second time from its description, as naively as possible: parameters have the article's
names, and loops replace the calls of a framework.  Nothing is shared with the twins.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vit_spec
from tests.goldens.golden import Golden
from tests.goldens.peers import Outputs, State, case, float64, golden, merge_projections, rename_keys, reshape_entries
from vit_spec import ViTConfig


def article(
    name: str, model: nn.Module, config: ViTConfig, rename: Callable[[State], State], size: tuple[int, int] | None = None
) -> Golden:
    """Return the golden file of an article's model, whose forward pass returns (logits, tokens)."""

    def run(model: Any, images: Tensor) -> Outputs:
        logits, tokens = model(images)
        return {"logits": logits, "norm" if config.norms.after_blocks else "blocks.1": tokens}

    return golden(name, model, config, rename, run, peer="its article, transcribed in from_articles.py", size=size)


def extract_patches(images: Tensor, side: int) -> Tensor:
    """Return the square patches of images, row by row, each flattened as (channels, rows, columns)."""
    patches = []
    for top in range(0, images.shape[2], side):
        for left in range(0, images.shape[3], side):
            patches.append(images[:, :, top : top + side, left : left + side].reshape(len(images), -1))
    return torch.stack(patches, 1)


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float) -> Tensor:
    """Return the multi-head attention of one image, computed head by head, token by token; arrays are (tokens, width)."""
    dim, result = q.shape[1] // heads, torch.zeros_like(q)
    for head in range(heads):
        part = slice(head * dim, (head + 1) * dim)
        for i in range(len(q)):
            scores = [scale * sum(a * b for a, b in zip(q[i, part], key[part], strict=True)) for key in k]
            largest = max(scores)
            shares = [math.exp(score - largest) for score in scores]
            for share, value in zip(shares, v, strict=True):
                result[i, part] += share / sum(shares) * value[part]
    return result


def gelu(x: Tensor) -> Tensor:
    """Return x times the standard normal distribution function at x."""
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


# 1. Findings in chest x-rays, rotary positions ---------------------------------------------------------------------


def rotate(x: Tensor, heads: int, columns: int) -> Tensor:
    """Apply rotary positions to the queries or keys of one image, (tokens, width), where token 0 is the class token.

    The first half of a head is rotated by the column and the second by the row, both counted from 1, in neighbouring
    pairs.  Pair i = 1, 2, ... of the d entries of a half is rotated by position * 10000^(-2 i / d).
    """
    result, dim = x.clone(), x.shape[1] // heads
    d = dim // 2
    for token in range(1, len(x)):
        row, column = divmod(token - 1, columns)
        for head in range(heads):
            for half, position in enumerate((column + 1, row + 1)):
                for i in range(1, d // 2 + 1):
                    angle = position * 10000 ** (-2 * i / d)
                    at = head * dim + half * d + 2 * (i - 1)
                    a, b = x[token, at], x[token, at + 1]
                    result[token, at] = a * math.cos(angle) - b * math.sin(angle)
                    result[token, at + 1] = b * math.cos(angle) + a * math.sin(angle)
    return result


class XrayBlock(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int, columns: int) -> None:
        super().__init__()
        self.heads, self.columns = heads, columns
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-5), nn.LayerNorm(width, eps=1e-5)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleList([nn.Linear(width, hidden), nn.Identity(), nn.Linear(hidden, width)])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attn["qkv"](self.norm1(x)).chunk(3, dim=2)
        scale, mixed = 1 / math.sqrt(x.shape[2] // self.heads), []
        for one in range(len(x)):
            turn = [rotate(y[one], self.heads, self.columns) for y in (q, k)]
            mixed.append(attend(*turn, v[one], self.heads, scale))
        x = x + self.attn["proj"](torch.stack(mixed))
        return x + self.mlp[2](gelu(self.mlp[0](self.norm2(x))))


class Xray(nn.Module):
    def __init__(self, c: ViTConfig) -> None:
        super().__init__()
        self.side = c.patch_size[0]
        self.patch_embedding = nn.ModuleDict({"patch_embed": nn.Linear(c.in_channels * self.side**2, c.width)})
        self.cls_token = nn.Parameter(torch.zeros(1, 1, c.width))
        arguments = (c.width, c.num_heads, c.mlp_dim, c.image_size[1] // self.side)
        self.transformer_blocks = nn.ModuleList(XrayBlock(*arguments) for _ in range(c.depth))
        self.mlp_head = nn.Linear(c.width, c.num_classes)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = self.patch_embedding["patch_embed"](extract_patches(images, self.side))
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)
        for block in self.transformer_blocks:
            x = block(x)
        return self.mlp_head(x[:, 0]), x


@case
def article_xray_rope() -> Golden:
    """Axial rotary positions in neighbouring pairs, no table, no final norm."""
    small = {"image_size": (12, 20), "patch_size": 4, "width": 16, "depth": 2, "num_heads": 2, "mlp_dim": 18}
    config = vit_spec.get("article_xray_rope", **small)

    def rename(state: State) -> State:
        rules = {r"^patch_embedding\.patch_embed": "patch_embed.proj", "^transformer_blocks": "blocks"}
        state = rename_keys(state, {**rules, r"mlp\.0": "mlp.fc1", r"mlp\.2": "mlp.fc2", "mlp_head": "head"})
        return reshape_entries(state, **{"patch_embed.proj.weight": (16, 1, 4, 4)})

    with float64():
        return article("article_xray_rope", Xray(config), config, rename)


# 2. ViT-B/16 with torch.nn.MultiheadAttention -----------------------------------------------------------------------


class MultiheadBlock(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.attention = nn.ModuleDict({"layer": nn.LayerNorm(width, eps=1e-5), "attention": attention})
        parts = {"linear1": nn.Linear(width, hidden), "linear2": nn.Linear(hidden, width)}
        self.mlp = nn.ModuleDict({"norm": nn.LayerNorm(width, eps=1e-5), **parts})

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention["layer"](x)
        x = self.attention["attention"](y, y, y, need_weights=False)[0] + x
        y = self.mlp["norm"](x)
        return self.mlp["linear2"](gelu(self.mlp["linear1"](y))) + x


class Multihead(nn.Module):
    def __init__(self, c: ViTConfig) -> None:
        super().__init__()
        self.class_embedding = nn.Parameter(torch.zeros(1, 1, c.width))
        self.position_embedding = nn.Parameter(torch.zeros(1, c.num_tokens, c.width))
        side = c.patch_size[0]
        self.patch_embedding = nn.ModuleDict({"conv": nn.Conv2d(c.in_channels, c.width, side, side)})
        self.vit = nn.ModuleList(MultiheadBlock(c.width, c.num_heads, c.mlp_dim) for _ in range(c.depth))
        self.classifier = nn.Sequential(nn.LayerNorm(c.width, eps=1e-5), nn.Linear(c.width, c.num_classes))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = self.patch_embedding["conv"](images).flatten(2).permute(0, 2, 1)
        x = torch.cat([self.class_embedding.expand(len(x), -1, -1), x], 1) + self.position_embedding
        for block in self.vit:
            x = block(x)
        return self.classifier(x[:, 0]), x


@case
def article_multihead() -> Golden:
    """PyTorch's multi-head attention; a norm on the class token belongs to the classifier."""
    small = {"image_size": (12, 20), "patch_size": 4, "width": 12, "depth": 2, "num_heads": 3, "mlp_dim": 18}
    config = vit_spec.get("article_multihead", num_classes=5, **small)

    def rename(state: State) -> State:
        rules = {
            "^class_embedding": "cls_token",
            "^position_embedding": "pos_embed",
            r"^patch_embedding\.conv": "patch_embed.proj",
            "^vit": "blocks",
            r"attention\.layer": "norm1",
            r"attention\.attention\.in_proj_": "attn.qkv.",
            r"attention\.attention\.out_proj": "attn.proj",
            r"mlp\.norm": "norm2",
            "linear": "fc",
            r"^classifier\.0": "fc_norm",
            r"^classifier\.1": "head",
        }
        return rename_keys(state, rules)

    with float64():
        return article("article_multihead", Multihead(config), config, rename)


# 3. Learned positions that start as sinusoids -----------------------------------------------------------------------


class SincosBlock(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.att = nn.ModuleDict({name: nn.Linear(width, width) for name in ("query", "key", "value")})
        self.ll = nn.LayerNorm(width, eps=1e-5)
        self.ff = nn.ModuleDict({"ff": nn.Sequential(nn.Linear(width, hidden), nn.Linear(hidden, width))})

    def forward(self, x: Tensor) -> Tensor:
        y = self.ll(x)
        q, k, v = (self.att[name](y) for name in ("query", "key", "value"))
        scale = 1 / math.sqrt(self.heads)
        x = x + torch.stack([attend(q[one], k[one], v[one], self.heads, scale) for one in range(len(x))])
        return x + self.ff["ff"](self.ll(x))


class Sincos(nn.Module):
    def __init__(self, c: ViTConfig) -> None:
        super().__init__()
        side = c.patch_size[0]
        self.patchemb = nn.Module()
        self.patchemb.projection = nn.Sequential(nn.Conv2d(c.in_channels, c.width, side, side))
        self.patchemb.cls_token = nn.Parameter(torch.zeros(1, 1, c.width))
        self.patchemb.pos_embed = nn.Parameter(torch.zeros(c.num_tokens, c.width))
        self.attention = nn.ModuleList(SincosBlock(c.width, c.num_heads, c.mlp_dim) for _ in range(c.depth))
        self.ff = nn.Linear(c.width, c.num_classes)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = self.patchemb.projection(images).flatten(2).permute(0, 2, 1)
        x = torch.cat([self.patchemb.cls_token.expand(len(x), -1, -1), x], 1) + self.patchemb.pos_embed
        for block in self.attention:
            x = block(x)
        return self.ff(x[:, 0]), x


@case
def article_sincos() -> Golden:
    """One norm for both halves of a block, scores over the root of the number of heads, no activation, no projection."""
    small = {"image_size": (12, 20), "patch_size": 4, "width": 12, "depth": 2, "mlp_dim": 18}  # 6 heads stay
    config = vit_spec.get("article_sincos", **small)

    def rename(state: State) -> State:
        rules = {
            r"^patchemb\.projection\.0": "patch_embed.proj",
            r"^patchemb\.": "",
            r"^ff\.": "head.",
            "^attention": "blocks",
            r"\.att\.": ".attn.",
            r"\.ll\.": ".norm1.",
            r"\.ff\.ff\.0": ".mlp.fc1",
            r"\.ff\.ff\.1": ".mlp.fc2",
        }
        state = merge_projections(rename_keys(state, rules), ("query", "key", "value"), "qkv")
        return reshape_entries(state, pos_embed=(1, -1, 12))

    with float64():
        return article("article_sincos", Sincos(config), config, rename)


# 4. One number from a wide image ------------------------------------------------------------------------------------


class RectangularBlock(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-5), nn.LayerNorm(width, eps=1e-5)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width, bias=False), "proj": nn.Linear(width, width)})
        self.neuralnet = nn.ModuleDict({"fc1": nn.Linear(width, hidden), "fc2": nn.Linear(hidden, width)})

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attn["qkv"](self.norm1(x)).chunk(3, dim=2)
        scale = 1 / math.sqrt(x.shape[2] // self.heads)
        mixed = torch.stack([attend(q[one], k[one], v[one], self.heads, scale) for one in range(len(x))])
        x = x + (v + self.attn["proj"](mixed))
        return x + self.neuralnet["fc2"](gelu(self.neuralnet["fc1"](self.norm2(x))))


class Rectangular(nn.Module):
    def __init__(self, c: ViTConfig) -> None:
        super().__init__()
        self.side = c.patch_size[0]
        self.patch_tokens = nn.ModuleDict({"project": nn.Linear(c.in_channels * self.side**2, c.width)})
        self.backbone = nn.Module()
        self.backbone.cls_token = nn.Parameter(torch.zeros(1, 1, c.width))
        table = torch.zeros(1, c.num_tokens, c.width)
        for position in range(c.num_tokens):
            for i in range(c.width):
                angle = position / 10000 ** (2 * (i // 2) / c.width)
                table[0, position, i] = math.cos(angle) if i % 2 else math.sin(angle)
        self.backbone.pos_embed = nn.Parameter(table, requires_grad=False)
        self.backbone.blocks = nn.ModuleList(RectangularBlock(c.width, c.num_heads, c.mlp_dim) for _ in range(c.depth))
        self.backbone.norm = nn.LayerNorm(c.width, eps=1e-5)
        self.backbone.head = nn.Linear(c.width, c.num_classes)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = self.patch_tokens["project"](extract_patches(images, self.side))
        x = torch.cat([self.backbone.cls_token.expand(len(x), -1, -1), x], 1) + self.backbone.pos_embed
        for block in self.backbone.blocks:
            x = block(x)
        x = self.backbone.norm(x)
        return self.backbone.head(x[:, 0]), x


@case
def article_rectangular() -> Golden:
    """A fixed 1-D table, no bias of queries, keys and values, and values added to the output of attention."""
    small = {"image_size": (12, 20), "patch_size": 4, "width": 12, "depth": 2, "num_heads": 3, "mlp_dim": 18}
    config = vit_spec.get("article_rectangular", **small)

    def rename(state: State) -> State:
        rules: dict[str, str | None] = {
            "pos_embed": None,
            r"^backbone\.": "",
            r"^patch_tokens\.project": "patch_embed.proj",
        }
        state = rename_keys(state, {**rules, "neuralnet": "mlp"})
        return reshape_entries(state, **{"patch_embed.proj.weight": (12, 1, 4, 4)})

    with float64():
        return article("article_rectangular", Rectangular(config), config, rename)


# 5. DINO's backbone -------------------------------------------------------------------------------------------------


class DinoBlock(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, hidden), "fc2": nn.Linear(hidden, width)})

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attn["qkv"](self.norm1(x)).chunk(3, dim=2)
        scale = 1 / math.sqrt(x.shape[2] // self.heads)
        mixed = torch.stack([attend(q[one], k[one], v[one], self.heads, scale) for one in range(len(x))])
        x = x + self.attn["proj"](mixed)
        return x + self.mlp["fc2"](gelu(self.mlp["fc1"](self.norm2(x))))


class Dino(nn.Module):
    def __init__(self, c: ViTConfig) -> None:
        super().__init__()
        self.patch, self.grid = c.patch_size[0], c.grid
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(c.in_channels, c.width, self.patch, self.patch)})
        self.cls_token = nn.Parameter(torch.zeros(1, 1, c.width))
        self.pos_embed = nn.Parameter(torch.zeros(1, c.num_tokens, c.width))
        self.blocks = nn.ModuleList(DinoBlock(c.width, c.num_heads, c.mlp_dim) for _ in range(c.depth))
        self.norm = nn.LayerNorm(c.width, eps=1e-6)

    def positions(self, rows: int, columns: int) -> Tensor:
        (old_rows, old_columns), width = self.grid, self.pos_embed.shape[2]
        table = self.pos_embed[:, 1:].reshape(1, old_rows, old_columns, width).permute(0, 3, 1, 2)
        scale = ((rows + 0.1) / old_rows, (columns + 0.1) / old_columns)
        table = F.interpolate(table, scale_factor=scale, mode="bicubic")
        return torch.cat([self.pos_embed[:, :1], table.flatten(2).permute(0, 2, 1)], 1)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = self.patch_embed["proj"](images)
        positions = self.positions(*x.shape[2:])
        x = x.flatten(2).permute(0, 2, 1)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + positions
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return x[:, 0], x


@case
def article_dino() -> Golden:
    """Positions resampled to another grid by (new + 0.1) / old, from a grid that is not square."""
    small = {"image_size": (12, 20), "patch_size": 4, "width": 12, "depth": 2, "num_heads": 3, "mlp_dim": 18}
    config = vit_spec.get("article_dino", **small)
    with float64():
        return article("article_dino", Dino(config), config, dict, size=(20, 12))
