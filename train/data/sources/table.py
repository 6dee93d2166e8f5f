"""`csv:TABLE.csv`: a table of images and their targets, beside a folder of the images.

The first row names the columns.  Options choose columns; without them, columns are chosen by their names, then by their
contents:

    image=COLUMN          the file names of the images; default: the first column of file names
    target=COLUMN,COLUMN  the targets; default: "Finding Labels", or "label" or "class", or all columns of 0 and 1, or the
                          only column left
    group=COLUMN          images of one group stay together where a share is held out, and a note says if splits that
                          come with the data share groups; default: "Patient ID", if there is one
    missing=skip          leave out images whose files are missing, instead of an error

The kind of targets: "Finding Labels" has labels, which are names joined by "|" ("No Finding", in any case: none).  A column
called "label" or "class" has classes, by their numbers if they are integers.  Columns of 0 and 1 have labels, other columns
of numbers have values.  Names joined by "|" are labels, and all other text is classes.  Text among numbers, and other cells
in columns of 0 and 1, are refused; see `table_columns`.

An image is named by its path below the table's folder, or by as much of the end of that path as is unique.

A column "split" (train, val, test) gives the splits; otherwise train_val_list.txt and test_list.txt beside the table do,
which name an image in each line.
This reads the tables of NIH's ChestX-ray14 (https://nihcc.app.box.com/v/ChestXray-NIHCC) as they come.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from train.data.sources.decoding import SUFFIXES
from train.data.sources.examples import UNSPLIT, DatasetSplits, Examples, ImageFiles, make_examples
from train.data.sources.files import read_file, walk_files
from train.data.sources.splitting import SPLIT_NAMES, canonical_split
from train.data.sources.table_columns import MAX_TABLE_BYTES, MISSING_CELLS, Table, parse_targets, read_table
from vit_spec import InputError, nearest

OPTIONS = ("image", "target", "group", "missing")
_PATIENT_COLUMNS = ("patient id", "patient_id", "patientid")
_SPLIT_LISTS = {"train": "train_val_list.txt", "test": "test_list.txt"}


def open_splits(
    place: str, image: str | None = None, target: str | None = None, group: str | None = None, missing: str | None = None
) -> DatasetSplits:
    """Read a table and find its images.

    image, target, group, missing: the options of `csv:`, see the module's docstring.

    Raises:
        InputError: a missing table or column, invalid targets, images that are missing or in two rows.
    """
    if missing not in (None, "skip"):
        raise InputError(f"missing is {missing!r}: the only choice is missing=skip")
    table = read_table(Path(place))
    path, columns = table.path, table.columns
    image = table.check_column(image) if image else _image_column(table)
    group = (
        table.check_column(group) if group else next((name for name in columns if name.lower() in _PATIENT_COLUMNS), None)
    )
    split = next((name for name in columns if name.lower() == "split"), None)
    candidates = [name for name in columns if name not in (image, group, split)]
    chosen = [table.check_column(name) for name in target.split(",")] if target else None
    wrong = next((name for name in chosen or () if name not in candidates), None)
    if wrong is not None and candidates:
        options = f"choose ?target=COLUMN of {', '.join(candidates)}"
        raise InputError(f"{path} has {wrong!r} for images, groups or splits: {options}")
    parsed = parse_targets(table._replace(columns={name: columns[name] for name in candidates}), chosen)

    paths, unnamed = _resolve_paths(path.parent, columns[image])
    rows = _existing_rows(path, columns[image], paths, skip=missing == "skip")
    rows_of = _split_rows(table, split, columns[image])
    group_numbers = _group_numbers(table, group) if group else None

    def load_later(name: str) -> Callable[[], Examples]:
        def load() -> Examples:
            part = existing[name]
            found = make_examples(ImageFiles(path.parent, (paths[row] for row in part)), parsed.targets[part])
            return found if group_numbers is None else replace(found, groups=group_numbers[part])

        return load

    existing = {name: part[np.isin(part, rows)] for name, part in rows_of.items()}
    notes = [*table.notes, parsed.note]
    if absent := len(paths) - len(rows):
        notes.append(f"{absent:,} of {len(paths):,} images of the table are not there, and are left out")
    if unnamed:
        notes.append(f"files left out: {unnamed:,} of the images beside the table, which it does not name")
    lists_absent = [name for name in _SPLIT_LISTS.values() if not (path.parent / name).is_file()]
    if split is None and len(lists_absent) == 1:
        notes.append(f"the list of images beside the table gives no splits without {lists_absent[0]}")
    if group:
        notes.append(f"images of one {group!r} are a group")
    loaders = {name: load_later(name) for name in existing}
    advice = ", or choose other targets; numbers that are values stand in a column of another name than label"
    return DatasetSplits(str(path), loaders, parsed.task, parsed.classes, notes=tuple(notes), advice=advice)


def _image_column(table: Table) -> str:
    for name, cells in table.columns.items():
        if cells[0].lower().endswith(SUFFIXES):
            return name
    raise InputError(
        f"{table.path} has no column of file names ({', '.join(SUFFIXES)}): "
        f"name one, ?image=COLUMN, of {', '.join(table.columns)}"
    )


def _group_numbers(table: Table, name: str) -> NDArray[np.int64]:
    """Return the number of each row's group, (N,).

    Raises:
        InputError: a row without a group; all such rows would count as one group.
    """
    cells = table.columns[name]
    if (place := next((i for i, cell in enumerate(cells) if cell.lower() in MISSING_CELLS), None)) is not None:
        raise InputError(
            f"{table.path} has no {name!r} in row {table.rows[place]}, by which images are kept together: fill it in, "
            "with a name of its own where it is unknown, or take the row out"
        )
    return np.unique(np.array(cells), return_inverse=True)[1]


# Images ---------------------------------------------------------------------------------------------------------------


def _resolve_paths(root: Path, names: Sequence[str]) -> tuple[list[str], int]:
    """Return each image's path below a folder, "" if missing, and how many images in the folder are not named.

    A name is a path below the folder, or the last parts of one; a name without a suffix stands for a file with one.
    """
    real_path = cache(os.path.realpath)

    def relative_path(name: str) -> str:
        if not os.path.isabs(name):
            return os.path.normpath(name)
        path, (folder, file) = os.path.relpath(name, root), os.path.split(name)
        if path.startswith(".."):  # the image may still be below `root`, which one of the two names through a link
            path = os.path.relpath(os.path.join(real_path(folder), file), real_path(root))
        return path

    relative = [relative_path(name) for name in names]
    matches: dict[str, list[str]] = {name: [] for name in relative}
    count = 0
    for path in walk_files(str(root), SUFFIXES):
        count += 1
        for end in _path_suffixes(path):
            if end in matches:
                matches[end].append(path)
    paths = [_choose_match(root, name, matches[name]) for name in relative]
    return paths, count - len({*paths} - {""})


def _path_suffixes(path: str) -> Iterator[str]:
    """Yield a path, then the path without its first folder and so on, each with and without the file's suffix."""
    for end in _ends(path):
        yield end
        yield os.path.splitext(end)[0]


