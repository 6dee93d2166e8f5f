"""Settings of a JAX training process: memory, and the cache of compiled programs."""

import inspect
import os
import sys
import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax

from train.loop import process


def one_line_errors() -> AbstractContextManager[None]:
    """Convert JAX's errors about memory and about other processes; see `train.loop.process.one_line_errors`."""
    return process.one_line_errors(_is_of_memory, is_of_lost_process)


def _is_of_memory(error: Exception) -> bool:
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


def is_of_lost_process(error: BaseException) -> bool:
    """Return whether an exception was raised because another process of the run has ended."""
    is_possible = isinstance(error, jax.errors.JaxRuntimeError | ValueError) and jax.process_count() > 1
    return is_possible and "Gloo" in str(error)  # Gloo connects processes on CPUs


def keep_freed_memory() -> None:
    """Let each step on CPU reuse the memory of the previous one; see `train.loop.process.keep_freed_memory`.

    Large arrays are kept in the main thread only.  So JAX must not run the step in another thread, which it does with
    asynchronous dispatch.
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    process.keep_freed_memory()


def ignore_abandoned_reads() -> None:
    """Print nothing about reads of a checkpoint that Orbax abandons because another one has failed.

    Python warns of a read that has not begun: a coroutine that was never awaited; the trainer has no others.  It prints an
    exception without a caller for a read that ends later, since its event loop is closed, and for one that is destroyed
    while it reads, with a hundred lines about its array.
    """
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    report = sys.unraisablehook

    def report_others(error: Any) -> None:
        is_late = isinstance(error.exc_value, RuntimeError) and str(error.exc_value) == "Event loop is closed"
        is_destroyed = inspect.iscoroutine(error.object) and "orbax" in Path(error.object.cr_code.co_filename).parts
        if not is_late and not is_destroyed:
            report(error)

    sys.unraisablehook = report_others


def keep_compiled_programs() -> None:
    """Keep programs that take over half a second to compile in the user's cache folder.

    JAX_COMPILATION_CACHE_DIR selects another folder.  For vit_s16 on two cores, the time to the end of the first step falls
    from 4.6 s to 1.6 s.  Programs that call oneDNN cannot be kept; see `vit_jax.compiler_options`.  Nothing is kept before
    jax 0.10.2, which on CPUs prints a long error for each program that it reads.
    """
    if jax.__version_info__ < (0, 10, 2):
        return
    warnings.filterwarnings("ignore", "Error writing persistent compilation cache entry .*onednn-fusion", UserWarning)
    cache = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")) / "twin-vision-transformers" / "xla"
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
