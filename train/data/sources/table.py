"""`csv:TABLE.csv`: a table of images and their answers, beside a folder of the images.

The first row names the columns.  What they hold is taken, unless options say it, from their names and then their contents:

    image=COLUMN          the images' file names; else the first column of file names
    target=COLUMN,COLUMN  the answers; else "Finding Labels", or "label" or "class", or all columns of 0 and 1, or the one
                          column left
    group=COLUMN          images of one group stay in one split; else "Patient ID" where there is one
    missing=skip          images that are not there are left out, instead of an error

Answers are labels in "Finding Labels", names joined by "|" ("No Finding": none); classes in a column called "label" or
"class", by their numbers where they are whole numbers; labels in columns of 0 and 1; values in other columns of numbers;
labels where names are joined by "|"; or else classes.  Text among numbers, and other cells in columns of 0 and 1, are
refused; see `columns`.

An image is named by its path below the table's folder, or by as much of the end of that path as no other image has.

A column "split" (train, val, test) gives the splits, or else train_val_list.txt and test_list.txt beside the table.
This reads the tables of NIH's ChestX-ray14 (https://nihcc.app.box.com/v/ChestXray-NIHCC) as they come.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from train.data.sources.columns import BLANK, Table, answers, read
from train.data.sources.decoding import SUFFIXES
from train.data.sources.examples import Examples, Files, examples
from train.data.sources.files import below, content
from train.data.sources.splitting import SPLITS, WHOLE, Found, split_called
from vit_spec import InputError, nearest

OPTIONS = ("image", "target", "group", "missing")
_PATIENT = ("patient id", "patient_id", "patientid")
_LISTS = {"train": "train_val_list.txt", "test": "test_list.txt"}


def find(
    place: str, image: str | None = None, target: str | None = None, group: str | None = None, missing: str | None = None
) -> Found:
    """Read a table and look for its images.

    Raises:
        InputError: no such table or column, answers that are none, images that are absent or named twice.
    """
    if missing not in (None, "skip"):
        raise InputError(f"missing is {missing!r}: the only choice is missing=skip")
    table = read(Path(place).expanduser())
    path, columns = table.path, table.columns
    image = table.asked(image) if image else _image_column(table)
    groups = table.asked(group) if group else next((name for name in columns if name.lower() in _PATIENT), None)
    split = next((name for name in columns if name.lower() == "split"), None)
    left = [name for name in columns if name not in (image, groups, split)]
    chosen = [table.asked(name) for name in target.split(",")] if target else None
    wrong = next((name for name in chosen or () if name not in left), None)
    if wrong is not None and left:
        raise InputError(f"{path} has {wrong!r} for images, groups or splits: choose ?target=COLUMN of {', '.join(left)}")
    taken = answers(table._replace(columns={name: columns[name] for name in left}), chosen)

    paths, others = _paths(path.parent, columns[image])
    rows = _there(path, columns[image], paths, skip=missing == "skip")
    parts = _split(table, split, columns[image])
    numbers = _numbered(table, groups) if groups else None

    def asked(name: str) -> Callable[[], Examples]:
        return lambda: examples(Files(path.parent, (paths[row] for row in mine[name])), taken.answers[mine[name]])

    mine = {name: part[np.isin(part, rows)] for name, part in parts.items()}
    notes = [*table.notes, taken.what]
    if absent := len(paths) - len(rows):
        notes.append(f"{absent:,} of {len(paths):,} images of the table are not there, and are left out")
    if others:
        notes.append(f"files left out: {others:,} of the images beside the table, which it does not name")
    if groups and numbers is not None:
        notes.append(f"images of one {groups!r} stay together")
    together = {name: numbers[part] for name, part in mine.items()} if numbers is not None else {}
    return Found(
        str(path), {name: asked(name) for name in mine}, taken.kind, taken.classes, groups=together, notes=tuple(notes)
    )


def _image_column(table: Table) -> str:
    for name, cells in table.columns.items():
        if cells[0].lower().endswith(SUFFIXES):
            return name
    raise InputError(
        f"{table.path} has no column of file names ({', '.join(SUFFIXES)}): "
        f"name one, ?image=COLUMN, of {', '.join(table.columns)}"
    )


def _numbered(table: Table, name: str) -> NDArray[np.int64]:
    """Return the number of each row's group, (N,); refuse a row without one, for such rows would be one group."""
    cells = table.columns[name]
    if (place := next((i for i, cell in enumerate(cells) if cell.lower() in BLANK), None)) is not None:
        raise InputError(
            f"{table.path} has no {name!r} in row {table.rows[place]}, by which images are kept together: fill it in, "
            "with a name of its own where it is unknown, or take the row out"
        )
    return np.unique(np.array(cells), return_inverse=True)[1]


# Images ---------------------------------------------------------------------------------------------------------------


def _paths(root: Path, names: Sequence[str]) -> tuple[list[str], int]:
    """Return the path of each image below a folder, "" where it is not there, and how many images there have no name.

    A name is a path below the folder, or the end of one in whole folders; without a suffix it stands for a file with one.
    """
    plain = [os.path.relpath(name, root) if os.path.isabs(name) else os.path.normpath(name) for name in names]
    found: dict[str, list[str]] = {name: [] for name in plain}
    count = 0
    for path in below(str(root), SUFFIXES):
        count += 1
        for end in _ends(path):
            if end in found:
                found[end].append(path)
    paths = [_only(root, name, found[name]) for name in plain]
    return paths, count - len({*paths} - {""})


def _ends(path: str) -> Iterator[str]:
    """Yield a path, and what is left of it without its first folders; each with and without its suffix."""
    while path:
        yield path
        yield os.path.splitext(path)[0]
        path = path.partition("/")[2]


def _only(root: Path, name: str, paths: Sequence[str]) -> str:
    """Return which of the paths that end in a name is meant: itself, or itself with a suffix, or the only one."""
    itself = [path for path in paths if path == name] or [path for path in paths if os.path.splitext(path)[0] == name]
    fitting = itself or paths
    if len(fitting) > 1:
        raise InputError(
            f"{root} has {len(fitting):,} images {name!r}, such as {fitting[0]} and {fitting[1]}: "
            "write more of the path into the table"
        )
    return next(iter(fitting), "")


def _there(table: Path, names: Sequence[str], paths: Sequence[str], *, skip: bool) -> NDArray[np.int64]:
    """Return the rows whose image is there."""
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


def _split(table: Table, column: str | None, names: Sequence[str]) -> dict[str, NDArray[np.int64]]:
    """Return the rows of each split."""
    if column:
        words = table.columns[column]
        given = [split_called(word) for word in words]
        if WHOLE in given:
            place = given.index(WHOLE)
            raise InputError(
                f"{table.path} has the split {words[place]!r} in row {table.rows[place]}: "
                f"expected train, val or test{nearest(words[place].lower(), SPLITS)}"
            )
        return {name: np.flatnonzero(np.array(given) == name) for name in sorted(set(given))}
    lists = {split: table.path.parent / name for split, name in _LISTS.items()}
    if not all(file.is_file() for file in lists.values()):
        return {WHOLE: np.arange(len(names))}
    listed = {split: set(content(file).decode(errors="replace").split()) for split, file in lists.items()}
    rows = {
        split: np.array([i for i, name in enumerate(names) if os.path.basename(name) in mine], np.int64)
        for split, mine in listed.items()
    }
    if sum(map(len, rows.values())) != len(names):
        raise InputError(
            f"{table.path} has images that are in none or in both of {' and '.join(_LISTS.values())}: mend the lists"
        )
    return rows
