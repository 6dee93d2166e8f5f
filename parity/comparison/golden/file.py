"""The golden file: an npz of numeric arrays and a JSON header.

    header        JSON as bytes, (n,) uint8: config, seed, whether the weights are drawn from the seed, checksums, names and
                  shapes of the tensors, and for each record its environment and its frameworks
    reference     (n,) float64: the sketches of all tensors, concatenated; see `parity.comparison.golden.sketch`
    sizes         (tensors,) float64: the root-mean-square to which the errors of each tensor are relative
    rounding      (2, tensors) float64: measured rounding errors of each tensor in float64 and in float32; missing if they
                  were not measured, because the weights do not amplify them
    records.0     (frameworks, 2, tensors) float64: relRMS in float64 from the reference, and in float32 from float64

It contains neither dates nor paths: the same recording on the same machine gives the same bytes.
"""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np

from parity.checkpoints import containers
from parity.checkpoints.atomic_write import atomic_replace, check_replaceable, lock_folder
from parity.checkpoints.containers import ArraySpec, header_checks
from parity.checkpoints.formats import get
from parity.checkpoints.layout import Array
from parity.checkpoints.reading import StrPath, resolve_path
from parity.comparison.golden.sketch import SKETCH_SIZE
from parity.comparison.localisation import GRADIENT_OF, module_of
from parity.comparison.report import Unjudged
from parity.comparison.tolerances import (
    AMPLIFIED_ERROR_FACTOR,
    FLOAT64_TOLERANCE,
    MAX_LINEAR_ERROR,
    MAX_TOLERANCE,
    PERTURBATION_ROUNDOFFS,
)
from vit_spec import InputError, ViTConfig, bounded_json

FRAMEWORKS = ("jax", "torch")

_VERSION = 1
_MAX_HEADER = 2**24  # bytes; the header of ViT-22B has 0.1 MB, and each record adds 2 KB
_ARRAYS = ("header", "reference", "sizes")  # of every golden file
_MAX_SCALE_RATIO = 1e3  # of a scale to its estimate from a sketch, which is 0 only if the entries of a run cancel


@dataclass(frozen=True, eq=False)
class Tensor:
    """One tensor of the reference.

    name: name of an intermediate, or "gradient of " followed by the name of a parameter in a state dict or by "images".
    scale: the root-mean-square to which errors are relative; for a gradient, at least the root-mean-square of the gradients
        of its module.
    sketch: its sketch in float64.
    float64_rounding, float32_rounding: relRMS of the change by `PERTURBATION_ROUNDOFFS` unit roundoffs of the type at every
        operation; 0 if it was not measured.
    """

    name: str
    shape: tuple[int, ...]
    scale: float
    sketch: Array
    float64_rounding: float = 0.0
    float32_rounding: float = 0.0

    @property
    def float64_tolerance(self) -> float:
        """Largest relRMS from the reference of a function that has not changed."""
        return max(FLOAT64_TOLERANCE, min(AMPLIFIED_ERROR_FACTOR * self.float64_rounding, MAX_TOLERANCE["float64"]))

    @property
    def entries(self) -> int:
        """Number of entries of the tensor."""
        return prod(self.shape)

    @property
    def is_gradient(self) -> bool:
        """Whether the tensor is a gradient."""
        return self.name.startswith(GRADIENT_OF)


@dataclass(frozen=True, eq=False)
class Record:
    """Results in one environment.

    environment: as returned by `parity.comparison.framework_settings.environment`.
    float64_errors: framework -> (tensors,), relRMS in float64 from the reference; NaN for a tensor that the framework does
        not return.
    float32_errors: framework -> (tensors,), relRMS in float32 from the same framework in float64; NaN as above.
    """

    environment: dict[str, Any]
    float64_errors: Mapping[str, Array]
    float32_errors: Mapping[str, Array]


