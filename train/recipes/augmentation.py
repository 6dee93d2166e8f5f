"""The augmentation options of a recipe: one frozen dataclass in which everything is off by default."""

from dataclasses import dataclass
from typing import Literal

from train.recipes.fields import FieldError, format_value

Crop = Literal["fit", "inception", "resized", "simple"]
Filter = Literal["bilinear", "bicubic", "lanczos", "box", "bilinear_aliased"]


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Augmentation of training images, new in every epoch; and the resizing of held-out images, which are not augmented."""

    crop: Crop = "fit"
    """The crop. fit: the centre, as for held-out images. inception: a random part (TensorFlow's rule). resized: a random
    part (torchvision's rule). simple: resized to cover, padded by 4 pixels, a random position (DeiT-III)."""
    crop_area: tuple[float, float] = (0.05, 1.0)
    """Smallest and largest share of the image's area in an inception or resized crop."""
    filter: Filter = "bicubic"
    """The resizing filter. All of them antialias when they shrink, except bilinear_aliased, which is TensorFlow's."""
    rotate: float = 0.0
    """Rotate by up to this many degrees in either direction."""
    shift: float = 0.0
    """Shift by up to this share of the image's sides in each direction."""
    scale: float = 1.0
    """Enlarge or shrink by up to this factor; 1: no change."""
    flip: bool = False
    """Flip horizontally with probability 0.5. Not for digits or letters."""
    randaugment: tuple[int, int] | None = None
    """RandAugment: the number of operations, of sixteen, and their magnitude; big_vision uses 2 10."""
    three_augment: bool = False
    """One of greyscale, solarize or Gaussian blur (DeiT-III)."""
    jitter: float = 0.0
    """Colour jitter: change brightness, contrast and saturation by up to this share in either direction."""
    erase: float = 0.0
    """Random erasing: probability that a rectangle is overwritten with noise; DeiT uses 0.25."""
    mixup: float = 0.0
    """Mixup: parameter of the Beta distribution of the mixing weight; big_vision uses 0.2. 0: off."""
    cutmix: float = 0.0
    """CutMix: parameter of the Beta distribution of the box's area. 0: off. With mixup, each has half of the batches."""

    repeats: int = 1
    """Repeated augmentation (DeiT): use each image N times in a row, augmented anew; an epoch then covers one Nth of the
    images."""
    held_out_filter: Filter = "bicubic"
    """The resizing filter of held-out images."""
    share: float = 1.0
    """Share of each side in the centre crop of held-out images: 0.875 crops 224 pixels out of 256."""

    def __post_init__(self) -> None:
        low, high = self.crop_area
        count, magnitude = self.randaugment or (1, 0)
        for name, is_valid, expected in (
            ("crop_area", 0 < low <= high <= 1, "two shares, the smaller first, above 0 and up to 1"),
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
            if not is_valid:
                raise FieldError(f"augment.{name}", f" is {format_value(getattr(self, name))}: give {expected}")

    @property
    def mixes(self) -> bool:
        """Whether mixup or CutMix is on."""
        return bool(self.mixup or self.cutmix)
