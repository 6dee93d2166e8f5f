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
from typing import Any, Self

from vit_spec import bounded_json
from vit_spec.errors import InputError, nearest, require
from vit_spec.parts import Attention, Head, Mlp, Norms, Pixels, Positions, Regularisation, Resampling, Tokens
from vit_spec.typed_fields import check_types, coerced


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
        check_types(self, "")
        self._check_values()

    def _check_values(self) -> None:
        """Raise InputError for values out of range and values that contradict each other, saying what to change."""
        for name in ("in_channels", "width", "depth", "num_heads", "mlp_dim"):
            require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}: give a positive number")
        for name in ("image_size", "patch_size"):
            require(min(getattr(self, name)) > 0, f"{name} is {getattr(self, name)}: give positive numbers of pixels")
        require(self.num_classes >= 0, f"num_classes is {self.num_classes}: give the number of outputs, or 0 for features")
        self.grid_of(*self.image_size)
        class_token = self.tokens.class_token
        self.pixels.check(in_channels=self.in_channels)
        self.tokens.check()
        self.attention.check(width=self.width, num_heads=self.num_heads)
        self.positions.check(width=self.width, head_dim=self.head_dim, class_token=class_token)
        self.resampling.check()
        self.norms.check()
        self.head.check(class_token=class_token, distillation=self.tokens.distillation)
        self.regularisation.check()

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
