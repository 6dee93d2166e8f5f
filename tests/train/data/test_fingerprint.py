"""A data set is known by its contents wherever it lies, and another one by what differs."""

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
from train.data.fingerprint import Fingerprint, OtherData, compare, place
from train.data.sources import open_source
from train.loop.run_folder import Run
from train.recipes import Recipe
from vit_spec import InputError

Maker = Callable[[Path, int], str]


def pixels(seed: int, count: int = 24) -> np.ndarray:
    """Grey images of 12x10, so many for each of two classes."""
    return np.random.default_rng(seed).integers(0, 256, (count, 12, 10), np.uint8)


CONFIG = vit_spec.get("vit_ti16")
ANSWERS = np.arange(24) % 2


def folder(root: Path, seed: int) -> str:
    for i, image in enumerate(pixels(seed)):
        (root / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(root / "ab"[i % 2] / f"{i}.bmp")  # whatever the pixels, of one size
    return f"folder:{root}"


def table(root: Path, seed: int) -> str:
    folder(root / "images", seed)
    rows = [f"{i}.bmp,{'ab'[i % 2]}" for i in range(24)]
    (root / "table.csv").write_text("\n".join(["name,label", *rows]))
    return f"csv:{root}/table.csv"


def npz(root: Path, seed: int) -> str:
    root.mkdir()
    np.savez(root / "x.npz", train_images=pixels(seed), train_labels=ANSWERS)
    return f"npz:{root}/x.npz"


def idx(root: Path, seed: int) -> str:
    root.mkdir()
    (root / "train-images-idx3-ubyte").write_bytes(
        b"\0\0\x08\x03" + np.array([24, 12, 10], ">u4").tobytes() + pixels(seed).tobytes()
    )
    labels = b"\0\0\x08\x01" + np.array([24], ">u4").tobytes() + ANSWERS.astype(np.uint8).tobytes()
    (root / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    return f"idx:{root}"


def cifar(root: Path, seed: int) -> str:
    root.mkdir()
    data = np.random.default_rng(seed).integers(0, 256, (24, 3072), np.uint8)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        with (root / name).open("wb") as file:
            pickle.dump({"data": data, "labels": ANSWERS.tolist()}, file)
    (root / "batches.meta").write_bytes(pickle.dumps({"label_names": ["a", "b"]}))
    return f"cifar:{root}"


def tar(root: Path, seed: int) -> str:
    root.mkdir()
    for shard in range(2):
        with tarfile.open(root / f"train-{shard}.tar", "w") as archive:
            for i in range(shard, 24, 2):
                image = BytesIO()
                Image.fromarray(pixels(seed)[i]).save(image, "BMP")
                for name, data in ((f"{i:02}.bmp", image.getvalue()), (f"{i:02}.cls", str(i // 2 % 2).encode())):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    archive.addfile(member, BytesIO(data))
    return f"tar:{root}/train-{{0..1}}.tar"


def parquet(root: Path, seed: int) -> str:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    root.mkdir()
    images = []
    for image in pixels(seed):
        file = BytesIO()
        Image.fromarray(image).save(file, "BMP")
        images.append(file.getvalue())
    for shard in range(2):
        columns = {"image": images[shard::2], "label": (ANSWERS[:12]).tolist()}
        pq.write_table(pa.table(columns), root / f"train-{shard}.parquet", compression="none")
    return f"parquet:{root}"


KINDS: dict[str, Maker] = {each.__name__: each for each in (folder, table, npz, idx, cifar, tar, parquet)}


def taken(spec: str, *, held_out: float = 0.25, every_byte: bool = False) -> Fingerprint:
    return Fingerprint.of(open_source(spec, held_out), every_byte=every_byte)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_data_at_another_path_are_the_same(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = KINDS[kind](tmp_path / "here", 0)
    first = taken(spec)
    shutil.copytree(tmp_path / "here", tmp_path / "copied")
    assert first.differs(taken(spec.replace("here", "copied"))) == ""
    (tmp_path / "here").rename(tmp_path / "moved")
    monkeypatch.chdir(tmp_path)
    assert first.differs(taken(spec.replace(f"{tmp_path}/here", "moved"))) == ""
    (tmp_path / "data.json").write_text(first.to_json())
    assert first.differs(Fingerprint.read(tmp_path / "data.json")) == ""


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("change", ["the contents", "the size"])
def test_files_of_one_name_in_two_splits_are_told_apart(split: str, change: str, tmp_path: Path) -> None:
    for each in ("train", "test"):
        folder(tmp_path / each, 0)
    spec = f"folder:{tmp_path}"
    first = taken(spec, held_out="test")
    path = next((tmp_path / split / "a").iterdir())
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data if change == "the contents" else data + b"\0")
    assert path.name in first.differs(taken(spec, held_out="test"))


@pytest.mark.parametrize("kind", KINDS)
def test_other_contents_of_the_same_sizes_and_times_are_other_data(kind: str, tmp_path: Path) -> None:
    spec = KINDS[kind](tmp_path / "data", 0)
    first = taken(spec)
    times = {path.relative_to(tmp_path / "data"): path.stat().st_mtime_ns for path in (tmp_path / "data").rglob("*.*")}
    shutil.rmtree(tmp_path / "data")
    KINDS[kind](tmp_path / "data", 1)
    for path, time in times.items():
        os.utime(tmp_path / "data" / path, ns=(time, time))
    assert "the contents of " in first.differs(taken(spec))


@pytest.mark.parametrize("kind", KINDS)
def test_other_images_held_out_are_other_data(kind: str, tmp_path: Path) -> None:
    spec = KINDS[kind](tmp_path / "data", 0)
    said = taken(spec).differs(taken(spec, held_out=0.5))
    assert said == "which training images there are, or the answers to them"


def test_digits_have_no_files_and_are_the_same_always() -> None:
    pytest.importorskip("sklearn")
    assert taken("digits").files == 0
    assert taken("digits").differs(taken("digits")) == ""
    assert "which training images" in taken("digits").differs(taken("digits", held_out=0.5))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda root: (root / "a" / "0.bmp").unlink(), "24 files before and 23 files now: a/0.bmp is gone"),
        (lambda root: shutil.copy(root / "a" / "0.bmp", root / "b" / "x.bmp"), "25 files now: b/x.bmp is new"),
        (lambda root: (root / "a" / "0.bmp").rename(root / "a" / "9.bmp"), "24 files now: a/9.bmp is new"),
        (lambda root: Image.new("L", (30, 30)).save(root / "a" / "4.bmp"), "a/4.bmp had 1,222 bytes and has 2,038"),
        (lambda root: Image.new("L", (10, 12)).save(root / "a" / "4.bmp"), "the contents of a/4.bmp"),
        (lambda root: os.utime(root / "a" / "4.bmp", ns=(1, 1)), ""),
    ],
)
def test_what_differs_is_named(change: Callable[[Path], object], said: str, tmp_path: Path) -> None:
    spec = folder(tmp_path, 0)
    first = taken(spec)
    change(tmp_path)
    found = first.differs(taken(spec))
    assert found.endswith(said) and bool(found) == bool(said)


def test_two_images_that_change_places_are_other_data(tmp_path: Path) -> None:
    spec = folder(tmp_path, 0)
    first = taken(spec)
    for old, new in (("a/0.bmp", "x"), ("b/1.bmp", "a/0.bmp"), ("x", "b/1.bmp")):
        (tmp_path / old).rename(tmp_path / new)
    assert first.differs(taken(spec)) == "the contents of a/0.bmp, and 1 more of the 24 compared"


def test_another_column_of_the_same_file_is_other_data(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    image = BytesIO()
    Image.new("L", (8, 8)).save(image, "BMP")
    columns = {"image": [image.getvalue()] * 8, "mask": [image.getvalue()] * 8, "label": [0, 1] * 4}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    first, other = (taken(f"parquet:{tmp_path}/x.parquet?image={column}") for column in ("image", "mask"))
    assert "under other names" in first.differs(other) or "is new" in first.differs(other)


# Large data sets --------------------------------------------------------------------------------------------------------


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let 24 images of 1.2 kB be a large data set, of which 4 files and 400 bytes are sampled."""
    monkeypatch.setattr(fingerprint, "FILES", 4)
    monkeypatch.setattr(fingerprint, "STRETCH", 100)
    monkeypatch.setattr(fingerprint, "BUDGET", 400)


@pytest.mark.usefixtures("sampled")
def test_of_large_data_a_sample_is_compared_and_every_byte_where_that_is_asked_for(tmp_path: Path) -> None:
    spec, file = folder(tmp_path / "data", 0), tmp_path / "data.json"
    source = open_source(spec)
    found, said = compare(file, source, "sample")
    assert found is not None and not found.is_whole and len(found.sample) == 4 and said == []
    file.write_text(found.to_json())
    found, said = compare(file, source, "all")
    assert found is not None and "every byte is from now on" in said[0]
    file.write_text(found.to_json())
    assert compare(file, source, "all") == (None, [])
    assert compare(file, source, "sample") == (None, [])

    Image.new("L", (10, 12)).save(tmp_path / "data" / "a" / "4.bmp")  # is not among the four
    found, (said,) = compare(file, source, "sample")
    assert found is None and said.startswith("files of the data were written or copied since the run began: a sample of")
    with pytest.raises(OtherData, match="the contents of its files, though not of those that are sampled"):
        compare(file, source, "all")
    Image.new("L", (30, 30)).save(tmp_path / "data" / "a" / "4.bmp")
    with pytest.raises(OtherData, match=r"the sizes of its files, 29,328 bytes together before and 30,144 now"):
        compare(file, source, "sample")
    found, (said,) = compare(file, source, "none")
    assert found is not None and said.startswith("the data are not those that the run began with, and are not compared")


@pytest.mark.usefixtures("sampled")
def test_a_sample_reads_no_more_than_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(bytes(range(250)) * 40)
    read: list[int] = []
    pread = os.pread

    def counted(file: int, size: int, start: int) -> bytes:
        read.append(start)
        return pread(file, size, start)

    monkeypatch.setattr(os, "pread", counted)
    fingerprint._contents(str(tmp_path / "x"), 10_000, 400)
    assert read == [0, 3300, 6600, 9900]


def test_a_fingerprint_that_cannot_be_read_is_told_with_what_to_do(tmp_path: Path) -> None:
    source = open_source(folder(tmp_path / "data", 0))
    for text in (
        "",
        "[]",
        "{}",
        '{"version": 1, "sample": 3}',
        '{"version": 1, "sample": [], "answers": ["", ""], "x": 1}',
    ):
        (tmp_path / "data.json").write_text(text)
        with pytest.raises(InputError, match=r"data\.json cannot be read .* give --compare-data none"):
            compare(tmp_path / "data.json", source, "sample")
        assert compare(tmp_path / "data.json", source, "none")[0] is not None
    (tmp_path / "data.json").write_text(Fingerprint.of(source).to_json().replace('"version": 1', '"version": 2'))
    with pytest.raises(InputError, match=r"cannot be read \(it is of version 2, and 1 is known here\)"):
        compare(tmp_path / "data.json", source, "sample")


def test_a_file_that_has_gone_is_told_in_a_line(tmp_path: Path) -> None:
    source = open_source(folder(tmp_path / "data", 0))
    (tmp_path / "data" / "a" / "0.bmp").unlink()
    with pytest.raises(InputError, match=r"0\.bmp is not there: put it back"):
        Fingerprint.of(source)


def test_a_place_is_the_same_however_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert place("folder:x") == place(f"folder:{tmp_path}/y/../x") != place("folder:z")
    assert place("csv:x?target=a") == place("csv:./x?target=a") != place("csv:x?target=b")
    assert place("hf://a/b") == ("hf", "//a/b", "") and place("digits") == ("digits", "", "")


# Beside a run -----------------------------------------------------------------------------------------------------------


def begun(path: Path, spec: str, **changes: Any) -> list[str]:
    """Begin a run or resume it, do nothing, and return what is said of its folder and data."""
    recipe = replace(Recipe(data=spec, held_out=0.25), **changes)
    source = open_source(recipe.data, recipe.held_out)
    data = {"task": "classes", "train": len(source.train), "held_out": len(source.held_out), "classes": source.classes}
    with Run(path, recipe, CONFIG, data, source=source) as run:
        return run.said


def blackened(root: Path) -> None:
    for path in root.rglob("*.bmp"):
        Image.new("L", (10, 12)).save(path)


def test_a_run_resumes_with_its_data_at_another_path_and_remembers_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert begun(tmp_path / "run", folder(tmp_path / "data", 0)) == []
    monkeypatch.chdir(tmp_path)
    assert begun(tmp_path / "run", "folder:data") == []
    (tmp_path / "data").rename("moved")
    assert begun(tmp_path / "run", "folder:./moved/") == []
    assert json.loads((tmp_path / "run" / "config.json").read_text())["recipe"]["data"] == "folder:./moved/"


def test_a_run_whose_images_were_replaced_is_refused_unless_that_is_meant(tmp_path: Path) -> None:
    spec, run = folder(tmp_path / "data", 0), tmp_path / "run"
    begun(run, spec)
    before = {path: path.read_bytes() for path in run.iterdir()}
    blackened(tmp_path / "data")
    with pytest.raises(InputError) as refused:
        begun(run, spec)
    assert str(refused.value) == (
        f"{run} holds another run: its data differ: the contents of a/0.bmp, and 23 more of the 24 compared; give the same "
        "to resume, or give --run a new folder; --compare-data none accepts a change made on purpose"
    )
    assert before == {path: path.read_bytes() for path in run.iterdir()}
    assert begun(run, spec, compare_data="none")[0].startswith("the data are not those that the run began with")
    assert begun(run, spec) == []


def test_other_data_are_refused_even_so_where_there_are_more_of_them(tmp_path: Path) -> None:
    spec, run = folder(tmp_path / "data", 0), tmp_path / "run"
    begun(run, spec)
    shutil.copy(tmp_path / "data" / "a" / "0.bmp", tmp_path / "data" / "a" / "x.bmp")
    with pytest.raises(InputError, match=r"its data differ: 24 files before and 25 files now: a/x\.bmp is new; give"):
        begun(run, spec)
    with pytest.raises(InputError, match=r"its data\.train is 18, and here it is 19"):
        begun(run, spec, compare_data="none")


def test_a_run_of_an_older_version_resumes_at_its_place_and_knows_its_data_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, run = folder(tmp_path / "data", 0), tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    begun(run, "folder:data")
    (run / "data.json").unlink()
    config = json.loads((run / "config.json").read_text())
    del config["recipe"]["compare_data"]
    (run / "config.json").write_text(json.dumps(config))
    folder(tmp_path / "other", 0)
    with pytest.raises(InputError, match=r"its recipe\.data is folder:data, and here it is folder:other"):
        begun(run, "folder:other")
    assert begun(run, spec) == ["an older version began the run: what identifies its data is recorded from now on"]
    assert begun(run, "folder:other") == []


def test_a_run_that_ended_before_it_began_holds_nobody_to_its_data(tmp_path: Path) -> None:
    begun(tmp_path / "run", folder(tmp_path / "data", 0))
    (tmp_path / "run" / "config.json").unlink()
    assert begun(tmp_path / "run", folder(tmp_path / "other", 1)) == []
    with pytest.raises(InputError, match="its data differ"):
        begun(tmp_path / "run", f"folder:{tmp_path / 'data'}")
