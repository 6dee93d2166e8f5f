"""The throughput that is displayed: evaluations, checkpoints and metrics that arrive late must not distort it."""

import io
import time

import pytest
from rich.console import Console

from train.loop.progress import ProgressDisplay


@pytest.fixture
def display() -> ProgressDisplay:
    return ProgressDisplay(Console(file=io.StringIO(), width=200), 100, 10, mfu_per_image=0.01)


def set_time(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: seconds)


def finish_step(display: ProgressDisplay, done: int, *, updates_throughput: bool = True) -> None:
    display.step(done, 1.0, {"loss": 1.0, "lr": 0.1}, updates_throughput=updates_throughput)


def test_the_throughput_is_that_of_the_last_steps(display: ProgressDisplay, monkeypatch: pytest.MonkeyPatch) -> None:
    for done in range(1, 5):
        set_time(monkeypatch, 100.0 + 2 * done)
        finish_step(display, done)
    assert display.images_per_second == 5.0


def test_steps_whose_metrics_arrive_together_do_not_count_as_fast(
    display: ProgressDisplay, monkeypatch: pytest.MonkeyPatch
) -> None:
    for done, seconds in ((1, 0.0), (3, 4.0)):
        set_time(monkeypatch, seconds)
        if done > 1:
            finish_step(display, done - 1, updates_throughput=False)
        finish_step(display, done)
    assert display.images_per_second == 5.0


def test_the_time_of_evaluations_and_checkpoints_does_not_count(
    display: ProgressDisplay, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_time(monkeypatch, 0.0)
    finish_step(display, 1)
    set_time(monkeypatch, 50.0)
    display.restart_throughput(1)
    set_time(monkeypatch, 52.0)
    finish_step(display, 2)
    assert display.images_per_second == 5.0


def test_no_throughput_is_printed_before_it_is_known(display: ProgressDisplay) -> None:
    finish_step(display, 1)
    display.print_evaluation(1, 1.0, {}, {"loss": 1.0})
    assert "images/s" not in display._console.file.getvalue()  # type: ignore[attr-defined]
