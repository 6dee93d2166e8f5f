"""Where images come from: each layout is read as it is met, divided the same way every time, or refused in one line."""

import builtins
import csv
import errno
import gzip
import io
import os
import pickle
import shutil
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests import DATA
from train.data.sources import Unavailable, decode, open_source, read_image, stratified
from train.data.sources.splitting import divided
from vit_spec import InputError

RNG = np.random.default_rng(0)


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not (DATA / name).exists(), reason=f"needs {DATA / name}, which is not part of the project")


def picture(size: tuple[int, int] = (12, 16), grey: bool = False) -> Image.Image:
    return Image.fromarray(RNG.integers(0, 256, size if grey else (*size, 3), np.uint8))


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def refused(spec: str, held_out: float | str | None = None) -> str:
    """The message, which is one line."""
    with pytest.raises(InputError) as caught:
        open_source(spec, held_out)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def withheld(monkeypatch: pytest.MonkeyPatch, file: Path, number: int = errno.EACCES) -> None:
    """Let the system refuse a file, as to a user who may not read it: to root it would give all."""

    def refusing(usual: Callable[..., Any]) -> Callable[..., Any]:
        def opened(path: Any, *rest: Any, **options: Any) -> Any:
            if isinstance(path, str | os.PathLike) and os.fspath(path) == str(file):
                raise OSError(number, os.strerror(number), str(file))
            return usual(path, *rest, **options)

        return opened

    for module in (builtins, io, os):
        monkeypatch.setattr(module, "open", refusing(module.open))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three classes of four small colour photographs, as PNG, JPEG and WebP."""
    for name in ("ant", "bee", "cat"):
        (tmp_path / name).mkdir()
        for i, suffix in enumerate(("png", "jpg", "webp", "PNG")):
            picture().save(tmp_path / name / f"{i}.{suffix}")
    return tmp_path


# What is held out -----------------------------------------------------------------------------------------------------


def test_a_split_shares_no_row_and_loses_none() -> None:
    train, held = stratified(np.repeat(np.arange(5), 20), 0.25)
    assert sorted([*train, *held]) == [*range(100)]


def test_a_split_holds_out_the_same_share_of_every_class() -> None:
    labels = np.repeat(np.arange(3), (10, 20, 40))
    _, held = stratified(labels, 0.2)
    assert np.bincount(labels[held]).tolist() == [2, 4, 8]


def test_a_class_of_one_image_is_trained_on() -> None:
    train, held = stratified(np.array([0, 0, 0, 1]), 0.5)
    assert 3 in train and len(held) == 2


def test_labels_are_divided_so_that_each_has_its_share() -> None:
    flags = np.zeros((100, 3), np.float32)
    flags[:50, 0], flags[50:70, 1], flags[70:75, 2] = 1, 1, 1  # apart from one another, so that all can be exact
    _, held = divided(flags, "labels", 0.2)
    assert flags[held].sum(0).tolist() == [10, 4, 1] and len(held) == 20


@pytest.mark.parametrize("kind", ["classes", "labels", "values"])
def test_groups_are_never_divided(kind: Any) -> None:
    groups = RNG.integers(0, 40, 200)
    answers = {"classes": groups % 3, "labels": RNG.integers(0, 2, (200, 4)), "values": RNG.random((200, 1))}[kind]
    train, held = divided(answers, kind, 0.2, groups)
    assert not {*groups[train]} & {*groups[held]} and len(train) + len(held) == 200


def test_groups_of_equal_content_hold_out_the_exact_share() -> None:
    answers = np.tile(np.arange(2), 50)  # 25 groups of four images, two of each class
    _, held = divided(answers, "classes", 0.2, np.repeat(np.arange(25), 4))
    assert np.bincount(answers[held]).tolist() == [10, 10]


@needs("chest_xray")
def test_the_patients_of_the_real_table_are_on_one_side_and_no_finding_is_lost() -> None:
    with (DATA / "chest_xray" / "sample_labels.csv").open() as file:
        rows = list(csv.DictReader(file))
    findings = sorted({word for row in rows for word in row["Finding Labels"].split("|")} - {"No Finding"})
    flags = np.array([[word in row["Finding Labels"].split("|") for word in findings] for row in rows], np.float32)
    patients = np.unique([row["Patient ID"] for row in rows], return_inverse=True)[1]
    train, held = divided(flags, "labels", 0.2, patients)
    assert not {*patients[train]} & {*patients[held]}
    assert flags[train].sum(0).all() and flags[held].sum(0).all()


def arrays(path: Path, counts: Mapping[str, int], labels: Callable[[int], np.ndarray] | None = None) -> str:
    """Write an npz file of MedMNIST's layout with so many images a split; return its spec."""
    content = {}
    for split, count in counts.items():
        content[f"{split}_images"] = RNG.integers(0, 256, (count, 6, 5), np.uint8)
        content[f"{split}_labels"] = labels(count) if labels else (np.arange(count) % 3).astype(np.uint8)[:, None]
    np.savez_compressed(path / "set.npz", **content)
    return f"npz:{path / 'set.npz'}"


