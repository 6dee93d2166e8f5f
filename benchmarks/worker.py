"""A process that measures one contestant: `python -m benchmarks.worker`.

It reads requests from the standard input and writes an answer to each to the standard output, one JSON object a line.  A
request names what to `do`:

- prepare: import the library and convert the weights.
- build: build the model with its weights.
- first: call a function for the first time, which compiles it, and compare its outputs with the expected ones.
- run: call a function several times, and return the seconds of a call.
- memory: return the peak memory since the request `build`, in bytes.
- compilations: return how many programs the framework has compiled.
- products, bandwidth: measure the device; see `benchmarks.machine`.
- expected: write the outputs of our twin in float64.

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
from benchmarks.peers import LIBRARIES, Contestant, Inputs, make_inputs
from vit_spec import ViTConfig

Request = dict[str, Any]
Answer = dict[str, Any]
CHECKED_IMAGES = 4  # of the batch, whose logits are compared; also the images of a part in float64


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
        """Call a function for the first time; return its errors, and the seconds since the start of building the model.

        The error of logits is the relative RMS of their difference from the expected ones.  Those of the loss and of the
        norm of its gradient are relative differences.
        """
        what = request["what"]
        start = time.perf_counter()
        result = getattr(self._model, what)()
        self._framework.synchronize(result)
        seconds = self._build_seconds + time.perf_counter() - start
        found = self._model.compared(what, result)[:CHECKED_IMAGES]
        if what in ("step", "gradient"):
            loss, norm = np.abs(found / np.load(request["expected"])["loss_and_norm"] - 1)
            errors = {"loss": float(loss), "norm of the gradient": float(norm)}
        else:
            expected = np.load(request["expected"])["logits"][: len(found)]
            errors = {"logits": float(np.linalg.norm(found - expected) / np.linalg.norm(expected))}
        return {"seconds_with_building": seconds, "errors": errors}

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
        """Write what `float64_outputs` returns."""
        config = ViTConfig.from_json(json.dumps(request["config"]))
        inputs = make_inputs(config, request["batch_size"])
        outputs = float64_outputs(request["framework"], parity.load(request["weights"]), inputs)
        np.savez(request["expected"], **outputs)
        return {}


def float64_outputs(framework: str, checkpoint: Any, inputs: Inputs) -> dict[str, Any]:
    """Return outputs of a twin in float64, a few images at a time.

    Returns:
        "logits": of the first images, (N, num_classes).
        "loss_and_norm": of the batch, the cross entropy and the norm of its gradient, (2,).
    """
    images, targets, count = inputs.images.astype(np.float64), inputs.targets, len(inputs.targets)
    parts = [(images[i : i + CHECKED_IMAGES], targets[i : i + CHECKED_IMAGES]) for i in range(0, count, CHECKED_IMAGES)]
    logits, loss = [], 0.0
    if framework == "torch":
        import torch

        import vit_torch
        from benchmarks.peers.torch_model import device

        model = vit_torch.ViT(checkpoint.config).double().to(device())
        model.load_state_dict({name: tensor.double() for name, tensor in parity.to_torch(checkpoint).items()})
        for x, y in parts:
            found = model(torch.tensor(x.transpose(0, 3, 1, 2), device=device()))
            own = torch.nn.functional.cross_entropy(found, torch.tensor(y, device=device()).long(), reduction="sum") / count
            own.backward()
            logits.append(found.numpy(force=True))
            loss += own.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), np.inf).item()
    else:
        import jax
        import optax

        import vit_jax

        with jax.enable_x64(True):
            apply = vit_jax.ViT(checkpoint.config).apply

            def loss_of_part(params: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
                found = apply({"params": params}, x)
                return optax.softmax_cross_entropy_with_integer_labels(found, y).sum() / count, found

            program = jax.jit(jax.value_and_grad(loss_of_part, has_aux=True))
            params = jax.tree.map(lambda leaf: jax.numpy.asarray(leaf, np.float64), parity.to_jax(checkpoint))
            gradient = jax.tree.map(jax.numpy.zeros_like, params)
            for x, y in parts:
                (own, found), own_gradient = program(params, x, y)
                gradient = jax.tree.map(jax.numpy.add, gradient, own_gradient)
                logits.append(np.asarray(found))
                loss += own.item()
            norm = optax.tree.norm(gradient).item()
    return {"logits": logits[0], "loss_and_norm": np.array([loss, norm])}


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
