"""Data sets of several files: which file belongs to which split, and whether all numbered shards are there."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from train.data.sources.examples import UNSPLIT
from train.data.sources.splitting import canonical_split, split_words
from vit_spec import InputError

_SHARD_NUMBER = re.compile(r"(\d+)-of-(\d+)")


def group_by_split(root: Path, files: Sequence[Path]) -> dict[str, list[Path]]:
    """Group files by the split that a word in their names, or in the names of folders below root, stands for.

    Words are recognised by `splitting.canonical_split`.  If no file has such a word, all files are the split `UNSPLIT`.

    Raises:
        InputError: only some files have such a word; the files of a split lie in several folders, which are then several
            data sets; or a numbered shard, such as 00000-of-00294, is missing.
    """
    splits: dict[str, list[Path]] = {}
    for file in files:
        splits.setdefault(_split_in_path(file.relative_to(root)), []).append(file)
    if UNSPLIT in splits and len(splits) > 1:
        raise InputError(f"{splits[UNSPLIT][0]} belongs to no split: name it train-..., or move it out of the folder")
    for name, shards in splits.items():
        if len(folders := sorted({file.parent for file in shards})) > 1:
            which = f"{name} files" if name else "files"
            raise InputError(f"{root} has {which} in {folders[0]} and in {folders[1]}: give one of these folders")
        _check_all_shards(shards)
    return splits


def common_folder(files: Sequence[Path]) -> Path:
    """Return the deepest folder that contains all files."""
    return Path(os.path.commonpath([file.parent for file in files]))


def _split_in_path(path: Path) -> str:
    for part in reversed(path.parts):
        for word in split_words(part):
            if split := canonical_split(word):
                return split
    return UNSPLIT


def _check_all_shards(files: Sequence[Path]) -> None:
    """Refuse files numbered N-of-COUNT of which some number is missing."""
    numbered = [match for file in files if (match := _SHARD_NUMBER.search(file.name))]
    for count in {int(match[2]) for match in numbered}:
        present = {int(match[1]) for match in numbered if int(match[2]) == count}
        if missing := sorted(set(range(count)) - present):
            raise InputError(
                f"{files[0].parent} has {len(present)} of {count} files like {files[0].name}, without number {missing[0]}: "
                "fetch the others too"
            )
