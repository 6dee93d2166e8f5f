"""Golden files of `assert_parity`: outputs of a pair of models, recorded once and verified by later runs.

One npz file contains PyTorch's float64 outputs by name, and a JSON header: their tolerances in float64, the float32 errors
of each framework from these outputs, digests of the weights and inputs, the name of the test, and the versions of the
libraries.  Outputs in float64 differ between machines by at most 1e-13, or more if the model amplifies rounding errors.  So
the difference of a model from a recorded output is measured as one between two models is, and has the same tolerance.
"""

import json
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np

from parity.checkpoints import containers
from parity.checkpoints.atomic_write import atomic_replace
from parity.checkpoints.containers.header_checks import quote_names
from parity.checkpoints.layout import Array
from parity.comparison.any_model.report import GRADIENT_OF, PairReport
from parity.comparison.any_model.tensor_comparison import error_of, output_difference
from parity.comparison.tolerances import (
    ERROR_RATIO_SLACK,
    FLOAT32_TOLERANCE,
    FLOAT64_TOLERANCE,
    MAX_UNDIVIDED_TOLERANCE,
    RMS_ERROR_RATIO,
    five_sigma_factor,
)
from vit_spec import InputError, bounded_json

_MAX_HEADER = 1 << 24  # bytes

PACKAGES = {"flax": ("jax", "flax"), "torch": ("torch",)}  # side -> the packages whose versions it depends on


