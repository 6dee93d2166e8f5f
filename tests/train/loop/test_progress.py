"""The throughput that is displayed: evaluations, checkpoints and metrics that arrive late must not distort it."""

import io
import time

import pytest
from rich.console import Console

from train.loop.progress import ProgressDisplay


@pytest.fixture
def display() -> ProgressDisplay:
    return ProgressDisplay(Console(file=io.StringIO(), width=200), 100, 10, mfu_per_image=0.01)


def finish_step(monkeypatch: pytest.MonkeyPatch, display: ProgressDisplay, done: int, seconds: float, pending: int) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: seconds)
    display.step(done, 1.0, {"loss": 1.0, "lr": 0.1}, pending=pending)


def printed(display: ProgressDisplay) -> str:
    display.print_evaluation(1, 1.0, {}, {"loss": 1.0})
    return display._console.file.getvalue()  # type: ignore[attr-defined]


def test_the_throughput_of_pending_steps_is_that_of_the_last_20(
    display: ProgressDisplay, monkeypatch: pytest.MonkeyPatch
) -> None:
    for done in range(1, 31):
        finish_step(monkeypatch, display, done, 100.0 + (2 * done if done > 10 else 0), pending=2)
    assert "  5 images/s  5% of peak  " in printed(display)


def test_without_pending_steps_the_throughput_is_that_since_the_last_restart(
    display: ProgressDisplay, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish_step(monkeypatch, display, 1, 0.0, pending=0)
    monkeypatch.setattr(time, "monotonic", lambda: 50.0)
    display.restart_throughput(1)
    for done, seconds, pending in ((2, 54.0, 2), (3, 58.0, 2), (4, 58.0, 1), (5, 58.0, 0)):  # as on a CPU
        finish_step(monkeypatch, display, done, seconds, pending)
    assert "  5 images/s  5% of peak  " in printed(display)


def test_no_throughput_is_printed_before_it_is_known(display: ProgressDisplay) -> None:
    display.step(1, 1.0, {"loss": 1.0, "lr": 0.1}, pending=0)
    assert "images/s" not in printed(display)
