"""What a golden file is: a tiny ViT, and what an implementation that nobody here wrote makes of it.

One `NAME.npz` holds

    header     JSON: config (ours), provenance, and the shape of each weight by its name in the PyTorch twin
    weights    all weights in the header's order, one after the other, float16
    images     (B, C, H, W), float16
    files/*    the files that the peer itself wrote with these weights, byte for byte, where a test reads them
    outputs/*  what the peer computed in float64, each under the name that the twins' intermediates have: "logits",
               "norm" (tokens after the final norm), "blocks.1", or "attention" (the weights of the last block);
               all but the logits of the first image only

Weights and images are drawn so that float16 holds them exactly: nothing is rounded on the way from the peer to the twins,
and the files stay small.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vit_spec import ViTConfig

FOLDER = Path(__file__).parent

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Golden:
    """A peer's outputs, and all that a twin needs to compute them too; arrays are float64."""

    config: ViTConfig
    weights: dict[str, Array]
    images: Array
    outputs: dict[str, Array]
    provenance: dict[str, str]
    files: dict[str, bytes] = field(default_factory=dict)


def names() -> list[str]:
    """Return the name of every golden file."""
    return sorted(path.stem for path in FOLDER.glob("*.npz"))


def read(name: str) -> Golden:
    """Return a golden file's contents."""
    with np.load(FOLDER / f"{name}.npz") as file:
        header = json.loads(str(file["header"]))
        ends = np.cumsum([int(np.prod(shape)) for shape in header["weights"].values()])
        flat = np.split(file["weights"].astype(np.float64), ends[:-1])
        weights = {key: part.reshape(header["weights"][key]) for key, part in zip(header["weights"], flat, strict=True)}
        outputs = {key.removeprefix("outputs/"): file[key] for key in file.files if key.startswith("outputs/")}
        images = file["images"].astype(np.float64)
        files = {key.removeprefix("files/"): file[key].tobytes() for key in file.files if key.startswith("files/")}
    return Golden(ViTConfig.from_json(json.dumps(header["config"])), weights, images, outputs, header["provenance"], files)


def write(name: str, golden: Golden) -> Path:
    """Write a golden file, and return where."""
    header = {
        "config": json.loads(golden.config.to_json()),
        "provenance": golden.provenance,
        "weights": {key: array.shape for key, array in golden.weights.items()},
    }
    flat = np.concatenate([array.ravel() for array in golden.weights.values()])
    arrays = {"header": np.array(json.dumps(header)), "weights": _halved(flat), "images": _halved(golden.images)}
    for key, array in golden.outputs.items():
        if array.dtype != np.float64 or not np.isfinite(array).all():
            raise ValueError(f"{name}: the peer's {key} is {array.dtype}, or not finite")
        arrays[f"outputs/{key}"] = array if key == "logits" else array[:1]
    arrays |= {f"files/{key}": np.frombuffer(content, np.uint8) for key, content in golden.files.items()}
    path = FOLDER / f"{name}.npz"
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]  # numpy's stub takes the names for its own options
    return path


def _halved(array: Array) -> Array:
    half: Array = array.astype(np.float16)
    if not np.array_equal(half, array):
        raise ValueError("a weight or a pixel is not exact in float16: draw it with `noise`")
    return half


def noise(rng: np.random.Generator, shape: tuple[int, ...], size: float, around: float = 0.0) -> Array:
    """Return normal noise, exact in float16: no zero, no one, no symmetry for a wrong mapping to hide behind."""
    values: Array = (around + size * rng.standard_normal(shape)).astype(np.float16).astype(np.float64)
    return values
