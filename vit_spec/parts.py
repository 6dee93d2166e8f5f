"""The parts of `ViTConfig`: frozen dataclasses, each with the checks of its own values."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from vit_spec.errors import nearest, require
from vit_spec.laws import Law
from vit_spec.positions import TABLES


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """What the network was trained to see: (x / 255 - mean) / std, one value for all channels or one per channel."""

    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)

    def check(self, *, in_channels: int) -> None:
        """Raise InputError unless there is a mean and a positive standard deviation for each channel."""
        for name, values in {"mean": self.mean, "std": self.std}.items():
            require(
                len(values) in (1, in_channels),
                f"pixels.{name} has {len(values)} values for {in_channels} channels: give one for all, or one a channel",
            )
        require(min(self.std) > 0, f"pixels.std is {self.std}: give positive numbers")


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The sequence that enters the blocks: [class, distillation, registers, patches].

    registers: learned tokens without a meaning of their own (arXiv 2309.16588).
    distillation: DeiT's second token, with a second head (arXiv 2012.12877).
    patch_bias: whether the patch projection has a bias (CLIP's has none).
    init: the law that the class, distillation and register tokens are drawn from.
    pad: pad images at the right and the bottom with zeros up to a multiple of the patch; otherwise they are refused.
    """

    class_token: bool = True
    registers: int = 0
    distillation: bool = False
    patch_bias: bool = True
    init: str = "zeros"
    pad: bool = False

    def check(self) -> None:
        """Raise InputError for a negative number of registers, or a distillation token without a class token."""
        require(self.registers >= 0, f"tokens.registers is {self.registers}: give 0 or more")
        require(
            self.class_token or not self.distillation,
            "tokens.distillation adds a second token to the class token: set tokens.class_token=True",
        )
        Law.parse(self.init, "tokens.init")


@dataclass(frozen=True, kw_only=True)
class Positions:
    """How tokens learn where they are.

    kind: a learned table, a fixed one, or none is added to the tokens.
    table: what a fixed table is, and what a learned one starts from: a table's name, or for a learned one a law.
    covers: which prefix tokens have a row of their own in the table, ahead of the patches' rows.
    rotary: queries and keys are turned by their position (arXiv 2104.09864) over the two axes of the image:
        "axial" as in s-chh/2D-Positional-Encoding-Vision-Transformer, "dinov3" as in arXiv 2508.10104.
    """

    kind: Literal["learned", "fixed", "none"] = "learned"
    table: str = "normal(0.02)"
    covers: Literal["all", "class", "none"] = "all"
    rotary: Literal["none", "axial", "dinov3"] = "none"
    rotary_base: float = 10000.0

    def check(self, *, width: int, head_dim: int, class_token: bool) -> None:
        """Raise InputError for an unknown table, or one that does not fit the width, the heads or the tokens."""
        if self.kind == "fixed":
            require(
                self.table in TABLES,
                f"positions.table is {self.table!r}: a fixed table is one of "
                f"{', '.join(TABLES)}{nearest(self.table, TABLES)}",
            )
        elif self.table not in TABLES:
            Law.parse(self.table, "positions.table", alternatives=TABLES)
        if self.kind != "none" and self.table.startswith("sincos_2d"):
            require(
                width % 4 == 0 and width > 4,
                f"width {width}: a 2-D sine-cosine table needs a multiple of 4 above 4, or choose another positions.table",
            )
        require(
            self.kind == "none" or self.covers != "class" or class_token,
            "positions.covers='class' needs a class token: set tokens.class_token=True, or positions.covers='none'",
        )
        require(self.rotary_base > 0, f"positions.rotary_base is {self.rotary_base}: give a positive number")
        require(
            self.rotary == "none" or head_dim % 4 == 0,
            f"head_dim {head_dim} is not a multiple of 4, which positions.rotary needs: change num_heads, "
            "or attention.head_dim",
        )