def _choose_match(root: Path, name: str, paths: Sequence[str]) -> str:
    """Return the path that a name stands for: the exact one of `paths`, or the only one, or "".

    paths: the paths below `root` that end in the name.

    Raises:
        InputError: several paths fit.
    """
    exact = [path for path in paths if path == name] or [path for path in paths if os.path.splitext(path)[0] == name]
    fitting = exact or paths
    if len(fitting) > 1:
        raise InputError(
            f"{root} has {len(fitting):,} images {name!r}, such as {fitting[0]} and {fitting[1]}: "
            "write more of the path into the table"
        )
    return next(iter(fitting), "")


def _existing_rows(table: Path, names: Sequence[str], paths: Sequence[str], *, skip: bool) -> NDArray[np.int64]:
    """Return the rows whose image exists.

    skip: allow missing images, unless all are missing.
    """
    seen: set[str] = set()
    for path in filter(None, paths):
        if path in seen:
            raise InputError(f"{table} has two rows for {path}: give each image one")
        seen.add(path)
    absent = [name for name, path in zip(names, paths, strict=True) if not path]
    if len(absent) == len(paths) or (absent and not skip):
        raise InputError(
            f"{len(absent):,} of {len(paths):,} images of {table} are not there, such as {', '.join(absent[:3])}: "
            f"put them beside the table or in a folder there{'' if skip else ', or leave them out: csv:TABLE?missing=skip'}"
        )
    return np.array([row for row, path in enumerate(paths) if path], np.int64)


