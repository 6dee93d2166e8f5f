"""Runs of a Flax model for `parity.invariance`: in a dtype, on a device, and in processes with several numbers of threads.

XLA on CPU makes its pool of threads when JAX starts, with as many threads as the variable NPROC says, or as the process
may use cores.  So each number of threads takes a process of its own.  It runs the program that `jax.export` makes, so it
needs no code of the user.
"""

import os
import pickle
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from parity.checkpoints.arrays import FLOAT_DTYPES, round_to
from parity.checkpoints.layout import Array
from parity.comparison.any_model.outputs import named_arrays
from parity.comparison.any_model.weights import flatten
from parity.comparison.framework_settings import QUICK_COMPILE
from parity.comparison.invariance.torch_runner import NotTestedError
from parity.comparison.monte_carlo_arithmetic import perturb_array

Run = Callable[[Sequence[Array]], Mapping[str, Array]]

_CHILD = """
import pickle
import jax, numpy as np
with open("program", "rb") as file:
    program = pickle.load(file)
arguments = [np.fromfile(f"input{n}", x.dtype).reshape(x.shape) for n, x in enumerate(program.in_avals)]
for n, x in enumerate(jax.jit(program.call)(*arguments)):
    np.asarray(x).tofile(f"output{n}")
"""
_TIME_LIMIT = 600  # seconds


