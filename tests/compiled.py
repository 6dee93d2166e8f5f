"""Compiling for tests: quickly, for what runs for a moment, and programs that are the same once."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def compiled_quickly(folder: Path) -> Iterator[None]:
    """While entered, jax optimizes little, and keeps what it compiled in a folder and not in the user's cache."""
    import jax

    wanted = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        "jax_disable_most_optimizations": True,
    }
    before = {name: jax.config.values[name] for name in wanted}
    for name, value in wanted.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
