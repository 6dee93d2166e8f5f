"""`parquet:PATH`: the layout of data sets on the Hugging Face hub, which is how ImageNet-1k is distributed today.

PATH is a Parquet file, a glob, or a folder of files at any depth, such as data/train-00000-of-00294.parquet; splits are
told by the words train, val, validation or test in the names.  Column `image` is a struct of `bytes` (an image file) and
`path`, or the bytes alone; column `label` is a class number.  Options name others: parquet:PATH?label=fine_label&image=img.
Names of the classes come from the schema's entry "huggingface", and are else their numbers.

Images are read one by one in any order, as `chunks` says; the labels of a split are read when it is opened.
"""

import glob
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from train.sources.chunks import Chunk, Values
from train.sources.decoding import decode, said
from train.sources.examples import Examples, Lazy, Name, examples
from train.sources.shards import by_split, common
from train.sources.splitting import Found, numbered
from vit_spec import InputError, nearest

OPTIONS = ("label", "image")


def find(place: str, label: str | None = None, image: str | None = None) -> Found:
    """Look into Parquet files.

    label, image: the columns to take, where their names do not say it.

    Raises:
        InputError: no such files, damaged ones, or columns that are missing or several.
    """
    import pyarrow.parquet as pq

    root, files = _files(place)
    shards = by_split(root, files)
    base = "train" if "train" in shards else next(iter(shards))
    schema = _opened(shards[base][0], pq.read_schema)
    pictures, label = _image_column(schema, image, place), _label_column(schema, label, place)

    def asked(chosen: list[Path]) -> Callable[[], Examples]:
        return lambda: _part(chosen, pictures, label)

    parts = {name: asked(chosen) for name, chosen in shards.items()}
    first = parts[base]()
    classes = _class_names(schema, label) or numbered(first.answers, place)
    return Found(place, parts | {base: lambda: first}, "classes", classes)


def _files(place: str) -> tuple[Path, list[Path]]:
    """Return the folder that the names of files count from, and the files."""
    path = Path(place).expanduser()
    if path.is_dir():
        root, files = path, sorted(path.rglob("*.parquet"))
    else:
        files = [path] if path.is_file() else [Path(name) for name in sorted(glob.glob(str(path)))]
        root = common(files) if files else path
    if not files:
        raise InputError(
            f"{place} has no Parquet files: give parquet:PATH with PATH/train-00000-of-00001.parquet and the like inside"
        )
    return root, files


def _opened(file: Path, read: Callable[..., Any], **options: Any) -> Any:
    import pyarrow as pa

    try:
        return read(file, **options)
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{file} cannot be read as Parquet ({said(error)}): fetch it again") from None


# Columns --------------------------------------------------------------------------------------------------------------


def _image_column(schema: Any, asked: str | None, place: str) -> str:
    """Return the path of the column of bytes, such as "image.bytes"."""
    import pyarrow as pa

    def bytes_in(field: Any) -> str:
        if pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type):
            return str(field.name)
        if pa.types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0:
            return f"{field.name}.bytes"
        return ""

    found = {field.name: inside for field in schema if (inside := bytes_in(field))}
    return found[_column("image", ("image", "img"), asked, list(found), schema.names, place)]


def _label_column(schema: Any, asked: str | None, place: str) -> str:
    import pyarrow as pa

    found = [field.name for field in schema if pa.types.is_integer(field.type)]
    return _column("label", ("label",), asked, found, schema.names, place)


def _column(what: str, usual: Sequence[str], asked: str | None, found: list[str], names: list[str], place: str) -> str:
    """Return the column that is asked for, or has the usual name, or is the only one that fits."""
    holds = "bytes" if what == "image" else "whole numbers"
    if asked is not None and asked not in found:
        raise InputError(
            f"{place} has no column {asked!r} of {holds}: its columns are {', '.join(names)}{nearest(asked, found)}"
        )
    chosen = [asked] if asked is not None else [name for name in usual if name in found][:1] or found
    if len(chosen) == 1:
        return chosen[0]
    if not chosen:
        raise InputError(f"{place} has no column of {holds} for the {what}s: its columns are {', '.join(names)}")
    raise InputError(f"{place} has several columns for the {what}s, {', '.join(chosen)}: choose, PATH?{what}={chosen[0]}")


def _class_names(schema: Any, label: str) -> tuple[str, ...]:
    """Return the names that the hub's library put into the schema, if any."""
    try:
        feature = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"][label]
        return tuple(map(str, feature["names"]))
    except (KeyError, TypeError, ValueError):
        return ()


