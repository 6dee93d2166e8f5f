"""What a Vision Transformer is: the words everyone knows at the top, the rest in a few frozen parts.

The config holds mathematics only.  How a model runs (dtype, kernels, rematerialisation, devices) is an argument of
each twin, because it must not travel with the weights.

The plain model is "An Image is Worth 16x16 Words" (arXiv 2010.11929); each option names its own source.
"""

import dataclasses
import json
import numbers
import typing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Self

from vit_spec import bounded_json
from vit_spec.errors import InputError, nearest
from vit_spec.validation import coerced, hold_to_reason, hold_to_types


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """What the network was trained to see: (x / 255 - mean) / std, one value for all channels or one per channel."""

    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)


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


@dataclass(frozen=True, kw_only=True)
class Resampling:
    """How a learned table is carried to another grid; `vit_spec.resample` has the formulas.

    offset: DINO's rule scales by (new + offset) / old instead of new / old.
    """

    kernel: Literal["bicubic", "bilinear"] = "bicubic"
    antialias: bool = True
    align_corners: bool = False
    offset: float = 0.0


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


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """A Vision Transformer.

    image_size, patch_size: (height, width) in pixels; one number stands for a square.
    num_classes: number of outputs; 0 yields the features ahead of the classifier.

    Raises:
        InputError: a value of the wrong type or out of range, or values that contradict each other.
    """

    image_size: tuple[int, int] = (224, 224)
    patch_size: tuple[int, int] = (16, 16)
    in_channels: int = 3
    width: int
    depth: int
    num_heads: int
    mlp_dim: int
    num_classes: int = 1000
    pixels: Pixels = field(default_factory=Pixels)
    tokens: Tokens = field(default_factory=Tokens)
    positions: Positions = field(default_factory=Positions)
    resampling: Resampling = field(default_factory=Resampling)
    attention: Attention = field(default_factory=Attention)
    mlp: Mlp = field(default_factory=Mlp)
    norms: Norms = field(default_factory=Norms)
    head: Head = field(default_factory=Head)
    regularisation: Regularisation = field(default_factory=Regularisation)

    def __post_init__(self) -> None:
        for name in ("image_size", "patch_size"):
            value = getattr(self, name)
            if isinstance(value, numbers.Integral):
                object.__setattr__(self, name, (value, value))
        hold_to_types(self, "")
        hold_to_reason(self)

    # Derived sizes ---------------------------------------------------------------------------------------------------

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.attention.head_dim or self.width // self.num_heads

    @property
    def scale(self) -> float:
        """What attention scores are multiplied by."""
        return self.head_dim**-0.5 if self.attention.scale is None else self.attention.scale

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches at the config's own image size."""
        return self.grid_of(*self.image_size)

    @property
    def num_prefix(self) -> int:
        """Tokens ahead of the patches."""
        return self.tokens.class_token + self.tokens.distillation + self.tokens.registers

    @property
    def num_covered(self) -> int:
        """Prefix tokens that have a row in the position table."""
        return {"all": self.num_prefix, "class": 1, "none": 0}[self.positions.covers]

    @property
    def num_tokens(self) -> int:
        """Tokens in the sequence at the config's own image size."""
        return self.num_prefix + self.grid[0] * self.grid[1]

    @property
    def feature_dim(self) -> int:
        """Width of what enters the classifier (or comes out, when num_classes is 0)."""
        return self.head.hidden or (2 * self.width if self.head.pool == "token_mean" else self.width)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """How long each named axis of a parameter is."""
        return {
            "block": self.depth,
            "width": self.width,
            "head": self.num_heads,
            "dim": self.head_dim,
            "ff": self.mlp_dim,
            "rgb": self.in_channels,
            "ph": self.patch_size[0],
            "pw": self.patch_size[1],
            "token": self.num_covered + self.grid[0] * self.grid[1],
            "register": self.tokens.registers,
            "pooled": 2 * self.width if self.head.pool == "token_mean" else self.width,
            "feature": self.feature_dim,
            "label": self.num_classes,
            "qkv": 3,
            "kv": 2,
            "glu": 2,
        }

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of patches of an image of this size.

        Raises:
            InputError: the size is not a multiple of the patch and the config does not pad.
        """
        (ph, pw), pad = self.patch_size, self.tokens.pad
        if height < 1 or width < 1 or (not pad and (height % ph or width % pw)):
            near = tuple(max(1, round(size / patch)) * patch for size, patch in ((height, ph), (width, pw)))
            raise InputError(
                f"image size {height}x{width} is not a multiple of the patch {ph}x{pw}: "
                f"resize images to {near[0]}x{near[1]}, or set tokens.pad=True"
            )
        return -(-height // ph), -(-width // pw)

    def at(self, name: str) -> Any:
        """Return the value of a field, dotted where it lies in a part: "num_classes", "norms.eps".

        Raises:
            InputError: no such field; says the nearest.
        """
        if name not in FIELDS:
            raise InputError(f"unknown config field {name}{nearest(name, FIELDS) or ': see ViTConfig'}")
        part, _, field_name = name.rpartition(".")
        return getattr(getattr(self, part) if part else self, field_name)

    # Changes and JSON ------------------------------------------------------------------------------------------------

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed; `part={...}` changes only the named fields of a part.

        >>> vit_spec.get("vit_s16").replace(num_classes=10, norms={"eps": 1e-5})

        Raises:
            InputError: an unknown field, or a value that the config refuses.
        """
        for name, value in changes.items():
            if name in PARTS and isinstance(value, dict):
                _known(value, PARTS[name], f"{name}.")
                changes[name] = dataclasses.replace(getattr(self, name), **value)
        _known(changes, type(self), "")
        return dataclasses.replace(self, **changes)

    def to_json(self) -> str:
        """Return every field as one line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Return the config that `to_json` wrote; fields left out take their defaults.

        Raises:
            InputError: not JSON, an unknown or missing key, or a value that the config refuses.
        """
        try:
            fields = bounded_json.parse(text)
        except InputError as error:
            raise InputError(f"the config is not JSON ({error}): give what ViTConfig.to_json() wrote") from None
        if not isinstance(fields, dict):
            raise InputError(f"the config is a JSON {type(fields).__name__}: an object of fields was expected")
        _known(fields, cls, "")
        if missing := [f.name for f in dataclasses.fields(cls) if f.name not in fields and _required(f)]:
            raise InputError(f"the config lacks {', '.join(missing)}: add them")
        for name, value in fields.items():
            if name in PARTS:
                if not isinstance(value, dict):
                    raise InputError(
                        f"{name} is {value!r}: an object with the fields of {PARTS[name].__name__} was expected"
                    )
                _known(value, PARTS[name], f"{name}.")
                fields[name] = PARTS[name](**value)
        return cls(**fields)


