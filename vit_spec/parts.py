"""The nested dataclasses of `ViTConfig`, each with the checks of its own values."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from vit_spec.errors import nearest, require
from vit_spec.initialisation import Law
from vit_spec.positions import TABLES


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
        """Raise InputError unless each channel has a mean and a positive standard deviation."""
        for name, values in {"mean": self.mean, "std": self.std}.items():
            require(
                len(values) in (1, in_channels),
                f"pixels.{name} has {len(values)} values for {in_channels} channels: give one value for all channels, or "
                "one per channel",
            )
        require(min(self.std) > 0, f"pixels.std is {self.std}: give positive numbers")


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The token sequence of the transformer: [class, distillation, registers, patches].

    Attributes:
        class_token: prepend a learned class token.
        registers: number of learned register tokens (arXiv 2309.16588).
        distillation: prepend DeiT's distillation token, which has its own classifier (arXiv 2012.12877).
        patch_bias: whether the patch projection has a bias (CLIP's has none).
        init: initial distribution of the class, distillation and register tokens, such as "trunc_normal(0.02)".
        pad: zero-pad images at the right and the bottom to a multiple of the patch size; if False, such images are refused.
    """

    class_token: bool = True
    registers: int = 0
    distillation: bool = False
    patch_bias: bool = True
    init: str = "zeros"
    pad: bool = False

    def check(self) -> None:
        """Raise InputError for a negative number of registers, distillation without a class token, or a bad init."""
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
        rotary: 2-D rotary embedding (RoPE, arXiv 2104.09864) of queries and keys: "axial" as in
            s-chh/2D-Positional-Encoding-Vision-Transformer, "dinov3" as in arXiv 2508.10104.
        rotary_base: base of the rotary frequencies.
    """

    kind: Literal["learned", "fixed", "none"] = "learned"
    table: str = "normal(0.02)"
    covers: Literal["all", "class", "none"] = "all"
    rotary: Literal["none", "axial", "dinov3"] = "none"
    rotary_base: float = 10000.0

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
                width % 4 == 0 and width > 4,
                f"width is {width}: a 2-D sine-cosine table needs a multiple of 4 larger than 4; change width, or choose "
                "another positions.table",
            )
        require(
            self.kind == "none" or self.covers != "class" or class_token,
            "positions.covers='class' needs a class token: set tokens.class_token=True, or positions.covers='none'",
        )
        require(self.rotary_base > 0, f"positions.rotary_base is {self.rotary_base}: give a positive number")
        require(
            self.rotary == "none" or head_dim % 4 == 0,
            f"head_dim is {head_dim}: positions.rotary needs a multiple of 4; change num_heads, or set attention.head_dim",
        )


@dataclass(frozen=True, kw_only=True)
class Resampling:
    """Resampling of a learned position table to another grid; `vit_spec.resample` has the formulas.

    Attributes:
        kernel: the interpolation kernel.
        antialias: widen the kernel when the grid becomes smaller.
        align_corners: keep the positions of the first and last patches, as in torch.
        offset: scale by (new + offset) / old instead of new / old, as DINO does.
    """

    kernel: Literal["bicubic", "bilinear"] = "bicubic"
    antialias: bool = True
    align_corners: bool = False
    offset: float = 0.0

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
        qk_norm: layer normalization of the queries and keys of each head (arXiv 2302.05442).
        value_skip: add the values to the output (T2T-ViT, arXiv 2101.11986: class Attention of its token transformer).
    """

    head_dim: int | None = None
    qkv_bias: Literal["qkv", "qv", "none"] = "qkv"
    proj: bool = True
    proj_bias: bool = True
    scale: float | None = None
    qk_norm: bool = False
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


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """The MLP of a block: fc2(activation(fc1(x))).

    Attributes:
        activation: "gelu" is exact (erf), "gelu_tanh" its tanh approximation, "quick_gelu" x * sigmoid(1.702 x), "none" the
            identity.  "swiglu" is gated: fc1 has two outputs of mlp_dim entries, and fc2 reads silu(first) * second (arXiv
            2002.05202).
    """

    activation: Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "none", "swiglu"] = "gelu"


@dataclass(frozen=True, kw_only=True)
class Norms:
    """Layer normalization and layer scale.

    Attributes:
        eps: epsilon of all norms.
        before_blocks: a norm before the first block (CLIP).
        after_blocks: the final norm, over all tokens.
        after_pool: a norm of the pooled feature.
        shared_norm: attention and MLP of a block share one norm and its parameters.
        layer_scale: initial value of a learned factor per channel of the outputs of attention and MLP (arXiv 2103.17239);
            None means no layer scale.
    """

    eps: float = 1e-6
    before_blocks: bool = False
    after_blocks: bool = True
    after_pool: bool = False
    shared_norm: bool = False
    layer_scale: float | None = None

    def check(self) -> None:
        """Raise InputError unless eps is positive."""
        require(self.eps > 0, f"norms.eps is {self.eps}: give a positive number such as 1e-6")


@dataclass(frozen=True, kw_only=True)
class Head:
    """Pooling and classifier.

    Attributes:
        pool: "token" is the class token, "mean" the mean of the patch tokens, "token_mean" the concatenation of both,
            "attention" a learned query over the patch tokens (MAP, arXiv 2106.04560), "none" no pooling: every token.
        hidden: dimension of a tanh layer before the classifier (pre-logits, arXiv 2010.11929); None means no such layer.
        bias: whether the classifier has a bias.
        init: initial distribution of the classifier's weight, such as "zeros" or "trunc_normal(0.02)".
    """

    pool: Literal["token", "mean", "token_mean", "attention", "none"] = "token"
    hidden: int | None = None
    bias: bool = True
    init: str = "trunc_normal(0.02)"

    def check(self, *, class_token: bool, distillation: bool) -> None:
        """Raise InputError if the pooling needs a token that does not exist, or if hidden or init is invalid."""
        require(
            self.pool not in ("token", "token_mean") or class_token,
            f"head.pool={self.pool!r} needs a class token: set tokens.class_token=True, or head.pool='mean'",
        )
        require(
            not distillation or self.pool == "token",
            "tokens.distillation=True needs head.pool='token': set head.pool='token'",
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
