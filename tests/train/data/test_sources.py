"""Data sources: each layout is read and split the same way every time, or refused in one line."""

import builtins
import csv
import errno
import gzip
import inspect
import io
import os
import pickle
import pkgutil
import shutil
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests import DATA, ROOT
from train.data import sources
from train.data.sources import (
    FileAccessError,
    decode,
    digits,
    examples,
    open_dataset,
    open_test_split,
    read_image,
    stratified_split,
)
from train.data.sources.splitting import split_rows
from vit_spec import InputError

RNG = np.random.default_rng(0)


def requires_data(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not (DATA / name).exists(), reason=f"needs {DATA / name}, which is not part of the project")


def random_image(size: tuple[int, int] = (12, 16), grey: bool = False) -> Image.Image:
    return Image.fromarray(RNG.integers(0, 256, size if grey else (*size, 3), np.uint8))


def encode(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def error_message(spec: str, held_out: float | str | None = None) -> str:
    """Return the message with which a data set is refused, one line."""
    with pytest.raises(InputError) as caught:
        open_dataset(spec, held_out)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def deny_access(monkeypatch: pytest.MonkeyPatch, file: Path, number: int = errno.EACCES) -> None:
    """Make the system refuse to open a file, as for a user without permission; root could read any file."""

    def refuse_file(usual: Callable[..., Any]) -> Callable[..., Any]:
        def open_others(path: Any, *rest: Any, **options: Any) -> Any:
            if isinstance(path, str | os.PathLike) and os.fspath(path) == str(file):
                raise OSError(number, os.strerror(number), str(file))
            return usual(path, *rest, **options)

        return open_others

    for module in (builtins, io, os):
        monkeypatch.setattr(module, "open", refuse_file(module.open))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Return a folder of three classes of four small colour images, as PNG, JPEG and WebP."""
    for name in ("ant", "bee", "cat"):
        (tmp_path / name).mkdir()
        for i, suffix in enumerate(("png", "jpg", "webp", "PNG")):
            random_image().save(tmp_path / name / f"{i}.{suffix}")
    return tmp_path


# The held-out images --------------------------------------------------------------------------------------------------


def test_a_split_has_every_row_on_one_side() -> None:
    train, held = stratified_split(np.repeat(np.arange(5), 20), 0.25)
    assert sorted([*train, *held]) == [*range(100)]


def test_a_split_holds_out_the_same_share_of_every_class() -> None:
    labels = np.repeat(np.arange(3), (10, 20, 40))
    _, held = stratified_split(labels, 0.2)
    assert np.bincount(labels[held]).tolist() == [2, 4, 8]


def test_a_class_of_one_image_is_trained_on() -> None:
    train, held = stratified_split(np.array([0, 0, 0, 1]), 0.5)
    assert 3 in train and len(held) == 2


def test_every_label_has_its_share_of_held_out_images() -> None:
    flags = np.zeros((100, 3), np.float32)
    flags[:50, 0], flags[50:70, 1], flags[70:75, 2] = 1, 1, 1  # no image has two labels, so all shares can be exact
    _, held = split_rows(flags, "labels", 0.2)
    assert flags[held].sum(0).tolist() == [10, 4, 1] and len(held) == 20


@pytest.mark.parametrize("kind", ["classes", "labels", "values"])
def test_groups_stay_on_one_side_of_a_split(kind: Any) -> None:
    groups = RNG.integers(0, 40, 200)
    answers = {"classes": groups % 3, "labels": RNG.integers(0, 2, (200, 4)), "values": RNG.random((200, 1))}[kind]
    train, held = split_rows(answers, kind, 0.2, groups)
    assert not {*groups[train]} & {*groups[held]} and len(train) + len(held) == 200


def test_the_share_is_exact_for_groups_with_the_same_classes() -> None:
    targets = np.tile(np.arange(2), 50)  # 25 groups of four images, two of each class
    _, held = split_rows(targets, "classes", 0.2, np.repeat(np.arange(25), 4))
    assert np.bincount(targets[held]).tolist() == [10, 10]


@requires_data("chest_xray")
def test_patients_of_the_real_table_stay_on_one_side_and_both_sides_have_every_finding() -> None:
    with (DATA / "chest_xray" / "sample_labels.csv").open() as file:
        rows = list(csv.DictReader(file))
    findings = sorted({word for row in rows for word in row["Finding Labels"].split("|")} - {"No Finding"})
    flags = np.array([[word in row["Finding Labels"].split("|") for word in findings] for row in rows], np.float32)
    patients = np.unique([row["Patient ID"] for row in rows], return_inverse=True)[1]
    train, held = split_rows(flags, "labels", 0.2, patients)
    assert not {*patients[train]} & {*patients[held]}
    assert flags[train].sum(0).all() and flags[held].sum(0).all()


def write_npz(path: Path, counts: Mapping[str, int], labels: Callable[[int], np.ndarray] | None = None) -> str:
    """Write an npz file in MedMNIST's layout with `counts` images per split; return the value of --data."""
    content = {}
    for split, count in counts.items():
        content[f"{split}_images"] = RNG.integers(0, 256, (count, 6, 5), np.uint8)
        content[f"{split}_labels"] = labels(count) if labels else (np.arange(count) % 3).astype(np.uint8)[:, None]
    np.savez_compressed(path / "set.npz", **content)
    return f"npz:{path / 'set.npz'}"


SPLIT_SIZES = {"train": 30, "val": 6, "test": 9}


@pytest.mark.parametrize(("asked", "count"), [(None, 6), ("val", 6), ("validation", 6), ("test", 9)])
def test_the_held_out_split_is_the_requested_one_or_the_validation_split(
    tmp_path: Path, asked: str | None, count: int
) -> None:
    source = open_dataset(write_npz(tmp_path, SPLIT_SIZES), asked)
    assert (len(source.train), len(source.held_out)) == (30, count)


def test_without_a_validation_split_the_test_split_is_held_out(tmp_path: Path) -> None:
    assert len(open_dataset(write_npz(tmp_path, {"train": 30, "test": 9})).held_out) == 9


def test_a_share_is_taken_from_the_training_images_whatever_splits_there_are(tmp_path: Path) -> None:
    source = open_dataset(write_npz(tmp_path, SPLIT_SIZES), 0.1)
    assert (len(source.train), len(source.held_out)) == (27, 3) and "val and test not used" in source.notes[0]


def test_a_test_split_is_set_aside_and_never_trained_on(photos: Path) -> None:
    spec = f"folder:{photos}?test=0.25"
    of_run, of_test = open_dataset(spec), open_dataset(spec, "test")
    names = [set(examples.names) for examples in (of_run.train, of_run.held_out, of_test.held_out)]
    assert [len(each) for each in names] == [6, 3, 3] and len(set.union(*names)) == 12
    assert np.bincount(of_test.held_out.targets).tolist() == [1, 1, 1]
    assert set(of_test.train.names) == names[0] | names[1]
    assert set(open_dataset(spec, 0.5).held_out.names).isdisjoint(names[2])
    assert "set aside as test: 3 of 12 images, 25% of every class" in of_run.notes


def test_a_test_split_of_the_digits_can_be_set_aside() -> None:
    source = open_dataset("digits?test=0.2")
    assert len(source.held_out) == 287 and open_test_split("digits") is None
    test = open_test_split("digits?test=0.2")
    assert test is not None and len(test) == 359
    assert "'test=' has no value: give one, or leave it out" in error_message("digits?test=")


def test_a_test_split_is_set_aside_beside_a_validation_split(tmp_path: Path) -> None:
    spec = write_npz(tmp_path, {"train": 30, "val": 6})
    assert (len(open_dataset(f"{spec}?test=0.2").train), len(open_dataset(f"{spec}?test=0.2").held_out)) == (24, 6)
    assert len(open_dataset(f"{spec}?test=0.2", "test").held_out) == 6


@pytest.mark.parametrize(
    ("splits", "share", "message"),
    [
        (SPLIT_SIZES, "0.2", "has a test split: leave ?test=0.2 out"),
        ({"train": 30}, "2", "?test=2: give a share between 0 and 1, such as test=0.2"),
        ({"train": 30}, "many", "?test=many: give a share between 0 and 1"),
    ],
)
def test_a_test_split_that_cannot_be_set_aside_is_refused(
    splits: dict[str, int], share: str, message: str, tmp_path: Path
) -> None:
    assert message in error_message(f"{write_npz(tmp_path, splits)}?test={share}")


def test_a_missing_split_is_refused_with_the_existing_ones(tmp_path: Path) -> None:
    assert "has no split 'text' to evaluate on: it has val and test; did you mean 'test'?" in error_message(
        write_npz(tmp_path, SPLIT_SIZES), "text"
    )


def test_a_split_of_data_without_splits_is_refused_with_a_share_as_the_remedy() -> None:
    assert "has no split 'val' to evaluate on: it comes without splits; give a share, such as 0.2" in error_message(
        "digits", "val"
    )


@pytest.mark.parametrize("share", [0.0, 1.0, float("nan")])
def test_a_share_outside_of_0_to_1_is_refused(share: float) -> None:
    assert "give a share between 0 and 1" in error_message("digits", share)


def test_a_validation_split_without_training_images_is_refused(tmp_path: Path) -> None:
    assert "has val and test but no train split" in error_message(write_npz(tmp_path, {"val": 6, "test": 9}))


def test_a_held_out_class_without_training_images_is_refused(tmp_path: Path) -> None:
    spec = write_npz(tmp_path, {"train": 9, "val": 30}, lambda n: np.where(np.arange(n) == 20, 1, np.arange(n) % 2 * 2))
    assert "set.npz val_images 20 is of class '1', which has no training images" in error_message(spec)


def test_a_held_out_class_number_above_those_of_training_is_refused(tmp_path: Path) -> None:
    spec = write_npz(tmp_path, {"train": 9, "val": 30}, lambda n: np.arange(n))
    assert (
        "set.npz val_images 9 has the target 9: expected a class number from 0 to 8; 21 of 30 are wrong"
        in error_message(spec)
    )


def test_a_class_number_below_zero_is_refused(tmp_path: Path) -> None:
    for classes, expected in ((3, "from 0 to 1; 3 of"), (2, "from 0; 5 of")):
        message = error_message(write_npz(tmp_path, {"train": 9}, lambda n, k=classes: np.arange(n) % k - 1))
        remedy = "number the classes from 0, or leave these images out"
        assert f"has the target -1: expected a class number {expected} 9 are wrong: {remedy}" in message


def test_a_label_that_is_neither_0_nor_1_is_refused(tmp_path: Path) -> None:
    spec = write_npz(tmp_path, {"train": 9}, lambda n: np.arange(2 * n).reshape(n, 2) % 3)
    assert "has the target [2., 0.]: expected 0 or 1 for every label" in error_message(spec)


def test_take_keeps_images_targets_and_names_together() -> None:
    train = open_dataset("digits").train
    part = train.take([5, 3]).take([1, 0])
    assert [*part.names] == [train.names[3], train.names[5]] and part.targets.tolist() == train.targets[[3, 5]].tolist()
    assert np.array_equal(part.read(0), train.read(3))


# Digits and folders ---------------------------------------------------------------------------------------------------


def test_digits_are_1438_and_359_images_of_ten_classes() -> None:
    source = open_dataset("digits")
    assert (len(source.train), len(source.held_out), source.classes) == (1438, 359, tuple("0123456789"))
    assert (source.task, source.channels, source.size) == ("classes", 1, (8, 8))


def test_no_digit_is_both_trained_on_and_held_out() -> None:
    source = open_dataset("digits")
    assert not {*source.train.names} & {*source.held_out.names}


def test_a_folder_of_class_folders_is_read_with_its_classes_in_order(photos: Path) -> None:
    source = open_dataset(f"folder:{photos}", 0.25)
    assert source.classes == ("ant", "bee", "cat") and source.channels == 3
    assert (len(source.train), len(source.held_out)) == (9, 3)


def test_files_in_nested_folders_are_found_and_hidden_ones_are_ignored(photos: Path) -> None:
    (photos / "ant" / "more").mkdir()
    random_image().save(photos / "ant" / "more" / "x.png")
    (photos / "ant" / "._0.png").write_bytes(b"what macOS leaves behind")
    source = open_dataset(f"folder:{photos}", 0.25)
    names = [name for part in (source.train, source.held_out) for name in part.names]
    assert len(names) == 13 and str(photos / "ant" / "more" / "x.png") in names


@pytest.mark.parametrize("suffix", ["jpeg", "bmp", "gif", "tif", "tiff", "TIF"])
def test_files_of_every_suffix_are_found_and_decoded(photos: Path, suffix: str) -> None:
    grey = random_image(grey=True)  # a GIF's palette does not change it
    grey.save(photos / "ant" / f"x.{suffix}", None if suffix != "jpeg" else "PNG")
    train = open_dataset(f"folder:{photos}", 0.01).train
    [found] = [image for i, name in enumerate(train.names) if name.endswith(f"x.{suffix}") for image in [train.read(i)]]
    assert np.array_equal(np.asarray(found.convert("L")), grey)


def all_names(spec: str) -> list[str]:
    source = open_dataset(spec, 0.25)
    return [name for part in (source.train, source.held_out) for name in part.names]


def test_links_to_folders_are_followed_inside_a_class_and_as_a_class(photos: Path, tmp_path_factory: Any) -> None:
    for link in (photos / "ant" / "more", photos / "dog"):
        target = photos / ".hidden" if link.name == "dog" else tmp_path_factory.mktemp("more")
        target.mkdir(exist_ok=True)
        random_image().save(target / "x.png")
        link.symlink_to(target)
    names = all_names(f"folder:{photos}")
    assert {str(photos / "ant" / "more" / "x.png"), str(photos / "dog" / "x.png")} <= {*names} and len(names) == 14


@pytest.mark.parametrize(
    ("link", "target"),
    [
        *[("train/dog", "train/ant"), ("train/bee/more", "train/ant/deep"), ("train/ant/a", "train/ant/deep")],
        *[("val", "train"), ("val/bee", "train/bee"), ("val/ant/more", "train/bee"), ("test", "val")],
    ],
)
@pytest.mark.parametrize("train", ["folder", "link"])
def test_a_link_to_images_of_the_data_is_refused(photos: Path, link: str, target: str, train: str) -> None:
    spec = copy_into_splits(photos, train="ant bee", val="ant bee")
    (photos / "set/train/ant/deep").mkdir()
    if train == "link":
        (photos / "set/train").rename(photos / "disk")
        (photos / "set/train").symlink_to(photos / "disk")
    path = photos / "set" / link
    shutil.rmtree(path, ignore_errors=True)
    path.symlink_to(photos / "set" / target)
    refusal = error_message(spec)
    assert f"{path} leads to {os.path.realpath(path)}, which is read already: remove the link" in refusal


@pytest.mark.parametrize("target", ["ant", "ant/deep", ".", "elsewhere"])
def test_a_link_that_leads_back_is_refused(photos: Path, target: str, tmp_path_factory: Any) -> None:
    (photos / "ant" / "deep").mkdir()
    link = photos / "ant" / "deep" / "back"
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "again").symlink_to(photos / "ant")
    link.symlink_to(elsewhere if target == "elsewhere" else photos / target)
    assert f"{link / 'again' if target == 'elsewhere' else link} leads back to {photos}" in error_message(
        f"folder:{photos}"
    )