PARTS: dict[str, type] = {
    name: part
    for name, part in typing.get_type_hints(ViTConfig).items()
    if isinstance(part, type) and dataclasses.is_dataclass(part)
}


FIELDS: tuple[str, ...] = tuple(
    name
    for f in dataclasses.fields(ViTConfig)
    for name in ([f"{f.name}.{inner.name}" for inner in dataclasses.fields(PARTS[f.name])] if f.name in PARTS else [f.name])
)


def typed(name: str, value: Any) -> Any:
    """Return a value as the field of this name keeps it, dotted where it lies in a part; a side alone makes a square.

    Raises:
        InputError: a value of another type.
    """
    part, _, field_name = name.rpartition(".")
    annotation = typing.get_type_hints(PARTS[part] if part else ViTConfig)[field_name]
    if name in ("image_size", "patch_size") and isinstance(value, numbers.Integral):
        value = (value, value)
    return coerced(name, value, annotation)


def _required(f: dataclasses.Field[Any]) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _known(given: dict[str, Any], cls: type, prefix: str) -> None:
    """Refuse keys that are not fields of `cls`."""
    names = [f.name for f in dataclasses.fields(cls)]
    for key in given:
        if key not in names:
            hint = nearest(key, names) or f"; the fields are {', '.join(names)}"
            raise InputError(f"unknown config field {prefix}{key}{hint}")
