"""The columns of a table: how they are read, which of them are the answers, and what the answers are."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from train.data.sources.decoding import SUFFIXES
from train.data.sources.examples import Answers
from train.data.sources.files import content
from train.data.sources.splitting import numbered
from train.recipes import Task
from vit_spec import InputError, nearest

_FINDINGS, _NONE = "Finding Labels", "No Finding"
_CLASSES = ("label", "class")
_FLAGS = ("0", "1", "0.0", "1.0")
_WORDS = {"true": "1", "false": "0"}
BLANK = ("", "nan", "na", "n/a", "#n/a", "<na>", "null", "-", "?")  # what stands among numbers for none
_UNKNOWN = (*BLANK, "-1", "-1.0")  # and among flags; CheXpert has -1 for "uncertain"
_SEPARATORS = {";": "semicolons", "\t": "tabs"}
_LONGEST = 1 << 28  # bytes of a table; that of ChestX-ray14, of 112,120 images, takes 8 MB
_FEW = 20  # whole numbers, of which a note asks whether they are classes


class Table(NamedTuple):
    """A table by its columns.

    columns: the cells of each, without spaces around them.
    rows: where the cells stand in the file, as a spreadsheet counts: from 1, the names of the columns and blank rows too.
    notes: what was left out of the file, a sentence each.
    """

    path: Path
    columns: Mapping[str, Sequence[str]]
    rows: Sequence[int]
    notes: tuple[str, ...] = ()

    def asked(self, name: str) -> str:
        """Return a column's name; refuse one that is not there."""
        if name not in self.columns:
            known = f"its columns are {', '.join(self.columns)}{nearest(name, self.columns)}"
            raise InputError(f"{self.path} has no column {name!r}: {known}")
        return name


class Target(NamedTuple):
    """The answers of all rows; what: said of them in a note."""

    answers: Answers
    kind: Task
    classes: tuple[str, ...]
    what: str


def read(path: Path) -> Table:
    """Read a table of comma-separated UTF-8 whose first row names the columns.

    Raises:
        InputError: no such file, another format, no rows, columns of one name, a column without a name that does not
            count the rows from 0, or rows that are shorter or longer.
    """
    try:
        lines = io.StringIO(content(path, _LONGEST).decode("utf-8-sig"), newline="")
        stripped = ([cell.strip() for cell in row] for row in csv.reader(lines, strict=True))
        rows = {number: row for number, row in enumerate(stripped, 1) if any(row)}
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} cannot be read as a table ({error}): expected comma-separated UTF-8") from None
    if len(rows) < 2:
        raise InputError(f"{path} has no rows: expected the names of the columns, then a row for each image")
    names, *cells = rows.values()
    if len(names) == 1 and (other := next((name for mark, name in _SEPARATORS.items() if mark in names[0]), None)):
        raise InputError(f"{path} has its columns separated by {other}: write it with columns separated by commas")
    if image := next((cell for cell in names if cell.lower().endswith(SUFFIXES)), None):
        raise InputError(f"{path} begins with the row of {image}: name the columns in a row above it, such as image,label")
    if len(set(names)) < len(names):
        raise InputError(f"{path} has two columns of one name: its columns are {', '.join(names)}")
    for number, row in rows.items():
        if len(row) != len(names):
            count = f"{len(row)} cell{'s' * (len(row) > 1)}"
            raise InputError(f"{path} has {count} in row {number}, {len(names)} in the first: mend the row")
    return _without_index(Table(path, dict(zip(names, map(list, zip(*cells, strict=True)), strict=True)), [*rows][1:]))


def _without_index(table: Table) -> Table:
    """Return the table without pandas' index, a column without a name that counts the rows; refuse another of no name."""
    if "" not in table.columns:
        return table
    if table.columns[""] != [str(row) for row in range(len(table.rows))]:
        raise InputError(f"{table.path} has a column without a name: give it one in the first row, or remove it")
    named = {name: cells for name, cells in table.columns.items() if name}
    return table._replace(columns=named, notes=("the column without a name, which counts the rows, is left out",))


