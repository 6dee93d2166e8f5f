"""Expected outputs: read from an .npz file, or given as arrays."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from parity.checkpoints import containers, reading
from parity.checkpoints.assumptions import Assumption
from parity.checkpoints.containers.header_checks import quote_names
from parity.checkpoints.formats import Fields
from parity.checkpoints.layout import Array
from parity.checkpoints.reading import StrPath
from parity.checkpoints.weights import Checkpoint
from parity.comparison.diagnosis.output_precision import DecimalRounding, detect_decimal_rounding, narrowest_dtype
from parity.comparison.tolerances import FLOAT64_TRAINING_TOLERANCE, ErrorBudget
from vit_spec import InputError, ViTConfig

IMAGES, LOGITS = "images", "logits"
MAX_SAMPLE = 4096  # entries of an intermediate that are examined for decimal rounding
MAX_MAGNITUDE = 1e100  # largest absolute value that is accepted; products of a few larger numbers overflow float64
INTERMEDIATE_NAME = re.compile(
    r"(patch_embed|tokens|positions|cosines|sines|columns|rows|embed|blocks\.\d+|norm_pre|norm|pool|attn_pool|fc_norm|pre_logits|"
    r"hidden|head|head_dist)\b.*"
)


@dataclass(frozen=True)
class Expected:
    """Images and the outputs of the reference model for them.

    images: (B, C, H, W), float64, in [0, 1] or normalized.
    is_normalized: whether the images are normalized.
    logits: float64, (B, num_classes), or the shape that the config's head gives.
    dtype: the narrowest dtype that represents every entry of the logits exactly.
    intermediates: expected intermediates, float64, by their names in `vit_torch.intermediates`.
    remarks: notes about how the file was read.
    rounding: the number of decimal digits that the logits were rounded to.
    is_range_assumed: whether the images are floats that are taken for pixels because all are in [0, 1].
    """

    images: Array = field(repr=False)
    is_normalized: bool
    logits: Array = field(repr=False)
    dtype: str
    intermediates: dict[str, Array] = field(default_factory=dict, repr=False)
    remarks: tuple[str, ...] = ()
    rounding: DecimalRounding = field(default_factory=DecimalRounding)
    is_range_assumed: bool = False

    def __len__(self) -> int:
        return len(self.images)

    @property
    def tolerance(self) -> float:
        """The largest relRMS at which outputs match: it follows from the dtype and the digits of the logits.

        In float64 two implementations of one function differ by about 1e-15; 1e-10 leaves a margin for functions that
        amplify rounding.
        """
        of_dtype = FLOAT64_TRAINING_TOLERANCE if self.dtype == "float64" else ErrorBudget(self.dtype).base_tolerance
        return max(of_dtype, self.rounding.error)

    def tolerance_of(self, name: str) -> float:
        """Return the largest relRMS at which an intermediate matches: that of logits, or more if it has fewer digits."""
        array = self.intermediates[name]
        dtype, rounding = narrowest_dtype(array), detect_decimal_rounding(array.ravel()[:MAX_SAMPLE])
        return max(self.tolerance, replace(self, dtype=dtype, rounding=rounding).tolerance)

    @property
    def dtype_text(self) -> str:
        """The precision of the logits in words."""
        return f"{self.rounding.digits} of {self.dtype}" if self.rounding.digits else self.dtype

    def select(self, indices: list[int]) -> "Expected":
        """Return the expected outputs of the images with these indices; intermediates that are constants are kept."""
        intermediates = {name: array if len(array) == 1 else array[indices] for name, array in self.intermediates.items()}
        return replace(self, images=self.images[indices], logits=self.logits[indices], intermediates=intermediates)


def read_expected_outputs(path: str | Path, config: ViTConfig) -> Expected:
    """Read an .npz file of `images` and `logits`.

    Images are (B, H, W, C) or (B, C, H, W).  They are pixels if they are uint8 or all in [0, 1], and normalized otherwise.
    Arrays with the name of an intermediate of the twins become `intermediates`; other arrays are ignored and listed in
    `remarks`.

    Raises:
        InputError: a missing or damaged file, arrays that do not fit this config, or arrays that take far more bytes as
            float64 than the file has.
    """
    path = _require_file(path)
    stored = {".".join(key): array for key, array in containers.open(path).arrays.items()}
    for name in (IMAGES, LOGITS):
        if name not in stored:
            contents = f"it contains {quote_names(stored)}" if stored else "it is empty"
            raise InputError(f"{path} has no {name!r} ({contents}): write numpy.savez(path, images=..., logits=...)")
    wanted = [name for name in stored if name in (IMAGES, LOGITS) or INTERMEDIATE_NAME.fullmatch(name)]
    _check_size(path, {name: stored[name].shape for name in wanted})
    arrays = {name: np.asarray(stored[name]) for name in wanted}
    ignored = [name for name in stored if name not in arrays]
    try:
        outputs = expected_outputs(arrays.pop(IMAGES), arrays.pop(LOGITS), config, arrays)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    remarks = (f"{', '.join(ignored)} in {path.name}: ignored",) if ignored else ()
    return replace(outputs, remarks=(*outputs.remarks, *remarks))


def _check_size(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse arrays that take far more bytes as float64 than the file has: compressed zeros could fill the memory.

    Raises:
        InputError: the arrays exceed `containers.max_array_bytes`; the message names the largest.
    """
    sizes = {name: math.prod(shape) * np.dtype(np.float64).itemsize for name, shape in shapes.items()}
    total, stored = sum(sizes.values()), containers.bytes_on_disk(path.stat())
    if total > containers.max_array_bytes(stored):
        largest = max(sizes, key=lambda name: sizes[name])
        raise InputError(
            f"{path} has {stored:,} bytes, but its arrays take {total:,} bytes as float64, most of them {largest!r}: give "
            "fewer images or intermediates"
        )


