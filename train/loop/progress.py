"""The progress of a run: a bar at a terminal, and a line for each evaluation."""

import time
from collections import defaultdict, deque
from datetime import timedelta
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from train.loop.metrics import format_metric


class ProgressDisplay:
    """Shows the loss, the metric, the learning rate, the throughput and the time left of a run.

    mfu_per_image: the model FLOPs utilization (MFU, arXiv 2204.02311, appendix B) at a throughput of one image/s;
        recomputation is not counted.  None if it is not known.
    """

    def __init__(self, console: Console, total_steps: int, batch_size: int, *, mfu_per_image: float | None = None) -> None:
        self._console, self._total, self._batch, self._mfu_per_image = console, total_steps, batch_size, mfu_per_image
        self._images_per_second = 0.0  # 0 until it is measured
        # (steps done, time) by the number of later steps that had started.  A device may end these in the meantime, and a
        # CPU does: two times are comparable only if this number is the same.
        self._times = defaultdict[int, deque[tuple[int, float]]](lambda: deque(maxlen=20))
        self._first: tuple[int, float] | None = None  # the time left counts from here: the first step compiles
        columns = TextColumn("[bold]{task.fields[what]}"), BarColumn(None), TextColumn("{task.fields[text]}")
        self._progress = Progress(*columns, console=console, expand=True, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("", total=total_steps, what="compiling", text="the first step takes longer")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def step(self, done: int, epoch: float, metrics: dict[str, float], *, pending: int) -> None:
        """Show that the metrics of the first `done` steps are read.

        pending: number of later steps that have started, and whose metrics are not read.  If it is 0, the throughput is
            that of all steps since `restart_throughput`; otherwise, that of the last steps with as many pending.
        """
        now = time.monotonic()
        self._first = self._first or (done, now)
        times = self._times[pending]
        times.append((done, now))
        if len(times) > 1:
            (first, began), (last, ended) = times[0], times[-1]
            self._images_per_second = (last - first) * self._batch / max(ended - began, 1e-9)
        words = [
            *_metric_words(metrics),
            f"lr {metrics['lr']:.1e}",
            *self._throughput(),
            f"{self._time_left(done)} left",
        ]
        self._progress.update(self._task, completed=done, what=f"epoch {epoch:.1f}", text="  ".join(words))

    def print_evaluation(
        self,
        done: int,
        epoch: float,
        train: dict[str, float],
        held_out: dict[str, float],
        raw: dict[str, float] | None = None,
    ) -> None:
        """Print a line with the metrics of training and of an evaluation.

        train: means of the metrics of training since the last record before this step.
        held_out: metrics of the held-out set, of the EMA of the weights if there is one.
        raw: those of the weights themselves if there is an EMA.
        """
        words = [f"epoch {epoch:5.1f}", f"step {done:{len(str(self._total))}}/{self._total}", *_metric_words(train)]
        for title, metrics in {"held out": held_out, "raw weights": raw}.items():
            if metrics:
                words += [
                    f"| {title}:",
                    *_metric_words({name: value for name, value in metrics.items() if "/" not in name}),
                ]
        words += ["|", *self._throughput(), f"{self._time_left(done)} left"]
        self._console.print("  ".join(words), highlight=False, soft_wrap=True)

    def restart_throughput(self, done: int) -> None:
        """Measure the throughput from here on, after an evaluation, a checkpoint or an end of a profile.

        No step is pending.
        """
        self._times.clear()
        self._times[0].append((done, time.monotonic()))

    def _throughput(self) -> list[str]:
        throughput = self._images_per_second
        if not throughput:
            return []
        mfu = [f"{throughput * self._mfu_per_image:.0%} of peak"] if self._mfu_per_image is not None else []
        return [f"{throughput:.0f} images/s", *mfu]

    def print_line(self, line: str) -> None:
        """Print a line above the bar."""
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)

    def _time_left(self, done: int) -> str:
        if self._first is None or done <= self._first[0]:
            return "?"
        seconds_per_step = (time.monotonic() - self._first[1]) / (done - self._first[0])
        return str(timedelta(seconds=round(seconds_per_step * (self._total - done))))


def _metric_words(metrics: dict[str, float]) -> list[str]:
    """Return the names and values of the metrics, the loss first, without learning rate and gradient norm."""
    names = sorted(metrics.keys() - {"lr", "grad_norm"}, key=lambda name: (name != "loss", name))
    return [f"{name.replace('_', ' ')} {format_metric(name, metrics[name])}" for name in names]