@dataclass(frozen=True, eq=False)
class Golden:
    """Contents of a golden file.

    has_seeded_weights: whether the weights are drawn from the seed; other weights are not in the file.
    checksums: "weights" and "images" -> SHA-256.
    tensors: in the order of computation: forward, and then gradients, from the head to the input.
    records: the recording, and then appended verifications.
    """

    config: ViTConfig
    seed: int
    has_seeded_weights: bool
    checksums: dict[str, str]
    tensors: tuple[Tensor, ...]
    records: tuple[Record, ...] = field(default=())

    @property
    def unjudged(self) -> tuple[Unjudged, ...]:
        """The tensors that are not judged in float32.

        Those with NaN or infinities in the first record cannot be compared with a later result.  A tensor of which rounding
        changes more than a tenth, and all after it, may have other errors in each run.
        """
        errors = zip(*self.records[0].float32_errors.values(), strict=True)
        names = tuple(tensor.name for tensor, each in zip(self.tensors, errors, strict=True) if math.inf in each)
        found = [Unjudged("float32", names, "since float32 gave NaN or infinities in the recording")] if names else []
        noisy = (i for i, tensor in enumerate(self.tensors) if tensor.float32_rounding > MAX_LINEAR_ERROR)
        if (first := next(noisy, None)) is not None:
            change = f"{self.tensors[first].float32_rounding:.0e} times its size"
            why = f"since {PERTURBATION_ROUNDOFFS} unit roundoffs at each operation change it by {change}"
            found.append(Unjudged("float32", tuple(tensor.name for tensor in self.tensors[first:]), why))
        return tuple(found)

    def write(self, path: StrPath, *, overwrite: bool = True) -> None:
        """Write the file atomically.

        Args:
            path: the file.
            overwrite: whether to replace a golden file that exists when the new one is complete.

        Raises:
            InputError: the file exists, and `overwrite` is false or it is not a golden file.
        """
        path = Path(path).expanduser()
        with lock_folder(path.parent):
            self._write(path, overwrite, _check_golden)

    def append(self, path: StrPath, record: Record) -> None:
        """Append a record to the file at `path`, from which this golden was read, and keep records appended since then.

        If `path` is a link, its target is written.

        Raises:
            InputError: the file is missing, damaged or another golden file by now; nothing is changed.
        """
        path = resolve_path(path).resolve()
        with lock_folder(path.parent):
            identity = _file_identity(path)
            now = Golden.read(path)
            if not self._has_reference_of(now):
                raise _replaced_error(path)

            def check_unchanged(found: Path) -> None:  # other programs, and systems without locks, ignore the lock
                if _file_identity(found) != identity:
                    raise _replaced_error(path)

            replace(now, records=(*now.records, record))._write(path, True, check_unchanged)

    def _has_reference_of(self, other: Self) -> bool:
        """Return whether two golden files are equal except for their records."""
        one, two = (replace(each, records=())._arrays() for each in (self, other))
        return one.keys() == two.keys() and all(np.array_equal(one[key], two[key]) for key in one)

    def _write(self, path: Path, overwrite: bool, check: Callable[[Path], None]) -> None:
        """Write the file; `check` is called with its path immediately before it is replaced, see `atomic_replace`."""
        arrays = self._arrays()
        specs = {key: ArraySpec(array.shape, array.dtype) for key, array in arrays.items()}
        with (
            atomic_replace(path, replace=overwrite, check=check) as new,
            containers.get("npz").create(new, specs, {}) as writer,
        ):
            for key, array in arrays.items():
                writer.write(key, 0, np.ascontiguousarray(array).reshape(-1))

    def _arrays(self) -> dict[str, Array]:
        """Return the arrays of the file by key."""
        header = {
            "golden": _VERSION,
            "config": json.loads(self.config.to_json()),
            "seed": self.seed,
            "drawn": self.has_seeded_weights,
            "checksums": self.checksums,
            "tensors": [[tensor.name, tensor.shape] for tensor in self.tensors],
            "records": [{"environment": r.environment, "frameworks": list(r.float64_errors)} for r in self.records],
        }
        text = json.dumps(header, separators=(",", ":"), sort_keys=True)
        arrays = {
            "header": np.frombuffer(text.encode(), np.uint8),
            "reference": np.concatenate([tensor.sketch for tensor in self.tensors]),
            "sizes": np.array([tensor.scale for tensor in self.tensors]),
        }
        rounding = np.array([[tensor.float64_rounding, tensor.float32_rounding] for tensor in self.tensors]).T
        if rounding.any():
            arrays["rounding"] = rounding
        for i, record in enumerate(self.records):
            pairs = [[record.float64_errors[name], record.float32_errors[name]] for name in record.float64_errors]
            arrays[f"records.{i}"] = np.array(pairs, np.float64)
        return arrays

    @classmethod
    def read(cls, path: StrPath) -> Self:
        """Read a golden file, and validate it against its own config.

        Raises:
            InputError: the file does not exist, is of another kind, or is damaged.
        """
        path = resolve_path(path)
        if not path.is_file():
            raise InputError(f"{path} is not a file: give a golden file, which `python -m parity golden record` writes")
        arrays = {".".join(words): array for words, array in containers.open(path).arrays.items()}
        if "header" not in arrays:
            raise InputError(f"{path} is not a golden file: give one, which `python -m parity golden record` writes")
        try:
            return cls._parse(path, arrays)
        except InputError as error:
            text = str(error)
            if str(path) in text:
                raise
            raise InputError(
                f"{path} is not a golden file, or is damaged ({text}): record it again, or download it again"
            ) from None

    @classmethod
    def _parse(cls, path: Path, arrays: Mapping[str, Any]) -> Self:
        """Return the contents of a file from its arrays; raise InputError if they do not fit each other."""
        header = _parse_header(path, arrays["header"])
        config = ViTConfig.from_json(json.dumps(header["config"]))
        shapes = _parse_shapes(header["tensors"])
        _check_shapes(shapes, config)
        sketch_sizes = [min(prod(shape), SKETCH_SIZE) for shape in shapes.values()]
        reference = _float64_array(arrays, "reference", (sum(sketch_sizes),))
        scales = _float64_array(arrays, "sizes", (len(sketch_sizes),))
        if not np.isfinite(reference).all() or not np.isfinite(scales).all() or not (scales >= 0).all():
            raise InputError("its reference has NaN, infinities or negative sizes")
        if not any(scale for name, scale in zip(shapes, scales.tolist(), strict=True) if name.startswith(GRADIENT_OF)):
            raise InputError("its gradients are all zero")
        sketches = np.split(reference, np.cumsum(sketch_sizes)[:-1])
        rounding = np.zeros((2, len(shapes)))
        if "rounding" in arrays:
            rounding = _float64_array(arrays, "rounding", rounding.shape)
        if not (rounding >= 0).all():
            raise InputError("its rounding errors are NaN or negative")
        facts = zip(shapes, shapes.values(), scales.tolist(), sketches, *rounding.tolist(), strict=True)
        tensors = tuple(Tensor(*each) for each in facts)
        _check_scales(tensors)
        records = tuple(_parse_record(arrays, i, each, list(shapes)) for i, each in enumerate(header["records"]))
        if not records or set(FRAMEWORKS) - set(records[0].float64_errors):
            raise InputError("its first record, which must have both frameworks, is missing or lacks one")
        if len(arrays) != len(_ARRAYS) + ("rounding" in arrays) + len(records):
            raise InputError("it has arrays that do not belong in a golden file")
        return cls(config, header["seed"], header["drawn"], header["checksums"], tensors, records)


