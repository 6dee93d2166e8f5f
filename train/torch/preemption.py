"""SIGTERM to a run of several processes: how they agree on the step after which they stop."""

import signal
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Preemption:
    """SIGTERM to one process of a run stops all of them after the same step."""

    def __init__(self) -> None:
        self._received = False
        self._pending: tuple[Any, Tensor] | None = None
        signal.signal(signal.SIGTERM, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._received = True

    def should_stop(self) -> bool:
        """Return whether a process had received SIGTERM by the previous call; the same answer in every process.

        So no process waits for the others here.
        """
        pending = self._pending
        flag = torch.tensor(int(self._received))
        work = dist.all_reduce(flag, dist.ReduceOp.MAX, async_op=True)
        self._pending = (work, flag)
        if pending is None:
            return False
        pending[0].wait()
        return bool(pending[1])
