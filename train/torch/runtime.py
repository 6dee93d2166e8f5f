"""Settings of a PyTorch training process: errors about memory."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from train.loop.process import out_of_memory_error

CPU_ALLOCATOR = "DefaultCPUAllocator"  # is in the message of a RuntimeError; on GPUs there is a class of its own


@contextmanager
def memory_errors() -> Iterator[None]:
    """Convert PyTorch's out-of-memory errors into a one-line `InputError` that says what to do.

    Raises:
        InputError: a device has too little memory.
    """
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one too
        if not isinstance(error, torch.OutOfMemoryError) and CPU_ALLOCATOR not in str(error):
            raise
        raise out_of_memory_error(error) from None
