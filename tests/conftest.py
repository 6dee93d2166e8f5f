"""Settings of all tests: jax compiles with few optimizations, and all processes share a compilation cache."""

import gc
import importlib.util
import os
from collections.abc import Iterator
from importlib.metadata import version

import pytest

# All test processes and the commands that they start share a GPU, so jax must not preallocate most of its memory.  cuBLAS
# reads its workspace setting at PyTorch's first matrix product on a GPU.  Both are set here, because some test modules
# compute when they are collected.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# On CPU, XLA emits fused loops through MLIR, which takes more than half of the compilation time, and splits each program
# into 32 parts, which it compiles in threads: that takes a tenth more processor time.  An unknown name in XLA_FLAGS
# terminates the process, so the flags are not set for versions that may lack them.
if importlib.util.find_spec("jaxlib") is not None and tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
    quick = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ.setdefault("XLA_FLAGS", quick)
if "PYTEST_XDIST_WORKER" in os.environ:  # one process per core: more threads would compete
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Inductor compiles and loads programs that probe what g++ can vectorize, for five seconds in each process.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
gc.set_threshold(100_000, 50, 100)  # tracing in jax creates many objects, few of which are garbage


@pytest.fixture(scope="session", autouse=True)
def fast_compilation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Reduce jax's optimizations, here and in started commands, and cache compiled programs in a folder of this test run.

    The benchmarks compile with default optimizations; benchmarks/full_size.py compiles the named models.
    """
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    settings = {
        "jax_compilation_cache_dir": str(folder / "compiled"),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        "jax_disable_most_optimizations": True,
        "jax_traceback_in_locations_limit": 0,  # Python locations of operations, which no test reads
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name.upper(), str(value))
        if importlib.util.find_spec("jax") is not None:
            import jax

            for name, value in settings.items():
                jax.config.update(name, value)
        yield
