"""How fast a file is converted, against `cp` of the same file, and how much memory that takes.

    python -m benchmarks.conversion                     # ViT-g, 4 GB: both ways between the twins, several runs
    python -m benchmarks.conversion --sparse            # ViT-22B, 87 GB of zeros that take no room on the disk
    python -m benchmarks.conversion --sparse --depth 16 # as many of its blocks as the disk can take when they are written

The source is in the page cache in both cases.  Every run alternates cp and the conversion, and a ratio is of neighbours.
Memory is what is anonymous, sampled every few milliseconds, above that of the interpreter with its imports; pages of
files are not counted.  The limit is twice the largest tensor of a block, plus 128 MiB.
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
from typing import Any

import numpy as np

import vit_spec
from parity.checkpoints.containers import Slot, get
from parity.checkpoints.formats import get as get_format
from parity.checkpoints.writing import convert, written_by
from vit_spec import ViTConfig


def anonymous() -> int:
    """Bytes of this process that no file backs."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def source(path: Path, config: ViTConfig) -> None:
    """Write weights of random bits in the torch format, a megabyte of them over and over."""
    column = get_format("torch").layouts(config)
    shapes = {key: layout.shape(config.sizes) for layout in column.values() for key in layout.keys(config.sizes)}
    slots = {key: Slot(shape, np.dtype(np.float32)) for key, shape in shapes.items()}
    noise = np.random.default_rng(0).integers(0, 2**32, 1 << 22, np.uint32).view(np.float32)
    container = get("safetensors")
    version = written_by()
    with container.create(path, slots, {"config": config.to_json(), "format": "torch", "version": version}) as sink:
        for key, slot in slots.items():
            size = slot.nbytes // 4
            for first in range(0, size, len(noise)):
                sink.put(key, first, noise[: size - first])


def sparse(path: Path, config: ViTConfig) -> None:
    """Write a header alone, and a hole for the weights."""
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


def measured(path: Path, target: Path, to: str) -> dict[str, float]:
    """Convert in a process of its own; return seconds and bytes."""
    command = [sys.executable, "-m", "benchmarks.conversion", "--one", str(path), str(target), to]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def one(path: Path, target: Path, to: str) -> None:
    """What `measured` runs."""
    before, peak, done = anonymous(), [0], threading.Event()

    def sample() -> None:
        while not done.wait(0.003):
            peak[0] = max(peak[0], anonymous())

    thread = threading.Thread(target=sample)
    thread.start()
    start = time.perf_counter()
    convert(path, target, to, force=True)
    seconds = time.perf_counter() - start
    done.set()
    thread.join()
    print(json.dumps({"seconds": seconds, "anonymous": peak[0] - before}))


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    """Print a line for each direction."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="by default vit_g14, and vit_22b14 where it is sparse")
    parser.add_argument("--sparse", action="store_true", help="a source of holes: for memory, not for speed")
    parser.add_argument("--depth", type=int, help="blocks; by default the model's")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; by default the system's for temporary files")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        path, target, to = given.one
        one(Path(path), Path(target), to)
        return
    name = given.model or ("vit_22b14" if given.sparse else "vit_g14")
    config = vit_spec.get(name)
    config = config.replace(depth=given.depth or config.depth)
    largest = 4 * max(row.size // (config.depth if "block" in row.axes else 1) for row in vit_spec.rows(config).values())
    limit = 2 * largest + (128 << 20)
    folder = Path(tempfile.mkdtemp(dir=given.folder))
    try:
        first = folder / "torch.safetensors"
        (sparse if given.sparse else source)(first, config)
        print(f"{name}, {config.depth} blocks, {first.stat().st_size / 1e9:.2f} GB; memory at most {limit >> 20} MiB")
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "parity", "inspect", first], check=True, capture_output=True)
        print(f"inspect: {time.perf_counter() - start:.2f} s, from the start of the interpreter")
        if given.sparse:
            needed, free = first.stat().st_size, shutil.disk_usage(folder).free
            if needed > free:
                print(f"not converted: that takes {needed / 1e9:.0f} GB, and the disk has {free / 1e9:.0f} GB left")
                return
            found = measured(first, folder / "jax.safetensors", "jax")
            print(f"torch -> jax: {found['seconds']:.0f} s, {found['anonymous'] >> 20} MiB anonymous")
            return
        zipped = folder / "torch.pth"
        convert(first, zipped, "torch")
        directions = (
            ("torch -> jax", first, "jax"),
            ("jax -> torch", folder / "jax.safetensors", "torch"),
            ("torch in .pth, whose CRCs are checked -> jax", zipped, "jax"),
        )
        for name, path, to in directions:
            ratios, speeds, peaks = [], [], []
            for _ in range(given.runs):
                copy = folder / "copy"
                copy.unlink(missing_ok=True)
                os.sync()  # what was written before must not be waited for
                start = time.perf_counter()
                subprocess.run(["cp", path, copy], check=True)
                seconds = time.perf_counter() - start
                copy.unlink()
                target = folder / f"{to}.safetensors" if to == "jax" else folder / "back.safetensors"
                target.unlink(missing_ok=True)
                os.sync()
                found = measured(path, target, to)
                ratios.append(found["seconds"] / seconds)
                speeds.append(path.stat().st_size / found["seconds"] / 1e9)
                peaks.append(found["anonymous"])
            print(
                f"{name}: {_spread(ratios)} times cp, {_spread(speeds)} GB/s, {max(peaks) >> 20} MiB anonymous", flush=True
            )
        same = subprocess.run(["cmp", "--silent", first, folder / "back.safetensors"]).returncode == 0
        print("there and back: the same bytes" if same else "there and back: NOT the same bytes")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
