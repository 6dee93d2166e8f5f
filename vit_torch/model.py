"""The model of the PyTorch twin.  It corresponds line by line to `vit_jax/model.py`.

They differ where the frameworks do: images here are (B, C, H, W), the blocks are a list of modules, and dropout is enabled
by `train()`.

Shapes: B images, T tokens (prefix and patches), H heads of dimension D.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_spec import InputError, ViTConfig, position_table, relative_tables, resampling_matrices, rotary_tables
from vit_spec.noise import Site
from vit_torch.attention import apply_rotary, attention, mix_rotary
from vit_torch.execution import Execution
from vit_torch.initialisation import initialise
from vit_torch.layers import (
    LayerScale,
    Linear,
    Norm,
    PatchProjection,
    ViTModule,
    activation,
    at_least_float32,
    check_images,
    drop_path,
    dropout,
    image_size,
    run_block,
    sample_kept_tokens,
)
from vit_torch.noise import Key, Noise, make_noise


class AttentionTables(NamedTuple):
    """Values that the attention of all blocks shares, each of them optional.

    Attributes:
        rotary: cosines and sines of rotary embeddings; columns and rows for "mixed", whose blocks differ in frequencies.
        bias: a bias of the scores, (H, T, T).
    """

    rotary: tuple[Tensor, ...] | None
    bias: Tensor | None


class PatchEmbed(ViTModule):
    """The patch embedding, from images to patch tokens: (B, C, H, W) -> (B, rows * columns, width)."""

    def __init__(self, config: ViTConfig, execution: Execution) -> None:
        super().__init__(config, execution)
        self.proj = PatchProjection(config, execution, config.tokens.patch_bias)
        self.norm = Norm(config, (config.width,)) if config.norms.after_patches else None

    def forward(self, images: Tensor) -> Tensor:
        (height, width), (ph, pw) = image_size(images), self.config.patch_size
        rows, columns = self.config.grid_of(height, width)
        padding = (0, columns * pw - width, 0, rows * ph - height)  # crops if negative
        images = F.pad(images, padding)
        x = self.proj(images)
        return self.norm(x) if self.norm is not None else x


class RelativeBias(ViTModule):
    """A bias of the attention scores for each offset between patches: tokens (B, T, width) -> (H, T, T)."""

    def __init__(self, config: ViTConfig, execution: Execution) -> None:
        super().__init__(config, execution)
        heads, hidden = config.num_heads, config.positions.relative_dim
        self.table = nn.Parameter(torch.empty(config.num_offsets, heads)) if hidden is None else None
        self.fc1 = Linear((2,), (hidden,)) if hidden is not None else None
        self.fc2 = Linear((hidden,), (heads,)) if hidden is not None else None

    def forward(self, x: Tensor) -> Tensor:
        offsets, index = self.constants(relative_tables, self.config.grid, x)  # (offsets, 2), (T, T)
        table: Any = self.table  # (offsets, H)
        if self.fc1 is not None and self.fc2 is not None:
            table = self.fc2(F.relu(self.fc1(offsets)))  # (offsets, H)
            table = F.pad(table, (0, 0, 0, self.config.num_offsets - len(table)))  # no bias for prefix tokens
        bias = table[index]  # (T, T, H)
        return bias.permute(2, 0, 1).to(x.dtype)


class Attention(ViTModule):
    """Multi-head self-attention: (B, T, width) -> (B, T, width)."""

    def __init__(self, config: ViTConfig, execution: Execution) -> None:
        super().__init__(config, execution)
        options = config.attention
        width, heads, dim = config.width, config.num_heads, config.head_dim
        self.qkv = Linear((width,), (3, heads, dim), options.qkv_bias == "qkv")
        self.q_bias = nn.Parameter(torch.empty(heads * dim)) if options.qkv_bias == "qv" else None
        self.v_bias = nn.Parameter(torch.empty(heads * dim)) if options.qkv_bias == "qv" else None
        self.q_norm = Norm(config, (dim,)) if options.qk_norm else None
        self.k_norm = Norm(config, (dim,)) if options.qk_norm else None
        mixed = config.positions.rotary == "mixed"
        self.freqs = nn.Parameter(torch.empty(2, heads, dim // 2)) if mixed else None
        own_bias = config.positions.relative != "none" and not config.positions.relative_shared
        self.rel_pos = RelativeBias(config, execution) if own_bias else None
        self.norm = Norm(config, (heads, dim)) if options.out_norm else None
        self.proj = Linear((heads, dim), (width,), options.proj_bias) if options.proj else None

    def forward(self, x: Tensor, tables: AttentionTables, noise: Noise | None = None) -> Tensor:
        config = self.config
        qkv = self.qkv(x)  # (B, T, 3, H, D)
        if self.q_bias is not None and self.v_bias is not None:
            bias = torch.stack([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])
            qkv = qkv + bias.to(x.dtype).view(qkv.shape[2:])
        q, k, v = qkv.unbind(2)  # (B, T, H, D)
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        if tables.rotary is not None:
            rotary = mix_rotary(tables.rotary, self.freqs) if self.freqs is not None else tables.rotary
            q = apply_rotary(q, rotary, config.positions.rotary)
            k = apply_rotary(k, rotary, config.positions.rotary)
        score_bias = self.rel_pos(x) if self.rel_pos is not None else tables.bias  # (H, T, T)
        q = self.intermediate("q", q)
        k = self.intermediate("k", k)
        v = self.intermediate("v", v)
        x = attention(self, q, k, v, config.scale, config.regularisation.attn_drop, noise, score_bias)  # (B, T, H, D)
        x = self.intermediate("heads", x)
        x = self.norm(x) if self.norm is not None else x
        x = self.proj(x) if self.proj is not None else x.flatten(2)
        return x + v.flatten(2) if config.attention.value_skip else x


class Mlp(ViTModule):
    """Two linear layers, applied to each token: (..., width) -> (..., width)."""

    def __init__(self, config: ViTConfig, execution: Execution) -> None:
        super().__init__(config, execution)
        hidden = (2, config.mlp_dim) if config.mlp.is_gated else (config.mlp_dim,)
        self.fc1 = Linear((config.width,), hidden, config.mlp.bias)
        self.norm = Norm(config, (config.mlp_dim,)) if config.mlp.norm else None
        self.fc2 = Linear((config.mlp_dim,), (config.width,), config.mlp.bias)

    def forward(self, x: Tensor, noise: Noise | None = None) -> Tensor:
        config, rates = self.config, self.config.regularisation
        x = self.fc1(x)  # (..., mlp_dim), or (..., 2, mlp_dim) when gated
        x = activation(x, config.mlp.activation)  # (..., mlp_dim)
        x = self.intermediate("activation", x)
        x = dropout(self, x, rates.mlp_drop, noise, Site.HIDDEN)
        x = self.norm(x) if self.norm is not None else x
        x = self.fc2(x)
        return dropout(self, x, rates.mlp_drop, noise, Site.OUTPUT)


class Block(ViTModule):
    """Attention and MLP with norms and residual connections, in the order of `config.norms`: (B, T, width) -> the same."""

    def __init__(self, config: ViTConfig, execution: Execution) -> None:
        super().__init__(config, execution)
        norms, width = config.norms, (config.width,)
        self.norm1 = Norm(config, width)
        self.attn = Attention(config, execution)
        self.ls1 = LayerScale(config) if norms.layer_scale is not None else None
        self.norm2 = Norm(config, width) if norms.has_second else None
        self.mlp = Mlp(config, execution)
        self.ls2 = LayerScale(config) if norms.has_second_scale else None

    def forward(self, x: Tensor, rate: Tensor, tables: AttentionTables, noise: Noise | None = None) -> Tensor:
        order = self.config.norms.order
        norm2 = self.norm2 if self.norm2 is not None else self.norm1
        if order == "parallel":
            y = self.norm1(x)
            y = self.attn(y, tables, noise) + self.mlp(y, noise)
            return self.add(x, y, self.ls1, rate, noise, Site.ATTENTION_PATH)
        y = self.attn(self.norm1(x) if order == "pre" else x, tables, noise)
        y = self.norm1(y) if order == "res_post" else y
        x = self.intermediate("sum", self.add(x, y, self.ls1, rate, noise, Site.ATTENTION_PATH))
        x = self.norm1(x) if order == "post" else x
        y = self.mlp(norm2(x) if order == "pre" else x, noise)
        y = norm2(y) if order == "res_post" else y
        x = self.add(x, y, self.ls2, rate, noise, Site.MLP_PATH)
        x = norm2(x) if order == "post" else x
        return x

    def add(self, x: Tensor, y: Tensor, scale: LayerScale | None, rate: Tensor, noise: Noise | None, site: Site) -> Tensor:
        """Return x plus an output y of attention or the MLP, both (B, T, width).

        Layer scale and stochastic depth apply to y.
        """
        y = scale(y) if scale is not None else y
        y = drop_path(self, y, rate, noise, site) if self.config.regularisation.drop_path else y
        return x + y


class AttentionPool(ViTModule):
    """Attention pooling of the patch tokens with a learned query (MAP): (B, S, width) -> (B, width)."""

    def __init__(self, config: ViTConfig, execution: Execution) -> None:
        super().__init__(config, execution)
        width, heads, dim = config.width, config.pool_heads, config.pool_head_dim
        self.latent = nn.Parameter(torch.empty(1, 1, width))
        self.q = Linear((width,), (heads, dim))
        self.kv = Linear((width,), (2, heads, dim))
        self.proj = Linear((heads, dim), (width,))
        self.norm = Norm(config, (width,))
        self.mlp = Mlp(config, execution)

    def forward(self, x: Tensor, noise: Noise | None = None) -> Tensor:
        config = self.config
        latent = self.latent.to(x.dtype).expand(x.shape[0], 1, x.shape[2])
        q = self.q(latent)  # (B, 1, H, D)
        k, v = self.kv(x).unbind(2)  # (B, S, H, D)
        x = attention(self, q, k, v, config.pool_scale, config.regularisation.attn_drop, noise)  # (B, 1, H, D)
        x = self.intermediate("heads", x)
        x = self.proj(x)  # (B, 1, width)
        x = x + self.mlp(self.norm(x), noise)
        return x[:, 0]


class ViT(ViTModule):
    """A Vision Transformer: images (B, C, H, W) -> logits (B, num_classes), or the features of `config.head`.

    Images are floating-point, normalized by `config.pixels` (see `normalize`), of any size that `config.grid_of` accepts.
    Logits have the dtype of the activations.  `train()` enables the dropout of `config.regularisation`, with the random
    numbers of PyTorch's generator, or with those that `vit_spec.noise` defines for a `Key`, as in `vit_jax`.
    `both_heads=True` returns the logits of both heads of a distilled model, (B, 2, num_classes), instead of their mean.

    Raises:
        vit_spec.InputError: the images have a wrong shape, number of channels, size or dtype; or `both_heads` is given for
            a model with one head.
    """

    def __init__(self, config: ViTConfig, execution: Execution | None = None) -> None:
        execution = execution or Execution()
        super().__init__(config, execution)
        width, tokens, norms, labels = config.width, config.tokens, config.norms, config.num_classes
        self.patch_embed = PatchEmbed(config, execution)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width)) if tokens.class_token else None
        self.dist_token = nn.Parameter(torch.empty(1, 1, width)) if tokens.distillation else None
        self.reg_token = nn.Parameter(torch.empty(1, tokens.registers, width)) if tokens.registers else None
        learned, factorized, sizes = config.positions.kind == "learned", config.positions.factorized, config.sizes
        self.pos_embed = nn.Parameter(torch.empty(1, sizes["token"], width)) if learned and not factorized else None
        self.pos_embed_y = nn.Parameter(torch.empty(1, sizes["row"], width)) if factorized else None
        self.pos_embed_x = nn.Parameter(torch.empty(1, sizes["column"], width)) if factorized else None
        shared = config.positions.relative_shared
        self.rel_pos = RelativeBias(config, execution) if shared else None
        self.norm_pre = Norm(config, (width,)) if norms.before_blocks else None
        self.blocks = nn.ModuleList(Block(config, execution) for _ in range(config.depth))
        self.norm = Norm(config, (width,)) if norms.after_blocks else None
        pooled, feature = config.sizes["pooled"], config.sizes["feature"]
        self.attn_pool = AttentionPool(config, execution) if config.head.pool == "attention" else None
        self.fc_norm = Norm(config, (pooled,)) if norms.after_pool else None
        self.pre_logits = Linear((pooled,), (feature,)) if config.head.hidden else None
        self.head = Linear((feature,), (labels,), config.head.bias) if labels else None
        second = labels and tokens.distillation
        self.head_dist = Linear((feature,), (labels,), config.head.bias) if second else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set every parameter to new initial values, as after `to_empty` of a model that was built on the meta device."""
        initialise(self)

    def forward(self, images: Tensor, key: Key | None = None, both_heads: bool = False) -> Tensor:
        check_images(images, self.config)
        before, inside, after = self.noise(key)
        x, tables = self.embed(images, before)  # (B, T, width)
        x = self.encode(x, tables, inside)  # (B, T, width)
        return self.classify(x, after, both_heads)  # (B, num_classes)

    def noise(self, key: Key | None) -> tuple[Noise | None, Sequence[Noise | None], Noise | None]:
        """Return the random numbers before the blocks, in each block and after them; None for PyTorch's generator."""
        if key is None or not self.training or not any(vars(self.config.regularisation).values()):
            return None, [None] * self.config.depth, None
        return make_noise(self.config, key)

    def embed(self, images: Tensor, noise: Noise | None = None) -> tuple[Tensor, AttentionTables]:
        """Return the input tokens of the blocks, (B, T, width), and the tables that all blocks share.

        Args:
            images: (B, C, H, W), as for a call of the model.
            noise: the random numbers before the blocks.
        """
        config, rates = self.config, self.config.regularisation
        grid = config.grid_of(*image_size(images))
        x = self.patch_embed(images)  # (B, rows * columns, width)
        learned = [token for token in (self.cls_token, self.dist_token, self.reg_token) if token is not None]
        prefix = [token.expand(x.shape[0], *token.shape[1:]) for token in learned]
        x = torch.cat([*(token.to(x.dtype) for token in prefix), x], dim=1)  # (B, T, width)
        x = self.intermediate("tokens", x)
        x = x + self.intermediate("positions", self.positions(x, grid)) if config.positions.kind != "none" else x
        x = dropout(self, x, rates.pos_drop, noise, Site.POSITIONS)
        rotary = None
        if config.positions.rotary != "none":
            first, second = self.constants(rotary_tables, grid, x)  # (1, T, 1, D) each, or (1, T, 1, 1)
            names = ("columns", "rows") if config.positions.rotary == "mixed" else ("cosines", "sines")
            rotary = self.intermediate(names[0], first), self.intermediate(names[1], second)
        if rates.patch_drop and self.training:
            kept = sample_kept_tokens(x, config.num_prefix, rates.patch_drop, noise)  # (B, T kept)
            x = x.take_along_dim(kept[..., None], dim=1)
            rotary = (rotary[0][0, kept], rotary[1][0, kept]) if rotary is not None else None
        bias = self.rel_pos(x) if self.rel_pos is not None else None  # (H, T, T)
        x = self.norm_pre(x) if self.norm_pre is not None else x
        x = self.intermediate("embed", x)
        return x, AttentionTables(rotary, bias)

    def positions(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return the position table of tokens, (1, T, width); prefix tokens without a row get zeros.

        Args:
            x: the tokens, (B, T, width), whose dtype the table gets.
            grid: the rows and columns of patches.
        """
        config, covered = self.config, self.config.num_covered
        if self.pos_embed is not None:
            table = self.pos_embed.to(at_least_float32(x))
        elif self.pos_embed_y is not None and self.pos_embed_x is not None:
            rows, columns = self.pos_embed_y.to(at_least_float32(x)), self.pos_embed_x.to(at_least_float32(x))
            table = (rows[:, :, None] + columns[:, None]).flatten(1, 2)
        else:
            table = self.constants(position_table, grid, x)[0][None]
        head, body = table[:, :covered], table[:, covered:]  # (1, covered, width), (1, rows * columns, width)
        if config.positions.kind == "learned" and grid != config.grid:
            height, width = self.constants(resampling_matrices, grid, body)
            body = body.view(*config.grid, config.width)
            body = torch.einsum("yh,hwd->ywd", height, body)
            body = torch.einsum("xw,ywd->yxd", width, body)
            body = body.reshape(1, -1, config.width)
        gap = torch.zeros(1, config.num_prefix - covered, config.width, dtype=table.dtype, device=table.device)
        return torch.cat([head, gap, body], dim=1).to(x.dtype)

    def encode(self, x: Tensor, tables: AttentionTables, noise: Sequence[Noise | None]) -> Tensor:
        """Apply the blocks and the final norm: (B, T, width) -> (B, T, width)."""
        # Rates are a tensor.  As numbers, torch.compile would compile a block for each rate, and could recompute a block as
        # another graph.  linspace makes the tensor on the device, where a copy of a list would have to wait.
        last, dtype = self.config.regularisation.drop_path, at_least_float32(x)
        rates = torch.linspace(0, last, self.config.depth, dtype=dtype, device=x.device)
        for block, rate, own in zip(self.blocks, rates, noise, strict=True):
            x = run_block(block, x, rate, tables, own)
        return self.norm(x) if self.norm is not None else x

    def classify(self, x: Tensor, noise: Noise | None = None, both_heads: bool = False) -> Tensor:
        """Return logits, or features if there are no classes: (B, T, width) -> (B, num_classes) or (B, 2, num_classes).

        Raises:
            InputError: `both_heads` is given for a model with one head.
        """
        if both_heads and not self.config.tokens.distillation:
            raise InputError("both_heads is for models with tokens.distillation=True: leave it out")
        logits = self.output(self.pool(x, noise), self.head)
        if self.config.tokens.distillation:
            second = self.output(x[:, 1], self.head_dist)
            logits = self.intermediate("first", logits)
            second = self.intermediate("second", second)
            if both_heads:
                return torch.stack([logits, second], dim=1)
            logits = (logits + second) / 2
        return logits

    def pool(self, x: Tensor, noise: Noise | None = None) -> Tensor:
        """Pool tokens to one feature per image, (B, T, width) -> (B, pooled), or return all tokens without pooling."""
        kind, start = self.config.head.pool, 0 if self.config.head.pool_prefix else self.config.num_prefix
        patches = x[:, start:]
        if kind == "token":
            x = x[:, 0]
        if kind == "mean":
            x = patches.mean(1)
        if kind == "token_mean":
            x = torch.cat([x[:, 0], patches.mean(1)], dim=-1)
        if self.attn_pool is not None:
            x = self.attn_pool(patches, noise)
        return self.intermediate("pool", x)

    def output(self, x: Tensor, head: Linear | None) -> Tensor:
        """Apply the norm after pooling, the hidden layer and the head: (..., pooled) -> (..., num_classes).

        Each of them is optional: without classes, the result is the feature, (..., feature).
        """
        x = self.fc_norm(x) if self.fc_norm is not None else x
        x = self.intermediate("hidden", torch.tanh(self.pre_logits(x))) if self.pre_logits is not None else x
        return head(x) if head is not None else x