# Images ---------------------------------------------------------------------------------------------------------------


def _part(files: list[Path], pictures: str, label: str) -> Examples:
    """Read where the images of a split lie, and their labels."""
    import pyarrow.parquet as pq

    answers: list[NDArray[np.int64]] = []
    chunks: list[Chunk] = []
    groups: list[tuple[int, int]] = []  # of each: its number in its file, and the row of the file that it begins with
    counts = [0]
    for file in files:
        meta, row = _opened(file, pq.read_metadata), 0
        _whole_numbers(meta.schema.to_arrow_schema(), label, file)
        column = _opened(file, pq.read_table, columns=[label])[label]
        if column.null_count:
            raise InputError(f"{file} has {column.null_count:,} rows without a {label}: each image needs one")
        answers.append(column.to_numpy().astype(np.int64))
        place = next((i for i in range(meta.num_columns) if meta.schema.column(i).path == pictures), None)
        if place is None:
            raise InputError(f"{file} has no column {pictures}, which the first file has: give files of one data set")
        for number in range(meta.num_row_groups):
            chunks.append(_chunk(str(file), meta, number, place))
            groups.append((number, row))
            row += meta.row_group(number).num_rows
            counts.append(meta.row_group(number).num_rows)
    reader = _Rows(chunks, np.array(groups, np.int64).reshape(-1, 2), np.cumsum(counts), pictures)
    return examples(reader, np.concatenate(answers))


def _whole_numbers(schema: Any, label: str, file: Path) -> None:
    """Refuse a file whose labels are absent, or other than those of the first file."""
    import pyarrow as pa

    if (place := schema.get_field_index(label)) < 0:
        raise InputError(
            f"{file} has no column {label!r}: each image needs one; without labels it cannot be trained on or judged by, "
            "so hold out another split, or a share such as 0.2"
        )
    if not pa.types.is_integer(kind := schema.field(place).type):
        raise InputError(f"{file} has {kind} in its column {label!r}: expected whole numbers, as in the first file")


def _chunk(file: str, meta: Any, number: int, place: int) -> Chunk:
    found, column = meta.row_group(number).column(place), meta.schema.column(place)
    if column.max_repetition_level:
        raise InputError(f"{file} has lists in {column.path}: one image a row is expected")
    starts = [start for start in (found.dictionary_page_offset, found.data_page_offset) if start]
    sizes = found.total_compressed_size, found.total_uncompressed_size, meta.row_group(number).num_rows
    return Chunk(file, min(starts), *sizes, found.compression, column.max_definition_level)


class _Rows:
    """Images that are rows of Parquet files.  ends: (groups + 1,) the row that each row group begins with, over all."""

    def __init__(self, chunks: list[Chunk], groups: NDArray[np.int64], ends: NDArray[np.int64], pictures: str) -> None:
        self._chunks, self._groups, self._ends, self._pictures = chunks, groups, ends, pictures
        self._values = [Lazy(partial(Values, chunk)) for chunk in chunks]

    def __call__(self, i: int) -> Image.Image:
        group = self._group(i)
        try:
            data = self._values[group]()[i - int(self._ends[group])]
        except Exception as error:  # a damaged page fails in as many ways as its parts can be wrong
            raise InputError(f"{self.name(i)} cannot be read ({said(error)}): fetch or write the file again") from None
        if not data:
            raise InputError(f"{self.name(i)} holds no image: remove the row")
        return decode(data, Name(self, i))

    def name(self, i: int) -> str:
        group = self._group(i)
        number, first = self._groups[group].tolist()
        inside = i - int(self._ends[group])
        path = self._path(group, number, inside)
        return f"{Path(self._chunks[group].path).name} row {first + inside}{f' ({path})' if path else ''}"

    def _group(self, i: int) -> int:
        return int(np.searchsorted(self._ends, i, "right")) - 1

    def _path(self, group: int, number: int, inside: int) -> str:
        """Return what the file says the image was called, if it does."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        column, dot, _ = self._pictures.rpartition(".")
        if not dot:
            return ""
        try:
            with pq.ParquetFile(self._chunks[group].path) as file:
                if file.schema_arrow.field(column).type.get_field_index("path") < 0:
                    return ""
                return file.read_row_group(number, columns=[f"{column}.path"])[column][inside].as_py()["path"] or ""
        except (OSError, KeyError, TypeError, pa.ArrowException):
            return ""  # a damaged file is told of by its row
