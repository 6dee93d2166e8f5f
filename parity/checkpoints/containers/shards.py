"""One model in several files, beside an index of which array is in which, as Hugging Face lays it out.

{"metadata": {"total_size": 1024}, "weight_map": {"head.weight": "model-00001-of-00002.safetensors", ...}}
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from parity.checkpoints.containers.container import Contents, Slot, Stored, Words
from parity.checkpoints.containers.strict import listed, quoted
from vit_spec import InputError, bounded_json

INDEX = ".index.json"

_INDEX_LIMIT = 2**25  # bytes, some 300 000 arrays; bounds what parsing one takes


def recognises(path: Path, head: bytes, suffix: str) -> bool:
    """Whether a path is an index of files named *`suffix`, or a folder that holds one or such a file."""
    if path.is_dir():
        return bool(_visible(path, suffix) or _visible(path, suffix + INDEX))
    return is_index(path) and head.lstrip()[:1] == b"{" and b'"weight_map"' in head and f'{suffix}"'.encode() in head


def is_index(path: Path) -> bool:
    """Whether a path that `find` returned is to be read as an index."""
    return path.suffix == ".json"


def find(path: Path, suffix: str) -> Path:
    """Return the one index in a folder, or its one file named *`suffix`; anything but a folder as it is.

    Raises:
        InputError: none, or several; lists them.
    """
    if not path.is_dir():
        return path
    files = _visible(path, suffix)
    found = _visible(path, suffix + INDEX) or files
    if len(found) != 1:
        what = (
            f"holds {len(found)} candidates ({listed(found)}): give the path of one"
            if found
            else f"holds no *{suffix} file"
        )
        raise InputError(f"{path} {what}")
    return path / found[0]


def gather(index: Path, suffix: str, container: str, read: Callable[[Path], Contents]) -> Contents:
    """Return what an index and its shards hold.  The index and the shards must say the same.

    A shard's array is known to the index by its path joined with "/" or, if the index has none of these, with ".".

    read: reads a shard's headers.

    Raises:
        InputError: an index that is damaged or that names files elsewhere, a shard that is missing or damaged, or
            arrays that the one has and the other has not.
    """
    try:
        files, notes = _parse(index, suffix)
        joint = "/" if any("/" in key for keys in files.values() for key in keys) else "."
        arrays: dict[Words, Stored] = {}
        for name, keys in files.items():
            shard = _read(index.parent / name, read)
            found = {joint.join(path) for path in shard.arrays}
            if absent := keys - found:
                raise InputError(f"says that {name} holds {listed(absent)}, which it does not: fetch both again")
            if unknown := found - keys:
                raise InputError(f"does not say that {name} holds {listed(unknown)}: fetch both again")
            arrays |= shard.arrays
            if differing := [note for note, value in shard.notes.items() if notes.setdefault(note, value) != value]:
                raise InputError(f"its shards do not agree about {listed(differing)}: they are of different models")
    except InputError as error:
        raise InputError(f"{index}: {error}") from None
    return Contents(container, arrays, notes)


def plan(slots: Mapping[str, Slot], max_bytes: int) -> list[list[str]]:
    """Return which arrays go into which shard, in order: a shard ends before the array that would overfill it."""
    shards: list[list[str]] = [[]]
    filled = 0
    for key, slot in slots.items():
        if shards[-1] and filled + slot.nbytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(key)
        filled += slot.nbytes
    return shards


def write_index(path: Path, files: Mapping[str, list[str]], slots: Mapping[str, Slot]) -> None:
    """Write the index of shards: file name -> its keys."""
    content = {
        "metadata": {"total_size": sum(slot.nbytes for slot in slots.values())},
        "weight_map": {key: name for name, keys in files.items() for key in keys},
    }
    with open(path, "x") as file:
        file.write(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _parse(index: Path, suffix: str) -> tuple[dict[str, set[str]], dict[str, Any]]:
    """Return the keys of each file, and the index's own notes."""
    content = bounded_json.read_object(index, longest=_INDEX_LIMIT)
    places, metadata = content.get("weight_map"), content.get("metadata", {})
    if not isinstance(places, dict) or not isinstance(metadata, dict) or not places:
        raise InputError("no index of shards, which holds a weight_map {key: file}: fetch or write it again")
    files: dict[str, set[str]] = {}
    for key, name in places.items():
        if not _plain(name, suffix):
            raise InputError(
                f"{quoted(key)} is said to be in {quoted(str(name))}: a shard is a *{suffix} file beside its index"
            )
        files.setdefault(name, set()).add(key)
    notes = {f"index/{name}": value for name, value in metadata.items() if isinstance(value, (str, int, float))}
    return files, notes


def _plain(name: object, suffix: str) -> bool:
    """Whether a name stays in its folder, on every system."""
    return isinstance(name, str) and name.endswith(suffix) and name.isprintable() and not set(name) & set("/\\:")


def _read(path: Path, read: Callable[[Path], Contents]) -> Contents:
    if not path.is_file():  # a link to one is a file too: hub caches are made of links
        raise InputError(f"its shard {path.name} is not there: fetch it as well")
    try:
        return read(path)
    except OSError as error:
        raise InputError(f"its shard {path.name} cannot be read: {error.strerror}") from None


def _visible(folder: Path, suffix: str) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(suffix) and entry.name[0] != ".")
