"""PyTorch files: files of torch.save and TorchScript archives of OpenAI, read without running any code in them."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

from parity.checkpoints.containers import shards, torch_legacy, torch_zip, zip_directory
from parity.checkpoints.containers.budget import Budget
from parity.checkpoints.containers.container import ArraySpec, Container, Contents, File, FileSlice, Writer
from parity.checkpoints.containers.pickles import flatten
from parity.checkpoints.containers.scratch import ScratchFile, check_torch
from vit_spec import InputError

_SHARD_SUFFIX = ".bin"  # of the shards that transformers writes
_TAR_NAMES = {b"sys_info", b"pickle", b"storages", b"tensors"}  # first member of files older than torch 0.1.10


def recognises(path: Path, head: bytes) -> bool:
    """Return whether a path is a zip with a data.pkl, an older file of torch.save, or an index of .bin shards."""
    if shards.recognises(path, head, _SHARD_SUFFIX):
        return True
    if head.startswith(torch_legacy.MAGIC) or _is_tar(head):
        return True
    if not head.startswith(zip_directory.MAGIC) or not path.is_file():
        return False
    # The name of the first member is known even if the directory of the zip is missing.
    first_name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    return b"data.pkl" in first_name or b"/data/" in first_name or b"/data.pkl" in _read_end(path)


def open_(path: Path, budget: Budget | None = None) -> Contents:
    """Read the headers of a file that torch.save or torch.jit.save wrote.

    The key path of an array consists of dictionary keys, list indices and, in a TorchScript module, attributes.  The
    attributes of an argparse.Namespace become metadata.

    Raises:
        InputError: the file is damaged, or its pickle asks for more than tensors, containers, numbers and text.
    """
    budget = budget or Budget()
    if shards.is_index(path):
        return shards.open_shards(path, _SHARD_SUFFIX, "pth", partial(_open_file, budget=budget))
    return _open_file(path, budget)


def _open_file(path: Path, budget: Budget) -> Contents:
    file = File(path)
    if _is_tar(file.read(0, 512)):
        raise InputError(f"{path} is older than torch 0.1.10, and only torch reads it: load it in torch and save it again")
    is_zip = file.read(0, len(zip_directory.MAGIC)) == zip_directory.MAGIC
    tree = torch_zip.read(FileSlice.whole(file), budget) if is_zip else torch_legacy.read(file, budget)
    return Contents("pth", *flatten(tree, str(path), budget))


@contextmanager
def create(path: Path, specs: Mapping[str, ArraySpec], metadata: Mapping[str, str]) -> Iterator[Writer]:
    """Write a state dict, an ordered dictionary of tensors, with torch.save.

    `metadata` is not written, because the file has no place for it: the caller writes it to a file beside it.  The arrays
    are collected in a scratch file, which takes as much disk space as all arrays.

    Raises:
        InputError: torch is not installed.
    """
    check_torch(path)
    with ScratchFile(path, specs) as scratch:
        yield scratch
        tensors = OrderedDict(scratch.tensors())
        with open(path, "xb") as file:  # not a path: torch would store its name in the file
            _save(tensors, file)


CONTAINER = Container(
    name="pth",
    description="PyTorch's torch.save: .pth, .pt, .bin, .ckpt",
    recognises=recognises,
    open=open_,
    suffixes=(".pth", ".pt", ".bin", ".ckpt"),
    create=create,
    any_order=True,
)


def _save(tensors: Mapping[str, Any], file: IO[bytes]) -> None:
    """Save a state dict; raise an OSError of a write unchanged, instead of the error that torch raises for it."""
    import torch

    write_errors: list[OSError] = []

    class ErrorRecordingFile:
        def write(self, data: bytes) -> int:
            try:
                return file.write(data)
            except OSError as error:
                write_errors.append(error)
                raise

        def flush(self) -> None:
            file.flush()

    try:
        torch.save(tensors, ErrorRecordingFile())  # type: ignore[arg-type]
    except Exception:
        if write_errors:
            raise write_errors[0] from None
        raise


def _is_tar(head: bytes) -> bool:
    return head[257:262] == b"ustar" and head[:100].rstrip(b"\0") in _TAR_NAMES


def _read_end(path: Path) -> bytes:
    """Return the end of a file, where a zip archive has its directory."""
    file = File(path)
    count = min(file.size, 1 << 20)
    return file.read(file.size - count, count)
