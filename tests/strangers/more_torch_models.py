"""More PyTorch classes in the styles of strangers: attention pooling, tokens in other places, other kinds of layers."""

import math
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGE, PATCH, WIDTH, HEADS, HIDDEN, CLASSES = (32, 48), 8, 64, 4, 96, 7
CELLS, DIM = (IMAGE[0] // PATCH) * (IMAGE[1] // PATCH), WIDTH // HEADS


# Attention pooling ------------------------------------------------------------------------------------------------------


class FeedForward(nn.Module):
    def __init__(self, approximate: str = "tanh") -> None:
        super().__init__()
        self.fc1, self.fc2, self.approximate = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), approximate

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate=self.approximate))


class PoolingHead(nn.Module):
    """SigLIP: a learned probe, PyTorch's own attention, and an MLP with a residual connection."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, heads, batch_first=True)
        self.layernorm, self.mlp = nn.LayerNorm(WIDTH, eps=1e-6), FeedForward()

    def forward(self, hidden: Tensor) -> Tensor:
        probe = self.probe.repeat(len(hidden), 1, 1)
        hidden = self.attention(probe, hidden, hidden)[0]
        return (hidden + self.mlp(self.layernorm(hidden)))[:, 0]


class SplitPoolingHead(nn.Module):
    """Separate layers, of which that of values is called and used first."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.seed = heads, nn.Parameter(torch.randn(WIDTH))
        self.to_v, self.to_k, self.to_q, self.to_out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.ln, self.ff = nn.LayerNorm(WIDTH, eps=1e-6), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        v, k = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.to_v, self.to_k))
        q = self.to_q(self.seed).view(self.heads, 1, -1).expand(len(x), -1, -1, -1)
        y = self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(1))
        return y + self.ff(self.ln(y))


class AttentionPooled(nn.Module):
    """No class token; a factory gives its config."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer_norm1, self.layer_norm2 = nn.LayerNorm(WIDTH, eps=1e-6), nn.LayerNorm(WIDTH, eps=1e-6)
            self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
            self.mlp = FeedForward()

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer_norm1(x)
            q, k, v = (f(y).unflatten(-1, (HEADS, DIM)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
            x = x + self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            return x + self.mlp(self.layer_norm2(x))

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.patch_embedding = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.position_embedding = nn.Embedding(CELLS, WIDTH)
        self.register_buffer("position_ids", torch.arange(CELLS)[None], persistent=False)
        self.layers = nn.ModuleList([self.Layer() for _ in range(config.num_hidden_layers)])
        self.post_layernorm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.head = (PoolingHead if config.head == "torch" else SplitPoolingHead)(config.pool_heads)
        self.classifier = nn.Linear(WIDTH, CLASSES) if config.num_labels else nn.Identity()

    def forward(self, pixel_values: Tensor) -> SimpleNamespace:
        x = self.patch_embedding(pixel_values).flatten(2).transpose(1, 2) + self.position_embedding(self.position_ids)
        for layer in self.layers:
            x = layer(x)
        return SimpleNamespace(logits=self.classifier(self.head(self.post_layernorm(x))), hidden_states=None)


def attention_pooled(head: str = "torch", pool_heads: int = HEADS, num_labels: int = CLASSES) -> nn.Module:
    return AttentionPooled(
        SimpleNamespace(
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            image_size=IMAGE,
            head=head,
            pool_heads=pool_heads,
            num_labels=num_labels,
        )
    )


# One model with one change each -----------------------------------------------------------------------------------------


class Projections(nn.Module):
    """Queries, keys and values in one of several styles; (B, T, C) -> 3 x (B, H, T, D)."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.style = style
        if style == "lists":
            self.q, self.k, self.v = (nn.ModuleList(nn.Linear(WIDTH, DIM) for _ in range(HEADS)) for _ in range(3))
        elif style == "parameter lists":
            self.wq, self.wk, self.wv = (
                nn.ParameterList(nn.Parameter(torch.randn(WIDTH, DIM) / 8) for _ in range(HEADS)) for _ in range(3)
            )
        elif style == "einsum":
            self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(HEADS, WIDTH, DIM) / 8) for _ in range(3))
        elif style == "conv1d":
            self.to_qkv = nn.Conv1d(WIDTH, 3 * WIDTH, 1, bias=False)
        elif style in ("head first", "dim head", "values first"):
            self.to_qkv = nn.Linear(WIDTH, 3 * WIDTH)
        elif style == "grouped queries":
            self.to_q, self.to_kv = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
        else:
            self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        style, (b, t, _) = self.style, x.shape
        if style == "lists":
            return (torch.stack([f(x) for f in fs], 1) for fs in (self.q, self.k, self.v))
        if style == "parameter lists":
            return (torch.stack([x @ w for w in ws], 1) for ws in (self.wq, self.wk, self.wv))
        if style == "einsum":
            return (torch.einsum("btc,hcd->bhtd", x, w) for w in (self.wq, self.wk, self.wv))
        if style == "conv1d":
            return self.to_qkv(x.mT).mT.reshape(b, t, 3, HEADS, DIM).permute(2, 0, 3, 1, 4)
        if style == "head first":
            return self.to_qkv(x).reshape(b, t, HEADS, 3, DIM).permute(3, 0, 2, 1, 4)
        if style == "grouped queries":
            kv = self.to_kv(x).reshape(b, t, 2, HEADS // 2, DIM).permute(2, 0, 3, 1, 4).repeat_interleave(2, dim=2)
            return self.to_q(x).reshape(b, t, HEADS, DIM).transpose(1, 2), *kv
        if style == "values first":
            v, q, k = self.to_qkv(x).chunk(3, dim=-1)
            return (each.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for each in (q, k, v))
        if style == "dim head":
            return self.to_qkv(x).reshape(b, t, 3, DIM, HEADS).permute(2, 0, 4, 1, 3)
        return (f(x).reshape(b, t, HEADS, DIM).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v))