def record(path: Path, report: PairReport, test: str) -> None:
    """Write the golden file of a comparison that passed; an existing file is replaced.

    path: a path that ends in .npz; its folder is created if necessary.
    test: the name of the test, which `verify` checks.

    Raises:
        InputError: the file cannot be written; an existing file is unchanged.
    """
    reference = _outputs(report, "torch float64")
    header = {
        "test": test,
        "digest": report.digest,
        "fingerprints": report.fingerprints,
        "environment": dict(report.environment),
        "tolerances": {row.name: row.float64_tolerance for row in report.rows if row.name in reference},
        "distances": {
            side: {name: _float32_errors(report, side, name, tensor)[-1] for name, tensor in reference.items()}
            for side in PACKAGES
            if report.level == "precision"
        },
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_replace(path) as new:
            np.savez_compressed(new, header=np.array(json.dumps(header)), **reference)  # type: ignore[arg-type]
    except OSError as error:
        raise InputError(
            f"cannot write {path} ({error.strerror or error}): correct that, and record it again with --parity-record"
        ) from None


def verify(path: Path, report: PairReport, test: str) -> list[str]:
    """Return a line for each framework whose outputs differ from a golden file, with the versions then and now.

    Raises:
        InputError: the file is no golden file, or was recorded by another test, with other weights or inputs, or without
            the float32 errors that the level of the report compares.
    """
    header, recorded = _read(path)
    if (other := header.get("test", test)) != test:  # files of earlier versions have no name
        raise InputError(f"{path} was recorded by {other}, and not by {test}: record it again with --parity-record")
    now = _outputs(report, "torch float64")
    if header["digest"] != report.digest or recorded.keys() != now.keys():
        others = [] if header["digest"] == report.digest else _other_arrays(header.get("fingerprints"), report.fingerprints)
        if recorded.keys() != now.keys():
            others.append(f"outputs ({quote_names(recorded)}; the models return {quote_names(now)})")
        raise InputError(
            f"{path} was recorded with other {', other '.join(others)}: record it again with --parity-record if the change "
            "is intended"
        )
    if report.level == "precision" and not header["distances"]:
        raise InputError(f"{path} has no errors of level 'precision': record it again with --parity-record")
    return [
        f"{side} has changed: {what}; {_describe_versions(side, header['environment'], report.environment)}"
        for side in PACKAGES
        if (what := next(_describe_changes(side, header, recorded, report), None))
    ]


def _other_arrays(then: Mapping[str, Mapping[str, str]] | None, now: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return "weights", "inputs" or both, with how many of them differ, and how the first does.

    then: the fingerprints of a golden file, or None: files of earlier versions have only one digest of all arrays.
    """
    found = [
        f"{kind} ({len(changes)} of {len(now[kind])} differ{'s' if len(changes) == 1 else ''}: {changes[0]})"
        for kind in now
        if then and (changes := list(_describe_arrays(then.get(kind, {}), now[kind])))
    ]
    return found or ["weights or inputs"]


def _describe_arrays(then: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """Yield a clause for each array whose fingerprint differs."""
    for name in {**then, **now}:
        if name not in now or name not in then:
            yield f"{name} {'was not recorded' if name in now else 'was recorded, and does not exist now'}"
        elif then[name] != now[name]:
            was, shape = (each.rpartition(" ")[0] for each in (then[name], now[name]))
            what = f"has the shape {shape}, and {was} was recorded"
            yield f"{name} {'has other values, or another dtype' if was == shape else what}"


def _describe_changes(side: str, header: Any, recorded: Mapping[str, Array], report: PairReport) -> Iterator[str]:
    """Yield a clause for each output that differs from the recorded one in float64, and for each changed float32 error."""
    tolerances = {row.name: row.float64_tolerance for row in report.rows}
    for name, tensor in recorded.items():
        if (shape := report.runs[f"{side} float64"][name].shape) != tensor.shape:
            yield f"{name} has the shape {shape}, and {tensor.shape} was recorded"
            continue
        difference = output_difference(name, report.runs[f"{side} float64"][name], tensor)
        # Files of earlier versions have no tolerances, and rounding may exceed 1e-12 on one machine only.
        tolerance = max(header.get("tolerances", {}).get(name, FLOAT64_TOLERANCE), tolerances[name])
        if not difference <= tolerance:
            yield f"in float64 {name} differs by {difference:.1e} from the recorded output (tolerance {tolerance:.0e})"
        if report.level == "precision":
            was, errors = header["distances"][side][name], _float32_errors(report, side, name, tensor)
            factor = RMS_ERROR_RATIO * five_sigma_factor(tensor.size)
            slack = ERROR_RATIO_SLACK * FLOAT32_TOLERANCE
            if not any(max(was, now) <= factor * min(was, now) + slack for now in errors):
                yield f"in float32 the error of {name} is {errors[0]:.1e}, and {was:.1e} was recorded"


def _float32_errors(report: PairReport, side: str, name: str, reference: Array) -> list[float]:
    """Return the float32 error of an output, and then that of operations that only round if the output passes by it.

    The first depends on the order in which a machine adds long sums.
    """
    of_operations = [row.rounded[side == "torch"] for row in report.rows if row.name == name and row.rounded]
    return [error_of(name, report.runs[f"{side} float32"][name], reference).relative_rms(), *of_operations]


def _describe_versions(side: str, then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return the versions that differ, as "jax 0.9.0 -> 0.10.0", or a clause that says that none differs."""
    names = [*PACKAGES[side], "numpy", "machine"]
    changes = [f"{name} {then.get(name)} -> {now.get(name)}" for name in names if then.get(name) != now.get(name)]
    same = ", ".join(f"{name} {now.get(name)}" for name in PACKAGES[side])
    return (
        ", ".join(changes) or f"the versions are the same ({same}): the model's code, the settings or the machine changed"
    )


def _outputs(report: PairReport, run: str) -> dict[str, Array]:
    tensors = report.runs[run].items()
    return {name: tensor for name, tensor in tensors if name != "loss" and not name.startswith(GRADIENT_OF)}


def _are_errors(value: Any, outputs: Set[str]) -> bool:
    """Return whether a value from JSON has a float for each framework and output, or is empty as at level "function"."""
    if value == {}:
        return True
    return (isinstance(value, dict) and value.keys() == PACKAGES.keys()) and all(
        isinstance(side, dict) and side.keys() == outputs and all(isinstance(each, float) for each in side.values())
        for side in value.values()
    )


def _are_tolerances(value: Any, outputs: Set[str]) -> bool:
    """Return whether a value from JSON has a tolerance of G0 for each output, or is empty as of earlier versions."""
    return (isinstance(value, dict) and value.keys() in (set(), outputs)) and all(
        isinstance(each, float) and each <= MAX_UNDIVIDED_TOLERANCE for each in value.values()
    )


def _are_fingerprints(value: Any) -> bool:
    """Return whether a value from JSON has objects of text, as the fingerprints of weights and inputs."""
    return isinstance(value, dict) and all(
        isinstance(each, dict) and all(isinstance(text, str) for text in each.values()) for each in value.values()
    )


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return the header and the outputs of a golden file.

    Raises:
        InputError: the file is no golden file, or is damaged.
    """
    try:
        contents = containers.open(path)
        arrays = {".".join(words): np.asarray(array) for words, array in contents.arrays.items()}
        header = bounded_json.parse_object(contents.metadata["header"], max_bytes=_MAX_HEADER)
        if not {"digest", "environment", "distances"} <= header.keys():
            raise KeyError("header")
        if not isinstance(header["environment"], dict) or not _are_errors(header["distances"], arrays.keys()):
            raise InputError("its environment or its distances have the wrong type or are incomplete")
        if not _are_tolerances(header.get("tolerances", {}), arrays.keys()):
            raise InputError("its tolerances have the wrong type or are incomplete")
        if not _are_fingerprints(header.get("fingerprints", {})):
            raise InputError("its fingerprints have the wrong type")
    except (OSError, ValueError, KeyError) as error:
        reason = str(error)  # one with the path is that of the container, and gives another remedy
        what = "is not a golden file, or is damaged" + (f" ({reason})" if str(InputError(path)) not in reason else "")
        raise InputError(f"{path} {what}: record it again with --parity-record") from None
    return header, arrays
