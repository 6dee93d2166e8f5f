"""Write checkpoints to disk in chunks, verify them by reading them back, and give them their name when complete."""

import contextlib
import errno
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from parity.checkpoints import containers, metadata
from parity.checkpoints.atomic_write import atomic_replace, check_replaceable, lock_folder
from parity.checkpoints.config_inference import DEFAULTS
from parity.checkpoints.containers import ArraySpec, Container, Writer
from parity.checkpoints.containers.container import ContiguousArray
from parity.checkpoints.containers.folders import MAX_JSON_BYTES
from parity.checkpoints.containers.safetensors import create_sharded
from parity.checkpoints.containers.shards import shards_in_name
from parity.checkpoints.formats import Fields, Format, get
from parity.checkpoints.formats.format import Definition, no_files
from parity.checkpoints.layout import Array
from parity.checkpoints.preprocessing import Preprocessing
from parity.checkpoints.reading import (
    COMPANION_FILES,
    FLAX_FILE,
    SIDECAR_FILE,
    TABLE_NOTE,
    StrPath,
    fingerprint,
    folder_notes,
    load,
    read_sidecar,
    sidecar_path,
)
from parity.checkpoints.weights import FLOAT_DTYPES, ArrayConversion, Checkpoint, TaskName, Tree, flatten, plan_conversion
from vit_spec import InputError, ViTConfig, bounded_json, nearest

PROJECT = "twin-vision-transformers"
MAX_THREADS = 2  # at most this many arrays of the source are in memory at a time
SHARD_BYTES = 5_000_000_000  # default size limit of a file in a folder; that of Hugging Face

Progress = Callable[[int, int], None]  # (bytes done, bytes in total)


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
        InputError: the path cannot be written to, the format is unknown, the weights do not match the config, or the number
            of labels is not that of the outputs.
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
    progress: Progress | None = None,
) -> WriteResult:
    """Write a checkpoint in the format `to`.

    Nothing is at `path` until everything is written and read back; an existing file stays until then.

    Args:
        checkpoint: the checkpoint, in any format.
        path: the file or folder.
        to: the name of the format.
        force: replace an existing file or folder.
        dtype: round the parameters to this dtype; by default every bit is kept.
        container: the name of the container.  By default the path's suffix selects it, and a path that ends in a slash or
            has no suffix is the folder that the format's own library opens.
        shard: the size limit of a file in such a folder, in bytes; by default `SHARD_BYTES`, or none if the library opens
            only one file of weights.
        progress: function of the bytes done and the bytes in total; the bytes read back count too.

    Raises:
        InputError: the path cannot be written to, the format cannot store the config, or the weights do not match it.
    """
    slash, path, format = str(path).endswith("/"), Path(path), get(to)
    # First the plan: the JSON files of a library are made only of a config that its format can store.
    conversions = plan_conversion(checkpoint, to, None if dtype is None else _parse_dtype(dtype))
    kind, metadata_remarks = _choose_container(path, slash, container, format, checkpoint, shard)
    name = format.full_name(checkpoint.config)
    notes = {"config": checkpoint.config.to_json(), "format": name, "version": project_version()}
    notes |= metadata.to_notes(checkpoint) | ({TABLE_NOTE: format.definition.table} if format.definition else {})
    specs = {conversion.key: ArraySpec(conversion.shape, conversion.dtype) for conversion in conversions}
    total = sum(spec.nbytes for spec in specs.values())
    _check_target(path, kind, force)
    check = partial(_check_old, container=kind, force=force)
    with (
        _report_full_disk(path, total),
        contextlib.ExitStack() as until_named,
        atomic_replace(path, replace=force, check=check) as new,
    ):
        with kind.create(new, specs, notes) as writer:
            checksums = _write_arrays(writer, conversions, kind.any_order, _ByteCounter(2 * total, progress))
        _verify(kind, new, specs, checksums, _ByteCounter(2 * total, progress, total))
        if not kind.stores_metadata:
            if not new.is_dir():
                until_named.enter_context(lock_folder(path.parent))
                _check_target(path, kind, force)
            _write_sidecar(new, path, notes, kind.name, force)
    remarks = _config_remarks(format, checkpoint.config, kind.name == FOLDER)
    return WriteResult(path, name, kind.name, total, (*remarks, *metadata_remarks))


