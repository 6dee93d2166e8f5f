"""How an image becomes the pixels that a model was trained to see: sizes only, so that any library of images can do it.

An image is resized, then a part is cut out of its middle.  The libraries that people use differ in how they round, by a
pixel, and each rule is here: `shortest` is torchvision's Resize of one number, which timm and transformers use; `cover` and
`border` are timm's ResizeKeepRatio; the corner of the crop is rounded half to even by torchvision and timm, and down by
transformers.

Sources: torchvision/transforms/functional.py, huggingface/pytorch-image-models 1.0.31 timm/data/transforms.py,
huggingface/transformers 5.23 image_processing_backends.py.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from vit_spec import InputError, bounded_json

Size = tuple[int, int]  # (height, width) in pixels
Resize = Literal["shortest", "cover", "squash", "border", "none"]
Filter = Literal["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming", "bilinear_aliased"]
Rounding = Literal["even", "down"]

LARGEST = 1 << 14  # pixels of a side; larger ones are mistakes


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """Preparation of one image; what comes out is 8 bits a channel, and `ViTConfig.pixels` normalizes it.

    size: height and width of what comes out.
    resize: how the image is resized first.  shortest: its shorter side to that of `resized`.  cover: it keeps its shape and
        is the smallest that covers `resized`.  squash: to `resized`, whatever its shape.  border: it keeps its shape and is
        the largest within `resized`.  none: it stays.
    resized: height and width in pixels.
    filter: of the resizing; all smooth before they shrink but `nearest` and `bilinear_aliased`, which is TensorFlow's.
    rounding: of the corner at which `size` is cut out of the middle, where that is no whole pixel.

    Where the resized image is smaller than `size` it is padded: with zeros, after `border` with the mean colour.

    Raises:
        InputError: a field of another type or out of range.
    """

    size: Size
    resize: Resize
    resized: Size
    filter: Filter = "bicubic"
    rounding: Rounding = "even"

    def __post_init__(self) -> None:
        for name in ("size", "resized"):
            value = getattr(self, name)
            if not _is_size(value):
                raise InputError(f"preprocessing.{name} is {value!r}: give a height and a width from 1 to {LARGEST}")
            object.__setattr__(self, name, tuple(value))
        for name, kind in (("resize", Resize), ("filter", Filter), ("rounding", Rounding)):
            if (value := getattr(self, name)) not in get_args(kind):
                raise InputError(f"preprocessing.{name} is {value!r}: give one of {', '.join(get_args(kind))}")

    @property
    def crops(self) -> bool:
        """Whether some images lose or gain pixels after the resizing."""
        return self.resize != "squash" or self.resized != self.size

    @property
    def shifted(self) -> Literal["all", "some", "no"]:
        """Which images the other `rounding` would cut a pixel aside: those where half of an odd margin is not even."""
        fixed = [whole - part for whole, part in zip(self.resized, self.size, strict=True)]
        if self.resize == "squash":
            return "all" if any(margin > 0 and margin % 4 == 3 for margin in fixed) else "no"
        margins = {min(self.resized) - part for part in self.size}
        return "all" if self.resize == "shortest" and all(m > 0 and m % 4 == 3 for m in margins) else "some"

    @property
    def pads_unevenly(self) -> bool:
        """Whether some images gain an odd number of rows or columns when they are cut: half of it is no whole pixel."""
        margins = [part - whole for part, whole in zip(self.size, self.resized, strict=True)]
        if self.resize in ("squash", "border"):
            return any(margin > 0 and margin % 2 == 1 for margin in margins)
        return self.resize == "none" or min(self.resized) < max(self.size)

    def resized_to(self, height: int, width: int) -> Size:
        """Return the size that an image of this size is resized to."""
        match self.resize:
            case "none":
                return height, width
            case "squash":
                return self.resized
            case "shortest":
                side = min(self.resized)
                long = int(side * max(height, width) / min(height, width))
                return (long, side) if width <= height else (side, long)
        ratios = height / self.resized[0], width / self.resized[1]
        ratio = max(ratios) if self.resize == "border" else min(ratios)
        return max(1, round(height / ratio)), max(1, round(width / ratio))

    def corner(self, height: int, width: int) -> Size:
        """Return the row and column of a resized image at which the crop begins; negative where it is padded."""
        return _first(height, self.size[0], self.rounding), _first(width, self.size[1], self.rounding)

    def at(self, size: Size) -> Self:
        """Return the same preparation for images of another size: the same part of each image is seen."""
        height, width = (max(1, now * old // was) for old, was, now in zip(self.resized, self.size, size, strict=True))
        return dataclasses.replace(self, size=size, resized=(height, width))

    def to_json(self) -> str:
        """Return the fields as one line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return what `to_json` wrote.

        Raises:
            InputError: something else.
        """
        try:
            return cls(**bounded_json.parse_object(text))
        except TypeError as error:
            raise InputError(f"its note on preprocessing cannot be read ({error}): take the note out") from None

    def __str__(self) -> str:
        if self.resize == "none":
            return f"not resized, {_by(self.size)} out of the middle"
        how = {
            "shortest": f"shorter side to {min(self.resized)}",
            "cover": f"resized to cover {_by(self.resized)}",
            "squash": f"resized to {_by(self.resized)} whatever the shape",
            "border": f"resized to lie within {_by(self.resized)}, with a border",
        }[self.resize]
        cut = f", then {_by(self.size)} out of the middle" if self.crops else ""
        return f"{how} ({self.filter}){cut}"


def central(size: Size, share: float = 1.0, filter: Filter = "bicubic") -> Preprocessing:
    """Return timm's preparation: resized to cover size / share, rounded down, and cut to `size`; share is its crop_pct."""
    resized = floored(size, share)
    return Preprocessing(
        size=size, resize="shortest" if resized[0] == resized[1] else "cover", resized=resized, filter=filter
    )


def floored(size: Size, share: float) -> Size:
    """Return the size of which `size` is a share."""
    return math.floor(size[0] / share), math.floor(size[1] / share)


def share(size: Size, resized: Size) -> float | None:
    """Return the share with the fewest digits by which `floored` makes `resized` of `size`; None where there is none."""
    guesses = [part / (whole + more) for part, whole in zip(size, resized, strict=True) for more in (0, 0.5)]
    for digits in range(1, 17):
        for found in (round(guess, digits) for guess in guesses):
            if found > 0 and floored(size, found) == resized:
                return found
    return None


def _first(length: int, wanted: int, rounding: Rounding) -> int:
    if wanted > length:
        return -((wanted - length) // 2)
    return round((length - wanted) / 2) if rounding == "even" else (length - wanted) // 2


def _is_size(value: Any) -> bool:
    return (
        isinstance(value, (tuple, list))
        and len(value) == 2
        and all(type(side) is int and 1 <= side <= LARGEST for side in value)
    )


def _by(size: Size) -> str:
    return f"{size[0]}x{size[1]}"