def test_images_beside_class_folders_are_left_out_with_a_note(photos: Path) -> None:
    random_image().save(photos / "chart.png")
    note = f"files left out: 1 in no class folder of {photos.name}, such as {photos / 'chart.png'}"
    assert note in open_dataset(f"folder:{photos}").notes


def test_files_without_an_image_suffix_are_left_out_with_a_note(photos: Path) -> None:
    for name in ("x.heic", "y.heic", ".hidden"):
        (photos / "bee" / name).write_bytes(b"")
    message = f"files left out: 2 in class folders of {photos.name}, without the suffix of an image, such as "
    assert f"{message}{photos / 'bee' / 'x.heic'}" in open_dataset(f"folder:{photos}").notes


def copy_into_splits(photos: Path, **classes: str) -> str:
    for split, names in classes.items():
        for name in names.split():
            shutil.copytree(photos / name, photos / "set" / split / name)
    return f"folder:{photos / 'set'}"


def test_train_and_val_folders_are_splits(photos: Path) -> None:
    source = open_dataset(copy_into_splits(photos, train="ant bee", val="ant bee"))
    assert source.classes == ("ant", "bee") and source.held_out.targets.tolist() == [0] * 4 + [1] * 4


def test_an_unused_split_is_not_read(photos: Path) -> None:
    spec = copy_into_splits(photos, train="ant bee", val="ant bee")
    (photos / "set" / "test").mkdir()  # without class folders, as ImageNet's test split
    assert len(open_dataset(spec).held_out) == 8


