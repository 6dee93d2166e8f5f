"""Mixup (arXiv 1710.09412) and CutMix (arXiv 1905.04899): how a batch is to be mixed with itself."""

import sys
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from train.recipes.augmentation import Augment


class Mix(NamedTuple):
    """How to mix a batch with its partner, the same batch rolled by one, or by as many as an image is repeated in a row.

    images: the partner's inside `box`, weight * own + (1 - weight) * partner's outside it.
    targets: share * own + (1 - share) * partner's.

    weight () float32; box (4,) int32, top, left, bottom, right in pixels, the last two exclusive; share () float32, the
    part of the picture that is still the image's own.
    """

    weight: np.float32
    box: NDArray[np.int32]
    share: np.float32


def mix(options: Augment, size: tuple[int, int], rng: np.random.Generator) -> Mix:
    """Draw how a batch of images of `size` (height, width) is mixed: one draw for all of it.

    mixup: the weight is a = Beta(mixup, mixup), or 1 - a if that is more, so that an image stays mostly itself (big_vision,
    big_vision/utils.py).  cutmix: a rectangle of the image's shape and 1 - Beta(cutmix, cutmix) of its area about a pixel
    drawn at random; what lies outside the image is lost, and the share is what was kept in truth.  With both, one of
    the two, each half of the time (timm's switch_prob).  With neither nothing is mixed.
    """
    which, y, x = rng.random(3).tolist()
    nothing = np.zeros(4, np.int32)
    if options.cutmix and (not options.mixup or which < 0.5):
        return _cut(rng.beta(options.cutmix, options.cutmix), size, y, x)
    if options.mixup:
        drawn = rng.beta(options.mixup, options.mixup)
        weight = np.float32(max(drawn, 1 - drawn))
        return Mix(weight, nothing, weight)
    return Mix(np.float32(1), nothing, np.float32(1))


def mixed_images(mix: Mix, images: Any, others: Any) -> Any:
    """Return images (B, H, W, C) with their partners mixed in.

    Arrays of numpy, of jax (also while they are traced) or of torch, on any device; of torch, those of `mix` too.
    """
    top, left, bottom, right = mix.box
    if hasattr(images, "__array_namespace__"):
        xp, where = images.__array_namespace__(), {}
    else:
        xp, where = sys.modules["torch"], {"device": images.device}
    y, x = xp.arange(images.shape[1], **where)[:, None], xp.arange(images.shape[2], **where)
    inside = ((top <= y) & (y < bottom) & (left <= x) & (x < right))[..., None]
    return xp.where(inside, others, mix.weight * images + (1 - mix.weight) * others)


def mixed_targets(mix: Mix, targets: Any, others: Any) -> Any:
    """Return targets (B, outputs) with their partners' mixed in."""
    return mix.share * targets + (1 - mix.share) * others


def _cut(kept: float, size: tuple[int, int], y: float, x: float) -> Mix:
    """Return the CutMix of a rectangle about (y, x), shares of the sides, that is to leave `kept` of the area."""
    extent, centre = (int(side * (1 - kept) ** 0.5) for side in size), (int(y * size[0]), int(x * size[1]))
    starts, ends = [], []
    for at, length, side in zip(centre, extent, size, strict=True):
        start = at - length // 2
        starts.append(max(start, 0))
        ends.append(min(start + length, side))
    area = (ends[0] - starts[0]) * (ends[1] - starts[1])
    return Mix(np.float32(1), np.array(starts + ends, np.int32), np.float32(1 - area / (size[0] * size[1])))
