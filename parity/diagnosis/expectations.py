"""What the outputs should be: read from a file, or computed by a model that is known to be right."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from parity import containers
from parity.layout import Array
from parity.measures import TRAJECTORY, Budget
from vit_spec import InputError, ViTConfig

IMAGES, LOGITS = "images", "logits"
PART = re.compile(
    r"(patch_embed|tokens|positions|embed|blocks\.\d+|norm_pre|norm|pool|attn_pool|fc_norm|pre_logits|head)\b.*"
)


@dataclass(frozen=True)
class Expected:
    """Images, and what a right model makes of them.

    images: (B, C, H, W), float64, in [0, 1] or normalised.
    normalised: which of the two.
    logits: float64, (B, num_classes), or whatever the config's head gives.
    dtype: the narrowest type that holds every entry of the logits.
    intermediates: named as `vit_torch.intermediates` names them.
    remarks: how the file was read.
    """

    images: Array = field(repr=False)
    normalised: bool
    logits: Array = field(repr=False)
    dtype: str
    intermediates: dict[str, Array] = field(default_factory=dict, repr=False)
    remarks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.images)

    @property
    def bar(self) -> float:
        """The relRMS within which a model of the same function is: what the type of the logits allows.

        In float64 two models part by 1e-15 or so, and 1e-10 leaves room for functions that amplify it.
        """
        return TRAJECTORY if self.dtype == "float64" else Budget(self.dtype).bar

    def first(self, count: int) -> "Expected":
        """Return the first images alone."""
        intermediates = {name: array[:count] for name, array in self.intermediates.items()}
        return replace(self, images=self.images[:count], logits=self.logits[:count], intermediates=intermediates)


def read(path: str | Path, config: ViTConfig) -> Expected:
    """Read an .npz file of `images` and `logits`.

    Images are pixels where they are uint8 or all lie in [0, 1], and normalised otherwise; (B, H, W, C) or (B, C, H, W).
    Arrays that are named as intermediates of the twins are kept, others left out, which `remarks` says.

    Raises:
        InputError: no such file, a damaged one, or arrays that are not this config's.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"no file {path}: give an .npz file with {IMAGES!r} and {LOGITS!r}")
    stored = {".".join(words): array for words, array in containers.open(path).arrays.items()}
    for name in (IMAGES, LOGITS):
        if name not in stored:
            there = f"it holds {', '.join(stored)}" if stored else "it is empty"
            raise InputError(f"{path} has no {name!r} ({there}): write numpy.savez(path, images=..., logits=...)")
    arrays = {name: np.asarray(array) for name, array in stored.items() if name in (IMAGES, LOGITS) or PART.fullmatch(name)}
    left = [name for name in stored if name not in arrays]
    try:
        found = expected(arrays.pop(IMAGES), arrays.pop(LOGITS), config, arrays)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    remarks = (f"{', '.join(left)} in {path.name}: left out",) if left else ()
    return replace(found, remarks=(*found.remarks, *remarks))


def expected(images: Any, logits: Any, config: ViTConfig, intermediates: dict[str, Any] | None = None) -> Expected:
    """Return arrays as what is expected of a config's model.

    Raises:
        InputError: images or outputs that are not this config's, or not finite.
    """
    pictures, remarks = _images(np.asarray(images), config)
    answers = np.asarray(logits)
    for name, array in {IMAGES: pictures, LOGITS: answers}.items():
        if not np.isfinite(array.astype(np.float64)).all():
            count = int((~np.isfinite(array.astype(np.float64))).sum())
            raise InputError(f"{name} have {count} entries that are NaN or infinite: make them again without")
    if len(answers) != len(pictures):
        raise InputError(f"{len(pictures)} images and {len(answers)} rows of logits: give one row for each image")
    if config.num_classes and answers.shape[-1] != config.num_classes:
        raise InputError(
            f"logits have shape {answers.shape}: the model of the weights gives {config.num_classes} for each image"
        )
    normalised = not (pictures.min(initial=0) >= 0 and pictures.max(initial=0) <= 1)
    inner = {name: np.asarray(array, np.float64) for name, array in (intermediates or {}).items()}
    kind = narrowest(answers)
    said = "normalised" if normalised else "pixels"
    return Expected(pictures, normalised, answers.astype(np.float64), kind, inner, (f"images are {said}", *remarks))


def _images(images: Array, config: ViTConfig) -> tuple[Array, tuple[str, ...]]:
    """Return images as (B, C, H, W) in float64, pixels in [0, 1]."""
    c = config.in_channels
    if images.ndim != 4 or c not in (images.shape[1], images.shape[3]) or not len(images):
        raise InputError(f"images have shape {images.shape}: expected (B, H, W, {c}) or (B, {c}, H, W), one image at least")
    last = images.shape[3] == c
    if last and images.shape[1] == c:
        last = next(_fitting(images.shape, config))
    images = images.transpose(0, 3, 1, 2) if last else images
    config.grid_of(*images.shape[2:])
    order = "channels last" if last else "channels first"
    if images.dtype.kind in "ui":
        return images / np.iinfo(np.uint8).max, (order,)
    return images.astype(np.float64), (order,)


def _fitting(shape: tuple[int, ...], config: ViTConfig) -> Iterator[bool]:
    """Whether channels are last, of images for which their number alone does not tell."""
    if shape[2:4] == config.image_size != shape[1:3]:
        yield False
    if shape[1:3] == config.image_size != shape[2:4]:
        yield True
    raise InputError(f"images have shape {shape}: where their channels are cannot be told; give images of another size")


def narrowest(logits: Array) -> str:
    """Return the narrowest type that holds every entry: outputs that were computed in it and written in a wider one."""
    import ml_dtypes

    wide = logits.astype(np.float64)
    types: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
    with np.errstate(over="ignore"):
        held = (name for name, kind in types.items() if np.array_equal(wide.astype(kind).astype(np.float64), wide))
        return next(held, "float64")
