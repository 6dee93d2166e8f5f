"""`parquet:PATH`: the layout of data sets on the Hugging Face hub, which is how ImageNet-1k is distributed today.

PATH is a Parquet file, a glob, or a folder of files at any depth, such as data/train-00000-of-00294.parquet; splits are
told by the words train, val, validation or test in the names.  Column `image` is a struct of `bytes` (an image file) and
`path`, or the bytes alone.  Column `label` is a class number, and the classes' names come from the schema's entry
"huggingface" or are their numbers.  Or it is text, or true and false: the different ones of the training images, in order,
are the classes.  Options name other columns: parquet:PATH?label=fine_label&image=img.

Images are read one by one in any order, as `chunks` says; the labels of a split are read when it is opened.
"""

import glob
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from train.data.sources.chunks import Chunk, Values
from train.data.sources.decoding import decode, said
from train.data.sources.examples import Examples, Lazy, Name, examples, stored
from train.data.sources.files import below, unless_damaged
from train.data.sources.shards import by_split, common
from train.data.sources.splitting import Found, numbered
from vit_spec import InputError, bounded_json, nearest

OPTIONS = ("label", "image")
_METADATA = 1 << 24  # bytes of JSON about the columns
_DENSE = 64  # bytes of text that a byte of the file may stand for


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
    pictures, column = _image_column(schema, image, place), _label_column(schema, label, place)
    names = None if _whole(schema.field(column).type) else _texts(shards[base], column)

    def asked(chosen: list[Path]) -> Callable[[], Examples]:
        return lambda: _part(chosen, pictures, column, names)

    parts = {name: asked(chosen) for name, chosen in shards.items()}
    first = parts[base]()
    classes = names or _class_names(schema, column) or numbered(first.answers, place)
    notes = () if column in (label, "label") else (f"classes are the column {column!r}",)
    return Found(place, parts | {base: lambda: first}, "classes", classes, notes=notes)


def _files(place: str) -> tuple[Path, list[Path]]:
    """Return the folder that the names of files count from, and the files."""
    path = Path(place).expanduser()
    if path.is_dir():
        root, files = path, sorted(path / name for name in below(str(path), (".parquet",)))
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
        unless_damaged(error, file)
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
    named = asked or "label"  # text in another column may say something else of the image
    found = [field.name for field in schema if _whole(field.type) or (field.name == named and _text(field.type))]
    if not asked and "label" in schema.names and "label" not in found:
        raise InputError(
            f"{place} has {schema.field('label').type} in its column 'label': expected whole numbers or text; "
            "write it so, or choose another, PATH?label=COLUMN"
        )
    return _column("label", ("label",), asked, found, schema.names, place)


def _whole(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind))


def _text(kind: Any) -> bool:
    """Return whether a column holds names of classes: text, as it is or by number, or true and false."""
    import pyarrow as pa

    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_boolean(kind))


def _column(what: str, usual: Sequence[str], asked: str | None, found: list[str], names: list[str], place: str) -> str:
    """Return the column that is asked for, or has the usual name, or is the only one that fits."""
    holds, chance = ("bytes", "") if what == "image" else ("whole numbers", "; one of text is chosen by PATH?label=COLUMN")
    if asked is not None and asked not in found:
        raise InputError(
            f"{place} has no column {asked!r} of {holds}{' or text' * (what == 'label')}: "
            f"its columns are {', '.join(names)}{nearest(asked, found)}"
        )
    chosen = [asked] if asked is not None else [name for name in usual if name in found][:1] or found
    if len(chosen) == 1:
        return chosen[0]
    if not chosen:
        raise InputError(f"{place} has no column of {holds} for the {what}s: its columns are {', '.join(names)}{chance}")
    raise InputError(f"{place} has several columns for the {what}s, {', '.join(chosen)}: choose, PATH?{what}={chosen[0]}")


def _class_names(schema: Any, label: str) -> tuple[str, ...]:
    """Return the names that the hub's library put into the schema, if any."""
    try:
        feature = bounded_json.parse_object((schema.metadata or {})[b"huggingface"], longest=_METADATA)["info"]["features"][
            label
        ]
        return tuple(map(str, feature["names"]))
    except (KeyError, TypeError, ValueError):
        return ()


