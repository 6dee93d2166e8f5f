"""Data sources with many images per file, or a table: Parquet, the hub, WebDataset shards, csv."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import re
import socket
import tarfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
cloudpickle = pytest.importorskip("cloudpickle")

from tests.train.data.test_sources import DATA, deny_access, encode, error_message, random_image, requires_data
from train.data.sources import FileAccessError, open_dataset, parquet_chunks
from train.data.sources.tar import expand_braces
from vit_spec import InputError

RNG = np.random.default_rng(1)
PNGS = [encode(random_image((10, 10))) for _ in range(12)]


def shows_image(image: Image.Image, png: bytes) -> bool:
    return np.array_equal(image, Image.open(io.BytesIO(png)))


# Parquet --------------------------------------------------------------------------------------------------------------


def write_parquet(
    path: Path, images: Sequence[Any] = PNGS, metadata: Mapping[str, str] | None = None, **columns: Any
) -> str:
    """Write a Parquet file as on the hub; return the value of --data for its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = pa.array([{"bytes": image, "path": f"cat_{i}.png"} for i, image in enumerate(images)])
    columns = columns or {"label": np.arange(len(images)) % 3}
    pq.write_table(pa.table({"image": rows, **columns}).replace_schema_metadata(metadata), path, row_group_size=5)
    return f"parquet:{path.parent}"


