"""Golden files of `assert_parity`: what a pair of models computed once, to tell later which framework has moved.

One npz holds the outputs in float64, which no machine changes by more than 1e-13, under their names, and a header in JSON:
each framework's distance from them in float32, a digest of the weights and inputs, and the versions of everything.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parity.checkpoints import containers
from parity.comparison.any_model.assertion import GRADIENT, Report
from parity.comparison.tolerances import FUNCTION, PRECISION, RATIO, SLACK, Error, luck
from vit_spec import InputError, bounded_json

Array = NDArray[Any]

_HEADER = 1 << 24  # characters

PARTS = {"flax": ("jax", "flax"), "torch": ("torch",)}


def record(path: Path, report: Report) -> None:
    """Write what a comparison that passed computed."""
    reference = _outputs(report, "torch float64")
    header = {
        "digest": report.digest,
        "environment": dict(report.environment),
        "distances": {
            side: {name: Error.of(report.runs[f"{side} float32"][name], t).relative_rms() for name, t in reference.items()}
            for side in PARTS
            if f"{side} float32" in report.runs
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, header=np.array(json.dumps(header)), **reference)  # type: ignore[arg-type]


def moved(path: Path, report: Report) -> list[str]:
    """Return a line for each framework that no longer computes what a golden file holds, with versions of then and now.

    Raises:
        InputError: a file that is no golden, or one of other weights or inputs.
    """
    header, stored = _read(path)
    if header["digest"] != report.digest or stored.keys() != _outputs(report, "torch float64").keys():
        raise InputError(f"{path} was recorded with other weights, inputs or outputs: record it again with --parity-record")
    return [
        f"{side} has moved: {what}; {_versions(side, header['environment'], report.environment)}"
        for side in PARTS
        if (what := next(_changes(side, header["distances"], stored, report), None))
    ]


def _changes(side: str, distances: Any, stored: Mapping[str, Array], report: Report) -> Iterator[str]:
    for name, tensor in stored.items():
        apart = Error.of(report.runs[f"{side} float64"][name], tensor).relative_rms()
        if not apart <= FUNCTION:
            yield f"{name} is {apart:.1e} away from what it was in float64 (bar {FUNCTION:.0e})"
        if f"{side} float32" in report.runs and name in distances.get(side, {}):
            was, now = distances[side][name], Error.of(report.runs[f"{side} float32"][name], tensor).relative_rms()
            if not max(was, now) <= RATIO * luck(tensor.size) * min(was, now) + SLACK * PRECISION:
                yield f"in float32 {name} is {now:.1e} away from float64, and was {was:.1e}"


def _versions(side: str, then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """How a framework and its machine have changed, in words."""
    names = [*PARTS[side], "numpy", "machine"]
    changes = [f"{name} {then.get(name)} -> {now.get(name)}" for name in names if then.get(name) != now.get(name)]
    same = ", ".join(f"{name} {now.get(name)}" for name in PARTS[side])
    return ", ".join(changes) or f"with the same {same}: the model's code, the settings or the machine have changed"


def _outputs(report: Report, run: str) -> dict[str, Array]:
    return {name: tensor for name, tensor in report.runs[run].items() if name != "loss" and not name.startswith(GRADIENT)}


def _are_distances(found: Any) -> bool:
    """Whether a value of JSON is a number by name by framework."""
    sides = list(found.values()) if isinstance(found, dict) else [None]
    return all(isinstance(side, dict) and all(isinstance(each, float) for each in side.values()) for side in sides)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    try:
        contents = containers.open(path)
        arrays = {".".join(words): np.asarray(array) for words, array in contents.arrays.items()}
        header = bounded_json.parse_object(contents.notes["header"], longest=_HEADER)
        if not {"digest", "environment", "distances"} <= header.keys():
            raise KeyError("header")
        if not isinstance(header["environment"], dict) or not _are_distances(header["distances"]):
            raise InputError("its environment or its distances are none")
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"{path} is no golden file that can be read ({error}): record it again with --parity-record"
        ) from None
    return header, arrays
