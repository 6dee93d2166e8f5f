"""The config of a Vision Transformer: common hyperparameters at the top level, further options in nested dataclasses.

The config describes only the mathematical function.  How a model runs (dtype, kernels, rematerialization, devices) is an
argument of each twin, because it must not be saved with the weights.

The default model is "An Image is Worth 16x16 Words" (arXiv 2010.11929); each option names its own source.
"""

import dataclasses
import json
import numbers
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

from vit_spec import bounded_json
from vit_spec.errors import InputError, nearest, require, require_type
from vit_spec.parts import Attention, Head, Mlp, Norms, Pixels, Positions, Regularisation, Resampling, Tokens
from vit_spec.typed_fields import check_types, coerce


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """The config of a Vision Transformer.

    Attributes:
        image_size: (height, width) in pixels; a single integer means a square.
        patch_size: (height, width) in pixels; a single integer means a square.
        in_channels: number of image channels.
        width: embedding dimension of the tokens.
        depth: number of blocks.
        num_heads: number of attention heads.
        mlp_dim: hidden dimension of the MLPs.
        num_classes: number of outputs; 0 means no classifier: the model returns its features.
        pixels: normalization of input images.
        tokens: the token sequence: class, distillation and register tokens, and patches.
        positions: position table and rotary embeddings.
        resampling: resampling of a learned position table to another grid.
        attention: multi-head self-attention.
        mlp: the MLP of a block.
        norms: layer normalization and layer scale.
        head: pooling and classifier.
        regularisation: dropout rates.

    Raises:
        InputError: a value has the wrong type, is out of range or contradicts another value.
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
        check_types(self, "")
        self._check_values()

    def _check_values(self) -> None:
        """Raise InputError if a value is out of range or contradicts another; the message says what to change."""
        for name in ("in_channels", "width", "depth", "num_heads", "mlp_dim"):
            require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}: give a positive integer")
        for name in ("image_size", "patch_size"):
            require(
                min(getattr(self, name)) > 0, f"{name} is {getattr(self, name)}: give a positive height and width in pixels"
            )
        require(
            self.num_classes >= 0,
            f"num_classes is {self.num_classes}: give the number of outputs, or 0 for a model without a classifier",
        )
        self.grid_of(*self.image_size)
        class_token = self.tokens.class_token
        self.pixels.check(in_channels=self.in_channels)
        self.tokens.check()
        self.attention.check(width=self.width, num_heads=self.num_heads)
        self.positions.check(width=self.width, head_dim=self.head_dim, class_token=class_token)
        self.resampling.check()
        self.norms.check()
        self.head.check(width=self.width, class_token=class_token, distillation=self.tokens.distillation)
        self.regularisation.check()
        require(
            self.positions.relative == "none" or not self.regularisation.patch_drop,
            f"positions.relative={self.positions.relative!r} excludes regularisation.patch_drop: set it to 0",
        )

    # Derived sizes ---------------------------------------------------------------------------------------------------

    @property
    def head_dim(self) -> int:
        """Dimension of one attention head."""
        return self.attention.head_dim or self.width // self.num_heads

    @property
    def scale(self) -> float:
        """Factor of the attention scores."""
        return self.head_dim**-0.5 if self.attention.scale is None else self.attention.scale

    @property
    def pool_heads(self) -> int:
        """Number of heads of attention pooling."""
        return self.head.pool_heads or self.num_heads

    @property
    def pool_head_dim(self) -> int:
        """Dimension of one head of attention pooling."""
        return self.width // self.head.pool_heads if self.head.pool_heads else self.head_dim

    @property
    def pool_scale(self) -> float:
        """Factor of the attention scores of attention pooling."""
        return self.pool_head_dim**-0.5 if self.attention.scale is None else self.attention.scale

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of patches at the config's image size."""
        return self.grid_of(*self.image_size)

    @property
    def num_prefix(self) -> int:
        """Number of prefix tokens: class, distillation and register tokens."""
        return self.tokens.class_token + self.tokens.distillation + self.tokens.registers

    @property
    def num_covered(self) -> int:
        """Number of prefix tokens that have a row in the position table."""
        return {"all": self.num_prefix, "class": 1, "none": 0}[self.positions.covers]

    @property
    def num_tokens(self) -> int:
        """Number of tokens, prefix tokens and patches, at the config's image size."""
        return self.num_prefix + self.grid[0] * self.grid[1]

    @property
    def feature_dim(self) -> int:
        """Dimension of the classifier's input, which is the model's output if num_classes is 0."""
        return self.head.hidden or (2 * self.width if self.head.pool == "token_mean" else self.width)

    @property
    def num_offsets(self) -> int:
        """Rows of a table of relative positions: one for each offset, and three for pairs with a prefix token."""
        rows, columns = self.grid
        return (2 * rows - 1) * (2 * columns - 1) + (3 if self.num_prefix else 0)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The length of each named axis of the parameters."""
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
            "pool_head": self.pool_heads,
            "pool_dim": self.pool_head_dim,
            "row": self.grid[0],
            "column": self.grid[1],
            "pair": self.head_dim // 2,
            "xy": 2,
            "yx": 2,
            "offset": self.num_offsets,
            "offset_ff": self.positions.relative_dim or 0,
            "qkv": 3,
            "kv": 2,
            "glu": 2,
        }

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Return the (rows, columns) of patches of an image.

        Args:
            height: height of the image in pixels.
            width: width of the image in pixels.

        Raises:
            InputError: the size is not a multiple of the patch size, and neither `tokens.pad` nor `tokens.crop` is True;
                the image is smaller than a patch; or it is not of the config's size, with `positions.relative`.
        """
        (ph, pw), tokens = self.patch_size, self.tokens
        if self.positions.relative != "none" and (height, width) != self.image_size:
            own, other = f"{self.image_size[0]}x{self.image_size[1]}", ", or set image_size"
            raise InputError(
                f"image size {height}x{width} does not fit the relative positions of this model, which are for images of "
                f"{own}: resize images to {own}{other if self.positions.relative == 'mlp' else ''}"
            )
        is_multiple = not (height % ph or width % pw)
        if tokens.crop:
            require(
                height >= ph and width >= pw,
                f"image size {height}x{width} is smaller than the patch size {ph}x{pw}, so that tokens.crop=True leaves no "
                f"patch: resize images to at least {ph}x{pw}",
            )
            return height // ph, width // pw
        if height < 1 or width < 1 or not (is_multiple or tokens.pad):
            nearby = tuple(max(1, round(size / patch)) * patch for size, patch in ((height, ph), (width, pw)))
            raise InputError(
                f"image size {height}x{width} is not a multiple of the patch size {ph}x{pw}: "
                f"resize images to {nearby[0]}x{nearby[1]}, or set tokens.pad=True or tokens.crop=True"
            )
        return -(-height // ph), -(-width // pw)

    def at(self, name: str) -> Any:
        """Return the value of a field; fields of nested dataclasses are dotted: "num_classes", "norms.eps".

        Raises:
            InputError: there is no such field; the message suggests the most similar one.
        """
        if name not in FIELDS:
            raise _unknown_field(name, FIELDS)
        part, _, field_name = name.rpartition(".")
        return getattr(getattr(self, part) if part else self, field_name)

    # Changes and JSON ------------------------------------------------------------------------------------------------

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some fields changed; a dict changes only the named fields of a nested dataclass.

        >>> vit_spec.get("vit_s16").replace(num_classes=10, norms={"eps": 1e-5})

        Raises:
            InputError: an unknown field or an invalid value.
        """
        for name, value in changes.items():
            if name in PARTS and isinstance(value, dict):
                _check_field_names(value, name)
                changes[name] = dataclasses.replace(getattr(self, name), **value)
        _check_field_names(changes)
        return dataclasses.replace(self, **changes)

    def with_fields(self, fields: Mapping[str, Any]) -> Self:
        """Return a copy with some fields changed; fields of nested dataclasses are dotted, as in {"norms.eps": 1e-5}.

        Raises:
            InputError: an unknown field or an invalid value.
        """
        return self.replace(**_nest_fields(fields))

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Return the config with these fields, dotted as in "norms.eps"; omitted fields take their defaults.

        Raises:
            InputError: a required field is missing, a field is unknown, or a value is invalid.
        """
        return cls._from_nested(_nest_fields(fields))

    def to_json(self) -> str:
        """Return all fields as one line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Return the config that `to_json` wrote; omitted fields take their defaults.

        Raises:
            InputError: the text is not JSON, lacks a required key, or has an unknown key or an invalid value.
        """
        try:
            fields = bounded_json.parse(text)
        except InputError as error:
            raise InputError(f"the config cannot be read ({error}): give the output of ViTConfig.to_json()") from None
        if not isinstance(fields, dict):
            raise InputError(
                f"the config is a JSON {type(fields).__name__}: expected an object with the fields of ViTConfig"
            )
        return cls._from_nested(fields)

    @classmethod
    def _from_nested(cls, fields: dict[str, Any]) -> Self:
        """Return the config with these fields; those of a nested dataclass are a dict."""
        _check_field_names(fields)
        if missing := [f.name for f in dataclasses.fields(cls) if f.name not in fields and _is_required(f)]:
            raise InputError(f"required config fields are missing: add {', '.join(missing)}")
        for name, value in fields.items():
            if name in PARTS:
                if not isinstance(value, dict):
                    raise InputError(f"{name} is {value!r}: expected an object with the fields of {PARTS[name].__name__}")
                _check_field_names(value, name)
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


def check_config(config: object) -> None:
    """Raise InputError unless the argument is a config, and not, for example, the name of a model."""
    name = config if isinstance(config, str) else "vit_b16"
    require_type("config is", config, ViTConfig, example=f"vit_spec.get({name!r})")


def coerce_field(name: str, value: Any) -> Any:
    """Return a value converted to the type of a field; fields of nested dataclasses are dotted, as in "norms.eps".

    A single integer for image_size or patch_size becomes a square.

    Raises:
        InputError: there is no such field, or the value has another type.
    """
    if name not in FIELDS:
        raise _unknown_field(name, FIELDS)
    part, _, field_name = name.rpartition(".")
    annotation = typing.get_type_hints(PARTS[part] if part else ViTConfig)[field_name]
    if name in ("image_size", "patch_size") and isinstance(value, numbers.Integral):
        value = (value, value)
    return coerce(name, value, annotation)


def _is_required(f: dataclasses.Field[Any]) -> bool:
    return f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING


def _nest_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return dotted fields nested, as `ViTConfig.replace` takes them: {"norms.eps": 1e-5} as {"norms": {"eps": 1e-5}}.

    Raises:
        InputError: an unknown field.
    """
    nested: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in FIELDS:
            raise _unknown_field(name, FIELDS)
        part, _, field_name = name.rpartition(".")
        if part:
            nested.setdefault(part, {})[field_name] = value
        else:
            nested[name] = value
    return nested


def _check_field_names(given: Iterable[str], part: str = "") -> None:
    """Raise InputError for a name that is not a field of the config, or of a nested dataclass of it."""
    names = _field_names(part)
    for name in given:
        if name not in names:
            raise _unknown_field(name, names, part)


def _unknown_field(name: str, known: Sequence[str], part: str = "") -> InputError:
    """Return the error for a name that is not among the `known` ones.

    part: the field with the nested dataclass whose fields are known; "" for the config itself.
    """
    hint = nearest(name, known) or f"; the fields are {', '.join(_field_names(part))}"
    return InputError(f"unknown config field {f'{part}.' if part else ''}{name}{hint}")


def _field_names(part: str) -> list[str]:
    return [f.name for f in dataclasses.fields(PARTS[part] if part else ViTConfig)]