ALL = {"train": 30, "val": 6, "test": 9}


@pytest.mark.parametrize(("asked", "count"), [(None, 6), ("val", 6), ("validation", 6), ("test", 9)])
def test_the_split_to_judge_by_is_the_one_asked_for_or_validation(tmp_path: Path, asked: str | None, count: int) -> None:
    source = open_source(arrays(tmp_path, ALL), asked)
    assert (len(source.train), len(source.held_out)) == (30, count)


def test_without_a_validation_split_the_test_split_judges(tmp_path: Path) -> None:
    assert len(open_source(arrays(tmp_path, {"train": 30, "test": 9})).held_out) == 9


def test_a_share_is_taken_from_the_training_images_whatever_splits_there_are(tmp_path: Path) -> None:
    source = open_source(arrays(tmp_path, ALL), 0.1)
    assert (len(source.train), len(source.held_out)) == (27, 3) and "val and test left aside" in source.notes[0]


def test_a_split_that_is_not_there_is_told_with_those_that_are(tmp_path: Path) -> None:
    assert "has no split 'text' to judge by: it has val and test; did you mean 'test'?" in refused(
        arrays(tmp_path, ALL), "text"
    )


def test_a_split_asked_of_data_without_is_told_to_be_a_share() -> None:
    assert "has no split 'val' to judge by: it comes without; give a share, such as 0.2" in refused("digits", "val")


@pytest.mark.parametrize("share", [0.0, 1.0, float("nan")])
def test_a_share_is_between_0_and_1(share: float) -> None:
    assert "give a share between 0 and 1" in refused("digits", share)


def test_a_validation_split_without_training_images_is_refused(tmp_path: Path) -> None:
    assert "has val and test but no train split" in refused(arrays(tmp_path, {"val": 6, "test": 9}))


def test_a_class_that_is_judged_but_never_shown_is_refused(tmp_path: Path) -> None:
    spec = arrays(tmp_path, {"train": 9, "val": 30}, lambda n: np.where(np.arange(n) == 20, 1, np.arange(n) % 2 * 2))
    assert "set.npz val_images 20 is of class '1', of which no image is trained on" in refused(spec)


def test_a_class_number_above_all_of_training_is_refused(tmp_path: Path) -> None:
    spec = arrays(tmp_path, {"train": 9, "val": 30}, lambda n: np.arange(n))
    assert "set.npz val_images 9 has the answer 9: a class number from 0 to 8 was expected; 21 of 30 are wrong" in refused(
        spec
    )


def test_a_class_number_below_zero_is_refused(tmp_path: Path) -> None:
    assert "has the answer -1: a class number" in refused(arrays(tmp_path, {"train": 9}, lambda n: np.arange(n) % 3 - 1))


def test_a_label_that_is_neither_0_nor_1_is_refused(tmp_path: Path) -> None:
    spec = arrays(tmp_path, {"train": 9}, lambda n: np.arange(2 * n).reshape(n, 2) % 3)
    assert "has the answer [2., 0.]: 0 or 1 for every label was expected" in refused(spec)


def test_a_subset_keeps_images_answers_and_names_together() -> None:
    train = open_source("digits").train
    part = train.take([5, 3]).take([1, 0])
    assert [*part.names] == [train.names[3], train.names[5]] and part.answers.tolist() == train.answers[[3, 5]].tolist()
    assert np.array_equal(part.read(0), train.read(3))


# Digits and folders ---------------------------------------------------------------------------------------------------


def test_digits_are_1438_and_359_images_of_ten_classes() -> None:
    source = open_source("digits")
    assert (len(source.train), len(source.held_out), source.classes) == (1438, 359, tuple("0123456789"))
    assert (source.kind, source.channels, source.size) == ("classes", 1, (8, 8))


def test_no_digit_is_both_trained_on_and_held_out() -> None:
    source = open_source("digits")
    assert not {*source.train.names} & {*source.held_out.names}