@dataclass(frozen=True, kw_only=True)
class Resampling:
    """How a learned table is carried to another grid; `vit_spec.resample` has the formulas.

    offset: DINO's rule scales by (new + offset) / old instead of new / old.
    """

    kernel: Literal["bicubic", "bilinear"] = "bicubic"
    antialias: bool = True
    align_corners: bool = False
    offset: float = 0.0

    def check(self) -> None:
        """Raise InputError for rules that cannot be combined."""
        require(
            not (self.antialias and self.align_corners),
            "resampling.antialias has no corner-aligned form: switch off one of the two",
        )
        require(
            not (self.offset and self.align_corners),
            "resampling.offset has no corner-aligned form: switch off one of the two",
        )
        require(0 <= self.offset < 1, f"resampling.offset is {self.offset}: give a number from 0 up to 1 (DINO's is 0.1)")


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Multi-head self-attention.

    head_dim: width of one head; None is width / num_heads.
    qkv_bias: which of the three projections have a bias.
    proj: whether the heads are mixed by an output projection.
    scale: what scores are multiplied by; None is head_dim ** -0.5.
    qk_norm: layer normalisation of each query and key head (arXiv 2302.05442).
    value_skip: what comes out is added to the values (T2T-ViT, arXiv 2101.11986, Attention of its token transformer).
    """

    head_dim: int | None = None
    qkv_bias: Literal["qkv", "qv", "none"] = "qkv"
    proj: bool = True
    proj_bias: bool = True
    scale: float | None = None
    qk_norm: bool = False
    value_skip: bool = False

    def check(self, *, width: int, num_heads: int) -> None:
        """Raise InputError unless the heads fit the width."""
        require(
            self.head_dim is None or self.head_dim > 0, f"attention.head_dim is {self.head_dim}: give a positive number"
        )
        require(
            self.head_dim is not None or width % num_heads == 0,
            f"width {width} is not divisible by num_heads {num_heads}: choose num_heads that divides it, "
            "or set attention.head_dim",
        )
        head_dim = self.head_dim or width // num_heads
        require(
            num_heads * head_dim == width or (self.proj and not self.value_skip),
            f"num_heads {num_heads} times head_dim {head_dim} is {num_heads * head_dim}, not the width {width}: without an "
            "output projection, or with attention.value_skip, it must be; change attention.head_dim, or those two",
        )
        require(self.scale is None or self.scale > 0, f"attention.scale is {self.scale}: give a positive number, or None")


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """The second half of a block: fc2(activation(fc1(x))).

    activation: "gelu" is exact (erf), "gelu_tanh" its tanh approximation, "quick_gelu" x * sigmoid(1.702 x);
        "swiglu" gates: fc1 yields two halves of mlp_dim each and silu(first) * second goes on (arXiv 2002.05202).
    """

    activation: Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "none", "swiglu"] = "gelu"


@dataclass(frozen=True, kw_only=True)
class Norms:
    """Layer normalisation, and the scale of what a block adds to the residual stream.

    before_blocks: a norm ahead of the first block (CLIP).
    after_blocks: the final norm, over all tokens.
    after_pool: a norm over the pooled feature.
    shared_norm: one norm, one parameter, serves both halves of a block.
    layer_scale: start value of a learned factor per channel on each half (arXiv 2103.17239); None leaves it out.
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
    """From tokens to outputs.

    pool: "token" the class token, "mean" the mean of the patch tokens, "token_mean" both joined, "attention" a learned
        query over the patch tokens (MAP, arXiv 2106.04560), "none" every token.
    hidden: width of a layer with tanh ahead of the classifier (pre-logits, arXiv 2010.11929); None leaves it out.
    init: the law of the classifier's weight.
    """

    pool: Literal["token", "mean", "token_mean", "attention", "none"] = "token"
    hidden: int | None = None
    bias: bool = True
    init: str = "trunc_normal(0.02)"

    def check(self, *, class_token: bool, distillation: bool) -> None:
        """Raise InputError for a pooling of tokens that are not there."""
        require(
            self.pool not in ("token", "token_mean") or class_token,
            f"head.pool={self.pool!r} reads the class token: set tokens.class_token=True, or head.pool='mean'",
        )
        require(not distillation or self.pool == "token", "tokens.distillation reads two tokens: set head.pool='token'")
        require(self.hidden is None or self.hidden > 0, f"head.hidden is {self.hidden}: give a positive width, or None")
        Law.parse(self.init, "head.init")


@dataclass(frozen=True, kw_only=True)
class Regularisation:
    """Noise in training, as probabilities; nothing here acts at inference.

    pos_drop: dropout of tokens' entries after positions are added.
    patch_drop: share of patch tokens left out of a step (arXiv 2212.00794).
    attn_drop: dropout of attention weights.
    mlp_drop: dropout after the activation and after fc2.
    drop_path: chance that the last block's halves are skipped, growing linearly from 0 (arXiv 1603.09382).
    """

    pos_drop: float = 0.0
    patch_drop: float = 0.0
    attn_drop: float = 0.0
    mlp_drop: float = 0.0
    drop_path: float = 0.0

    def check(self) -> None:
        """Raise InputError unless every rate is a probability."""
        for name, rate in dataclasses.asdict(self).items():
            require(0 <= rate < 1, f"regularisation.{name} is {rate}: give a probability from 0 up to (not including) 1")
