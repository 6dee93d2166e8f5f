"""The processes of a run notice within a minute that another one has ended, although they wait for it in a collective."""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from parity.terminal import print_error
from train.loop.process import lost_process_error

INTERVAL = 5.0  # seconds between two signs of life of a process
PATIENCE = 40.0  # seconds without one after which a process counts as gone
EXIT_STATUS = 2  # that of errors of one line
MAIN = 0  # the process that watches the others
DONE, LOST = "done", "lost"


class Heartbeat:
    """Signs of life of this process in a store; those of another one that stop end the process.

    A process that waits in a collective for one that is gone cannot be interrupted otherwise.  The main process watches
    all others, and they watch the main process, so that the store is read once for each process.  If one stops, the main
    process says so in the store before it ends.

    One thread exchanges signs of life, and another one watches the time: a store whose process hangs never answers.

    Args:
        put: stores a text for a process.
        get: returns the newest text of a process.  It may raise if there is none, or if the process of the store is gone.
        process, count: the number of this process, and of all.
    """

    def __init__(self, put: Callable[[int, str], None], get: Callable[[int], str], process: int, count: int) -> None:
        self._put, self._get, self._process = put, get, process
        watched = [n for n in range(count) if n != MAIN] if process == MAIN else [MAIN]
        self._seen = dict.fromkeys(watched, time.monotonic())
        self._texts: dict[int, str] = {}
        self._stopped, self._is_done = threading.Event(), False
        self._exchanging = threading.Thread(target=self._exchange, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Start the threads."""
        self._exchanging.start()
        threading.Thread(target=self._watch, name="heartbeat watch", daemon=True).start()

    def stop(self, *, is_done: bool) -> None:
        """End the threads.

        is_done: whether this process has done its part, so that the others need not wait for it; else they end too.
        """
        self._is_done = is_done
        self._stopped.set()
        self._exchanging.join(INTERVAL)

    def _exchange(self) -> None:
        number = 0
        while not self._stopped.wait(INTERVAL):
            number += 1
            with suppress(Exception):  # whatever the store raises; if it is gone, no process is seen any more
                self._put(self._process, str(number))
            for other in self._seen:
                text = self._texts.get(other)
                with suppress(Exception):
                    text = self._get(other)
                if text != self._texts.get(other) or text == DONE:
                    self._texts[other], self._seen[other] = str(text), time.monotonic()
        if self._is_done:
            with suppress(Exception):
                self._put(self._process, DONE)

    def _watch(self) -> None:
        while not self._stopped.wait(INTERVAL):
            is_late = any(time.monotonic() - last > PATIENCE for last in self._seen.values())
            if is_late or self._texts.get(MAIN) == LOST:
                self._end()

    def _end(self) -> None:
        print_error(lost_process_error())
        sys.stdout.flush()
        if self._process == MAIN:
            with suppress(Exception):
                self._put(MAIN, LOST)
                time.sleep(2 * INTERVAL)  # the store may end with this process, and the others are to read it first
        os._exit(EXIT_STATUS)


_running: list[Heartbeat] = []


def start(put: Callable[[int, str], None], get: Callable[[int], str], process: int, count: int) -> None:
    """Start the heartbeat of this process; the arguments are those of `Heartbeat`."""
    _running.append(Heartbeat(put, get, process, count))
    _running[-1].start()


def stop() -> None:
    """Stop the heartbeat, if one has been started; to be called also while an exception is handled."""
    while _running:
        _running.pop().stop(is_done=sys.exc_info()[0] is None)
