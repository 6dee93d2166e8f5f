"""Training steps of both trainers and of timm on a GPU, for several models in the time of the longest compilation.

Run `python -m benchmarks.gpu_steps [MODEL=IMAGES ...] [--only train.jax timm]`.  `python -m benchmarks --gpu` measures the
same steps, and more; it compiles and measures one model after the other.  Here every model and library has a process, and
all compile at the same time: those of JAX in turn, because their compiler times kernels.  Then each has the GPU for itself.
Weights are the initial ones, which are not the same for all; that the libraries compute the same function is what the other
command shows.  It prints a row as soon as it is measured.
"""

import argparse
import fcntl
import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median

import vit_spec
from benchmarks import peers
from train.loop.peak_flops import peak_flops

MODELS = {"vit_s16": 256, "vit_b16": 128, "vit_l16": 64, "vit_h14": 32}
LIBRARIES = {"train.jax": "vit_jax", "train.torch": "vit_torch", "timm": "timm"}  # names in `benchmarks.peers`
REPEATS, SECONDS = 5, 0.5


@contextmanager
def only_one(path: Path) -> Iterator[None]:
    """Let one process at a time run the block.  path: of a file that they share."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def measure(library: str, model: str, images: int, folder: Path) -> str:
    """Return the row of the table for a library and a model.  folder: for the files that keep processes apart."""
    config = vit_spec.get(model, num_classes=1000)
    peer = peers.LIBRARIES[LIBRARIES[library]]
    framework = importlib.import_module(f"benchmarks.peers.{peer.framework}_model")
    if framework.device_name() == "cpu":
        sys.exit(f"error: {peer.framework} finds no GPU")
    module = importlib.import_module(f"benchmarks.peers.{peer.name}")
    start = time.perf_counter()
    with only_one(folder / "jax") if peer.framework == "jax" else nullcontext():
        contestant = module.load(config, None, "bfloat16")
        contestant.prepare(peers.make_inputs(config, images), True, True)
        framework.synchronize(contestant.step())
    compiled = time.perf_counter() - start
    with only_one(folder / "gpu"):
        times: list[float] = []
        calls = 2
        for _ in range(1 + REPEATS):
            start = time.perf_counter()
            for _ in range(calls):
                result = contestant.step()
            framework.synchronize(result)
            times.append((time.perf_counter() - start) / calls)
            calls = max(round(SECONDS / times[-1]), 2)
    rates = sorted(images / each for each in times[1:])
    peak = peak_flops(framework.device_name())
    share = f"{3 * vit_spec.flops(config) * median(rates) / peak:.1%}" if peak else "-"
    cells = [
        *(library, model, str(images), f"{median(rates):,.0f} ({rates[0]:,.0f} to {rates[-1]:,.0f})", share),
        *(f"{(framework.device_memory() or 0) / 2**20:,.0f}", f"{compiled:.0f}"),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL=IMAGES", default=[f"{k}={v}" for k, v in MODELS.items()])
    parser.add_argument("--only", nargs="+", choices=LIBRARIES, default=list(LIBRARIES))
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        library, model, images, folder = json.loads(args.measure)
        print(measure(library, model, images, Path(folder)), flush=True)
        return
    sizes: dict[str, int] = {}
    for text in args.models:
        model, _, images = text.partition("=")
        if not images.isdecimal() or int(images) < 1:
            parser.error(f"{text}: give MODEL=IMAGES, with a positive number of images, such as vit_s16=256")
        try:
            vit_spec.get(model)
        except vit_spec.InputError as error:
            parser.error(str(error))
        sizes[model] = int(images)
    print("| | model | images | images/s | share of peak | peak memory, MiB | first step after, s |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.gpu_steps", "--measure"]
        tasks = [[library, *each, folder] for each in sizes.items() for library in args.only]
        processes = [subprocess.Popen([*command, json.dumps(task)]) for task in tasks]
        try:
            sys.exit(max(process.wait() for process in processes))
        finally:
            for process in processes:
                process.kill()


if __name__ == "__main__":
    main()
