"""`parquet:PATH`: Parquet files laid out as data sets on the Hugging Face hub, where ImageNet-1k is distributed.

PATH is a Parquet file, a glob, or a folder of files at any depth, such as data/train-00000-of-00294.parquet.  The words
train, val, validation or test in the names give the splits.  Column `image` is a struct of `bytes` (an image file) and
`path`, or the bytes alone.  Column `label` holds class numbers; the names of the classes come from the schema's entry
"huggingface", or are the numbers.  Files that state another name for the same number are refused.  The column may also
hold text or booleans; then the classes are the sorted different values of the training images.  Options choose other
columns: parquet:PATH?label=fine_label&image=img.

`parquet_chunks` reads single images in any order.  The labels of a split are read when it is opened.
"""

import glob
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from train.data.sources.decoding import decode, error_text
from train.data.sources.examples import DatasetSplits, Examples, LazyName, LazyValue, make_examples, name_files
from train.data.sources.files import raise_if_inaccessible, refuse_holes, walk_files
from train.data.sources.parquet_chunks import ChunkValues, ColumnChunk, check_page_sizes
from train.data.sources.shards import common_folder, group_by_split
from train.data.sources.splitting import numbered_classes, to_class_numbers
from vit_spec import InputError, bounded_json, nearest

OPTIONS = ("label", "image")
_MAX_METADATA_BYTES = 1 << 24  # of the schema's JSON
_MAX_RATIO = 64  # of the text in a column of class names to the file's size


class _StatedNames(NamedTuple):
    """The names of the classes in the metadata of a file, () if it has none."""

    file: Path
    names: tuple[str, ...]


def open_splits(place: str, label: str | None = None, image: str | None = None) -> DatasetSplits:
    """Open Parquet files.

    label, image: the columns of the labels and the images; None: chosen by name, or the only column of a suitable type.

    Raises:
        InputError: missing or damaged files, a missing column, or several suitable columns.
    """
    root, files = _list_files(place)
    shards = group_by_split(root, files)
    base = "train" if "train" in shards else next(iter(shards))
    schema = _read(shards[base][0], _read_schema)
    image_column, column = _image_column(schema, image, place), _label_column(schema, label, place)
    names = None if _is_integer(schema.field(column).type) else _unique_texts(shards[base], column)
    stated = _stated_names(shards[base], column)

    def load_later(files: list[Path]) -> Callable[[], Examples]:
        return lambda: _load_split(files, image_column, column, names, stated)

    splits = {name: load_later(files) for name, files in shards.items()}
    first = splits[base]()
    classes = names or stated.names or numbered_classes(first.targets, place)
    notes = () if column in (label, "label") else (f"classes are the column {column!r}",)
    return DatasetSplits(place, splits | {base: lambda: first}, "classes", classes, notes=notes)


def _list_files(place: str) -> tuple[Path, list[Path]]:
    """Return the folder that contains all files, and the files."""
    path = Path(place)
    if path.is_dir():
        root, files = path, sorted(path / name for name in walk_files(str(path), (".parquet",)))
    else:
        files = [path] if path.is_file() else [Path(name) for name in sorted(glob.glob(str(path)))]
        root = common_folder(files) if files else path
    if not files:
        raise InputError(
            f"{place} has no Parquet files: give parquet:PATH with PATH/train-00000-of-00001.parquet and the like inside"
        )
    for file in files:
        refuse_holes(file)
    return root, files


def _read(file: Path, read: Callable[..., Any], **options: Any) -> Any:
    """Call a function of pyarrow on a file; its errors become one-line InputErrors."""
    import pyarrow as pa

    try:
        return read(file, **options)
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise_if_inaccessible(error, file)
        raise InputError(f"{file} cannot be read as Parquet ({error_text(error)}): fetch it again") from None


def _read_schema(file: Path) -> Any:
    """Return the schema of a file, whose names of columns are valid text and differ."""
    import pyarrow.parquet as pq

    schema = pq.read_schema(file)
    if len(set(schema.names)) < len(schema.names):  # the names are decoded only here
        raise InputError(f"{file} has two columns of one name: its columns are {', '.join(schema.names)}")
    return schema


# Columns --------------------------------------------------------------------------------------------------------------


