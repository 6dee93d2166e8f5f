"""The path that a checkpoint is written to: its container, what may be replaced there, and a full disk."""

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from parity.checkpoints import containers, metadata
from parity.checkpoints.atomic_write import check_replaceable
from parity.checkpoints.companions import COMPANION_FILES
from parity.checkpoints.containers import ArraySpec, Container, Writer
from parity.checkpoints.containers.folders import FLAX_FILE
from parity.checkpoints.containers.safetensors import create_sharded
from parity.checkpoints.containers.shards import shards_in_name
from parity.checkpoints.formats import Format
from parity.checkpoints.sidecar import SIDECAR_FILE, check_sidecar, sidecar_path, write_sidecar
from parity.checkpoints.weights import Checkpoint
from vit_spec import InputError, nearest
from vit_spec.errors import DISK_FULL_ERRNOS

FOLDER = "folder"  # name of the container of a folder that the format's own library opens: weights and JSON files
SHARD_BYTES = 5_000_000_000  # default size limit of a file in a folder; that of Hugging Face
_MAX_ENTRIES = 1_000_000  # in a folder that is replaced
_FEW_FILES = 1000  # with fewer free inodes than this, the lack of inodes may be why the disk is full


def choose_container(
    path: Path, slash: bool, name: str | None, format: Format, checkpoint: Checkpoint, shard: int | None
) -> tuple[Container, list[str]]:
    """Return the container to write, and remarks on labels and preprocessing that other programs cannot read from it.

    Args:
        path: the destination.
        slash: whether the destination was given with a slash at its end, as a folder.
        name: the container; None: that of the suffix of `path`, or a folder.
        format: the format to write.
        checkpoint: the checkpoint to write.
        shard: the size limit of a file in a folder, in bytes; None: the default.

    Raises:
        InputError: the destination selects no container, or the container does not fit the format or `shard`.
    """
    remarks = metadata.notes_only_remarks(checkpoint) if format.library.has_files else []
    found = None if slash else containers.by_suffix(path)
    if found := found if name is None else containers.get(name):
        if shard is not None:
            raise InputError(f"{path} is no folder of safetensors files: leave --shard (shard=) out, or give FOLDER/")
        if shards_in_name(path) > 1:
            raise InputError(f"{path} would be one file with the name of one of several shards: give another name")
        return found, remarks
    files, lost = metadata.fill_library_files(format.library.contents(checkpoint.config), checkpoint)
    suffixes = [suffix for each in containers.names() for suffix in containers.get(each).suffixes]
    if not files or (path.suffix and not slash):
        hint = nearest(path.suffix, suffixes) if path.suffix else ""
        also = f", or FOLDER/ for a folder that the library of {format.name} opens" if files else ""
        raise InputError(f"{path} does not select a container{hint}: give a name that ends in {', '.join(suffixes)}{also}")
    default = replace(format, variant="")
    if format.library.one_layout and format.layouts(checkpoint.config) != default.layouts(checkpoint.config):
        raise InputError(
            f"the library of {format.name} does not open a folder of this model with the keys of {format.variant!r}: write "
            f"{default.full_name(checkpoint.config)}, or a file (weights.safetensors) instead of a folder"
        )
    flax = format.separator == "/"
    if shard is not None and (flax or not format.library.opens_shards):
        raise InputError(f"the library of {format.name} opens only one file of weights: leave --shard (shard=) out")
    weights = containers.get("msgpack" if flax else "safetensors")

    @contextlib.contextmanager
    def create(partial: Path, specs: Mapping[str, ArraySpec], notes: Mapping[str, str]) -> Iterator[Writer]:
        if flax:
            partial.mkdir()
            file = weights.create(partial / FLAX_FILE, specs, notes)
        else:  # transformers refuses a file whose metadata entry "format" is not "pt"
            limit = shard or (SHARD_BYTES if format.library.opens_shards else sum(spec.nbytes for spec in specs.values()))
            file = create_sharded(partial, specs, {**notes, "format": "pt", "layout": notes["format"]}, limit)
        with file as writer:
            yield writer
        if flax:
            write_sidecar(partial / FLAX_FILE, partial / FLAX_FILE, notes, weights.name, force=False)
        for name, content in files.items():
            (partial / name).write_text(json.dumps(content, indent=2) + "\n")

    entries = r"model[\w-]*\.safetensors(\.index\.json)?|" + "|".join(
        map(re.escape, (FLAX_FILE, f"{FLAX_FILE}.{SIDECAR_FILE}", *COMPANION_FILES))
    )
    folder = replace(weights, name=FOLDER, create=create, open=containers.open, stores_metadata=True, entry_pattern=entries)
    return folder, lost


