"""The verdict on a pair of models as data: the object that `python -m parity assert --json` and `--parity-json` print.

docs/reference/verdict.md describes the fields and the rule by which `SCHEMA` changes.
"""

from collections.abc import Mapping
from typing import Any

from parity.comparison.any_model.report import Report, UnequalWeightsError
from parity.comparison.any_model.trace.origin import Origin
from parity.comparison.report import replace_non_finite

SCHEMA = "parity.verdict/1"


def facts(report: Report) -> dict[str, Any]:
    """Return the verdict of a comparison for JSON; infinite numbers and NaN become null."""
    first = report.first
    found = {
        "schema": SCHEMA,
        "passed": report.passed,
        "verdict": report.verdict,
        "level": "precision" if "flax float32" in report.runs else "function",
        "failed_check": None if first is None else "G1" if first.same_function else "G0",
        "tensors": [
            {
                "name": row.name,
                "difference": row.difference,
                "flax": row.flax if "flax float32" in report.runs else None,
                "torch": row.torch if "torch float32" in report.runs else None,
                "same_function": row.same_function,
                "same_precision": row.same_precision,
            }
            for row in report.rows
        ],
        "parameters": [
            *(str(pair) + (f"    ({pair.note})" if pair.note else "") for pair in report.correspondence.pairs),
            *map(str, report.correspondence.zeros),
        ],
        "skipped": dict(report.correspondence.skipped),
        "origin": _origin_facts(report.origin),
        "fixed_parts": [
            {name: getattr(part, name) for name in ("framework", "module", "dtype", "operation")}
            for part in report.fixed_parts
        ],
        "tables": [
            {"shape": list(table.flax.shape), "module": table.module, "rounded": table.rounded} for table in report.tables
        ],
        "hints": list(report.hints),
        "notes": list(report.notes),
        "skipped_outputs": dict(report.skipped_outputs),
        "versions": dict(report.environment),
        "digest": report.digest,
    }
    return dict(replace_non_finite(found))


def unequal_weights_facts(error: UnequalWeightsError, level: str, versions: Mapping[str, str]) -> dict[str, Any]:
    """Return the verdict on models whose weights differ although they must be equal: nothing was run."""
    verdict, _header, *parameters = str(error).splitlines()
    return {
        "schema": SCHEMA,
        "passed": False,
        "verdict": f"FAIL: {verdict}",
        "level": level,
        "failed_check": None,
        "tensors": [],
        "parameters": [line.strip() for line in parameters],
        "skipped": {},
        "origin": None,
        "fixed_parts": [],
        "tables": [],
        "hints": [],
        "notes": [],
        "skipped_outputs": {},
        "versions": dict(versions),
        "digest": None,
    }


def error_facts(error: object) -> dict[str, Any]:
    """Return the object for a pair of models that cannot be compared; `error` says why in one line."""
    return {"schema": SCHEMA, "passed": None, "error": " ".join(str(error).split("\n"))}


def _origin_facts(origin: Origin | None) -> dict[str, Any] | None:
    """Return the operations where the models first differ; null for a framework in which none was found."""
    if origin is None:
        return None
    names = ("module", "operation", "file", "line", "function")
    places = {side: getattr(origin, side) for side in ("flax", "torch")}
    sides = {
        side: None
        if place is None
        else {**{name: getattr(place, name) for name in names}, "caller": str(place.caller or "")}
        for side, place in places.items()
    }
    return {"kind": origin.kind, "difference": origin.difference, **sides}
