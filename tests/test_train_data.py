"""Sources, splits, variation and order: the same for the same seed, whatever prepares them."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("grain")

import vit_spec
from train.augment import fit, vary
from train.chance import generator
from train.data import Feed, num_outputs, targets
from train.recipes import Augment
from train.sources import Source, open_source, read_image, stratified
from vit_spec import InputError

CONFIG = vit_spec.get("vit_ti16", image_size=(8, 8), patch_size=4, in_channels=1, num_classes=10)
LIVELY = Augment(rotate=15, shift=0.1, scale=1.2, flip=True)


@pytest.fixture(scope="module")
def digits() -> Source:
    return open_source("digits", 0.2)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Three classes of four small colour photographs, as PNG, JPEG and WebP."""
    rng = np.random.default_rng(0)
    for name in ("ant", "bee", "cat"):
        (tmp_path / name).mkdir()
        for i, suffix in enumerate(("png", "jpg", "webp", "PNG")):
            Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8)).save(tmp_path / name / f"{i}.{suffix}")
    return tmp_path


def feed(source: Source, batch: int = 50) -> Feed:
    return Feed(source.train, targets(source.train, source.classes, "classes"), CONFIG, batch)


def batches(source: Source, first: int = 0, last: int = 3, seed: int = 0, augment: Augment = LIVELY) -> list:
    return list(feed(source).training(augment, seed=seed, first=first, last=last))


# Splits ---------------------------------------------------------------------------------------------------------------


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


def test_digits_are_1438_and_359_images_of_ten_classes(digits: Source) -> None:
    assert (len(digits.train), len(digits.held_out), len(digits.classes)) == (1438, 359, 10)


def test_no_digit_is_both_trained_on_and_held_out(digits: Source) -> None:
    assert not {*digits.train.names} & {*digits.held_out.names}


# Order and variation --------------------------------------------------------------------------------------------------


def test_every_epoch_shows_every_image_once(digits: Source) -> None:
    rows = np.concatenate([batch.rows for batch in batches(digits, last=58)])[: 2 * 1438]
    assert sorted(rows[:1438]) == sorted(rows[1438:]) == [*range(1438)]


def test_every_epoch_has_an_order_of_its_own(digits: Source) -> None:
    rows = np.concatenate([batch.rows for batch in batches(digits, last=58)])
    assert not np.array_equal(rows[:1438], rows[1438:2876])


def test_the_same_seed_gives_the_same_batches(digits: Source) -> None:
    for one, other in zip(batches(digits), batches(digits), strict=True):
        assert all(map(np.array_equal, one, other))


def test_another_seed_gives_other_batches(digits: Source) -> None:
    assert not np.array_equal(batches(digits)[0].rows, batches(digits, seed=1)[0].rows)


def test_a_later_start_continues_the_same_batches(digits: Source) -> None:
    for one, other in zip(batches(digits)[2:], batches(digits, first=2), strict=True):
        assert all(map(np.array_equal, one, other))


def test_the_variation_of_an_image_does_not_depend_on_its_batch(digits: Source) -> None:
    fifty = np.concatenate([batch.images for batch in batches(digits, last=2)])
    twenty = np.concatenate([batch.images for batch in feed(digits, 20).training(LIVELY, seed=0, first=0, last=5)])
    assert np.array_equal(fifty, twenty)


def test_the_same_image_is_varied_anew_in_the_next_epoch(digits: Source) -> None:
    shown = batches(digits, last=58)
    rows, images = (np.concatenate([getattr(batch, part) for batch in shown]) for part in ("rows", "images"))
    first, second = np.flatnonzero(rows == 7)[:2]
    assert not np.array_equal(images[first], images[second])


def test_streams_of_random_numbers_differ_by_purpose_and_by_length() -> None:
    draws = {generator(*numbers).random() for numbers in ((1, 2), (2, 1), (1, 2, 0), (1,), (2, 2))}
    assert len(draws) == 5


def test_held_out_images_come_once_in_order_and_the_last_batch_is_full(digits: Source) -> None:
    held = Feed(digits.held_out, targets(digits.held_out, digits.classes, "classes"), CONFIG, 50)
    shown = list(held.evaluation())
    rows = np.concatenate([batch.rows[:count] for batch, count in shown])
    assert np.array_equal(rows, np.arange(359)) and {len(batch.rows) for batch, _ in shown} == {50}


def test_batches_are_uint8_images_with_channels_last(digits: Source) -> None:
    batch = batches(digits)[0]
    assert batch.images.shape == (50, 8, 8, 1) and batch.images.dtype == np.uint8


# Augmentation ---------------------------------------------------------------------------------------------------------

FIGURE = Image.fromarray(np.pad(np.arange(1, 37, dtype=np.uint8).reshape(6, 6) * 7, 5))


def test_without_options_an_image_stays_as_it_is() -> None:
    assert np.array_equal(vary(FIGURE, Augment(), generator(1)), FIGURE)


def test_a_flip_mirrors_about_half_of_the_images_exactly() -> None:
    shown = [np.asarray(vary(FIGURE, Augment(flip=True), generator(i))) for i in range(100)]
    mirrored = sum(np.array_equal(image, np.fliplr(FIGURE)) for image in shown)
    kept = sum(np.array_equal(image, FIGURE) for image in shown)
    assert mirrored + kept == 100 and 35 <= mirrored <= 65


