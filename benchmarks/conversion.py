"""Speed and memory of a conversion, compared with `cp` of the same file.

    python -m benchmarks.conversion                      # ViT-g, 4 GB: both directions between the twins, several runs
    python -m benchmarks.conversion --model vit_l16      # another model
    python -m benchmarks.conversion --sparse             # ViT-22B, 89 GB of zeros in a file of 3 GB on the disk
    python -m benchmarks.conversion --sparse --depth 20  # 20 of its 48 blocks, so that the result fits on the disk

It prints the figures of the table "Speed and memory" of docs/measurements/conversion.md.  The source is in the page cache
for `cp` and for the conversion.  Their runs alternate, and each ratio is between neighbouring runs.  Memory is the peak of
the process's anonymous memory, sampled every three milliseconds, minus that of the interpreter with its imports; pages of
mapped files are not counted.  The limit is twice the largest tensor of a block, plus 128 MiB.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import vit_spec
from parity.checkpoints.containers import ArraySpec, get
from parity.checkpoints.formats import get as get_format
from parity.checkpoints.writing import convert, project_version
from vit_spec import ViTConfig

PAGE_BYTES = 4096  # of the page cache and of most file systems


def anonymous_bytes() -> int:
    """Return the bytes of anonymous memory of this process."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def write_source(path: Path, config: ViTConfig) -> None:
    """Write a checkpoint in the torch format, whose weights repeat the same 16 MiB of random bits."""
    layouts = get_format("torch").layouts(config)
    shapes = {key: layout.shape(config.sizes) for layout in layouts.values() for key in layout.keys(config.sizes)}
    specs = {key: ArraySpec(shape, np.dtype(np.float32)) for key, shape in shapes.items()}
    noise = np.random.default_rng(0).integers(0, 2**32, 1 << 22, np.uint32).view(np.float32)
    container = get("safetensors")
    version = project_version()
    with container.create(path, specs, {"config": config.to_json(), "format": "torch", "version": version}) as writer:
        for key, spec in specs.items():
            size = spec.nbytes // 4
            for first in range(0, size, len(noise)):
                writer.write(key, first, noise[: size - first])


def write_sparse_source(path: Path, config: ViTConfig) -> None:
    """Write a sparse safetensors file: of the weights, one page in 32 is on disk, as readers refuse less than one in 64."""
    header: dict[str, Any] = {"__metadata__": {"config": config.to_json(), "format": "torch"}}
    end = 0
    for layout in get_format("torch").layouts(config).values():
        for key in layout.keys(config.sizes):
            shape = layout.shape(config.sizes)
            header[key] = {"dtype": "F32", "shape": shape, "data_offsets": (end, end + 4 * math.prod(shape))}
            end += 4 * math.prod(shape)
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        for start in range(0, end, 32 * PAGE_BYTES):
            file.seek(8 + len(text) + start)
            file.write(bytes(min(PAGE_BYTES, end - start)))


def convert_in_subprocess(path: Path, target: Path, to: str) -> dict[str, float]:
    """Run `convert_and_measure` in its own process; return the seconds and the bytes of anonymous memory."""
    command = [sys.executable, "-m", "benchmarks.conversion", "--one", str(path), str(target), to]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def convert_and_measure(path: Path, target: Path, to: str) -> None:
    """Convert a file and print the seconds and the peak of anonymous memory as JSON."""
    before, peak, done = anonymous_bytes(), [0], threading.Event()

    def sample() -> None:
        while not done.wait(0.003):
            peak[0] = max(peak[0], anonymous_bytes())

    thread = threading.Thread(target=sample)
    thread.start()
    start = time.perf_counter()
    convert(path, target, to, force=True)
    seconds = time.perf_counter() - start
    done.set()
    thread.join()
    print(json.dumps({"seconds": seconds, "anonymous": peak[0] - before}))


def format_spread(values: list[float]) -> str:
    """Return the median and range as text."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


class Runs(NamedTuple):
    """Runs of a conversion beside `cp`: the ratios of the times, the speeds, and the peaks of anonymous memory."""

    times_cp: list[float]
    gigabytes_per_second: list[float]
    anonymous_bytes: list[float]

    def __str__(self) -> str:
        speed, peak = format_spread(self.gigabytes_per_second), int(max(self.anonymous_bytes))
        return f"{format_spread(self.times_cp)} times cp, {speed} GB/s, {peak >> 20} MiB anonymous"


def compare_with_cp(path: Path, target: Path, to: str, runs: int) -> Runs:
    """Convert a file several times, alternating with `cp`.

    to: the format of `target`, which the last run leaves.
    """
    measured = Runs([], [], [])
    copy = target.with_name("copy")
    for _ in range(runs):
        copy.unlink(missing_ok=True)
        os.sync()  # so that cp does not wait for earlier writes
        start = time.perf_counter()
        subprocess.run(["cp", path, copy], check=True)
        seconds = time.perf_counter() - start
        copy.unlink()
        target.unlink(missing_ok=True)
        os.sync()
        result = convert_in_subprocess(path, target, to)
        measured.times_cp.append(result["seconds"] / seconds)
        measured.gigabytes_per_second.append(path.stat().st_size / result["seconds"] / 1e9)
        measured.anonymous_bytes.append(result["anonymous"])
    return measured


def main() -> None:
    """Print the time and memory of each direction."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="named model; default: vit_g14, or vit_22b14 with --sparse")
    parser.add_argument("--sparse", action="store_true", help="convert a sparse file: measures memory, not speed")
    parser.add_argument("--depth", type=int, help="number of blocks; default: all blocks of the model")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="folder to write to; default: the system's folder for temporary files")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        path, target, to = args.one
        convert_and_measure(Path(path), Path(target), to)
        return
    name = args.model or ("vit_22b14" if args.sparse else "vit_g14")
    config = vit_spec.get(name)
    config = config.replace(depth=args.depth or config.depth)
    largest = 4 * max(row.size // (config.depth if "block" in row.axes else 1) for row in vit_spec.rows(config).values())
    limit = 2 * largest + (128 << 20)
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        first = folder / "torch.safetensors"
        (write_sparse_source if args.sparse else write_source)(first, config)
        print(f"{name}, {config.depth} blocks, {first.stat().st_size / 1e9:.2f} GB; memory at most {limit >> 20} MiB")
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "parity", "inspect", first], check=True, capture_output=True)
        print(f"inspect: {time.perf_counter() - start:.2f} s, including the start of the interpreter")
        if args.sparse:
            needed, free = first.stat().st_size, shutil.disk_usage(folder).free
            if needed > free:
                print(f"not converted: the result takes {needed / 1e9:.0f} GB, and the disk has {free / 1e9:.0f} GB free")
                return
            result = convert_in_subprocess(first, folder / "jax.safetensors", "jax")
            print(f"torch to jax: {result['seconds']:.0f} s, {result['anonymous'] >> 20} MiB anonymous")
            return
        zipped = folder / "torch.pth"
        convert(first, zipped, "torch")
        directions = (
            ("torch to jax", first, "jax"),
            ("jax to torch", folder / "jax.safetensors", "torch"),
            ("torch in .pth, whose CRCs are checked, to jax", zipped, "jax"),
        )
        for name, path, to in directions:
            target = folder / f"{to}.safetensors" if to == "jax" else folder / "back.safetensors"
            print(f"{name}: {compare_with_cp(path, target, to, args.runs)}", flush=True)
        same = subprocess.run(["cmp", "--silent", first, folder / "back.safetensors"]).returncode == 0
        print("torch to jax to torch: the same bytes" if same else "torch to jax to torch: NOT the same bytes")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
