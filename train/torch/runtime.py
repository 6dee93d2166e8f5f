"""Errors of a PyTorch training process that are told in one line."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from train.loop.process import lost_process_error, out_of_memory_error

CPU_ALLOCATOR = "DefaultCPUAllocator"  # is in the message of a RuntimeError; on GPUs there is a class of its own
LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "remote process exited",
)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Convert PyTorch's errors about memory and about other processes into `InputError`s that say what to do.

    Raises:
        InputError: a device has too little memory, or another process of the run has ended.
    """
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError and DistBackendError are among them
        if isinstance(error, torch.OutOfMemoryError) or CPU_ALLOCATOR in str(error):
            raise out_of_memory_error(error) from None
        if is_of_lost_process(error):
            raise lost_process_error() from None
        raise


def is_of_lost_process(error: BaseException) -> bool:
    """Return whether an exception was raised because another process of the run has ended."""
    return any(text in str(error) for text in LOST_PEER)
