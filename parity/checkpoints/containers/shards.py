"""Shards of Hugging Face: one model in several files, with an index that maps the key of each array to its file.

An index: {"metadata": {"total_size": 1024}, "weight_map": {"head.weight": "model-00001-of-00002.safetensors", ...}}.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from parity.checkpoints.containers.container import ArraySpec, Contents, KeyPath, StoredArray
from parity.checkpoints.containers.header_checks import quote, quote_names
from vit_spec import InputError, bounded_json

INDEX = ".index.json"

_MAX_INDEX_BYTES = 2**25  # about 300,000 arrays
_SHARD = re.compile(r".+-\d{5}-of-(\d{5})\.\w+")


def recognises(path: Path, head: bytes, suffix: str) -> bool:
    """Return whether a path is an index of files named *`suffix`."""
    return is_index(path) and head.lstrip()[:1] == b"{" and b'"weight_map"' in head and f'{suffix}"'.encode() in head


def is_index(path: Path) -> bool:
    """Return whether a path that a container recognises is an index."""
    return path.suffix == ".json"


def refuse_single_shard(path: Path) -> None:
    """Raise InputError if the name of a file says that it is one of several shards.

    Alone, a shard that ends after a block is a whole model with fewer blocks and without a classifier.
    """
    if (shards := shards_in_name(path)) > 1:
        raise InputError(
            f"{path} is one of {shards} shards, as its name says: give their folder or their index; if it has all weights, "
            f"rename it"
        )


def shards_in_name(path: Path) -> int:
    """Return of how many shards a file is one, as its name says; 1 if the name says nothing."""
    match = _SHARD.fullmatch(path.name)
    return int(match[1]) if match else 1


def shard_names(index: Path) -> set[str]:
    """Return the names of the shards in an index, which may be missing.

    Raises:
        InputError: the index is damaged or names files in other folders.
    """
    try:
        return set(_read_index(index, Path(index.name.removesuffix(INDEX)).suffix)[0])
    except InputError as error:
        raise InputError(f"{index}: {error}") from None


def open_shards(index: Path, suffix: str, container: str, read: Callable[[Path], Contents]) -> Contents:
    """Read the index and the headers of all shards, which must agree with each other.

    An index refers to an array by its key path, joined with "/" or, if no key of the index contains "/", with ".".

    Args:
        index: path of the index.
        suffix: suffix of the names of the shards.
        container: name of the container of the shards.
        read: reads the headers of a shard.

    Raises:
        InputError: the index is damaged or names files in other folders; a shard is missing or damaged; or index and
            shards do not have the same arrays.
    """
    try:
        files, metadata = _read_index(index, suffix)
        separator = "/" if any("/" in key for keys in files.values() for key in keys) else "."
        arrays: dict[KeyPath, StoredArray] = {}
        for name, keys in files.items():
            shard = _open_shard(index.parent / name, read)
            shard_keys = {separator.join(path) for path in shard.arrays}
            if missing := keys - shard_keys:
                raise InputError(f"says that {name} holds {quote_names(missing)}, which it does not: fetch both again")
            if unlisted := shard_keys - keys:
                raise InputError(f"does not say that {name} holds {quote_names(unlisted)}: fetch both again")
            arrays |= shard.arrays
            if differing := [
                field for field, value in shard.metadata.items() if metadata.setdefault(field, value) != value
            ]:
                raise InputError(f"its shards disagree about {quote_names(differing)}: they are of different models")
    except InputError as error:
        raise InputError(f"{index}: {error}") from None
    return Contents(container, arrays, metadata)


def plan_shards(specs: Mapping[str, ArraySpec], max_bytes: int) -> list[list[str]]:
    """Return the keys of each shard, in order.

    A new shard starts before the array that would make the current one larger than `max_bytes`.
    """
    shards: list[list[str]] = [[]]
    shard_bytes = 0
    for key, spec in specs.items():
        if shards[-1] and shard_bytes + spec.nbytes > max_bytes:
            shards.append([])
            shard_bytes = 0
        shards[-1].append(key)
        shard_bytes += spec.nbytes
    return shards


def write_index(path: Path, files: Mapping[str, list[str]], specs: Mapping[str, ArraySpec]) -> None:
    """Write the index of shards.

    Args:
        path: path of the index.
        files: file name -> the keys of its arrays.
        specs: shape and dtype of each array.
    """
    content = {
        "metadata": {"total_size": sum(spec.nbytes for spec in specs.values())},
        "weight_map": {key: name for name, keys in files.items() for key in keys},
    }
    with open(path, "x") as file:
        file.write(json.dumps(content, indent=2, sort_keys=True) + "\n")


def _read_index(index: Path, suffix: str) -> tuple[dict[str, set[str]], dict[str, Any]]:
    """Return the keys of each file, and the metadata of the index."""
    content = bounded_json.read_object(index, max_bytes=_MAX_INDEX_BYTES)
    weight_map, entries = content.get("weight_map"), content.get("metadata", {})
    if not isinstance(weight_map, dict) or not isinstance(entries, dict) or not weight_map:
        raise InputError(
            "not an index of shards, expected an object with a weight_map {key: file}: fetch or write it again"
        )
    files: dict[str, set[str]] = {}
    for key, name in weight_map.items():
        if not _is_safe_name(name, suffix):
            raise InputError(
                f"{quote(key)} is mapped to {quote(str(name))}: a shard is a *{suffix} file in the folder of its index"
            )
        files.setdefault(name, set()).add(key)
    metadata = {f"index/{name}": value for name, value in entries.items() if isinstance(value, (str, int, float))}
    return files, metadata


def _is_safe_name(name: object, suffix: str) -> bool:
    """Return whether a name can only be that of a file in the same folder, on every operating system."""
    return isinstance(name, str) and name.endswith(suffix) and name.isprintable() and not set(name) & set("/\\:")


def _open_shard(path: Path, read: Callable[[Path], Contents]) -> Contents:
    if not path.is_file():  # also a symbolic link to a file: hub caches consist of links
        raise InputError(f"its shard {path.name} is missing: fetch it as well")
    try:
        return read(path)
    except OSError as error:
        raise InputError(f"its shard {path.name} cannot be read: {error.strerror}") from None