def test_a_folder_of_class_folders_is_read_with_its_classes_in_order(photos: Path) -> None:
    source = open_source(f"folder:{photos}", 0.25)
    assert source.classes == ("ant", "bee", "cat") and source.channels == 3
    assert (len(source.train), len(source.held_out)) == (9, 3)


def test_files_in_deeper_folders_count_and_hidden_ones_do_not(photos: Path) -> None:
    (photos / "ant" / "more").mkdir()
    picture().save(photos / "ant" / "more" / "x.png")
    (photos / "ant" / "._0.png").write_bytes(b"what macOS leaves behind")
    source = open_source(f"folder:{photos}", 0.25)
    names = [name for part in (source.train, source.held_out) for name in part.names]
    assert len(names) == 13 and str(photos / "ant" / "more" / "x.png") in names


@pytest.mark.parametrize("suffix", ["jpeg", "bmp", "gif", "tif", "tiff", "TIF"])
def test_files_of_every_suffix_are_found_and_decoded(photos: Path, suffix: str) -> None:
    grey = picture(grey=True)  # which no palette changes
    grey.save(photos / "ant" / f"x.{suffix}", None if suffix != "jpeg" else "PNG")
    train = open_source(f"folder:{photos}", 0.01).train
    [found] = [image for i, name in enumerate(train.names) if name.endswith(f"x.{suffix}") for image in [train.read(i)]]
    assert np.array_equal(np.asarray(found.convert("L")), grey)


def all_names(spec: str) -> list[str]:
    source = open_source(spec, 0.25)
    return [name for part in (source.train, source.held_out) for name in part.names]


def test_links_to_folders_are_followed_below_a_class_as_beside_it(photos: Path, tmp_path_factory: Any) -> None:
    more = tmp_path_factory.mktemp("more")
    picture().save(more / "x.png")
    (photos / "ant" / "more").symlink_to(more)
    (photos / "dog").symlink_to(more)
    names = all_names(f"folder:{photos}")
    assert {str(photos / "ant" / "more" / "x.png"), str(photos / "dog" / "x.png")} <= {*names} and len(names) == 14


@pytest.mark.parametrize("target", ["ant", "ant/deep", ".", "elsewhere"])
def test_a_link_that_leads_back_is_refused(photos: Path, target: str, tmp_path_factory: Any) -> None:
    (photos / "ant" / "deep").mkdir()
    link = photos / "ant" / "deep" / "back"
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "again").symlink_to(photos / "ant")
    link.symlink_to(elsewhere if target == "elsewhere" else photos / target)
    assert f"{link / 'again' if target == 'elsewhere' else link} leads back to {photos}" in refused(f"folder:{photos}")


def test_images_beside_class_folders_are_left_out_with_a_note(photos: Path) -> None:
    picture().save(photos / "chart.png")
    note = f"files left out: 1 in no class folder of {photos.name}, such as {photos / 'chart.png'}"
    assert note in open_source(f"folder:{photos}").notes


def test_files_that_are_no_images_by_their_names_are_left_out_with_a_note(photos: Path) -> None:
    for name in ("x.heic", "y.heic", ".hidden"):
        (photos / "bee" / name).write_bytes(b"")
    said = f"files left out: 2 in class folders of {photos.name}, no images by their names, such as "
    assert f"{said}{photos / 'bee' / 'x.heic'}" in open_source(f"folder:{photos}").notes


def split_folders(photos: Path, **classes: str) -> str:
    for split, names in classes.items():
        for name in names.split():
            shutil.copytree(photos / name, photos / "set" / split / name)
    return f"folder:{photos / 'set'}"


def test_train_and_val_folders_are_the_split(photos: Path) -> None:
    source = open_source(split_folders(photos, train="ant bee", val="ant bee"))
    assert source.classes == ("ant", "bee") and source.held_out.answers.tolist() == [0] * 4 + [1] * 4


def test_a_split_that_is_not_asked_for_is_not_looked_at(photos: Path) -> None:
    spec = split_folders(photos, train="ant bee", val="ant bee")
    (photos / "set" / "test").mkdir()  # without class folders, as ImageNet's
    assert len(open_source(spec).held_out) == 8


def test_a_split_without_class_folders_is_told_to_hold_out_a_share(photos: Path) -> None:
    spec = split_folders(photos, train="ant bee")
    shutil.copytree(photos / "cat", photos / "set" / "test")
    said = refused(spec)
    assert f"{photos / 'set' / 'test'} holds no class folders" in said
    assert said.endswith("or judge by a share of the training images, --held-out 0.2")
    assert len(open_source(spec, 0.25).held_out) == 2


