"""Weights on disk, to write: a strip at a time, read back, and under their name only when all is well."""

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
from parity.checkpoints.atomic_write import check_replaceable, replacing
from parity.checkpoints.containers import Container, Sink, Slot
from parity.checkpoints.containers.container import Span
from parity.checkpoints.containers.safetensors import create_sharded
from parity.checkpoints.formats import Fields, Format, get
from parity.checkpoints.formats.format import no_files
from parity.checkpoints.layout import Array
from parity.checkpoints.preprocessing import Preprocessing
from parity.checkpoints.reading import BESIDE, COMPANIONS, FLAX, Source, described, fingerprint, load
from parity.checkpoints.weights import FLOATS, Answers, Checkpoint, Task, Tree, flatten, plan
from vit_spec import InputError, ViTConfig, nearest

PROJECT = "twin-vision-transformers"
THREADS = 2  # at most this many arrays of the source are in memory at a time
SHARD = 5_000_000_000  # bytes of a file in a folder, unless asked otherwise; what Hugging Face takes

Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True)
class Written:
    """What was written.

    path: the file or folder.
    format: with its variant, where there are several.
    container: e.g. "safetensors".
    nbytes: of arrays.
    remarks: what other readers of the format will not know of the model, a line each.
    """

    path: Path
    format: str
    container: str
    nbytes: int
    remarks: tuple[str, ...]


def save(
    path: Source,
    weights: Tree,
    config: ViTConfig,
    format: str,
    *,
    force: bool = False,
    labels: Sequence[str] | None = None,
    preprocessing: Preprocessing | None = None,
    task: Answers = "classes",
) -> None:
    """Write weights, nested or flat: completely, or not at all.

    Args:
        path: the file; its suffix says the container, e.g. .safetensors, .npz, .pth, .msgpack.
        weights: arrays of numpy, jax or torch, exactly as `format` has them.
        config: the model.
        format: the name of the weights' format, e.g. "jax"; see `parity.checkpoints.formats`.
        force: replace a file that is there.
        labels, preprocessing, task: as of `Checkpoint`.

    Raises:
        InputError: a path that cannot be written to, an unknown format, weights that are not the config's, or labels that
            are not one for each output.
    """
    names = metadata.names(labels, config, "labels")
    checkpoint = Checkpoint(
        config, format, flatten(weights, get(format)), labels=names, preprocessing=preprocessing, task=task
    )
    write(checkpoint, path, format, force=force)


def convert(
    source: Source,
    target: Source,
    to: str,
    *,
    format: str | None = None,
    given: Fields | None = None,
    force: bool = False,
    dtype: str | None = None,
    container: str | None = None,
) -> Written:
    """Write a file's weights to another file in another format, bit by bit, in constant memory.

    Args:
        source: what `load` reads.
        target, to: as of `write`: the file, whose suffix says the container, and the name of the format.
        format, given: as of `load`.
        force, dtype, container: as of `write`.

    Raises:
        InputError: as `load` and `write`.
    """
    get(to)  # a misspelt name is told before files are looked at
    checkpoint = load(source, format=format, given=given)
    return write(checkpoint, target, to, force=force, dtype=dtype, container=container)


def write(
    checkpoint: Checkpoint,
    path: Source,
    to: str,
    *,
    force: bool = False,
    dtype: str | None = None,
    container: str | None = None,
    shard: int = SHARD,
    progress: Progress | None = None,
) -> Written:
    """Write a checkpoint in the format `to`.

    Nothing is at `path` until all of it was written and read back; a file that was there stays until then.

    Args:
        path: the file or folder.
        force: replace what is there.
        dtype: round the parameters to this type; by default every bit stays.
        container: its name; by default what the path's suffix says, and for a path without one the folder that the
            format's own library opens.
        shard: bytes that a file in such a folder may have.
        progress: called with the bytes done and those in all.

    Raises:
        InputError: a path that cannot be written to, a format that cannot hold the config, weights that are not its.
    """
    slash, path, format = str(path).endswith("/"), Path(path), get(to)
    kind, unsaid = _kind(path, slash, container, format, checkpoint, shard)
    tasks = plan(checkpoint, to, None if dtype is None else _dtype(dtype))
    name = format.full_name(checkpoint.config)
    notes = {"config": checkpoint.config.to_json(), "format": name, "version": written_by()}
    notes |= metadata.notes(checkpoint)
    slots = {task.key: Slot(task.shape, task.dtype) for task in tasks}
    total = sum(slot.nbytes for slot in slots.values())
    _free(path, kind, force)
    with _room(path, total), replacing(path) as new:
        with kind.create(new, slots, notes) as sink:
            digests = _fill(sink, tasks, kind.any_order, _Meter(2 * total, progress))
        _read_back(kind, new, slots, digests, _Meter(2 * total, progress, total))
        if not kind.carries_notes:
            _describe(new, path, notes)
    remarks = _remarks(format, checkpoint.config, kind.name == FOLDER)
    return Written(path, name, kind.name, total, (*remarks, *unsaid))


