"""The state of the loop that is saved with a checkpoint, and its checks: a file may be damaged, or an older version's."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

Metrics = dict[str, float]

# Keys in the JSON of a checkpoint that differ from the names of the fields.  Checkpoints of all versions have them.
KEYS = {
    "run_id": "run",
    "is_evaluated": "looked",
    "evaluations_since_best": "since_best",
    "recent_metrics": "window",
    "mean_metrics": "mean",
    "unreadable": "unread",
    "num_records": "records",
}


@dataclass(frozen=True, kw_only=True)
class LoopState:
    """The state of the loop that a checkpoint has.  Checkpoints of older versions lack some fields: those with a default.

    run_id: id of the run; "": not known.
    last, best, last_raw, best_raw, evaluations_since_best, unreadable, skipped, skipped_in_a_row: see
        `train.loop.loop.Loop`.
    is_evaluated: whether `last` belongs to the weights of the checkpoint.
    best_files: see `train.loop.weight_files.WeightFiles.recorded`.
    recent_metrics: metrics of each step since the last record of training in metrics.jsonl.
    mean_metrics: the record of training after this step; {} if there is none.
    seconds: the time that the run has taken, in all its parts.
    num_records: number of records in metrics.jsonl up to this step.
    """

    last: Metrics
    best: Metrics
    is_evaluated: bool
    recent_metrics: list[Metrics]
    mean_metrics: Metrics
    unreadable: list[str]
    skipped: int
    seconds: float
    run_id: str = ""
    last_raw: Metrics = field(default_factory=dict)
    best_raw: Metrics = field(default_factory=dict)
    best_files: dict[str, dict[str, Any]] = field(default_factory=dict)
    num_records: int = 0
    evaluations_since_best: int = 0
    skipped_in_a_row: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the state as a JSON object; metrics may be NaN."""
        return {KEYS.get(each.name, each.name): getattr(self, each.name) for each in fields(self)}

    @classmethod
    def from_json(cls, found: Any, primary_metric: str) -> "LoopState | None":
        """Return the state that `to_json` has written; None if no run writes such JSON.

        primary_metric: primary metric of the task, see `train.loop.metrics.PRIMARY_METRIC`.
        """
        if not isinstance(found, dict):
            return None
        keys = {each.name: KEYS.get(each.name, each.name) for each in fields(cls)}
        try:
            state = cls(**{name: found[key] for name, key in keys.items() if key in found})
        except TypeError:  # a field without a default is missing
            return None
        return state if state._is_valid(primary_metric) else None

    def _is_valid(self, primary_metric: str) -> bool:
        """Whether the fields have their types, and best metrics the primary one."""
        return (
            isinstance(self.recent_metrics, list)
            and all(
                isinstance(each, dict) and all(type(value) in (int, float) for value in each.values())
                for each in (self.last, self.best, self.last_raw, self.best_raw, self.mean_metrics, *self.recent_metrics)
            )
            and all(primary_metric in each for each in (self.best, self.best_raw) if each)
            and isinstance(self.unreadable, list)
            and all(isinstance(name, str) for name in self.unreadable)
            and isinstance(self.best_files, dict)
            and all(
                isinstance(each, dict) and type(each.get("step")) is int and "sha256" in each
                for each in self.best_files.values()
            )
            and all(
                type(each) is int
                for each in (self.skipped, self.skipped_in_a_row, self.num_records, self.evaluations_since_best)
            )
            and type(self.is_evaluated) is bool
            and isinstance(self.run_id, str)
            and type(self.seconds) in (int, float)
            and math.isfinite(self.seconds)
        )


def equal_metrics(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    """Whether metrics are equal; an undefined metric, NaN, equals itself."""
    return one.keys() == other.keys() and all(
        value == other[name] or (math.isnan(value) and math.isnan(other[name])) for name, value in one.items()
    )
