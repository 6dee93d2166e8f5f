"""A process that measures one contestant: `python -m benchmarks.worker`.

It reads requests from the standard input and writes an answer to each to the standard output, one JSON object a line.  A
request names what to `do`:

- prepare: import the library and convert the weights.
- build: build the model with its weights.
- first: call a function for the first time, which compiles it.
- check: compare the logits with the expected ones.
- run: call a function several times, and return the seconds of a call.
- memory: return the peak memory since the request `build`, in bytes.
- compilations: return how many programs the framework has compiled.
- products, bandwidth: measure the device; see `benchmarks.machine`.
- expected: write the logits of our twin in float64.

An answer has "error" if the request failed, and "skipped" if the library is not installed.
"""

import importlib
import json
import os
import re
import resource
import sys
import time
import warnings
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import parity
from benchmarks.machine import keep_freed_memory
from benchmarks.peers import LIBRARIES, Contestant, make_inputs
from vit_spec import ViTConfig

Request = dict[str, Any]
Answer = dict[str, Any]
CHECKED_IMAGES = 4  # of the batch, whose logits are compared


class Worker:
    """A contestant, after the requests `prepare` and `build`."""

    def prepare(self, request: Request) -> Answer:
        """Import the library, and convert the weights to its format."""
        contestant = Contestant(**request["contestant"])
        config, library = ViTConfig.from_json(json.dumps(request["config"])), contestant.of
        sys.path[:0] = request["paths"]
        framework = importlib.import_module(f"benchmarks.peers.{library.framework}_model")
        if request["keep_freed_memory"]:
            keep_freed_memory(library.framework)
        module = importlib.import_module(f"benchmarks.peers.{library.name}")
        if request["device"] == "gpu" and framework.device_name() == "cpu":
            return {"skipped": f"{library.framework} finds no GPU"}
        weights = Path(request["weights"])
        if library.format != "jax":
            converted = weights.with_name(f"{weights.stem}-{contestant.name}{library.suffix}")
            with warnings.catch_warnings(action="ignore"):
                parity.convert(weights, converted, library.format, force=True)
            weights = converted
        self._framework, self._contestant = framework, contestant
        self._load = partial(module.load, config, weights, contestant.dtype)
        self._inputs = make_inputs(config, request["batch_size"])
        packages = framework.versions() + ([] if library.is_clone else [library.package])
        return {"device": framework.device_name(), "versions": {name: version(name) for name in packages}}

    def build(self, request: Request) -> Answer:
        """Build the model."""
        self._before = resident_bytes(reset_peak=True)
        start = time.perf_counter()
        self._model = self._load()
        self._model.prepare(self._inputs, self._contestant.compiled, self._contestant.dtype == "bfloat16")
        self._build_seconds = time.perf_counter() - start
        return {}

    def first(self, request: Request) -> Answer:
        """Call a function for the first time; return the seconds, and those since the start of building the model."""
        start = time.perf_counter()
        self._framework.synchronize(getattr(self._model, request["what"])())
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "with_building": self._build_seconds + seconds}

    def run(self, request: Request) -> Answer:
        """Call a function `times` times; for the latency, wait for each call by itself."""
        function, synchronize = getattr(self._model, request["what"]), self._framework.synchronize
        start = time.perf_counter()
        for _ in range(request["times"]):
            result = function()
            if request["what"] == "latency":
                synchronize(result)
        synchronize(result)
        return {"seconds": (time.perf_counter() - start) / request["times"]}

    def check(self, request: Request) -> Answer:
        """Return the relative RMS of the difference between the logits and the expected ones."""
        expected = np.load(request["expected"])
        difference = self._model.logits()[: len(expected)] - expected
        return {"error_of_logits": float(np.linalg.norm(difference) / np.linalg.norm(expected))}

    def memory(self, request: Request) -> Answer:
        """Return the peak of the device's memory on GPUs, and of the resident memory above that before on CPUs."""
        on_device = self._framework.device_memory()
        return {"bytes": peak_resident_bytes() - self._before if on_device is None else on_device}

    def compilations(self, request: Request) -> Answer:
        """Return how many programs have been compiled."""
        return {"count": self._framework.compilations()}

    def products(self, request: Request) -> Answer:
        """Return the rate of matrix products of given shapes, in FLOP/s."""
        keep_freed_memory(request["framework"])
        machine = importlib.import_module(f"benchmarks.machine.{request['framework']}_rates")
        return {"flops": machine.product_rate(request["shapes"], request["dtype"])}

    def bandwidth(self, request: Request) -> Answer:
        """Return the bytes/s of copies of a large array, reading and writing counted, and the device's name and memory."""
        keep_freed_memory(request["framework"])
        machine = importlib.import_module(f"benchmarks.machine.{request['framework']}_rates")
        return {
            "bytes_per_second": machine.bandwidth(),
            "device": machine.device_name(),
            "device_bytes": machine.device_bytes(),
        }

    def expected(self, request: Request) -> Answer:
        """Write the logits of the first images in float64, by a twin."""
        config = ViTConfig.from_json(json.dumps(request["config"]))
        images = make_inputs(config, request["batch_size"]).images[:CHECKED_IMAGES].astype(np.float64)
        checkpoint = parity.load(request["weights"])
        np.save(request["expected"], float64_logits(request["framework"], checkpoint, images))
        return {}


def float64_logits(framework: str, checkpoint: Any, images: np.ndarray) -> np.ndarray:
    """Return the logits of a twin in float64, (B, num_classes).  images: (B, H, W, C)."""
    if framework == "torch":
        import torch

        import vit_torch

        model = vit_torch.ViT(checkpoint.config).double()
        model.load_state_dict({name: tensor.double() for name, tensor in parity.to_torch(checkpoint).items()})
        with torch.no_grad():
            return model(torch.tensor(images.transpose(0, 3, 1, 2))).numpy()
    import jax

    import vit_jax

    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: jax.numpy.asarray(leaf, np.float64), parity.to_jax(checkpoint))
        return np.asarray(jax.jit(vit_jax.ViT(checkpoint.config).apply)({"params": params}, images))


def resident_bytes(*, reset_peak: bool = False) -> int:
    """Return the resident memory of this process.  reset_peak: let the peak start from here, where the system can."""
    try:
        if reset_peak:
            Path("/proc/self/clear_refs").write_text("5")
        return 1024 * int(_status("VmRSS"))
    except OSError:  # not Linux
        return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Return the peak of the resident memory of this process."""
    try:
        return 1024 * int(_status("VmHWM"))
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _status(name: str) -> str:
    found = re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return found[1]


def answer(worker: Worker, request: Request) -> Answer:
    """Return the answer to a request."""
    try:
        return dict(getattr(worker, request["do"])(request))
    except ModuleNotFoundError as error:
        return {"skipped": _missing(str(error.name), request)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def _missing(name: str, request: Request) -> str:
    """Return the reason why a contestant is skipped if a module is missing."""
    if "contestant" in request:
        library = LIBRARIES[request["contestant"]["library"]]
        if name.partition(".")[0] == library.package:
            return f"{name} is not installed: {library.install}"
        return f"{name}, which {library.name} imports, is not installed: pip install {name.partition('.')[0]}"
    return f"{name} is not installed: pip install {name}"


def main() -> None:
    """Answer requests until the standard input ends.  What libraries print goes to the standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    worker = Worker()
    for line in sys.stdin:
        print(json.dumps(answer(worker, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