def test_a_split_without_class_folders_is_refused_with_a_share_as_the_remedy(photos: Path) -> None:
    spec = copy_into_splits(photos, train="ant bee")
    shutil.copytree(photos / "cat", photos / "set" / "test")
    message = error_message(spec)
    assert f"{photos / 'set' / 'test'} holds no class folders" in message
    assert message.endswith("or hold out a share of the training images, --held-out 0.2")
    assert len(open_dataset(spec, 0.25).held_out) == 2


def test_the_held_out_split_may_have_one_class_only(photos: Path) -> None:
    assert open_dataset(copy_into_splits(photos, train="ant bee", val="bee")).held_out.targets.tolist() == [1] * 4


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path / 'none'} is not a folder" in error_message(f"folder:{tmp_path / 'none'}")


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path} holds no class folders" in error_message(f"folder:{tmp_path}")


def test_an_empty_class_folder_is_named(photos: Path) -> None:
    (photos / "dog").mkdir()
    assert f"{photos / 'dog'} holds no images" in error_message(f"folder:{photos}")


def test_a_single_class_is_refused_and_named(photos: Path) -> None:
    (photos / "ant").rename(photos / "train")  # a single folder of this name is a class
    for name in ("bee", "cat"):
        shutil.rmtree(photos / name)
    assert "holds one class, train: a classifier needs two or more" in error_message(f"folder:{photos}")


def test_a_class_folder_that_only_the_held_out_split_has_is_named(photos: Path) -> None:
    spec = copy_into_splits(photos, train="ant cat", val="ant bee")
    assert f"{photos / 'set' / 'val' / 'bee'} has no counterpart" in error_message(spec)


def test_a_class_folder_in_another_unicode_form_is_named_as_such(photos: Path) -> None:
    spec = copy_into_splits(photos, train="ant bee", val="ant bee")
    for split, name in (("train", "caf\u00e9"), ("val", "cafe\u0301")):
        shutil.copytree(photos / "cat", photos / "set" / split / name)
    assert f"has a name that {photos / 'set' / 'train'} has in another Unicode form" in error_message(spec)


@pytest.mark.parametrize(("train", "held"), [("train", "Val"), ("Training", "Testing"), ("TRAIN", "dev")])
def test_split_names_are_recognised_in_any_case(photos: Path, train: str, held: str) -> None:
    source = open_dataset(copy_into_splits(photos, **{train: "ant bee", held: "ant bee"}))
    assert source.classes == ("ant", "bee") and len(source.held_out) == 8


@pytest.mark.parametrize(("train", "held", "nearest"), [("train", "vaild", "valid"), ("Trian", "test", "train")])
def test_a_mistyped_split_is_not_taken_for_a_class(photos: Path, train: str, held: str, nearest: str) -> None:
    assert f"did you mean {nearest!r}?" in error_message(copy_into_splits(photos, **{train: "ant bee", held: "ant bee"}))


