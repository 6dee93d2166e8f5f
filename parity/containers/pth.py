"""PyTorch files: what torch.save writes, read without running anything in them; and OpenAI's TorchScript archives."""

import argparse
import pickle
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from parity.containers import shards
from parity.containers.archive import Window, read
from parity.containers.container import Container, Contents, File, Sink, Slot, Stored
from parity.containers.pickles import Record, flatten
from parity.containers.scratch import Scratch
from parity.layout import Array
from vit_spec import InputError

_SHARD = ".bin"  # what transformers calls the files of a folder
_ZIP = b"PK\3\4"
_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the number that files older than torch 1.6 begin with, pickled
_TAR = {b"sys_info", b"pickle", b"storages", b"tensors"}  # what files older than torch 0.1.10 begin with


def recognises(path: Path, head: bytes) -> bool:
    """Return whether a path is an archive with a data.pkl, or older than these archives, or shards in .bin files."""
    if shards.recognises(path, head, _SHARD):
        return True
    if head.startswith(_MAGIC) or (head[257:262] == b"ustar" and head[:100].rstrip(b"\0") in _TAR):
        return True
    if not head.startswith(_ZIP) or not path.is_file():
        return False
    first = head[30 : 30 + int.from_bytes(head[26:28], "little")]  # also of an archive that lost its directory
    return b"data.pkl" in first or b"/data/" in first or b"/data.pkl" in _tail(path)


def open_(path: Path) -> Contents:
    """Read the headers of a file that torch.save or torch.jit.save wrote.

    Arrays have the path of their dictionary keys, list indices and, of a TorchScript module, attributes.  The
    attributes of an argparse.Namespace are notes.  Files older than torch 1.6 need torch and are read at once.

    Raises:
        InputError: a file that is damaged, or that asks for more than tensors, containers, numbers and text.
    """
    path = shards.find(path, _SHARD)
    return shards.gather(path, _SHARD, "pth", _one) if shards.is_index(path) else _one(path)


def _one(path: Path) -> Contents:
    file = File(path)
    if file.read(0, 4) == _ZIP:
        return Contents("pth", *flatten(read(Window.of(file)), str(path)))
    return Contents("pth", *flatten(_old(path), str(path), _held))


@contextmanager
def create(path: Path, slots: Mapping[str, Slot], notes: Mapping[str, str]) -> Iterator[Sink]:
    """Write a state dict: an ordered dictionary of tensors, as torch.save does.

    It has no place for `notes`: they are left out, and whoever calls writes them beside it.  The pieces gather in a
    scratch file as large as the arrays.
    """
    import torch

    with Scratch(path, slots) as scratch:
        yield scratch
        tensors = OrderedDict(scratch.tensors())
        with open(path, "xb") as file:  # a file, not a path: torch would keep the path's name inside
            torch.save(tensors, file)


CONTAINER = Container(
    name="pth",
    what="PyTorch's torch.save: .pth, .pt, .bin, .ckpt",
    recognises=recognises,
    open=open_,
    suffixes=(".pth", ".pt", ".bin", ".ckpt"),
    create=create,
    any_order=True,
)


class _Held(Stored):
    """An array in memory."""

    def __init__(self, array: Array) -> None:
        self.array, self.shape, self.dtype = array.reshape(-1), array.shape, array.dtype

    def read(self, first: int, last: int) -> Array:
        return self.array[first:last].copy()


def _tail(path: Path) -> bytes:
    """Return the end of a file, where an archive has its directory."""
    file = File(path)
    count = min(file.size, 1 << 20)
    return file.read(file.size - count, count)


def _old(path: Path) -> Any:
    try:
        import torch
    except ImportError:
        raise InputError(
            f"{path} is older than torch 1.6 and only torch reads it: pip install torch, or save it anew"
        ) from None
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise InputError(
            f"{path} asks for more than tensors, or is damaged: ask for a file of tensors alone, or for safetensors"
        ) from None
    except Exception as error:  # torch meets damage with errors of many kinds
        what = type(error).__name__
        raise InputError(
            f"{path} is damaged or too old for torch to read safely ({what}): fetch it again, or save it anew"
        ) from None


def _held(node: Any) -> Any:
    """Return torch's tensors as arrays, and a namespace as a record of its attributes."""
    if isinstance(node, argparse.Namespace):
        record = Record("argparse.Namespace")
        record.state = vars(node)
        return record
    if not hasattr(node, "detach"):
        return node
    import torch

    tensor = node.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        return _Held(tensor.view(torch.int16).numpy().view(np.dtype(ml_dtypes.bfloat16)))
    return _Held(tensor.numpy())
