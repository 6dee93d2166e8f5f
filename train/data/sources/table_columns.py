"""The columns of a csv table: reading them, choosing those that are the targets, and parsing the targets."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from train.data.sources.decoding import SUFFIXES
from train.data.sources.examples import Targets
from train.data.sources.files import read_file
from train.data.sources.splitting import numbered_classes
from train.recipes import Task
from vit_spec import InputError, nearest

_FINDINGS_COLUMN, _NO_FINDING = "Finding Labels", "No Finding"
_CLASS_COLUMNS = ("label", "class")
_BINARY_CELLS = ("0", "1", "0.0", "1.0")
_BOOLEAN_WORDS = {"true": "1", "false": "0"}
MISSING_CELLS = ("", "nan", "na", "n/a", "#n/a", "<na>", "null", "-", "?")  # missing values in a column of numbers
_MISSING_BINARY_CELLS = (*MISSING_CELLS, "-1", "-1.0")  # in a column of 0 and 1; CheXpert has -1 for "uncertain"
_SEPARATORS = {";": "semicolons", "\t": "tabs"}
MAX_TABLE_BYTES = 1 << 28  # the table of ChestX-ray14, with 112,120 images, has 8 MB
_MAX_FLAGS = 1 << 26  # images times labels; those of ChestX-ray14 are 1.6 million
_FEW_VALUES = 20  # a note asks whether so few different integers are classes


class Table(NamedTuple):
    """A table by its columns.

    columns: the cells of each column, stripped of whitespace.
    rows: the row number of each cell in the file, as a spreadsheet shows it: from 1, counting the header and blank rows.
    notes: what was left out of the file, a sentence each.
    """

    path: Path
    columns: Mapping[str, Sequence[str]]
    rows: Sequence[int]
    notes: tuple[str, ...] = ()

    def check_column(self, name: str) -> str:
        """Return the name of a column.

        Raises:
            InputError: there is no such column.
        """
        if name not in self.columns:
            known = f"its columns are {', '.join(self.columns)}{nearest(name, self.columns)}"
            raise InputError(f"{self.path} has no column {name!r}: {known}")
        return name


class TargetColumns(NamedTuple):
    """The targets of all rows; note: which columns they come from, for the user."""

    targets: Targets
    task: Task
    classes: tuple[str, ...]
    note: str


def read_table(path: Path) -> Table:
    """Read a table of comma-separated UTF-8 whose first row names the columns.

    Raises:
        InputError: a missing file, another format, no rows, two columns of one name, a row with more or fewer cells than
            the first, or a column without a name, unless it is empty or counts the rows from 0.
    """
    try:
        lines = io.StringIO(read_file(path, MAX_TABLE_BYTES).decode("utf-8-sig"), newline="")
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
    rows = _drop_empty_columns(rows)
    names, *cells = rows.values()
    if len(set(names)) < len(names):
        raise InputError(f"{path} has two columns of one name: its columns are {', '.join(names)}")
    for number, row in rows.items():
        if len(row) != len(names):
            count = f"{len(row)} cell{'s' * (len(row) > 1)}"
            raise InputError(f"{path} has {count} in row {number}, {len(names)} in the first: correct the row")
    return _drop_pandas_index(Table(path, dict(zip(names, map(list, zip(*cells, strict=True)), strict=True)), [*rows][1:]))


def _drop_empty_columns(rows: dict[int, list[str]]) -> dict[int, list[str]]:
    """Return the rows without columns that have neither a name nor a cell.

    Each row of ChestX-ray14 ends with a comma, and spreadsheets write columns that are only formatted.  The names may end
    with other commas than the rows, if all rows have the same number of cells.
    """
    names, *cells = rows.values()
    width = len(cells[0])
    if any(len(row) != width for row in cells):
        return rows
    names = names[: 1 + max(i for i, name in enumerate(names) if name)]  # rows of blank cells only are left out before
    kept = [i for i in range(width) if any(names[i : i + 1]) or any(row[i] for row in cells)]
    if max(kept) >= len(names) or len(names) > width:
        return rows
    return {number: [row[i] for i in kept] for number, row in zip(rows, (names, *cells), strict=True)}


def _drop_pandas_index(table: Table) -> Table:
    """Return the table without the nameless column of row numbers that pandas writes; refuse other nameless columns."""
    if "" not in table.columns:
        return table
    if table.columns[""] != [str(row) for row in range(len(table.rows))]:
        raise InputError(f"{table.path} has a column without a name: give it one in the first row, or remove it")
    named = {name: cells for name, cells in table.columns.items() if name}
    return table._replace(columns=named, notes=("the column without a name, which counts the rows, is left out",))


def parse_targets(table: Table, chosen: Sequence[str] | None) -> TargetColumns:
    """Parse the columns of targets: their kind follows from their names, then from their contents.

    chosen: the columns of the targets; None: those named as targets, or else all columns of 0 and 1, or else the only one.

    Raises:
        InputError: several columns that could be the targets, or invalid cells.
    """
    if not table.columns:
        raise InputError(f"{table.path} has no column of targets: expected one beside the images' file names")
    by_default, chosen = not chosen, chosen or _default_columns(table)
    table, single = _booleans_to_binary(table, chosen), len(chosen) == 1
    _refuse_missing(table, chosen)
    name, cells = chosen[0], table.columns[chosen[0]]
    if single and name == _FINDINGS_COLUMN:
        return _parse_joined_labels(cells, name, table.path)
    named_classes = single and name.lower() in _CLASS_COLUMNS
    _refuse_text(table, chosen, named_classes)
    if not named_classes and all(_is_binary(table.columns[name]) for name in chosen):
        flags = np.array([[float(cell) for cell in table.columns[name]] for name in chosen], np.float32).T
        rest = ", ".join(name for name in table.columns if name not in chosen) if by_default else ""
        others = f"; not taken as labels: {rest}" if rest else ""
        return TargetColumns(
            flags, "labels", tuple(chosen), f"labels are the columns of 0 and 1: {', '.join(chosen)}{others}"
        )
    numbers = [_parse_numbers(table.columns[name]) for name in chosen]
    values = [column for column in numbers if column is not None]
    if single and not named_classes and not values and any("|" in cell for cell in cells):
        return _parse_joined_labels(cells, name, table.path)
    if single and (named_classes or not values):
        return _parse_classes(cells, numbers[0], name, table.path)
    if len(values) < len(chosen):
        text = next(name for name, column in zip(chosen, numbers, strict=True) if column is None)
        raise InputError(
            f"{table.path} has text in {text!r}: several columns of targets must all be numbers, or all 0 and 1"
        )
    with np.errstate(over="ignore"):  # too large a number becomes infinite, and is refused later with its image's name
        stacked = np.stack(values, 1).astype(np.float32)
    few = single and (values[0] % 1 == 0).all() and len(np.unique(values[0])) <= _FEW_VALUES
    hint = "; call the column label if they are classes" if few else ""
    return TargetColumns(stacked, "values", tuple(chosen), f"values are the columns of numbers: {', '.join(chosen)}{hint}")


def _default_columns(table: Table) -> list[str]:
    """Return the columns of targets for a user who chooses none."""
    if _FINDINGS_COLUMN in table.columns:
        return [_FINDINGS_COLUMN]
    named = [name for name in table.columns if name.lower() in _CLASS_COLUMNS]
    binary = [name for name, cells in table.columns.items() if _is_mostly_binary(cells)]
    if len(binary) == 1 and not _is_binary(table.columns[binary[0]]):
        binary = []  # a single column that is mostly 0 and 1 may be counts
    chosen = named or binary or list(table.columns)
    if len(chosen) > 1 and (named or not binary):
        raise InputError(
            f"{table.path} has several columns that could be the targets: choose, ?target=COLUMN, of {', '.join(chosen)}"
        )
    return chosen


def _booleans_to_binary(table: Table, chosen: Sequence[str]) -> Table:
    """Return the table with 1 and 0 for true and false, in any case, in several columns; in one column they are classes."""
    if len(chosen) == 1:
        return table
    changed = {name: [_BOOLEAN_WORDS.get(cell.lower(), cell) for cell in table.columns[name]] for name in chosen}
    return table._replace(columns={**table.columns, **changed})


def _refuse_missing(table: Table, chosen: Sequence[str]) -> None:
    """Refuse missing targets: an empty cell, or in a column of 0 and 1 a cell that is neither."""
    single = len(chosen) == 1
    if single:
        binary = chosen[0].lower() not in _CLASS_COLUMNS and _is_binary_or_missing(table.columns[chosen[0]])
    else:
        binary = all(_is_mostly_binary(table.columns[name]) for name in chosen)
    missing = {name: _first_missing(table.columns[name], binary) for name in chosen}
    complete = [name for name in chosen if missing[name] is None]
    for name, place in missing.items():
        if place is not None:
            cell, row = table.columns[name][place], table.rows[place]
            blank = cell.lower() in _MISSING_BINARY_CELLS
            what = f"has {cell if blank else repr(cell)} for" if cell else "has no"
            remedy = f"each image needs {'0 or 1' if binary else 'one'}; {'fill it in' if blank else 'correct it'}"
            others = f", or leave the column out, ?target={','.join(complete)}" if complete else ""
            if not complete and not single:
                others = ", or choose the targets, ?target=COLUMN"
            elif single and cell.startswith("-1"):
                others = "; if these are values, add 1 to all of them"
            raise InputError(f"{table.path} {what} {name!r} in row {row}: {remedy}, or take the row out{others}")


def _first_missing(cells: Sequence[str], binary: bool) -> int | None:
    """Return the index of the first missing target; which cells count as missing depends on the other cells."""
    if binary:
        return next((place for place, cell in enumerate(cells) if cell not in _BINARY_CELLS), None)
    filled = [cell for cell in cells if cell.lower() not in MISSING_CELLS]
    missing = MISSING_CELLS if _parse_numbers(filled) is not None else ("",)
    return next((place for place, cell in enumerate(cells) if cell.lower() in missing), None)


def _refuse_text(table: Table, chosen: Sequence[str], named_classes: bool) -> None:
    """Refuse cells of a column of numbers that are not finite numbers.

    It is a column of numbers if half of its cells, or of its different cells, are finite numbers, or would be without
    commas; or if all cells are numbers, but some are not finite.

    named_classes: whether the column's name says that it has classes; their names may mix numbers and words.
    """
    for name in chosen:
        cells, different = table.columns[name], {*table.columns[name]}
        numbers = {cell for cell in different if parse_finite(cell) is not None}
        intended = {cell for cell in different if parse_finite(cell.replace(",", "")) is not None}
        many = 2 * len(intended) >= len(different) or 2 * sum(cell in intended for cell in cells) >= len(cells)
        if numbers < different and (all(map(is_number, different)) or (many and not named_classes)):
            place = next(place for place, cell in enumerate(cells) if cell not in numbers)
            meaning, column = (
                ("labels joined by |", _FINDINGS_COLUMN) if "|" in cells[place] else ("names of classes", "label")
            )
            otherwise = "" if named_classes else f", or if these are {meaning}, call the column {column}"
            raise InputError(
                f"{table.path} has {cells[place]!r} for {name!r} in row {table.rows[place]}: expected a finite number "
                f"such as 0.5, because this is a column of numbers; correct it or take the row out{otherwise}"
            )


def _parse_joined_labels(cells: Sequence[str], name: str, path: Path) -> TargetColumns:
    """Return labels from cells of names joined by "|", with or without spaces around it."""
    none = ("", _NO_FINDING.lower())
    labels_of = [{label for each in cell.split("|") if (label := each.strip()).lower() not in none} for cell in cells]
    labels = sorted(set().union(*labels_of))
    if not labels:
        raise InputError(f"{path} has nothing but {_NO_FINDING!r} in {name!r}: add images with findings")
    if len(cells) * len(labels) > _MAX_FLAGS:
        raise InputError(
            f"{path} has {len(labels):,} labels in {name!r} for {len(cells):,} images: expected at most {_MAX_FLAGS:,} "
            "if multiplied; leave out rare labels, or check that | joins names of labels"
        )
    index = {label: i for i, label in enumerate(labels)}
    flags = np.zeros((len(cells), len(labels)), np.float32)
    for row, row_labels in enumerate(labels_of):
        flags[row, [index[label] for label in row_labels]] = 1
    return TargetColumns(
        flags, "labels", tuple(labels), f"labels are the {len(labels)} name{'s' * (len(labels) > 1)} in {name!r}"
    )


def _parse_classes(cells: Sequence[str], numbers: NDArray[np.float64] | None, name: str, path: Path) -> TargetColumns:
    """Return class numbers: those in the cells, or the index of each cell among the sorted different cells.

    numbers: (N,) the cells as numbers; None if some are not.
    """
    if numbers is None:
        names = tuple(sorted(set(cells)))
        index = {label: i for i, label in enumerate(names)}
        targets = np.array([index[cell] for cell in cells], np.int64)
        hint = f"; call the column {_FINDINGS_COLUMN} if | joins several" if any("|" in label for label in names) else ""
        return TargetColumns(targets, "classes", names, f"classes are the {len(names)} names in {name!r}{hint}")
    if (numbers % 1 != 0).any():
        raise InputError(f"{path} has {name!r} that are not integers: rename the column if they are values")
    targets = numbers.clip(-(2.0**53), 2.0**53).astype(np.int64)  # the range in which floats are exact
    classes = numbered_classes(targets, path)
    written: dict[int, str] = {}
    for cell, number in zip(cells, targets.tolist(), strict=True):
        if (other := written.setdefault(number, cell)) != cell:
            raise InputError(f"{path} has {other!r} and {cell!r} for one number in {name!r}: write each class in one way")
    return TargetColumns(targets, "classes", classes, f"classes are the numbers in {name!r}")


def _is_binary(cells: Sequence[str]) -> bool:
    """Return whether all cells are 0 or 1."""
    return {*cells} <= {*_BINARY_CELLS}


def _is_binary_or_missing(cells: Sequence[str]) -> bool:
    """Return whether all cells are 0, 1 or stand for a missing value, and both 0 and 1 occur."""
    known = [cell for cell in cells if cell.lower() not in _MISSING_BINARY_CELLS]
    return _is_binary(known) and {*map(float, known)} == {0, 1}


def _is_mostly_binary(cells: Sequence[str]) -> bool:
    """Return whether most cells that are not missing are 0 or 1."""
    known = [cell for cell in cells if cell.lower() not in _MISSING_BINARY_CELLS]
    return 2 * sum(cell in _BINARY_CELLS for cell in known) > len(known)


def _parse_numbers(cells: Sequence[str]) -> NDArray[np.float64] | None:
    """Return the cells as finite numbers, (N,), or None if some are not."""
    numbers: list[float] = []
    for cell in cells:
        if (number := parse_finite(cell)) is None:
            return None
        numbers.append(number)
    return np.array(numbers)


def parse_finite(text: str) -> float | None:
    """Return a text as a finite number, or None if it is not one."""
    return number if is_number(text) and math.isfinite(number := float(text)) else None


def is_number(text: str) -> bool:
    """Return whether a text is a number, finite or not.  Python alone would also read 1_0 as ten."""
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text
