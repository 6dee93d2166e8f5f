"""Results of the simple models of features: the JSON that `train.evaluate` prints, and the rows of its table."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from parity.commands.printing import make_table
from train.inference import probes
from train.inference.head import head_result
from train.inference.scores import Score, Scores
from train.loop.metrics import PRIMARY_METRIC, format_metric
from train.recipes import Task

SHOWN_METRICS = {"classes": ("accuracy",), "labels": ("auroc",), "values": ("mae", "r2")}  # in the table


@dataclass(frozen=True)
class KnnResult:
    """The result of k nearest neighbours."""

    k: int
    accuracy: Score

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object; metrics may be NaN."""
        value, low, high = self.accuracy
        return {"method": "knn", "k": self.k, "accuracy": value, "intervals": {"accuracy": [low, high]}}

    def table_row(self) -> tuple[str, str, str, str]:
        """Return method, setting, held-out metrics and details, as texts."""
        return "knn", f"k {self.k}", _with_interval("accuracy", self.accuracy), ""


@dataclass(frozen=True)
class LinearResult:
    """The result of a linear probe.

    constant: what `train.loop.metrics.constant_score` returns.
    images: what `train.inference.head.images_of_each` returns.
    """

    task: Task
    probe: probes.LinearProbe
    scores: Scores
    constant: tuple[str, float]
    images: dict[str, int]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object; metrics may be NaN."""
        setting = {"l2": self.probe.strength, "validation": self.probe.validated, "converged": self.probe.converged}
        result = {"method": "linear", **setting, **head_result(self.scores, self.constant, self.images)}
        if self.task == "labels":  # each by itself, under the names that the trainers' records have
            result |= {f"auroc/{name}": of["auroc"].value for name, of in self.scores.each.items()}
        return result

    def table_row(self) -> tuple[str, str, str, str]:
        """Return method, setting, held-out metrics and details, as texts."""
        metrics = ", ".join(_with_interval(name, self.scores.overall[name]) for name in SHOWN_METRICS[self.task])
        not_converged = "" if self.probe.converged else f"; not converged in {probes.MAX_ITERATIONS:,} iterations"
        validation = format_metric(PRIMARY_METRIC[self.task], self.probe.validated)
        return "linear", f"L2 {self.probe.strength:.2g}", metrics, f"validation {validation}{not_converged}"


@dataclass(frozen=True)
class FewShotResult:
    """The result of least squares on few images of each class, the mean over the random draws.

    shots: images of each class.
    draws: the accuracy with the penalty `probes.L2` of each draw, by big_vision's name of the metric.
    accuracy: their mean.
    best_l2, best_accuracy: the penalty of `probes.L2_GRID` with the highest mean accuracy, and that accuracy.
    """

    shots: int
    accuracy: float
    draws: dict[str, float]
    best_l2: float
    best_accuracy: float

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        means = {"accuracy": self.accuracy, "draws": self.draws}
        best = {"best_l2": self.best_l2, "best_accuracy": self.best_accuracy}
        return {"method": "few-shot", "shots": self.shots, "l2": probes.L2, **means, **best}

    def table_row(self) -> tuple[str, str, str, str]:
        """Return method, setting, held-out metrics and details, as texts."""
        draws = ", ".join(format_metric("accuracy", value) for value in self.draws.values())
        best = f"{format_metric('accuracy', self.best_accuracy)} at L2 2^{math.log2(self.best_l2):.0f}"
        setting = f"shots {self.shots}, L2 2^{math.log2(probes.L2):.0f}"
        mean = _with_interval("accuracy", Score(self.accuracy))
        return "few-shot", setting, mean, f"draws {draws}; best of the grid {best}"


ProbeResult = KnnResult | LinearResult | FewShotResult


def results_table(results: Sequence[ProbeResult]) -> Table:
    """Return a table with a row for each result."""
    table = make_table(None, "method", "setting", "held out", "")
    for result in results:
        table.add_row(*result.table_row())
    return table


def _with_interval(name: str, score: Score) -> str:
    """Return a metric with its name as text, and with its interval if it has one."""
    ends = "" if math.isnan(score.low) else f" ({format_metric(name, score.low)} to {format_metric(name, score.high)})"
    return f"{name} {format_metric(name, score.value)}{ends}"
