"""Errors of a PyTorch training process that are told in one line."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from train.loop.process import out_of_memory_error
from vit_spec import InputError

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
        if any(text in str(error) for text in LOST_PEER):
            what = "another process of the run has ended"
            raise InputError(f"{what}: start all processes again with the same --run") from None
        raise