def _image_column(schema: Any, requested: str | None, place: str) -> str:
    """Return the path of the column of image bytes, such as "image.bytes"."""
    import pyarrow as pa

    def bytes_in(field: Any) -> str:
        if pa.types.is_binary(field.type) or pa.types.is_large_binary(field.type):
            return str(field.name)
        if pa.types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0:
            return f"{field.name}.bytes"
        return ""

    candidates = {field.name: inside for field in schema if (inside := bytes_in(field))}
    return candidates[_choose_column("image", ("image", "img"), requested, list(candidates), schema.names, place)]


def _label_column(schema: Any, requested: str | None, place: str) -> str:
    """Return the column of labels.  A column of text is taken only by its name: others may hold captions, for instance."""
    named = requested or "label"
    candidates = [
        field.name
        for field in schema
        if _is_integer(field.type) or (field.name == named and _is_class_name_type(field.type))
    ]
    if not requested and "label" in schema.names and "label" not in candidates:
        raise InputError(
            f"{place} has {schema.field('label').type} in its column 'label': expected integers or text; "
            "write it so, or choose another column, PATH?label=COLUMN"
        )
    return _choose_column("label", ("label",), requested, candidates, schema.names, place)


def _is_integer(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind))


def _is_class_name_type(kind: Any) -> bool:
    """Return whether a type can hold names of classes: text, also dictionary-encoded, or booleans."""
    import pyarrow as pa

    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_boolean(kind))


def _choose_column(
    what: str, usual: Sequence[str], requested: str | None, candidates: list[str], names: list[str], place: str
) -> str:
    """Return the requested column, or the one with a usual name, or the only candidate.

    what: "image" or "label", the option that chooses a column.
    candidates: the columns of a suitable type, of all columns `names`.
    """
    holds, hint = ("bytes", "") if what == "image" else ("integers", "; choose a column of text by PATH?label=COLUMN")
    if requested is not None and requested not in candidates:
        raise InputError(
            f"{place} has no column {requested!r} of {holds}{' or text' * (what == 'label')}: "
            f"its columns are {', '.join(names)}{nearest(requested, candidates)}"
        )
    chosen = [requested] if requested is not None else [name for name in usual if name in candidates][:1] or candidates
    if len(chosen) == 1:
        return chosen[0]
    if not chosen:
        raise InputError(f"{place} has no column of {holds} for the {what}s: its columns are {', '.join(names)}{hint}")
    raise InputError(f"{place} has several columns for the {what}s, {', '.join(chosen)}: choose, PATH?{what}={chosen[0]}")


def _class_names(schema: Any, label: str) -> tuple[str, ...]:
    """Return the names of the classes from the metadata of Hugging Face's datasets library, () if there are none."""
    try:
        metadata = bounded_json.parse_object((schema.metadata or {})[b"huggingface"], max_bytes=_MAX_METADATA_BYTES)
        return tuple(map(str, metadata["info"]["features"][label]["names"]))
    except (KeyError, TypeError, ValueError):
        return ()


def _stated_names(files: Sequence[Path], label: str) -> _StatedNames:
    """Return the first of the files that states names of its classes, or the first file and no names."""
    found = ((file, _class_names(_read(file, _read_schema), label)) for file in files)
    return _StatedNames(*next(((file, names) for file, names in found if names), (files[0], ())))


def _refuse_other_names(file: Path, label: str, stated: _StatedNames) -> None:
    """Refuse a file that states another name for a class: the same number means different classes there."""
    others = _class_names(_read(file, _read_schema), label)
    for number, (name, other) in enumerate(zip(stated.names, others, strict=False)):
        if name != other:
            raise InputError(
                f"{file} has the name {other!r} for class {number}, and {stated.file} has {name!r}: "
                "write both with the same list of names, or with names instead of numbers as labels"
            )


# Labels ---------------------------------------------------------------------------------------------------------------


