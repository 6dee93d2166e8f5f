"""The model of the JAX twin, in Flax linen.  It corresponds line by line to `vit_torch/model.py`.

They differ where the frameworks do: images here are (B, H, W, C), the blocks are one module that is scanned over the
leading axis of its parameters, and dropout needs `train=True` and a key.

Shapes: B images, T tokens (prefix and patches), H heads of dimension D.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from vit_jax.attention import apply_rotary, attention, mix_rotary
from vit_jax.compilation import residual_tokens
from vit_jax.execution import Execution
from vit_jax.layers import (
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
    sample_kept_tokens,
    scan_blocks,
)
from vit_jax.noise import Noise, make_noise
from vit_spec import InputError, position_table, relative_tables, resampling_matrices, rotary_tables
from vit_spec.noise import Site


class AttentionTables(NamedTuple):
    """Values that the attention of all blocks shares, each of them optional.

    Attributes:
        rotary: cosines and sines of rotary embeddings; columns and rows for "mixed", whose blocks differ in frequencies.
        bias: a bias of the scores, (H, T, T).
    """

    rotary: tuple[Array, ...] | None
    bias: Array | None


class PatchEmbed(ViTModule):
    """The patch embedding, from images to patch tokens: (B, H, W, C) -> (B, rows * columns, width)."""

    def setup(self) -> None:
        config, execution = self.config, self.execution
        self.proj = PatchProjection(config, execution, config.tokens.patch_bias)
        self.norm = Norm(config, execution, (config.width,)) if config.norms.after_patches else None

    def __call__(self, images: Array) -> Array:
        (height, width), (ph, pw) = image_size(images), self.config.patch_size
        rows, columns = self.config.grid_of(height, width)
        padding = ((0, 0, 0), (0, rows * ph - height, 0), (0, columns * pw - width, 0), (0, 0, 0))  # crops if negative
        images = lax.pad(images, jnp.zeros((), jax.typeof(images).dtype), padding)
        x = self.proj(images)
        return self.norm(x) if self.norm is not None else x


class RelativeBias(ViTModule):
    """A bias of the attention scores for each offset between patches: tokens (B, T, width) -> (H, T, T)."""

    def setup(self) -> None:
        config, execution = self.config, self.execution
        heads, hidden = config.num_heads, config.positions.relative_dim
        self.table = self.declare("table", (config.num_offsets, heads)) if hidden is None else None
        self.fc1 = Linear(config, execution, (2,), (hidden,)) if hidden is not None else None
        self.fc2 = Linear(config, execution, (hidden,), (heads,)) if hidden is not None else None

    def __call__(self, x: Array) -> Array:
        offsets, index = self.constants(relative_tables, self.config.grid, x)  # (offsets, 2), (T, T)
        table: Any = self.table  # (offsets, H)
        if self.fc1 is not None and self.fc2 is not None:
            table = self.fc2(jax.nn.relu(self.fc1(offsets)))  # (offsets, H)
            table = jnp.pad(table, ((0, self.config.num_offsets - len(table)), (0, 0)))  # no bias for prefix tokens
        bias = table[index]  # (T, T, H)
        return bias.transpose(2, 0, 1).astype(x.dtype)


class Attention(ViTModule):
    """Multi-head self-attention: (B, T, width) -> (B, T, width)."""

    def setup(self) -> None:
        config, execution = self.config, self.execution
        options = config.attention
        width, heads, dim = config.width, config.num_heads, config.head_dim
        self.qkv = Linear(config, execution, (width,), (3, heads, dim), options.qkv_bias == "qkv")
        self.q_bias = self.declare("q_bias", (heads, dim)) if options.qkv_bias == "qv" else None
        self.v_bias = self.declare("v_bias", (heads, dim)) if options.qkv_bias == "qv" else None
        self.q_norm = Norm(config, execution, (dim,)) if options.qk_norm else None
        self.k_norm = Norm(config, execution, (dim,)) if options.qk_norm else None
        mixed = config.positions.rotary == "mixed"
        self.freqs = self.declare("freqs", (2, heads, dim // 2)) if mixed else None
        own_bias = config.positions.relative != "none" and not config.positions.relative_shared
        self.rel_pos = RelativeBias(config, execution) if own_bias else None
        self.norm = Norm(config, execution, (heads, dim)) if options.out_norm else None
        self.proj = Linear(config, execution, (heads, dim), (width,), options.proj_bias) if options.proj else None

    def __call__(self, x: Array, tables: AttentionTables, noise: Noise | None) -> Array:
        config = self.config
        qkv = self.qkv(x)  # (B, T, 3, H, D)
        if self.q_bias is not None and self.v_bias is not None:
            bias = jnp.stack([self.q_bias, jnp.zeros_like(self.q_bias), self.v_bias])
            qkv = qkv + bias.astype(x.dtype)
        q, k, v = jnp.unstack(qkv, axis=2)  # (B, T, H, D)
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
        x = self.proj(x) if self.proj is not None else x.reshape(*x.shape[:2], -1)
        return x + v.reshape(x.shape) if config.attention.value_skip else x


class Mlp(ViTModule):
    """Two linear layers, applied to each token: (..., width) -> (..., width)."""

    def setup(self) -> None:
        config, execution = self.config, self.execution
        hidden = (2, config.mlp_dim) if config.mlp.is_gated else (config.mlp_dim,)
        self.fc1 = Linear(config, execution, (config.width,), hidden, config.mlp.bias)
        self.norm = Norm(config, execution, (config.mlp_dim,)) if config.mlp.norm else None
        self.fc2 = Linear(config, execution, (config.mlp_dim,), (config.width,), config.mlp.bias)

    def __call__(self, x: Array, noise: Noise | None) -> Array:
        config, rates = self.config, self.config.regularisation
        x = self.fc1(x)  # (..., mlp_dim), or (..., 2, mlp_dim) when gated
        x = activation(x, config.mlp.activation)  # (..., mlp_dim)
        x = self.intermediate("activation", x)
        x = dropout(x, rates.mlp_drop, noise, Site.HIDDEN)
        x = self.norm(x) if self.norm is not None else x
        x = self.fc2(x)
        return dropout(x, rates.mlp_drop, noise, Site.OUTPUT)


class Block(ViTModule):
    """Attention and MLP with norms and residual connections, in the order of `config.norms`: (B, T, width) -> the same."""

    def setup(self) -> None:
        config, execution = self.config, self.execution
        norms, width = config.norms, (config.width,)
        self.norm1 = Norm(config, execution, width)
        self.attn = Attention(config, execution)
        self.ls1 = LayerScale(config, execution) if norms.layer_scale is not None else None
        self.norm2 = Norm(config, execution, width) if norms.has_second else None
        self.mlp = Mlp(config, execution)
        self.ls2 = LayerScale(config, execution) if norms.has_second_scale else None

    def __call__(self, x: Array, noise: Noise | None, tables: AttentionTables) -> tuple[Array, None]:
        order = self.config.norms.order
        norm2 = self.norm2 if self.norm2 is not None else self.norm1
        if order == "parallel":
            y = self.norm1(x)
            y = self.attn(y, tables, noise) + self.mlp(y, noise)
            return self.add(x, y, self.ls1, noise, Site.ATTENTION_PATH), None
        y = self.attn(self.norm1(x) if order == "pre" else x, tables, noise)
        y = self.norm1(y) if order == "res_post" else y
        x = self.intermediate("sum", self.add(x, y, self.ls1, noise, Site.ATTENTION_PATH))
        x = self.norm1(x) if order == "post" else x
        y = self.mlp(norm2(x) if order == "pre" else x, noise)
        y = norm2(y) if order == "res_post" else y
        x = self.add(x, y, self.ls2, noise, Site.MLP_PATH)
        x = norm2(x) if order == "post" else x
        return x, None

    def add(self, x: Array, y: Array, scale: LayerScale | None, noise: Noise | None, site: Site) -> Array:
        """Return x plus an output y of attention or the MLP, both (B, T, width).

        Layer scale and stochastic depth apply to y.
        """
        y = scale(y) if scale is not None else y
        y = drop_path(self, y, noise, site) if self.config.regularisation.drop_path else y
        return residual_tokens(x + y)


class AttentionPool(ViTModule):
    """Attention pooling of the patch tokens with a learned query (MAP): (B, S, width) -> (B, width)."""

    def setup(self) -> None:
        config, execution = self.config, self.execution
        width, heads, dim = config.width, config.pool_heads, config.pool_head_dim
        self.latent = self.declare("latent", (1, 1, width))
        self.q = Linear(config, execution, (width,), (heads, dim))
        self.kv = Linear(config, execution, (width,), (2, heads, dim))
        self.proj = Linear(config, execution, (heads, dim), (width,))
        self.norm = Norm(config, execution, (width,))
        self.mlp = Mlp(config, execution)

    def __call__(self, x: Array, noise: Noise | None) -> Array:
        config = self.config
        latent = jnp.broadcast_to(self.latent.astype(x.dtype), (x.shape[0], 1, x.shape[2]))
        q = self.q(latent)  # (B, 1, H, D)
        k, v = jnp.unstack(self.kv(x), axis=2)  # (B, S, H, D)
        x = attention(self, q, k, v, config.pool_scale, config.regularisation.attn_drop, noise)  # (B, 1, H, D)
        x = self.intermediate("heads", x)
        x = self.proj(x)  # (B, 1, width)
        x = x + self.mlp(self.norm(x), noise)
        return x[:, 0]


class ViT(ViTModule):
    """A Vision Transformer: images (B, H, W, C) -> logits (B, num_classes), or the features of `config.head`.

    Images are floating-point, normalized by `config.pixels` (see `normalize`), of any size that `config.grid_of` accepts.
    Logits have the dtype of the activations.  `train=True` enables the dropout of `config.regularisation`; it needs a key,
    as the argument `key` or as `rngs={"dropout": key}`.  `vit_spec.noise` defines the random numbers that follow from it.
    `both_heads=True` returns the logits of both heads of a distilled model, (B, 2, num_classes), instead of their mean.

    Raises:
        vit_spec.InputError: the images have a wrong shape, number of channels, size or dtype; or `both_heads` is given for
            a model with one head.
    """

    execution: Execution = Execution()

    def setup(self) -> None:
        config, execution = self.config, self.execution
        width, tokens, norms, labels = config.width, config.tokens, config.norms, config.num_classes
        self.patch_embed = PatchEmbed(config, execution)
        self.cls_token = self.declare("cls_token", (1, 1, width)) if tokens.class_token else None
        self.dist_token = self.declare("dist_token", (1, 1, width)) if tokens.distillation else None
        self.reg_token = self.declare("reg_token", (1, tokens.registers, width)) if tokens.registers else None
        learned, factorized, sizes = config.positions.kind == "learned", config.positions.factorized, config.sizes
        self.pos_embed = self.declare("pos_embed", (1, sizes["token"], width)) if learned and not factorized else None
        self.pos_embed_y = self.declare("pos_embed_y", (1, sizes["row"], width)) if factorized else None
        self.pos_embed_x = self.declare("pos_embed_x", (1, sizes["column"], width)) if factorized else None
        shared = config.positions.relative_shared
        self.rel_pos = RelativeBias(config, execution) if shared else None
        self.norm_pre = Norm(config, execution, (width,)) if norms.before_blocks else None
        self.blocks = scan_blocks(Block, config, execution, self.has_variable("params", "blocks"))
        self.norm = Norm(config, execution, (width,)) if norms.after_blocks else None
        pooled, feature = config.sizes["pooled"], config.sizes["feature"]
        self.attn_pool = AttentionPool(config, execution) if config.head.pool == "attention" else None
        self.fc_norm = Norm(config, execution, (pooled,)) if norms.after_pool else None
        self.pre_logits = Linear(config, execution, (pooled,), (feature,)) if config.head.hidden else None
        self.head = Linear(config, execution, (feature,), (labels,), config.head.bias) if labels else None
        second = labels and tokens.distillation
        self.head_dist = Linear(config, execution, (feature,), (labels,), config.head.bias) if second else None

    def __call__(self, images: Array, train: bool = False, key: Array | None = None, both_heads: bool = False) -> Array:
        check_images(images, self.config)
        before, inside, after = self.noise(train, key)
        x, tables = self.embed(images, before)  # (B, T, width)
        x = self.encode(x, tables, inside)  # (B, T, width)
        return self.classify(x, after, both_heads)  # (B, num_classes)

    def noise(self, train: bool, key: Array | None) -> tuple[Noise | None, ...]:
        """Return the random numbers before the blocks, in the blocks and after them; None without dropout.

        Args:
            train: whether dropout is enabled.
            key: a key of `jax.random`; None: that of `rngs={"dropout": key}`.
        """
        if not train or not any(vars(self.config.regularisation).values()):
            return None, None, None
        return make_noise(self.config, self.make_rng("dropout") if key is None else key)

    def embed(self, images: Array, noise: Noise | None) -> tuple[Array, AttentionTables]:
        """Return the input tokens of the blocks, (B, T, width), and the tables that all blocks share.

        Args:
            images: (B, H, W, C), as for a call of the model.
            noise: the random numbers before the blocks.
        """
        config, rates = self.config, self.config.regularisation
        grid = config.grid_of(*image_size(images))
        x = self.patch_embed(images)  # (B, rows * columns, width)
        learned = [token for token in (self.cls_token, self.dist_token, self.reg_token) if token is not None]
        prefix = [jnp.broadcast_to(token, (x.shape[0], *token.shape[1:])) for token in learned]
        x = jnp.concatenate([*(token.astype(x.dtype) for token in prefix), x], axis=1)  # (B, T, width)
        x = self.intermediate("tokens", x)
        x = x + self.intermediate("positions", self.positions(x, grid)) if config.positions.kind != "none" else x
        x = dropout(x, rates.pos_drop, noise, Site.POSITIONS)
        rotary = None
        if config.positions.rotary != "none":
            first, second = self.constants(rotary_tables, grid, x)  # (1, T, 1, D) each, or (1, T, 1, 1)
            names = ("columns", "rows") if config.positions.rotary == "mixed" else ("cosines", "sines")
            rotary = self.intermediate(names[0], first), self.intermediate(names[1], second)
        if rates.patch_drop and noise is not None:
            kept = sample_kept_tokens(x, config.num_prefix, rates.patch_drop, noise)  # (B, T kept)
            x = jnp.take_along_axis(x, kept[..., None], axis=1)
            rotary = (rotary[0][0, kept], rotary[1][0, kept]) if rotary is not None else None
        bias = self.rel_pos(x) if self.rel_pos is not None else None  # (H, T, T)
        x = self.norm_pre(x) if self.norm_pre is not None else x
        x = self.intermediate("embed", x)
        return x, AttentionTables(rotary, bias)

    def positions(self, x: Array, grid: tuple[int, int]) -> Array:
        """Return the position table of tokens, (1, T, width); prefix tokens without a row get zeros.

        Args:
            x: the tokens, (B, T, width), whose dtype the table gets.
            grid: the rows and columns of patches.
        """
        config, covered = self.config, self.config.num_covered
        if self.pos_embed is not None:
            table = self.pos_embed.astype(at_least_float32(x))
        elif self.pos_embed_y is not None and self.pos_embed_x is not None:
            rows, columns = self.pos_embed_y.astype(at_least_float32(x)), self.pos_embed_x.astype(at_least_float32(x))
            table = (rows[:, :, None] + columns[:, None]).reshape(1, -1, config.width)
        else:
            table = self.constants(position_table, grid, x)[0][None]
        head, body = table[:, :covered], table[:, covered:]  # (1, covered, width), (1, rows * columns, width)
        if config.positions.kind == "learned" and grid != config.grid:
            height, width = self.constants(resampling_matrices, grid, body)
            body = body.reshape(*config.grid, config.width)
            body = jnp.einsum("yh,hwd->ywd", height, body, precision="highest")
            body = jnp.einsum("xw,ywd->yxd", width, body, precision="highest")
            body = body.reshape(1, -1, config.width)
        gap = jnp.zeros((1, config.num_prefix - covered, config.width), table.dtype)
        return jnp.concatenate([head, gap, body], axis=1).astype(x.dtype)

    def encode(self, x: Array, tables: AttentionTables, noise: Noise | None) -> Array:
        """Apply the blocks and the final norm: (B, T, width) -> (B, T, width)."""
        x, _ = self.blocks(residual_tokens(x), noise, tables)
        return self.norm(x) if self.norm is not None else x

    def classify(self, x: Array, noise: Noise | None, both_heads: bool = False) -> Array:
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
                return jnp.stack([logits, second], axis=1)
            logits = (logits + second) / 2
        return logits

    def pool(self, x: Array, noise: Noise | None) -> Array:
        """Pool tokens to one feature per image, (B, T, width) -> (B, pooled), or return all tokens without pooling."""
        kind, start = self.config.head.pool, 0 if self.config.head.pool_prefix else self.config.num_prefix
        patches = x[:, start:]
        if kind == "token":
            x = x[:, 0]
        if kind == "mean":
            x = patches.mean(1)
        if kind == "token_mean":
            x = jnp.concatenate([x[:, 0], patches.mean(1)], axis=-1)
        if self.attn_pool is not None:
            x = self.attn_pool(patches, noise)
        return self.intermediate("pool", x)

    def output(self, x: Array, head: Linear | None) -> Array:
        """Apply the norm after pooling, the hidden layer and the head: (..., pooled) -> (..., num_classes).

        Each of them is optional: without classes, the result is the feature, (..., feature).
        """
        x = self.fc_norm(x) if self.fc_norm is not None else x
        x = self.intermediate("hidden", jnp.tanh(self.pre_logits(x))) if self.pre_logits is not None else x
        return head(x) if head is not None else x
