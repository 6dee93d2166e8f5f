"""The verdict on a pair of models as data: the object that `python -m parity assert --json` and `--parity-json` print.

Both add `SCHEMA` as the first field.  docs/reference/verdict.md describes the fields.
"""

from collections.abc import Mapping
from typing import Any

SCHEMA = "parity.verdict/1"


def unequal_weights_facts(error: object, level: str, versions: Mapping[str, str]) -> dict[str, Any]:
    """Return the verdict on models whose weights differ although they must be equal: nothing was run.

    error: the `UnequalWeightsError`.
    """
    verdict, _header, *parameters = str(error).splitlines()
    return {
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
    return {"passed": None, "error": " ".join(str(error).split("\n"))}
