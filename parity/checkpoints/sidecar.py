"""The sidecar file: our metadata of weights whose container cannot store them.

It is `parity.json` in a folder, or `NAME.parity.json` beside the file NAME.  The metadata of a file are an entry whose key
is the fingerprint of the file; in a folder, the fingerprint of the files is an entry itself.  Metadata are therefore never
taken for those of other weights of the same name.
"""

import json
import os
import re
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from parity.checkpoints import containers
from parity.checkpoints.atomic_write import atomic_replace, check_replaceable
from parity.checkpoints.companions import read_json_file
from parity.checkpoints.containers import folders
from vit_spec import InputError, bounded_json

SIDECAR_FILE = "parity.json"
_FINGERPRINT_ENTRY = "fingerprint"  # of the files of a folder, in its sidecar file
_FINGERPRINT_BYTES = 1 << 20  # at each end of a file
_FINGERPRINT = re.compile(r"\d+-[0-9a-f]{8}")  # see `fingerprint`


def sidecar_path(path: Path) -> Path:
    """Return the path of the sidecar file of a weight file."""
    return path.with_name(f"{path.name}.{SIDECAR_FILE}")


def read_own_notes(path: Path, container: str) -> tuple[dict[str, Any], list[str]]:
    """Return the metadata of a file or folder from its sidecar file, and a line if that describes other weights."""
    if path.is_file():
        sidecar, entries = sidecar_path(path), read_sidecar(path)
        is_ours = bool(entries) or not read_json_file(sidecar)
    else:
        sidecar, entries = path / SIDECAR_FILE, read_json_file(path / SIDECAR_FILE)
        expected = entries.pop(_FINGERPRINT_ENTRY, None)  # none in folders of older versions
        is_ours = expected is None or expected == _folder_fingerprint(path, container)
    if is_ours:
        return entries, []
    return {}, [f"{sidecar.name}, because its fingerprint is that of other weights: remove the file"]


def read_sidecar(path: Path) -> dict[str, Any]:
    """Return the metadata of a file from its sidecar file, in which the fingerprint of the file is the key.

    Raises:
        InputError: its entry is not an object.
    """
    found = read_json_file(sidecar_path(path)) if path.is_file() else {}
    entries = found.get(fingerprint(path), {}) if found else {}
    if not isinstance(entries, dict):
        raise InputError(
            f"{sidecar_path(path).name} has an entry for {path} that is not a JSON object: correct it or remove it"
        )
    return entries


def write_sidecar(new: Path, path: Path, notes: Mapping[str, str], container: str, force: bool) -> None:
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
    with atomic_replace(target, check=partial(check_sidecar, force=force)) as sidecar:
        sidecar.write_text(json.dumps({**old, fingerprint(new): dict(notes)}))


def check_sidecar(path: Path, force: bool) -> None:
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
        entries = bounded_json.read_object(path, max_bytes=folders.MAX_JSON_BYTES)
    except (OSError, InputError):
        return False
    return bool(entries) and all(
        _FINGERPRINT.fullmatch(key) and isinstance(entry, dict) and "config" in entry for key, entry in entries.items()
    )


def folder_notes(path: Path, container: str, notes: Mapping[str, str]) -> dict[str, str]:
    """Return the content of the sidecar file of a folder with the metadata `notes`."""
    return {**notes, _FINGERPRINT_ENTRY: _folder_fingerprint(path, container)}


def fingerprint(path: Path) -> str:
    """Return the size of a file and a checksum of its ends, which distinguish it from other files of the same name."""
    with path.open("rb") as file:
        head = file.read(_FINGERPRINT_BYTES)
        size = file.seek(0, 2)
        file.seek(max(0, size - _FINGERPRINT_BYTES))
        return f"{size}-{zlib.crc32(file.read(), zlib.crc32(head)):08x}"


def _folder_fingerprint(path: Path, container: str) -> str:
    """Return the number of files of a checkpoint in a folder, and a checksum of their names and fingerprints."""
    find_files = containers.get(container).data_files
    files = {file.relative_to(path).as_posix(): file for file in (find_files(path) if find_files else ())}
    checksum = 0
    for name in sorted(files):
        checksum = zlib.crc32(f"{name}\0{fingerprint(files[name])}\n".encode(errors="surrogateescape"), checksum)
    return f"{len(files)}-{checksum:08x}"
