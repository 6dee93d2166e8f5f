"""The state of the loop, which it saves with a checkpoint, and its checks: a file may be damaged, or an older version's."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

Metrics = dict[str, float]

# The keys in the JSON of a checkpoint, by the fields.  Checkpoints of all versions have those of `FIRST_KEYS`.
FIRST_KEYS = {
    "scores.last": "last",
    "scores.best": "best",
    "is_evaluated": "looked",
    "recent_metrics": "window",
    "mean_metrics": "mean",
    "unreadable": "unread",
    "skipped": "skipped",
    "seconds": "seconds",
}
KEYS = FIRST_KEYS | {
    "run_id": "run",
    "scores_raw.last": "last_raw",
    "scores_raw.best": "best_raw",
    "best_files": "best_files",
    "num_records": "records",
    "evaluations_since_best": "since_best",
    "skipped_in_a_row": "skipped_in_a_row",
    "settings": "config",
}


@dataclass
class Scores:
    """The newest and the best held-out metrics of one kind of weights; {} before the first evaluation."""

    last: Metrics = field(default_factory=dict)
    best: Metrics = field(default_factory=dict)


@dataclass(kw_only=True)
class LoopState:
    """The state of the loop: what it saves with a checkpoint.

    scores: scores of the EMA of the weights if the engine has one, else of the weights themselves.
    scores_raw: scores of the weights themselves if there is an EMA, else empty.
    is_evaluated: whether `scores.last` belongs to the current weights.
    evaluations_since_best: number of evaluations since the best one, without those whose primary metric is undefined.
    recent_metrics: metrics of each step since the last record of training in metrics.jsonl.
    mean_metrics: the record of training after this step; {} if there is none.
    unreadable: names of images that could not be read, sorted; of the training images of several processes, those of the
        main process.
    skipped: number of steps that changed nothing because their loss or gradient norm was not finite.
    skipped_in_a_row: number of such steps since the last step that was not skipped.
    best_files: see `train.loop.weight_files.WeightFiles.recorded`.

    Set when a checkpoint is saved:
    run_id: id of the run; "": not known.
    seconds: the time that the run has taken, in all its parts.
    num_records: number of records in metrics.jsonl up to this step.
    settings: those of the run when the checkpoint was saved; see `train.loop.settings`.  {}: not known.
    """

    scores: Scores = field(default_factory=Scores)
    scores_raw: Scores = field(default_factory=Scores)
    is_evaluated: bool = False
    evaluations_since_best: int = 0
    recent_metrics: list[Metrics] = field(default_factory=list)
    mean_metrics: Metrics = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)
    skipped: int = 0
    skipped_in_a_row: int = 0
    best_files: dict[str, dict[str, Any]] = field(default_factory=dict)
    run_id: str = ""
    seconds: float = 0.0
    num_records: int = 0
    settings: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the state as a JSON object; metrics may be NaN."""
        return {key: attrgetter(path)(self) for path, key in KEYS.items()}

    @classmethod
    def from_json(cls, found: Any, primary_metric: str) -> "LoopState | None":
        """Return the state that `to_json` has written; None if no run writes such JSON.

        primary_metric: primary metric of the task, see `train.loop.metrics.PRIMARY_METRIC`.
        """
        if not isinstance(found, dict) or not found.keys() >= set(FIRST_KEYS.values()):
            return None
        state = cls()
        for path, key in KEYS.items():
            if key in found:
                owner, _, name = path.rpartition(".")
                setattr(getattr(state, owner) if owner else state, name, found[key])
        return state if state._is_valid(primary_metric) else None

    def _is_valid(self, primary_metric: str) -> bool:
        """Whether the fields have their types, and best metrics the primary one."""
        return (
            isinstance(self.recent_metrics, list)
            and all(
                isinstance(each, dict) and all(type(value) in (int, float) for value in each.values())
                for scores in (self.scores, self.scores_raw)
                for each in (scores.last, scores.best, self.mean_metrics, *self.recent_metrics)
            )
            and all(primary_metric in each.best for each in (self.scores, self.scores_raw) if each.best)
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
            and isinstance(self.settings, dict)
            and isinstance(self.settings.get("lineage", []), list)
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