def test_a_model_may_be_judged_by_images_of_one_class(photos: Path) -> None:
    assert open_source(split_folders(photos, train="ant bee", val="bee")).held_out.answers.tolist() == [1] * 4


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path / 'none'} is not a folder" in refused(f"folder:{tmp_path / 'none'}")


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path} holds no class folders" in refused(f"folder:{tmp_path}")


def test_an_empty_class_folder_is_named(photos: Path) -> None:
    (photos / "dog").mkdir()
    assert f"{photos / 'dog'} holds no images" in refused(f"folder:{photos}")


def test_a_single_class_is_named(photos: Path) -> None:
    (photos / "ant").rename(photos / "train")  # a folder of that name alone is a class
    for name in ("bee", "cat"):
        shutil.rmtree(photos / name)
    assert "holds one class, train: a model needs two or more to tell apart" in refused(f"folder:{photos}")


def test_a_class_that_is_only_held_out_is_named(photos: Path) -> None:
    spec = split_folders(photos, train="ant cat", val="ant bee")
    assert f"{photos / 'set' / 'val' / 'bee'} has no counterpart" in refused(spec)


@pytest.mark.parametrize(("train", "held"), [("train", "Val"), ("Training", "Testing"), ("TRAIN", "dev")])
def test_splits_are_told_by_their_names_in_any_case(photos: Path, train: str, held: str) -> None:
    source = open_source(split_folders(photos, **{train: "ant bee", held: "ant bee"}))
    assert source.classes == ("ant", "bee") and len(source.held_out) == 8


@pytest.mark.parametrize(("train", "held", "nearest"), [("train", "vaild", "valid"), ("Trian", "test", "train")])
def test_a_mistyped_split_is_no_class(photos: Path, train: str, held: str, nearest: str) -> None:
    assert f"did you mean {nearest!r}?" in refused(split_folders(photos, **{train: "ant bee", held: "ant bee"}))


def test_a_train_folder_alone_is_divided(photos: Path) -> None:
    assert open_source(split_folders(photos, train="ant bee cat"), 0.25).classes == ("ant", "bee", "cat")


def test_two_folders_for_one_split_are_refused(photos: Path) -> None:
    spec = split_folders(photos, train="ant bee", Test="ant bee", testing="ant bee")
    assert "has two folders for test, Test and testing" in refused(spec)


def test_a_folder_of_images_beside_splits_is_refused(photos: Path) -> None:
    spec = split_folders(photos, train="ant bee", val="ant bee")
    shutil.copytree(photos / "cat", photos / "set" / "unsorted")
    assert "has unsorted beside the split train: call it train, val or test, or move it out" in refused(spec)


def test_a_folder_without_images_beside_splits_is_left_alone(photos: Path) -> None:
    spec = split_folders(photos, train="ant bee", val="ant bee")
    (photos / "set" / "annotations").mkdir()
    assert len(open_source(spec).held_out) == 8


@pytest.mark.parametrize("name", ["test", "train", "valid"])
def test_a_class_may_be_called_as_a_split_is(photos: Path, name: str) -> None:
    (photos / "cat").rename(photos / name)
    assert open_source(f"folder:{photos}", 0.25).classes == tuple(sorted(("ant", "bee", name)))


def test_splits_without_classes_are_no_classes(photos: Path) -> None:
    (photos / "ant").rename(photos / "train")
    (photos / "bee").rename(photos / "test")
    shutil.rmtree(photos / "cat")
    assert f"{photos / 'train'} holds no class folders" in refused(f"folder:{photos}")


@needs("imagenet_sample")
def test_a_hundred_photographs_of_imagenet_are_read_by_their_classes(tmp_path: Path) -> None:
    for split in ("train", "val"):
        (tmp_path / split).symlink_to(DATA / "imagenet_sample")
    source = open_source(f"folder:{tmp_path}")
    assert len(source.classes) == 100 and source.classes[0] == "n01440764"
    assert "n01440764_tench" in source.train.names[0] and source.train.read(0).size == (500, 375)


# What is asked for ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "hint"),
    [("digit", "'digits'"), ("foldr:x", "'folder'"), ("folder", "folder:PATH"), ("digits:8", "digits"), ("nzp:x", "'npz'")],
)
def test_an_unknown_source_names_the_nearest(spec: str, hint: str) -> None:
    assert hint in refused(spec)