def test_a_share_of_a_train_folder_alone_is_held_out(photos: Path) -> None:
    assert open_dataset(copy_into_splits(photos, train="ant bee cat"), 0.25).classes == ("ant", "bee", "cat")


def test_two_folders_for_one_split_are_refused(photos: Path) -> None:
    spec = copy_into_splits(photos, train="ant bee", Test="ant bee", testing="ant bee")
    assert "has two folders for test, Test and testing" in error_message(spec)


@pytest.mark.parametrize(("held_out", "end"), [(None, "; validation and dev not used"), ("test", "in train")])
def test_validation_splits_beside_the_held_out_one_are_named(photos: Path, held_out: str | None, end: str) -> None:
    spec = copy_into_splits(photos, **dict.fromkeys(("train", "val", "validation", "dev", "test"), "ant bee"))
    [note] = [note for note in open_dataset(spec, held_out).notes if note.startswith("held out: ")]
    assert note.endswith(end)


def test_a_folder_of_images_beside_splits_is_refused(photos: Path) -> None:
    spec = copy_into_splits(photos, train="ant bee", val="ant bee")
    shutil.copytree(photos / "cat", photos / "set" / "unsorted")
    assert "has unsorted beside the split train: call it train, val or test, or move it out" in error_message(spec)


def test_a_folder_without_images_beside_splits_is_ignored(photos: Path) -> None:
    spec = copy_into_splits(photos, train="ant bee", val="ant bee")
    (photos / "set" / "annotations").mkdir()
    assert len(open_dataset(spec).held_out) == 8


@pytest.mark.parametrize("name", ["test", "train", "valid"])
def test_a_class_may_have_the_name_of_a_split(photos: Path, name: str) -> None:
    (photos / "cat").rename(photos / name)
    assert open_dataset(f"folder:{photos}", 0.25).classes == tuple(sorted(("ant", "bee", name)))


@pytest.mark.parametrize(
    "names", [("seg_train", "seg_test", "seg_pred"), ("training_set", "test_set"), ("train1", "Test1"), ("train-x", "test")]
)
def test_folders_that_look_like_splits_are_not_taken_for_classes(photos: Path, names: tuple[str, ...]) -> None:
    for name in names:
        shutil.copytree(photos / "ant", photos / "set" / name)
    message = error_message(f"folder:{photos / 'set'}")
    assert "has folders that look like splits and not like classes, " in message
    assert message.endswith("name them train, val or test, with the folders of the classes directly inside")


@pytest.mark.parametrize(
    "names",
    [("bullet_train", "test_tube", "cat"), ("train_horn", "train_bell"), ("train", "no_train"), ("valid", "exam")],
)
def test_words_of_splits_in_the_names_of_classes_are_no_splits(photos: Path, names: tuple[str, ...]) -> None:
    for name in names:
        shutil.copytree(photos / "ant", photos / "set" / name)
    assert open_dataset(f"folder:{photos / 'set'}", 0.25).classes == tuple(sorted(names))


def test_splits_inside_classes_are_refused_with_where_to_put_them(photos: Path) -> None:
    for name in ("ant", "bee"):
        for split in ("Train", "test"):
            shutil.copytree(photos / name, photos / "set" / name / split)
    message, root = error_message(f"folder:{photos / 'set'}"), photos / "set"
    assert f"{root / 'ant'} is a class that has the splits Train and test inside: put the images into " in message
    assert f"into {root / 'Train' / 'ant'} and {root / 'test' / 'ant'}" in message


def test_a_class_may_contain_a_folder_with_the_name_of_a_split(photos: Path) -> None:
    for name in ("train", "bus"):
        shutil.copytree(photos / "ant", photos / "bee" / name)
    assert len(open_dataset(f"folder:{photos}", 0.25).train) == 15


@pytest.mark.parametrize("inside", ["dataset", "dataset/train"])
def test_a_single_folder_around_the_classes_is_named(photos: Path, inside: str) -> None:
    spec = copy_into_splits(photos, **{inside: "ant bee"})
    message = error_message(spec)
    assert f"{photos / 'set'} has one class folder, dataset, with folders of images inside" in message
    assert message.endswith(f"if these are the classes or splits, give folder:{photos / 'set' / 'dataset'}")
    assert len(open_dataset(f"{spec}/dataset", 0.25).train) == 6


def test_a_single_folder_around_the_classes_of_a_split_is_named(photos: Path) -> None:
    spec = copy_into_splits(photos, **{"train/seg_train": "ant bee", "val/seg_val": "ant bee"})
    train = photos / "set" / "train"
    assert error_message(spec).endswith(f"move the folders of {train / 'seg_train'} into {train}")


def test_splits_without_class_folders_are_not_taken_for_classes(photos: Path) -> None:
    (photos / "ant").rename(photos / "train")
    (photos / "bee").rename(photos / "test")
    shutil.rmtree(photos / "cat")
    assert f"{photos / 'train'} holds no class folders" in error_message(f"folder:{photos}")


@requires_data("imagenet_sample")
def test_a_hundred_photographs_of_imagenet_are_read_by_their_classes(tmp_path: Path) -> None:
    (tmp_path / "train").symlink_to(DATA / "imagenet_sample")
    shutil.copytree(DATA / "imagenet_sample", tmp_path / "val")
    source = open_dataset(f"folder:{tmp_path}")
    assert len(source.classes) == 100 and source.classes[0] == "n01440764"
    assert "n01440764_tench" in source.train.names[0] and source.train.read(0).size == (500, 375)


# The value of --data --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "hint"),
    [("digit", "'digits'"), ("foldr:x", "'folder'"), ("folder", "folder:PATH"), ("digits:8", "digits"), ("nzp:x", "'npz'")],
)
def test_an_unknown_source_names_the_nearest(spec: str, hint: str) -> None:
    assert hint in error_message(spec)


@pytest.mark.parametrize("kind", ["folder", "folder:", "hf", "csv"])
def test_a_prefix_without_a_place_is_refused_with_its_form(kind: str) -> None:
    message = error_message(kind)
    assert (
        f"{kind!r} does not say where the images are: give {kind.rstrip(':')}:" in message and "did you mean" not in message
    )


def test_an_unknown_option_names_the_nearest() -> None:
    assert "'lable=x' is not an option of parquet:PATH" in error_message("parquet:x?lable=x")
    assert "did you mean 'label'?" in error_message("parquet:x?lable=x")


@pytest.mark.parametrize("name", ["im b?x=1", "im?test=0.5"])
def test_a_folder_with_the_form_of_options_in_its_name_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    assert f"{name} exists, but its ? begins the options: rename it" in error_message(f"folder:{tmp_path}/{name}")


