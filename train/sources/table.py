"""`csv:TABLE.csv`: a table of images and their answers, beside a folder of the images.

The first row names the columns.  What they hold is taken, unless options say it, from names and contents:

    image=COLUMN          the images' file names; else the first column of file names, found beside the table at any depth
    target=COLUMN,COLUMN  the answers; else "Finding Labels", or all columns of 0 and 1, or the one column left
    group=COLUMN          images of one group stay in one split; else "Patient ID" where there is one
    missing=skip          images that are not there are left out, instead of an error

Answers are labels where they are columns of 0 and 1, or one column of names joined by "|" ("No Finding": none); values
where they are numbers; or else classes.  Whole numbers in a column called "label" or "class" are class numbers.

A column "split" (train, val, test) gives the splits, or else train_val_list.txt and test_list.txt beside the table.
This reads the tables of NIH's ChestX-ray14 (https://nihcc.app.box.com/v/ChestXray-NIHCC) as they come.
"""

import csv
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from train.recipes import Task
from train.sources.decoding import SUFFIXES
from train.sources.examples import Answers, Examples, Files, examples
from train.sources.folder import images
from train.sources.splitting import HELD_OUT, WHOLE, Found, numbered
from vit_spec import InputError, nearest

OPTIONS = ("image", "target", "group", "missing")
_FINDINGS, _NONE, _PATIENT = "Finding Labels", "No Finding", ("patient id", "patient_id", "patientid")
_LISTS = {"train": "train_val_list.txt", "test": "test_list.txt"}
_NUMBERS = ("label", "class")

Columns = Mapping[str, Sequence[str]]


class _Target(NamedTuple):
    """The answers of all rows; what: said of them in a note."""

    answers: Answers
    kind: Task
    classes: tuple[str, ...]
    what: str


def find(
    place: str, image: str | None = None, target: str | None = None, group: str | None = None, missing: str | None = None
) -> Found:
    """Read a table and look for its images.

    Raises:
        InputError: no such table or column, answers that are none, images that are absent or named twice.
    """
    if missing not in (None, "skip"):
        raise InputError(f"missing is {missing!r}: the only choice is missing=skip")
    path = Path(place).expanduser()
    columns = _columns(path)
    image = _asked(columns, image, path) if image else _image_column(columns, path)
    groups = _asked(columns, group, path) if group else next((c for c in columns if c.lower() in _PATIENT), None)
    split = next((name for name in columns if name.lower() == "split"), None)
    chosen = [_asked(columns, name, path) for name in target.split(",")] if target else None
    taken = _target({name: columns[name] for name in columns if name not in (image, groups, split)}, chosen, path)

    paths = _paths(path.parent, columns[image])
    rows = _there(path, columns[image], paths, skip=missing == "skip")
    parts = _split(columns[split] if split else None, columns[image], path)
    numbers = np.unique(np.array(columns[groups]), return_inverse=True)[1] if groups else None

    def asked(name: str) -> Callable[[], Examples]:
        return lambda: examples(Files(path.parent, (paths[row] for row in mine[name])), taken.answers[mine[name]])

    mine = {name: part[np.isin(part, rows)] for name, part in parts.items()}
    notes = [taken.what]
    if absent := len(paths) - len(rows):
        notes.append(f"{absent:,} of {len(paths):,} images of the table are not there, and are left out")
    if groups and numbers is not None:
        notes.append(f"images of one {groups!r} stay together")
    together = {name: numbers[part] for name, part in mine.items()} if numbers is not None else {}
    return Found(
        str(path), {name: asked(name) for name in mine}, taken.kind, taken.classes, groups=together, notes=tuple(notes)
    )


# Columns --------------------------------------------------------------------------------------------------------------