@pytest.mark.parametrize("kind", ["folder", "folder:", "hf", "csv"])
def test_a_kind_without_a_place_is_told_that_it_must_follow(kind: str) -> None:
    said = refused(kind)
    assert f"{kind!r} does not say where the images are: give {kind.rstrip(':')}:" in said and "did you mean" not in said


def test_an_unknown_option_names_the_nearest() -> None:
    assert "'lable=x' is no option of parquet:PATH" in refused("parquet:x?lable=x")
    assert "did you mean 'label'?" in refused("parquet:x?lable=x")


def test_an_option_of_a_kind_without_options_is_refused() -> None:
    assert "it takes none" in refused("npz:x.npz?label=y")


# Decoding -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["text", "cut", "empty"])
def test_a_file_that_cannot_be_read_is_named_with_a_remedy(photos: Path, damage: str) -> None:
    file = photos / "ant" / "1.jpg"
    file.write_bytes({"text": b"no image", "cut": file.read_bytes()[:300], "empty": b""}[damage])
    with pytest.raises(InputError, match=r"1\.jpg .*: replace or remove the file"):
        read_image(file)


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"x\.jpg is not there"):
        read_image(tmp_path / "x.jpg")


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.EACCES, "let this user read it"), (errno.EMFILE, "ulimit -n"), (errno.EIO, "look at the disk")],
)
def test_what_the_system_does_not_give_is_told_with_its_reason(
    photos: Path, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    withheld(monkeypatch, photos / "ant" / "1.jpg", number)
    with pytest.raises(Unavailable, match=rf"1\.jpg cannot be read \({os.strerror(number)}\): .*{remedy}"):
        read_image(photos / "ant" / "1.jpg")


def test_a_folder_where_an_image_is_expected_is_no_damage(photos: Path) -> None:
    (photos / "ant" / "x.png").mkdir()
    with pytest.raises(Unavailable, match=r"x\.png cannot be read \(Is a directory\): a file was expected there"):
        read_image(photos / "ant" / "x.png")


def test_an_image_that_points_to_where_no_file_reaches_is_damaged(tmp_path: Path) -> None:
    # Where the first directory of a TIFF is: further than a file can be long, so that the system refuses to go there.
    (tmp_path / "x.tif").write_bytes(b"II+\0\x08\0\0\0" + b"\xff" * 7 + b"\x7f")
    with pytest.raises(InputError, match="replace or remove the file"):
        read_image(tmp_path / "x.tif")


@pytest.mark.parametrize(
    ("image", "form", "mode"),
    [
        (picture(grey=True), "PNG", "L"),
        (picture(grey=True).convert("1"), "PNG", "L"),
        (picture(grey=True).convert("LA"), "PNG", "L"),
        (picture().convert("P"), "PNG", "RGB"),
        (picture().convert("RGBA"), "WEBP", "RGB"),
        (picture().convert("CMYK"), "JPEG", "RGB"),
    ],
    ids=["grey", "1 bit", "grey with alpha", "palette", "colour with alpha", "CMYK"],
)
def test_every_mode_comes_as_grey_or_rgb(image: Image.Image, form: str, mode: str) -> None:
    assert decode(encoded(image, form), "x").mode == mode


def test_a_palette_with_transparency_keeps_its_colours() -> None:
    image = Image.new("P", (2, 2), 1)
    image.putpalette([0, 0, 0, 200, 100, 50])
    assert decode(encoded(image, transparency=bytes([0, 128])), "x").getpixel((0, 0)) == (200, 100, 50)


def test_an_image_is_turned_upright() -> None:
    image, exif = picture((8, 16)), Image.Exif()
    exif[0x0112] = 6  # turned a quarter clockwise to be upright
    assert np.array_equal(decode(encoded(image, exif=exif), "x"), image.transpose(Image.Transpose.ROTATE_270))


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_more_than_eight_bits_of_grey_are_refused(form: str) -> None:
    with pytest.raises(InputError, match="more than 8 bits"):
        decode(encoded(Image.fromarray(np.full((4, 4), 40000, np.uint16)), form), "x")


def test_more_than_eight_bits_of_colour_are_refused() -> None:
    def part(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", 2, 2, 16, 2, 0, 0, 0)  # 2x2, 16 bits, colour
    rows = zlib.compress((b"\0" + bytes(12)) * 2)
    png = b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", rows) + part(b"IEND", b"")
    with pytest.raises(InputError, match="more than 8 bits"):
        decode(png, "x")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")  # as outside of tests
@pytest.mark.parametrize("limit", [100, 10], ids=["warned of by Pillow", "refused by Pillow"])
def test_an_image_of_too_many_pixels_is_refused(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with pytest.raises(InputError, match=f"x has more than {limit} pixels: make it smaller"):
        decode(encoded(picture()), "x")


def test_a_format_that_starts_another_program_is_not_opened() -> None:
    with pytest.raises(InputError, match="is not an image that can be read"):
        decode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n", "x")


# Arrays ---------------------------------------------------------------------------------------------------------------


@needs("medmnist")
def test_the_x_rays_of_medmnist_are_3882_524_and_624() -> None:
    source = open_source(f"npz:{DATA}/medmnist/pneumoniamnist.npz")
    assert (len(source.train), len(source.held_out), source.kind, source.size) == (3882, 524, "classes", (28, 28))
    with np.load(DATA / "medmnist" / "pneumoniamnist.npz") as file:
        assert np.array_equal(source.train.read(7), file["train_images"][7])
        assert np.array_equal(source.train.answers, file["train_labels"][:, 0])


def test_several_columns_of_labels_are_labels(tmp_path: Path) -> None:
    source = open_source(arrays(tmp_path, ALL, lambda n: np.arange(2 * n).reshape(n, 2) % 2))
    assert (source.kind, source.classes) == ("labels", ("0", "1")) and source.train.answers.dtype == np.float32


@pytest.mark.parametrize("columns", [(0, 2), (2, 0), (3, 2)])
def test_splits_with_other_columns_of_labels_are_told(tmp_path: Path, columns: tuple[int, int]) -> None:
    content = {}
    for split, count in zip(("train", "val"), columns, strict=True):
        content[f"{split}_images"] = np.zeros((6, 8, 8), np.uint8)
        content[f"{split}_labels"] = np.eye(count, dtype=int)[np.arange(6) % count] if count else np.arange(6) % 2
    np.savez(tmp_path / "a.npz", **content)
    shapes = [content[f"{split}_labels"].shape for split in ("train", "val")]
    assert f"a.npz has train_labels {shapes[0]} and val_labels {shapes[1]}: as many" in refused(f"npz:{tmp_path}/a.npz")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 1), (6, 5, 3)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_keras_arrays_are_read_packed_or_mapped(tmp_path: Path, save: Any, shape: tuple[int, ...], order: Any) -> None:
    images = np.array(RNG.integers(0, 256, (12, *shape), np.uint8), order=order)
    save(tmp_path / "a.npz", x_train=images, y_train=np.arange(12) % 2, x_test=images, y_test=np.arange(12) % 2)
    source = open_source(f"npz:{tmp_path / 'a.npz'}")
    assert (source.size, source.channels) == ((6, 5), 3 if shape[2:] == (3,) else 1)
    assert np.array_equal(source.held_out.read(4), images[4].squeeze())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"a": np.zeros(3)}, "holds a: expected train_images"),
        ({"x_train": np.zeros((4, 8, 8)), "y_train": np.arange(4)}, "x_train (4, 8, 8) float64: expected"),
        ({"x_train": np.zeros((4, 8, 8), np.uint8), "y_train": np.arange(5)}, "4 x_train but 5 y_train"),
        ({"x_train": np.zeros((4, 8, 8), np.uint8), "y_train": np.arange(4.0)}, "expected whole numbers"),
        ({"x_train": np.zeros((4, 8, 8), np.uint8), "y_train": np.array([{}] * 4)}, "cannot be read"),
    ],
    ids=["names", "images", "counts", "labels", "pickles"],
)
def test_an_npz_file_of_something_else_is_told(tmp_path: Path, content: dict[str, np.ndarray], said: str) -> None:
    np.savez(tmp_path / "a.npz", **content)
    assert said in refused(f"npz:{tmp_path / 'a.npz'}")


