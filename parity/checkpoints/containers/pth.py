"""PyTorch files: what torch.save writes, read without running anything in them; and OpenAI's TorchScript archives."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

from parity.checkpoints.containers import archive, legacy, shards, zips
from parity.checkpoints.containers.budget import Budget
from parity.checkpoints.containers.container import Container, Contents, File, Sink, Slot, Window
from parity.checkpoints.containers.pickles import flatten
from parity.checkpoints.containers.scratch import Scratch
from vit_spec import InputError

_SHARD = ".bin"  # what transformers calls the files of a folder
_TAR = {b"sys_info", b"pickle", b"storages", b"tensors"}  # what files older than torch 0.1.10 begin with


def recognises(path: Path, head: bytes) -> bool:
    """Return whether a path is an archive with a data.pkl, or older than these archives, or shards in .bin files."""
    if shards.recognises(path, head, _SHARD):
        return True
    if head.startswith(legacy.MAGIC) or _is_tar(head):
        return True
    if not head.startswith(zips.MAGIC) or not path.is_file():
        return False
    first = head[30 : 30 + int.from_bytes(head[26:28], "little")]  # also of an archive that lost its directory
    return b"data.pkl" in first or b"/data/" in first or b"/data.pkl" in _tail(path)


def open_(path: Path, budget: Budget | None = None) -> Contents:
    """Read the headers of a file that torch.save or torch.jit.save wrote.

    Arrays have the path of their dictionary keys, list indices and, of a TorchScript module, attributes.  The
    attributes of an argparse.Namespace are notes.

    Raises:
        InputError: a file that is damaged, or that asks for more than tensors, containers, numbers and text.
    """
    budget = budget or Budget()
    path = shards.find(path, _SHARD)
    if shards.is_index(path):
        return shards.gather(path, _SHARD, "pth", partial(_one, budget=budget))
    return _one(path, budget)


def _one(path: Path, budget: Budget) -> Contents:
    file = File(path)
    if _is_tar(file.read(0, 512)):
        raise InputError(f"{path} is older than torch 0.1.10, and only torch reads it: load it in torch, and save it anew")
    is_zip = file.read(0, len(zips.MAGIC)) == zips.MAGIC
    tree = archive.read(Window.of(file), budget) if is_zip else legacy.read(file, budget)
    return Contents("pth", *flatten(tree, str(path), budget))


@contextmanager
def create(path: Path, slots: Mapping[str, Slot], notes: Mapping[str, str]) -> Iterator[Sink]:
    """Write a state dict: an ordered dictionary of tensors, as torch.save does.

    It has no place for `notes`: they are left out, and whoever calls writes them beside it.  The pieces gather in a
    scratch file as large as the arrays.
    """
    with Scratch(path, slots) as scratch:
        yield scratch
        tensors = OrderedDict(scratch.tensors())
        with open(path, "xb") as file:  # a file, not a path: torch would keep the path's name inside
            _save(tensors, file)


CONTAINER = Container(
    name="pth",
    what="PyTorch's torch.save: .pth, .pt, .bin, .ckpt",
    recognises=recognises,
    open=open_,
    suffixes=(".pth", ".pt", ".bin", ".ckpt"),
    create=create,
    any_order=True,
)


def _save(tensors: Mapping[str, Any], file: IO[bytes]) -> None:
    """Save a state dict; a failure to write is raised as it was, and not as what torch makes of it."""
    import torch

    failures: list[OSError] = []

    class Writer:
        def write(self, data: bytes) -> int:
            try:
                return file.write(data)
            except OSError as error:
                failures.append(error)
                raise

        def flush(self) -> None:
            file.flush()

    try:
        torch.save(tensors, Writer())  # type: ignore[arg-type]
    except Exception:
        if failures:
            raise failures[0] from None
        raise


def _is_tar(head: bytes) -> bool:
    return head[257:262] == b"ustar" and head[:100].rstrip(b"\0") in _TAR


def _tail(path: Path) -> bytes:
    """Return the end of a file, where an archive has its directory."""
    file = File(path)
    count = min(file.size, 1 << 20)
    return file.read(file.size - count, count)
