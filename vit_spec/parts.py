"""The nested dataclasses of `ViTConfig`, each with the checks of its own values."""

import dataclasses
from dataclasses import dataclass
from typing import Literal, get_args

from vit_spec.errors import InputError, nearest, require
from vit_spec.initialisation import Law
from vit_spec.positions import SCALED_ROTARY, TABLES
from vit_spec.typed_fields import MIN_FLOAT


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """Normalization of input images: (x / 255 - mean) / std.

    Attributes:
        mean: one value for all channels, or one per channel.
        std: one value for all channels, or one per channel.
    """

    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)

    def check(self, *, in_channels: int) -> None:
        """Raise InputError unless each channel has a mean and a standard deviation that is positive in float32."""
        # Messages are made of errors only: where torch.compile takes numbers as symbols, they have no digits.
        for name, values in {"mean": self.mean, "std": self.std}.items():
            if len(values) != 1 and len(values) != in_channels:  # torch.compile finds no symbol in a tuple
                raise InputError(
                    f"pixels.{name} has {len(values)} values for {in_channels} channels: give one value for all channels, "
                    "or one per channel"
                )
        if not min(self.std) >= MIN_FLOAT:
            raise InputError(f"pixels.std is {self.std}: give positive numbers, at least {MIN_FLOAT:.1e}")


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The token sequence of the transformer: [class, distillation, registers, patches].

    Attributes:
        class_token: prepend a learned class token.
        registers: number of learned register tokens (arXiv 2309.16588).
        distillation: prepend DeiT's distillation token, which has its own classifier (arXiv 2012.12877).
        patch_bias: whether the patch projection has a bias (CLIP's has none).
        init: initial distribution of the class, distillation and register tokens, such as "trunc_normal(0.02)".
        pad: zero-pad images at the right and the bottom to a multiple of the patch size.
        crop: leave out the last rows and columns of images that are not a multiple of the patch size.  Without `pad` or
            `crop`, such images are refused.
    """

    class_token: bool = True
    registers: int = 0
    distillation: bool = False
    patch_bias: bool = True
    init: str = "zeros"
    pad: bool = False
    crop: bool = False

    def check(self) -> None:
        """Raise InputError for options that cannot be combined, a negative number of registers, or a bad init."""
        require(not (self.pad and self.crop), "tokens.pad and tokens.crop cannot be combined: set one of them to False")
        require(self.registers >= 0, f"tokens.registers is {self.registers}: give 0 or more")
        require(
            self.class_token or not self.distillation,
            "tokens.distillation=True needs a class token: set tokens.class_token=True",
        )
        Law.parse(self.init, "tokens.init")


@dataclass(frozen=True, kw_only=True)
class Positions:
    """Position embeddings: a table that is added to the tokens, and rotary embeddings of queries and keys.

    Attributes:
        kind: add a learned table, a fixed table, or none.
        table: the fixed table, or the initial value of the learned one: the name of a sine-cosine table, or for a learned
            table also a distribution such as "normal(0.02)".
        covers: which prefix tokens have a row in the table; these rows come before those of the patches.
        factorized: the learned table is the sum of one with a row for each row of patches, and one with a row for each
            column (NaViT, arXiv 2307.06304).
        rotary: 2-D rotary embedding (RoPE, arXiv 2104.09864) of queries and keys; `vit_spec.positions` has the formulas.
            "axial" is that of s-chh/2D-Positional-Encoding-Vision-Transformer, "dinov3" of arXiv 2508.10104, "eva" of
            EVA-02 (arXiv 2303.11331), "rope_vit" of arXiv 2403.13298 with fixed frequencies, also in the Perception Encoder
            (arXiv 2504.13181), and "mixed" of arXiv 2403.13298 with learned frequencies of each head.
        rotary_base: base of the rotary frequencies.
        rotary_start: coordinate of the first row and column, for "eva" and "rope_vit".
        rotary_grid: the grid (rows, columns) to whose size coordinates are scaled, for "eva" and "rope_vit"; None means
            that they are not scaled.
        relative: a bias of the attention scores for each head and each offset between two patches.  "table" has a learned
            value for each offset, and three for pairs with a prefix token (BEiT, arXiv 2106.08254).  "mlp" computes the
            values of patches from the logarithms of offsets by two linear layers and a ReLU (timm's
            VisionTransformerRelPos, after arXiv 2111.09883).  The model then accepts images of its own size only.
        relative_dim: hidden dimension of the layers of "mlp".
        relative_shared: whether all blocks have the same bias; otherwise each block has its own.
    """

    kind: Literal["learned", "fixed", "none"] = "learned"
    table: str = "normal(0.02)"
    covers: Literal["all", "class", "none"] = "all"
    factorized: bool = False
    rotary: Literal["none", "axial", "dinov3", "eva", "rope_vit", "mixed"] = "none"
    rotary_base: float = 10000.0
    rotary_start: float = 0.0
    rotary_grid: tuple[int, int] | None = None
    relative: Literal["none", "table", "mlp"] = "none"
    relative_dim: int | None = None
    relative_shared: bool = False

    def check(self, *, width: int, head_dim: int, class_token: bool) -> None:
        """Raise InputError for an unknown table, or for options that do not fit the width, the head_dim or the tokens."""
        if self.kind == "fixed":
            require(
                self.table in TABLES,
                f"positions.table is {self.table!r}: for positions.kind='fixed', give one of "
                f"{', '.join(TABLES)}{nearest(self.table, TABLES)}",
            )
        elif self.table not in TABLES:
            Law.parse(self.table, "positions.table", alternatives=TABLES)
        if self.kind != "none" and self.table.startswith("sincos_2d"):
            require(
                width % 4 == 0 and (width > 4 or self.table != "sincos_2d_big_vision"),
                f"width is {width}: a 2-D sine-cosine table needs a multiple of 4, and 'sincos_2d_big_vision' at least 8; "
                "change width, or choose another positions.table",
            )
        require(
            self.kind == "none" or self.covers != "class" or class_token,
            "positions.covers='class' needs a class token: set tokens.class_token=True, or positions.covers='none'",
        )
        require(
            not self.factorized or (self.kind == "learned" and self.covers == "none" and self.table not in TABLES),
            "positions.factorized=True needs positions.kind='learned', positions.covers='none', and a distribution as "
            "positions.table: set these, or leave it out",
        )
        require(self.rotary_base > 0, f"positions.rotary_base is {self.rotary_base}: give a positive number")
        require(
            self.rotary in SCALED_ROTARY or (self.rotary_start == 0 and self.rotary_grid is None),
            f"positions.rotary_start and positions.rotary_grid are only for positions.rotary='eva' and 'rope_vit': with "
            f"{self.rotary!r}, leave them out",
        )
        require(
            self.rotary_grid is None or min(self.rotary_grid) > 0,
            f"positions.rotary_grid is {self.rotary_grid}: give a positive number of rows and columns, or None",
        )
        require(
            self.rotary == "none" or head_dim % 4 == 0,
            f"head_dim is {head_dim}: positions.rotary needs a multiple of 4; change num_heads, or set attention.head_dim",
        )
        require(
            (self.relative_dim or 0) > 0 if self.relative == "mlp" else self.relative_dim is None,
            f"positions.relative_dim is {self.relative_dim}: give a positive integer for positions.relative='mlp', and "
            "None otherwise",
        )
        require(
            self.relative != "none" or not self.relative_shared,
            "positions.relative_shared=True needs positions.relative='table' or 'mlp': leave it out",
        )


@dataclass(frozen=True, kw_only=True)
class Resampling:
    """Resampling of a learned position table to another grid; `vit_spec.resample` has the formulas.

    Attributes:
        kernel: the interpolation kernel.
        antialias: widen the kernel when the grid becomes smaller.
        align_corners: keep the positions of the first and last patches, as in torch.
        offset: scale by (new + offset) / old instead of new / old, as DINO does.
        square: resample to a square grid with the longer side of the new grid, and take its first rows and columns, as the
            NaFlex models of timm that preserve the aspect ratio do.
    """

    kernel: Literal["bicubic", "bilinear"] = "bicubic"
    antialias: bool = True
    align_corners: bool = False
    offset: float = 0.0
    square: bool = False

    def check(self) -> None:
        """Raise InputError for options that cannot be combined, and for an offset out of range."""
        require(
            not (self.antialias and self.align_corners),
            "resampling.antialias and resampling.align_corners cannot be combined: set one of them to False",
        )
        require(
            not (self.offset and self.align_corners),
            "resampling.offset and resampling.align_corners cannot be combined: set one of them to 0 or False",
        )
        require(
            0 <= self.offset < 1,
            f"resampling.offset is {self.offset}: give a number of at least 0 and less than 1 (DINO's is 0.1)",
        )


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Multi-head self-attention.

    Attributes:
        head_dim: dimension of one head; None means width / num_heads.
        qkv_bias: which of the query, key and value projections have a bias.
        proj: whether there is an output projection.
        proj_bias: whether the output projection has a bias.
        scale: factor of the attention scores; None means head_dim ** -0.5.
        qk_norm: norms of the queries and keys of each head (arXiv 2302.05442).
        out_norm: a norm of the outputs of all heads together, before the output projection (NormFormer, arXiv 2110.09456;
            EVA-02's sub-LN).
        value_skip: add the values to the output (T2T-ViT, arXiv 2101.11986: class Attention of its token transformer).
    """

    head_dim: int | None = None
    qkv_bias: Literal["qkv", "qv", "none"] = "qkv"
    proj: bool = True
    proj_bias: bool = True
    scale: float | None = None
    qk_norm: bool = False
    out_norm: bool = False
    value_skip: bool = False

    def check(self, *, width: int, num_heads: int) -> None:
        """Raise InputError if the heads do not fit the width, or if a size or the scale is not positive."""
        require(
            self.head_dim is None or self.head_dim > 0, f"attention.head_dim is {self.head_dim}: give a positive integer"
        )
        require(
            self.head_dim is not None or width % num_heads == 0,
            f"width {width} is not divisible by num_heads {num_heads}: change one of them, or set attention.head_dim",
        )
        head_dim = self.head_dim or width // num_heads
        require(
            num_heads * head_dim == width or (self.proj and not self.value_skip),
            f"num_heads {num_heads} times head_dim {head_dim} is {num_heads * head_dim}, but attention.proj=False or "
            f"attention.value_skip=True needs it to be the width {width}: change attention.head_dim, or these two options",
        )
        require(self.scale is None or self.scale > 0, f"attention.scale is {self.scale}: give a positive number, or None")


Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "mish", "none", "swiglu"]
GATED_ACTIVATIONS: tuple[Activation, ...] = ("swiglu",)
UNGATED_ACTIVATIONS: tuple[Activation, ...] = tuple(each for each in get_args(Activation) if each not in GATED_ACTIVATIONS)


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """The MLP of a block: fc2(activation(fc1(x))).

    Attributes:
        activation: "gelu" is exact (erf), "gelu_tanh" its tanh approximation, "quick_gelu" x * sigmoid(1.702 x), "relu"
            max(x, 0), "silu" x * sigmoid(x), "mish" x * tanh(log(1 + exp(x))) (arXiv 1908.08681), "none" the identity.
            "swiglu" is gated: fc1 has two outputs of mlp_dim entries, and fc2 reads silu(first) * second (arXiv
            2002.05202).
        bias: whether the two layers have biases.
        norm: a norm between the activation and fc2 (NormFormer, arXiv 2110.09456; EVA-02's sub-LN).
    """

    activation: Activation = "gelu"
    bias: bool = True
    norm: bool = False

    @property
    def is_gated(self) -> bool:
        """Whether fc1 has two outputs, a gate and a value."""
        return self.activation in GATED_ACTIVATIONS