def _split_rows(table: Table, column: str | None, names: Sequence[str]) -> dict[str, NDArray[np.int64]]:
    """Return the rows of each split: by a column, by the lists beside the table, or else all rows as `UNSPLIT`."""
    if column:
        words = table.columns[column]
        splits = [canonical_split(word) for word in words]
        if UNSPLIT in splits:
            place = splits.index(UNSPLIT)
            raise InputError(
                f"{table.path} has the split {words[place]!r} in row {table.rows[place]}: "
                f"expected train, val or test{nearest(words[place].lower(), SPLIT_NAMES)}"
            )
        return {name: np.flatnonzero(np.array(splits) == name) for name in sorted(set(splits))}
    lists = {split: table.path.parent / name for split, name in _SPLIT_LISTS.items()}
    if not all(file.is_file() for file in lists.values()):
        return {UNSPLIT: np.arange(len(names))}
    rows_of, images = {}, _ListedImages(names)
    for split, file in lists.items():
        lines = read_file(file, MAX_TABLE_BYTES).decode("utf-8-sig", errors="replace").splitlines()
        found = (images.find_row(file, line.strip()) for line in lines if line.strip())
        rows_of[split] = np.unique(np.array([row for row in found if row is not None], np.int64))
    _check_listed_once(table, names, rows_of)
    return rows_of


class _ListedImages:
    """The images of a table, to be found by the names that a list gives them.

    Two names of an image are the same, or one is the end of the other; the suffix of the file may be missing in one.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = [_split_name(name) for name in names]
        self._by_stem: dict[str, list[int]] = {}
        self._by_end: dict[str, list[int]] = {}
        for row, (stem, _) in enumerate(self._names):
            self._by_stem.setdefault(stem, []).append(row)
            for end in _ends(stem):
                self._by_end.setdefault(end, []).append(row)

    def find_row(self, file: Path, entry: str) -> int | None:
        """Return the row of an image that a list names; None if the table does not have it.

        Raises:
            InputError: the name fits several rows.
        """
        stem, suffix = _split_name(entry)
        keys = ((self._by_stem, stem), (self._by_end, stem), *((self._by_stem, end) for end in _ends(stem)))
        found = ([row for row in rows.get(key, ()) if self._has_suffix(row, suffix)] for rows, key in keys)
        rows = next(filter(None, found), [])
        if len(rows) > 1:
            first, second = ("".join(self._names[row]) for row in rows[:2])
            raise InputError(
                f"{file} names {entry}, which may be {first} or {second}: write more of the path into the list"
            )
        return next(iter(rows), None)

    def _has_suffix(self, row: int, suffix: str) -> bool:
        return suffix == self._names[row][1] or "" in (suffix, self._names[row][1])


def _split_name(name: str) -> tuple[str, str]:
    """Return the name of an image without its suffix, and the suffix."""
    name = os.path.normpath(name)
    length = next((len(suffix) for suffix in SUFFIXES if name.lower().endswith(suffix)), 0)
    return name[: len(name) - length], name[len(name) - length :]


def _ends(path: str) -> Iterator[str]:
    """Yield a path, then the path without its first folder and so on."""
    while path:
        yield path
        path = path.partition("/")[2]


def _check_listed_once(table: Table, names: Sequence[str], rows_of: Mapping[str, NDArray[np.int64]]) -> None:
    """Raise InputError unless each image of a table is in one of the lists."""
    counts = np.bincount(np.concatenate([*rows_of.values()]), minlength=len(names))
    if (wrong := np.flatnonzero(counts != 1)).size:
        place = "both" if counts[wrong[0]] else "neither"
        raise InputError(
            f"{table.path} has {wrong.size:,} of {len(names):,} images in none or both of "
            f"{' and '.join(_SPLIT_LISTS.values())}, such as {names[wrong[0]]} in {place}: correct or remove the lists"
        )
