"""What recognising a file costs beyond reading its header.

    python -m benchmarks.recognition [--runs 7]

Named models in several formats, then files of keys that are many, long or deeply wrapped.  Each line is the median of
several runs and their range: the processor time to open the file, and from there to a checkpoint with its config or to
a refusal.  Nothing but headers is read.
"""

import argparse
import contextlib
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

import vit_spec
from parity.checkpoints import containers
from parity.checkpoints.formats import formats, get
from parity.checkpoints.reading import checkpoint
from vit_spec import InputError

ORDINARY = {"timm": "vit_b16", "hf-vit": "vit_b16", "torchvision": "vit_l16", "google": "vit_h14", "jax": "vit_l16"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=7)
    runs = parser.parse_args().runs
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, {len(formats())} formats\n")
    print("| file | keys | open (ms of CPU) | recognise (ms of CPU) |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.safetensors"
        for name, keys in {**ordinary(), **hostile()}.items():
            save_file({key: torch.zeros(shape, dtype=torch.float16) for key, shape in keys.items()}, path)
            opening = timed(runs, lambda: containers.open(path))
            contents = containers.open(path)
            recognising = timed(runs, lambda contents=contents: recognised(contents))
            print(f"| {name} | {len(keys):,} | {opening} | {recognising} |", flush=True)


def ordinary() -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the keys and shapes of named models, narrow ones: nothing but headers is read."""
    found = {}
    for name, model in ORDINARY.items():
        config = vit_spec.get(model, width=64, mlp_dim=64, num_heads=1)
        column = get(name).layouts(config)
        found[f"{model} in {name}"] = {
            key: layout.shape(config.sizes) for layout in column.values() for key in layout.keys(config.sizes)
        }
    return found


def hostile() -> dict[str, dict[str, tuple[int, ...]]]:
    """Return keys that are many, long or deeply wrapped."""
    depth, many = 40_000, 200_000
    block = ("norm1.weight", "attn.qkv.weight", "mlp.fc2.weight", "norm2.weight")
    real = {"patch_embed.proj.weight": (4, 3, 2, 2)}
    return {
        "wrappers around wrappers": {"model." * 2**n + "x": (1,) for n in range(10)},
        "1.4 MB of wrappers": {f"{'model.' * 700}x{n}": (1,) for n in range(330)},
        "200,000 ordinary keys": {f"layer{n}.weight": (1,) for n in range(many)},
        "160,000 keys of blocks": real | {f"blocks.{n}.{key}": (4, 4) for n in range(depth) for key in block},
        "200,000 keys beside a model": real | {f"blocks.0.{key}.{n}": (1,) for n in range(many) for key in block[:1]},
        "numbers of blocks far apart": real | {f"blocks.{n * 10**4}.mlp.fc2.weight": (4, 4) for n in range(1000)},
    }


def recognised(contents: containers.Contents) -> None:
    with contextlib.suppress(InputError):
        checkpoint(contents, contents.notes, None, {"num_heads": 1})


def timed(runs: int, function: Callable[[], object]) -> str:
    """Return the median of several runs and their range, in milliseconds."""
    times = []
    for _ in range(runs):
        start = time.process_time()
        function()
        times.append((time.process_time() - start) * 1e3)
    return f"{statistics.median(times):,.1f} ({min(times):,.1f} to {max(times):,.1f})"


if __name__ == "__main__":
    main()