def _read_labels(file: Path, label: str, text: bool) -> Any:
    """Return a column of integers or of text.

    text: whether the first file's column is text.

    Raises:
        InputError: a missing column, missing values, or another type than in the first file.
    """
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    meta, schema = _read(file, pq.read_metadata), _read(file, _read_schema)
    if meta.num_rows > (size := file.stat().st_size):
        raise InputError(f"{file} has {meta.num_rows:,} rows in {size:,} bytes, too few for as many images: fetch it again")
    if (place := schema.get_field_index(label)) < 0:
        raise InputError(
            f"{file} has no column {label!r}: each image needs one; images without labels cannot be used for training "
            "or evaluation, so hold out another split, or a share such as 0.2"
        )
    if not (_is_class_name_type if text else _is_integer)(kind := schema.field(place).type):
        expected = "text" if text else "integers"
        raise InputError(f"{file} has {kind} in its column {label!r}: expected {expected}, as in the first file")
    _check_label_chunks(file, meta, label)
    as_dictionary = [label] if pa.types.is_string(kind) or pa.types.is_large_string(kind) else None
    column = _read(file, pq.read_table, columns=[label], read_dictionary=as_dictionary)[label]
    if text:
        _limit_text_bytes(file, label, column)
        column = column.cast(pa.string())
        _read(file, lambda _: column.validate(full=True))  # that the texts are UTF-8
        column = pc.if_else(pc.equal(column, ""), pa.scalar(None, pa.string()), column)
    if column.null_count:
        rows = f"{column.null_count:,} row{'s' * (column.null_count > 1)}"
        raise InputError(f"{file} has {rows} without a {label}: each image needs one")
    return column


def _check_label_chunks(file: Path, meta: Any, label: str) -> None:
    """Refuse a file that claims fewer rows than its row groups have labels: pyarrow would allocate all of the labels.

    Pages of labels that decompress to far more than their size are also refused, by the sizes in their headers.
    """
    place = _column_place(file, meta, label)
    groups = [meta.row_group(number) for number in range(meta.num_row_groups)]
    counts = [group.num_rows for group in groups]
    values = [group.column(place).num_values for group in groups]
    if sum(counts) != meta.num_rows or values != counts or min(counts, default=0) < 0:
        raise InputError(
            f"{file} has {meta.num_rows:,} rows, but {sum(counts):,} in its row groups and {sum(values):,} values in its "
            f"column {label!r}: fetch it again"
        )
    for number in range(meta.num_row_groups):
        chunk = _locate_chunk(str(file), meta, number, place)
        try:
            check_page_sizes(chunk)
        except Exception as error:  # damaged pages cause many kinds of exceptions
            raise_if_inaccessible(error, file)
            raise InputError(f"{file} has labels that cannot be read ({error_text(error)}): fetch it again") from None


def _column_place(file: Path, meta: Any, column: str) -> int:
    """Return the number of a column among those that hold values, given its path such as "image.bytes"."""
    paths = _read(file, lambda _: [meta.schema.column(i).path for i in range(meta.num_columns)])
    place = paths.index(column) if column in paths else None
    if place is None:
        raise InputError(f"{file} has no column {column}, which the first file has: give files of one data set")
    return place


def _limit_text_bytes(file: Path, label: str, column: Any) -> None:
    """Refuse a dictionary-encoded column of long texts repeated very often; decoding it would copy each of them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    total = 0
    for chunk in column.chunks:
        if pa.types.is_dictionary(chunk.type) and not pa.types.is_boolean(chunk.type.value_type):
            lengths = pc.take(pc.binary_length(chunk.dictionary), chunk.indices)
            total += pc.sum(pc.cast(lengths, pa.int64())).as_py() or 0
    if total > _MAX_METADATA_BYTES + _MAX_RATIO * file.stat().st_size:
        raise InputError(f"{file} has {total:,} bytes of text in its column {label!r}: expected names of classes")


def _unique_texts(files: list[Path], label: str) -> tuple[str, ...]:
    """Return the different texts in a column, sorted."""
    return tuple(sorted({text for file in files for text in _read_labels(file, label, True).unique().to_pylist()}))


def _load_targets(file: Path, label: str, names: tuple[str, ...] | None) -> NDArray[np.int64]:
    """Return the class numbers of a file's images, (N,): the column's integers, or the index of its texts in `names`."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = _read_labels(file, label, names is not None)
    if names is not None:
        indices = pc.index_in(column, value_set=pa.array(names, pa.string()))
        if indices.null_count:
            other = column.filter(pc.is_null(indices))[0].as_py()
            raise InputError(f"{file} has the {label} {other!r}, which has no training images: add some, or remove it")
        column = indices
    return to_class_numbers(column.to_numpy(), file)


# Images ---------------------------------------------------------------------------------------------------------------