def check_writable(path: StrPath, force: bool) -> None:
    """Raise InputError if a golden file cannot be written at this path.

    An existing file is replaced only if `force` is true and it is a golden file.
    """
    path = Path(path).expanduser()
    if path.suffix != ".npz":
        raise InputError(f"{path}: a golden file is an npz file: give a name that ends in .npz")
    if not path.parent.is_dir():
        raise InputError(f"no folder {path.parent}: create it first")
    if path.exists() and not force:
        raise InputError(f"{path} exists: give another name, or --force (force=True) to replace it, or verify it")
    _check_golden(path)


def _check_golden(path: Path) -> None:
    """Raise InputError if something that is not a golden file has this path; one that is damaged inside counts as one."""
    check_replaceable(path)
    if path.exists() and not _is_golden(path):
        raise InputError(f"{path} exists and is not a golden file: give another name, or remove the file")


def _is_golden(path: Path) -> bool:
    try:
        return path.is_file() and {(name,) for name in _ARRAYS} <= containers.open(path).arrays.keys()
    except InputError:
        return False


def _file_identity(path: StrPath) -> tuple[int, ...] | None:
    """Return numbers that change when a file is replaced or written; None if there is no file."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _replaced_error(path: StrPath) -> InputError:
    return InputError(f"{path} was replaced during the verification, and no record is appended: verify it again")


# Validation ------------------------------------------------------------------------------------------------------------

_HEADER_TYPES: dict[str, type] = {
    "golden": int,
    "config": dict,
    "seed": int,
    "drawn": bool,
    "checksums": dict,
    "tensors": list,
    "records": list,
}


def _parse_header(path: Path, array: Any) -> dict[str, Any]:
    """Return the header, with the types of its fields checked."""
    if array.dtype != np.uint8 or array.nbytes > _MAX_HEADER:
        raise InputError(f"its header has {array.nbytes} bytes of {array.dtype}, expected at most {_MAX_HEADER} of uint8")
    header = bounded_json.parse_object(np.asarray(array).tobytes(), max_bytes=_MAX_HEADER)
    version = header.get("golden")
    if type(version) is int and version != _VERSION:
        raise InputError(f"{path} has version {version}, expected {_VERSION}: update the package, or record it again")
    if wrong := sorted(header.keys() ^ _HEADER_TYPES.keys()):
        raise InputError(f"missing or unexpected keys in its header: {header_checks.quote_names(wrong)}")
    for name, kind in _HEADER_TYPES.items():
        if type(header[name]) is not kind:
            raise InputError(f"{name} in its header is a {type(header[name]).__name__}, expected a {kind.__name__}")
    if not 0 <= header["seed"] < 10**18:  # the range of --seed, which every random number generator takes
        raise InputError("its seed is not between 0 and 10^18")
    sums = header["checksums"]
    if sums.keys() != {"weights", "images"} or not all(isinstance(text, str) for text in sums.values()):
        raise InputError("its checksums are not one for the weights and one for the images")
    return header


def _parse_shapes(listed: list[Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors by name, from the header's list of [name, shape]."""
    shapes: dict[str, tuple[int, ...]] = {}
    for each in listed:
        if not isinstance(each, list) or len(each) != 2 or not isinstance(each[0], str) or each[0] in shapes:
            raise InputError("its list of tensors is not a list of different names, each with a shape")
        shapes[each[0]] = header_checks.parse_shape(each[1], np.dtype(np.float64).itemsize)
    return shapes