def answers(table: Table, chosen: Sequence[str] | None) -> Target:
    """Decide what the answers are, by the columns' names before their contents.

    chosen: the columns of the answers; None: those whose names say so, or else all of 0 and 1, or else the only one.

    Raises:
        InputError: several columns that could be the answers, or cells that are no answers.
    """
    if not table.columns:
        raise InputError(f"{table.path} has no column of answers: expected one beside the images' file names")
    usual, chosen = not chosen, chosen or _usual(table)
    table, alone = _in_numbers(table, chosen), len(chosen) == 1
    _refuse_gaps(table, chosen)
    name, cells = chosen[0], table.columns[chosen[0]]
    if alone and name == _FINDINGS:
        return _joined(cells, name, table.path)
    named = alone and name.lower() in _CLASSES
    _refuse_text(table, chosen, named)
    if not named and all(_flags(table.columns[name]) for name in chosen):
        flags = np.array([[float(cell) for cell in table.columns[name]] for name in chosen], np.float32).T
        left = ", ".join(name for name in table.columns if name not in chosen) if usual else ""
        others = f"; not taken as labels: {left}" if left else ""
        return Target(flags, "labels", tuple(chosen), f"labels are the columns of 0 and 1: {', '.join(chosen)}{others}")
    numbers = [_numbers(table.columns[name]) for name in chosen]
    values = [column for column in numbers if column is not None]
    if alone and not named and not values and any("|" in cell for cell in cells):
        return _joined(cells, name, table.path)
    if alone and (named or not values):
        return _classes(cells, numbers[0], name, table.path)
    if len(values) < len(chosen):
        text = next(name for name, column in zip(chosen, numbers, strict=True) if column is None)
        raise InputError(f"{table.path} has text in {text!r}: several columns of answers are numbers, or 0 and 1, together")
    with np.errstate(over="ignore"):  # a number too large becomes infinite, and is refused with its image's name
        stacked = np.stack(values, 1).astype(np.float32)
    few = alone and (values[0] % 1 == 0).all() and len(np.unique(values[0])) <= _FEW
    doubt = "; call the column label if they are classes" if few else ""
    return Target(stacked, "values", tuple(chosen), f"values are the columns of numbers: {', '.join(chosen)}{doubt}")


def _usual(table: Table) -> list[str]:
    """Return the columns that are the answers where nobody says it."""
    if _FINDINGS in table.columns:
        return [_FINDINGS]
    named = [name for name in table.columns if name.lower() in _CLASSES]
    flags = [name for name, cells in table.columns.items() if _meant_as_flags(cells)]
    if len(flags) == 1 and not _flags(table.columns[flags[0]]):
        flags = []  # one column with other cells says little: counts may be 0 and 1 for the most part
    chosen = named or flags or list(table.columns)
    if len(chosen) > 1 and (named or not flags):
        raise InputError(
            f"{table.path} has several columns that could be the answers: choose, ?target=COLUMN, of {', '.join(chosen)}"
        )
    return chosen


def _in_numbers(table: Table, chosen: Sequence[str]) -> Table:
    """Return the table with 1 and 0 for true and false, in any case, in several columns; one column has them as classes."""
    if len(chosen) == 1:
        return table
    changed = {name: [_WORDS.get(cell.lower(), cell) for cell in table.columns[name]] for name in chosen}
    return table._replace(columns={**table.columns, **changed})


def _refuse_gaps(table: Table, chosen: Sequence[str]) -> None:
    """Refuse a cell without an answer: an empty one, or one that is neither 0 nor 1 where the others are."""
    alone = len(chosen) == 1
    if alone:
        flags = chosen[0].lower() not in _CLASSES and _flags_and_unknown(table.columns[chosen[0]])
    else:
        flags = all(_meant_as_flags(table.columns[name]) for name in chosen)
    gaps = {name: _gap(table.columns[name], flags) for name in chosen}
    clear = [name for name in chosen if gaps[name] is None]
    for name, place in gaps.items():
        if place is not None:
            cell, row = table.columns[name][place], table.rows[place]
            blank = cell.lower() in _UNKNOWN
            what = f"has {cell if blank else repr(cell)} for" if cell else "has no"
            wanted = f"each image needs {'0 or 1' if flags else 'one'}; {'fill it in' if blank else 'mend it'}"
            others = f", or leave the column out, ?target={','.join(clear)}" if clear else ""
            if not clear and not alone:
                others = ", or choose the answers, ?target=COLUMN"
            elif alone and cell.startswith("-1"):
                others = "; if these are values, add 1 to all of them"
            raise InputError(f"{table.path} {what} {name!r} in row {row}: {wanted}, or take the row out{others}")


def _gap(cells: Sequence[str], flags: bool) -> int | None:
    """Return the first place without an answer; what stands for none depends on what the others are."""
    if flags:
        return next((place for place, cell in enumerate(cells) if cell not in _FLAGS), None)
    filled = [cell for cell in cells if cell.lower() not in BLANK]
    blank = BLANK if _numbers(filled) is not None else ("",)
    return next((place for place, cell in enumerate(cells) if cell.lower() in blank), None)