def test_an_option_of_a_source_without_options_is_refused() -> None:
    assert "'label=y' is not an option of npz:FILE: give test=..." in error_message("npz:x.npz?label=y")


# Decoding -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["text", "cut", "empty"])
def test_a_file_that_cannot_be_read_is_named_with_a_remedy(photos: Path, damage: str) -> None:
    file = photos / "ant" / "1.jpg"
    file.write_bytes({"text": b"no image", "cut": file.read_bytes()[:300], "empty": b""}[damage])
    with pytest.raises(InputError, match=r"1\.jpg .*: replace or remove the file"):
        read_image(file)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"x\.jpg is not there"):
        read_image(tmp_path / "x.jpg")


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.EACCES, "let this user read it"), (errno.EMFILE, "ulimit -n"), (errno.EIO, "look at the disk")],
)
def test_a_system_error_is_reported_with_its_reason_and_a_remedy(
    photos: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    deny_access(monkeypatch, photos / "ant" / "1.jpg", number)
    with pytest.raises(FileAccessError, match=rf"1\.jpg cannot be read \({os.strerror(number)}\): .*{remedy}"):
        read_image(photos / "ant" / "1.jpg")


def test_a_folder_instead_of_an_image_is_an_access_error(photos: Path) -> None:
    (photos / "ant" / "x.png").mkdir()
    with pytest.raises(FileAccessError, match=r"x\.png cannot be read \(Is a directory\): a file was expected there"):
        read_image(photos / "ant" / "x.png")


def test_an_image_with_an_impossible_offset_is_damaged(tmp_path: Path) -> None:
    # The offset of the TIFF's first directory is larger than any file, so the system refuses to seek to it.
    (tmp_path / "x.tif").write_bytes(b"II+\0\x08\0\0\0" + b"\xff" * 7 + b"\x7f")
    with pytest.raises(InputError, match="replace or remove the file"):
        read_image(tmp_path / "x.tif")


@pytest.mark.parametrize(
    ("image", "form", "mode"),
    [
        (random_image(grey=True), "PNG", "L"),
        (random_image(grey=True).convert("1"), "PNG", "L"),
        (random_image(grey=True).convert("LA"), "PNG", "L"),
        (random_image().convert("P"), "PNG", "RGB"),
        (random_image().convert("RGBA"), "WEBP", "RGB"),
        (random_image().convert("CMYK"), "JPEG", "RGB"),
    ],
    ids=["grey", "1 bit", "grey with alpha", "palette", "colour with alpha", "CMYK"],
)
def test_every_mode_is_decoded_to_grey_or_rgb(image: Image.Image, form: str, mode: str) -> None:
    assert decode(encode(image, form), "x").mode == mode


def test_a_palette_with_transparency_keeps_its_colours() -> None:
    image = Image.new("P", (2, 2), 1)
    image.putpalette([0, 0, 0, 200, 100, 50])
    assert decode(encode(image, transparency=bytes([0, 128])), "x").getpixel((0, 0)) == (200, 100, 50)


@pytest.mark.parametrize("kind", ["folder", "parquet", "npz", "idx", "cifar", "csv", "tar"])
def test_a_leading_tilde_is_the_home_folder(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/nowhere")
    assert "/nowhere/x" in error_message(f"{kind}:~/x")


@pytest.mark.parametrize("kind", ["folder", "parquet", "npz", "idx", "cifar", "csv", "tar"])
def test_a_home_folder_that_does_not_exist_is_refused(kind: str) -> None:
    assert "~nobody-of-this-name/x" in error_message(f"{kind}:~nobody-of-this-name/x")


def test_an_image_is_rotated_upright() -> None:
    image, exif = random_image((8, 16)), Image.Exif()
    exif[0x0112] = 6  # to be rotated by 90 degrees clockwise
    assert np.array_equal(decode(encode(image, exif=exif), "x"), image.transpose(Image.Transpose.ROTATE_270))


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_more_than_eight_bits_of_grey_are_refused(form: str) -> None:
    with pytest.raises(InputError, match="more than 8 bits"):
        decode(encode(Image.fromarray(np.full((4, 4), 40000, np.uint16)), form), "x")


def test_more_than_eight_bits_of_colour_are_refused() -> None:
    def part(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", 2, 2, 16, 2, 0, 0, 0)  # 2x2, 16 bits, colour
    rows = zlib.compress((b"\0" + bytes(12)) * 2)
    png = b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", rows) + part(b"IEND", b"")
    with pytest.raises(InputError, match="more than 8 bits"):
        decode(png, "x")


def test_more_than_eight_bits_of_colour_in_planes_are_refused() -> None:
    lists_at = 8 + 2 + 12 * 10 + 4  # behind the header and ten tags
    planes_at = lists_at + 3 * 6
    lists = {258: (16, 16, 16), 273: (planes_at, planes_at + 8, planes_at + 16), 279: (8, 8, 8)}
    values = {256: 2, 257: 2, 259: 1, 262: 2, 277: 3, 278: 2, 284: 2}
    values |= {tag: lists_at + 6 * i for i, tag in enumerate(lists)}
    tags = (struct.pack("<HHII", tag, 3, 3 if tag in lists else 1, values[tag]) for tag in sorted(values))
    tiff = b"II*\0" + struct.pack("<IH", 8, len(values)) + b"".join(tags) + bytes(4)
    tiff += b"".join(struct.pack("<3H", *each) for each in lists.values()) + bytes(3 * 8)
    with Image.open(io.BytesIO(tiff)) as image:
        assert image.mode == "RGB" and len(image.tile) == 3  # Pillow opens it as 8 bits
    with pytest.raises(InputError, match=r"more than 8 bits a channel \(16 bits\)"):
        decode(tiff, "x")


def test_grey_that_is_multiplied_by_its_opacity_is_read() -> None:
    separate, multiplied = (struct.pack("<HHII", 338, 3, 1, kind) for kind in (2, 1))  # ExtraSamples
    tiff = encode(Image.new("LA", (2, 2), (100, 200)), "TIFF").replace(separate, multiplied)
    with Image.open(io.BytesIO(tiff)) as image:
        assert image.mode == "La"
    assert np.array_equal(decode(tiff, "x"), np.full((2, 2), 100 * 255 // 200, np.uint8))


def test_a_bmp_of_sixteen_bits_a_pixel_is_read() -> None:
    pixels = np.array([[0xF800, 0x07E0, 0x001F, 0xFFFF]], "<u2")  # red, green, blue and white, of 5, 6 and 5 bits
    info = struct.pack("<IiiHHIIiiII3I", 40, 4, 1, 1, 16, 3, 8, 0, 0, 0, 0, 0xF800, 0x07E0, 0x001F)
    bmp = b"BM" + struct.pack("<IHHI", 14 + len(info) + 8, 0, 0, 14 + len(info)) + info + pixels.tobytes()
    shown = np.asarray(decode(bmp, "x"))
    assert shown.tolist() == [[[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255]]]


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")  # tests turn warnings into errors
@pytest.mark.parametrize("limit", [100, 10], ids=["warned of by Pillow", "refused by Pillow"])
def test_an_image_of_too_many_pixels_is_refused(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with pytest.raises(InputError, match=f"x has more than {limit} pixels: make it smaller"):
        decode(encode(random_image()), "x")


def test_a_format_that_starts_another_program_is_refused() -> None:
    with pytest.raises(InputError, match="is not an image that can be read"):
        decode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n", "x")


# Arrays ---------------------------------------------------------------------------------------------------------------


@requires_data("medmnist")
def test_the_x_rays_of_medmnist_are_3882_training_and_524_validation_images() -> None:
    source = open_dataset(f"npz:{DATA}/medmnist/pneumoniamnist.npz")
    assert (len(source.train), len(source.held_out), source.task, source.size) == (3882, 524, "classes", (28, 28))
    with np.load(DATA / "medmnist" / "pneumoniamnist.npz") as file:
        assert np.array_equal(source.train.read(7), file["train_images"][7])
        assert np.array_equal(source.train.targets, file["train_labels"][:, 0])


def test_several_columns_of_labels_are_labels(tmp_path: Path) -> None:
    source = open_dataset(write_npz(tmp_path, SPLIT_SIZES, lambda n: np.arange(2 * n).reshape(n, 2) % 2))
    assert (source.task, source.classes) == ("labels", ("0", "1")) and source.train.targets.dtype == np.float32


@pytest.mark.parametrize(("rows", "is_one_hot"), [(np.eye(3), True), (np.tri(3), False), (np.eye(4)[:, :3], False)])
def test_a_note_says_that_columns_are_labels_and_asks_whether_one_hot_ones_are_classes(
    tmp_path: Path, rows: np.ndarray, is_one_hot: bool
) -> None:
    source = open_dataset(write_npz(tmp_path, {"train": 24}, lambda n: rows[np.arange(n) % len(rows)].astype(np.uint8)))
    hint = ", and a single 1 in every row; give class numbers, (N,), if each image has one class" * is_one_hot
    assert source.task == "labels" and f"train_labels has 3 columns: labels of 0 and 1{hint}" in source.notes


def test_arrays_of_a_second_layout_are_left_out_with_a_note(tmp_path: Path) -> None:
    images, labels = np.zeros((9, 4, 4), np.uint8), np.arange(9) % 3
    arrays = {"train_images": images, "train_labels": labels, "x_train": images[:3], "y_train": labels[:3], "more": labels}
    np.savez(tmp_path / "x.npz", **arrays)
    source = open_dataset(f"npz:{tmp_path / 'x.npz'}")
    assert "arrays left out: x_train, y_train, beside train_images, train_labels" in source.notes


@pytest.mark.parametrize("columns", [(0, 2), (2, 0), (3, 2)])
def test_splits_with_different_numbers_of_labels_are_refused(tmp_path: Path, columns: tuple[int, int]) -> None:
    content = {}
    for split, count in zip(("train", "val"), columns, strict=True):
        content[f"{split}_images"] = np.zeros((6, 8, 8), np.uint8)
        content[f"{split}_labels"] = np.eye(count, dtype=int)[np.arange(6) % count] if count else np.arange(6) % 2
    np.savez(tmp_path / "a.npz", **content)
    shapes = [content[f"{split}_labels"].shape for split in ("train", "val")]
    assert f"a.npz has train_labels {shapes[0]} and val_labels {shapes[1]}: as many" in error_message(
        f"npz:{tmp_path}/a.npz"
    )


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 1), (6, 5, 3)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_compressed_and_uncompressed_keras_arrays_are_read(
    tmp_path: Path, save: Any, shape: tuple[int, ...], order: Any
) -> None:
    images = np.array(RNG.integers(0, 256, (12, *shape), np.uint8), order=order)
    save(tmp_path / "a.npz", x_train=images, y_train=np.arange(12) % 2, x_test=images, y_test=np.arange(12) % 2)
    source = open_dataset(f"npz:{tmp_path / 'a.npz'}")
    assert (source.size, source.channels) == ((6, 5), 3 if shape[2:] == (3,) else 1)
    assert np.array_equal(source.held_out.read(4), images[4].squeeze())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": np.zeros(3)}, "holds a: expected train_images"),
        ({"x_train": np.zeros((4, 8, 8)), "y_train": np.arange(4)}, "x_train (4, 8, 8) float64: expected"),
        ({"x_train": np.zeros((4, 8, 8), np.uint8), "y_train": np.arange(5)}, "4 x_train but 5 y_train"),
        ({"x_train": np.zeros((4, 8, 8), np.uint8), "y_train": np.arange(4.0)}, "expected integers"),
        ({"x_train": np.zeros((4, 8, 8), np.uint8), "y_train": np.array([{}] * 4)}, "cannot be read"),
    ],
    ids=["names", "images", "counts", "labels", "pickles"],
)
def test_an_npz_file_with_other_contents_is_refused(tmp_path: Path, content: dict[str, np.ndarray], message: str) -> None:
    np.savez(tmp_path / "a.npz", **content)
    assert message in error_message(f"npz:{tmp_path / 'a.npz'}")


def test_a_damaged_npz_file_is_refused(tmp_path: Path) -> None:
    spec = write_npz(tmp_path, SPLIT_SIZES)
    (tmp_path / "set.npz").write_bytes((tmp_path / "set.npz").read_bytes()[:500])
    assert "cannot be read" in error_message(spec)


@requires_data("mnist")
def test_a_share_of_mnists_test_digits_alone_is_held_out() -> None:
    source = open_dataset(f"idx:{DATA}/mnist")
    assert (len(source.train), len(source.held_out), source.size) == (8000, 2000, (28, 28))
    assert "test is the only split" in source.notes[0]


def write_idx(path: Path, array: np.ndarray) -> None:
    data = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


@pytest.mark.parametrize(("prefix", "suffix"), [("", ""), ("", ".gz"), ("emnist-letters-", ".gz")])
def test_idx_files_are_read(tmp_path: Path, prefix: str, suffix: str) -> None:
    images = RNG.integers(0, 256, (6, 4, 5), np.uint8)
    for name in ("train", "t10k"):
        write_idx(tmp_path / f"{prefix}{name}-images-idx3-ubyte{suffix}", images)
        write_idx(tmp_path / f"{prefix}{name}-labels-idx1-ubyte{suffix}", np.array([0, 1] * 3, np.uint8))
    source = open_dataset(f"idx:{tmp_path}")
    assert (len(source.train), len(source.held_out), source.classes) == (6, 6, ("0", "1"))
    assert np.array_equal(source.train.read(2), images[2].T if prefix else images[2])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "train-labels-idx1-ubyte").unlink(), "has no labels beside it"),
        (lambda folder: (folder / "train-images-idx3-ubyte").write_bytes(b"\0\0\x08\3abc"), "cut short"),
        (lambda folder: (folder / "train-images-idx3-ubyte").write_bytes(b""), "fetch it again"),
        (lambda folder: write_idx(folder / "train-labels-idx1-ubyte", np.zeros(5, np.uint8)), "one label for each"),
        (lambda folder: write_idx(folder / "kmnist-train-images-idx3-ubyte", np.zeros((1, 2, 2))), "several data sets"),
        (lambda folder: (folder / "train-images-idx3-ubyte").unlink(), "not a folder with MNIST's files"),
    ],
    ids=["no labels", "cut", "empty", "counts", "two sets", "no images"],
)
def test_idx_files_that_do_not_fit_together_are_refused(
    tmp_path: Path, damage: Callable[[Path], Any], message: str
) -> None:
    write_idx(tmp_path / "train-images-idx3-ubyte", np.zeros((6, 4, 4), np.uint8))
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.zeros(6, np.uint8))
    damage(tmp_path)
    assert message in error_message(f"idx:{tmp_path}")


