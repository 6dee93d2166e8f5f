"""Data sets in numbered files: which file belongs to which split, and whether all of them are there."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from train.data.sources.splitting import WHOLE, split_called
from vit_spec import InputError

_OF = re.compile(r"(\d+)-of-(\d+)")


def by_split(root: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Sort files by the word for a split in their names, or in those of folders below root; see `splitting.split_called`.

    Without any such word all are one part, `WHOLE`.

    Raises:
        InputError: some files have a word and others none; the files of a split lie in several folders, which are then
            several data sets; or a numbered file, 00000-of-00294, is missing.
    """
    parts: dict[str, list[Path]] = {}
    for file in files:
        parts.setdefault(_word(file.relative_to(root)), []).append(file)
    if WHOLE in parts and len(parts) > 1:
        raise InputError(f"{parts[WHOLE][0]} belongs to no split: name it train-..., or move it out of the folder")
    for name, found in parts.items():
        if len(folders := sorted({file.parent for file in found})) > 1:
            which = f"{name} files" if name else "files"
            raise InputError(f"{root} has {which} in {folders[0]} and in {folders[1]}: give one of these folders")
        _complete(found)
    return parts


def common(files: Sequence[Path]) -> Path:
    """Return the nearest folder that all files lie below."""
    return Path(os.path.commonpath([file.parent for file in files]))


def _word(path: Path) -> str:
    for part in reversed(path.parts):
        for word in re.split(r"[^a-z]+", part.lower()):
            if split := split_called(word):
                return split
    return WHOLE


def _complete(files: Sequence[Path]) -> None:
    numbered = [match for file in files if (match := _OF.search(file.name))]
    for count in {int(match[2]) for match in numbered}:
        there = {int(match[1]) for match in numbered if int(match[2]) == count}
        if missing := sorted(set(range(count)) - there):
            raise InputError(
                f"{files[0].parent} has {len(there)} of {count} files like {files[0].name}, without number {missing[0]}: "
                "fetch the others too"
            )