# Container and target path -------------------------------------------------------------------------------------------

_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_FEW_FILES = 1000  # with fewer free inodes than this, the lack of inodes may be why the disk is full

_MAX_ENTRIES = 1_000_000  # in a folder that is replaced

_FINGERPRINT = re.compile(r"\d+-[0-9a-f]{8}")  # see `fingerprint`

FOLDER = "folder"  # name of the container of a folder that the format's own library opens: weights and JSON files


def _choose_container(
    path: Path, slash: bool, name: str | None, format: Format, checkpoint: Checkpoint, shard: int | None
) -> tuple[Container, list[str]]:
    """Return the container to write, and remarks on labels and preprocessing that other programs cannot read from it."""
    remarks = [] if format.json_files is no_files else metadata.notes_only_remarks(checkpoint)
    found = None if slash else containers.by_suffix(path)
    if found := found if name is None else containers.get(name):
        if shard is not None:
            raise InputError(f"{path} is no folder of safetensors files: leave --shard (shard=) out, or give FOLDER/")
        if shards_in_name(path) > 1:
            raise InputError(f"{path} would be one file with the name of one of several shards: give another name")
        return found, remarks
    files, lost = metadata.fill_library_files(format.json_files(checkpoint.config), checkpoint)
    suffixes = [suffix for each in containers.names() for suffix in containers.get(each).suffixes]
    if not files or (path.suffix and not slash):
        hint = nearest(path.suffix, suffixes) if path.suffix else ""
        also = f", or FOLDER/ for a folder that the library of {format.name} opens" if files else ""
        raise InputError(f"{path} does not select a container{hint}: give a name that ends in {', '.join(suffixes)}{also}")
    default = replace(format, variant="")
    if format.one_layout_in_folders and format.layouts(checkpoint.config) != default.layouts(checkpoint.config):
        raise InputError(
            f"the library of {format.name} does not open a folder of this model with the keys of {format.variant!r}: write "
            f"{default.full_name(checkpoint.config)}, or a file (weights.safetensors) instead of a folder"
        )
    flax = format.separator == "/"
    if shard is not None and (flax or not format.opens_shards):
        raise InputError(f"the library of {format.name} opens only one file of weights: leave --shard (shard=) out")
    weights = containers.get("msgpack" if flax else "safetensors")

    @contextlib.contextmanager
    def create(partial: Path, specs: Mapping[str, ArraySpec], notes: Mapping[str, str]) -> Iterator[Writer]:
        if flax:
            partial.mkdir()
            file = weights.create(partial / FLAX_FILE, specs, notes)
        else:  # transformers refuses a file whose metadata entry "format" is not "pt"
            limit = shard or (SHARD_BYTES if format.opens_shards else sum(spec.nbytes for spec in specs.values()))
            file = create_sharded(partial, specs, {**notes, "format": "pt", "layout": notes["format"]}, limit)
        with file as writer:
            yield writer
        if flax:
            _write_sidecar(partial / FLAX_FILE, partial / FLAX_FILE, notes, weights.name, force=False)
        for name, content in files.items():
            (partial / name).write_text(json.dumps(content, indent=2) + "\n")

    entries = r"model[\w-]*\.safetensors(\.index\.json)?|" + "|".join(
        map(re.escape, (FLAX_FILE, f"{FLAX_FILE}.{SIDECAR_FILE}", *COMPANION_FILES))
    )
    folder = replace(weights, name=FOLDER, create=create, open=containers.open, stores_metadata=True, entry_pattern=entries)
    return folder, lost


def _parse_dtype(name: str) -> np.dtype[Any]:
    if name not in FLOAT_DTYPES:
        hint = nearest(name, FLOAT_DTYPES) or f": give one of {', '.join(FLOAT_DTYPES)}"
        raise InputError(f"unknown dtype {name!r}{hint}")
    return FLOAT_DTYPES[name]


def _check_target(path: Path, container: Container, force: bool) -> None:
    """Raise InputError if a path cannot be written to, or must not be replaced."""
    if not path.parent.is_dir():
        raise InputError(f"no folder {path.parent}: create it first")
    _check_old(path, container, force)
    if container.suffixes and not container.stores_metadata:
        _check_sidecar(sidecar_path(path), force)


