"""Metrics and pictures for TensorBoard, written by the caller: tensorboardX's own writer is a thread, and where that meets
a full disk it ends unseen, and the run waits for it for ever."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

KEPT_BACK = 30  # seconds that an event may wait to be written


class Events:
    """A new file of events in a folder.

    after: the step that a run goes on from: what earlier files have of later steps is not shown.  0: a run begins.

    Raises:
        OSError: by each method, the file cannot be written.
    """

    def __init__(self, folder: Path, after: int = 0) -> None:
        with _without_torch():
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import SessionLog

        self._writer, self._flushed = EventsWriter(str(folder / "events")), time.monotonic()
        if after:
            self._write(after + 1, session_log=SessionLog(status=SessionLog.START))

    def numbers(self, step: int, values: dict[str, float]) -> None:
        """Add numbers, by name, after `step` updates."""
        from tensorboardX import summary

        for name, value in values.items():
            self._write(step, summary=summary.scalar(name, value))

    def picture(self, step: int, name: str, pixels: NDArray[np.uint8]) -> None:
        """Add a picture (H, W, 3)."""
        from tensorboardX import summary

        self._write(step, summary=summary.image(name, pixels, dataformats="HWC"))

    def close(self) -> None:
        """Write what is kept back, and close the file."""
        self._writer.close()

    def _write(self, step: int, **what: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._writer.write_event(Event(wall_time=time.time(), step=step, **what))
        if time.monotonic() - self._flushed > KEPT_BACK:
            self._writer.flush()
            self._flushed = time.monotonic()


@contextmanager
def _without_torch() -> Iterator[None]:
    """Let what is imported believe that torch is not installed, unless it is in use.

    tensorboardX would load it, which takes seconds, for a type that it is never given here.
    """
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]