def _load_split(
    files: list[Path], image_column: str, label: str, names: tuple[str, ...] | None, stated: _StatedNames
) -> Examples:
    """Return the examples of a split: the locations of its images, and its labels.

    names: the classes, if the labels are text.
    stated: the names of the classes, if the labels are numbers.
    """
    import pyarrow.parquet as pq

    targets: list[NDArray[np.int64]] = []
    chunks: list[ColumnChunk] = []
    groups: list[tuple[int, int]] = []  # for each row group: its number in its file, and its first row there
    counts = [0]
    for file in files:
        meta, row = _read(file, pq.read_metadata), 0
        if names is None:
            _refuse_other_names(file, label, stated)
        targets.append(_load_targets(file, label, names))
        place = _column_place(file, meta, image_column)
        _refuse_delta_encodings(file, meta, place)
        for number in range(meta.num_row_groups):
            chunks.append(_locate_chunk(str(file), meta, number, place))
            groups.append((number, row))
            row += meta.row_group(number).num_rows
            counts.append(meta.row_group(number).num_rows)
    reader = _ParquetImages(chunks, np.array(groups, np.int64).reshape(-1, 2), np.cumsum(counts), image_column)
    return make_examples(reader, np.concatenate(targets))


def _refuse_delta_encodings(file: Path, meta: Any, place: int) -> None:
    """Refuse encodings of images in which a value is not in one range of bytes, such as DELTA_BYTE_ARRAY."""
    for number in range(meta.num_row_groups):
        column = meta.row_group(number).column(place)
        if delta := next((encoding for encoding in column.encodings if encoding.startswith("DELTA_")), None):
            raise InputError(
                f"{file} has {column.path_in_schema} in the encoding {delta}, which is not read: "
                "write it with PLAIN or dictionary encoding"
            )


def _locate_chunk(file: str, meta: Any, number: int, place: int) -> ColumnChunk:
    """Return the location of column `place` in row group `number`."""
    chunk, column = meta.row_group(number).column(place), meta.schema.column(place)
    if column.max_repetition_level:
        raise InputError(f"{file} has lists in {column.path}: one value a row is expected")
    starts = [start for start in (chunk.dictionary_page_offset, chunk.data_page_offset) if start]
    sizes = chunk.total_compressed_size, chunk.total_uncompressed_size, meta.row_group(number).num_rows
    return ColumnChunk(file, min(starts, default=0), *sizes, chunk.compression, column.max_definition_level)


class _ParquetImages:
    """An `ImageReader` of the rows of Parquet files.

    chunks: the column chunk of the images in each row group.
    groups: (G, 2), each row group's number in its file and its first row there.
    starts: (G + 1,), each row group's first row over all files, and the number of all rows.
    """

    def __init__(
        self, chunks: list[ColumnChunk], groups: NDArray[np.int64], starts: NDArray[np.int64], image_column: str
    ) -> None:
        self._chunks, self._groups, self._starts, self._image_column = chunks, groups, starts, image_column
        self._values = [LazyValue(partial(ChunkValues, chunk)) for chunk in chunks]
        self.files = name_files((chunk.path for chunk in chunks), image_column)

    def __call__(self, i: int) -> Image.Image:
        group = self._group(i)
        try:
            data = self._values[group]()[i - int(self._starts[group])]
        except Exception as error:  # damaged pages cause many kinds of exceptions
            raise_if_inaccessible(error, LazyName(self, i))
            raise InputError(
                f"{self.name(i)} cannot be read ({error_text(error)}): fetch or write the file again"
            ) from None
        if not data:
            raise InputError(f"{self.name(i)} holds no image: remove the row")
        return decode(data, LazyName(self, i))

    def name(self, i: int) -> str:
        group = self._group(i)
        number, first = self._groups[group].tolist()
        inside = i - int(self._starts[group])
        path = self._path(group, number, inside)
        return f"{Path(self._chunks[group].path).name} row {first + inside}{f' ({path})' if path else ''}"

    def _group(self, i: int) -> int:
        return int(np.searchsorted(self._starts, i, "right")) - 1

    def _path(self, group: int, number: int, inside: int) -> str:
        """Return the path of the original image from the file, or ""."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        column, dot, _ = self._image_column.rpartition(".")
        if not dot:
            return ""
        try:
            with pq.ParquetFile(self._chunks[group].path) as file:
                if file.schema_arrow.field(column).type.get_field_index("path") < 0:
                    return ""
                return file.read_row_group(number, columns=[f"{column}.path"])[column][inside].as_py()["path"] or ""
        except (OSError, KeyError, TypeError, pa.ArrowException):
            return ""  # damage is reported when the image is read
