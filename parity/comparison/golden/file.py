"""A golden file: an npz of a few arrays of numbers, and one of JSON.

    header        JSON, as bytes: config, seed, what the weights are, checksums, names and shapes of tensors, and for each
                  record its environment and its frameworks
    reference     the sketches of all tensors in float64, one after the other; see `parity.comparison.golden.sketch`
    sizes         (tensors,), the root-mean-square that distances from each are relative to
    records.0     (frameworks, 2, tensors), relRMS: in float64 from the reference, in float32 from float64

Nothing in it is a date or a path: the same recording on the same machine is the same bytes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from parity.checkpoints import containers
from parity.checkpoints.atomic_write import replacing
from parity.checkpoints.containers import Slot, strict
from parity.checkpoints.formats import get
from parity.checkpoints.reading import Source, existing
from parity.comparison.golden.sketch import KEPT
from parity.comparison.localisation import GRADIENT
from vit_spec import InputError, ViTConfig, bounded_json

Array = NDArray[Any]

FRAMEWORKS = ("jax", "torch")

_VERSION = 1
_HEADER = 2**24  # bytes; ViT-22B's takes 0.1 MB, and each record adds 2 KB


@dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor of the reference.

    name: of an intermediate; or "gradient of " and the name of a parameter in a state dict, or of "images".
    size: the root-mean-square that distances are relative to; of a gradient at least that of its module's.
    kept: its sketch in float64.
    """

    name: str
    shape: tuple[int, ...]
    size: float
    kept: Array

    @property
    def entries(self) -> int:
        """Number of entries of the tensor itself."""
        return prod(self.shape)

    @property
    def is_gradient(self) -> bool:
        """Whether it belongs to the way back."""
        return self.name.startswith(GRADIENT)


@dataclass(frozen=True, eq=False)
class Record:
    """What one environment computed.

    environment: the card of `parity.comparison.framework_settings.environment`.
    function: framework -> (tensors,), relRMS in float64 from the reference; NaN where the framework shows no such tensor.
    precision: framework -> (tensors,), relRMS in float32 from the framework's own float64; NaN as in `function`.
    """

    environment: dict[str, Any]
    function: Mapping[str, Array]
    precision: Mapping[str, Array]


@dataclass(frozen=True, eq=False)
class Golden:
    """What a golden file holds.

    drawn: whether the weights are drawn from the seed; others are not in the file.
    checksums: of "weights" and "images".
    tensors: in the order of computation, forward, then the gradients from the head backwards.
    records: the first is the recording; the others are later verifications that were kept.
    """

    config: ViTConfig
    seed: int
    drawn: bool
    checksums: dict[str, str]
    tensors: tuple[Tensor, ...]
    records: tuple[Record, ...] = field(default=())

    def write(self, path: Source) -> None:
        """Write the file, all of it or nothing, in the place of one that is there."""
        arrays = self._arrays()
        slots = {key: Slot(array.shape, array.dtype) for key, array in arrays.items()}
        with replacing(Path(path)) as new, containers.get("npz").create(new, slots, {}) as sink:
            for key, array in arrays.items():
                sink.put(key, 0, np.ascontiguousarray(array).reshape(-1))

    def _arrays(self) -> dict[str, Array]:
        header = {
            "golden": _VERSION,
            "config": json.loads(self.config.to_json()),
            "seed": self.seed,
            "drawn": self.drawn,
            "checksums": self.checksums,
            "tensors": [[tensor.name, tensor.shape] for tensor in self.tensors],
            "records": [{"environment": r.environment, "frameworks": list(r.function)} for r in self.records],
        }
        text = json.dumps(header, separators=(",", ":"), sort_keys=True)
        arrays = {
            "header": np.frombuffer(text.encode(), np.uint8),
            "reference": np.concatenate([tensor.kept for tensor in self.tensors]),
            "sizes": np.array([tensor.size for tensor in self.tensors]),
        }
        for i, record in enumerate(self.records):
            pairs = [[record.function[name], record.precision[name]] for name in record.function]
            arrays[f"records.{i}"] = np.array(pairs, np.float64)
        return arrays

    @classmethod
    def read(cls, path: Source) -> Self:
        """Return what a golden file holds, held to its own config.

        Raises:
            InputError: no such file, another kind of file, or a damaged one.
        """
        path = existing(path)
        if not path.is_file():
            raise InputError(f"{path} is no file: give the golden file that `python -m parity golden record` wrote")
        arrays = {".".join(words): array for words, array in containers.open(path).arrays.items()}
        if "header" not in arrays:
            raise InputError(f"{path} is no golden file: give one that `python -m parity golden record` wrote")
        try:
            return cls._read(arrays)
        except InputError as error:
            text = str(error)
            if str(path) in text:
                raise
            raise InputError(f"{path} is no golden file, or is damaged ({text}): record it again, or fetch it") from None

    @classmethod
    def _read(cls, arrays: Mapping[str, Any]) -> Self:
        header = _header(arrays["header"])
        config = ViTConfig.from_json(json.dumps(header["config"]))
        shapes = _shapes(header["tensors"])
        _hold_to_config(shapes, config)
        kept = [min(prod(shape), KEPT) for shape in shapes.values()]
        reference = _numbers(arrays, "reference", (sum(kept),))
        sizes = _numbers(arrays, "sizes", (len(kept),))
        if not np.isfinite(reference).all() or not np.isfinite(sizes).all() or not (sizes >= 0).all():
            raise InputError("its reference holds NaN, infinities or negative sizes")
        if not any(size for name, size in zip(shapes, sizes.tolist(), strict=True) if name.startswith(GRADIENT)):
            raise InputError("its gradients are all zero")
        parts = np.split(reference, np.cumsum(kept)[:-1])
        facts = zip(shapes.items(), sizes.tolist(), parts, strict=True)
        tensors = tuple(Tensor(name, shape, size, part) for (name, shape), size, part in facts)
        records = tuple(_record(arrays, i, each, list(shapes)) for i, each in enumerate(header["records"]))
        if not records or set(FRAMEWORKS) - set(records[0].function):
            raise InputError("the recording itself is not among its records")
        if len(arrays) != 3 + len(records):
            raise InputError("it holds arrays that are none of a golden file's")
        return cls(config, header["seed"], header["drawn"], header["checksums"], tensors, records)


