"""Write checkpoints to disk in chunks, verify them by reading them back, and give them their name when complete."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from parity.checkpoints import metadata
from parity.checkpoints.alternatives import check_can_store
from parity.checkpoints.array_transfer import ByteCounter, ByteProgress, verify, write_arrays
from parity.checkpoints.arrays import FLOAT_DTYPES
from parity.checkpoints.atomic_write import atomic_replace, lock_folder
from parity.checkpoints.containers import ArraySpec, Contents
from parity.checkpoints.conversion import plan_conversion
from parity.checkpoints.formats import OWN, Fields, get
from parity.checkpoints.preprocessing import Preprocessing
from parity.checkpoints.read_back import planned_arrays, unstated_fields
from parity.checkpoints.reading import TABLE_NOTE, StrPath, check_companions, load
from parity.checkpoints.sidecar import write_sidecar
from parity.checkpoints.weights import Checkpoint, TaskName, Tree, flatten
from parity.checkpoints.write_target import FOLDER, check_old, check_target, choose_container, report_full_disk
from vit_spec import InputError, ViTConfig, nearest
from vit_spec.errors import require_type

PROJECT = "twin-vision-transformers"


@dataclass(frozen=True)
class WriteResult:
    """The result of a write.

    Attributes:
        path: the file or folder.
        format: the name of the format, with its variant if the format has several.
        container: the name of the container, e.g. "safetensors"; or "folder".
        nbytes: the size of the arrays in bytes.
        remarks: one line for each property of the model that other programs cannot read from the result.
    """

    path: Path
    format: str
    container: str
    nbytes: int
    remarks: tuple[str, ...]


def save(
    path: StrPath,
    weights: Tree,
    config: ViTConfig,
    format: str,
    *,
    force: bool = False,
    labels: Sequence[str] | None = None,
    preprocessing: Preprocessing | None = None,
    task: TaskName = "classes",
) -> None:
    """Write weights to a file, completely or not at all.

    Args:
        path: the file; its suffix selects the container: .safetensors, .npz, .pth, .msgpack, ...
        weights: arrays of numpy, jax or torch, nested or flat, exactly as `format` stores them.
        config: the model.
        format: the name of the weights' format, e.g. "jax"; see `parity.checkpoints.formats`.
        force: replace an existing file.
        labels: names of the outputs; see `Checkpoint`.
        preprocessing: see `Checkpoint`.
        task: see `Checkpoint`.

    Raises:
        InputError: the path cannot be written to, the format is unknown, the weights do not match the config, the number
            of labels is not that of the outputs, or the task is unknown.
    """
    names = metadata.parse_labels(labels, config, "labels")
    checkpoint = Checkpoint(
        config, format, flatten(weights, get(format)), labels=names, preprocessing=preprocessing, task=task
    )
    write(checkpoint, path, format, force=force)


def convert(
    source: StrPath,
    target: StrPath,
    to: str,
    *,
    format: str | None = None,
    given: Fields | None = None,
    strip: str | None = None,
    ignore: Sequence[str] = (),
    force: bool = False,
    dtype: str | None = None,
    container: str | None = None,
) -> WriteResult:
    """Convert a checkpoint on disk to another format, bit for bit and in constant memory.

    Args:
        source: anything that `load` reads.
        target: the file to write, whose suffix selects the container, or a folder; see `path` of `write`.
        to: the name of the target format.
        format: the format of the source; see `load`.
        given: config overrides of the source; see `load`.
        strip: see `load`.
        ignore: see `load`.
        force: see `write`.
        dtype: see `write`.
        container: see `write`.

    Raises:
        InputError: for the reasons given in `load` and `write`.
    """
    get(to)  # report a misspelt name before any file is opened
    checkpoint = load(source, format=format, given=given, strip=strip, ignore=ignore)
    return write(checkpoint, target, to, force=force, dtype=dtype, container=container)


def write(
    checkpoint: Checkpoint,
    path: StrPath,
    to: str,
    *,
    force: bool = False,
    dtype: str | None = None,
    container: str | None = None,
    shard: int | None = None,
    progress: ByteProgress | None = None,
) -> WriteResult:
    """Write a checkpoint in the format `to`.

    Nothing is at `path` until everything is written and read back; an existing file stays until then.

    Args:
        checkpoint: the checkpoint, in any format.
        path: the file or folder; a leading ~ is the home folder.
        to: the name of the format.
        force: replace an existing file or folder.
        dtype: round the parameters to this dtype; by default every bit is kept.
        container: the name of the container.  By default the path's suffix selects it, and a path that ends in a slash or
            has no suffix is the folder that the format's own library opens.
        shard: the size limit of a file in such a folder, in bytes; by default `SHARD_BYTES`, or none if the library opens
            only one file of weights.
        progress: function of the bytes done and the bytes in total; the bytes read back count too.

    Raises:
        InputError: the path cannot be written to, the format cannot store the config, the weights do not match it, a
            finite entry is beyond the range of `dtype`, the task is unknown, or the JSON files of a library in the folder
            contradict the file.
    """
    require_type("checkpoint is", checkpoint, Checkpoint, example="parity.load(path)")
    metadata.parse_task(checkpoint.task, "task")
    slash, path, format = str(path).endswith("/"), Path(os.path.expanduser(path)), get(to)
    check_can_store(format, checkpoint.config)
    # First the plan: the JSON files of a library are made only of a config that its format can store.
    conversions = plan_conversion(checkpoint, to, None if dtype is None else _parse_dtype(dtype))
    kind, metadata_remarks = choose_container(path, slash, container, format, checkpoint, shard)
    files = format.library.contents(checkpoint.config) if kind.name == FOLDER else {}
    remarks = () if format.name in OWN else unstated_fields(checkpoint.config, to, conversions, files)
    name = format.full_name(checkpoint.config)
    notes = {"config": checkpoint.config.to_json(), "format": name, "version": project_version()}
    notes |= metadata.to_notes(checkpoint) | ({TABLE_NOTE: format.definition.table} if format.definition else {})
    specs = {conversion.key: ArraySpec(conversion.shape, conversion.dtype) for conversion in conversions}
    total = sum(spec.nbytes for spec in specs.values())
    check_target(path, kind, force)
    if kind.suffixes and kind.name != FOLDER:  # a folder is written with its JSON files
        check_companions(path, Contents(kind.name, planned_arrays(conversions), notes))
    check = partial(check_old, container=kind, force=force)
    with (
        report_full_disk(path, total),
        contextlib.ExitStack() as until_named,
        atomic_replace(path, replace=force, check=check) as new,
    ):
        with kind.create(new, specs, notes) as writer:
            checksums = write_arrays(writer, conversions, kind.any_order, ByteCounter(2 * total, progress))
        verify(kind, new, specs, checksums, ByteCounter(2 * total, progress, total))
        if not kind.stores_metadata:
            if not new.is_dir():
                until_named.enter_context(lock_folder(path.parent))
                check_target(path, kind, force)
            write_sidecar(new, path, notes, kind.name, force)
    return WriteResult(path, name, kind.name, total, (*remarks, *metadata_remarks))


def _parse_dtype(name: str) -> np.dtype[Any]:
    if name not in FLOAT_DTYPES:
        hint = nearest(name, FLOAT_DTYPES) or f": give one of {', '.join(FLOAT_DTYPES)}"
        raise InputError(f"unknown dtype {name!r}{hint}")
    return FLOAT_DTYPES[name]


def project_version() -> str:
    """Return the version of this project, for the metadata of files."""
    try:
        return version(PROJECT)
    except PackageNotFoundError:  # run from a folder that was never installed
        return "not installed"
