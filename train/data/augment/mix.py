"""Mixup (arXiv 1710.09412) and CutMix (arXiv 1905.04899) of a batch with a rolled copy of itself."""

import sys
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from train.recipes.augmentation import Augment


class Mix(NamedTuple):
    """The parameters of mixing a batch with its partner: the same batch, rolled by one or by the number of repeats.

    images: the partner's pixels inside `box`, and weight * own + (1 - weight) * partner's outside it.
    targets: share * own + (1 - share) * partner's.

    weight: () float32.
    box: (4,) int32: top, left, bottom, right in pixels, the last two exclusive.
    share: () float32, the share of the mixed image that comes from the image itself.
    """

    weight: np.float32
    box: NDArray[np.int32]
    share: np.float32


def sample_mix(options: Augment, size: tuple[int, int], rng: np.random.Generator) -> Mix:
    """Draw one mix for a whole batch of images of `size` (height, width).

    mixup: the weight is a = Beta(mixup, mixup) or 1 - a, whichever is larger, so an image mostly stays itself (big_vision,
    big_vision/utils.py).  cutmix: the box has the image's aspect ratio and 1 - Beta(cutmix, cutmix) of its area, about a
    random pixel; it is clipped to the image, and the share is the area that is really kept.  With both, each is used for
    half of the batches (timm's switch_prob).  With neither, nothing is mixed.
    """
    which, y, x = rng.random(3).tolist()
    empty = np.zeros(4, np.int32)
    if options.cutmix and (not options.mixup or which < 0.5):
        return _cutmix(rng.beta(options.cutmix, options.cutmix), size, y, x)
    if options.mixup:
        draw = rng.beta(options.mixup, options.mixup)
        weight = np.float32(max(draw, 1 - draw))
        return Mix(weight, empty, weight)
    return Mix(np.float32(1), empty, np.float32(1))


def mix_images(mix: Mix, images: Any, others: Any) -> Any:
    """Return images (B, H, W, C) mixed with their partners.

    Arrays are of numpy, of jax (traced or not) or of torch, on any device; with torch, the fields of `mix` are tensors too.
    """
    top, left, bottom, right = mix.box
    if hasattr(images, "__array_namespace__"):
        xp, where = images.__array_namespace__(), {}
    else:
        xp, where = sys.modules["torch"], {"device": images.device}
    y, x = xp.arange(images.shape[1], **where)[:, None], xp.arange(images.shape[2], **where)
    inside = ((top <= y) & (y < bottom) & (left <= x) & (x < right))[..., None]
    return xp.where(inside, others, mix.weight * images + (1 - mix.weight) * others)


def mix_targets(mix: Mix, targets: Any, others: Any) -> Any:
    """Return targets (B, outputs) mixed with their partners'."""
    return mix.share * targets + (1 - mix.share) * others


def _cutmix(share: float, size: tuple[int, int], y: float, x: float) -> Mix:
    """Return the CutMix of a box around (y, x).

    share: the area outside of the box as a share of the image, before the box is clipped to the image.
    y, x: the centre of the box, as shares of the sides.
    """
    extent, centre = (int(side * (1 - share) ** 0.5) for side in size), (int(y * size[0]), int(x * size[1]))
    starts, ends = [], []
    for at, length, side in zip(centre, extent, size, strict=True):
        start = at - length // 2
        starts.append(max(start, 0))
        ends.append(min(start + length, side))
    area = (ends[0] - starts[0]) * (ends[1] - starts[1])
    return Mix(np.float32(1), np.array(starts + ends, np.int32), np.float32(1 - area / (size[0] * size[1])))
