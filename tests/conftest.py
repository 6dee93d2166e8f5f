"""What all tests share: what they compile runs for a moment, so it is compiled quickly, and once for all processes."""

import gc
import importlib.util
import os
from collections.abc import Iterator
from importlib.metadata import version

import pytest

# A GPU is shared by all processes of a run of the tests, and by the commands that they start: none may take most of its
# memory at its start, as jax does.  cuBLAS reads how it is to work when PyTorch's first product on a GPU asks for it.
# Both are set ahead of all that the tests' modules compute when they are collected.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# On CPU, XLA writes fused loops by way of MLIR, which takes more than half of the time of a compilation.  It ends a process
# whose XLA_FLAGS hold a name that it does not know, so versions that may lack this one are not given it.
if importlib.util.find_spec("jaxlib") is not None and tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 13):
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")
if "PYTEST_XDIST_WORKER" in os.environ:  # a process for each core: PyTorch's threads would wait for those of the others
    os.environ.setdefault("OMP_NUM_THREADS", "1")
gc.set_threshold(100_000, 50, 100)  # what jax traces are many objects, and few of them are garbage


@pytest.fixture(scope="session", autouse=True)
def compiled_quickly(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let jax optimize little, here and in commands, and keep what it compiles in a folder of this run of the tests.

    The benchmarks compile as users do, benchmarks/full_size.py the named models among them.
    """
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    wanted = {
        "jax_compilation_cache_dir": str(folder / "compiled"),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        "jax_disable_most_optimizations": True,
        "jax_traceback_in_locations_limit": 0,  # where in Python an operation came from, which no test reads
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in wanted.items():
            patch.setenv(name.upper(), str(value))
        if importlib.util.find_spec("jax") is not None:
            import jax

            for name, value in wanted.items():
                jax.config.update(name, value)
        yield