def _check_old(path: Path, container: Container, force: bool) -> None:
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


def _check_sidecar(path: Path, force: bool) -> None:
    """Raise InputError if a sidecar file cannot be written to a path without losing a file that is not a sidecar file."""
    if not os.path.lexists(path) or _is_sidecar(path):
        return
    check_replaceable(path)
    if not path.is_file():
        raise InputError(f"{path} is not a file, but the metadata are written there: give another name, or move it")
    if not force:
        raise InputError(
            f"{path} exists, but the metadata are written there: give another name, or --force (force=True) to replace it"
        )


def _is_sidecar(path: Path) -> bool:
    """Return whether a path is a sidecar file, or a link to one: a JSON object whose keys are fingerprints of files."""
    if not path.is_file():
        return False
    try:
        entries = bounded_json.read_object(path, max_bytes=MAX_JSON_BYTES)
    except (OSError, InputError):
        return False
    return bool(entries) and all(
        _FINGERPRINT.fullmatch(key) and isinstance(entry, dict) and "config" in entry for key, entry in entries.items()
    )


def _config_remarks(format: Format, config: ViTConfig, with_json_files: bool) -> tuple[str, ...]:
    """Return a line for each field that changes the function and that other programs cannot read from the result."""
    lines = []
    assumed = _unset_fields(format.definition, config) if format.definition else format.assumed
    for name, value in assumed.items():
        is_known = (value is None and name == "num_heads") or (with_json_files and name in format.written_fields)
        matters = not name.startswith(("resampling.", "pixels.", "image_size"))
        if matters and not is_known and config.at(name) != value:
            lines.append(
                f"{name}={config.at(name)!r} is only in our own metadata: other libraries read the format as {value!r}"
            )
    return tuple(lines)


def _unset_fields(definition: Definition, config: ViTConfig) -> Fields:
    """Return the fields that no tensor shows and a format file does not set, with the values that are assumed."""
    shown = {"positions.kind"} if config.positions.kind == "learned" else set()
    shown |= {"mlp.activation"} if config.mlp.activation == "swiglu" else set()
    shown |= set() if config.norms.bias else {"norms.kind"}
    shown |= {"head.pool"} if config.head.pool == "attention" else set()
    shown |= {"positions.rotary"} if config.positions.rotary == "mixed" else set()
    return {name: value for name, value in DEFAULTS.items() if name not in shown and name not in definition.fields}


