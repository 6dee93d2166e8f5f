"""Ctrl-C as a request: the step that is under way is finished, what was learnt is saved, and then the run ends."""

import os
import signal
from types import FrameType
from typing import Self


class Interruption:
    """While entered, the first SIGINT sets `requested`; a second one raises KeyboardInterrupt at once."""

    requested = False

    def __enter__(self) -> Self:
        self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        # A handler may run in the middle of a print, so it must not use Python's own buffers.
        os.write(2, b"\nstopping after this step, then saving; Ctrl-C again leaves at once\n")