def _columns(path: Path) -> dict[str, list[str]]:
    """Return the cells of a table by column, without spaces around them."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = [[cell.strip() for cell in row] for row in csv.reader(file, strict=True) if row]
    except FileNotFoundError:
        raise InputError(f"{path} is not there: give csv:TABLE.csv, a table beside its images") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} cannot be read as a table ({error}): expected comma-separated UTF-8") from None
    if len(rows) < 2:
        raise InputError(f"{path} has no rows: expected the names of the columns, then a row for each image")
    names = rows[0]
    if len(set(names)) < len(names):
        raise InputError(f"{path} has two columns of one name: its columns are {', '.join(names)}")
    for number, row in enumerate(rows):
        if len(row) != len(names):
            raise InputError(f"{path} has {len(row)} cells in row {number + 1}, {len(names)} in the first: mend the row")
    return dict(zip(names, map(list, zip(*rows[1:], strict=True)), strict=True))


def _asked(columns: Columns, name: str, path: Path) -> str:
    if name not in columns:
        raise InputError(f"{path} has no column {name!r}: its columns are {', '.join(columns)}{nearest(name, columns)}")
    return name


def _image_column(columns: Columns, path: Path) -> str:
    for name, cells in columns.items():
        if cells[0].lower().endswith(SUFFIXES):
            return name
    raise InputError(
        f"{path} has no column of file names ({', '.join(SUFFIXES)}): name one, ?image=COLUMN, of {', '.join(columns)}"
    )


def _target(columns: Columns, chosen: list[str] | None, path: Path) -> _Target:
    """Decide which columns are the answers, and what they are."""
    if chosen is None and _FINDINGS in columns:
        chosen = [_FINDINGS]
    if not columns:
        raise InputError(f"{path} has no column of answers: expected one beside the images' file names")
    if chosen is None:
        chosen = [name for name, cells in columns.items() if _flags(cells)] or list(columns)
        if len(chosen) > 1 and not _flags(columns[chosen[0]]):
            raise InputError(
                f"{path} has several columns that could be the answers: choose, ?target=COLUMN, of {', '.join(chosen)}"
            )
    for name in chosen:
        if "" in columns[name]:
            row = columns[name].index("")
            raise InputError(
                f"{path} has no {name!r} in row {row + 2}: each image needs one; fill it in, or take the row out"
            )
    if all(_flags(columns[name]) for name in chosen):
        flags = np.array([[float(cell) for cell in columns[name]] for name in chosen], np.float32).T
        return _Target(flags, "labels", tuple(chosen), f"labels are the columns of 0 and 1: {', '.join(chosen)}")
    if len(chosen) == 1 and any("|" in cell for cell in columns[chosen[0]]):
        return _joined(columns[chosen[0]], chosen[0])
    numbers = [_numbers(columns[name]) for name in chosen]
    if len(chosen) == 1 and (numbers[0] is None or chosen[0].lower() in _NUMBERS):
        return _classes(columns[chosen[0]], numbers[0], chosen[0], path)
    values = [column for column in numbers if column is not None]
    if len(values) < len(chosen):
        text = next(name for name, column in zip(chosen, numbers, strict=True) if column is None)
        raise InputError(f"{path} has text in {text!r}: several columns of answers are numbers, or 0 and 1, together")
    return _Target(np.stack(values, 1), "values", tuple(chosen), f"values are the columns of numbers: {', '.join(chosen)}")


def _joined(cells: Sequence[str], name: str) -> _Target:
    found = [set(cell.split("|")) - {_NONE, ""} for cell in cells]
    labels = sorted(set().union(*found))
    place = {label: i for i, label in enumerate(labels)}
    flags = np.zeros((len(cells), len(labels)), np.float32)
    for row, mine in enumerate(found):
        flags[row, [place[label] for label in mine]] = 1
    return _Target(flags, "labels", tuple(labels), f"labels are the {len(labels)} names in {name!r}")


def _classes(cells: Sequence[str], numbers: NDArray[np.float32] | None, name: str, path: Path) -> _Target:
    if numbers is None:
        names = tuple(sorted(set(cells)))
        place = {label: i for i, label in enumerate(names)}
        answers = np.array([place[cell] for cell in cells], np.int64)
        return _Target(answers, "classes", names, f"classes are the {len(names)} names in {name!r}")
    answers = numbers.astype(np.int64)
    if (answers != numbers).any():
        raise InputError(f"{path} has {name!r} that are no whole numbers: rename the column if they are values")
    return _Target(answers, "classes", numbered(answers, path), f"classes are the numbers in {name!r}")


def _flags(cells: Sequence[str]) -> bool:
    return {*cells} <= {"0", "1", "0.0", "1.0"} and len(cells) > 0


def _numbers(cells: Sequence[str]) -> NDArray[np.float32] | None:
    try:
        numbers = [float(cell) for cell in cells]
    except ValueError:
        return None
    return np.array(numbers, np.float32) if all(map(math.isfinite, numbers)) else None


# Images ---------------------------------------------------------------------------------------------------------------


def _paths(root: Path, names: Sequence[str]) -> list[str]:
    """Return the path of each image below a folder, "" where it is not there.

    A name is a path below the folder, or the end of one; without a suffix it stands for a file with one.
    """
    known: dict[str, str | None] = {}  # None: of two files
    for path in images(str(root)):
        for name in {path, os.path.basename(path), os.path.basename(path).rpartition(".")[0]}:
            known[name] = None if name in known else path
    found: list[str] = []
    for name in names:
        place = known.get(name, known.get(os.path.basename(name), ""))
        if place is None:
            raise InputError(f"{root} has two images {name!r}: give their paths below the folder in the table")
        found.append(place)
    return found


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


def _split(words: Sequence[str] | None, names: Sequence[str], table: Path) -> dict[str, NDArray[np.int64]]:
    """Return the rows of each split."""
    if words is not None:
        if unknown := sorted({word.lower() for word in words} - {"train", *HELD_OUT}):
            raise InputError(
                f"{table} has the split {unknown[0]!r}: expected train, val or test{nearest(unknown[0], HELD_OUT)}"
            )
        given = np.array([word.lower() for word in words])
        return {str(word): np.flatnonzero(given == word) for word in np.unique(given)}
    lists = {split: table.parent / name for split, name in _LISTS.items()}
    if not all(file.is_file() for file in lists.values()):
        return {WHOLE: np.arange(len(names))}
    listed = {split: set(file.read_text().split()) for split, file in lists.items()}
    rows = {
        split: np.array([i for i, name in enumerate(names) if os.path.basename(name) in mine], np.int64)
        for split, mine in listed.items()
    }
    if sum(map(len, rows.values())) != len(names):
        raise InputError(
            f"{table} has images that are in none or in both of {' and '.join(_LISTS.values())}: mend the lists"
        )
    return rows