def check_target(path: Path, container: Container, force: bool) -> None:
    """Raise InputError if a path cannot be written to, or must not be replaced."""
    if path.name in ("", "..") or (path.is_dir() and path.samefile(".")):
        raise InputError(f"{path} is the working folder or a folder above it, and is not replaced: give another name")
    if path.name == "-":
        raise InputError("- would be standard output, to which no weights are written: give a file or a folder")
    if not path.parent.is_dir():
        raise InputError(f"no folder {path.parent}: create it first")
    check_old(path, container, force)
    if container.suffixes and not container.stores_metadata:
        check_sidecar(sidecar_path(path), force)


def check_old(path: Path, container: Container, force: bool) -> None:
    """Raise InputError if a path exists and must not be replaced."""
    if not os.path.lexists(path):
        return
    check_replaceable(path)
    if path.is_dir() and container.suffixes and container.name != FOLDER:
        raise InputError(
            f"{path} is a folder: give the name of a file in it, such as {path / f'weights{container.suffixes[0]}'}"
        )
    if not force:
        raise InputError(f"{path} exists: give another name, or --force (force=True) to replace it")
    if path.is_dir() and not path.is_symlink() and not _has_only_weights(path, container):
        raise InputError(f"{path} has other files than weights, and is not replaced: give another name, or empty it first")
    if path.is_file() and (container.name == FOLDER or not container.suffixes):
        raise InputError(f"{path} is a file, but the output is a folder: give another name")


def _has_only_weights(path: Path, container: Container) -> bool:
    """Return whether everything in a folder belongs to the container, so that replacing it loses nothing else.

    A link to a file counts as a file: the caches of hubs consist of links.
    """
    pattern, count, folders = re.compile(container.entry_pattern), 0, [""]
    while folders:
        folder = folders.pop()
        with os.scandir(path / folder) as entries:
            for entry in entries:
                name, count = folder + entry.name, count + 1
                is_folder = entry.is_dir(follow_symlinks=False)
                if is_folder:
                    folders.append(name := f"{name}/")
                if not (is_folder or entry.is_file()) or not pattern.fullmatch(name) or count > _MAX_ENTRIES:
                    return False
    return True


@contextlib.contextmanager
def report_full_disk(path: Path, nbytes: int) -> Iterator[None]:
    """Convert the exceptions with which libraries report a full disk to an InputError of one line."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if not is_disk_full(error):
            raise
        disk = os.statvfs(path.parent)
        free = f"has {disk.f_bavail * disk.f_frsize:,} left"
        if disk.f_files and disk.f_favail < _FEW_FILES:  # the unfinished files are already removed
            free += f", in {disk.f_favail:,} files at most"
        raise InputError(f"{path} needs {nbytes:,} bytes, and its disk {free}: make room, or write elsewhere") from None


def is_disk_full(error: BaseException) -> bool:
    """Return whether an exception, or one that caused it, says that a disk is full or a quota reached."""
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        if getattr(error, "errno", None) in DISK_FULL_ERRNOS or any(
            os.strerror(number) in str(error) for number in DISK_FULL_ERRNOS
        ):
            return True
        error = error.__cause__ or error.__context__ or error
    return False
