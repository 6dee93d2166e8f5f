"""Ctrl-C and SIGTERM as requests: the step that is under way is finished, the state is saved, and then the run ends."""

import os
import signal
from types import FrameType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def leave_at_once() -> None:
    """Let Ctrl-C end the process as long as no `Interruption` is entered: there is nothing to save.

    Python would raise an exception wherever it is, be it in a library's callback, which loses or does not survive it.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        os.write(2, b"\ninterrupted; what was saved before stays\n")
        os._exit(128 + number)

    signal.signal(signal.SIGINT, handle)


class Interruption:
    """While entered, the first SIGINT or SIGTERM sets `requested` to its number; a second SIGINT leaves at once.

    Clusters send SIGTERM some seconds ahead of taking a machine away.  Where a run has several processes, one of which may
    be told alone, jax watches for SIGTERM itself and lets all of them stop after the same step: `watched` leaves it that,
    and hands Ctrl-C over to it; `requested` stays 0 then, since no process may stop by itself.
    """

    requested = 0

    def __init__(self, *, watched: bool = False) -> None:
        self._watched, self._told = watched, False
        self._signals = (signal.SIGINT,) if watched else SIGNALS

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._handle) for number in self._signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._told and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._told = True
        if self._watched:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self.requested = self.requested or number
        # A handler may run in the middle of a print, so it must not use Python's own buffers.
        os.write(2, b"\nstopping after this step, then saving; Ctrl-C again leaves at once\n")
