"""The files of the checkpoints of `train.torch`: their checks, and the training state in them, without torch.

`train.torch.checkpoints` describes and writes them.
"""

import json
import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from parity.checkpoints.containers import safetensors, zarr
from parity.checkpoints.containers.budget import Budget
from parity.checkpoints.containers.container import StoredArray
from parity.checkpoints.containers.dcp import ShardedArray
from train.checkpoints.trainers import MARKERS
from train.checkpoints.training_state import PARTS, TrainingState, without_placeholders
from vit_spec import InputError, ViTConfig, bounded_json

VERSION = 1  # of the content of a checkpoint; increase it when the structure of the training state changes
OLDEST_READ = 1  # the oldest version that `read_state` reads
JSON_FILE = MARKERS["train.torch"]
MAX_JSON_BYTES = 1 << 28


class _Piece(NamedTuple):
    """A part of a tensor in a file: the index of its first entry on each axis, its lengths, and its entries."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    array: StoredArray


def read_loop(path: Path) -> tuple[int, Any]:
    """Return the version of a checkpoint, and the state of the loop, as JSON.

    Raises:
        OSError, ValueError: they cannot be read.
    """
    content = read_json(path)
    return content["version"], content["loop"]


def read_state(path: Path, config: ViTConfig) -> TrainingState:
    """Read a checkpoint; its files are verified now, and its arrays are read again when they are used.

    Raises:
        OSError, ValueError: it is damaged, or cannot be read.
    """
    content = read_json(path)
    check_files(path, content["checksums"], 0, 1)
    pieces: dict[str, list[_Piece]] = {}
    for file in content["checksums"]:
        contents = safetensors.CONTAINER.open(path / file)
        places = json.loads(contents.metadata["DCP_SHARDING_INFO"])
        for (name,), array in contents.arrays.items():
            pieces.setdefault(name, []).append(_Piece(tuple(places[name]["saved_offsets"]), array.shape, array))
    parts: dict[str, dict[str, StoredArray]] = {}
    for name, (dtype, shape) in content["tensors"].items():
        part, _, key = name.partition(".")
        if part not in PARTS or not _has_all_entries(shape, pieces[name]):
            raise ValueError(f"{name} is no tensor of a run, or has not all of its entries")
        parts.setdefault(part, {})[key] = ShardedArray(tuple(shape), np.dtype(dtype), pieces[name])
    numbers, moments = content["numbers"], without_placeholders(parts, config, "torch")
    return TrainingState(config, "torch", moments, content["step"], numbers["updates"], bool(numbers["sound"]))


def _has_all_entries(shape: list[int], pieces: list[_Piece]) -> bool:
    """Return whether pieces that do not overlap are all of a tensor."""
    ends = [[start + size for start, size in zip(each.offsets, each.sizes, strict=True)] for each in pieces]
    within = all(end <= length for of_piece in ends for end, length in zip(of_piece, shape, strict=True))
    return within and sum(each.array.size for each in pieces) == math.prod(shape)


def check_files(path: Path, checksums: Any, process: int, count: int) -> None:
    """Raise ValueError if the files of a checkpoint are not those that were written, byte for byte.

    The headers are parsed by the strict reader of `parity` before torch sees them.  Each of `count` processes reads its
    part of the files.
    """
    try:
        zarr.scan_files(path, Budget())  # no pipe, device or hole
        if {file.name for file in path.iterdir()} != {*checksums, JSON_FILE}:
            raise ValueError("files are missing, or there are others")
        for file, sums in [*checksums.items()][process::count]:
            contents = safetensors.CONTAINER.open(path / file)
            if {key for (key,) in contents.arrays} != sums["tensors"].keys():
                raise ValueError(f"{file} has other tensors")
            if json_checksum(contents.metadata) != sums["header"]:
                raise ValueError(f"the checksum of the header of {file} is wrong")
            for (key,), array in contents.arrays.items():
                if zlib.crc32(array.read(0, array.size).view(np.uint8).data) != sums["tensors"][key]:
                    raise ValueError(f"the checksum of {key} is wrong")
    except InputError as error:
        raise ValueError(str(error).rpartition(": ")[0].replace(f"{path}/", "")) from None


def read_json(folder: Path) -> dict[str, Any]:
    """Return the object in the JSON file of a checkpoint.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged.
    """
    try:
        found = bounded_json.read_object(folder / JSON_FILE, max_bytes=MAX_JSON_BYTES, allow_nan=True)
    except InputError:
        found = {}
    content = found.get("content")
    if not isinstance(content, dict) or found.get("checksum") != json_checksum(content):
        raise ValueError("its metadata cannot be read")
    return content


def json_checksum(content: Mapping[str, Any]) -> int:
    """Return the CRC-32 of a JSON object."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())