def test_a_damaged_npz_file_is_told(tmp_path: Path) -> None:
    spec = arrays(tmp_path, ALL)
    (tmp_path / "set.npz").write_bytes((tmp_path / "set.npz").read_bytes()[:500])
    assert "cannot be read" in refused(spec)


@needs("mnist")
def test_the_test_digits_of_mnist_alone_are_divided() -> None:
    source = open_source(f"idx:{DATA}/mnist")
    assert (len(source.train), len(source.held_out), source.size) == (8000, 2000, (28, 28))
    assert "test is all there is" in source.notes[0]


def idx(path: Path, array: np.ndarray) -> None:
    data = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


@pytest.mark.parametrize(("prefix", "suffix"), [("", ""), ("", ".gz"), ("emnist-letters-", ".gz")])
def test_idx_files_are_read(tmp_path: Path, prefix: str, suffix: str) -> None:
    images = RNG.integers(0, 256, (6, 4, 5), np.uint8)
    for name in ("train", "t10k"):
        idx(tmp_path / f"{prefix}{name}-images-idx3-ubyte{suffix}", images)
        idx(tmp_path / f"{prefix}{name}-labels-idx1-ubyte{suffix}", np.array([0, 1] * 3, np.uint8))
    source = open_source(f"idx:{tmp_path}")
    assert (len(source.train), len(source.held_out), source.classes) == (6, 6, ("0", "1"))
    assert np.array_equal(source.train.read(2), images[2].T if prefix else images[2])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "train-labels-idx1-ubyte").unlink(), "has no labels beside it"),
        (lambda folder: (folder / "train-images-idx3-ubyte").write_bytes(b"\0\0\x08\3abc"), "cut short"),
        (lambda folder: (folder / "train-images-idx3-ubyte").write_bytes(b""), "fetch it again"),
        (lambda folder: idx(folder / "train-labels-idx1-ubyte", np.zeros(5, np.uint8)), "one label for each"),
        (lambda folder: idx(folder / "kmnist-train-images-idx3-ubyte", np.zeros((1, 2, 2))), "several data sets"),
        (lambda folder: (folder / "train-images-idx3-ubyte").unlink(), "no folder with MNIST's files"),
    ],
    ids=["no labels", "cut", "empty", "counts", "two sets", "no images"],
)
def test_idx_files_that_do_not_fit_are_told(tmp_path: Path, damage: Callable[[Path], Any], said: str) -> None:
    idx(tmp_path / "train-images-idx3-ubyte", np.zeros((6, 4, 4), np.uint8))
    idx(tmp_path / "train-labels-idx1-ubyte", np.zeros(6, np.uint8))
    damage(tmp_path)
    assert said in refused(f"idx:{tmp_path}")


