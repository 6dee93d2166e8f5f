"""PyTorch classes in the styles of strangers: other names, other layouts, other orders of operations.

Sizes are such that no two axes have the same length, so that a wrong layout cannot fit by accident.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGE, PATCH, CHANNELS, WIDTH, HEADS, HIDDEN, CLASSES = (16, 24), (4, 8), 3, 48, 3, 80, 7
CELLS = (IMAGE[0] // PATCH[0]) * (IMAGE[1] // PATCH[1])


# timm's operations under other names ------------------------------------------------------------------------------------


class Renamed(nn.Module):
    """timm's model with other names; norm_b runs before norm_a."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm_a = nn.LayerNorm(WIDTH, eps=1e-6)
            self.norm_b = nn.LayerNorm(WIDTH, eps=1e-6)
            self.mix = nn.Linear(WIDTH, 3 * WIDTH)
            self.mix_out = nn.Linear(WIDTH, WIDTH)
            self.up = nn.Linear(WIDTH, HIDDEN)
            self.down = nn.Linear(HIDDEN, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            b, t, c = x.shape
            q, k, v = self.mix(self.norm_b(x)).reshape(b, t, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
            weights = (q @ k.transpose(-2, -1) * (c // HEADS) ** -0.5).softmax(-1)
            x = x + self.mix_out((weights @ v).transpose(1, 2).reshape(b, t, c))
            return x + self.down(F.gelu(self.up(self.norm_a(x))))

    def __init__(self, depth: int = 2, classes: int = CLASSES) -> None:
        super().__init__()
        self.image_size = IMAGE
        self.stem = nn.Conv2d(CHANNELS, WIDTH, PATCH, PATCH)
        self.start = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.where = nn.Parameter(torch.randn(1, CELLS + 1, WIDTH))
        self.stack = nn.ModuleList(self.Layer() for _ in range(depth))
        self.last = nn.LayerNorm(WIDTH, eps=1e-6)
        self.out = nn.Linear(WIDTH, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.start.expand(len(x), -1, -1), x], 1) + self.where
        for layer in self.stack:
            x = layer(x)
        return self.out(self.last(x)[:, 0])


# lucidrains -------------------------------------------------------------------------------------------------------------


class PreNorm(nn.Module):
    def __init__(self, dim: int, fn: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self.norm(x))


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(dim, hidden), nn.GELU(), nn.Dropout(0.1), nn.Linear(hidden, dim), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class ChunkAttention(nn.Module):
    def __init__(self, dim: int, heads: int, dim_head: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, dim_head**-0.5
        self.to_qkv = nn.Linear(dim, 3 * heads * dim_head, bias=False)
        self.to_out = nn.Sequential(nn.Linear(heads * dim_head, dim), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.to_qkv(x).chunk(3, dim=-1))
        weights = (torch.matmul(q, k.transpose(-1, -2)) * self.scale).softmax(dim=-1)
        return self.to_out(torch.matmul(weights, v).transpose(1, 2).flatten(2))


class FlattenPatches(nn.Module):
    """einops' "b c (h p1) (w p2) -> b (h w) (p1 p2 c)"."""

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        x = x.reshape(b, c, h // PATCH[0], PATCH[0], w // PATCH[1], PATCH[1]).permute(0, 2, 4, 3, 5, 1)
        return x.reshape(b, -1, PATCH[0] * PATCH[1] * c)


class Lucid(nn.Module):
    """The structure of vit-pytorch, with heads of another width than dim / heads."""

    def __init__(self, *, image_size: Any, dim: int = WIDTH, depth: int = 2, heads: int = 5, mlp_dim: int = HIDDEN) -> None:
        super().__init__()
        cells = (image_size[0] // PATCH[0]) * (image_size[1] // PATCH[1])
        self.to_patch_embedding = nn.Sequential(FlattenPatches(), nn.Linear(PATCH[0] * PATCH[1] * CHANNELS, dim))
        self.pos_embedding = nn.Parameter(torch.randn(1, cells + 1, dim))
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim))
        self.transformer = nn.ModuleList(
            nn.ModuleList([PreNorm(dim, ChunkAttention(dim, heads, 8)), PreNorm(dim, FeedForward(dim, mlp_dim))])
            for _ in range(depth)
        )
        self.mlp_head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, CLASSES))

    def forward(self, img: Tensor) -> Tensor:
        x = self.to_patch_embedding(img)
        x = torch.cat((self.cls_token.repeat(len(x), 1, 1), x), dim=1)
        x += self.pos_embedding[:, : x.shape[1]]
        for attn, ff in self.transformer:
            x = attn(x) + x
            x = ff(x) + x
        return self.mlp_head(x[:, 0])


# Separate layers of queries, keys and values ----------------------------------------------------------------------------


class SplitAttention(nn.Module):
    """Keys first, and the query has no "q" in its name."""

    def __init__(self) -> None:
        super().__init__()
        self.lin1 = nn.Linear(WIDTH, WIDTH)
        self.lin2 = nn.Linear(WIDTH, WIDTH)
        self.lin3 = nn.Linear(WIDTH, WIDTH)
        self.lin4 = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        k, v, q = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.lin1, self.lin2, self.lin3))
        return self.lin4(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class HeadList(nn.Module):
    """A list of heads, each with its own small layers, as tutorials write it."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH // HEADS, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            scores = self.query(x) @ self.key(x).transpose(1, 2) / math.sqrt(WIDTH // HEADS)
            return scores.softmax(-1) @ self.value(x)

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(self.Head() for _ in range(HEADS))
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


class DimFirst(nn.Module):
    """Queries, keys and values of a head entry are adjacent: (head dim qkv)."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Linear(WIDTH, 3 * WIDTH)
        self.back = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.all(x).unflatten(-1, (HEADS, WIDTH // HEADS, 3)).transpose(1, 2).unbind(-1)
        return self.back(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class TransposedWeights(nn.Module):
    """Weights (inputs, outputs), as in GPT-2, and scores without a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.w_qkv = nn.Parameter(torch.randn(WIDTH, 3 * WIDTH) * 0.1)
        self.b_qkv = nn.Parameter(torch.randn(3 * WIDTH))
        self.w_out = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)
        self.b_out = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (x @ self.w_qkv + self.b_qkv).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        weights = torch.einsum("bhtd,bhsd->bhts", q, k).softmax(-1)
        return torch.einsum("bhts,bhsd->bthd", weights, v).flatten(2) @ self.w_out + self.b_out


class TorchAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mha = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.mha(x, x, x, need_weights=False)[0]


class PairAttention(nn.Module):
    """One layer for queries, one for keys and values, as for cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.to_kv = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.to_out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        q, (k, v) = self.to_q(x), self.to_kv(x if context is None else context).chunk(2, dim=-1)
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (q, k, v))
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class ScoreAttention(nn.Module):
    """One layer for queries and keys of each head together, before or after that of the values; no output projection."""

    def __init__(self, values_first: bool = False) -> None:
        super().__init__()
        self.values_first = values_first
        self.scores, self.value = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        v = self.value(x) if self.values_first else None
        q, k = self.scores(x).unflatten(-1, (HEADS, 2, -1)).permute(3, 0, 2, 1, 4)
        v = (self.value(x) if v is None else v).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class OtherOrder(nn.Module):
    """Keys, values and queries, in this order, are one array."""

    def __init__(self) -> None:
        super().__init__()
        self.kvq, self.mix = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        k, v, q = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.kvq(x).chunk(3, dim=-1))
        return self.mix(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class ValuesBeforeKeys(nn.Module):
    """Values come before keys in their array."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.vk, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        v, k = self.vk(x).chunk(2, dim=-1)
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (self.q(x), k, v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


ATTENTIONS = {
    "other_order": OtherOrder,
    "values_before_keys": ValuesBeforeKeys,
    "split": SplitAttention,
    "pair": PairAttention,
    "scores": ScoreAttention,
    "values_first": lambda: ScoreAttention(values_first=True),
    "heads": HeadList,
    "dim_first": DimFirst,
    "transposed": TransposedWeights,
    "torch": TorchAttention,
}


class Assembled(nn.Module):
    """A model with one of the attentions above, and positions in an nn.Embedding."""

    class Block(nn.Module):
        def __init__(self, attention: str) -> None:
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.attention = ATTENTIONS[attention]()
            self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(approximate="tanh"), nn.Linear(HIDDEN, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.attention(self.ln_1(x))
            return x + self.mlp(self.ln_2(x))

    def __init__(self, attention: str, height: int = IMAGE[0], width: int = IMAGE[1]) -> None:
        super().__init__()
        self.height, self.width = height, width
        self.conv = nn.Conv2d(CHANNELS, WIDTH, PATCH, PATCH)
        self.cls = nn.Parameter(torch.randn(WIDTH))
        self.position = nn.Embedding(CELLS + 1, WIDTH)
        self.register_buffer("position_ids", torch.arange(CELLS + 1))
        self.encoder = nn.Sequential(*(self.Block(attention) for _ in range(2)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 20), nn.Tanh(), nn.Linear(20, CLASSES))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.conv(x).flatten(2).mT
        x = torch.cat([self.cls.expand(len(x), 1, WIDTH), x], dim=1) + self.position(self.position_ids)
        return {"logits": self.head(self.encoder(x)[:, 0])}


# torch.nn.TransformerEncoder --------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """PyTorch's own encoder, post-norm with ReLU by default, over the mean of all tokens."""

    def __init__(self, norm_first: bool = False, activation: str = "relu") -> None:
        super().__init__()
        self.image_size = list(IMAGE)
        self.embed = nn.Conv2d(CHANNELS, WIDTH, PATCH, PATCH, bias=False)
        self.tokens = nn.Parameter(torch.randn(2, WIDTH))
        self.cls = nn.Parameter(torch.randn(1, WIDTH))
        self.pos = nn.Parameter(torch.randn(CELLS, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, 0.1, activation, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.fc = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        x = self.embed(x).flatten(2).transpose(1, 2) + self.pos
        x = torch.cat([y.expand(len(x), *y.shape) for y in (self.cls, self.tokens)] + [x], dim=1)
        return (self.fc(self.encoder(x).mean(dim=1)),)


# Without biases, with a mean, a fixed table, a gated MLP ------------------------------------------------------------------


def sincos_table(rows: int, columns: int, width: int) -> Tensor:
    """Return MAE's table: x before y."""
    omega = 10000.0 ** (-torch.arange(width // 4, dtype=torch.get_default_dtype()) / (width // 4))
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    parts = [
        part
        for axis in (x, y)
        for part in ((axis.flatten()[:, None] * omega).sin(), (axis.flatten()[:, None] * omega).cos())
    ]
    return torch.cat(parts, dim=1)


class Gated(nn.Module):
    """RMS norms, SwiGLU in three layers, no biases, layer scale, norms of queries and keys, a sine-cosine table."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.RMSNorm(WIDTH, eps=1e-5), nn.RMSNorm(WIDTH, eps=1e-5)
            self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
            self.q_norm, self.k_norm = nn.RMSNorm(WIDTH // HEADS, eps=1e-5), nn.RMSNorm(WIDTH // HEADS, eps=1e-5)
            self.gamma1, self.gamma2 = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))
            self.w1, self.w3 = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
            self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm1(x)
            q, k, v = (layer(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.wq, self.wk, self.wv))
            y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
            x = x + self.gamma1 * self.wo(y.transpose(1, 2).flatten(2))
            y = self.norm2(x)
            return x + self.gamma2 * self.w2(F.silu(self.w1(y)) * self.w3(y))

    def __init__(self, persistent: bool = True, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.img_size = IMAGE
        self.patchify = nn.Conv2d(CHANNELS, WIDTH, PATCH, PATCH, bias=False)
        table = sincos_table(IMAGE[0] // PATCH[0], IMAGE[1] // PATCH[1], WIDTH)
        self.register_buffer("table", table.to(dtype or table.dtype), persistent=persistent)
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patchify(x).flatten(2).transpose(1, 2) + self.table
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


# Impostors: ViTConfig expresses none of them, except for those that the tests name --------------------------------------


class Impostor(Renamed):
    """`Renamed` with one change."""

    def __init__(self, change: str, depth: int = 2) -> None:
        super().__init__(depth)
        self.change = change
        for layer in self.stack:
            if change == "eps of the blocks":
                layer.norm_a.eps = layer.norm_b.eps = 1e-5
            if change == "eps of one norm":
                layer.norm_a.eps = 1e-5
        if change == "eps everywhere":
            for module in self.modules():
                if isinstance(module, nn.LayerNorm):
                    module.eps = 1e-5
        if change == "eps of the dtype":
            for layer in self.stack:
                layer.norm_a, layer.norm_b = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
            self.last = nn.RMSNorm(WIDTH)
        if change == "statistics":
            self.batch_norm = nn.BatchNorm1d(WIDTH)
        if change == "gate":
            self.register_buffer("gate", torch.ones(()))
        if change in ("normalized images", "unused normalization", "normalized by an unsaved buffer"):
            is_saved = change != "normalized by an unsaved buffer"
            self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).reshape(1, 3, 1, 1), persistent=is_saved)
            self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).reshape(1, 3, 1, 1), persistent=is_saved)
        if change == "unused":
            self.mask_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        if change == "windows":
            self.relative = nn.Parameter(torch.randn(HEADS, CELLS + 1, CELLS + 1))

    def forward(self, images: Tensor) -> Tensor:
        change, layers = self.change, list(self.stack)
        images = images.flip(-1) if change == "flipped images" else images
        images = (images - self.mean) / self.std if change.startswith("normalized ") and hasattr(self, "mean") else images
        images = 2 * images - 1 if change == "pixels from -1 to 1" else images
        images = images / 255 if change == "large pixels" and images.max() > 20 else images
        images = images * 2 if change == "batch of two" and len(images) != 2 else images
        images = images * 2 if change == "no gradients" and not torch.is_grad_enabled() else images
        x = self.stem(images)
        x = (x.transpose(2, 3) if change == "columns of patches" else x).flatten(2).transpose(1, 2)
        x = x.relu() if change == "activation of patches" else x
        x = (
            torch.cat([x, self.start.expand(len(x), -1, -1)], 1)
            if change == "class token last"
            else (torch.cat([self.start.expand(len(x), -1, -1), x], 1))
        )
        x = x.flip(1) if change == "flipped tokens" else x
        x = x + (0.5 * self.where if change == "factor of positions" else self.where)
        x = F.dropout(x, 0.1) if change == "dropout" else x
        layers = layers[::-1] if change == "reversed blocks" else layers
        for n, layer in enumerate(layers):
            x = self.run(layer, x, n)
        x = self.batch_norm(x.transpose(1, 2)).transpose(1, 2) if change == "statistics" else x
        if change == "shared twice":
            x = self.run(layers[-1], x, len(layers))
        pooled = self.last(x)[:, -1 if change == "class token last" else 0]
        logits = self.out(F.normalize(pooled, dim=-1) if change == "normalized feature" else pooled)
        logits = logits * self.gate if change == "gate" else logits
        logits = 30 * (logits / 30).tanh() if change == "cap of logits" else logits
        logits = logits.detach() if change == "detached" else logits
        return logits / 1.01 if change == "temperature of logits" else logits

    def run(self, layer: nn.Module, x: Tensor, n: int) -> Tensor:
        change, (b, t, c) = self.change, x.shape
        x = layer.norm_b(x) if change == "residual of the norm" else x
        q, k, v = (
            layer.mix(x if change == "residual of the norm" else layer.norm_b(x))
            .reshape(b, t, 3, HEADS, c // HEADS)
            .permute(2, 0, 3, 1, 4)
        )
        scale = (c // HEADS) ** -0.5 / (1.01 if change == "temperature" else 1)
        scores = q @ k.transpose(-2, -1) * scale
        if change == "causal":
            scores = scores.masked_fill(torch.ones(t, t).triu(1).bool(), -torch.inf)
        if change == "windows":
            scores = scores + self.relative
        weights = scores.softmax(-1)
        weights = weights / weights.norm(dim=-1, keepdim=True) if change == "normalized weights" else weights
        y = layer.mix_out((weights @ v).transpose(1, 2).reshape(b, t, c))
        x = (0.999 * x if change == "scaled residual" else x) + y
        kind = "tanh" if change == "tanh" or (change == "tanh in one block" and n == 1) else "none"
        x = x.clamp(-65504, 65504) if change == "range of float16" else x
        hidden = layer.up(layer.norm_a(x))
        y = layer.down(F.relu6(hidden) if change == "relu6" else F.gelu(hidden, approximate=kind))
        return x + (y.relu() if change == "activation after the MLP" else y)


class Loading(Renamed):
    """`Renamed` with code that changes weights when the class saves them, loads them, or both."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.change, self.factor = change, 1.0
        if change == "hooks":
            self.stack[1].mix.register_load_state_dict_pre_hook(self._halve)
            self.stack[1].mix.register_state_dict_post_hook(self._double)
        if change == "load hook":
            self.stack[1].mix.register_load_state_dict_pre_hook(self._halve)
        if change == "renamed keys":
            self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _halve(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"] / 2

    @staticmethod
    def _double(module: nn.Module, state: Any, prefix: str, _: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2

    @staticmethod
    def _rename(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        for key in [key for key in state if key.startswith("old_")]:
            state[key.removeprefix("old_")] = state.pop(key)

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        state = super().state_dict(*arguments, **options)
        if self.change == "frozen start":
            del state["start"]
        return state

    def load_state_dict(self, state_dict: Any, *arguments: Any, **options: Any) -> Any:
        if self.change == "in place":
            state_dict["where"] *= 2
        if self.change == "factor":
            self.factor = 2.0
        if self.change == "raises":
            raise KeyError("version")
        return super().load_state_dict(state_dict, *arguments, **options)

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) * self.factor


class NeedsLabels(Renamed):
    def forward(self, images: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(images) + labels


class TwoOutputs(Renamed):
    def forward(self, images: Tensor) -> Any:
        logits = super().forward(images)
        return logits, logits * 2


class SingleTyped(Renamed):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images).float()


class Tied(Renamed):
    def __init__(self) -> None:
        super().__init__()
        self.stack[1].up.weight = self.stack[0].up.weight


class Convolutional(nn.Module):
    """No ViT at all."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.ReLU())
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.body(x).mean((2, 3)))


def raises(message: str) -> nn.Module:
    """Raise an error, as a factory of a user may."""
    raise KeyError(message)


NUMBER = 3
