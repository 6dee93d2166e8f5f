"""What a person sees while a run goes on is true: the pace above all, which looks, saves and late results could falsify."""

import io
import time

import pytest
from rich.console import Console

from train.loop.progress import Display


@pytest.fixture
def display() -> Display:
    return Display(Console(file=io.StringIO(), width=200), 100, 10, share=0.01)


def after(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: seconds)


def stepped(display: Display, done: int, *, alone: bool = True) -> None:
    display.step(done, 1.0, {"loss": 1.0, "lr": 0.1}, alone=alone)


def test_the_pace_is_that_of_the_last_steps(display: Display, monkeypatch: pytest.MonkeyPatch) -> None:
    for done in range(1, 5):
        after(monkeypatch, 100.0 + 2 * done)
        stepped(display, done)
    assert display.images_per_second == 5.0


def test_steps_that_are_heard_of_at_once_are_not_taken_for_fast_ones(
    display: Display, monkeypatch: pytest.MonkeyPatch
) -> None:
    for done, seconds in ((1, 0.0), (3, 4.0)):
        after(monkeypatch, seconds)
        if done > 1:
            stepped(display, done - 1, alone=False)
        stepped(display, done)
    assert display.images_per_second == 5.0


def test_looking_and_saving_do_not_count(display: Display, monkeypatch: pytest.MonkeyPatch) -> None:
    after(monkeypatch, 0.0)
    stepped(display, 1)
    after(monkeypatch, 50.0)
    display.goes_on(1)
    after(monkeypatch, 52.0)
    stepped(display, 2)
    assert display.images_per_second == 5.0


def test_a_pace_that_is_not_known_yet_is_not_told(display: Display) -> None:
    stepped(display, 1)
    display.looked(1, 1.0, {}, {"loss": 1.0})
    assert "images/s" not in display._console.file.getvalue()  # type: ignore[attr-defined]