def _refuse_text(table: Table, chosen: Sequence[str], named: bool) -> None:
    """Refuse a cell that is no finite number in a column of numbers.

    It is one where half of the cells, or of the different ones, are numbers, or would be without commas; or where all are
    but some are not finite.

    named: whether the column is by its name one of classes, which may be called by numbers and words alike.
    """
    for name in chosen:
        cells, different = table.columns[name], {*table.columns[name]}
        numbers = {cell for cell in different if finite(cell) is not None}
        meant = {cell for cell in different if finite(cell.replace(",", "")) is not None}
        many = 2 * len(meant) >= len(different) or 2 * sum(cell in meant for cell in cells) >= len(cells)
        if numbers < different and (all(map(_reads, different)) or (many and not named)):
            place = next(place for place, cell in enumerate(cells) if cell not in numbers)
            means, called = ("labels joined by |", _FINDINGS) if "|" in cells[place] else ("names of classes", "label")
            names = "" if named else f", or if these are {means}, call the column {called}"
            raise InputError(
                f"{table.path} has {cells[place]!r} for {name!r} in row {table.rows[place]}: expected a finite number "
                f"such as 0.5, for this is a column of numbers; mend it or take the row out{names}"
            )


def _joined(cells: Sequence[str], name: str, path: Path) -> Target:
    found = [set(cell.split("|")) - {_NONE, ""} for cell in cells]
    labels = sorted(set().union(*found))
    if not labels:
        raise InputError(f"{path} has nothing but {_NONE!r} in {name!r}: add images with findings")
    place = {label: i for i, label in enumerate(labels)}
    flags = np.zeros((len(cells), len(labels)), np.float32)
    for row, mine in enumerate(found):
        flags[row, [place[label] for label in mine]] = 1
    return Target(flags, "labels", tuple(labels), f"labels are the {len(labels)} name{'s' * (len(labels) > 1)} in {name!r}")


def _classes(cells: Sequence[str], numbers: NDArray[np.float64] | None, name: str, path: Path) -> Target:
    if numbers is None:
        names = tuple(sorted(set(cells)))
        place = {label: i for i, label in enumerate(names)}
        given = np.array([place[cell] for cell in cells], np.int64)
        doubt = f"; call the column {_FINDINGS} if | joins several" if any("|" in label for label in names) else ""
        return Target(given, "classes", names, f"classes are the {len(names)} names in {name!r}{doubt}")
    if (numbers % 1 != 0).any():
        raise InputError(f"{path} has {name!r} that are no whole numbers: rename the column if they are values")
    given = numbers.clip(-(2.0**53), 2.0**53).astype(np.int64)  # as far as floats are exact
    classes = numbered(given, path)
    written: dict[int, str] = {}
    for cell, number in zip(cells, given.tolist(), strict=True):
        if (other := written.setdefault(number, cell)) != cell:
            raise InputError(f"{path} has {other!r} and {cell!r} for one number in {name!r}: write each class in one way")
    return Target(given, "classes", classes, f"classes are the numbers in {name!r}")


def _flags(cells: Sequence[str]) -> bool:
    """Return whether a column holds nothing but 0 and 1."""
    return {*cells} <= {*_FLAGS}


def _flags_and_unknown(cells: Sequence[str]) -> bool:
    """Return whether a column holds 0, 1 and else only what stands for an unknown answer."""
    known = [cell for cell in cells if cell.lower() not in _UNKNOWN]
    return _flags(known) and {*map(float, known)} == {0, 1}


def _meant_as_flags(cells: Sequence[str]) -> bool:
    """Return whether most of what a column tells is 0 or 1."""
    known = [cell for cell in cells if cell.lower() not in _UNKNOWN]
    return 2 * sum(cell in _FLAGS for cell in known) > len(known)


def _numbers(cells: Sequence[str]) -> NDArray[np.float64] | None:
    """Return a column of finite numbers, (N,), or None if it is another."""
    numbers = [number for cell in cells if (number := finite(cell)) is not None]
    return np.array(numbers) if len(numbers) == len(cells) else None


def finite(text: str) -> float | None:
    """Read a finite number; return None where a text is none."""
    return number if _reads(text) and math.isfinite(number := float(text)) else None


def _reads(text: str) -> bool:
    """Return whether a text is a number, be it not finite.  Python would also read 1_0 as ten."""
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text
