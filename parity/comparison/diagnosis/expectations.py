"""What the outputs should be: read from a file, or computed by a model that is known to be right."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from parity.checkpoints import containers, reading
from parity.checkpoints.config_inference import Assumption
from parity.checkpoints.formats import Fields
from parity.checkpoints.layout import Array
from parity.checkpoints.reading import Source
from parity.checkpoints.weights import Checkpoint
from parity.comparison.diagnosis.precision import Written, narrowest, written
from parity.comparison.tolerances import TRAJECTORY, Budget
from vit_spec import InputError, ViTConfig

IMAGES, LOGITS = "images", "logits"
LARGEST = 1e100  # of a number that can be judged: beyond, products of a few are no float64
AS_SHOWN = "as the expected images are"  # why a size is assumed
PART = re.compile(
    r"(patch_embed|tokens|positions|cosines|sines|embed|blocks\.\d+|norm_pre|norm|pool|attn_pool|fc_norm|pre_logits|"
    r"hidden|head|head_dist)\b.*"
)


@dataclass(frozen=True)
class Expected:
    """Images, and what a right model makes of them.

    images: (B, C, H, W), float64, in [0, 1] or normalised.
    normalised: which of the two.
    logits: float64, (B, num_classes), or whatever the config's head gives.
    dtype: the narrowest type that holds every entry of the logits.
    written: to how many digits the logits were rounded.
    intermediates: named as `vit_torch.intermediates` names them.
    remarks: how the file was read.
    """

    images: Array = field(repr=False)
    normalised: bool
    logits: Array = field(repr=False)
    dtype: str
    intermediates: dict[str, Array] = field(default_factory=dict, repr=False)
    remarks: tuple[str, ...] = ()
    written: Written = field(default_factory=Written)

    def __len__(self) -> int:
        return len(self.images)

    @property
    def bar(self) -> float:
        """The relRMS within which a model of the same function is: what the type and the digits of the logits allow.

        In float64 two models part by 1e-15 or so, and 1e-10 leaves room for functions that amplify it.
        """
        of_type = TRAJECTORY if self.dtype == "float64" else Budget(self.dtype).bar
        return max(of_type, self.written.error)

    @property
    def digits(self) -> str:
        """What the logits are, in words."""
        return f"{self.written.digits} of {self.dtype}" if self.written.digits else self.dtype

    def first(self, count: int) -> "Expected":
        """Return the first images alone."""
        intermediates = {name: array[: min(count, len(array))] for name, array in self.intermediates.items()}
        return replace(self, images=self.images[:count], logits=self.logits[:count], intermediates=intermediates)


def read(path: str | Path, config: ViTConfig) -> Expected:
    """Read an .npz file of `images` and `logits`.

    Images are pixels where they are uint8 or all lie in [0, 1], and normalised otherwise; (B, H, W, C) or (B, C, H, W).
    Arrays that are named as intermediates of the twins are kept, others left out, which `remarks` says.

    Raises:
        InputError: no such file, a damaged one, or arrays that are not this config's.
    """
    path = _existing(path)
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


def load(source: Source, path: str | Path, *, format: str | None = None, given: Fields | None = None) -> Checkpoint:
    """Open weights whose expected outputs are in the file `path`, as `parity.load` does.

    The size of the images, where neither the weights nor `given` say it, is that of the images in the file.

    Raises:
        InputError: as `parity.load`.
    """
    given, sizes = dict(given or {}), _sizes(path)
    found, refused = None, None
    try:
        found = reading.load(source, format=format, given=given)
    except InputError as error:
        refused = error
    told = found is not None and all(each.field != "image_size" for each in found.assumed)
    for size in () if told or "image_size" in given else sizes:
        try:
            sized = reading.load(source, format=format, given={**given, "image_size": size})
        except InputError:
            continue  # the images are of another size than the weights, whose positions are resampled
        if found is None or found.config.image_size != size:
            found = replace(sized, assumed=(*sized.assumed, Assumption("image_size", size, AS_SHOWN)))
        break
    if found is None:
        raise refused or InputError(f"{source} cannot be read")
    return found


def _sizes(path: str | Path) -> Iterator[tuple[int, int]]:
    """Yield the sizes that the images of a file may have: channels last, then first."""
    stored = {".".join(words): array for words, array in containers.open(_existing(path)).arrays.items()}
    shape = tuple(stored[IMAGES].shape) if IMAGES in stored else ()
    if len(shape) == 4:
        order = [shape[1:3], shape[2:4]]
        yield from order if shape[3] <= shape[1] else order[::-1]


def _existing(path: str | Path) -> Path:
    path = Path(path)
    if not path.is_file():
        raise InputError(f"no file {path}: give an .npz file with {IMAGES!r} and {LOGITS!r}")
    return path


def expected(images: Any, logits: Any, config: ViTConfig, intermediates: dict[str, Any] | None = None) -> Expected:
    """Return arrays as what is expected of a config's model.

    Raises:
        InputError: images or outputs that are not this config's, or not finite.
    """
    pictures, remarks = _images(_numbers(images, IMAGES), config)
    answers = _numbers(logits, LOGITS)
    for name, array in {IMAGES: pictures, LOGITS: answers}.items():
        _finite(name, array)
    if not answers.ndim or len(answers) != len(pictures):
        rows = len(answers) if answers.ndim else "no"
        raise InputError(f"{len(pictures)} images and {rows} rows of logits: give one row for each image")
    if config.num_classes and answers.shape[-1] != config.num_classes:
        raise InputError(
            f"logits have shape {answers.shape}: the model of the weights gives {config.num_classes} for each image"
        )
    if not answers.any():
        raise InputError("logits are all zero, and nothing can be compared with them: give those of a model")
    normalised = not (pictures.min(initial=0) >= 0 and pictures.max(initial=0) <= 1)
    inner = {name: _intermediate(name, array, len(pictures)) for name, array in (intermediates or {}).items()}
    said = "normalised" if normalised else "pixels"
    told = (f"images are {said}", *remarks)
    return Expected(
        pictures,
        normalised,
        answers.astype(np.float64),
        narrowest(answers),
        inner,
        told,
        written(answers.astype(np.float64)),
    )


def _numbers(array: Any, name: str) -> Array:
    found = np.asarray(array)
    try:
        found.astype(np.float64, casting="same_kind" if found.dtype.kind in "c" else "unsafe")
    except (TypeError, ValueError):
        raise InputError(f"{name} are of type {found.dtype}: give an array of real numbers") from None
    return found


def _finite(name: str, array: Array) -> None:
    sizes = np.abs(array.astype(np.float64))
    if count := int((~np.isfinite(sizes)).sum()):
        raise InputError(f"{name} have {count} entries that are NaN or infinite: make them again without")
    if (largest := float(sizes.max(initial=0.0))) > LARGEST:
        raise InputError(f"{name} have entries as large as {largest:.0e}: give those of a model, which has none such")


def _intermediate(name: str, array: Any, count: int) -> Array:
    """Return the expected intermediate of a name, float64, one for each image; a constant of the model is one for all."""
    found = _numbers(array, name).astype(np.float64)
    _finite(name, found)
    if not found.ndim or len(found) not in (1, count):
        raise InputError(f"{name} has shape {found.shape}: its first axis is to be that of the {count} images")
    return found


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
        if images.min() < 0 or images.max() > np.iinfo(np.uint8).max:
            raise InputError(f"images are {images.dtype} from {images.min()} to {images.max()}: give pixels from 0 to 255")
        return images / np.iinfo(np.uint8).max, (order,)
    return images.astype(np.float64), (order,)


def _fitting(shape: tuple[int, ...], config: ViTConfig) -> Iterator[bool]:
    """Whether channels are last, of images for which their number alone does not tell."""
    if shape[2:4] == config.image_size != shape[1:3]:
        yield False
    if shape[1:3] == config.image_size != shape[2:4]:
        yield True
    raise InputError(f"images have shape {shape}: where their channels are cannot be told; give images of another size")