PIXELS = RNG.integers(0, 256, (4, 3072), np.uint8)


def write_cifar_pickles(folder: Path, hundred: bool = False) -> None:
    labels = b"fine_labels" if hundred else b"labels"
    names = ("train", "test") if hundred else (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
    for name in names:
        (folder / name).write_bytes(pickle.dumps({b"data": PIXELS, labels: [0, 1, 0, 1]}, protocol=2))
    meta = {"fine_label_names" if hundred else "label_names": ["cat", "dog"]}
    (folder / ("meta" if hundred else "batches.meta")).write_bytes(pickle.dumps(meta, protocol=2))


def write_cifar_records(folder: Path, hundred: bool = False) -> None:
    labels = np.array([[0, 0], [0, 1]] * 2, np.uint8)[:, 0 if hundred else 1 :]
    records = np.concatenate([labels, PIXELS], 1).tobytes()
    names = ("train.bin", "test.bin") if hundred else (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
    for name in names:
        (folder / name).write_bytes(records)
    (folder / ("fine_label_names.txt" if hundred else "batches.meta.txt")).write_text("cat\ndog\n\n")


@pytest.mark.parametrize("write", [write_cifar_pickles, write_cifar_records])
@pytest.mark.parametrize("hundred", [False, True])
def test_cifar_is_read_from_pickles_and_from_binary_records(tmp_path: Path, write: Any, hundred: bool) -> None:
    (tmp_path / "cifar-of-some-kind").mkdir()  # the folder in the archive
    write(tmp_path / "cifar-of-some-kind", hundred)
    source = open_dataset(f"cifar:{tmp_path}")
    assert (len(source.train), len(source.held_out), source.classes) == (4 if hundred else 20, 4, ("cat", "dog"))
    assert source.train.targets[:4].tolist() == [0, 1, 0, 1] and source.size == (32, 32)
    assert np.array_equal(source.train.read(1), PIXELS[1].reshape(3, 32, 32).transpose(1, 2, 0))


def test_a_cifar_batch_pickled_by_python_2_is_read(tmp_path: Path) -> None:
    write_cifar_pickles(tmp_path)
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    state = b"(K\x01K\x04M\x00\x0c\x86" + dtype + b"\x89T" + struct.pack("<i", PIXELS.nbytes) + PIXELS.tobytes() + b"tb"
    content = b"\x80\x02}(U\x04data" + array + state + b"U\x06labels](K\x00K\x01K\x00K\x01eu."
    (tmp_path / "test_batch").write_bytes(content)
    held = open_dataset(f"cifar:{tmp_path}").held_out
    assert np.array_equal(held.read(3), PIXELS[3].reshape(3, 32, 32).transpose(1, 2, 0))


class CallsSystem:
    """An object that is pickled as a call of os.system."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch never",)


def test_a_pickle_that_calls_a_function_is_refused_and_the_function_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_cifar_pickles(tmp_path)
    (tmp_path / "data_batch_3").write_bytes(pickle.dumps({"data": CallsSystem(), "labels": []}))
    assert (
        "data_batch_3 asks to call posix.system: CIFAR's files never do" in error_message(f"cifar:{tmp_path}")
        and not Path("never").exists()
    )


@pytest.mark.parametrize(
    "content",
    [
        b"",
        pickle.dumps([1]),
        pickle.dumps({"data": PIXELS}),
        pickle.dumps({"data": PIXELS.astype("f4"), "labels": [0, 1, 0, 1]}, protocol=2),
        pickle.dumps({"data": PIXELS, "labels": ["0", "1", "0", "1"]}, protocol=2),
        pickle.dumps({"data": PIXELS, "labels": [0]}, protocol=2),
    ],
    ids=["empty", "list", "no labels", "float", "text", "counts"],
)
def test_a_damaged_cifar_batch_is_named(tmp_path: Path, content: bytes) -> None:
    write_cifar_pickles(tmp_path)
    (tmp_path / "data_batch_2").write_bytes(content)
    assert "data_batch_2 " in error_message(f"cifar:{tmp_path}")


def test_two_data_sets_of_cifar_in_one_folder_are_refused(tmp_path: Path) -> None:
    for name in ("cifar-10", "cifar-100"):
        (tmp_path / name).mkdir()
        write_cifar_pickles(tmp_path / name, hundred=name == "cifar-100")
    assert "cifar-10/batches.meta and " in error_message(f"cifar:{tmp_path}")


def write_idx_pair(folder: Path, suffix: str = "") -> None:
    write_idx(folder / f"train-images-idx3-ubyte{suffix}", np.zeros((6, 4, 4), np.uint8))
    write_idx(folder / f"train-labels-idx1-ubyte{suffix}", np.arange(6, dtype=np.uint8) % 2)


@pytest.mark.parametrize(
    ("kind", "write", "name"),
    [
        ("cifar", write_cifar_pickles, "data_batch_3"),
        ("cifar", write_cifar_records, "data_batch_3.bin"),
        ("cifar", write_cifar_records, "batches.meta.txt"),
        ("idx", write_idx_pair, "train-images-idx3-ubyte"),
        ("idx", lambda folder: write_idx_pair(folder, ".gz"), "train-labels-idx1-ubyte.gz"),
        ("npz", lambda folder: write_npz(folder, SPLIT_SIZES), "set.npz"),
        ("folder", lambda folder: None, ""),
    ],
)
def test_a_source_without_read_permission_is_refused_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, write: Any, name: str
) -> None:
    write(tmp_path)
    deny_access(monkeypatch, tmp_path / name)
    if kind == "folder":
        error = PermissionError(errno.EACCES, "Permission denied", str(tmp_path))
        monkeypatch.setattr(os, "scandir", lambda path: (_ for _ in ()).throw(error))
    message = error_message(f"{kind}:{tmp_path}{'/set.npz' * (kind == 'npz')}")
    assert message == f"{tmp_path / name} cannot be read (Permission denied): let this user read it"


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_that_become_unreadable_are_an_access_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Any
) -> None:
    save(tmp_path / "a.npz", x_train=np.zeros((4, 8, 8), np.uint8), y_train=np.arange(4) % 2)
    with monkeypatch.context() as before:
        # So that no image is loaded yet
        before.setattr("train.data.sources.splitting._first_readable_image", lambda train: random_image(grey=True))
        source = open_dataset(f"npz:{tmp_path / 'a.npz'}")
    deny_access(monkeypatch, tmp_path / "a.npz")
    with pytest.raises(FileAccessError, match="let this user read it"):
        source.train.read(0)


@pytest.mark.parametrize("kind", ["idx", "npz"])
def test_arrays_that_are_cut_short_during_training_are_damaged_images(tmp_path: Path, kind: str) -> None:
    images, labels = np.full((40, 64, 64), 7, np.uint8), np.arange(40, dtype=np.uint8) % 2
    if kind == "idx":
        write_idx(tmp_path / "train-images-idx3-ubyte", images)
        write_idx(tmp_path / "train-labels-idx1-ubyte", labels)
    else:
        np.savez(tmp_path / "a.npz", y_train=labels, x_train=images)
    source = open_dataset(f"idx:{tmp_path}" if kind == "idx" else f"npz:{tmp_path / 'a.npz'}", 0.1)
    assert np.asarray(source.train.read(0)).min() == 7
    os.truncate(tmp_path / ("train-images-idx3-ubyte" if kind == "idx" else "a.npz"), 10_000)
    with pytest.raises(InputError, match=r"(ubyte image|x_train) \d+ cannot be read \(the file is cut short\): fetch"):
        source.train.read(len(source.train) - 1)


def test_a_folder_without_cifar_files_is_refused_with_the_expected_files(tmp_path: Path) -> None:
    assert "expected data_batch_1 to 5" in error_message(f"cifar:{tmp_path}")


# Properties taken from the first image --------------------------------------------------------------------------------


@pytest.mark.parametrize(("side", "size"), [(32, (32, 24)), (64, (64, 48)), (80, None)])
def test_small_images_are_taken_to_have_the_size_of_the_first(side: int, size: Any, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        for i in range(3):
            Image.new("RGB", (side * 3 // 4, side)).save(tmp_path / name / f"{i}.png")
    source = open_dataset(f"folder:{tmp_path}")
    assert source.size == size
    assert any(f"of {side}x{side * 3 // 4} pixels, as the first one is" in note for note in source.notes) == (
        size is not None
    )


def test_if_the_first_image_cannot_be_read_the_next_is_inspected(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        for i in range(3):
            Image.new("L", (12, 12)).save(tmp_path / name / f"{i}.png")
    (tmp_path / "a" / "0.png").write_bytes(b"")
    assert open_dataset(f"folder:{tmp_path}").channels == 1


def test_digits_are_those_of_scikit_learn() -> None:
    load_digits = pytest.importorskip("sklearn.datasets").load_digits
    rows, expected = digits._read_rows(), load_digits()
    assert np.array_equal(rows[:, :64], expected.data) and np.array_equal(rows[:, 64], expected.target)


# A source of your own -------------------------------------------------------------------------------------------------


@pytest.fixture
def example_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the source in the docstring of `examples` as pets:PATH."""
    _, code = (examples.__doc__ or "").split("and so on.\n")
    names: dict[str, Any] = {}
    exec(inspect.cleandoc(code), names)
    monkeypatch.setitem(sources._SOURCES, "pets", sources._SourceKind("pets:PATH", names["open_splits"]))


@pytest.mark.usefixtures("example_source")
def test_the_source_in_the_docstring_reads_the_class_from_the_name_of_a_photograph(tmp_path: Path) -> None:
    folder = tmp_path / "my cat-pictures"
    folder.mkdir()
    photographs = {f"{name}-{i}.jpg": random_image() for name in ("cat", "dog") for i in range(5)}
    for name, photograph in photographs.items():
        photograph.save(folder / name)
    data = open_dataset(f"pets:{folder}")
    assert data.classes == ("cat", "dog") and (len(data.train), len(data.held_out)) == (8, 2)
    for part in (data.train, data.held_out):
        for i, target in enumerate(part.targets):
            name = Path(part.names[i]).name
            assert name.startswith(data.classes[target])
            assert part.read(i).tobytes() == Image.open(folder / name).tobytes()


@pytest.mark.usefixtures("example_source")
def test_the_source_in_the_docstring_refuses_a_missing_folder_and_one_without_photographs(tmp_path: Path) -> None:
    usage = "give pets:PATH with PATH/CLASS-NUMBER.jpg inside"
    assert error_message(f"pets:{tmp_path}/none") == f"{tmp_path}/none is not a folder: {usage}"
    assert f"{tmp_path} leaves no images to train on" in error_message(f"pets:{tmp_path}")


def test_every_data_source_is_registered() -> None:
    modules = [pkgutil.resolve_name(f"{sources.__name__}.{each.name}") for each in pkgutil.iter_modules(sources.__path__)]
    found = {module.__name__: module.open_splits for module in modules if hasattr(module, "open_splits")}
    registered = {kind.open_splits for kind in sources._SOURCES.values()}
    missing = [module for module, open_splits in found.items() if open_splits not in registered]
    assert not missing, f"_SOURCES in train/data/sources/__init__.py lacks {', '.join(missing)}"
    assert registered == set(found.values())


@pytest.mark.parametrize("usage", [kind.usage for kind in sources._SOURCES.values()])
def test_every_data_source_is_documented(usage: str) -> None:
    is_in_page = f"\n| `{usage}` | " in (ROOT / "docs" / "reference" / "data.md").read_text()
    assert is_in_page, f"the table in docs/reference/data.md lacks {usage}"
    is_in_docstring = f"\n    {usage} " in (sources.__doc__ or "")
    assert is_in_docstring, f"the docstring of train/data/sources/__init__.py lacks {usage}"
