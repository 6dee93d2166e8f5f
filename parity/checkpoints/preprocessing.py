"""Image preprocessing: the resize and the center crop before normalization, as sizes that any image library can apply.

An image is resized, then cropped or padded around its center.  Libraries round sizes differently, so that the results
differ by a pixel.  This module has the rule of each library.  `shortest` is torchvision's Resize with one number, which
timm and transformers use.  `cover` and `border` are timm's ResizeKeepRatio.  The corner of the crop is rounded half to even
by torchvision and timm, and down by transformers.

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

# crop_pct of timm's models.  Of a small image, several shares give the same size, so these come before all others.
_TIMM_SHARES = (1.0, 0.875, 0.9, 0.95, 0.96, 0.965, 0.94, 0.89, 0.8)
MAX_SIDE = 1 << 14  # pixels; a larger side is a mistake


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """Preprocessing of one image, to 8 bits per channel; `ViTConfig.pixels` then normalizes it.

    A resized image that is smaller than `size` is padded with zeros, or after "border" with the mean colour.

    Attributes:
        size: height and width of the result, in pixels.
        resize: how the image is resized first.
            "shortest": its shorter side becomes that of `resized`; the aspect ratio stays.
            "cover": to the smallest size that covers `resized`; the aspect ratio stays.
            "squash": to `resized`, whatever the aspect ratio.
            "border": to the largest size within `resized`; the aspect ratio stays.
            "none": not at all.
        resized: height and width for the resize, in pixels.
        filter: the resampling filter.  All filters antialias except `nearest` and `bilinear_aliased`, which is
            TensorFlow's.
        rounding: how the corner of the center crop is rounded to a whole pixel: "even" rounds half to even, "down" rounds
            down.

    Raises:
        InputError: a field has a wrong type or is out of range.
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
                raise InputError(f"preprocessing.{name} is {value!r}: give a height and a width from 1 to {MAX_SIDE}")
            object.__setattr__(self, name, tuple(value))
        for name, kind in (("resize", Resize), ("filter", Filter), ("rounding", Rounding)):
            if (value := getattr(self, name)) not in get_args(kind):
                raise InputError(f"preprocessing.{name} is {value!r}: give one of {', '.join(get_args(kind))}")

    @property
    def crops_or_pads(self) -> bool:
        """Whether some images are cropped or padded after the resize."""
        return self.resize != "squash" or self.resized != self.size

    @property
    def affected_by_rounding(self) -> Literal["all", "some", "no"]:
        """Which images the other `rounding` would crop one pixel off: images where half of an odd margin rounds up."""
        fixed_margins = [whole - part for whole, part in zip(self.resized, self.size, strict=True)]
        if self.resize == "squash":
            return "all" if any(margin > 0 and margin % 4 == 3 for margin in fixed_margins) else "no"
        margins = {min(self.resized) - part for part in self.size}
        return "all" if self.resize == "shortest" and all(m > 0 and m % 4 == 3 for m in margins) else "some"

    @property
    def has_odd_padding(self) -> bool:
        """Whether some images are padded by an odd number of rows or columns, which cannot be the same on both sides."""
        margins = [part - whole for part, whole in zip(self.size, self.resized, strict=True)]
        if self.resize in ("squash", "border"):
            return any(margin > 0 and margin % 2 == 1 for margin in margins)
        return self.resize == "none" or min(self.resized) < max(self.size)

    def resized_to(self, height: int, width: int) -> Size:
        """Return the (height, width) that an image of this size is resized to."""
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

    def crop_corner(self, height: int, width: int) -> Size:
        """Return the row and column of a resized image at which the crop begins; negative if it is padded."""
        return _crop_start(height, self.size[0], self.rounding), _crop_start(width, self.size[1], self.rounding)

    def for_size(self, size: Size) -> Self:
        """Return the same preprocessing for another result size: it shows the same share of each image.

        `resized` is what timm computes from the share of its models that gives the present one; else it is in proportion.
        """
        shares = _TIMM_SHARES if self.rounding == "even" else ()
        share = next((share for share in shares if size_before_crop(self.size, share) == self.resized), None)
        if share is None:
            sides = zip(self.resized, self.size, size, strict=True)
            height, width = (max(1, round(now * old / was)) for old, was, now in sides)
        else:
            height, width = size_before_crop(size, share)
        # "shortest" would not cover a result of another aspect ratio.
        resize = _covering_resize((height, width)) if self.resize in ("shortest", "cover") else self.resize
        return dataclasses.replace(self, size=size, resize=resize, resized=(height, width))

    def to_json(self) -> str:
        """Return the fields as one line of JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the text that `to_json` returns.

        Raises:
            InputError: the text is something else.
        """
        try:
            return cls(**bounded_json.parse_object(text))
        except TypeError as error:
            raise InputError(f"the metadata entry preprocessing cannot be read ({error}): remove the entry") from None

    def __str__(self) -> str:
        if self.resize == "none":
            return f"not resized, center crop {_format_size(self.size)}"
        how = {
            "shortest": f"shorter side resized to {min(self.resized)}",
            "cover": f"resized to cover {_format_size(self.resized)}",
            "squash": f"resized to {_format_size(self.resized)} regardless of the aspect ratio",
            "border": f"resized to fit within {_format_size(self.resized)}, with a border",
        }[self.resize]
        cut = f", then center crop {_format_size(self.size)}" if self.crops_or_pads else ""
        return f"{how} ({self.filter}){cut}"


def center_crop(size: Size, share: float = 1.0, filter: Filter = "bicubic") -> Preprocessing:
    """Return timm's preprocessing: a resize to cover size / share, rounded down, and a center crop of `size`.

    Args:
        size: (height, width) of the result, in pixels.
        share: timm's crop_pct, the fraction of the resized image's height and width that the crop keeps.
        filter: the resampling filter of the resize.
    """
    resized = size_before_crop(size, share)
    return Preprocessing(size=size, resize=_covering_resize(resized), resized=resized, filter=filter)


def size_before_crop(size: Size, share: float) -> Size:
    """Return size / share, rounded down: the size to resize to before a crop of `size`."""
    return math.floor(size[0] / share), math.floor(size[1] / share)


def _covering_resize(resized: Size) -> Resize:
    """Return how timm resizes an image to cover `resized`: its two rules round the longer side differently."""
    return "shortest" if resized[0] == resized[1] else "cover"


def infer_share(size: Size, resized: Size) -> float | None:
    """Return the share with the fewest digits for which `size_before_crop` gives `resized`; None if there is none."""
    guesses = [part / (whole + more) for part, whole in zip(size, resized, strict=True) for more in (0, 0.5)]
    for digits in range(1, 17):
        for found in (round(guess, digits) for guess in guesses):
            if found > 0 and size_before_crop(size, found) == resized:
                return found
    return None


def _crop_start(length: int, wanted: int, rounding: Rounding) -> int:
    """Return the first pixel of a center crop of `wanted` pixels out of `length`."""
    if wanted > length:
        return -((wanted - length) // 2)
    return round((length - wanted) / 2) if rounding == "even" else (length - wanted) // 2


def _is_size(value: Any) -> bool:
    return (
        isinstance(value, (tuple, list))
        and len(value) == 2
        and all(type(side) is int and 1 <= side <= MAX_SIDE for side in value)
    )


def _format_size(size: Size) -> str:
    return f"{size[0]}x{size[1]}"
