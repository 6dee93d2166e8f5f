"""What the loop saves with a checkpoint: checks of a state that a file may have damaged or an older version written."""

import math
from collections.abc import Mapping
from typing import Any

from train.loop.engine import LoopState


def with_missing_keys(state: Any) -> LoopState:
    """Return a loop state with the keys that checkpoints of older versions lack; {} if it is no JSON object."""
    missing: LoopState = {"run": "", "last_raw": {}, "best_raw": {}, "best_files": {}, "records": 0, "since_best": 0}
    return missing | state if isinstance(state, dict) else {}


def is_loop_state(state: LoopState, primary_metric: str) -> bool:
    """Whether a state has the keys and types that `Loop` writes: the file may be damaged or another program's."""
    metric_dicts = [state.get(name) for name in ("last", "best", "last_raw", "best_raw", "mean")]
    window, unreadable, files = state.get("window"), state.get("unread"), state.get("best_files")
    if (
        not isinstance(window, list)
        or not isinstance(state.get("run"), str)
        or not isinstance(unreadable, list)
        or not all(isinstance(name, str) for name in unreadable)
        or not isinstance(files, dict)
        or not all(isinstance(file, dict) and type(file.get("step")) is int and "sha256" in file for file in files.values())
    ):
        return False
    dicts = [each for each in (*metric_dicts, *window) if isinstance(each, dict)]
    return (
        len(dicts) == len(metric_dicts) + len(window)
        and all(type(value) in (int, float) for each in dicts for value in each.values())
        and all(primary_metric in each for each in (state["best"], state["best_raw"]) if each)
        and all(type(state.get(name)) is int for name in ("skipped", "records", "since_best"))
        and type(state.get("looked")) is bool
        and type(state.get("seconds")) in (int, float)
        and math.isfinite(state["seconds"])
    )


def equal_metrics(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """Whether metrics are equal; an undefined metric, NaN, equals itself."""
    return one.keys() == other.keys() and all(
        value == other[name] or (math.isnan(value) and math.isnan(other[name])) for name, value in one.items()
    )