@dataclass(frozen=True, kw_only=True)
class Norms:
    """The norms, their place in a block, and layer scale.

    Attributes:
        kind: "layer" is layer normalization, "rms" divides by the root mean square, without a mean (arXiv 1910.07467).
        bias: whether norms have a bias; RMS norms have none.
        eps: epsilon of all norms.
        order: the order of operations in a block, where f is attention or the MLP: "pre" is x + f(norm(x)), "post"
            norm(x + f(x)) (arXiv 1706.03762), "res_post" x + norm(f(x)) (Swin V2, arXiv 2111.09883).  "parallel" is
            x + attention(norm(x)) + mlp(norm(x)), with one norm (ViT-22B, arXiv 2302.05442).
        after_patches: a norm of the patch embeddings, before tokens and positions are added (AIMv2).
        before_blocks: a norm before the first block (CLIP).
        after_blocks: the final norm, over all tokens.
        after_pool: a norm of the pooled feature.
        shared_norm: attention and MLP of a block share one norm and its parameters.
        layer_scale: initial value of a learned factor per channel of the outputs of attention and MLP (arXiv 2103.17239);
            None means no layer scale.  Parallel blocks scale the sum of both outputs.
        mlp_layer_scale: whether layer scale also applies to the MLP; if not, it applies to attention only (Sapiens2).
    """

    kind: Literal["layer", "rms"] = "layer"
    bias: bool = True
    eps: float = 1e-6
    order: Literal["pre", "post", "res_post", "parallel"] = "pre"
    after_patches: bool = False
    before_blocks: bool = False
    after_blocks: bool = True
    after_pool: bool = False
    shared_norm: bool = False
    layer_scale: float | None = None
    mlp_layer_scale: bool = True

    @property
    def has_second(self) -> bool:
        """Whether the MLP of a block has a norm of its own."""
        return not self.shared_norm and self.order != "parallel"

    @property
    def has_second_scale(self) -> bool:
        """Whether the MLP of a block has a layer scale of its own."""
        return self.layer_scale is not None and self.mlp_layer_scale and self.order != "parallel"

    def check(self) -> None:
        """Raise InputError unless eps is positive in float32, and for options that cannot be combined."""
        require(
            self.eps >= MIN_FLOAT, f"norms.eps is {self.eps}: give a positive number such as 1e-6, at least {MIN_FLOAT:.1e}"
        )
        require(
            self.kind == "layer" or not self.bias,
            "norms.kind='rms' with norms.bias=True: RMS norms have no bias; set norms.bias=False",
        )
        require(
            self.order != "parallel" or not self.shared_norm,
            "norms.order='parallel' has one norm in each block: leave norms.shared_norm out",
        )
        require(
            self.order != "res_post" or self.layer_scale is None,
            "norms.order='res_post' with norms.layer_scale: the weights of the norms scale already; set layer_scale=None",
        )
        require(
            self.mlp_layer_scale or (self.layer_scale is not None and self.order != "parallel"),
            "norms.mlp_layer_scale=False needs norms.layer_scale, and an order other than 'parallel': leave it out",
        )