# What to write, and where --------------------------------------------------------------------------------------------

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_FEW_FILES = 1000  # fewer may be what a write ended for

FOLDER = "folder"  # of safetensors and the JSON files with which a format's own library opens it


def _kind(
    path: Path, slash: bool, name: str | None, format: Format, checkpoint: Checkpoint, shard: int
) -> tuple[Container, list[str]]:
    """Return the container to write, and lines on what of the classes and images its readers will not know."""
    alone = [] if format.files is no_files else metadata.alone(checkpoint)
    if name is not None:
        return containers.get(name), alone
    if (found := containers.named(path)) and not slash:
        return found, alone
    files, unsaid = metadata.described(format.files(checkpoint.config), checkpoint)
    suffixes = [suffix for each in containers.containers() for suffix in containers.get(each).suffixes]
    if not files or (path.suffix and not slash):
        hint = nearest(path.suffix, suffixes) if path.suffix else ""
        also = f", or of a folder and a slash for one that the library of {format.name} opens" if files else ""
        raise InputError(f"{path} does not say what to write{hint}: give a name that ends in {', '.join(suffixes)}{also}")

    flax = format.separator == "/"
    weights = containers.get("msgpack" if flax else "safetensors")

    @contextlib.contextmanager
    def create(partial: Path, slots: Mapping[str, Slot], notes: Mapping[str, str]) -> Iterator[Sink]:
        if flax:
            partial.mkdir()
            file = weights.create(partial / FLAX, slots, notes)
        else:  # transformers reads none whose format is not "pt"
            file = create_sharded(partial, slots, {**notes, "format": "pt", "layout": notes["format"]}, shard)
        with file as sink:
            yield sink
        if flax:
            _describe(partial / FLAX, partial / FLAX, notes)
        for name, content in files.items():
            (partial / name).write_text(json.dumps(content, indent=2) + "\n")

    entries = r"model[\w-]*\.safetensors(\.index\.json)?|" + "|".join(
        map(re.escape, (FLAX, f"{FLAX}.{BESIDE}", *COMPANIONS))
    )
    folder = replace(weights, name=FOLDER, create=create, open=containers.open, carries_notes=True, entries=entries)
    return folder, unsaid


def _dtype(name: str) -> np.dtype[Any]:
    if name not in FLOATS:
        hint = nearest(name, FLOATS) or f": give one of {', '.join(FLOATS)}"
        raise InputError(f"unknown dtype {name!r}{hint}")
    return FLOATS[name]


def _free(path: Path, kind: Container, force: bool) -> None:
    """Refuse a path that must not or cannot be written to."""
    if not path.parent.is_dir():
        raise InputError(f"no folder {path.parent}: create it first")
    if not os.path.lexists(path):
        return
    check_replaceable(path)
    if path.is_dir() and kind.suffixes and kind.name != FOLDER:
        raise InputError(
            f"{path} is a folder: give the name of a file in it, such as {path / f'weights{kind.suffixes[0]}'}"
        )
    if not force:
        raise InputError(f"{path} exists: give another name, or --force (force=True) to replace it")
    if path.is_dir() and not path.is_symlink() and not _only_weights(path, kind):
        raise InputError(f"{path} holds more than weights, and is not replaced: give another name, or empty it yourself")
    if path.is_file() and (kind.name == FOLDER or not kind.suffixes):
        raise InputError(f"{path} is a file, and a folder is to be written: give another name")


def _only_weights(path: Path, kind: Container) -> bool:
    """Whether a folder holds what was written as weights, and nothing else that would be lost with it."""
    return all(re.fullmatch(kind.entries, entry.name) for entry in path.iterdir())


def _remarks(format: Format, config: ViTConfig, says: bool) -> tuple[str, ...]:
    """Say what of the function other readers of the format would not know."""
    lines = []
    for name, value in format.assumed.items():
        told = value is None or (says and name in format.says)
        matters = not name.startswith(("resampling.", "pixels.", "image_size"))
        if matters and not told and config.at(name) != value:
            lines.append(f"{name}={config.at(name)!r} is in our metadata alone: others read the format as {value!r}")
    return tuple(lines)


