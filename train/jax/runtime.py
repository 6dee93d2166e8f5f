"""Settings of a JAX training process: memory, and the cache of compiled programs."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from vit_spec import InputError


@contextmanager
def memory_errors() -> Iterator[None]:
    """Convert JAX's out-of-memory error into a one-line `InputError` that says what to do.

    Raises:
        InputError: a device has too little memory.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        remedy = "a smaller --batch-size, a larger --accumulate, --remat full or a --mesh with fsdp (see --plan)"
        raise InputError(f"not enough memory ({str(error).splitlines()[0][:100]}): give {remedy}") from None


def keep_freed_memory() -> None:
    """Let each step on CPU reuse the memory of the previous one; call it in the main thread, before JAX is first used.

    XLA allocates the memory of a step anew each time, and fresh pages from the system cost time.  With the settings below
    glibc keeps freed memory, but large arrays only in the main thread.  So JAX must not run the step in another thread,
    which it does with asynchronous dispatch.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        mmap_max, trim_threshold = -4, -1  # malloc.h
        libc.mallopt(mmap_max, 0)
        libc.mallopt(trim_threshold, 2**31 - 1)


def keep_compiled_programs() -> None:
    """Keep programs that take over half a second to compile in the user's cache folder.

    JAX_COMPILATION_CACHE_DIR selects another folder.  For vit_s16 on two cores, the time to the end of the first step falls
    from 4.6 s to 1.6 s.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "twin-vision-transformers" / "xla"
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