class DropPath(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * (torch.rand(len(x), 1, 1) >= self.rate) / (1 - self.rate)


class Changed(nn.Module):
    """A plain model with one change."""

    class Layer(nn.Module):
        def __init__(self, change: str) -> None:
            super().__init__()
            self.change = change
            self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.attn, out = Projections(change), nn.Linear(WIDTH, WIDTH, bias=change != "parallel without bias")
            if change == "grouped queries":  # all layers of attention are in one module, as is usual
                self.attn.out = out
            else:
                self.out = nn.Identity() if change == "relu without projection" else out
            if change == "conv1d":
                self.fc, self.back = nn.Conv1d(WIDTH, HIDDEN, 1), nn.Conv1d(HIDDEN, WIDTH, 1)
            elif change == "value before gate":
                self.fc, self.back = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH)
            else:
                self.fc, self.back = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
            self.drop_path = DropPath(0.1)
            self.ln_3: nn.Module = nn.LayerNorm(WIDTH) if change == "third norm" else nn.Identity()
            if change == "temperature":
                self.temperature = nn.Parameter(torch.tensor(math.log(DIM**-0.5)))
            if change == "temperature of heads":
                self.temperature = nn.Parameter(torch.ones(HEADS, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            if self.change == "mlp first, norms last":
                x = self.ln_2(x + self.back(F.gelu(self.fc(x))))
                return self.ln_1(x + self.attend(x, nn.Identity()))
            if self.change.startswith("parallel"):
                return x + self.drop_path(self.attend(x)) + self.drop_path(self.feed(x))
            branches = (self.attend, self.feed)
            for branch in branches[::-1] if self.change == "mlp first" else branches:
                x = x + self.drop_path(branch(x))
            return x

        def attend(self, x: Tensor, norm: nn.Module | None = None) -> Tensor:
            change, (b, t, c) = self.change, x.shape
            q, k, v = self.attn((norm or self.ln_1)(x))
            if change == "temperature":
                scores = q @ k.mT * self.temperature.exp()
            elif change == "temperature of heads":
                scores = q @ k.mT * self.temperature
            else:
                scores = q @ k.mT / math.sqrt(DIM)
            scores = scores.float() if change == "float32" else scores
            y = (scores.relu() if change == "relu without projection" else scores.softmax(-1)).to(v.dtype) @ v
            y = y.permute(0, 2, 3, 1).reshape(b, t, c) if change == "dim head" else y.transpose(1, 2).reshape(b, t, c)
            y = self.ln_3(self.attn.out(y) if change == "grouped queries" else self.out(y))
            if change == "values beside":
                return y + v.transpose(1, 2).reshape(b, t, c)
            return y / 2 if change == "half of attention" else y.tanh() if change == "tanh of attention" else y

        def feed(self, x: Tensor) -> Tensor:
            y = self.ln_2(x)
            if self.change == "value before gate":
                value, gate = self.fc(y).chunk(2, dim=-1)
                return self.back(value * F.silu(gate))
            return self.back(F.gelu(self.fc(y.mT))).mT if self.change == "conv1d" else self.back(F.gelu(self.fc(y)))

    def __init__(
        self,
        change: str,
        depth: int = 2,
        img_size: tuple[int, int] = IMAGE,
        num_heads: int = HEADS,
        channels: int = 3,
    ) -> None:
        super().__init__()
        self.change = change
        self.num_heads = num_heads
        length = PATCH * PATCH * channels
        if change == "norm of flat patches":
            self.patches = nn.Sequential(nn.LayerNorm(length), nn.Linear(length, WIDTH), nn.LayerNorm(WIDTH))
        elif change == "rearrange":
            from einops.layers.torch import Rearrange

            self.patches = nn.Sequential(
                Rearrange("b c (h p1) (w p2) -> b (h w) (p1 p2 c)", p1=PATCH, p2=PATCH), nn.Linear(length, WIDTH)
            )
        else:
            self.patches = nn.Sequential(nn.Conv2d(3, WIDTH, PATCH, PATCH), nn.Flatten(2))
        self.cls = nn.Parameter(torch.randn(1, 1, WIDTH))
        rows = CELLS if change in ("positions of patches, class token last",) else CELLS + 1
        self.pos = nn.Parameter(torch.randn(1, rows, WIDTH))
        self.layers = nn.ModuleList([self.Layer(change) for _ in range(depth)])
        self.ln = nn.LayerNorm(WIDTH)
        self.fc: nn.Module = nn.Linear(WIDTH, CLASSES)
        if change == "gelu in the head":
            self.fc = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        change, cls = self.change, self.cls.expand(len(x), -1, -1)
        if change == "norm of flat patches":
            b, c, h, w = x.shape
            x = x.reshape(b, c, h // PATCH, PATCH, w // PATCH, PATCH).permute(0, 2, 4, 3, 5, 1).reshape(b, CELLS, -1)
        x = self.patches(x)
        x = x if x.shape[-1] == WIDTH else x.mT
        if change == "positions of patches, class token last":
            x = torch.cat([x + self.pos, cls], 1)
        else:
            x = torch.cat([x, cls] if change == "class token last" else [cls, x], 1) + self.pos
        for layer in self.layers:
            x = layer(x)
        return self.fc(self.ln(x[:, -1 if "last" in change else 0]))


class Registered(Changed):
    """Two registers, after the class token or ahead of it, and the mean of the patches or of all tokens."""

    def __init__(self, registers_first: bool = False, pools_prefix: bool = False) -> None:
        super().__init__("einsum")
        self.registers_first, self.pools_prefix = registers_first, pools_prefix
        self.registers = nn.Parameter(torch.randn(1, 2, WIDTH))
        self.pos = nn.Parameter(torch.randn(1, CELLS + 3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        prefix = [each.expand(len(x), -1, -1) for each in (self.cls, self.registers)]
        x = torch.cat([*(prefix[::-1] if self.registers_first else prefix), self.patches(x).mT], 1) + self.pos
        for layer in self.layers:
            x = layer(x)
        return self.fc(self.ln(x)[:, 0 if self.pools_prefix else 3 :].mean(1))


class Listed(Changed):
    """An output with a list of attention maps, which is empty; positions of longer sequences are left out."""

    def __init__(self) -> None:
        super().__init__("plain", img_size=())

    def forward(self, x: Tensor) -> Any:
        x = self.patches(x).mT
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1)
        x = x + self.pos[:, : x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.fc(self.ln(x[:, 0])), []


class Probabilities(Changed):
    """An output after a softmax, or after its logarithm."""

    def __init__(self, logarithm: bool = False) -> None:
        super().__init__("plain")
        self.logarithm = logarithm

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x.log_softmax(-1) if self.logarithm else x.softmax(-1)


class Mappings(nn.Module):
    """A tutorial: each head has layers of its own, which take a part of the tokens' entries."""

    def __init__(self) -> None:
        super().__init__()
        self.q_mappings, self.k_mappings, self.v_mappings = (
            nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(HEADS)]) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        out = []
        for head, part in enumerate(x.split(DIM, dim=-1)):
            q, k, v = self.q_mappings[head](part), self.k_mappings[head](part), self.v_mappings[head](part)
            out.append(torch.softmax(q @ k.transpose(1, 2) / DIM**0.5, dim=-1) @ v)
        return torch.cat(out, dim=-1)


class Tutorial(nn.Module):
    """The tutorial with these heads."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2, self.mhsa = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Mappings()
            self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            out = x + self.mhsa(self.norm1(x))
            return out + self.mlp(self.norm2(out))

    def __init__(self, chw: tuple[int, int, int] = (3, *IMAGE)) -> None:
        super().__init__()
        self.chw = chw
        self.linear_mapper = nn.Linear(3 * PATCH * PATCH, WIDTH)
        self.class_token = nn.Parameter(torch.rand(1, WIDTH))
        self.pos_embed = nn.Parameter(torch.rand(1, CELLS + 1, WIDTH))
        self.blocks = nn.ModuleList([self.Block() for _ in range(2)])
        self.mlp = nn.Sequential(nn.Linear(WIDTH, CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        patches = F.unfold(images, PATCH, stride=PATCH).mT
        tokens = self.linear_mapper(patches)
        out = torch.cat((self.class_token.expand(len(images), 1, -1), tokens), dim=1) + self.pos_embed
        for block in self.blocks:
            out = block(out)
        return self.mlp(out[:, 0])