def load_checkpoint(
    source: StrPath,
    path: str | Path,
    *,
    format: str | None = None,
    given: Fields | None = None,
    strip: str | None = None,
    ignore: Sequence[str] = (),
) -> tuple[Checkpoint, dict[str, Any]]:
    """Load the checkpoint whose expected outputs are in the file `path`, as `parity.load` does.

    If neither the checkpoint nor `given` has an image size, it is the size of the images in the file.

    Returns:
        The checkpoint, and the config overrides with which `parity.load` reads it: `given`, and an image size if necessary.

    Raises:
        InputError: as `parity.load`.
    """
    read = partial(reading.load, source, format=format, strip=strip, ignore=ignore)
    given, sizes = dict(given or {}), _candidate_image_sizes(path)
    checkpoint, first_error = None, None
    try:
        checkpoint = read(given=given)
    except InputError as error:
        first_error = error
    is_size_known = checkpoint is not None and all(each.field != "image_size" for each in checkpoint.assumed)
    for size in () if is_size_known or "image_size" in given else sizes:
        try:
            resized = read(given={**given, "image_size": size})
        except InputError:
            continue  # the images have another size than the model; its positions are resampled
        if checkpoint is None or checkpoint.config.image_size != size:
            assumption = Assumption("image_size", size, "the size of the expected images")
            checkpoint = replace(resized, assumed=(*resized.assumed, assumption))
            given["image_size"] = size
        break
    if checkpoint is None:
        raise first_error or InputError(f"{source} cannot be read")
    return checkpoint, given


def _candidate_image_sizes(path: str | Path) -> Iterator[tuple[int, int]]:
    """Yield the possible (height, width) of the images in a file, the likelier axis order first."""
    stored = {".".join(key): array for key, array in containers.open(_require_file(path)).arrays.items()}
    shape = tuple(stored[IMAGES].shape) if IMAGES in stored else ()
    if len(shape) == 4:
        order = [shape[1:3], shape[2:4]]
        yield from order if shape[3] <= shape[1] else order[::-1]


def _require_file(path: str | Path) -> Path:
    path = Path(path)
    if not path.is_file():
        raise InputError(f"no file {path}: give an .npz file with {IMAGES!r} and {LOGITS!r}")
    return path