def centre_of_mass(image: Image.Image) -> np.ndarray:
    weights = np.asarray(image, np.float64)
    return (np.indices(weights.shape) * weights).sum((1, 2)) / weights.sum()


def test_a_shift_moves_the_picture_by_up_to_its_share() -> None:
    moves = [centre_of_mass(vary(FIGURE, Augment(shift=0.2), generator(i))) - centre_of_mass(FIGURE) for i in range(50)]
    assert 2.5 < np.abs(moves).max() <= 0.2 * 16 + 0.1


def test_a_turn_and_a_scale_keep_the_centre() -> None:
    dot = np.zeros((17, 17), np.uint8)
    dot[7:10, 7:10] = 255
    for i in range(20):
        turned = vary(Image.fromarray(dot), Augment(rotate=30, scale=1.3), generator(i))
        assert centre_of_mass(turned) == pytest.approx([8, 8], abs=0.1)


def test_an_oblong_image_is_cut_to_the_middle() -> None:
    bars = Image.fromarray(np.tile(np.repeat(np.array([0, 255, 0], np.uint8), 20), (20, 1)))
    assert np.asarray(fit(bars, (20, 20))).min() == 255


# Folders --------------------------------------------------------------------------------------------------------------


def test_a_folder_of_class_folders_is_read_with_its_classes_in_order(photos: Path) -> None:
    source = open_source(f"folder:{photos}", 0.25)
    assert source.classes == ("ant", "bee", "cat") and source.channels == 3
    assert (len(source.train), len(source.held_out)) == (9, 3)


def test_train_and_val_folders_are_the_split(photos: Path, tmp_path: Path) -> None:
    for name in ("train", "val"):
        (tmp_path / "split" / name).mkdir(parents=True)
    (photos / "ant").rename(tmp_path / "split" / "train" / "ant")
    (photos / "bee").rename(tmp_path / "split" / "train" / "bee")
    (photos / "cat").rename(tmp_path / "split" / "val" / "bee")
    shutil.copytree(tmp_path / "split" / "train" / "ant", tmp_path / "split" / "val" / "ant")
    source = open_source(f"folder:{tmp_path / 'split'}", 0.2)
    assert source.classes == ("ant", "bee") and source.held_out.labels.tolist() == [0] * 4 + [1] * 4


def refused(spec: str) -> str:
    """The message, which is one line."""
    with pytest.raises(InputError) as caught:
        open_source(spec, 0.2)
    assert "\n" not in str(caught.value)
    return str(caught.value)


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
    assert "holds one class folder, train" in refused(f"folder:{photos}")


def test_a_class_that_is_only_held_out_is_named(photos: Path) -> None:
    (photos / "train").mkdir()
    (photos / "val").mkdir()
    shutil.copytree(photos / "ant", photos / "train" / "ant")
    shutil.copytree(photos / "cat", photos / "train" / "cat")
    (photos / "ant").rename(photos / "val" / "ant")
    (photos / "bee").rename(photos / "val" / "bee")
    assert f"{photos / 'val' / 'bee'} has no counterpart" in refused(f"folder:{photos}")


@pytest.mark.parametrize(("spec", "hint"), [("digit", "'digits'"), ("foldr:x", "'folder'"), ("folder", "folder:PATH")])
def test_an_unknown_source_names_the_nearest(spec: str, hint: str) -> None:
    assert hint in refused(spec)


@pytest.mark.parametrize("damage", ["text", "cut", "empty"])
def test_a_file_that_cannot_be_read_is_named_with_a_remedy(photos: Path, damage: str) -> None:
    file = photos / "ant" / "1.jpg"
    file.write_bytes({"text": b"no image", "cut": file.read_bytes()[:300], "empty": b""}[damage])
    with pytest.raises(InputError, match=r"1\.jpg .*: replace or remove the file"):
        read_image(file)


def test_an_unreadable_image_stops_training_by_its_name(photos: Path) -> None:
    source = open_source(f"folder:{photos}", 0.25)
    for name in source.train.names:
        Path(name).write_bytes(b"")
    with pytest.raises(InputError, match="replace or remove the file"):
        list(feed(source, 4).training(Augment(), seed=0, first=0, last=1))


def test_more_than_eight_bits_a_channel_are_refused(tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 4), 40000, np.uint16)).save(tmp_path / "x.png")
    with pytest.raises(InputError, match="more than 8 bits"):
        read_image(tmp_path / "x.png")


# Targets --------------------------------------------------------------------------------------------------------------


def test_labels_are_one_for_the_class_and_zero_for_the_others(digits: Source) -> None:
    found = targets(digits.train, digits.classes, "labels")
    assert found.shape == (1438, 10) and np.array_equal(found.argmax(1), digits.train.labels)
    assert np.array_equal(found.sum(1), np.ones(1438))


def test_values_are_the_names_of_the_classes_as_numbers(digits: Source) -> None:
    assert np.array_equal(targets(digits.train, digits.classes, "values")[:, 0], digits.train.labels)


def test_values_of_classes_without_numbers_are_refused(photos: Path) -> None:
    source = open_source(f"folder:{photos}", 0.25)
    with pytest.raises(InputError, match="'ant'"):
        targets(source.train, source.classes, "values")


@pytest.mark.parametrize(("task", "outputs"), [("classes", 3), ("labels", 3), ("values", 1)])
def test_a_task_says_how_many_outputs_a_model_has(task: str, outputs: int) -> None:
    assert num_outputs(("0", "1", "2"), task) == outputs
