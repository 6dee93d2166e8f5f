"""PyTorch classes with rotary positions: as in DINOv3, EVA-02, RoPE-ViT and a model with angles that count from 1."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGE, PATCH, WIDTH, HEADS, HIDDEN, CLASSES = (32, 48), 8, 64, 4, 96, 7
ROWS, COLUMNS, DIM = IMAGE[0] // PATCH, IMAGE[1] // PATCH, WIDTH // HEADS


class CenteredRope(nn.Module):
    """DINOv3: coordinates of patch centers in [-1, 1], periods in a buffer, rotation of halves."""

    def __init__(self, base: float = 100.0) -> None:
        super().__init__()
        self.base = base
        self.register_buffer("periods", base ** (2 * torch.arange(DIM // 4) / (DIM // 2)))

    def forward(self, h: int, w: int) -> tuple[Tensor, Tensor]:
        like = {"dtype": self.periods.dtype}
        y, x = (torch.arange(0.5, n, **like) / n for n in (h, w))
        coords = 2.0 * torch.stack(torch.meshgrid(y, x, indexing="ij"), dim=-1).flatten(0, 1) - 1.0
        angles = 2 * torch.pi * coords[:, :, None] / self.periods[None, None, :]
        angles = angles.flatten(1, 2).tile(2)
        return angles.sin(), angles.cos()


def rope_halves(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-x2, x1], dim=-1) * sin


class DinoStyle(nn.Module):
    """A class token and registers, which do not rotate; layer scale; fused queries, keys and values."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=1e-5), nn.LayerNorm(WIDTH, eps=1e-5)
            self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.ls1, self.ls2 = nn.Parameter(torch.full((WIDTH,), 0.1)), nn.Parameter(torch.full((WIDTH,), 0.1))
            self.fc1, self.fc2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

        def attend(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
            b, n, _ = x.shape
            q, k, v = (t.transpose(1, 2) for t in self.qkv(x).reshape(b, n, 3, HEADS, DIM).unbind(2))
            prefix = n - len(rope[0])
            q, k = (torch.cat([t[:, :, :prefix], rope_halves(t[:, :, prefix:], *rope)], dim=2) for t in (q, k))
            return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, WIDTH))

        def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
            x = x + self.ls1 * self.attend(self.norm1(x), rope)
            return x + self.ls2 * self.fc2(F.gelu(self.fc1(self.norm2(x))))

    def __init__(self, img_size: tuple[int, int] = IMAGE, num_heads: int = HEADS, class_token: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.patch_embed = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        if class_token:
            self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH))
            self.storage_tokens = nn.Parameter(torch.randn(1, 4, WIDTH))
        self.rope_embed = CenteredRope()
        self.blocks = nn.ModuleList([self.Block() for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(WIDTH, eps=1e-5), nn.Linear(WIDTH, CLASSES)
        self.class_token = class_token

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        h, w = x.shape[-2:]
        x = x.flatten(2).transpose(1, 2)
        if self.class_token:
            x = torch.cat([t.expand(len(x), -1, -1) for t in (self.cls_token, self.storage_tokens)] + [x], dim=1)
        rope = self.rope_embed(h, w)
        for block in self.blocks:
            x = block(x, rope)
        x = self.norm(x)
        return self.head(x[:, 0] if self.class_token else x.mean(dim=1))


def rotate_pairs(x: Tensor) -> Tensor:
    x = x.reshape(*x.shape[:-1], -1, 2)
    return torch.stack((-x[..., 1], x[..., 0]), dim=-1).flatten(-2)


def rotate_halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class EvaStyle(nn.Module):
    """Separate projections, of which that of keys has no bias; tables in buffers of the model; learned positions too.

    pairs: the entries of a head that are rotated together: "neighbours", "halves" (n and n + DIM / 2), or "reordered":
        neighbours, which are brought into halves before.
    """

    class Block(nn.Module):
        def __init__(self, pairs: str) -> None:
            super().__init__()
            self.rotate, self.pairs = rotate_pairs if pairs == "neighbours" else rotate_halves, pairs
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6), nn.LayerNorm(WIDTH, eps=1e-6)
            self.q_proj, self.v_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.k_proj = nn.Linear(WIDTH, WIDTH, bias=False)
            self.proj = nn.Linear(WIDTH, WIDTH)
            self.w1, self.w2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
            self.w3 = nn.Linear(HIDDEN, WIDTH)

        def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
            b, n, _ = x.shape
            y = self.norm1(x)
            q, k, v = (f(y).view(b, n, HEADS, DIM).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
            if self.pairs == "reordered":
                q, k = (torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1) for x in (q, k))
            q = torch.cat((q[:, :, :1], q[:, :, 1:] * cos + self.rotate(q[:, :, 1:]) * sin), dim=-2)
            k = torch.cat((k[:, :, :1], k[:, :, 1:] * cos + self.rotate(k[:, :, 1:]) * sin), dim=-2)
            attn = (q * DIM**-0.5 @ k.transpose(-2, -1)).softmax(dim=-1)
            x = x + self.proj((attn @ v).transpose(1, 2).reshape(b, n, -1))
            y = self.norm2(x)
            return x + self.w3(F.silu(self.w1(y)) * self.w2(y))

    def __init__(
        self, img_size: tuple[int, int] = IMAGE, num_heads: int = HEADS, pt_seq_len: int = 16, pairs: str = "neighbours"
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        freqs = 1.0 / 10000 ** (torch.arange(0, DIM // 2, 2)[: DIM // 4] / (DIM // 2))
        t_y, t_x = (torch.arange(n) / n * pt_seq_len for n in (ROWS, COLUMNS))
        f_y, f_x = (torch.einsum("i,j->ij", t, freqs).repeat_interleave(2, dim=-1) for t in (t_y, t_x))
        grid = torch.cat(torch.broadcast_tensors(f_y[:, None, :], f_x[None, :, :]), dim=-1).view(-1, DIM)
        grid = grid[:, ::2].repeat(1, 2) if pairs != "neighbours" else grid
        self.register_buffer("freqs_cos", grid.cos())
        self.register_buffer("freqs_sin", grid.sin())
        self.patch_embed = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.randn(1, ROWS * COLUMNS + 1, WIDTH))
        self.blocks = nn.ModuleList([self.Block(pairs) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(WIDTH, eps=1e-6), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), dim=1) + self.pos_embed
        for block in self.blocks:
            x = block(x, self.freqs_cos, self.freqs_sin)
        return self.head(self.norm(x)[:, 0])


class ComplexStyle(nn.Module):
    """RoPE-ViT: complex numbers, columns before rows, queries and keys multiplied by them; nothing else for positions."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6), nn.LayerNorm(WIDTH, eps=1e-6)
            self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
            self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))

        def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
            b, n, c = x.shape
            q, k, v = self.qkv(self.norm1(x)).reshape(b, n, HEADS, 3, DIM).permute(3, 0, 2, 1, 4)
            q, k = (
                torch.view_as_real(torch.view_as_complex(t.reshape(b, HEADS, n, -1, 2)) * freqs_cis).flatten(3)
                for t in (q, k)
            )
            attn = (q * DIM**-0.5) @ k.transpose(-2, -1)
            x = x + self.proj((attn.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, c))
            return x + self.mlp(self.norm2(x))

    def __init__(self, img_size: tuple[int, int] = IMAGE, num_heads: int = HEADS, theta: float = 100.0) -> None:
        super().__init__()
        self.theta, self.num_heads = theta, num_heads
        self.patch_embed = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.blocks = nn.ModuleList([self.Block() for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(WIDTH, eps=1e-6), nn.Linear(WIDTH, CLASSES)

    def axial_cis(self, like: Tensor) -> Tensor:
        freqs = 1.0 / self.theta ** (torch.arange(0, DIM, 4, dtype=like.dtype)[: DIM // 4] / DIM)
        t = torch.arange(ROWS * COLUMNS, dtype=like.dtype)
        t_x, t_y = t % COLUMNS, torch.div(t, COLUMNS, rounding_mode="floor")
        parts = [torch.outer(each, freqs) for each in (t_x, t_y)]
        return torch.cat([torch.polar(torch.ones_like(each), each) for each in parts], dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        freqs = self.axial_cis(x)
        for block in self.blocks:
            x = block(x, freqs)
        return self.head(self.norm(x.mean(1)))


class FromOne(nn.Module):
    """Columns and rows that count from 1, tables in buffers that are not stored, post-norm blocks without a class token."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.to_qkv, self.to_out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
            self.net = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Dropout(0.1), nn.Linear(HIDDEN, WIDTH))
            d = DIM // 2
            theta = (10000.0 ** (-2 * torch.arange(1, d // 2 + 1) / d)).repeat_interleave(2)
            y, x = torch.meshgrid(torch.arange(1, ROWS + 1), torch.arange(1, COLUMNS + 1), indexing="ij")
            angle = torch.cat([x.reshape(-1, 1) * theta, y.reshape(-1, 1) * theta], dim=1)
            self.register_buffer("cos", angle.cos(), persistent=False)
            self.register_buffer("sin", angle.sin(), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for t in self.to_qkv(x).chunk(3, dim=-1))
            q, k = (t * self.cos + rotate_pairs(t) * self.sin for t in (q, k))
            y = self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            x = self.first(x + y)
            return self.second(x + self.net(x))

    def __init__(self, image_size: tuple[int, int] = IMAGE, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.layers = nn.Sequential(*(self.Block() for _ in range(2)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        tokens = self.layers(self.embed(x).flatten(2).mT)
        return {"tokens": tokens, "logits": self.head(tokens.mean(1))}


class OneDimensional(ComplexStyle):
    """An impostor: the angles count the patches in one sequence, as in language models."""

    def axial_cis(self, like: Tensor) -> Tensor:
        freqs = 1.0 / self.theta ** (torch.arange(0, DIM, 2, dtype=like.dtype) / DIM)
        angles = torch.outer(torch.arange(ROWS * COLUMNS, dtype=like.dtype), freqs)
        return torch.polar(torch.ones_like(angles), angles)
