"""What may be done to a training image, and to a batch of them: one frozen dataclass, everything off unless asked for."""

from dataclasses import dataclass
from typing import Literal

from vit_spec import InputError

Crop = Literal["fit", "inception", "resized", "simple"]
Filter = Literal["bilinear", "bicubic", "lanczos", "box", "bilinear_aliased"]


@dataclass(frozen=True, kw_only=True)
class Augment:
    """How training images are varied each time they are shown. Held-out images never are."""

    crop: Crop = "fit"
    """What is cut out. fit: the middle, as of held-out images. inception: a random part (TensorFlow's rule). resized: a
    random part (torchvision's rule). simple: resized to cover, padded by 4 pixels, cut at random (DeiT-III)."""
    crop_area: tuple[float, float] = (0.05, 1.0)
    """Least and greatest share of the image's area that an inception or resized crop keeps."""
    filter: Filter = "bicubic"
    """How the cut is brought to size. All smooth before they shrink, but bilinear_aliased, which is TensorFlow's."""
    rotate: float = 0.0
    """Turned by up to this many degrees either way."""
    shift: float = 0.0
    """Moved by up to this share of the image's sides in each direction."""
    scale: float = 1.0
    """Grown or shrunk by up to this factor; 1 leaves the size alone."""
    flip: bool = False
    """Mirrored left to right half of the time. Not for digits or letters."""
    randaugment: tuple[int, int] | None = None
    """RandAugment: how many of its sixteen operations, and their magnitude; big_vision's is 2 10."""
    three_augment: bool = False
    """One of grey, solarized or blurred (DeiT-III)."""
    jitter: float = 0.0
    """Brightness, contrast and saturation changed by up to this share either way."""
    erase: float = 0.0
    """Probability that a rectangle is overwritten with noise; DeiT's is 0.25."""
    mixup: float = 0.0
    """Parameter of the Beta distribution by which each image is mixed with another; big_vision's is 0.2."""
    cutmix: float = 0.0
    """Parameter of the Beta distribution by which a rectangle comes from another image; with mixup, one or the other."""

    repeats: int = 1
    """How often an image is shown in a row, each time varied anew; an epoch then shows 1 of so many images (DeiT)."""
    held_out_filter: Filter = "bicubic"
    """How held-out images are brought to size."""
    share: float = 1.0
    """Part of each side that held-out images keep: 0.875 cuts 224 pixels out of 256."""

    def __post_init__(self) -> None:
        low, high = self.crop_area
        count, magnitude = self.randaugment or (1, 0)
        for name, holds, wanted in (
            ("crop_area", 0 < low <= high <= 1, "two shares, the lesser first, above 0 and up to 1"),
            ("rotate", 0 <= self.rotate <= 180, "degrees from 0 to 180"),
            ("shift", 0 <= self.shift < 1, "a share from 0 up to 1"),
            ("scale", 1 <= self.scale < float("inf"), "a factor of 1 or more"),
            ("randaugment", count > 0 and 0 <= magnitude <= 30, "1 or more operations, and a magnitude from 0 to 30"),
            ("repeats", self.repeats > 0, "1 or more"),
            ("share", 0 < self.share <= 1, "a share above 0 and up to 1"),
            ("jitter", 0 <= self.jitter <= 1, "a share from 0 to 1"),
            ("erase", 0 <= self.erase <= 1, "a probability from 0 to 1"),
            ("mixup", 0 <= self.mixup < float("inf"), "0, or a positive number"),
            ("cutmix", 0 <= self.cutmix < float("inf"), "0, or a positive number"),
        ):
            if not holds:
                raise InputError(f"augment.{name} is {getattr(self, name)}: give {wanted}")

    @property
    def mixes(self) -> bool:
        """Whether images of a batch are mixed with each other."""
        return bool(self.mixup or self.cutmix)
