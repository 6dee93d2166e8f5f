"""Read the arrays of a checkpoint by the keys of a model of the user."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.checkpoints import containers
from parity.checkpoints.arrays import FLOAT_DTYPES
from parity.checkpoints.assumptions import Assumption
from parity.checkpoints.containers.container import StoredArray
from parity.checkpoints.format_matching import join_keys
from parity.checkpoints.ignored_keys import matched_keys
from parity.checkpoints.layout import Array
from parity.checkpoints.other_keys import classify_other_keys
from parity.checkpoints.reading import StrPath, resolve_path
from parity.checkpoints.wrapper_names import WRAPPERS
from parity.checkpoints.wrappers import without_inner_modules
from parity.comparison.own_model.model import OwnModel, as_float64
from vit_spec import InputError

_PARAMETERS = "params/"  # the collection of parameters in linen
_MAX_SHOWN = 20  # keys of each kind in an error message


@dataclass(frozen=True)
class OwnWeights:
    """The arrays of a checkpoint under the keys of a model.

    Attributes:
        arrays: key of the model -> array in the dtype of the file.
        strip: the prefix of the keys in the file, if it does not consist of known wrappers; else "".
        ignored: the keys of the model that the user ignores.
        generators: the keys of states of random number generators.
        missing: the keys of constants that the file lacks, as of averaged weights, which have parameters alone.
    """

    arrays: Mapping[str, Array]
    strip: str
    ignored: frozenset[str]
    generators: frozenset[str]
    missing: tuple[str, ...]


class OtherShapes(InputError):
    """The arrays have the keys of the model but other shapes: the model may be for another size of images.

    count: the number of these arrays.
    """

    def __init__(self, message: str, count: int) -> None:
        super().__init__(message)
        self.count = count


def open_arrays(source: StrPath, separator: str) -> dict[str, StoredArray]:
    """Return the arrays of a checkpoint by key."""
    return join_keys(containers.open(containers.find(resolve_path(source))).arrays, separator)


def read_weights(
    stored: Mapping[str, StoredArray], model: OwnModel, strip: str | None, ignore: Sequence[str]
) -> OwnWeights:
    """Return the arrays of a model from all arrays of a file.

    Raises:
        InputError: keys are missing or unexpected; the message lists them.
        OtherShapes: shapes differ; the message lists them.
    """
    shapes = {key: array.shape for key, array in (*model.weights.items(), *model.constants.items())}
    prefix = _find_prefix(stored, model.weights, model.separator, strip)
    others = classify_other_keys(stored, prefix, model.separator)
    keys = [key for key in stored if key.startswith(prefix)]
    names = dict(zip(keys, without_inner_modules([key.removeprefix(prefix) for key in keys]), strict=True))
    inside = {name: stored[key] for key, name in names.items()}
    around = ""
    if model.separator == "/":  # other collections of linen are beside the parameters
        around = prefix.removesuffix(_PARAMETERS)
        inside = {**{key: stored[around + key] for key in model.constants if around + key in stored}, **inside}
    generators = frozenset(key for key in inside if _is_below(key, model.generators))
    ignored = _ignored_keys(ignore, stored, prefix)
    without = frozenset(names.get(key, key) for key in ignored)
    known = {*shapes, *generators}
    extra = [key for key in inside if key not in known and key not in without]
    extra += [key for key in others.unknown if key not in ignored and key.removeprefix(around) not in model.constants]
    missing = [key for key in model.weights if key not in inside]
    wrong = [
        f"{key} {inside[key].shape}, in the class {shape}"
        for key, shape in shapes.items()
        if key in inside and inside[key].shape != shape
    ]
    kinds = {"missing": missing, "unexpected": extra, "of another shape": wrong}
    lists = [f"{len(keys)} {what}: {_shorten(keys)}" for what, keys in kinds.items() if keys]
    if lists:
        message = (
            f"the checkpoint does not fit {model.name}: {'. '.join(lists)}. Give the arguments that the model was made with"
            + (", and --set image_size=HxW for images of another size" if wrong else "")
            + (", or --ignore REGEX for keys that it does not use" if extra else "")
        )
        raise InputError(message) if missing or extra else OtherShapes(message, len(wrong))
    if bad := [key for key in model.weights if inside[key].dtype.name not in FLOAT_DTYPES]:
        kinds_text = ", ".join(FLOAT_DTYPES)
        raise InputError(f"{bad[0]} of the checkpoint is {inside[bad[0]].dtype.name}: expected one of {kinds_text}")
    arrays = {key: inside[key][...] for key in shapes if key in inside}
    words = prefix.removesuffix(model.separator).split(model.separator)
    is_known = all(word in WRAPPERS for word in words) or not prefix
    lacking = tuple(key for key in model.constants if key not in inside)
    return OwnWeights(arrays, "" if is_known else prefix, without, generators, lacking)


def _is_below(key: str, parents: Iterable[str]) -> bool:
    """Return whether a key is one of some keys, or that of a part of its value."""
    return any(key == parent or key.startswith(f"{parent}/") for parent in parents)


def _find_prefix(stored: Mapping[str, Any], parameters: Mapping[str, Any], separator: str, strip: str | None) -> str:
    """Return the prefix under which the file has the most parameters of a model; averaged weights are preferred."""
    counts: Counter[str] = Counter()
    for key in stored:
        start = 0
        while True:
            rest = key[start:]
            (name,) = without_inner_modules([rest])
            if name in parameters and name.partition(separator)[0] == rest.partition(separator)[0]:
                counts[key[:start]] += 1
            start = key.find(separator, start) + 1
            if not start:
                break
    if strip:
        counts = Counter({each: n for each, n in counts.items() if strip.removesuffix(separator) + separator in each})
    if not counts:
        some = ", ".join(list(stored)[:3]) or "none"
        where = f" under --strip {strip!r}" if strip else ""
        raise InputError(
            f"the checkpoint has no key of the class{where}, such as {next(iter(parameters), 'none')}; its keys are {some}"
            ": give the checkpoint that this class wrote"
        )

    def order(prefix: str) -> tuple[int, ...]:
        words = prefix.removesuffix(separator).split(separator) if prefix else []
        return tuple(WRAPPERS.index(word) if word in WRAPPERS else len(WRAPPERS) for word in words)

    most = max(counts.values())
    return min((prefix for prefix, count in counts.items() if count == most), key=lambda each: (order(each), each))


def _ignored_keys(ignore: Sequence[str], stored: Mapping[str, Any], prefix: str) -> frozenset[str]:
    """Return the keys that the user ignores; the expressions match keys with or without the prefix."""
    if not ignore:
        return frozenset()
    found = matched_keys(ignore, [*stored, *(key.removeprefix(prefix) for key in stored)])
    matched = frozenset(key for keys in found.values() for key in keys)
    return frozenset(key for key in stored if key in matched or key.removeprefix(prefix) in matched)


def missing_constants(weights: OwnWeights) -> tuple[Assumption, ...]:
    """Return the assumption that the constants that the file lacks have the values of a newly built model, if there are."""
    what, why = "values of a newly built model", "the checkpoint lacks them"
    return (Assumption(what, _shorten(weights.missing), why),) if weights.missing else ()


def _shorten(keys: Iterable[str]) -> str:
    keys = list(keys)
    rest = f", and {len(keys) - _MAX_SHOWN} more" if len(keys) > _MAX_SHOWN else ""
    return "; ".join(map(str, keys[:_MAX_SHOWN])) + rest


def changed_constants(model: OwnModel, arrays: Mapping[str, Array]) -> list[str]:
    """Return the keys of the constants whose value in the checkpoint is not that of the newly built model."""
    return [key for key, value in model.constants.items() if key in arrays and not _is_same(arrays[key], value)]


def _is_same(stored: Array, value: Array) -> bool:
    """Return whether a stored constant is the one of the model, rounded to its dtype.

    A table may also be computed in its dtype, which gives other last digits than float64.
    """
    if stored.dtype.kind in "iub" or value.dtype.kind in "iub":
        return bool((stored == value).all())
    if sum(length > 1 for length in value.shape) < 2:
        return bool(np.array_equal(as_float64(value.astype(stored.dtype)), as_float64(stored), equal_nan=True))
    first, second = as_float64(stored), as_float64(value)
    unit = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6}.get(stored.dtype.name, 1e-12)
    return bool((abs(first - second) <= unit * (1 + abs(second))).all())