def writable(path: Source, force: bool) -> None:
    """Refuse a path that a golden file cannot or must not be written to.

    force: whether a file that is there may be replaced.

    Raises:
        InputError: another suffix, no such folder, or something there.
    """
    path = Path(path)
    if path.suffix != ".npz":
        raise InputError(f"{path}: a golden file is an npz file: give a name that ends in .npz")
    if not path.parent.is_dir():
        raise InputError(f"no folder {path.parent}: create it first")
    if path.exists() and not (force and path.is_file()):
        raise InputError(f"{path} exists: give another name, or --force (force=True) to replace it, or verify it")


# Held to what is expected ----------------------------------------------------------------------------------------------

_KINDS: dict[str, type] = {
    "golden": int,
    "config": dict,
    "seed": int,
    "drawn": bool,
    "checksums": dict,
    "tensors": list,
    "records": list,
}


def _header(array: Any) -> dict[str, Any]:
    if array.dtype != np.uint8 or array.nbytes > _HEADER:
        raise InputError(f"a header of {array.nbytes} bytes of {array.dtype}")
    header = bounded_json.parse_object(np.asarray(array).tobytes(), longest=_HEADER)
    if (version := header.get("golden")) != _VERSION:
        raise InputError(f"a header of version {version!r}, where {_VERSION} is known: update, or record it again")
    if wrong := sorted(header.keys() ^ _KINDS.keys()):
        raise InputError(f"its header lacks or should not have {strict.listed(wrong)}")
    for name, kind in _KINDS.items():
        if type(header[name]) is not kind:
            raise InputError(f"{name} in its header is a {type(header[name]).__name__}")
    if not 0 <= header["seed"] < 10**18:  # as the command takes them, and every library that draws
        raise InputError("its seed is none that numbers can be drawn from")
    sums = header["checksums"]
    if sums.keys() != {"weights", "images"} or not all(isinstance(text, str) for text in sums.values()):
        raise InputError("its checksums are not those of weights and images")
    return header


def _shapes(listed: list[Any]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for each in listed:
        if not isinstance(each, list) or len(each) != 2 or not isinstance(each[0], str) or each[0] in found:
            raise InputError("its tensors are not different names, each with a shape")
        found[each[0]] = strict.shape(each[1], np.dtype(np.float64).itemsize)
    return found


def _hold_to_config(shapes: Mapping[str, tuple[int, ...]], config: ViTConfig) -> None:
    """Refuse tensors that are not this config's; so no model is built that the file does not spell out."""
    layouts = get("torch").layouts(config).values()
    count = sum(prod(config.sizes[word] for word in layout.spelled) for layout in layouts)
    given = {name.removeprefix(GRADIENT): shape for name, shape in shapes.items() if name.startswith(GRADIENT)}
    images = given.pop("images", ())
    if len(given) != count:
        raise InputError(f"gradients of {len(given)} parameters, where its config has {count:,}")
    if given != {key: layout.shape(config.sizes) for layout in layouts for key in layout.keys(config.sizes)}:
        raise InputError("gradients of other parameters than its config has")
    if len(images) != 4 or images[1:] != (*config.image_size, config.in_channels):
        raise InputError(f"images of shape {images}, which its config does not take")
    if "logits" not in shapes:
        raise InputError("it has no logits")


def _numbers(arrays: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> Array:
    if name not in arrays or (arrays[name].shape, arrays[name].dtype) != (shape, np.float64):
        found = f"{arrays[name].dtype} {arrays[name].shape}" if name in arrays else "nothing"
        raise InputError(f"{name} is {found}, expected float64 {shape}")
    return np.asarray(arrays[name])


def _record(arrays: Mapping[str, Any], i: int, entry: Any, tensors: list[str]) -> Record:
    if not isinstance(entry, dict) or entry.keys() != {"environment", "frameworks"}:
        raise InputError(f"record {i} is not an environment and its frameworks")
    card, names = entry["environment"], entry["frameworks"]
    if not isinstance(card, dict) or not _plain(card, depth=3) or names not in (["jax", "torch"], ["jax"], ["torch"]):
        raise InputError(f"record {i} is not an environment and its frameworks")
    found = _numbers(arrays, f"records.{i}", (len(names), 2, len(tensors)))
    if (found < 0).any() or np.isnan(found[:, :, tensors.index("logits")]).any():
        raise InputError(f"record {i} holds negative distances, or none of the logits")
    return Record(card, dict(zip(names, found[:, 0], strict=True)), dict(zip(names, found[:, 1], strict=True)))


def _plain(value: Any, depth: int) -> bool:
    """Whether a value of JSON is nested no deeper than this."""
    if not isinstance(value, (dict, list)):
        return True
    inner = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_plain(each, depth - 1) for each in inner)