def class_names(*names: str) -> dict[str, str]:
    """Return the metadata with which Hugging Face's datasets library states the names of the classes."""
    return {"huggingface": json.dumps({"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}})}


@requires_data("cifar10")
def test_cifar10_in_parquet_is_10000_images_for_training_and_10000_for_testing() -> None:
    source = open_dataset(f"parquet:{DATA}/cifar10")
    assert (len(source.train), len(source.held_out), source.classes) == (10_000, 10_000, tuple("0123456789"))
    assert np.bincount(source.train.targets).tolist() == [1000] * 10 and source.train.read(9_999).size == (32, 32)


def test_file_names_give_the_splits(tmp_path: Path) -> None:
    write_parquet(tmp_path / "data" / "train-00000-of-00002.parquet")
    write_parquet(tmp_path / "data" / "train-00001-of-00002.parquet", PNGS[::-1])
    write_parquet(tmp_path / "data" / "validation-00000-of-00001-0123456789abcdef.parquet", PNGS[:3])
    source = open_dataset(f"parquet:{tmp_path}")
    assert (len(source.train), len(source.held_out)) == (24, 3)
    assert [shows_image(source.train.read(i), (PNGS + PNGS[::-1])[i]) for i in range(24)] == [True] * 24


def test_folder_names_give_the_splits(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train" / "0.parquet")
    write_parquet(tmp_path / "test" / "0.parquet", PNGS[:3])
    assert len(open_dataset(f"parquet:{tmp_path}").held_out) == 3


@pytest.mark.parametrize("form", ["{}/a.parquet", "{}/*.parquet", "{}"])
def test_a_share_of_a_file_a_glob_or_a_folder_without_splits_is_held_out(tmp_path: Path, form: str) -> None:
    write_parquet(tmp_path / "a.parquet")
    source = open_dataset(f"parquet:{form.format(tmp_path)}", 0.25)
    assert (len(source.train), len(source.held_out)) == (9, 3)


def test_an_image_is_named_by_file_row_and_path(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train-0.parquet")
    source = open_dataset(write_parquet(tmp_path / "test-0.parquet"))
    assert source.train.names[7] == "train-0.parquet row 7 (cat_7.png)"


def test_classes_have_the_names_in_the_hubs_metadata(tmp_path: Path) -> None:
    table = pa.table({"image": pa.array(PNGS), "label": np.arange(12) % 3})  # bytes, not a struct
    pq.write_table(table.replace_schema_metadata(class_names("ant", "bee", "cat")), tmp_path / "a.parquet")
    source = open_dataset(f"parquet:{tmp_path}", 0.25)
    assert source.classes == ("ant", "bee", "cat") and source.train.names[0] == "a.parquet row 0"


@pytest.mark.parametrize("first, other", [("train-0", "test-0"), ("train-0", "train-1"), ("train-1", "train-2")])
def test_files_with_different_names_for_a_class_number_are_refused(tmp_path: Path, first: str, other: str) -> None:
    write_parquet(tmp_path / "train-0.parquet")
    write_parquet(tmp_path / f"{first}.parquet", metadata=class_names("ant", "bee", "cat"))
    write_parquet(tmp_path / f"{other}.parquet", label=np.arange(12) % 2, metadata=class_names("bee", "cat"))
    assert error_message(f"parquet:{tmp_path}") == (
        f"{tmp_path / other}.parquet has the name 'bee' for class 0, and {tmp_path / first}.parquet has 'ant': "
        "write both with the same list of names, or with names instead of numbers as labels"
    )


def test_files_that_state_fewer_or_no_names_of_the_same_classes_are_read(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train-0.parquet", metadata=class_names("ant", "bee", "cat"))
    write_parquet(tmp_path / "train-1.parquet")
    source = open_dataset(write_parquet(tmp_path / "val-0.parquet", PNGS[:2], metadata=class_names("ant", "bee")))
    assert source.classes == ("ant", "bee", "cat") and len(source.train) == 24


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
def test_an_encoding_that_is_not_read_is_refused_with_a_remedy(tmp_path: Path, encoding: str) -> None:
    table = pa.table({"image": pa.array(PNGS), "label": np.arange(12) % 3})
    pq.write_table(table, tmp_path / "a.parquet", use_dictionary=False, column_encoding={"image": encoding})
    assert error_message(f"parquet:{tmp_path}") == (
        f"{tmp_path / 'a.parquet'} has image in the encoding {encoding}, which is not read: "
        "write it with PLAIN or dictionary encoding"
    )


@pytest.mark.parametrize("names", [("image", "label", "label"), ("image", "image", "label")])
def test_two_columns_of_one_name_are_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    columns = {"image": pa.array(PNGS), "label": pa.array(np.arange(12) % 3)}
    pq.write_table(pa.Table.from_arrays([columns[name] for name in names], names=names), tmp_path / "a.parquet")
    assert f"has two columns of one name: its columns are {', '.join(names)}" in error_message(f"parquet:{tmp_path}")


LARGE = [RNG.bytes(int(size)) for size in RNG.integers(1, 200_000, 12)]  # incompressible


@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "zstd", "lz4", "brotli"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("dictionary", [True, False])
@pytest.mark.parametrize(
    "values", [PNGS, LARGE, PNGS[:1] * 12, [None, *LARGE[:5], None, b""]], ids=["png", "large", "one", "gaps"]
)
def test_values_match_pyarrow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str, version: str, dictionary: bool, values: list[Any]
) -> None:
    monkeypatch.setattr(parquet_chunks, "_SMALL_PAGE", 0)  # read blocks also of small pages
    options = {"compression": compression, "data_page_version": version, "use_dictionary": dictionary}
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": pa.array(values, pa.binary())}), path, data_page_size=1 << 12, **options)
    meta = pq.read_metadata(path)
    column = meta.row_group(0).column(0)
    start = min(filter(None, (column.dictionary_page_offset, column.data_page_offset)))
    sizes = column.total_compressed_size, column.total_uncompressed_size, len(values)
    chunk = parquet_chunks.ColumnChunk(str(path), start, *sizes, column.compression, 1)
    found = parquet_chunks.ChunkValues(chunk)
    assert [found[row] for row in reversed(range(len(found)))] == values[::-1]


def test_the_offsets_of_snappys_blocks_are_found() -> None:
    data = b"".join(LARGE) + bytes(300_000)
    packed = pa.Codec("snappy").compress(data, asbytes=True)
    cuts = parquet_chunks._snappy_block_offsets(packed)
    assert cuts is not None and len(cuts) == -(-len(data) // 65_536) + 1 and cuts[-1] == len(packed)


def test_a_copy_from_an_earlier_block_gives_no_block_offsets() -> None:
    literal = bytes([61 << 2]) + (65_535).to_bytes(2, "little") + bytes(65_536)
    copy = bytes([3 << 2 | 2]) + (5).to_bytes(2, "little")  # copies four bytes from five bytes before, in the block before
    packed = bytes([0x84, 0x80, 0x04]) + literal + copy
    assert (
        pa.Codec("snappy").decompress(packed, 65_540, asbytes=True) == bytes(65_540)
        and parquet_chunks._snappy_block_offsets(packed) is None
    )


def test_the_page_cache_stays_within_its_limit() -> None:
    recent, made = parquet_chunks._PageCache(25), []
    for key in (1, 2, 1, 3, 1, 2):
        recent.get(key, lambda key=key: made.append(key) or bytes(10))
    assert made == [1, 2, 3, 2]


def test_a_pickled_reader_is_small_and_reads_the_same(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train-0.parquet", PNGS * 20)
    source = open_dataset(write_parquet(tmp_path / "test-0.parquet"))
    assert shows_image(source.train.read(3), PNGS[3])
    pickled = cloudpickle.dumps(source.train.read)
    assert shows_image(cloudpickle.loads(pickled)(3), PNGS[3])
    assert len(pickled) < sum(map(len, PNGS))


def test_the_splits_of_a_glob_may_lie_in_several_folders(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train" / "0.parquet")
    write_parquet(tmp_path / "val" / "0.parquet", PNGS[:3])
    source = open_dataset(f"parquet:{tmp_path}/*/*.parquet")
    assert (len(source.train), len(source.held_out)) == (12, 3)


def test_several_label_columns_are_refused_with_the_option_that_chooses(tmp_path: Path) -> None:
    spec = write_parquet(tmp_path / "a.parquet", fine_label=np.arange(12) % 4, coarse_label=np.arange(12) % 2)
    assert "fine_label, coarse_label: choose, PATH?label=fine_label" in error_message(spec)
    assert open_dataset(f"{spec}?label=coarse_label", 0.5).classes == ("0", "1")


def test_a_missing_column_is_refused_with_the_existing_ones(tmp_path: Path) -> None:
    spec = write_parquet(tmp_path / "a.parquet")
    assert "has no column 'lbl' of integers or text: its columns are image, label; did you mean 'label'?" in error_message(
        f"{spec}?label=lbl"
    )


def test_a_number_above_those_of_int64_is_refused_as_it_is(tmp_path: Path) -> None:
    labels = 2**63 + np.arange(12, dtype=np.uint64)
    message = "has the class number 9,223,372,036,854,775,819: expected class numbers from 0, below 100,000"
    assert message in error_message(write_parquet(tmp_path / "a.parquet", label=labels))
    np.savez(tmp_path / "a.npz", x_train=np.zeros((12, 5, 5), np.uint8), y_train=labels)
    assert message in error_message(f"npz:{tmp_path / 'a.npz'}")


def test_a_number_too_high_for_a_class_is_refused(tmp_path: Path) -> None:
    spec = write_parquet(tmp_path / "a.parquet", image_id=np.arange(12) * 1_000_000)
    assert "has the class number 11,000,000: expected class numbers from 0, below 100,000" in error_message(spec)


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (["dog", "ant", "cat"] * 4, ("ant", "cat", "dog")),
        (pa.array(["dog", "ant", "cat"] * 4).dictionary_encode(), ("ant", "cat", "dog")),
        (pa.array(["dog", "ant", "cat"] * 4, pa.large_string()), ("ant", "cat", "dog")),
        ([True, False, True] * 4, ("false", "true")),
    ],
    ids=["text", "categories", "large", "flags"],
)
def test_labels_of_text_are_sorted_classes(tmp_path: Path, labels: Any, classes: Any) -> None:
    write_parquet(tmp_path / "train-0.parquet", label=labels, width=np.arange(12))
    source = open_dataset(write_parquet(tmp_path / "test-0.parquet", PNGS[:2], label=labels[:2], width=np.arange(2)))
    first = len(classes) - 1
    assert source.classes == classes and source.train.targets.tolist() == [first, 0, 1] * 4
    assert source.held_out.targets.tolist() == [first, 0]


def test_a_held_out_label_of_text_without_training_images_is_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train-0.parquet", label=["a", "b"] * 6)
    message = error_message(write_parquet(tmp_path / "test-0.parquet", label=["a", "c"] * 6))
    assert "test-0.parquet has the label 'c', which has no training images" in message


def test_an_empty_label_counts_as_missing(tmp_path: Path) -> None:
    assert "has 3 rows without a label" in error_message(
        write_parquet(tmp_path / "a.parquet", label=["a", "b", "c", ""] * 3)
    )


def test_a_label_column_of_another_type_is_refused_even_beside_other_integers(tmp_path: Path) -> None:
    spec = write_parquet(tmp_path / "a.parquet", label=np.arange(12) / 2, image_id=np.arange(12))
    message = error_message(spec)
    assert "has double in its column 'label': expected integers or text" in message and "PATH?label=COLUMN" in message


def test_text_in_another_column_is_used_only_on_request(tmp_path: Path) -> None:
    spec = write_parquet(tmp_path / "a.parquet", kind=["a", "b"] * 6)
    assert "its columns are image, kind; choose a column of text by PATH?label=COLUMN" in error_message(spec)
    assert open_dataset(f"{spec}?label=kind", 0.5).classes == ("a", "b")


def test_a_note_names_the_only_column_of_integers(tmp_path: Path) -> None:
    assert (
        "classes are the column 'digit'"
        in open_dataset(write_parquet(tmp_path / "a.parquet", digit=np.arange(12) % 2)).notes
    )


def test_an_inaccessible_parquet_file_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").symlink_to("a.parquet")
    message = error_message(f"parquet:{tmp_path}")
    assert message == f"{tmp_path}/a.parquet cannot be read (Too many levels of symbolic links): repair the link"


def test_parquet_rows_that_become_unreadable_are_an_access_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parquet(tmp_path / "train-0.parquet")
    source = open_dataset(write_parquet(tmp_path / "test-0.parquet"))
    deny_access(monkeypatch, tmp_path / "train-0.parquet")
    with pytest.raises(
        FileAccessError, match=r"train-0\.parquet row 11 .*cannot be read \(Permission denied\): let this user"
    ):
        source.train.read(11)


def test_splits_in_linked_folders_are_found(tmp_path: Path) -> None:
    write_parquet(tmp_path / "disk" / "0.parquet")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train").symlink_to(tmp_path / "disk")
    assert (
        len(open_dataset(write_parquet(tmp_path / "set" / "test" / "0.parquet", PNGS[:3]).removesuffix("/test")).train)
        == 12
    )


def test_a_file_whose_labels_are_text_is_named(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train-0.parquet")
    spec = write_parquet(tmp_path / "train-1.parquet", label=["a"] * 12)
    assert "train-1.parquet has string in its column 'label': expected integers, as in the first" in error_message(spec)


def test_a_split_without_labels_is_refused_with_a_remedy(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train-0.parquet")
    spec = write_parquet(tmp_path / "test-0.parquet", text=["a"] * 12)
    message = error_message(spec)
    assert "test-0.parquet has no column 'label'" in message and "hold out another split, or a share" in message
    assert len(open_dataset(spec, 0.25).train) == 9


def test_a_row_without_a_label_is_refused(tmp_path: Path) -> None:
    spec = write_parquet(tmp_path / "a.parquet", label=pa.array([None, *range(11)], pa.int64()))
    assert "has 1 row without a label" in error_message(spec)


def test_a_row_without_an_image_is_named(tmp_path: Path) -> None:
    spec = write_parquet(tmp_path / "train-0.parquet", [None, *PNGS[1:]])
    write_parquet(tmp_path / "test-0.parquet")
    with pytest.raises(InputError, match=r"train-0\.parquet row 0 \(cat_0\.png\) holds no image"):
        open_dataset(spec).train.read(0)


def test_a_damaged_image_is_named(tmp_path: Path) -> None:
    spec = write_parquet(tmp_path / "train-0.parquet", [PNGS[0][:60], *PNGS[1:]])
    write_parquet(tmp_path / "test-0.parquet")
    with pytest.raises(InputError, match=r"train-0\.parquet row 0 \(cat_0\.png\) cannot be read"):
        open_dataset(spec).train.read(0)


def test_a_file_that_is_cut_short_after_it_was_opened_is_named(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train-0.parquet")
    source = open_dataset(write_parquet(tmp_path / "test-0.parquet"))
    (tmp_path / "train-0.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match=r"train-0.parquet row 11 cannot be read \(it is cut short\)"):
        source.train.read(11)


def test_a_file_that_is_not_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and no more")
    assert "a.parquet cannot be read as Parquet" in error_message(f"parquet:{tmp_path}")


def test_a_missing_shard_is_refused(tmp_path: Path) -> None:
    spec = write_parquet(tmp_path / "train-00001-of-00003.parquet")
    assert "has 1 of 3 files like train-00001-of-00003.parquet, without number 0" in error_message(spec)


def test_a_file_without_a_split_among_splits_is_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train-0.parquet")
    assert "more.parquet belongs to no split" in error_message(write_parquet(tmp_path / "more.parquet"))


def test_several_data_sets_in_one_folder_are_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a" / "train-0.parquet")
    write_parquet(tmp_path / "b" / "train-0.parquet")
    assert f"has train files in {tmp_path / 'a'} and in {tmp_path / 'b'}: give one" in error_message(f"parquet:{tmp_path}")


def test_a_folder_without_parquet_is_refused_with_the_expected_files(tmp_path: Path) -> None:
    assert "has no Parquet files: give parquet:PATH with" in error_message(f"parquet:{tmp_path}")


# The hub --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the hub's library with an empty cache and no network."""

    def refuse(*arguments: Any, **options: Any) -> Any:
        attempts.append(arguments)
        raise OSError("no network")

    attempts: list[Any] = []
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"waits {seconds} s for a network"))
    library = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(pytest.importorskip("huggingface_hub.constants"), "HF_HUB_CACHE", "/nowhere")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield library
    assert len(attempts) <= 1, "asks again"


def test_without_a_network_the_hub_is_refused_at_once_with_a_remedy(hub: Any) -> None:
    assert error_message("hf://owner/set") == (
        "hf://owner/set is not complete in the cache and the hub is out of reach: give parquet:PATH instead"
    )


def serve_folder(hub: Any, monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[dict[str, Any]]:
    """Make the hub serve the files of a folder, which is also the cache after a download; return the list of downloads."""
    asked: list[dict[str, Any]] = []

    def snapshot(repo: str, **options: Any) -> str:
        if options.get("local_files_only") and not asked:
            raise hub.errors.LocalEntryNotFoundError("not there")
        asked.append({"repo": repo, **options})
        return str(folder)

    def listed(self: Any, repo: str, **options: Any) -> list[str]:
        return [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    monkeypatch.setattr(hub.HfApi, "list_repo_files", listed)
    monkeypatch.setattr("train.data.sources.hub.is_reachable", lambda: True)
    return asked


def test_a_data_set_of_the_hub_is_fetched_and_read(hub: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_parquet(tmp_path / "data" / "train-00000-of-00001.parquet")
    write_parquet(tmp_path / "data" / "test-00000-of-00001.parquet", PNGS[:3])
    (tmp_path / "README.md").write_text("a card")
    asked = serve_folder(hub, monkeypatch, tmp_path)
    source = open_dataset("hf://owner/set@v1.0/data")
    assert (len(source.train), len(source.held_out)) == (12, 3)
    assert (asked[0]["repo"], asked[0]["repo_type"], asked[0]["revision"]) == ("owner/set", "dataset", "v1.0")
    assert sorted(asked[0]["allow_patterns"]) == [f"data/{split}-00000-of-00001.parquet" for split in ("test", "train")]


def test_a_complete_data_set_in_the_cache_is_used_without_a_network(
    hub: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_parquet(tmp_path / "train-00000-of-00001.parquet")
    asked = serve_folder(hub, monkeypatch, tmp_path)
    asked.append({})  # as if it had been downloaded before
    monkeypatch.setattr("train.data.sources.hub.is_reachable", lambda: False)
    source = open_dataset("hf://owner/set", 0.25)
    assert len(source.train) == 9
    assert "the hub is out of reach: of hf://owner/set only the files in the cache are used" in source.notes


def test_the_hubs_listing_decides_and_not_the_cache(hub: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_parquet(tmp_path / "hub" / "train-00000-of-00001.parquet")
    write_parquet(tmp_path / "hub" / "test-00000-of-00001.parquet", PNGS[:6])
    write_parquet(tmp_path / "cache" / "train-00000-of-00001.parquet")
    serve_folder(hub, monkeypatch, tmp_path / "hub")
    fetch = hub.snapshot_download

    def snapshot(repo: str, **options: Any) -> str:
        return str(tmp_path / "cache") if options.get("local_files_only") else fetch(repo, **options)

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    assert len(open_dataset("hf://owner/set").held_out) == 6


def test_an_incomplete_data_set_in_the_cache_is_refused_without_a_network(
    hub: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_parquet(tmp_path / "train-00000-of-00002.parquet")
    asked = serve_folder(hub, monkeypatch, tmp_path)
    asked.append({})
    monkeypatch.setattr("train.data.sources.hub.is_reachable", lambda: False)
    assert "is not complete in the cache" in error_message("hf://owner/set")


def test_a_data_set_without_parquet_is_refused_with_the_hubs_conversion(
    hub: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "a.zip").write_bytes(b"")
    asked = serve_folder(hub, monkeypatch, tmp_path)
    assert "has no Parquet files there, but a.zip: try hf://owner/set@~parquet" in error_message("hf://owner/set")
    write_parquet(tmp_path / "train" / "0.parquet")
    assert len(open_dataset("hf://owner/set@~parquet", 0.25).train) == 9
    assert asked[0]["revision"] == "refs/convert/parquet"


@pytest.mark.parametrize("name", ["hf://owner", "hf://owner/../etc", "hf:owner/set", "hf://owner/set@"])
def test_a_malformed_hub_name_is_refused(name: str) -> None:
    assert "is not the name of a data set on the hub: expected hf://owner/name" in error_message(name)


# WebDataset -----------------------------------------------------------------------------------------------------------


def write_shard(path: Path, members: Mapping[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def make_samples(first: int = 0) -> dict[str, bytes]:
    parts = [(f"{first + i:06d}.png", PNGS[i], f"{first + i:06d}.cls", str(i % 3).encode()) for i in range(6)]
    return {name: data for part in parts for name, data in (part[:2], part[2:])}


def test_shards_in_a_range_are_read_by_their_splits(tmp_path: Path) -> None:
    for i in range(2):
        write_shard(tmp_path / f"set-train-00000{i}.tar", make_samples(6 * i))
    write_shard(tmp_path / "set-val-000000.tar", make_samples())
    source = open_dataset(f"tar:{tmp_path}/set-{{train-{{000000..000001}},val-000000}}.tar")
    assert (len(source.train), len(source.held_out), source.train.targets.tolist()) == (12, 6, [0, 1, 2] * 4)
    assert [shows_image(source.train.read(i), PNGS[i % 6]) for i in range(12)] == [True] * 12
    assert source.train.names[7] == "set-train-000001.tar 000007.png"


@pytest.mark.parametrize("form", ["{}", "{}/*.tar", "{}/a.tar"])
def test_a_share_of_a_folder_a_glob_or_one_shard_is_held_out(tmp_path: Path, form: str) -> None:
    write_shard(tmp_path / "a.tar", make_samples())
    source = open_dataset(f"tar:{form.format(tmp_path)}", 0.5)
    assert (len(source.train), len(source.held_out)) == (3, 3)


def test_a_class_may_be_in_json_and_names_may_be_long(tmp_path: Path) -> None:
    folder = "long" * 40  # longer than the oldest tar format allows
    parts = {f"{folder}/{i}.PNG": PNGS[i] for i in range(4)}
    parts |= {f"{folder}/{i}.json": b'{"label": %d}' % (i % 2) for i in range(4)}
    ordered = dict(sorted(parts.items()))
    source = open_dataset(f"tar:{write_shard(tmp_path / 'a.tar', ordered)}", 0.5)
    assert source.classes == ("0", "1") and source.train.targets.tolist() == [int(n[-5]) % 2 for n in source.train.names]


@pytest.mark.parametrize("form", ["{}/{{train,val}}/000.tar", "{}/*/*.tar"])
def test_the_splits_of_a_pattern_may_lie_in_several_folders(tmp_path: Path, form: str) -> None:
    for i, split in enumerate(("train", "val")):
        (tmp_path / split).mkdir()
        write_shard(tmp_path / split / "000.tar", dict([*make_samples().items()][: 12 - 6 * i]))
    source = open_dataset(f"tar:{form.format(tmp_path)}")
    assert (len(source.train), len(source.held_out)) == (6, 3)


@pytest.mark.parametrize("split", ["train", "val"])
def test_samples_whose_image_has_a_second_dot_are_left_out_with_a_note(tmp_path: Path, split: str) -> None:
    dotted = {"p.v1.png": PNGS[0], "p.v1.cls": b"0"}
    for name in ("train", "val"):
        write_shard(tmp_path / f"{name}.tar", make_samples() | (dotted if name == split else {}))
    source = open_dataset(f"tar:{tmp_path}")
    assert (len(source.train), len(source.held_out)) == (6, 6)
    assert f"1 of 7 samples from {split}.tar on have no image, such as p.v1.png, and are left out" in source.notes


def test_braces_expand_as_in_a_shell() -> None:
    assert [*expand_braces("{a,b}-{08..10}.tar")] == [f"{a}-{i}.tar" for a in "ab" for i in ("08", "09", "10")]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"0.png": PNGS[0]}, "has 0.png without 0.cls or 0.json beside it"),
        (
            {"0.png": PNGS[0], "0.cls": b"cat"},
            "has 0.cls with no class number in it: expected an integer; number the classes from 0, or extract the images "
            "into folders named by class and give folder:PATH",
        ),
        ({"0.png": PNGS[0], "0.cls": b"1_0"}, "has 0.cls with no class number in it"),
        ({"0.png": PNGS[0], "0.json": b'{"label": "1_0"}'}, "has 0.json with no class number in it"),
        (
            {"0.png": PNGS[0], "0.json": b'{"label": 2}', "0.cls": b"1"},
            "has the class 1 in 0.cls and the class 2 in 0.json: each image needs one class; leave one of these files out",
        ),
        ({"0.png": PNGS[0], "0.cls": b"9" * 23}, "has the class number 99,999,999,999,999,999,999,999 in 0.cls: expected"),
        ({"0.png": PNGS[0], "0.json": b'{"label": Infinity}'}, "has 0.json with no class number in it"),
        ({"0.png": PNGS[0], "0.json": b'{"label": 1.7}'}, "has 0.json with no class number in it"),
        ({"0.v1.png": PNGS[0]}, "has no images, but 0.v1.png: expected KEY.jpg and KEY.cls, no dot in KEY"),
    ],
    ids=["no class", "text", "underscore", "json underscore", "two classes", "large", "infinite", "halves", "no image"],
)
def test_samples_without_an_image_or_a_class_are_refused(tmp_path: Path, members: dict[str, bytes], message: str) -> None:
    assert message in error_message(f"tar:{write_shard(tmp_path / 'a.tar', members)}")


@pytest.mark.parametrize("module", [gzip, bz2, lzma])
def test_a_compressed_shard_without_the_suffix_of_one_is_refused(tmp_path: Path, module: Any) -> None:
    shard = write_shard(tmp_path / "a.tar", make_samples())
    shard.write_bytes(module.compress(shard.read_bytes()))
    message = f"{shard} is compressed and cannot be read at an offset: decompress it to a .tar first"
    assert error_message(f"tar:{shard}") == message


def test_a_json_file_without_another_class_may_stand_beside_a_class(tmp_path: Path) -> None:
    beside = (b'{"caption": "a cat"}', b'{"label": "cat"}', b'{"cls": 2}')
    parts = {"png": PNGS, "cls": (b"0", b"1", b"2"), "json": beside}
    members = {f"{i}.{part}": values[i % 3] for i in range(6) for part, values in parts.items()}
    source = open_dataset(f"tar:{write_shard(tmp_path / 'a.tar', members)}", 0.5)
    assert source.train.targets.tolist() == [i % 3 for i in map(int, (name[6] for name in source.train.names))]


@pytest.mark.parametrize("names", [("0.png", "0.png"), ("0.png", "0.jpg"), ("0.PNG", "0.cls", "0.png")])
def test_two_images_under_one_key_are_refused(tmp_path: Path, names: Sequence[str]) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name in (*names, "0.cls"):
            info = tarfile.TarInfo(name)
            info.size = 1
            archive.addfile(info, io.BytesIO(b"0"))
    message = error_message(f"tar:{tmp_path / 'a.tar'}")
    assert f"has {', '.join((*names, '0.cls'))} together under one key: give each image a key of its own" in message


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_an_image_that_is_a_link_is_refused(tmp_path: Path, kind: bytes) -> None:
    path = write_shard(tmp_path / "a.tar", make_samples())
    with tarfile.open(path, "a") as archive:
        info = tarfile.TarInfo("9.png")
        info.type, info.linkname = kind, "000000.png"
        archive.addfile(info)
    assert "has 9.png as a link: pack the file" in error_message(f"tar:{path}")


def test_data_after_a_damaged_header_are_not_lost_silently(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "a.tar", make_samples())
    with tarfile.open(path) as archive:
        at = archive.getmembers()[4].offset
    data = bytearray(path.read_bytes())
    data[at : at + 9] = b"123456789"
    path.write_bytes(data)
    assert f"has data after its end at byte {at:,}: it is damaged or two files were joined" in error_message(f"tar:{path}")


@pytest.mark.parametrize("blocks", [0, 1])
def test_a_shard_that_is_cut_short_between_two_files_is_refused(tmp_path: Path, blocks: int) -> None:
    path = write_shard(tmp_path / "a.tar", make_samples())
    with tarfile.open(path) as archive:
        last = archive.getmembers()[7]  # the .cls file of the fourth image
    path.write_bytes(path.read_bytes()[: last.offset_data + tarfile.BLOCKSIZE] + bytes(blocks * tarfile.BLOCKSIZE))
    assert "a.tar ends without its end marker: it is cut short or still being written" in error_message(f"tar:{path}")


def test_a_key_that_occurs_twice_in_a_shard_is_refused(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "a.tar", make_samples())
    with tarfile.open(path, "a") as archive:
        for member in archive.getmembers()[:2]:
            archive.addfile(member, io.BytesIO(bytes(member.size)))
    assert "a.tar has 000000.png after another image of its key: give each" in error_message(f"tar:{path}")


def test_a_key_may_occur_in_several_folders(tmp_path: Path) -> None:
    members = {f"{folder}/{name}": data for folder in "ab" for name, data in make_samples().items()}
    assert len(open_dataset(f"tar:{write_shard(tmp_path / 'a.tar', members)}", 0.5).train) == 6


def test_shards_that_were_joined_are_refused(tmp_path: Path) -> None:
    one, other = (write_shard(tmp_path / f"{i}.tar", make_samples(6 * i)) for i in range(2))
    one.write_bytes(one.read_bytes() + other.read_bytes())
    other.unlink()
    assert "has data after its end at byte" in error_message(f"tar:{one}")


def test_a_shard_without_read_permission_is_an_access_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_shard(tmp_path / "a.tar", make_samples())
    source = open_dataset(f"tar:{path}")
    deny_access(monkeypatch, path)
    with pytest.raises(FileAccessError, match=r"00000.\.png cannot be read \(Permission denied\): let this user read it"):
        source.train.read(0)
    assert error_message(f"tar:{path}") == f"{path} cannot be read (Permission denied): let this user read it"


def test_a_shard_that_is_cut_short_after_it_was_opened_is_named(tmp_path: Path) -> None:
    source = open_dataset(f"tar:{write_shard(tmp_path / 'a.tar', make_samples())}")
    (tmp_path / "a.tar").write_bytes(b"")
    with pytest.raises(InputError, match=r"a\.tar 00000.\.png cannot be read \(it is cut short\): fetch the file again"):
        source.train.read(0)


def test_a_compressed_shard_is_refused_with_a_remedy(tmp_path: Path) -> None:
    assert "a.tar.gz is compressed" in error_message(f"tar:{write_shard(tmp_path / 'a.tar.gz', make_samples(), 'w:gz')}")


def test_a_missing_shard_of_a_range_is_named(tmp_path: Path) -> None:
    write_shard(tmp_path / "0.tar", make_samples())
    assert f"{tmp_path / '1.tar'} is not there" in error_message(f"tar:{tmp_path}/{{0..1}}.tar")


def test_a_file_that_is_not_a_tar_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"text" * 999)
    assert "a.tar cannot be read as a tar file" in error_message(f"tar:{tmp_path / 'a.tar'}")


# Tables ---------------------------------------------------------------------------------------------------------------


def write_table(folder: Path, columns: Mapping[str, Sequence[Any]], image: str = "file", absent: int = 0) -> str:
    """Write a table of twelve images, and all but the first `absent` images beside it; return the value of --data."""
    (folder / "images_001").mkdir(exist_ok=True)
    for i in range(absent, 12):
        (folder / "images_001" / f"{i:02d}.png").write_bytes(PNGS[i])
    with (folder / "t.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([image, *columns])
        writer.writerows(zip([f"{i:02d}.png" for i in range(12)], *columns.values(), strict=True))
    return f"csv:{folder / 't.csv'}"


NIH_COLUMNS = {
    "Finding Labels": ["Mass|Hernia", "No Finding", "Mass", "No Finding"] * 3,
    "Patient ID": [i // 2 for i in range(12)],
}


def test_the_table_of_nih_gives_findings_and_keeps_patients_together(tmp_path: Path) -> None:
    source = open_dataset(write_table(tmp_path, NIH_COLUMNS, "Image Index"), 0.5)
    assert (source.task, source.classes) == ("labels", ("Hernia", "Mass"))
    assert np.concatenate([source.train.targets, source.held_out.targets]).sum(0).tolist() == [3, 6]
    patients = [{int(Path(name).stem) // 2 for name in part.names} for part in (source.train, source.held_out)]
    assert not patients[0] & patients[1] and "images of one 'Patient ID' are a group" in source.notes
    assert "groups kept together" in source.notes[-2]


def test_spaces_around_the_bar_and_the_case_of_no_finding_make_no_labels(tmp_path: Path) -> None:
    findings = ["Mass | Hernia", "No finding", "Mass| Hernia |", "NO FINDING | Hernia"] * 3
    source = open_dataset(write_table(tmp_path, {"Finding Labels": findings}), 0.5)
    assert source.classes == ("Hernia", "Mass")
    assert np.concatenate([source.train.targets, source.held_out.targets]).sum(0).tolist() == [9, 6]


def write_lists(folder: Path, training: Iterable[str], test: Iterable[str]) -> None:
    """Write the lists of a split beside a table."""
    for name, entries in (("train_val", training), ("test", test)):
        (folder / f"{name}_list.txt").write_text("".join(f"{entry}\n" for entry in entries))


LISTED = ("{:02d}.png", "{:02d}", "images_001/{:02d}.png", "./images_001/{:02d}", " {:02d}.png\n")


@pytest.mark.parametrize("spelling", LISTED)
def test_nihs_lists_beside_the_table_give_the_split(tmp_path: Path, spelling: str) -> None:
    spec = write_table(tmp_path, NIH_COLUMNS, "Image Index")
    write_lists(tmp_path, map(spelling.format, range(8)), map(spelling.format, range(8, 12)))
    source = open_dataset(spec)
    assert [Path(name).stem for name in source.held_out.names] == ["08", "09", "10", "11"]
    assert shows_image(source.held_out.read(1), PNGS[9])


@pytest.mark.parametrize("absent", ["train_val_list.txt", "test_list.txt"])
def test_one_list_without_the_other_gives_no_splits_and_a_note(absent: str, tmp_path: Path) -> None:
    spec = write_table(tmp_path, NIH_COLUMNS, "Image Index")
    write_lists(tmp_path, [f"{i:02d}.png" for i in range(8)], [f"{i:02d}.png" for i in range(8, 12)])
    note = f"the list of images beside the table gives no splits without {absent}"
    assert note not in open_dataset(spec).notes
    (tmp_path / absent).unlink()
    source = open_dataset(spec)
    assert note in source.notes and source.split is None


def test_lists_as_long_as_nihs_are_read(tmp_path: Path) -> None:
    spec = write_table(tmp_path, NIH_COLUMNS, "Image Index")
    others = [f"{i:08d}_000.png" for i in range(86_524)]  # 1.4 MB, of images that the table does not have
    write_lists(tmp_path, [*others, *(f"{i:02d}.png" for i in range(8))], [f"{i:02d}.png" for i in range(8, 12)])
    assert [len(part) for part in (open_dataset(spec).train, open_dataset(spec).held_out)] == [8, 4]


PATHS = ["a/im 0.png", "b/im 0.png", "im.1.png", "im.2.png"]


@pytest.mark.parametrize("column", [PATHS, [name.removesuffix(".png") for name in PATHS]])
def test_lists_may_write_paths_with_spaces_and_dots_and_the_table_no_suffixes(tmp_path: Path, column: list[str]) -> None:
    for i, name in enumerate(PATHS):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(PNGS[i])
    rows = (f"{name},{kind}\n" for name, kind in zip(column, "xyxy", strict=True))
    (tmp_path / "t.csv").write_text("".join(["file,label\n", *rows]))
    write_lists(tmp_path, PATHS[1:3], [PATHS[0], PATHS[3]])
    source = open_dataset(f"csv:{tmp_path / 't.csv'}?image=file")
    assert [os.path.relpath(name, tmp_path) for name in source.held_out.names] == [PATHS[0], PATHS[3]]
    write_lists(tmp_path, PATHS[1:3], ["im 0.png", PATHS[3]])
    message = error_message(f"csv:{tmp_path / 't.csv'}?image=file")
    assert f"names im 0.png, which may be {column[0]} or {column[1]}: write more of the path into the list" in message


@pytest.mark.parametrize(
    ("training", "test", "told"),
    [
        (range(8), range(7, 11), "2 of 12 images in none or both of .*, such as 07.png in both"),
        (range(8), range(9, 12), "1 of 12 images in none or both of .*, such as 08.png in neither"),
        ([*range(7), 77], range(8, 12), "1 of 12 images in none or both of .*, such as 07.png in neither"),
    ],
)
def test_an_image_in_none_or_both_of_the_lists_is_named(
    tmp_path: Path, training: Iterable[int], test: Iterable[int], told: str
) -> None:
    spec = write_table(tmp_path, NIH_COLUMNS, "Image Index")
    write_lists(tmp_path, (f"{i:02d}.png" for i in training), (f"{i:02d}.png" for i in test))
    assert re.search(f"{told}: correct or remove the lists", error_message(spec))


def test_another_suffix_in_a_list_is_another_image(tmp_path: Path) -> None:
    spec = write_table(tmp_path, NIH_COLUMNS, "Image Index")
    write_lists(tmp_path, (f"{i:02d}.png" for i in range(8)), (f"{i:02d}.jpg" for i in range(8, 12)))
    assert "such as 08.png in neither" in error_message(spec)


@requires_data("chest_xray")
def test_the_real_table_without_its_images_is_refused_with_their_number() -> None:
    message = error_message(f"csv:{DATA}/chest_xray/sample_labels.csv")
    assert "5,606 of 5,606 images" in message and "00000013_005.png, 00000013_026.png" in message


def test_missing_images_are_refused_with_a_remedy(tmp_path: Path) -> None:
    message = error_message(write_table(tmp_path, {"kind": ["ant", "bee"] * 6}, absent=2))
    assert "2 of 12 images of" in message and "such as 00.png, 01.png" in message and "csv:TABLE?missing=skip" in message


def test_missing_images_are_left_out_on_request(tmp_path: Path) -> None:
    source = open_dataset(f"{write_table(tmp_path, {'kind': ['ant', 'bee'] * 6}, absent=2)}?missing=skip", 0.4)
    assert (len(source.train), len(source.held_out)) == (6, 4)
    assert "2 of 12 images of the table are not there, and are left out" in source.notes


TARGET_COLUMNS = {
    "flags": ({"a": [0, 1] * 6, "b": [1, 1, 0] * 4, "age": range(12)}, "labels", ("a", "b")),
    "number": ({"age": [i / 2 for i in range(12)]}, "values", ("age",)),
    "text": ({"kind": ["bee", "ant"] * 6}, "classes", ("ant", "bee")),
    "class numbers": ({"label": [0, 1, 2] * 4}, "classes", ("0", "1", "2")),
    "two class numbers": ({"Class": [0, 1] * 6}, "classes", ("0", "1")),
    "a label beside flags": ({"label": ["bee", "ant"] * 6, "male": [0, 1, 1] * 4}, "classes", ("ant", "bee")),
    "one finding each": ({"Finding Labels": ["Mass", "No Finding", "Hernia"] * 4}, "labels", ("Hernia", "Mass")),
}


@pytest.mark.parametrize("name", TARGET_COLUMNS)
def test_the_columns_decide_the_task(tmp_path: Path, name: str) -> None:
    columns, kind, classes = TARGET_COLUMNS[name]
    source = open_dataset(write_table(tmp_path, columns), 0.25)
    assert (source.task, source.classes) == (kind, classes)


@pytest.mark.parametrize("form", ["column", "lists"])
def test_patients_in_both_given_splits_are_counted_with_an_example(tmp_path: Path, form: str) -> None:
    split = ["train"] * 7 + ["test"] * 5  # images 6 and 7 are of one patient
    columns = NIH_COLUMNS | ({"split": split} if form == "column" else {})
    spec = write_table(tmp_path, columns, "Image Index")
    for name, word in (("train_val", "train"), ("test", "test")):
        (tmp_path / f"{name}_list.txt").write_text("".join(f"{i:02d}.png\n" for i in range(12) if split[i] == word))
    shared = "groups with images in both train and test, which make results too good: 1, such as that of "
    [note] = [note for note in open_dataset(spec).notes if note.startswith(shared)]
    folder = tmp_path / "images_001"
    assert note == f"{shared}{folder / '06.png'} and {folder / '07.png'}; --held-out 0.1 keeps groups together"
    assert not any(note.startswith(shared) for note in open_dataset(spec, 0.5).notes)


def test_patients_in_one_given_split_each_give_no_note(tmp_path: Path) -> None:
    spec = write_table(tmp_path, NIH_COLUMNS | {"split": ["train"] * 8 + ["test"] * 4}, "Image Index")
    assert not any("groups with images" in note for note in open_dataset(spec).notes)


def test_the_requested_columns_are_the_targets(tmp_path: Path) -> None:
    spec = write_table(tmp_path, {"x": range(12), "y": [i / 4 for i in range(12)], "name": ["n"] * 12})
    source = open_dataset(f"{spec}?target=y,x&image=file")
    assert (source.task, source.classes) == ("values", ("y", "x"))
    i = int(Path(source.train.names[0]).stem)
    assert source.train.targets[0].tolist() == [i / 4, i] and shows_image(source.train.read(0), PNGS[i])


def test_groups_stay_together_if_a_test_split_is_set_aside(tmp_path: Path) -> None:
    table = write_table(tmp_path, NIH_COLUMNS, "Image Index")
    of_run, of_test = (open_dataset(f"{table}?test=0.34", held_out) for held_out in (None, "test"))
    patients = [
        {int(Path(name).stem) // 2 for name in examples.names}
        for examples in (of_run.train, of_run.held_out, of_test.held_out)
    ]
    assert all(patients) and len(set.union(*patients)) == sum(map(len, patients))


def test_a_requested_group_stays_together(tmp_path: Path) -> None:
    spec = write_table(tmp_path, {"age": [i / 2 for i in range(12)], "site": ["x", "y", "z"] * 4})
    source = open_dataset(f"{spec}?target=age&group=site", 0.3)
    sites = [{int(Path(name).stem) % 3 for name in part.names} for part in (source.train, source.held_out)]
    assert not sites[0] & sites[1]


def test_a_column_called_split_gives_the_splits(tmp_path: Path) -> None:
    source = open_dataset(write_table(tmp_path, {"Split": ["train", "Train", "test"] * 4, "kind": ["a", "b"] * 6}))
    assert (len(source.train), len(source.held_out)) == (8, 4)


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"kind": ["a", "b"] * 6}, "?target=kin", "has no column 'kin': its columns are file, kind; did you mean 'kind'?"),
        ({"kind": ["a", "b"] * 6, "age": range(12)}, "", "several columns that could be the targets: choose, ?target="),
        ({"kind": ["a", "b"] * 6, "age": range(12)}, "?target=kind,age", "has text in 'kind'"),
        ({"kind": ["a", ""] * 6}, "", "has no 'kind' in row 3: each image needs one"),
        ({"label": [0.5] * 12}, "", "has 'label' that are not integers"),
        ({"kind": ["a", "b"] * 6}, "?missing=drop", "the only choice is missing=skip"),
        (
            {"kind": ["a", "b"] * 6, "split": ["trian"] * 12},
            "",
            "split 'trian' in row 2: expected train, val or test; did you mean 'train'?",
        ),
        ({"age": [0.5, "nan"] * 6}, "", "has nan for 'age' in row 3: each image needs one"),
        ({}, "", "has no column of targets"),
    ],
    ids=["target", "several", "mixed", "gap", "halves", "missing", "split", "nan", "none"],
)
def test_an_ambiguous_or_invalid_table_is_refused(
    tmp_path: Path, columns: dict[str, Any], options: str, message: str
) -> None:
    assert message in error_message(write_table(tmp_path, columns) + options)


@pytest.mark.parametrize("cell", ["N/A", "NULL", "-", "?", "nan", "#N/A", "<NA>", "3,5", "about 40", "none"])
@pytest.mark.parametrize("options", ["", "?target=age", "?target=age,weight"])
def test_a_cell_that_is_not_a_number_does_not_turn_numbers_into_classes(tmp_path: Path, cell: str, options: str) -> None:
    spec = write_table(tmp_path, {"age": [*range(9), cell, 9, 10]} | ({"weight": range(12)} if "weight" in options else {}))
    message = error_message(spec + options)
    assert cell in message and "'age'" in message and "row 11" in message and "take the row out" in message


@pytest.mark.parametrize("cell", ["N/A", "null", "-", "?"])
def test_a_missing_class_number_is_refused(tmp_path: Path, cell: str) -> None:
    assert f"has {cell} for 'label' in row 4: each image needs one" in error_message(
        write_table(tmp_path, {"label": [0, 1, cell] * 4})
    )


@pytest.mark.parametrize("column", ["age", "label"])
@pytest.mark.parametrize("cell", ["inf", "-inf", "1e400", "Infinity"])
def test_an_infinite_target_is_refused_with_its_row(tmp_path: Path, column: str, cell: str) -> None:
    message = error_message(write_table(tmp_path, {column: [*range(11), cell]}))
    assert f"has {cell!r} for {column!r} in row 13: expected a finite number" in message


def test_a_column_with_decimal_commas_is_refused(tmp_path: Path) -> None:
    assert "has '0,5' for 'age' in row 2: expected a finite number such as 0.5" in error_message(
        write_table(tmp_path, {"age": [f"{i},5" for i in range(12)]})
    )


@pytest.mark.parametrize(
    "columns",
    [
        {"label": ["1", "2", "other"] * 4},
        {"kind": ["1", "two", "three"] * 4},
        {"character": [*"01ABCD"] * 2},
        {"cell": ["1_0", "0_1", "1_1"] * 4},
    ],
    ids=["named", "mostly words", "characters", "underscores"],
)
def test_names_of_classes_may_mix_numbers_and_words(tmp_path: Path, columns: dict[str, Any]) -> None:
    source = open_dataset(write_table(tmp_path, columns), 0.25)
    [cells] = columns.values()
    assert (source.task, source.classes) == ("classes", tuple(sorted({*cells})))


def test_equally_many_numbers_and_words_are_refused_with_a_remedy(tmp_path: Path) -> None:
    message = error_message(write_table(tmp_path, {"size": ["38", "XL"] * 6}))
    assert "has 'XL' for 'size' in row 3" in message and "if these are names of classes, call the column label" in message


def test_images_that_the_table_does_not_name_are_left_out_with_a_note(tmp_path: Path) -> None:
    spec = write_table(tmp_path, {"kind": ["ant", "bee"] * 6})
    (tmp_path / "images_001" / "more.png").write_bytes(PNGS[0])
    assert "files left out: 1 of the images beside the table, which it does not name" in open_dataset(spec, 0.25).notes


def test_images_in_a_linked_folder_are_found(tmp_path: Path) -> None:
    spec = write_table(tmp_path, {"kind": ["ant", "bee"] * 6})
    (tmp_path / "images_001").rename(tmp_path.parent / f"{tmp_path.name}_disk")
    (tmp_path / "images").symlink_to(tmp_path.parent / f"{tmp_path.name}_disk")
    assert len(open_dataset(spec, 0.5).train) == 6


def test_a_table_without_read_permission_is_refused_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = write_table(tmp_path, {"kind": ["ant", "bee"] * 6})
    deny_access(monkeypatch, tmp_path / "t.csv")
    assert error_message(spec) == f"{tmp_path / 't.csv'} cannot be read (Permission denied): let this user read it"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("file,kind\n", "has no rows"),
        ("1.png,x\n2.png,y\n", "begins with the row of 1.png: name the columns in a row above it, such as image,label"),
        ("x,a/1.JPG\nx,a/2.JPG\n", "begins with the row of a/1.JPG"),
        ("file,file\n1.png,x\n", "two columns of one name"),
        ("file,kind\n1.png\n", "has 1 cell in row 2"),
        ("name,kind\nx,y\n", "has no column of file names"),
        ("file;kind\n1.png;x\n", "has its columns separated by semicolons: write it with columns separated by commas"),
        ("file\tkind\n1.png\tx,y\n", "has its columns separated by tabs"),
        ("file,kind\n1.png,\xff\n", "cannot be read as a table"),
    ],
    ids=["empty", "no header", "no header, image last", "names", "short", "no image", "semicolons", "tabs", "latin"],
)
def test_a_file_that_is_not_a_table_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.csv").write_text(text, encoding="latin1")
    assert message in error_message(f"csv:{tmp_path / 't.csv'}")


def write_named_images(folder: Path, files: Sequence[str], names: Sequence[str]) -> str:
    """Write images to these paths, and a table with these names; return the value of --data."""
    for i, file in enumerate(files):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(PNGS[i])
    rows = "".join(f"{name},{'xxyy'[i]}\n" for i, name in enumerate(names))
    (folder / "t.csv").write_text(f"file,kind\n{rows}")
    return f"csv:{folder / 't.csv'}"


def image_paths(spec: str, folder: Path) -> list[str]:
    source = open_dataset(spec, 0.5)
    return sorted(str(Path(name).relative_to(folder)) for part in (source.train, source.held_out) for name in part.names)


def test_a_missing_image_is_not_replaced_by_one_of_another_folder(tmp_path: Path) -> None:
    files = ["train/a/1.png", "train/a/2.png", "train/b/3.png", "test/z/4.png"]
    message = error_message(write_named_images(tmp_path, files, [*files[:3], "train/b/4.png"]))
    assert "1 of 4 images of" in message and "such as train/b/4.png" in message


def test_images_of_another_folder_do_not_replace_all_missing_images(tmp_path: Path) -> None:
    message = error_message(
        write_named_images(tmp_path, [f"a/{i}.png" for i in range(4)], [f"b/{i}.png" for i in range(4)])
    )
    assert "4 of 4 images of" in message


def test_the_end_of_a_path_names_an_image(tmp_path: Path) -> None:
    names = ["a/1.png", "a/2.png", "b/1.png", "b/2.png"]
    files = [f"images/{name}" for name in names]
    assert image_paths(write_named_images(tmp_path, [*files, "images/aa/1.png"], names), tmp_path) == files


@pytest.mark.parametrize("form", ["{}.png", "./{}.png", "{}"])
def test_an_exact_path_is_preferred_to_the_end_of_another(tmp_path: Path, form: str) -> None:
    files = [f"{i}.png" for i in range(4)]
    spec = write_named_images(tmp_path, [*files, *(f"thumbs/{file}" for file in files)], [form.format(i) for i in range(4)])
    assert image_paths(f"{spec}?image=file", tmp_path) == files


def test_an_absolute_path_names_an_image(tmp_path: Path) -> None:
    files = [f"a/{i}.png" for i in range(4)]
    assert image_paths(write_named_images(tmp_path, files, [str(tmp_path / file) for file in files]), tmp_path) == files


def test_an_absolute_path_names_an_image_also_through_a_link(tmp_path: Path) -> None:
    folder, link, files = tmp_path / "data", tmp_path / "link", [f"a/{i}.png" for i in range(4)]
    folder.mkdir()
    link.symlink_to(folder)
    for opened, named in ((link, folder), (folder, link)):
        spec = write_named_images(folder, files, [str(named / file) for file in files])
        assert image_paths(spec.replace(str(folder), str(opened)), opened) == files


@pytest.mark.parametrize("gap", ["", "-1", "-1.0", "nan"])
@pytest.mark.parametrize("options", ["", "?target=mass,hernia"])
def test_a_missing_label_is_refused_with_column_row_and_remedy(tmp_path: Path, gap: str, options: str) -> None:
    spec = write_table(tmp_path, {"mass": [0, 1] * 6, "hernia": [0, 1, gap, 1] * 3, "age": range(12)})
    message = error_message(spec + options)
    assert f"has {gap} for 'hernia' in row 4" in message or (not gap and "has no 'hernia' in row 4" in message)
    assert "fill it in, or take the row out, or leave the column out, ?target=mass" in message
    assert open_dataset(f"{spec}?target=mass").classes == ("mass",)


@pytest.mark.parametrize("options", ["", "?target=Edema"])
def test_a_missing_label_in_a_single_binary_column_is_not_taken_for_a_value(tmp_path: Path, options: str) -> None:
    message = error_message(write_table(tmp_path, {"Edema": ["1.0", "0.0", "-1.0"] * 4}) + options)
    assert "has -1.0 for 'Edema' in row 4: each image needs 0 or 1; fill it in, or take the row out" in message
    assert message.endswith("if these are values, add 1 to all of them")


def test_values_may_be_minus_one(tmp_path: Path) -> None:
    assert open_dataset(write_table(tmp_path, {"score": [-1, 0, 1, 2] * 3})).task == "values"


BINARY_COLUMNS = {"MEL": [0, 1] * 6, "NV": [1, 0, 0] * 4}


@pytest.mark.parametrize("cell", ["O", "None", "unknown", "2", "0.5"])
@pytest.mark.parametrize("options", ["", "?target=MEL,NV,AK"])
def test_an_invalid_cell_in_a_binary_column_is_refused_and_drops_no_label(tmp_path: Path, cell: str, options: str) -> None:
    message = error_message(write_table(tmp_path, BINARY_COLUMNS | {"AK": [*[0, 1] * 5, 0, cell]}) + options)
    assert f"has {cell!r} for 'AK' in row 13: each image needs 0 or 1; correct it, or take the row out" in message
    assert message.endswith("or leave the column out, ?target=MEL,NV")


def test_if_every_binary_column_has_an_invalid_cell_one_is_named(tmp_path: Path) -> None:
    message = error_message(
        write_table(tmp_path, {"MEL": [*[0, 1] * 5, 0, "O"], "NV": ["x", *[0, 1] * 5, 0], "age": range(12)})
    )
    assert "has 'O' for 'MEL' in row 13: each image needs 0 or 1" in message and message.endswith(
        "choose the targets, ?target=COLUMN"
    )


def test_columns_that_are_not_binary_are_left_out_and_named(tmp_path: Path) -> None:
    source = open_dataset(write_table(tmp_path, BINARY_COLUMNS | {"age": range(20, 32), "sex": ["f", "m"] * 6}), 0.25)
    assert "labels are the columns of 0 and 1: MEL, NV; not taken as labels: age, sex" in source.notes


def test_requested_columns_of_true_and_false_are_labels(tmp_path: Path) -> None:
    spec = write_table(tmp_path, {"a": ["True", "False"] * 6, "b": ["TRUE", "false", "FALSE"] * 4})
    source = open_dataset(f"{spec}?target=a,b", 0.25)
    assert (source.task, source.classes) == ("labels", ("a", "b"))
    assert source.train.targets.tolist() == [[i % 2 == 0, i % 3 == 0] for i in (int(n[-6:-4]) for n in source.train.names)]


def test_a_bar_among_numbers_does_not_make_labels(tmp_path: Path) -> None:
    message = error_message(write_table(tmp_path, {"count": [*range(11), "3|5"]}))
    assert "has '3|5' for 'count' in row 13: expected a finite number" in message
    assert message.endswith("or if these are labels joined by |, call the column Finding Labels")


def test_a_column_called_label_always_has_classes(tmp_path: Path) -> None:
    source = open_dataset(write_table(tmp_path, {"label": ["cat", "dog", "cat|dog"] * 4}), 0.25)
    assert (source.task, source.classes) == ("classes", ("cat", "cat|dog", "dog"))
    assert "classes are the 3 names in 'label'; call the column Finding Labels if | joins several" in source.notes


def test_joined_names_in_another_column_are_labels(tmp_path: Path) -> None:
    source = open_dataset(write_table(tmp_path, {"kind": ["cat", "dog", "cat|dog"] * 4}), 0.25)
    assert (source.task, source.classes) == ("labels", ("cat", "dog"))


@pytest.mark.parametrize("cell", ["", "nan", "NA"])
def test_rows_without_a_patient_are_refused_and_not_taken_for_one_patient(tmp_path: Path, cell: str) -> None:
    message = error_message(write_table(tmp_path, NIH_COLUMNS | {"Patient ID": [*range(10), cell, cell]}, "Image Index"))
    assert "has no 'Patient ID' in row 12, by which images are kept together: fill it in" in message


def test_small_integers_are_values_with_a_hint_at_classes(tmp_path: Path) -> None:
    hint = "values are the columns of numbers: diagnosis; call the column label if they are classes"
    assert hint in open_dataset(write_table(tmp_path, {"diagnosis": [0, 1, 2, 3] * 3}), 0.25).notes


def test_a_class_number_written_in_two_ways_is_refused(tmp_path: Path) -> None:
    message = error_message(write_table(tmp_path, {"label": ["01", "1", "2"] * 4}))
    assert "has '01' and '1' for one number in 'label': write each class in one way" in message


def test_classes_of_one_image_each_cannot_be_held_out(tmp_path: Path) -> None:
    message = error_message(write_table(tmp_path, {"label": range(12)}))
    assert "each of its 12 classes has one image, and none can be held out: add images, or choose other targets" in message


def test_classes_of_one_image_each_in_a_folder_get_no_advice_about_columns(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / name / "1.png")
    assert error_message(f"folder:{tmp_path}").endswith("has one image, and none can be held out: add images")


@pytest.mark.parametrize("kind", ["csv", "parquet", "tar"])
def test_a_single_class_is_refused_by_every_source(tmp_path: Path, kind: str) -> None:
    spec = {
        "csv": lambda: write_table(tmp_path, {"label": ["cat"] * 12}),
        "parquet": lambda: write_parquet(tmp_path / "a.parquet", label=["cat"] * 12),
        "tar": lambda: (
            f"tar:{write_shard(tmp_path / 'a.tar', {'0.png': PNGS[0], '0.cls': b'3', '1.png': PNGS[1], '1.cls': b'3'})}"
        ),
    }[kind]()
    assert f"holds one class, {3 if kind == 'tar' else 'cat'}: a classifier needs two or more" in error_message(spec)


def test_the_index_that_pandas_writes_is_left_out_with_a_note(tmp_path: Path) -> None:
    source = open_dataset(write_table(tmp_path, {"": range(12), "age": range(12)}), 0.25)
    assert source.classes == ("age",) and "the column without a name, which counts the rows, is left out" in source.notes


def test_another_column_without_a_name_is_refused(tmp_path: Path) -> None:
    message = error_message(write_table(tmp_path, {"": range(1, 13), "age": range(12)}))
    assert "has a column without a name: give it one in the first row, or remove it" in message


COMMAS = {"at the ends of all rows, as NIH's": (",", ","), "of the names": (",,", ""), "of the rows": ("", ",,")}


@pytest.mark.parametrize("place", COMMAS)
def test_columns_without_a_name_or_a_cell_are_left_out(tmp_path: Path, place: str) -> None:
    spec, table, (of_names, of_rows) = write_table(tmp_path, {"age": range(12)}), tmp_path / "t.csv", COMMAS[place]
    names, *rows = table.read_text().splitlines()
    table.write_text("\n".join([names + of_names, *(row + of_rows for row in rows)]))
    assert open_dataset(spec, 0.25).classes == ("age",)
    table.write_text("\n".join([f",,{names}", *(f",,{row}" for row in rows)]))
    assert open_dataset(spec, 0.25).classes == ("age",)


def test_cells_beyond_the_last_name_are_refused(tmp_path: Path) -> None:
    spec, table = write_table(tmp_path, {"age": range(12)}), tmp_path / "t.csv"
    lines = table.read_text().splitlines()
    table.write_text("\n".join([lines[0], *(f"{row},{number % 2 or ''}" for number, row in enumerate(lines[1:]))]))
    assert "has 3 cells in row 2, 2 in the first: correct the row" in error_message(spec)
    table.write_text("\n".join([lines[0], f"{lines[1]},", *lines[2:]]))
    assert "has 3 cells in row 2, 2 in the first: correct the row" in error_message(spec)


@pytest.mark.parametrize(("target", "options"), [("file", ""), ("split", ""), ("site", "&group=site")])
def test_a_target_column_with_another_use_is_refused(tmp_path: Path, target: str, options: str) -> None:
    spec = write_table(tmp_path, {"split": ["train", "val"] * 6, "site": ["x", "y"] * 6, "kind": ["a", "b"] * 6})
    assert f"has {target!r} for images, groups or splits: choose ?target=COLUMN of" in error_message(
        f"{spec}?target={target}{options}"
    )


def test_a_table_without_any_finding_is_refused(tmp_path: Path) -> None:
    spec = write_table(tmp_path, {"Finding Labels": ["No Finding"] * 12})
    assert "has nothing but 'No Finding' in 'Finding Labels'" in error_message(spec)


def test_several_class_columns_are_refused_with_the_option_that_chooses(tmp_path: Path) -> None:
    spec = write_table(tmp_path, {"label": [0, 1] * 6, "class": [0, 1] * 6})
    assert "choose, ?target=COLUMN, of label, class" in error_message(spec)


def test_rows_are_counted_as_a_spreadsheet_does(tmp_path: Path) -> None:
    spec = write_table(tmp_path, {"kind": ["a", "", *"ab" * 5]})
    text = (tmp_path / "t.csv").read_text()
    (tmp_path / "t.csv").write_text(text.replace("00.png", "\n,\n00.png"))
    assert "has no 'kind' in row 5" in error_message(spec)


def test_training_and_testing_are_split_names_too(tmp_path: Path) -> None:
    source = open_dataset(write_table(tmp_path, {"split": ["Training", "training", "Testing"] * 4, "kind": ["a", "b"] * 6}))
    assert (len(source.train), len(source.held_out)) == (8, 4)


def test_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    spec = write_table(tmp_path, {"kind": ["a", "b"] * 6})
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "03.png").write_bytes(PNGS[0])
    assert "has 2 images '03.png', such as images_001/03.png and more/03.png: write more of the path" in error_message(spec)
    text = (tmp_path / "t.csv").read_text()
    (tmp_path / "t.csv").write_text(text.replace("03.png", "more/03.png"))
    assert len(open_dataset(spec, 0.5).train) == 6


def test_an_image_with_two_rows_is_refused(tmp_path: Path) -> None:
    spec = write_table(tmp_path, {"kind": ["a", "b"] * 6})
    with (tmp_path / "t.csv").open("a") as file:
        file.write("03.png,a\n")
    assert "has two rows for images_001/03.png" in error_message(spec)


def test_names_without_a_suffix_stand_for_files_with_one(tmp_path: Path) -> None:
    spec = write_table(tmp_path, {"kind": ["a", "b"] * 6})
    (tmp_path / "t.csv").write_text("id,kind\n" + "".join(f"{i:02d},{'ab'[i % 2]}\n" for i in range(12)))
    source = open_dataset(f"{spec}?image=id", 0.5)
    assert shows_image(source.train.read(0), PNGS[int(Path(source.train.names[0]).stem)])