@contextlib.contextmanager
def _room(path: Path, nbytes: int) -> Iterator[None]:
    """Say in a line what a full disk lacks, whichever library met it."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if not _is_full(error):
            raise
        disk = os.statvfs(path.parent)
        left = f"has {disk.f_bavail * disk.f_frsize:,} left"
        if disk.f_files and disk.f_favail < _FEW_FILES:  # counted after what was begun is gone
            left += f", in {disk.f_favail:,} files at most"
        raise InputError(f"{path} needs {nbytes:,} bytes, and its disk {left}: make room, or write elsewhere") from None


def _is_full(error: BaseException) -> bool:
    """Whether an error, or one that it came of, says that a disk is full or a quota reached."""
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        if getattr(error, "errno", None) in _FULL or any(os.strerror(number) in str(error) for number in _FULL):
            return True
        error = error.__cause__ or error.__context__ or error
    return False


def _describe(new: Path, path: Path, notes: Mapping[str, str]) -> None:
    """Keep the notes beside weights that have no room for them.

    For a file they are there before it takes its name, and together with those of the file that it replaces: whichever
    of the two is there after an interruption is described.
    """
    if new.is_dir():
        (new / BESIDE).write_text(json.dumps(notes))
        return
    old = {fingerprint(path): known} if path.is_file() and (known := described(path)) else {}
    with replacing(path.with_name(f"{path.name}.{BESIDE}")) as beside:
        beside.write_text(json.dumps({**old, fingerprint(new): dict(notes)}))


# The bytes -----------------------------------------------------------------------------------------------------------

Digests = dict[str, list[tuple[int, int, int]]]  # key -> first entry, number of entries and digest of each strip


class _Meter:
    """Counts bytes from several threads, and tells how many of how many."""

    def __init__(self, total: int, tell: Progress | None, done: int = 0) -> None:
        self.total, self.tell, self.done, self.lock = total, tell, done, Lock()

    def add(self, count: int) -> None:
        with self.lock:
            self.done += count
            if self.tell:
                self.tell(self.done, self.total)


def _fill(sink: Sink, tasks: Sequence[Task], any_order: bool, meter: _Meter) -> Digests:
    """Write every array, and return what it must be when it is read back."""
    digests: Digests = {task.key: [] for task in tasks}

    def write(task: Task, start: int, run: Callable[[], Iterator[tuple[int, Array]]]) -> None:
        for first, entries in run():
            sink.put(task.key, start + first, entries)
            digests[task.key].append((start + first, len(entries), _digest(entries)))
            meter.add(entries.nbytes)

    largest_first = sorted(tasks, key=lambda task: -task.nbytes) if any_order else tasks
    jobs = (partial(write, task, start, run) for task in largest_first for start, run in task.runs)
    _run(jobs, THREADS if any_order else 1)
    return digests


def _read_back(kind: Container, path: Path, slots: Mapping[str, Slot], digests: Digests, meter: _Meter) -> None:
    """Open what was written as any reader would, and hold each strip's digest to that of what was handed over."""
    try:
        found = {"/".join(words): array for words, array in kind.open(path).arrays.items()}
    except InputError as error:
        raise OSError(f"what was written cannot be read back ({error}): check the disk") from None
    wrong = [key for key, slot in slots.items() if key not in found or (found[key].shape, found[key].dtype) != slot.facts]

    def check(key: str) -> None:
        array = found[key]
        mapped = array.mapped() if type(array) is Span and array.size else None  # nobody else knows this file
        for first, count, digest in digests[key]:
            entries = array.read(first, first + count) if mapped is None else mapped[first : first + count]
            if _digest(entries) != digest:
                wrong.append(key)
            meter.add(count * slots[key].dtype.itemsize)

    if not wrong:
        _run((partial(check, key) for key in slots), THREADS)
    if wrong or len(found) != len(slots):
        raise OSError(f"what was read back is not what was written ({', '.join(wrong[:5])}): check the disk")


def _run(jobs: Iterator[Callable[[], None]], threads: int) -> None:
    """Run jobs, a few at a time; the first failure ends it."""
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


def _digest(entries: Array) -> int:
    """Sum the bits in words of 64: as fast as memory, and any lost, zeroed or misplaced strip shows."""
    data = entries.view(np.uint8)
    whole = len(data) // 8 * 8
    return (int(np.add.reduce(data[:whole].view(np.uint64))) + int.from_bytes(data[whole:].tobytes(), "little")) % 2**64


def written_by() -> str:
    """Return the version of this project, for the notes of a file."""
    try:
        return version(PROJECT)
    except PackageNotFoundError:  # run from a folder that was never installed
        return "not installed"