class JaxRunner:
    """A Flax function with parameters, which runs in several dtypes and on several devices.

    Attributes:
        device: JAX's default device, on which runs in the lower precision take place; those in float64 are on CPU.
    """

    framework = "jax"

    def __init__(self, apply: Callable[..., Any], params: Any) -> None:
        import jax

        self._apply = apply
        self._leaves, self._unflatten = flatten(params)
        self._device = jax.numpy.zeros(()).devices().pop()
        self.device = str(self._device)

    @property
    def versions(self) -> dict[str, str]:
        """Versions of JAX, Flax and NumPy, and the machine type."""
        import flax
        import jax

        versions = {"jax": jax.__version__, "flax": flax.__version__, "numpy": np.__version__}
        return {**versions, "machine": platform.machine()}

    def other_devices(self) -> list[str]:
        """Return the names of all devices but `device`."""
        return [name for name in self._devices() if name != self.device]

    def prepare(self, dtype: str, device: str | None = None, perturbation: tuple[str, int] | None = None) -> Run:
        """Return a function that runs the model, jitted, on arrays that are cast to `dtype`.

        perturbation: a type and a seed: weights and inputs are perturbed by a few unit roundoffs of that type, as
            `parity.comparison.monte_carlo_arithmetic` perturbs the operands of every operation.
        """
        import jax

        step = jax.jit(self._function(), compiler_options=QUICK_COMPILE if dtype == "float64" else None)

        def perturbed(arrays: list[Array]) -> list[Array]:
            if not perturbation:
                return arrays
            of_type, rng = perturbation[0], np.random.default_rng(perturbation[1])
            return [perturb_array(x, of_type, rng) if x.dtype.kind == "f" else x for x in arrays]

        weights = perturbed(self._weights(dtype))

        def run(inputs: Sequence[Array]) -> Mapping[str, Array]:
            arrays = perturbed([_cast(x, dtype) for x in inputs])
            with self._settings(dtype, device):
                outputs = step(weights, arrays)
            return {name: np.asarray(x) for name, x in outputs.items()}

        return run

    def run_on_threads(self, dtype: str, inputs: Sequence[Array]) -> tuple[str, Mapping[str, Array], Mapping[str, Array]]:
        """Return what was compared, and the outputs of a process with one thread and of one with several.

        Raises:
            NotTestedError: JAX runs on another device than the CPU, or the program cannot be exported or run.
        """
        if self._device.platform != "cpu":
            raise NotTestedError(f"jax runs on {self.device}, and threads are those of the CPU")
        several = max(2, os.cpu_count() or 1)
        try:
            found = [self._run_in_process(count, dtype, inputs) for count in (1, several)]
        except (NotImplementedError, ValueError, subprocess.SubprocessError) as error:
            raise NotTestedError(f"the program does not run in another process ({_last_line(error)})") from None
        return f"in processes with 1 and with {several} threads", found[0], found[1]

    def _run_in_process(self, threads: int, dtype: str, inputs: Sequence[Array]) -> Mapping[str, Array]:
        """Return the outputs of a new process whose XLA has a number of threads."""
        import jax
        from jax import export

        function, weights = self._function(), self._weights(dtype)
        names: list[str] = []

        def flat(*arguments: Any) -> list[Any]:
            outputs = function(list(arguments[: len(weights)]), list(arguments[len(weights) :]))
            names[:] = outputs
            return list(outputs.values())

        arguments = [*weights, *(_cast(x, dtype) for x in inputs)]
        with self._settings(dtype, None):
            program = export.export(jax.jit(flat))(*arguments)
        environment = {
            "NPROC": str(threads),
            "JAX_PLATFORMS": "cpu",
            "JAX_ENABLE_X64": str(dtype == "float64"),
            "JAX_ENABLE_COMPILATION_CACHE": "False",  # a cached program may have been compiled for more threads
        }
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder)
            # `program.serialize` needs the package flatbuffers; without its gradient, the program can be pickled.
            (path / "program").write_bytes(pickle.dumps(replace(program, _get_vjp=None)))
            for n, (array, aval) in enumerate(zip(arguments, program.in_avals, strict=True)):
                np.asarray(array, aval.dtype).tofile(path / f"input{n}")
            command = [sys.executable, "-P", "-c", _CHILD]
            subprocess.run(
                command, cwd=folder, env=os.environ | environment, check=True, capture_output=True, timeout=_TIME_LIMIT
            )
            avals = dict(zip(names, enumerate(program.out_avals), strict=True))
            return {
                name: np.fromfile(path / f"output{n}", aval.dtype).reshape(aval.shape) for name, (n, aval) in avals.items()
            }

    def _function(self) -> Callable[[list[Any], list[Any]], dict[str, Any]]:
        """Return the model as a function of its floating-point leaves and its inputs; other leaves are constants."""

        def function(weights: list[Any], inputs: list[Any]) -> dict[str, Any]:
            remaining = iter(weights)
            own = self._unflatten([leaf if key is None else next(remaining) for key, leaf in self._leaves])
            return dict(named_arrays(self._apply(own, *inputs)))

        return function

    def _weights(self, dtype: str) -> list[Array]:
        return [_cast(np.asarray(leaf), dtype) for key, leaf in self._leaves if key is not None]

    def _devices(self) -> dict[str, Any]:
        import jax

        return {str(device): device for device in [*jax.devices("cpu"), *jax.devices()]}

    @contextmanager
    def _settings(self, dtype: str, device: str | None) -> Iterator[None]:
        """Run on a device, in full precision of matrix products, with float64 if it is the dtype."""
        import jax

        place = jax.devices("cpu")[0] if dtype == "float64" else self._devices()[device or self.device]
        with jax.enable_x64(dtype == "float64"), jax.default_device(place), jax.default_matmul_precision("highest"):
            yield


def _last_line(error: Exception) -> str:
    """Return the type of an exception, and the first line of its message or the last one that a process printed."""
    printed = getattr(error, "stderr", None)
    lines = (printed.decode(errors="replace") if printed else str(error)).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[-1 if printed else 0]}"


def _cast(array: Array, dtype: str) -> Array:
    """Return floating-point numbers in a dtype, complex ones in complex128 for float64, else complex64, others as is."""
    if array.dtype.kind == "c":
        return array.astype(np.complex128 if dtype == "float64" else np.complex64)
    return round_to(array, FLOAT_DTYPES[dtype]) if array.dtype in FLOAT_DTYPES.values() else array
