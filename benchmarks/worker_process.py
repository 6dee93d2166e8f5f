"""The processes in which `benchmarks.worker` runs: started, asked, ended."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vit_spec import InputError

Json = dict[str, Any]


class WorkerProcess:
    """A process that answers the requests of `benchmarks.worker`."""

    def __init__(self, device: str, folder: Path) -> None:
        """Start the process.

        device: "cpu" hides GPUs from the frameworks.
        folder: for the caches of compilers, and for what libraries print.
        """
        env = {"HF_HUB_OFFLINE": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
        # Empty caches of compiled programs, because the time of the first step is measured.
        env |= {"TORCHINDUCTOR_CACHE_DIR": tempfile.mkdtemp(dir=folder), "JAX_ENABLE_COMPILATION_CACHE": "false"}
        if device == "cpu":
            env |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        else:
            first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
            env |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "CUDA_VISIBLE_DEVICES": first}
        self._messages = tempfile.TemporaryFile("w+", dir=folder)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._messages,
            text=True,
            env={**os.environ, **env},
        )

    def ask(self, do: str, **request: Any) -> Json:
        """Send a request and return the answer; the end of the process is an answer with "error"."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **request}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._messages.seek(0)
            said = self._messages.read().strip().splitlines()
            why = f": {said[-1][:200]}" if said else ""
            return {"error": f"the process ended with exit code {self._process.wait()}{why}"}
        return dict(json.loads(line))

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._messages):
            with suppress(BrokenPipeError):
                if stream is not None:
                    stream.close()


@contextmanager
def worker(device: str, folder: Path) -> Iterator[WorkerProcess]:
    """Return a context with a process that ends with it."""
    process = WorkerProcess(device, folder)
    try:
        yield process
    finally:
        process.close()


def frameworks() -> list[str]:
    """Return the frameworks that are installed, of "torch" and "jax".

    Raises:
        InputError: none is.
    """
    if not (found := [name for name in ("torch", "jax") if find_spec(name) is not None]):
        raise InputError("neither torch nor jax is installed: pip install '.[jax,torch]'")
    return found
