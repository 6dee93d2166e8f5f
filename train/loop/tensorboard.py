"""TensorBoard events, written in the calling thread.

tensorboardX's `SummaryWriter` writes in a thread.  On a full disk that thread ends silently, and the run waits for it for
ever.
"""

import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from train.data.hidden_imports import hide_packages

FLUSH_SECONDS = 30  # an event is written to the file no later than with the next event after this time


class EventWriter:
    """Writes events to a new file in a folder.

    after: the step from which a run starts or resumes; TensorBoard hides events of later steps in earlier files.  Also at
        step 0 there may be such files: a run that ends before its first checkpoint starts again.

    Raises:
        OSError: by each method, the file cannot be written.
    """

    def __init__(self, folder: Path, after: int = 0) -> None:
        with hide_packages("torch"):  # it imports torch for a type that this module never passes
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import SessionLog

        # It warns of a NaN, without a name or a step.  The run says itself what is not finite.
        logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)
        self._writer, self._flushed = EventsWriter(str(folder / "events")), time.monotonic()
        self._write(after + 1, session_log=SessionLog(status=SessionLog.START))

    def add_scalars(self, step: int, values: dict[str, float]) -> None:
        """Add numbers by name, as of `step` steps done."""
        from tensorboardX import summary

        for name, value in values.items():
            self._write(step, summary=summary.scalar(name, value))

    def add_image(self, step: int, name: str, pixels: NDArray[np.uint8]) -> None:
        """Add a picture, (H, W, 3) uint8."""
        from tensorboardX import summary

        self._write(step, summary=summary.image(name, pixels, dataformats="HWC"))

    def close(self) -> None:
        """Write the buffered events, and close the file."""
        self._writer.close()

    def _write(self, step: int, **what: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._writer.write_event(Event(wall_time=time.time(), step=step, **what))
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self._writer.flush()
            self._flushed = time.monotonic()
