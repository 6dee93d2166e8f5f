"""Fingerprints: a data set is recognised at another path, and a difference is found and named."""

import gzip
import json
import os
import pickle
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vit_spec
from train.data import fingerprint
from train.data.fingerprint import DataChangedError, Fingerprint, compare_with_recorded, resolve_spec
from train.data.sources import Dataset, open_dataset
from train.loop.run_folder import RunFolder
from train.recipes import Recipe
from vit_spec import InputError

Maker = Callable[[Path, int], str]


def random_pixels(seed: int, count: int = 24) -> np.ndarray:
    """Return grey images, (count, 12, 10) uint8."""
    return np.random.default_rng(seed).integers(0, 256, (count, 12, 10), np.uint8)


CONFIG = vit_spec.get("vit_ti16")
TARGETS = np.arange(24) % 2


def folder(root: Path, seed: int) -> str:
    for i, image in enumerate(random_pixels(seed)):
        (root / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(root / "ab"[i % 2] / f"{i}.bmp")  # BMP files of the same size for all pixels
    return f"folder:{root}"


def table(root: Path, seed: int) -> str:
    folder(root / "images", seed)
    rows = [f"{i}.bmp,{'ab'[i % 2]}" for i in range(24)]
    (root / "table.csv").write_text("\n".join(["name,label", *rows]))
    return f"csv:{root}/table.csv"


def npz(root: Path, seed: int) -> str:
    root.mkdir()
    np.savez(root / "x.npz", train_images=random_pixels(seed), train_labels=TARGETS)
    return f"npz:{root}/x.npz"


def idx(root: Path, seed: int) -> str:
    root.mkdir()
    (root / "train-images-idx3-ubyte").write_bytes(
        b"\0\0\x08\x03" + np.array([24, 12, 10], ">u4").tobytes() + random_pixels(seed).tobytes()
    )
    labels = b"\0\0\x08\x01" + np.array([24], ">u4").tobytes() + TARGETS.astype(np.uint8).tobytes()
    (root / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    return f"idx:{root}"


def cifar(root: Path, seed: int) -> str:
    root.mkdir()
    data = np.random.default_rng(seed).integers(0, 256, (24, 3072), np.uint8)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        with (root / name).open("wb") as file:
            pickle.dump({"data": data, "labels": TARGETS.tolist()}, file)
    (root / "batches.meta").write_bytes(pickle.dumps({"label_names": ["a", "b"]}))
    return f"cifar:{root}"


def tar(root: Path, seed: int) -> str:
    root.mkdir()
    for shard in range(2):
        with tarfile.open(root / f"train-{shard}.tar", "w") as archive:
            for i in range(shard, 24, 2):
                image = BytesIO()
                Image.fromarray(random_pixels(seed)[i]).save(image, "BMP")
                for name, data in ((f"{i:02}.bmp", image.getvalue()), (f"{i:02}.cls", str(i // 2 % 2).encode())):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    archive.addfile(member, BytesIO(data))
    return f"tar:{root}/train-{{0..1}}.tar"


def parquet(root: Path, seed: int) -> str:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    root.mkdir()
    images = []
    for image in random_pixels(seed):
        file = BytesIO()
        Image.fromarray(image).save(file, "BMP")
        images.append(file.getvalue())
    for shard in range(2):
        columns = {"image": images[shard::2], "label": (TARGETS[:12]).tolist()}
        pq.write_table(pa.table(columns), root / f"train-{shard}.parquet", compression="none")
    return f"parquet:{root}"


SOURCES: dict[str, Maker] = {each.__name__: each for each in (folder, table, npz, idx, cifar, tar, parquet)}


def compute_fingerprint(spec: str, *, held_out: float = 0.25, every_byte: bool = False) -> Fingerprint:
    return Fingerprint.compute(open_dataset(spec, held_out), every_byte=every_byte)


@pytest.mark.parametrize("kind", SOURCES)
def test_data_at_another_path_have_the_same_fingerprint(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SOURCES[kind](tmp_path / "here", 0)
    first = compute_fingerprint(spec)
    shutil.copytree(tmp_path / "here", tmp_path / "copied")
    assert first.difference(compute_fingerprint(spec.replace("here", "copied"))) == ""
    (tmp_path / "here").rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    assert first.difference(compute_fingerprint(spec.replace(f"{tmp_path}/here", "moved"))) == ""
    (tmp_path / "data.json").write_text(first.to_json())
    assert Fingerprint.read(tmp_path / "data.json").difference(compute_fingerprint(spec.replace("here", "moved"))) == ""


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("change", ["the contents", "the size"])
def test_a_change_of_a_file_is_found_although_two_splits_have_its_name(split: str, change: str, tmp_path: Path) -> None:
    for each in ("train", "test"):
        folder(tmp_path / each, 0)
    spec = f"folder:{tmp_path}"
    first = compute_fingerprint(spec, held_out="test")
    path = next((tmp_path / split / "a").iterdir())
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data if change == "the contents" else data + b"\0")
    assert str(path) in first.difference(compute_fingerprint(spec, held_out="test"))


@pytest.mark.parametrize("kind", SOURCES)
def test_other_contents_with_the_same_sizes_and_times_are_a_difference(kind: str, tmp_path: Path) -> None:
    spec = SOURCES[kind](tmp_path / "data", 0)
    first = compute_fingerprint(spec)
    times = {path.relative_to(tmp_path / "data"): path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*.*")}
    shutil.rmtree(tmp_path / "data")
    SOURCES[kind](tmp_path / "data", 1)
    for path, time in times.items():
        os.utime(tmp_path / "data" / path, ns=(time, time))
    assert "the contents of " in first.difference(compute_fingerprint(spec))


@pytest.mark.parametrize("kind", SOURCES)
def test_other_held_out_images_are_a_difference(kind: str, tmp_path: Path) -> None:
    spec = SOURCES[kind](tmp_path / "data", 0)
    message = compute_fingerprint(spec).difference(compute_fingerprint(spec, held_out=0.5))
    assert message == "which training and held-out images there are, or their targets"


def test_the_digits_have_no_files_and_always_the_same_fingerprint() -> None:
    pytest.importorskip("sklearn")
    assert compute_fingerprint("digits").files == 0
    assert compute_fingerprint("digits").difference(compute_fingerprint("digits")) == ""
    message = compute_fingerprint("digits").difference(compute_fingerprint("digits", held_out=0.5))
    assert message == "which training and held-out images there are, or their targets"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: (root / "a" / "0.bmp").unlink(), "24 files before and 23 files now: a/0.bmp is gone"),
        (lambda root: shutil.copy(root / "a" / "0.bmp", root / "b" / "x.bmp"), "25 files now: b/x.bmp is new"),
        (lambda root: (root / "a" / "0.bmp").rename(root / "a" / "9.bmp"), "24 files now: a/9.bmp is new"),
        (lambda root: Image.new("L", (30, 30)).save(root / "a" / "4.bmp"), "{root}/a/4.bmp had 1,222 bytes and has 2,038"),
        (lambda root: Image.new("L", (10, 12)).save(root / "a" / "4.bmp"), "the contents of {root}/a/4.bmp"),
        (lambda root: os.utime(root / "a" / "4.bmp", ns=(1, 1)), ""),
    ],
)
def test_the_first_difference_is_named(change: Callable[[Path], object], message: str, tmp_path: Path) -> None:
    spec = folder(tmp_path, 0)
    first = compute_fingerprint(spec)
    change(tmp_path)
    found = first.difference(compute_fingerprint(spec))
    assert found.endswith(message.format(root=tmp_path)) and bool(found) == bool(message)


def test_two_exchanged_images_are_a_difference(tmp_path: Path) -> None:
    spec = folder(tmp_path, 0)
    first = compute_fingerprint(spec)
    for old, new in (("a/0.bmp", "x"), ("b/1.bmp", "a/0.bmp"), ("x", "b/1.bmp")):
        (tmp_path / old).rename(tmp_path / new)
    message = f"the contents of {tmp_path}/a/0.bmp, and 1 more of the 24 compared"
    assert first.difference(compute_fingerprint(spec)) == message


def splits_of_npz(root: Path, **changes: np.ndarray) -> Dataset:
    """Return the data in one npz file whose training images are not its held-out ones, with other arrays."""
    arrays = {f"{split}_images": random_pixels(seed) for seed, split in enumerate(("train", "test"))}
    arrays |= {"train_labels": TARGETS, "test_labels": TARGETS}
    np.savez(root / "x.npz", **(arrays | changes))
    return open_dataset(f"npz:{root}/x.npz")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test_images": random_pixels(2)}, "the contents of {file}"),
        ({"test_labels": 1 - TARGETS}, "the contents of {file}, and which held-out images there are, or their targets"),
        ({"train_labels": 1 - TARGETS}, "the contents of {file}, and which training images there are, or their targets"),
        ({"note": np.arange(3)}, "{file} had {before:,} bytes and has {after:,}"),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_a_file_of_two_splits_is_named_once(changes: Any, message: str, version: int, tmp_path: Path) -> None:
    file = tmp_path / "x.npz"
    first, before = Fingerprint.compute(splits_of_npz(tmp_path), version=version), file.stat().st_size
    found = first.difference(Fingerprint.compute(splits_of_npz(tmp_path, **changes), version=version))
    assert found == message.format(file=file, before=before, after=file.stat().st_size)


def test_a_file_of_two_splits_is_counted_and_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, size = splits_of_npz(tmp_path), (tmp_path / "x.npz").stat().st_size
    monkeypatch.setattr(fingerprint, "MAX_SAMPLED_BYTES", size)  # else the sample would not be all of it
    found = Fingerprint.compute(source)
    assert (found.files, found.size, len(found.sample), found.is_complete) == (1, size, 1, True)


def test_a_recorded_fingerprint_that_counts_a_file_of_two_splits_twice_still_identifies_the_data(tmp_path: Path) -> None:
    """The record is one of a version before each file was counted once."""
    source, file = splits_of_npz(tmp_path), tmp_path / "data.json"
    for every_byte in (False, True):
        recorded = Fingerprint.compute(source, every_byte=every_byte, version=1)
        assert (recorded.files, recorded.size) == (2, 2 * (tmp_path / "x.npz").stat().st_size)
        assert [name for name, _, _ in recorded.sample] == ["train_images", "test_images"]
        fields = json.loads(recorded.to_json())
        assert "paths" not in fields
        file.write_text(json.dumps(fields))
        assert compare_with_recorded(file, source, "all" if every_byte else "sample") == (None, [])
        with pytest.raises(DataChangedError, match=r"^the contents of .*x\.npz$"):
            compare_with_recorded(file, splits_of_npz(tmp_path, test_images=random_pixels(2)), "sample")
        source = splits_of_npz(tmp_path)


def test_another_column_of_the_same_file_is_a_difference(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    image = BytesIO()
    Image.new("L", (8, 8)).save(image, "BMP")
    columns = {"image": [image.getvalue()] * 8, "mask": [image.getvalue()] * 8, "label": [0, 1] * 4}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    first, other = (compute_fingerprint(f"parquet:{tmp_path}/x.parquet?image={column}") for column in ("image", "mask"))
    assert "under other names" in first.difference(other) or "is new" in first.difference(other)


def test_training_images_are_found_among_held_out_images_of_the_same_targets(tmp_path: Path) -> None:
    for seed, split in enumerate(("train", "val")):
        folder(tmp_path / "data" / split, seed)
        shutil.copytree(tmp_path / "data" / split, tmp_path / "swapped" / ("val", "train")[seed])
    source, swapped = (open_dataset(f"folder:{tmp_path / name}") for name in ("data", "swapped"))
    for limit, count in ((fingerprint.MAX_SAMPLED_FILES, 24), (4, 2)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fingerprint, "MAX_SAMPLED_FILES", limit)
            recorded = Fingerprint.compute(source)
            assert recorded.num_shared(swapped.held_out) == count
            assert recorded.num_shared(source.held_out) == 0


# Large data sets --------------------------------------------------------------------------------------------------------


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limits of the sample to 4 files and 400 bytes, so 24 images of 1.2 kB are a large data set."""
    monkeypatch.setattr(fingerprint, "MAX_SAMPLED_FILES", 4)
    monkeypatch.setattr(fingerprint, "SAMPLE_BYTES", 100)
    monkeypatch.setattr(fingerprint, "MAX_SAMPLED_BYTES", 400)


@pytest.mark.usefixtures("sampled")
def test_large_data_are_compared_by_a_sample_or_on_request_by_every_byte(tmp_path: Path) -> None:
    spec, file = folder(tmp_path / "data", 0), tmp_path / "data.json"
    source = open_dataset(spec)
    found, message = compare_with_recorded(file, source, "sample")
    assert found is not None and not found.is_complete and len(found.sample) == 4 and message == []
    file.write_text(found.to_json())
    found, message = compare_with_recorded(file, source, "all")
    assert found is not None and "from now on every byte is" in message[0]
    file.write_text(found.to_json())
    assert compare_with_recorded(file, source, "all") == (None, [])
    assert compare_with_recorded(file, source, "sample") == (None, [])

    Image.new("L", (10, 12)).save(tmp_path / "data" / "a" / "4.bmp")  # not in the sample
    found, (message,) = compare_with_recorded(file, source, "sample")
    assert found is None and message.startswith("files of the data were written or copied since the run began: a sample of")
    with pytest.raises(DataChangedError, match="the contents of its files, outside of the sample"):
        compare_with_recorded(file, source, "all")
    Image.new("L", (30, 30)).save(tmp_path / "data" / "a" / "4.bmp")
    with pytest.raises(DataChangedError, match=r"the sizes of its files, 29,328 bytes together before and 30,144 now"):
        compare_with_recorded(file, source, "sample")
    found, (message,) = compare_with_recorded(file, source, "none")
    assert found is not None and message.startswith("the data differ from those that the run began with")


@pytest.mark.usefixtures("sampled")
def test_a_sample_reads_no_more_than_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(bytes(range(250)) * 40)
    read: list[int] = []
    pread = os.pread

    def counted(file: int, size: int, start: int) -> bytes:
        read.append(start)
        return pread(file, size, start)

    monkeypatch.setattr(os, "pread", counted)
    fingerprint._hash_contents(str(tmp_path / "x"), 10_000, 400)
    assert read == [0, 3300, 6600, 9900]


def test_an_unreadable_fingerprint_is_refused_with_a_remedy(tmp_path: Path) -> None:
    source = open_dataset(folder(tmp_path / "data", 0))
    for text in (
        "",
        "[]",
        "{}",
        '{"version": 2, "sample": 3}',
        '{"version": 2, "sample": [], "answers": ["", ""], "x": 1}',
    ):
        (tmp_path / "data.json").write_text(text)
        with pytest.raises(InputError, match=r"data\.json cannot be read .* give --compare-data none"):
            compare_with_recorded(tmp_path / "data.json", source, "sample")
        assert compare_with_recorded(tmp_path / "data.json", source, "none")[0] is not None
    (tmp_path / "data.json").write_text(Fingerprint.compute(source).to_json().replace('"version": 2', '"version": 3'))
    with pytest.raises(InputError, match=r"cannot be read \(it has version 3, expected 1 or 2\)"):
        compare_with_recorded(tmp_path / "data.json", source, "sample")


def test_a_missing_file_is_named_in_one_line(tmp_path: Path) -> None:
    source = open_dataset(folder(tmp_path / "data", 0))
    (tmp_path / "data" / "a" / "0.bmp").unlink()
    with pytest.raises(InputError, match=r"0\.bmp is not there: put it back"):
        Fingerprint.compute(source)


def test_different_spellings_of_a_path_are_resolved_to_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_spec("folder:x") == resolve_spec(f"folder:{tmp_path}/y/../x") != resolve_spec("folder:z")
    assert resolve_spec("csv:x?target=a") == resolve_spec("csv:./x?target=a") != resolve_spec("csv:x?target=b")
    assert resolve_spec("hf://a/b") == ("hf", "//a/b", "") and resolve_spec("digits") == ("digits", "", "")


# Runs -------------------------------------------------------------------------------------------------------------------


def start_run(path: Path, spec: str, *, restores: bool = False, **changes: Any) -> list[str]:
    """Start or resume a run without any step; return its notes on its folder and data.

    restores: whether the run gets as far as restoring its checkpoint.
    """
    recipe = replace(Recipe(data=spec, held_out=0.25), **changes)
    source = open_dataset(recipe.data, recipe.held_out)
    data = {"task": "classes", "train": len(source.train), "held_out": len(source.held_out), "classes": source.classes}
    with RunFolder(path, recipe, CONFIG, data, source=source) as run:
        if restores:
            run.resume_at(0, 0.0, is_evaluated=False)
        return run.warnings


def blacken_images(root: Path) -> None:
    for path in root.rglob("*.bmp"):
        Image.new("L", (10, 12)).save(path)


def test_a_run_resumes_with_its_data_at_another_path_and_records_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert start_run(tmp_path / "run", folder(tmp_path / "data", 0)) == []
    monkeypatch.chdir(tmp_path)
    assert start_run(tmp_path / "run", "folder:data") == []
    (tmp_path / "data").rename("moved")
    assert start_run(tmp_path / "run", "folder:./moved/", restores=True) == []
    assert json.loads((tmp_path / "run" / "config.json").read_text())["recipe"]["data"] == "folder:./moved/"


def test_a_run_refuses_replaced_images_unless_compare_data_is_none(tmp_path: Path) -> None:
    spec, run = folder(tmp_path / "data", 0), tmp_path / "run"
    start_run(run, spec)
    before = {path: path.read_bytes() for path in run.iterdir()}
    blacken_images(tmp_path / "data")
    with pytest.raises(InputError) as refused:
        start_run(run, spec)
    assert str(refused.value) == (
        f"{run} holds another run: its data differ: the contents of {tmp_path}/data/a/0.bmp, and 23 more of the "
        "24 compared; give the same to resume, or give --run a new folder; --compare-data none accepts a change made on "
        "purpose"
    )
    assert before == {path: path.read_bytes() for path in run.iterdir()}
    note = "the data differ from those that the run began with"
    assert start_run(run, spec, compare_data="none")[0].startswith(note)
    assert before == {path: path.read_bytes() for path in run.iterdir()}  # until the checkpoint is restored
    assert start_run(run, spec, compare_data="none", restores=True)[0].startswith(note)
    assert start_run(run, spec) == []


def test_another_number_of_images_is_refused_even_with_compare_data_none(tmp_path: Path) -> None:
    spec, run = folder(tmp_path / "data", 0), tmp_path / "run"
    start_run(run, spec)
    shutil.copy(tmp_path / "data" / "a" / "0.bmp", tmp_path / "data" / "a" / "x.bmp")
    message = (
        r"its data differ: 24 files before and 25 files now: a/x\.bmp is new; give .*; --init .* starts a new run from"
    )
    with pytest.raises(InputError, match=message):
        start_run(run, spec)
    with pytest.raises(InputError, match=r"its data\.train is 18, and here it is 19"):
        start_run(run, spec, compare_data="none")


def test_a_run_of_an_older_version_resumes_at_its_path_and_then_records_a_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, run = folder(tmp_path / "data", 0), tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    start_run(run, "folder:data")
    (run / "data.json").unlink()
    config = json.loads((run / "config.json").read_text())
    del config["recipe"]["compare_data"]
    (run / "config.json").write_text(json.dumps(config))
    folder(tmp_path / "other", 0)
    with pytest.raises(InputError, match=r"its recipe\.data is folder:data, and here it is folder:other"):
        start_run(run, "folder:other")
    note = "an older version started the run: the fingerprint of its data is recorded from now on"
    assert start_run(run, spec, restores=True) == [note]
    assert start_run(run, "folder:other") == []


def test_a_run_that_was_cut_off_before_its_config_was_written_accepts_other_data(tmp_path: Path) -> None:
    start_run(tmp_path / "run", folder(tmp_path / "data", 0))
    (tmp_path / "run" / "config.json").unlink()
    assert start_run(tmp_path / "run", folder(tmp_path / "other", 1)) == []
    with pytest.raises(InputError, match="its data differ"):
        start_run(tmp_path / "run", f"folder:{tmp_path / 'data'}")
