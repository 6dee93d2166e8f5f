"""Time to recognise the format and config of a checkpoint, beyond reading the header of its file.

    python -m benchmarks.recognition [--runs 7]

It prints the table "Recognition" of docs/measurements/conversion.md.  The files are named models in several formats, then
files with many, long or deeply nested keys.  Each row has the processor time to open the file, and the processor time from
the open file to a checkpoint with its config or to a refusal: the median of several runs and their range.  Only headers are
read.
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
from parity.checkpoints.reading import build_checkpoint
from vit_spec import InputError

MODELS = {"timm": "vit_b16", "hf-vit": "vit_b16", "torchvision": "vit_l16", "google": "vit_h14", "jax": "vit_l16"}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=7)
    runs = parser.parse_args().runs
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, {len(formats())} formats\n")
    print("| safetensors file | keys | open, ms | recognise, ms |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.safetensors"
        for name, keys in {**named_models(), **hostile_keys()}.items():
            save_file({key: torch.zeros(shape, dtype=torch.float16) for key, shape in keys.items()}, path)
            opening = time_function(runs, lambda: containers.open(path))
            contents = containers.open(path)
            recognition = time_function(runs, lambda contents=contents: recognise(contents))
            print(f"| {name} | {len(keys):,} | {opening} | {recognition} |", flush=True)


def named_models() -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the keys and shapes of named models at a small width: only headers are read."""
    shapes = {}
    for name, model in MODELS.items():
        config = vit_spec.get(model, width=64, mlp_dim=64, num_heads=1)
        column = get(name).layouts(config)
        shapes[f"{model} in {name}"] = {
            key: layout.shape(config.sizes) for layout in column.values() for key in layout.keys(config.sizes)
        }
    return shapes


def hostile_keys() -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the keys and shapes of files with many, long or deeply nested keys."""
    depth, many = 40_000, 200_000
    block = ("norm1.weight", "attn.qkv.weight", "mlp.fc2.weight", "norm2.weight")
    patch_embedding = {"patch_embed.proj.weight": (4, 3, 2, 2)}
    return {
        "keys with up to 512 prefixes `model.`": {"model." * 2**n + "x": (1,) for n in range(10)},
        "1.4 MB of `model.model. ... .x`": {f"{'model.' * 700}x{n}": (1,) for n in range(330)},
        "keys of no format": {f"layer{n}.weight": (1,) for n in range(many)},
        "a model of 40,000 blocks": patch_embedding | {f"blocks.{n}.{key}": (4, 4) for n in range(depth) for key in block},
        "a model and 200,000 further keys": patch_embedding
        | {f"blocks.0.{key}.{n}": (1,) for n in range(many) for key in block[:1]},
        "block numbers 10,000 apart": patch_embedding | {f"blocks.{n * 10**4}.mlp.fc2.weight": (4, 4) for n in range(1000)},
    }


def recognise(contents: containers.Contents) -> None:
    """Build the checkpoint of an opened file; a refusal is not an error here."""
    with contextlib.suppress(InputError):
        build_checkpoint(contents, contents.metadata, None, {"num_heads": 1})


def time_function(runs: int, function: Callable[[], object]) -> str:
    """Return the median and range of the processor time of several runs, in milliseconds."""
    times = []
    for _ in range(runs):
        start = time.process_time()
        function()
        times.append((time.process_time() - start) * 1e3)
    return f"{statistics.median(times):,.1f} ({min(times):,.1f} to {max(times):,.1f})"


if __name__ == "__main__":
    main()
