"""Ctrl-C and SIGTERM ask a run to stop: it finishes the current step, saves a checkpoint, and ends."""

import os
import signal
from types import FrameType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def exit_on_ctrl_c() -> None:
    """Let Ctrl-C end the process at once, except in an `Interruption`: outside of it there is nothing to save.

    Python's own handler raises KeyboardInterrupt wherever the program is, also in a callback of a library, which may lose
    the exception or crash.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        os.write(2, b"\ninterrupted; what was saved before is kept\n")
        os._exit(128 + number)

    signal.signal(signal.SIGINT, handle)


class Interruption:
    """A context in which the first SIGINT or SIGTERM asks to stop, and a second SIGINT raises KeyboardInterrupt.

    Clusters send SIGTERM some seconds before they end a job.

    engine_handles_sigterm: for a run of several processes.  They must all stop after the same step, although only one may
        get the signal, so the engine handles SIGTERM (`Engine.should_stop`) and Ctrl-C is passed on as a SIGTERM.

    Attributes:
        requested: the number of the signal that asked to stop, else 0; always 0 if the engine handles SIGTERM.
    """

    requested = 0

    def __init__(self, *, engine_handles_sigterm: bool = False) -> None:
        self._engine_handles_sigterm, self._was_requested = engine_handles_sigterm, False
        self._signals = (signal.SIGINT,) if engine_handles_sigterm else SIGNALS

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._handle) for number in self._signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._was_requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._was_requested = True
        if self._engine_handles_sigterm:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self.requested = self.requested or number
        # A handler may run in the middle of a print, so it must not use Python's buffers.
        os.write(2, b"\nstopping: finishing this step and saving; press Ctrl-C again to quit at once\n")
