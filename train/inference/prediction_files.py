"""Files of predictions, features or findings, one row for each image, that get their name when all rows are written."""

import csv
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from parity.checkpoints.atomic_write import atomic_replace, check_replaceable
from vit_spec import InputError
from vit_spec.printable import escape_surrogates

ROWS_IN_GROUP = 1 << 14  # of a Parquet file

Row = dict[str, Any]  # of names and values, the same names in every row
WriteRow = Callable[[Row], None]


def check_output(
    option: str, path: Path, suffixes: Sequence[str], inputs: Sequence[Path] = (), *, force: bool | None = None
) -> None:
    """Check that a file can be written.

    option: for messages, such as "--out".    inputs: files that are read, and never replaced.    force: whether an existing
    file is replaced; None if the command has no --force.

    Raises:
        InputError: a suffix that is not known, a missing folder, an input, or a file that exists and `force` is False.
    """
    if path.suffix.lower() not in suffixes:
        raise InputError(f"{option} {path}: give a name that ends in {' or '.join(suffixes)}")
    if not path.parent.is_dir():
        raise InputError(f"{option} {path}: there is no folder {path.parent}; make it first")
    check_replaceable(path)
    if path.is_dir():
        raise InputError(f"{option} {path} is a folder: give the name of a file")
    if path.exists() and any(each.exists() and path.samefile(each) for each in inputs):
        raise InputError(f"{option} {path} is one of the files to read, and is not replaced: give another name")
    if os.path.lexists(path) and not force:
        remedy = "give another name" if force is None else "give another name, or --force to replace it"
        raise InputError(f"{option} {path} exists: {remedy}")


@contextmanager
def open_rows(path: Path, *, force: bool, header: Sequence[str] = ()) -> Iterator[WriteRow]:
    """Yield a function that appends a row; the file gets its name when all are written.

    path: a .csv, .jsonl or .parquet file.    header: the names of the columns, which a .csv file without rows has too.

    Raises:
        InputError: the file cannot be written, or it exists and `force` is False.
    """
    writers: dict[str, Any] = {
        ".csv": partial(_write_csv, header=header),
        ".jsonl": _write_json_lines,
        ".parquet": _write_parquet,
    }
    try:
        with atomic_replace(path, replace=force) as new, writers[path.suffix.lower()](new) as write:
            yield write
    except OSError as error:
        raise InputError(f"cannot write {path} ({error.strerror or error}): correct that, or give another name") from None


@contextmanager
def _write_csv(path: Path, header: Sequence[str]) -> Iterator[WriteRow]:
    with path.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:  # as escape_surrogates
        table = csv.writer(file, lineterminator="\n")
        has_header = bool(header)
        if has_header:
            table.writerow(header)

        def write(row: Row) -> None:
            nonlocal has_header
            if not has_header:
                table.writerow(row)
                has_header = True
            table.writerow(row.values())

        yield write


@contextmanager
def _write_json_lines(path: Path) -> Iterator[WriteRow]:
    with path.open("w", encoding="utf-8") as file:
        yield lambda row: _write_line(file, row)


def _write_line(file: IO[str], row: Row) -> None:
    file.write(f"{json.dumps(row)}\n")


@contextmanager
def _write_parquet(path: Path) -> Iterator[WriteRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows: list[Row] = []
    writer: Any = None

    def flush() -> None:
        nonlocal writer
        if rows:
            table = pa.table({name: pa.array([_to_arrow(row[name]) for row in rows]) for name in rows[0]})
            writer = writer or pq.ParquetWriter(path, table.schema)
            writer.write_table(table)
            rows.clear()

    def write(row: Row) -> None:
        rows.append(row)
        if len(rows) >= ROWS_IN_GROUP:
            flush()

    try:
        yield write
        flush()
        if writer is None:
            pq.write_table(pa.table({}), path)
    finally:
        if writer is not None:
            writer.close()


def _to_arrow(value: Any) -> Any:
    if isinstance(value, str):
        return escape_surrogates(value)
    return value.astype(np.float32) if isinstance(value, np.ndarray) else value


@contextmanager
def open_features(path: Path, *, force: bool) -> Iterator[Callable[[str, NDArray[np.float32]], None]]:
    r"""Yield a function that appends the features of an image, (D,), under its name.

    A .parquet file has the columns "image" and "features".  An .npy file has an array (images, D) float32, and the file
    beside it with the suffix .txt has the names, one per line, with line breaks in a name as \n and \r.

    Raises:
        InputError: as `open_rows`.
    """
    if path.suffix.lower() == ".parquet":
        with open_rows(path, force=force) as write:
            yield lambda name, features: write({"image": name, "features": features})
        return
    names: list[str] = []
    rows: list[NDArray[np.float32]] = []

    def append(name: str, features: NDArray[np.float32]) -> None:
        names.append(name)
        rows.append(features)

    yield append
    try:
        # Neither file gets its name before both are written.
        with atomic_replace(path, replace=force) as array, atomic_replace(names_file(path), replace=force) as text:
            with array.open("wb") as file:
                np.save(file, np.stack(rows) if rows else np.zeros((0, 0), np.float32))
            lines = "".join(f"{_in_one_line(name)}\n" for name in names)
            text.write_text(escape_surrogates(lines), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path} ({error.strerror or error}): correct that, or give another name") from None


def _in_one_line(name: str) -> str:
    return name.replace("\n", "\\n").replace("\r", "\\r")


def names_file(path: Path) -> Path:
    """Return the file of the names of the images in an .npy file of features."""
    return path.with_suffix(".txt")
