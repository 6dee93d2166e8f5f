"""Errors of a PyTorch training process that are told in one line."""

from contextlib import AbstractContextManager

import torch

from train.loop import process

CPU_ALLOCATOR = "DefaultCPUAllocator"  # is in the message of a RuntimeError; on GPUs there is a class of its own
LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "remote process exited",
)


def one_line_errors() -> AbstractContextManager[None]:
    """Convert PyTorch's errors about memory and about other processes; see `train.loop.process.one_line_errors`."""
    return process.one_line_errors(_is_of_memory, is_of_lost_process)


def _is_of_memory(error: Exception) -> bool:
    is_of_cpu = isinstance(error, RuntimeError) and CPU_ALLOCATOR in str(error)
    return isinstance(error, torch.OutOfMemoryError) or is_of_cpu


def is_of_lost_process(error: BaseException) -> bool:
    """Return whether an exception was raised because another process of the run has ended."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in LOST_PEER)  # or DistBackendError
