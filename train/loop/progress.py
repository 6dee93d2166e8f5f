"""What a person sees while a run goes on: a bar at a terminal, plain lines elsewhere."""

import time
from collections import deque
from datetime import timedelta
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from train.loop.metrics import shown


class Display:
    """Shows how far a run is: loss, score, learning rate, images a second, time left.

    share: what one image a second is of the devices' peak FLOP/s, without what is computed again (MFU, arXiv 2204.02311,
        appendix B); None where the peak is not known.
    """

    def __init__(self, console: Console, total_steps: int, batch_size: int, *, share: float | None = None) -> None:
        self._console, self._total, self._batch, self._share = console, total_steps, batch_size, share
        self._times: deque[tuple[int, float]] = deque(maxlen=20)  # (steps done, when)
        self._first: tuple[int, float] | None = None  # the first step is left out: it compiles
        columns = TextColumn("[bold]{task.fields[what]}"), BarColumn(None), TextColumn("{task.fields[text]}")
        self._progress = Progress(*columns, console=console, expand=True, transient=True, disable=not console.is_terminal)
        self._task = self._progress.add_task("", total=total_steps, what="compiling", text="the first step takes longer")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @property
    def images_per_second(self) -> float:
        """Over the last steps; 0 until two are done."""
        if len(self._times) < 2:
            return 0.0
        (first, began), (last, ended) = self._times[0], self._times[-1]
        return (last - first) * self._batch / max(ended - began, 1e-9)

    def step(self, done: int, epoch: float, metrics: dict[str, float], *, alone: bool = True) -> None:
        """Show that `done` steps are done.

        alone: whether that is heard by itself; of steps that are heard of at once the last tells how long they took.
        """
        if alone:
            now = time.monotonic()
            self._first = self._first or (done, now)
            self._times.append((done, now))
        words = [
            *_words(metrics),
            f"lr {metrics['lr']:.1e}",
            *self._pace(),
            f"{self._left(done)} left",
        ]
        self._progress.update(self._task, completed=done, what=f"epoch {epoch:.1f}", text="  ".join(words))

    def looked(
        self,
        done: int,
        epoch: float,
        train: dict[str, float],
        held_out: dict[str, float],
        raw: dict[str, float] | None = None,
    ) -> None:
        """Leave a line about the training so far and the held-out images.

        raw: the held-out metrics of the raw weights, where those in `held_out` are of their running mean.
        """
        words = [f"epoch {epoch:5.1f}", f"step {done:{len(str(self._total))}}/{self._total}", *_words(train)]
        for title, metrics in {"held out": held_out, "raw weights": raw}.items():
            if metrics:
                words += [f"| {title}:", *_words({name: value for name, value in metrics.items() if "/" not in name})]
        words += ["|", *self._pace(), f"{self._left(done)} left"]
        self._console.print("  ".join(words), highlight=False, soft_wrap=True)

    def goes_on(self, done: int) -> None:
        """Measure the pace from here: until now, time went into looking and saving, in which no images were learnt."""
        self._times.clear()
        self._times.append((done, time.monotonic()))

    def _pace(self) -> list[str]:
        pace = self.images_per_second
        if not pace:
            return []
        peak = [f"{pace * self._share:.0%} of peak"] if self._share is not None else []
        return [f"{pace:.0f} images/s", *peak]

    def say(self, line: str) -> None:
        """Leave a line."""
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)

    def _left(self, done: int) -> str:
        if self._first is None or done <= self._first[0]:
            return "?"
        pace = (time.monotonic() - self._first[1]) / (done - self._first[0])
        return str(timedelta(seconds=round(pace * (self._total - done))))


def _words(metrics: dict[str, float]) -> list[str]:
    """Loss and score, each with its name."""
    names = sorted(metrics.keys() - {"lr", "grad_norm"}, key=lambda name: (name != "loss", name))
    return [f"{name.replace('_', ' ')} {shown(name, metrics[name])}" for name in names]
