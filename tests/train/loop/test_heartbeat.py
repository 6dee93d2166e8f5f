"""The heartbeat: a process without signs of life ends the others, unless it has done its part."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from train.loop import heartbeat
from train.loop.heartbeat import DONE, EXIT_STATUS, LOST, Heartbeat


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The statuses with which a heartbeat has ended this process, which goes on in the test."""
    found: list[int] = []
    monkeypatch.setattr(heartbeat, "INTERVAL", 0.01)
    monkeypatch.setattr(heartbeat, "PATIENCE", 0.2)

    monkeypatch.setattr(heartbeat.os, "_exit", found.append)
    yield found
    for thread in threading.enumerate():  # one that is about to end the process would, after the test
        if thread.name.startswith("heartbeat"):
            thread.join(30)
            assert not thread.is_alive()


def wait(exits: list[int], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not exits and time.monotonic() < deadline:
        time.sleep(0.01)


def test_a_process_without_signs_of_life_ends_the_others_in_a_line(
    exits: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    store, written = {1: "7"}, []

    def put(process: int, text: str) -> None:
        written.append((process, text))

    thread = Heartbeat(put, store.__getitem__, 0, 2)
    thread.start()
    wait(exits, 30)
    thread.stop(is_done=False)
    message = "another process of the run has ended: start all processes again with the same --run"
    assert exits[0] == EXIT_STATUS and capsys.readouterr().err.splitlines()[0] == f"error: {message}"
    assert written[5] == (0, "6") and (0, LOST) in written  # of which the others learn so


def test_a_process_ends_as_soon_as_the_main_process_says_that_another_is_lost(exits: list[int]) -> None:
    heartbeat.PATIENCE = 1e9  # the fixture resets it
    store, read = {0: LOST, 2: "7"}, []

    def get(process: int) -> str:
        read.append(process)
        return store[process]

    thread = Heartbeat(store.__setitem__, get, 1, 3)
    thread.start()
    wait(exits, 30)
    thread.stop(is_done=False)
    assert exits[0] == EXIT_STATUS and set(read) == {0}


def test_a_store_that_is_gone_ends_the_process(exits: list[int]) -> None:
    def gone(*arguments: Any) -> Any:
        raise ConnectionError

    thread = Heartbeat(gone, gone, 1, 2)
    thread.start()
    wait(exits, 30)
    thread.stop(is_done=True)
    assert exits[0] == EXIT_STATUS


def test_a_store_that_never_answers_ends_the_process(exits: list[int]) -> None:
    """The machine of the main process hangs, and with it the store."""
    answers = threading.Event()

    def hang(*arguments: Any) -> Any:
        answers.wait()

    thread = Heartbeat(hang, hang, 1, 2)
    thread.start()
    wait(exits, 30)
    thread.stop(is_done=True)
    answers.set()
    assert exits[0] == EXIT_STATUS


def test_processes_that_live_or_have_done_their_part_are_waited_for(exits: list[int]) -> None:
    store: dict[int, str] = {2: DONE}
    threads = [Heartbeat(store.__setitem__, store.__getitem__, process, 3) for process in (0, 1)]
    for thread in threads:
        thread.start()
    wait(exits, 0.6)
    assert not exits
    threads[0].stop(is_done=True)
    wait(exits, 0.6)
    assert not exits and store[0] == DONE
    threads[1].stop(is_done=False)
    assert store[1] != DONE


def test_an_exception_is_no_end_that_others_wait_for(exits: list[int]) -> None:
    store: dict[int, str] = {}
    for is_clean in (True, False):
        heartbeat.start(store.__setitem__, store.__getitem__, 0, 1)
        try:
            if not is_clean:
                raise ValueError
        except ValueError:
            heartbeat.stop()
            assert store.get(0) != DONE
        else:
            heartbeat.stop()
            assert store.pop(0) == DONE