PIXELS = RNG.integers(0, 256, (4, 3072), np.uint8)


def cifar_pickles(folder: Path, hundred: bool = False) -> None:
    labels = b"fine_labels" if hundred else b"labels"
    names = ("train", "test") if hundred else (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
    for name in names:
        (folder / name).write_bytes(pickle.dumps({b"data": PIXELS, labels: [0, 1, 0, 1]}, protocol=2))
    meta = {"fine_label_names" if hundred else "label_names": ["cat", "dog"]}
    (folder / ("meta" if hundred else "batches.meta")).write_bytes(pickle.dumps(meta, protocol=2))


def cifar_bytes(folder: Path, hundred: bool = False) -> None:
    labels = np.array([[0, 0], [0, 1]] * 2, np.uint8)[:, 0 if hundred else 1 :]
    records = np.concatenate([labels, PIXELS], 1).tobytes()
    names = ("train.bin", "test.bin") if hundred else (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")
    for name in names:
        (folder / name).write_bytes(records)
    (folder / ("fine_label_names.txt" if hundred else "batches.meta.txt")).write_text("cat\ndog\n\n")


@pytest.mark.parametrize("write", [cifar_pickles, cifar_bytes])
@pytest.mark.parametrize("hundred", [False, True])
def test_cifar_is_read_from_pickles_and_from_bytes(tmp_path: Path, write: Any, hundred: bool) -> None:
    (tmp_path / "cifar-of-some-kind").mkdir()  # as the archive unpacks
    write(tmp_path / "cifar-of-some-kind", hundred)
    source = open_source(f"cifar:{tmp_path}")
    assert (len(source.train), len(source.held_out), source.classes) == (4 if hundred else 20, 4, ("cat", "dog"))
    assert source.train.answers[:4].tolist() == [0, 1, 0, 1] and source.size == (32, 32)
    assert np.array_equal(source.train.read(1), PIXELS[1].reshape(3, 32, 32).transpose(1, 2, 0))


def test_a_batch_is_read_as_python_2_wrote_it(tmp_path: Path) -> None:
    cifar_pickles(tmp_path)
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    state = b"(K\x01K\x04M\x00\x0c\x86" + dtype + b"\x89T" + struct.pack("<i", PIXELS.nbytes) + PIXELS.tobytes() + b"tb"
    content = b"\x80\x02}(U\x04data" + array + state + b"U\x06labels](K\x00K\x01K\x00K\x01eu."
    (tmp_path / "test_batch").write_bytes(content)
    held = open_source(f"cifar:{tmp_path}").held_out
    assert np.array_equal(held.read(3), PIXELS[3].reshape(3, 32, 32).transpose(1, 2, 0))


class Calls:
    """Pickles as a call of os.system."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch never",)


def test_a_pickle_that_calls_something_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cifar_pickles(tmp_path)
    (tmp_path / "data_batch_3").write_bytes(pickle.dumps({"data": Calls(), "labels": []}))
    assert (
        "data_batch_3 asks to call posix.system: CIFAR's files never do" in refused(f"cifar:{tmp_path}")
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
def test_a_damaged_batch_is_told_by_its_name(tmp_path: Path, content: bytes) -> None:
    cifar_pickles(tmp_path)
    (tmp_path / "data_batch_2").write_bytes(content)
    assert "data_batch_2 " in refused(f"cifar:{tmp_path}")


def test_two_data_sets_of_cifar_in_one_folder_are_refused(tmp_path: Path) -> None:
    for name in ("cifar-10", "cifar-100"):
        (tmp_path / name).mkdir()
        cifar_pickles(tmp_path / name, hundred=name == "cifar-100")
    assert "cifar-10/batches.meta and " in refused(f"cifar:{tmp_path}")


def idx_pair(folder: Path, suffix: str = "") -> None:
    idx(folder / f"train-images-idx3-ubyte{suffix}", np.zeros((6, 4, 4), np.uint8))
    idx(folder / f"train-labels-idx1-ubyte{suffix}", np.arange(6, dtype=np.uint8) % 2)


@pytest.mark.parametrize(
    ("kind", "write", "name"),
    [
        ("cifar", cifar_pickles, "data_batch_3"),
        ("cifar", cifar_bytes, "data_batch_3.bin"),
        ("cifar", cifar_bytes, "batches.meta.txt"),
        ("idx", idx_pair, "train-images-idx3-ubyte"),
        ("idx", lambda folder: idx_pair(folder, ".gz"), "train-labels-idx1-ubyte.gz"),
        ("npz", lambda folder: arrays(folder, ALL), "set.npz"),
        ("folder", lambda folder: None, ""),
    ],
)
def test_a_source_that_this_user_may_not_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, write: Any, name: str
) -> None:
    write(tmp_path)
    withheld(monkeypatch, tmp_path / name)
    if kind == "folder":
        error = PermissionError(errno.EACCES, "Permission denied", str(tmp_path))
        monkeypatch.setattr(os, "scandir", lambda path: (_ for _ in ()).throw(error))
    said = refused(f"{kind}:{tmp_path}{'/set.npz' * (kind == 'npz')}")
    assert said == f"{tmp_path / name} cannot be read (Permission denied): let this user read it"


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_that_may_not_be_read_any_more_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Any) -> None:
    save(tmp_path / "a.npz", x_train=np.zeros((4, 8, 8), np.uint8), y_train=np.arange(4) % 2)
    with monkeypatch.context() as before:
        before.setattr("train.data.sources.splitting._first", lambda train: picture(grey=True))  # so that none is loaded
        source = open_source(f"npz:{tmp_path / 'a.npz'}")
    withheld(monkeypatch, tmp_path / "a.npz")
    with pytest.raises(Unavailable, match="let this user read it"):
        source.train.read(0)


def test_a_folder_without_cifar_is_told_what_was_expected(tmp_path: Path) -> None:
    assert "expected data_batch_1 to 5" in refused(f"cifar:{tmp_path}")


# What is known of images without being told ---------------------------------------------------------------------------


@pytest.mark.parametrize(("side", "size"), [(32, (32, 24)), (64, (64, 48)), (80, None)])
def test_small_images_are_taken_to_be_as_large_as_the_first_one(side: int, size: Any, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        for i in range(3):
            Image.new("RGB", (side * 3 // 4, side)).save(tmp_path / name / f"{i}.png")
    source = open_source(f"folder:{tmp_path}")
    assert source.size == size
    assert any(f"of {side}x{side * 3 // 4} pixels, as the first one is" in note for note in source.notes) == (
        size is not None
    )


def test_a_first_image_that_cannot_be_read_leaves_the_look_to_the_next(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        for i in range(3):
            Image.new("L", (12, 12)).save(tmp_path / name / f"{i}.png")
    (tmp_path / "a" / "0.png").write_bytes(b"")
    assert open_source(f"folder:{tmp_path}").channels == 1