def expected_outputs(images: Any, logits: Any, config: ViTConfig, intermediates: dict[str, Any] | None = None) -> Expected:
    """Check arrays and return them as the expected outputs of a config's model.

    images: (B, H, W, C) or (B, C, H, W), as in `read_expected_outputs`.
    logits: (B, num_classes), or the shape that the config's head gives.
    intermediates: arrays by their names in `vit_torch.intermediates`, (B, ...), or (1, ...) for constants of the model.

    Raises:
        InputError: images or outputs that do not fit this config or are not finite.
    """
    array = _as_real(images, IMAGES)
    pixels, remarks = _prepare_images(array, config)
    outputs = _as_real(logits, LOGITS)
    _check_finite(IMAGES, pixels)
    _check_finite(LOGITS, outputs)
    if not outputs.ndim or len(outputs) != len(pixels):
        rows = len(outputs) if outputs.ndim else "no"
        raise InputError(f"{len(pixels)} images and {rows} rows of logits: give one row for each image")
    if config.num_classes and outputs.shape[-1] != config.num_classes:
        raise InputError(f"logits have shape {outputs.shape}: expected {config.num_classes} per image, as the model gives")
    if not outputs.any():
        raise InputError("logits are all zero, so no comparison is possible: give the outputs of a model")
    is_normalized = not (pixels.min(initial=0) >= 0 and pixels.max(initial=0) <= 1)
    checked = {name: _check_intermediate(name, array, len(pixels)) for name, array in (intermediates or {}).items()}
    is_range_assumed = not is_normalized and array.dtype.kind == "f"
    kind = (
        "taken for pixels, because all are in [0, 1]" if is_range_assumed else "normalized" if is_normalized else "pixels"
    )
    all_remarks = (f"images are {kind}", *remarks)
    return Expected(
        pixels,
        is_normalized,
        outputs.astype(np.float64),
        narrowest_dtype(outputs),
        checked,
        all_remarks,
        detect_decimal_rounding(outputs.astype(np.float64)),
        is_range_assumed,
    )


def _as_real(array: Any, name: str) -> Array:
    """Return an array of real numbers; raise InputError if it is complex or cannot be converted to float64."""
    values = np.asarray(array)
    if values.dtype.kind in "biuf":
        return values
    try:
        return values.astype(np.float64, casting="same_kind" if values.dtype.kind == "c" else "unsafe")
    except (TypeError, ValueError):
        raise InputError(f"{name} are of type {values.dtype}: give an array of real numbers") from None


def _check_finite(name: str, array: Array) -> None:
    values = array.astype(np.float64, copy=False)
    if count := int(values.size - np.isfinite(values).sum()):
        raise InputError(f"{name} have {count} entries that are NaN or infinite: give finite values")
    if (largest := max(-float(values.min(initial=0.0)), float(values.max(initial=0.0)))) > MAX_MAGNITUDE:
        raise InputError(f"{name} have entries as large as {largest:.0e}: expected at most {MAX_MAGNITUDE:.0e}")


def _check_intermediate(name: str, array: Any, count: int) -> Array:
    """Return an expected intermediate as float64; its first axis is the images, or 1 for a constant of the model."""
    values = _as_real(array, name).astype(np.float64, copy=False)
    _check_finite(name, values)
    if not values.ndim or len(values) not in (1, count):
        raise InputError(f"{name} has shape {values.shape}: expected a first axis of {count}, the number of images")
    return values


def _prepare_images(images: Array, config: ViTConfig) -> tuple[Array, tuple[str, ...]]:
    """Return images as float64, (B, C, H, W), pixels scaled to [0, 1], and a remark on the axis order."""
    channels = config.in_channels
    if images.ndim != 4 or channels not in (images.shape[1], images.shape[3]) or not len(images):
        raise InputError(
            f"images have shape {images.shape}: expected (B, H, W, {channels}) or (B, {channels}, H, W), B at least 1"
        )
    is_channels_last = images.shape[3] == channels
    if is_channels_last and images.shape[1] == channels:
        is_channels_last = next(_channels_last(images.shape, config))
    images = images.transpose(0, 3, 1, 2) if is_channels_last else images
    config.grid_of(*images.shape[2:])
    order = "channels last" if is_channels_last else "channels first"
    if images.dtype.kind in "ui":
        if images.min() < 0 or images.max() > np.iinfo(np.uint8).max:
            raise InputError(f"images are {images.dtype} from {images.min()} to {images.max()}: give pixels from 0 to 255")
        return images / np.iinfo(np.uint8).max, (order,)
    return images.astype(np.float64), (order,)


def _channels_last(shape: tuple[int, ...], config: ViTConfig) -> Iterator[bool]:
    """Yield whether channels are last, for images whose number of channels fits both axes: the image size decides.

    Raises:
        InputError: the image size does not decide.
    """
    if shape[2:4] == config.image_size != shape[1:3]:
        yield False
    if shape[1:3] == config.image_size != shape[2:4]:
        yield True
    raise InputError(f"images have shape {shape}: either axis could be the channels; give images of another size")