def _check_shapes(shapes: Mapping[str, tuple[int, ...]], config: ViTConfig) -> None:
    """Raise InputError if the shapes are not the shapes of the config's parameters and images.

    The number of shapes is compared first: a small file with an absurd config could announce a huge number of parameters.
    """
    layouts = get("torch").layouts(config).values()
    count = sum(prod(config.sizes[axis] for axis in layout.key_axes) for layout in layouts)
    given = {name.removeprefix(GRADIENT_OF): shape for name, shape in shapes.items() if name.startswith(GRADIENT_OF)}
    images = given.pop("images", ())
    if len(given) != count:
        raise InputError(f"it has gradients of {len(given)} parameters, and its config has {count:,} parameters")
    if given != {key: layout.shape(config.sizes) for layout in layouts for key in layout.keys(config.sizes)}:
        raise InputError("its gradients do not have the names and shapes of its config's parameters")
    if len(images) != 4 or images[1:] != (*config.image_size, config.in_channels):
        raise InputError(f"its images have shape {images}, which its config does not take")
    if "logits" not in shapes:
        raise InputError("it has no logits")


def _check_scales(tensors: Sequence[Tensor]) -> None:
    """Raise InputError if a scale does not fit the sketches: relative to a scale that is too large, no result would differ.

    A sketch of all entries has the root-mean-square of the tensor, and a sketch of sums an estimate of it.  The scale of a
    gradient is at least its own root-mean-square, and at most the largest in its module.
    """
    found = [float(np.linalg.norm(tensor.sketch)) / math.sqrt(max(tensor.entries, 1)) for tensor in tensors]
    largest: dict[str, float] = {}
    for tensor, size in zip(tensors, found, strict=True):
        largest[module_of(tensor.name)] = max(size, largest.get(module_of(tensor.name), 0.0))
    for tensor, size in zip(tensors, found, strict=True):
        ratio = 1 + 1e-9 if tensor.entries <= SKETCH_SIZE else _MAX_SCALE_RATIO
        high = _MAX_SCALE_RATIO * largest[module_of(tensor.name)] if tensor.is_gradient else ratio * size
        if not size / ratio <= tensor.scale <= high:
            raise InputError(f"its size of {tensor.name} does not fit its reference")


def _float64_array(arrays: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Array:
    """Return an array; raise InputError if it is missing, or has another dtype or shape."""
    if name not in arrays or (arrays[name].shape, arrays[name].dtype) != (shape, np.float64):
        found = f"{arrays[name].dtype} {arrays[name].shape}" if name in arrays else "missing"
        raise InputError(f"{name} is {found}, expected float64 {shape}")
    return np.asarray(arrays[name])


def _parse_record(arrays: Mapping[str, Any], i: int, entry: Any, tensors: list[str]) -> Record:
    """Return record `i` from its entry in the header and its array; `tensors` are the names of all tensors."""
    if not isinstance(entry, dict) or entry.keys() != {"environment", "frameworks"}:
        raise InputError(f"record {i} is not an environment and its frameworks")
    environment, names = entry["environment"], entry["frameworks"]
    known_names = (["jax", "torch"], ["jax"], ["torch"])
    if not isinstance(environment, dict) or not _is_shallow(environment, depth=3) or names not in known_names:
        raise InputError(f"record {i} is not an environment and its frameworks")
    errors = _float64_array(arrays, f"records.{i}", (len(names), 2, len(tensors)))
    if (errors < 0).any() or np.isnan(errors[:, :, tensors.index("logits")]).any():
        raise InputError(f"record {i} has negative errors, or no error of the logits")
    return Record(environment, dict(zip(names, errors[:, 0], strict=True)), dict(zip(names, errors[:, 1], strict=True)))


def _is_shallow(value: Any, depth: int) -> bool:
    """Return whether a value from JSON is nested at most this deep."""
    if not isinstance(value, (dict, list)):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_is_shallow(each, depth - 1) for each in inner)