@contextlib.contextmanager
def _report_full_disk(path: Path, nbytes: int) -> Iterator[None]:
    """Convert the exceptions with which libraries report a full disk to an InputError of one line."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if not _is_disk_full(error):
            raise
        disk = os.statvfs(path.parent)
        free = f"has {disk.f_bavail * disk.f_frsize:,} left"
        if disk.f_files and disk.f_favail < _FEW_FILES:  # the unfinished files are already removed
            free += f", in {disk.f_favail:,} files at most"
        raise InputError(f"{path} needs {nbytes:,} bytes, and its disk {free}: make room, or write elsewhere") from None


def _is_disk_full(error: BaseException) -> bool:
    """Return whether an exception, or one that caused it, says that a disk is full or a quota reached."""
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        if getattr(error, "errno", None) in _DISK_FULL_ERRNOS or any(
            os.strerror(number) in str(error) for number in _DISK_FULL_ERRNOS
        ):
            return True
        error = error.__cause__ or error.__context__ or error
    return False


def _write_sidecar(new: Path, path: Path, notes: Mapping[str, str], container: str, force: bool) -> None:
    """Write the metadata of weights to a sidecar file, because their container cannot store it.

    The sidecar of a file is written before the file gets its name, and it keeps the entry of the file that is replaced.
    After an interruption, the sidecar therefore has the metadata of the old file and of the new one.
    """
    if new.is_dir():
        (new / SIDECAR_FILE).write_text(json.dumps(folder_notes(new, container, notes)))
        return
    target = sidecar_path(path)
    is_known = path.is_file() and _is_sidecar(target)
    old = {fingerprint(path): known} if is_known and (known := read_sidecar(path)) else {}
    with atomic_replace(target, check=partial(_check_sidecar, force=force)) as sidecar:
        sidecar.write_text(json.dumps({**old, fingerprint(new): dict(notes)}))


# Arrays --------------------------------------------------------------------------------------------------------------

Checksums = dict[str, list[tuple[int, int, int]]]  # key -> (first entry, number of entries, checksum) of each chunk


class _ByteCounter:
    """A count of the bytes that several threads have processed, which reports the progress."""

    def __init__(self, total: int, progress: Progress | None, done: int = 0) -> None:
        self.total, self.progress, self.done, self.lock = total, progress, done, Lock()

    def add(self, count: int) -> None:
        with self.lock:
            self.done += count
            if self.progress:
                self.progress(self.done, self.total)


def _write_arrays(
    writer: Writer, conversions: Sequence[ArrayConversion], any_order: bool, counter: _ByteCounter
) -> Checksums:
    """Write every array, and return the checksums of all chunks."""
    checksums: Checksums = {conversion.key: [] for conversion in conversions}

    def write(conversion: ArrayConversion, start: int, run: Callable[[], Iterator[tuple[int, Array]]]) -> None:
        for first, entries in run():
            writer.write(conversion.key, start + first, entries)
            checksums[conversion.key].append((start + first, len(entries), _checksum(entries)))
            counter.add(entries.nbytes)

    largest_first = sorted(conversions, key=lambda conversion: -conversion.nbytes) if any_order else conversions
    jobs = (partial(write, conversion, start, run) for conversion in largest_first for start, run in conversion.runs)
    _run_jobs(jobs, MAX_THREADS if any_order else 1)
    return checksums


def _verify(
    container: Container, path: Path, specs: Mapping[str, ArraySpec], checksums: Checksums, counter: _ByteCounter
) -> None:
    """Open the written file as any reader would, and compare the checksum of every chunk with that of the data written.

    Raises:
        OSError: the file cannot be opened, or an array or a checksum differs.
    """
    try:
        found = {"/".join(path_words): array for path_words, array in container.open(path).arrays.items()}
    except InputError as error:
        raise OSError(f"what was written cannot be read back ({error}): check the disk") from None
    wrong = [
        key
        for key, spec in specs.items()
        if key not in found or (found[key].shape, found[key].dtype) != spec.shape_and_dtype
    ]

    def check(key: str) -> None:
        array = found[key]
        # Mapping is safe here: no other process writes to a file that has no name yet.
        mapped = array.memmap() if type(array) is ContiguousArray and array.size else None
        for first, count, checksum in checksums[key]:
            entries = array.read(first, first + count) if mapped is None else mapped[first : first + count]
            if _checksum(entries) != checksum:
                wrong.append(key)
            counter.add(count * specs[key].dtype.itemsize)

    if not wrong:
        _run_jobs((partial(check, key) for key in specs), MAX_THREADS)
    if wrong or len(found) != len(specs):
        raise OSError(f"what was read back is not what was written ({', '.join(wrong[:5])}): check the disk")


def _run_jobs(jobs: Iterator[Callable[[], None]], threads: int) -> None:
    """Run jobs on a number of threads; stop at the first exception, and raise it."""
    if threads == 1:
        for job in jobs:
            job()
        return
    with ThreadPoolExecutor(threads) as pool:
        running: set[Future[None]] = set()
        try:
            for job in jobs:
                running.add(pool.submit(job))
                if len(running) > threads:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for each in done:
                        each.result()
            for each in running:
                each.result()
        finally:
            for each in running:
                each.cancel()


def _checksum(entries: Array) -> int:
    """Return the sum of the bytes as 64-bit words.

    The sum is as fast as memory, and detects lost, zeroed and misplaced chunks.
    """
    data = entries.view(np.uint8)
    end = len(data) // 8 * 8
    return (int(np.add.reduce(data[:end].view(np.uint64))) + int.from_bytes(data[end:].tobytes(), "little")) % 2**64


def project_version() -> str:
    """Return the version of this project, for the metadata of files."""
    try:
        return version(PROJECT)
    except PackageNotFoundError:  # run from a folder that was never installed
        return "not installed"