@dataclass(frozen=True, kw_only=True)
class Head:
    """Pooling and classifier.

    Attributes:
        pool: "token" is the class token, "mean" the mean of the patch tokens, "token_mean" the concatenation of both,
            "attention" a learned query over the patch tokens (MAP, arXiv 2106.04560), "none" no pooling: every token.
        pool_prefix: "mean" and "attention" also pool the prefix tokens: class, distillation and register tokens.
        pool_heads: number of heads of "attention"; None means num_heads.
        hidden: dimension of a tanh layer before the classifier (pre-logits, arXiv 2010.11929); None means no such layer.
        bias: whether the classifier has a bias.
        init: initial distribution of the classifier's weight, such as "zeros" or "trunc_normal(0.02)".
    """

    pool: Literal["token", "mean", "token_mean", "attention", "none"] = "token"
    pool_prefix: bool = False
    pool_heads: int | None = None
    hidden: int | None = None
    bias: bool = True
    init: str = "trunc_normal(0.02)"

    def check(self, *, width: int, class_token: bool, distillation: bool) -> None:
        """Raise InputError if the pooling needs a token that does not exist, or if a size or init is invalid."""
        require(
            self.pool not in ("token", "token_mean") or class_token,
            f"head.pool={self.pool!r} needs a class token: set tokens.class_token=True, or head.pool='mean'",
        )
        require(
            not distillation or self.pool == "token",
            "tokens.distillation=True needs head.pool='token': set head.pool='token'",
        )
        require(
            not self.pool_prefix or self.pool in ("mean", "attention"),
            f"head.pool_prefix=True with head.pool={self.pool!r}: it is only for 'mean' and 'attention'; leave it out",
        )
        heads = self.pool_heads
        require(
            heads is None or (heads > 0 and width % heads == 0 and self.pool == "attention"),
            f"head.pool_heads is {heads}: give a number of heads that divides the width {width}, for head.pool='attention' "
            "only, or None",
        )
        require(self.hidden is None or self.hidden > 0, f"head.hidden is {self.hidden}: give a positive integer, or None")
        Law.parse(self.init, "head.init")


@dataclass(frozen=True, kw_only=True)
class Regularisation:
    """Dropout rates, as probabilities; they act only in training.

    Attributes:
        pos_drop: dropout of token entries after positions are added.
        patch_drop: fraction of patch tokens that a training step leaves out (arXiv 2212.00794).
        attn_drop: dropout of attention weights.
        mlp_drop: dropout after the activation and after fc2.
        drop_path: stochastic depth: probability to skip attention, or the MLP, in the last block; it grows linearly with
            depth from 0 in the first block (arXiv 1603.09382).
    """

    pos_drop: float = 0.0
    patch_drop: float = 0.0
    attn_drop: float = 0.0
    mlp_drop: float = 0.0
    drop_path: float = 0.0

    def check(self) -> None:
        """Raise InputError unless every rate is a probability."""
        for name, rate in dataclasses.asdict(self).items():
            require(0 <= rate < 1, f"regularisation.{name} is {rate}: give a probability of at least 0 and less than 1")