# Labels ---------------------------------------------------------------------------------------------------------------


def _labels(file: Path, label: str, text: bool) -> Any:
    """Read a column of whole numbers or of text; refuse one that is absent, has gaps, or differs from the first file's."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    meta, schema = _opened(file, pq.read_metadata), _opened(file, pq.read_schema)
    if meta.num_rows > (size := file.stat().st_size):
        raise InputError(f"{file} has {meta.num_rows:,} rows in {size:,} bytes, which no images fit into: fetch it again")
    if (place := schema.get_field_index(label)) < 0:
        raise InputError(
            f"{file} has no column {label!r}: each image needs one; without labels it cannot be trained on or judged by, "
            "so hold out another split, or a share such as 0.2"
        )
    if not (_text if text else _whole)(kind := schema.field(place).type):
        wanted = "text" if text else "whole numbers"
        raise InputError(f"{file} has {kind} in its column {label!r}: expected {wanted}, as in the first file")
    repeated = [label] if pa.types.is_string(kind) or pa.types.is_large_string(kind) else None
    column = _opened(file, pq.read_table, columns=[label], read_dictionary=repeated)[label]
    if text:
        _check_texts(file, label, column)
        column = column.cast(pa.string())
        column = pc.if_else(pc.equal(column, ""), pa.scalar(None, pa.string()), column)
    if column.null_count:
        rows = f"{column.null_count:,} row{'s' * (column.null_count > 1)}"
        raise InputError(f"{file} has {rows} without a {label}: each image needs one")
    return column


def _check_texts(file: Path, label: str, column: Any) -> None:
    """Refuse a column that says a few long texts very often, each of which would be made anew."""
    import pyarrow as pa
    import pyarrow.compute as pc

    total = 0
    for chunk in column.chunks:
        if pa.types.is_dictionary(chunk.type) and not pa.types.is_boolean(chunk.type.value_type):
            lengths = pc.take(pc.binary_length(chunk.dictionary), chunk.indices)
            total += pc.sum(pc.cast(lengths, pa.int64())).as_py() or 0
    if total > _METADATA + _DENSE * file.stat().st_size:
        raise InputError(f"{file} has {total:,} bytes of text in its column {label!r}: names of classes are expected there")


def _texts(files: list[Path], label: str) -> tuple[str, ...]:
    """Return the different texts in a column, in their order."""
    return tuple(sorted({text for file in files for text in _labels(file, label, True).unique().to_pylist()}))


def _answers(file: Path, label: str, names: tuple[str, ...] | None) -> NDArray[np.int64]:
    """Return the class numbers of a file's images, (N,): what is there, or where in `names` it is."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = _labels(file, label, names is not None)
    if names is not None:
        found = pc.index_in(column, value_set=pa.array(names, pa.string()))
        if found.null_count:
            other = column.filter(pc.is_null(found))[0].as_py()
            raise InputError(f"{file} has the {label} {other!r}, of which no image is trained on: add some, or remove it")
        column = found
    return np.asarray(column.to_numpy(), np.int64)


# Images ---------------------------------------------------------------------------------------------------------------


def _part(files: list[Path], pictures: str, label: str, names: tuple[str, ...] | None) -> Examples:
    """Read where the images of a split lie, and their labels."""
    import pyarrow.parquet as pq

    answers: list[NDArray[np.int64]] = []
    chunks: list[Chunk] = []
    groups: list[tuple[int, int]] = []  # of each: its number in its file, and the row of the file that it begins with
    counts = [0]
    for file in files:
        meta, row = _opened(file, pq.read_metadata), 0
        answers.append(_answers(file, label, names))
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
        self.files = stored((chunk.path for chunk in chunks), pictures)

    def __call__(self, i: int) -> Image.Image:
        group = self._group(i)
        try:
            data = self._values[group]()[i - int(self._ends[group])]
        except Exception as error:  # a damaged page fails in as many ways as its parts can be wrong
            unless_damaged(error, Name(self, i))
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
