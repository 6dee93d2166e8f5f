"""The format of golden files: a tiny ViT, and the outputs that an independent implementation, the peer, computed for it.

One `NAME.npz` contains

    header     JSON: config (a `ViTConfig`), provenance, and the shape of each weight by its name in the PyTorch twin
    weights    all weights in the order of the header, concatenated, float16
    images     (B, C, H, W), float16
    files/*    files that the peer itself wrote with these weights, byte for byte, if a test reads them
    outputs/*  outputs of the peer in float64, under the names of the twins' intermediates: "logits", "norm" (tokens after
               the final norm), "blocks.1", or "attention" (the attention weights of the last block); the logits are for
               all images, the other outputs for the first image only

Weights and images are drawn as numbers that float16 represents exactly.  So nothing is rounded between the peer and the
twins, and the files stay small.
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
    """The outputs of a peer, and the config, weights and images to compute them with a twin.  All arrays are float64."""

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
    """Return the content of a golden file."""
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
    """Write a golden file and return its path.

    Raises:
        ValueError: an output is not finite or not float64, or a weight or pixel is not exact in float16.
    """
    header = {
        "config": json.loads(golden.config.to_json()),
        "provenance": golden.provenance,
        "weights": {key: array.shape for key, array in golden.weights.items()},
    }
    flat = np.concatenate([array.ravel() for array in golden.weights.values()])
    arrays = {"header": np.array(json.dumps(header)), "weights": _to_float16(flat), "images": _to_float16(golden.images)}
    for key, array in golden.outputs.items():
        if array.dtype != np.float64 or not np.isfinite(array).all():
            raise ValueError(f"{name}: the peer's {key} is {array.dtype}, or not finite")
        arrays[f"outputs/{key}"] = array if key == "logits" else array[:1]
    arrays |= {f"files/{key}": np.frombuffer(content, np.uint8) for key, content in golden.files.items()}
    path = FOLDER / f"{name}.npz"
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]  # numpy's stub takes the names for its own options
    return path


def _to_float16(array: Array) -> Array:
    """Return an array in float16.

    Raises:
        ValueError: the conversion would round a value.
    """
    half: Array = array.astype(np.float16)
    if not np.array_equal(half, array):
        raise ValueError("a weight or a pixel is not exact in float16: draw it with `noise`")
    return half


def noise(rng: np.random.Generator, shape: tuple[int, ...], std: float, mean: float = 0.0) -> Array:
    """Return normal noise, exact in float16, in float64.  It has no zeros or symmetries that could hide a wrong mapping."""
    values: Array = (mean + std * rng.standard_normal(shape)).astype(np.float16).astype(np.float64)
    return values
