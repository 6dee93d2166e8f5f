"""The check of a data set: duplicates, unreadable images, odd shapes and rare classes, each planted and found."""

import csv
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("sklearn")

import vit_spec
from parity.checkpoints.writing import write
from parity.comparison.reproducible_init import weights
from train import data_check
from train.cli import main
from train.data_check import MIN_CORRELATION, thumbnail
from train.inference.doubtful_classes import find_doubtful

SIDE = 48


def photograph(seed: int, width: int = SIDE, height: int = SIDE) -> Image.Image:
    """Return a smooth random image in colour."""
    small = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Class folders with 12 training and 3 held-out images of each of two classes, all different."""
    for n, name in enumerate(("cat", "dog")):
        for split, count in (("train", 12), ("val", 3)):
            (tmp_path / split / name).mkdir(parents=True)
            for i in range(count):
                photograph(1000 * n + 100 * (split == "val") + i).save(tmp_path / split / name / f"{i:02}.png")
    return tmp_path


def check(photos: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, list[dict[str, str]]]:
    """Return the exit status, what is printed, and the rows of the table of findings."""
    table = photos.parent / f"{photos.name}.csv"
    arguments = ["--data", f"folder:{photos}", "--check-data", str(table), *options]
    status = main("train.torch", lambda request: 7, arguments)
    rows = list(csv.DictReader(table.read_text().splitlines()))
    table.unlink()
    return status, capsys.readouterr().out, rows


def test_a_sound_data_set_has_no_findings(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, printed, rows = check(photos, capsys)
    assert status == 0 and rows == []
    assert "24 training images, 6 held out" in printed and "2, with 12 to 12 training images: cat, dog" in printed
    assert "48x48 to 48x48 pixels, median 48x48 (height x width)" in printed and "findings  0, in" in printed


def test_the_same_image_in_both_sets_is_found_under_another_name_and_format(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.open(photos / "train/cat/03.png").save(photos / "val/cat/leaked.bmp")
    status, printed, [row] = check(photos, capsys)
    assert (
        status == 1
        and "held-out or test images with the pixels of an image of another set, which make scores too good: 1 (" in printed
    )
    assert (row["kind"], row["set"], row["other_set"]) == ("same image", "held out", "training")
    assert row["image"].endswith("leaked.bmp") and row["other"].endswith("03.png")


def test_the_same_image_with_two_classes_is_found(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.open(photos / "train/cat/03.png").save(photos / "train/dog/copy.png")
    status, printed, rows = check(photos, capsys)
    assert status == 1 and [row["kind"] for row in rows] == ["same image", "different targets"]
    assert rows[1]["detail"] == "dog and cat" and "pairs of the same image with different targets: 1 (" in printed


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_the_same_image_with_two_classes_is_found_in_every_set(
    split: str, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seed in (("cat", 501), ("dog", 502)):
        (photos / split / name).mkdir(parents=True, exist_ok=True)
        photograph(seed).save(photos / split / name / "a.png")
    Image.open(photos / split / "cat/a.png").save(photos / split / "dog/copy.png")
    status, printed, rows = check(photos, capsys)
    assert status == 1 and [row["kind"] for row in rows] == ["same image", "different targets"]
    assert "images with the pixels of an earlier one of their set: 1 (" in printed


def test_a_similar_image_with_another_class_is_named_as_such(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.open(photos / "train/cat/03.png").resize((24, 24)).save(photos / "train/dog/again.png")
    status, printed, rows = check(photos, capsys)
    similar = [row for row in rows if row["kind"].startswith("similar")]
    assert [(row["kind"], row["detail"]) for row in similar][1] == ("similar with different targets", "dog and cat")
    assert status == 0 and "pairs of similar images with different targets: 1 (" in printed


def test_a_patient_in_two_sets_is_found(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    patients = {"train/cat/00": "p0", "train/dog/00": "p1", "val/cat/00": "p0", "val/dog/00": "p2"}
    rows = [f"{name}.png,{Path(name).parent.name},{Path(name).parts[0]},{who}" for name, who in patients.items()]
    (photos / "t.csv").write_text("\n".join(["image,class,split,patient_id", *rows]))
    table = photos / "findings.csv"
    assert main("train.torch", lambda request: 7, ["--data", f"csv:{photos / 't.csv'}", "--check-data", str(table)]) == 1
    assert "groups with images in two sets, which make scores too good: 1 (" in capsys.readouterr().out
    [row] = csv.DictReader(table.read_text().splitlines())
    assert (row["kind"], row["set"], row["other_set"]) == ("same group", "held out", "training")
    assert row["image"] == str(photos / "val/cat/00.png") and row["other"] == str(photos / "train/cat/00.png")


@pytest.mark.parametrize("change", ["jpeg", "half", "grey"])
def test_an_image_that_was_saved_otherwise_is_similar(
    change: str, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = Image.open(photos / "train/dog/05.png")
    if change == "jpeg":
        stream = io.BytesIO()
        image.save(stream, "JPEG", quality=40)
        image = Image.open(stream)
    elif change == "half":
        image = image.resize((SIDE // 2, SIDE // 2))
    else:
        image = image.convert("L").convert("RGB")
    image.save(photos / "val/dog/again.png")
    status, printed, rows = check(photos, capsys)
    [row] = [row for row in rows if row["kind"] == "similar image"]
    assert status == 0 and "held-out or test images that are similar to an image of another set: 1 (" in printed
    assert row["image"].endswith("again.png") and row["other"].endswith("05.png") and row["set"] == "held out"


def test_unreadable_long_and_small_images_are_named(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (photos / "train/cat/broken.jpg").write_bytes(b"no image")
    photograph(9001, 400, 100).save(photos / "train/cat/long.png")
    photograph(9002, 20, 20).save(photos / "val/dog/small.png")
    status, printed, rows = check(photos, capsys)
    assert status == 1
    assert [(row["kind"], Path(row["image"]).name) for row in rows] == [
        *(("unreadable", "broken.jpg"), ("long", "long.png"), ("small", "small.png"))
    ]
    assert "is not an image that can be read" in rows[0]["detail"] and rows[1]["detail"] == "100x400"
    assert "20x20 to 100x400 pixels" in printed


def test_rare_classes_and_those_without_held_out_images_are_named(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (photos / "train/emu").mkdir()
    photograph(5000).save(photos / "train/emu/0.png")
    printed = check(photos, capsys)[1]
    assert "classes with fewer than 10 training images: 1 (emu: 1)" in printed
    assert "classes without held-out images: 1 (emu: 1)" in printed


def test_an_image_is_compared_with_all_earlier_ones_across_chunks(
    photos: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    photograph(3).resize((SIDE * 2, SIDE * 2)).save(photos / "train/dog/zz.png")
    whole = check(photos, capsys)[2]
    monkeypatch.setattr(data_check, "CHUNK", 5)
    assert check(photos, capsys)[2] == whole and len(whole) == 2  # their classes differ too
    assert (Path(whole[0]["image"]).name, Path(whole[0]["other"]).name) == ("zz.png", "03.png")
    monkeypatch.setattr(data_check, "MAX_COMPARED", 10)
    _, printed, rows = check(photos, capsys)
    assert not rows and "not compared  training images with each other" in printed


def test_images_of_one_colour_are_similar_to_nothing() -> None:
    assert not thumbnail(Image.new("RGB", (40, 40), "red")).any()
    found = thumbnail(photograph(1))
    assert found @ found == pytest.approx(1) and found @ thumbnail(photograph(2)) < MIN_CORRELATION


@pytest.mark.parametrize(("name", "message"), [("f.txt", "ends in .csv"), ("no/f.csv", "there is no folder")])
def test_a_table_that_cannot_be_written_is_refused_first(
    name: str, message: str, photos: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(data_check, "_scan", pytest.fail)
    assert main("train.fake", lambda request: 7, ["--data", f"folder:{photos}", "--check-data", name]) == 2
    assert message in capsys.readouterr().err


def test_an_existing_table_is_not_replaced(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = photos / "mine.csv"
    table.write_text("mine")
    assert main("train.fake", lambda request: 7, ["--data", f"folder:{photos}", "--check-data", str(table)]) == 2
    assert capsys.readouterr().err == f"error: --check-data {table} exists: give another name\n"
    assert table.read_text() == "mine"


# Wrong classes --------------------------------------------------------------------------------------------------------


def test_wrong_classes_are_found_by_the_features_of_the_other_images() -> None:
    rng = np.random.default_rng(0)
    classes = rng.integers(0, 5, 600)
    features = rng.normal(size=(600, 20)) + 4 * np.eye(20)[classes]
    is_wrong = rng.random(600) < 0.05
    given = np.where(is_wrong, (classes + rng.integers(1, 5, 600)) % 5, classes)
    found, accuracy = find_doubtful(features.astype(np.float32), given)
    assert 0.85 < accuracy < 0.97
    rows = [each.row for each in found]
    right = is_wrong[rows].sum()
    assert right / is_wrong.sum() > 0.8 and right / len(rows) > 0.6
    assert is_wrong[rows[: len(rows) // 3]].mean() > 0.9  # the most doubtful first
    assert np.mean([classes[each.row] == each.other for each in found if is_wrong[each.row]]) > 0.9
    assert all(each.of_other > each.probability for each in found)


def test_a_class_of_one_image_is_left_out() -> None:
    features = np.random.default_rng(0).normal(size=(11, 3)) + 9 * np.repeat([0, 1], [10, 1])[:, None]
    assert find_doubtful(features, np.repeat([0, 1], [10, 1]))[0] == []


def write_weights(path: Path, **changes: Any) -> Path:
    sizes = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 1, "num_heads": 2, "mlp_dim": 64}
    write(weights(vit_spec.get("vit_ti16", **(sizes | changes)), 0), path, "torch")
    return path


def test_the_command_names_images_with_a_wrong_class(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in photos.rglob("*.png"):
        image = np.asarray(Image.open(path)).astype(float)
        image[..., 0 if path.parent.name == "cat" else 2] += 60  # cats are red, and dogs blue
        Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(path)
    (photos / "train/cat/05.png").rename(photos / "train/dog/cat.png")
    (photos / "val/dog/01.png").rename(photos / "val/cat/dog.png")
    status, printed, rows = check(
        photos, capsys, "--init", str(write_weights(photos.parent / f"{photos.name}.safetensors"))
    )
    assert status == 0 and "images that the classifier gives another class: " in printed
    found = {row["image"].rpartition("/")[2]: row["detail"] for row in rows if row["kind"] == "doubtful class"}
    assert found["cat.png"].startswith("cat (0.") and " rather than dog (0." in found["cat.png"] and "dog.png" in found
    assert len(found) <= 5


def test_wrong_classes_need_weights_for_photographs(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    five = write_weights(
        photos.parent / f"{photos.name}.safetensors", in_channels=5, pixels={"mean": (0.5,), "std": (0.5,)}
    )
    arguments = [
        "--data",
        f"folder:{photos}",
        "--check-data",
        str(photos.parent / f"{photos.name}.csv"),
        "--init",
        str(five),
    ]
    assert main("train.torch", lambda request: 7, arguments) == 2
    assert "takes images of 5 channels: give other weights" in capsys.readouterr().err


def test_test_images_are_checked_too(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("cat", "dog"):
        (photos / "test" / name).mkdir(parents=True)
        photograph(500 + len(name) + (name == "dog")).save(photos / "test" / name / "0.png")
    Image.open(photos / "train/cat/03.png").save(photos / "test/cat/of training.bmp")
    Image.open(photos / "val/dog/01.png").save(photos / "test/dog/held out.bmp")
    (photos / "test/dog/broken.jpg").write_bytes(b"no image")
    status, printed, rows = check(photos, capsys)
    assert status == 1 and "24 training images, 6 held out, 5 test" in printed
    found = {(row["kind"], row["set"], row["other_set"]) for row in rows}
    same = {("same image", "test", each) for each in ("training", "held out")}
    assert found == {("unreadable", "test", ""), *same}


def test_the_images_that_are_set_aside_are_checked(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in list(photos.glob("train/*/*.png")):
        Image.open(path).save(path.with_suffix(".bmp"))  # each training image twice
    table = photos.parent / f"{photos.name}.csv"
    main("train.torch", lambda request: 7, ["--data", f"folder:{photos}?test=0.25", "--check-data", str(table)])
    assert "36 training images, 6 held out, 12 test" in capsys.readouterr().out
    sets = {(row["set"], row["other_set"]) for row in csv.DictReader(table.read_text().splitlines())}
    assert ("test", "training") in sets


def test_classes_of_few_images_are_named_as_not_judged(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in [*photos.glob("train/cat/*.png")][1:]:
        path.unlink()
    printed = check(photos, capsys, "--init", str(write_weights(photos.parent / f"{photos.name}.safetensors")))[1]
    assert "not classified" in printed and "4 images of 1 classes with fewer than 5 images" in printed
