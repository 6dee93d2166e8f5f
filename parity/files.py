"""Weights on disk: safetensors files that carry their config.

A file is a length, a JSON header of keys, dtypes, shapes and offsets, and the arrays' bytes; see
https://github.com/huggingface/safetensors#format.  Into the header's free part go `config`, `format` and `version`.
"""

import json
import mmap
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open

from parity.formats import get
from parity.layout import Array
from parity.weights import FLOATS, Checkpoint, Tree, check, flatten, translate
from vit_spec import InputError, ViTConfig, nearest

WEIGHTS = "weights.safetensors"  # what a run folder calls them
PROJECT = "twin-vision-transformers"

_NAMES = {"F16": FLOATS["float16"], "BF16": FLOATS["bfloat16"], "F32": FLOATS["float32"], "F64": FLOATS["float64"]}
_CODES = {dtype: name for name, dtype in _NAMES.items()}


def save(path: str | PathLike[str], weights: Tree, config: ViTConfig, format: str, *, force: bool = False) -> None:
    """Write weights, nested or flat, to a safetensors file: completely, or not at all.

    Args:
        path: the file, ending in .safetensors.
        weights: arrays of numpy, jax or torch, exactly as `format` has them.
        config: the model.
        format: the name of the weights' format, e.g. "jax"; see `parity.formats`.
        force: replace a file that is there.

    Raises:
        InputError: a path that cannot be written to, an unknown format, or weights that are not the config's.
    """
    _write(path, Checkpoint(config, format, flatten(weights, get(format))), format, force)


def load(path: str | PathLike[str]) -> Checkpoint:
    """Open a file that this project wrote, or a run folder.  Its arrays are read when they are used.

    Raises:
        InputError: no such file, no safetensors file or a damaged one, or one whose weights are not its config's.
    """
    path = _existing(Path(path))
    header, arrays = _read(path)
    try:
        if "config" not in header or "format" not in header:
            raise InputError(
                "does not say which model it is of: read it with its own library, and parity.save it with a config"
            )
        checkpoint = Checkpoint(ViTConfig.from_json(header["config"]), header["format"], arrays)
        check(checkpoint)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return checkpoint


def convert(source: str | PathLike[str], target: str | PathLike[str], to: str, *, force: bool = False) -> None:
    """Write a file's weights to another file in another format, a parameter at a time.

    Args:
        source: a file or run folder that `load` reads.
        target: the file to write, ending in .safetensors.
        to: the name of the format to write.
        force: replace a file that is there.

    Raises:
        InputError: as `load` and `save`.
    """
    get(to)  # a misspelt name is told before files are looked at
    _write(target, load(source), to, force)


def _write(path: str | PathLike[str], checkpoint: Checkpoint, to: str, force: bool) -> None:
    path, config = Path(path), checkpoint.config
    _free(path, force)
    arrays, dtypes = translate(checkpoint, to), check(checkpoint)
    header: dict[str, Any] = {
        "__metadata__": {"config": config.to_json(), "format": to, "version": _version()},
    }
    end, starts = 0, {}
    column = get(to).layouts(config)
    for name in sorted(column, key=lambda name: -dtypes[name].itemsize):  # so that every array is aligned
        shape, dtype = column[name].shape(config.sizes), dtypes[name]
        for key in column[name].keys(config.sizes):
            starts[key], end = end, end + prod(shape) * dtype.itemsize
            header[key] = {"dtype": _CODES[dtype], "shape": shape, "data_offsets": (starts[key], end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    with _atomic(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for key, array in arrays:
            file.seek(8 + len(text) + starts[key])
            file.write(array.view(np.uint8).data)  # a buffer of bytes: Python knows none of bfloat16


@contextmanager
def _atomic(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that takes the name `path` once it is complete and on the disk, and that is removed otherwise."""
    partial = path.with_name(f".{uuid.uuid4().hex}.partial")
    try:
        with open(partial, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _read(path: Path) -> tuple[Mapping[str, str], dict[str, Array]]:
    """Return the free part of a file's header, and a view of the mapped file for each key."""
    try:
        with safe_open(path, framework="numpy"):  # validates lengths, offsets, shapes and the JSON
            pass
    except SafetensorError as error:
        raise InputError(f"{path} is not a safetensors file, or is damaged ({error}): fetch or write it again") from None
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    start = 8 + int.from_bytes(mapped[:8], "little")
    header = json.loads(mapped[8:start])
    free = header.pop("__metadata__", {})
    if foreign := [f"{key!r} is {spec['dtype']}" for key, spec in header.items() if spec["dtype"] not in _NAMES]:
        raise InputError(
            f"{path}: {'; '.join(foreign)}: weights are {', '.join(_NAMES)}, so convert or leave out the others"
        )
    arrays = {}
    for key, spec in header.items():
        shape, dtype, offset = spec["shape"], _NAMES[spec["dtype"]], start + spec["data_offsets"][0]
        arrays[key] = np.frombuffer(mapped, dtype, prod(shape), offset).reshape(shape)
    return free, arrays


def _existing(path: Path) -> Path:
    """Return the file at `path`, or in the run folder that it is."""
    file = path / WEIGHTS if path.is_dir() else path
    if file.is_file():
        return file
    folder = file.parent
    names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    hint = nearest(file.name, names) or (": check the path" if folder.is_dir() else f": there is no folder {folder}")
    raise InputError(f"no file {file}{hint}")


def _free(path: Path, force: bool) -> None:
    """Refuse a path that a file must not or cannot be written to."""
    if path.suffix != ".safetensors":
        raise InputError(f"{path} would be a safetensors file: give it a name that ends in .safetensors")
    if path.is_dir():
        raise InputError(f"{path} is a folder: give the name of a file in it, such as {path / WEIGHTS}")
    if not path.parent.is_dir():
        raise InputError(f"no folder {path.parent}: create it first")
    if path.exists() and not force:
        raise InputError(f"{path} exists: give another name, or --force (force=True) to replace it")


def _version() -> str:
    try:
        return version(PROJECT)
    except PackageNotFoundError:  # run from a folder that was never installed
        return "not installed"
