"""Settings of a process that do not depend on the framework, and errors that both frameworks have."""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vit_spec import InputError

# Bytes of the free block for small arrays; only pages that are used count as resident.  It is smaller than the memory of a
# long step, which would otherwise be placed in it, with small arrays right behind.
SMALL_ARRAYS = 256 << 20
SRUN_VARIABLES = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID")


def keep_freed_memory() -> None:
    """Reuse the memory of earlier steps on CPUs; call it in the main thread, before a framework is used.

    Both frameworks allocate the memory anew each time, and fresh pages from the system cost time.  With these
    settings glibc keeps freed memory, but large arrays only in the main thread.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        mmap_max, trim_threshold = -4, -1  # malloc.h
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, -1)  # never
        _reserve_for_small_arrays(libc)


def release_freed_memory() -> None:
    """Return freed memory to the system once, although `keep_freed_memory` keeps it; call it before the first step.

    What initialization and compilation have used lies in pieces, into which the memory of a step does not fit.  A block for
    small arrays is reserved once more, because the training state may fill the first one.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(ctypes.c_size_t(0))
        _reserve_for_small_arrays(libc)


def _reserve_for_small_arrays(libc: ctypes.CDLL) -> None:
    """Leave a free block from which the allocator takes the small arrays that outlive a step.

    It takes them from the smallest free block that has room.  Without this one, that is the block of the step's memory, for
    which the rest would then be too small.
    """
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.realloc.restype, libc.realloc.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    block, behind = libc.malloc(SMALL_ARRAYS), libc.malloc(SMALL_ARRAYS)  # as large, so that it is not taken from a gap
    libc.realloc(behind, 1 << 20)  # it stays, so that the block is not joined with the memory behind it
    libc.free(block)


@contextmanager
def one_line_errors(
    is_of_memory: Callable[[Exception], bool], is_of_lost_process: Callable[[Exception], bool]
) -> Iterator[None]:
    """Convert a framework's errors about memory and about other processes into `InputError`s that say what to do.

    Raises:
        InputError: a device has too little memory, or another process of the run has ended.
    """
    try:
        yield
    except Exception as error:
        if is_of_memory(error):
            remedy = "a smaller --batch-size, a larger --accumulate, --remat full or a --mesh with fsdp (see --plan)"
            message = f"not enough memory ({str(error).splitlines()[0][:100]}): give {remedy}"
            raise InputError(message) from None
        if is_of_lost_process(error):
            raise lost_process_error() from None
        raise


def is_started_by_srun() -> bool:
    """Return whether this is one of several processes that Slurm's `srun` has started.

    Raises:
        InputError: Slurm has reserved several tasks, as `salloc` and `sbatch` do, but `srun` has not started them.
    """
    count = os.environ.get("SLURM_NTASKS", "")
    if not count.isdecimal() or int(count) <= 1:
        return False
    # The shell of `salloc` may be a step of its own, of one task.
    if any(name not in os.environ for name in SRUN_VARIABLES) or os.environ.get("SLURM_STEP_NUM_TASKS") == "1":
        raise InputError(
            f"SLURM_NTASKS is {count}, and srun has not started this process: start it with srun, or unset SLURM_NTASKS to "
            "train in one process"
        )
    return True


def lost_process_error() -> InputError:
    """Return the error for a run whose other processes are gone."""
    return InputError("another process of the run has ended: start all processes again with the same --run")
