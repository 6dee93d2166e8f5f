"""Batches: order, augmentation and targets are the same for the same seed, whoever prepares them."""

import dataclasses
import errno
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("grain")

import vit_spec
from tests.train.data.test_sources import deny_access
from train.data.augment import random_affine, resize_and_center_crop
from train.data.batches import Batch, DataLoader
from train.data.rng import generator
from train.data.sources import Dataset, Examples, FileAccessError, open_dataset
from train.data.targets import num_outputs, targets_for_task
from train.recipes import Augment
from vit_spec import InputError

CONFIG = vit_spec.get("vit_ti16", image_size=(8, 8), patch_size=4, in_channels=1, num_classes=10)
AFFINE = Augment(rotate=15, shift=0.1, scale=1.2, flip=True)


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return open_dataset("digits", 0.2)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Return a folder of three classes of four small colour images, as PNG, JPEG and WebP."""
    rng = np.random.default_rng(0)
    for name in ("ant", "bee", "cat"):
        (tmp_path / name).mkdir()
        for i, suffix in enumerate(("png", "jpg", "webp", "PNG")):
            Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8)).save(tmp_path / name / f"{i}.{suffix}")
    return tmp_path


def make_loader(source: Dataset, batch: int = 50, augment: Augment = AFFINE, **options: Any) -> DataLoader:
    answers = targets_for_task(source.train, source.classes, source.task, "classes")
    return DataLoader(source.train, answers, CONFIG, batch, augment, **options)


def load_batches(source: Dataset, first: int = 0, last: int = 3, seed: int = 0, **options: Any) -> list[Batch]:
    return list(make_loader(source, **options).training_batches(seed=seed, first_step=first, end_step=last))


def equal_batches(one: Batch, other: Batch) -> bool:
    return all(map(np.array_equal, batch_arrays(one), batch_arrays(other)))


def batch_arrays(batch: Batch) -> list[np.ndarray]:
    return [*batch[:4], *(batch.mix or ())]


# Order and variation --------------------------------------------------------------------------------------------------


def test_every_epoch_has_every_image_once(digits: Dataset) -> None:
    rows = np.concatenate([batch.rows for batch in load_batches(digits, last=58)])[: 2 * 1438]
    assert sorted(rows[:1438]) == sorted(rows[1438:]) == [*range(1438)]


def test_every_epoch_has_its_own_order(digits: Dataset) -> None:
    rows = np.concatenate([batch.rows for batch in load_batches(digits, last=58)])
    assert not np.array_equal(rows[:1438], rows[1438:2876])


def test_the_same_seed_gives_the_same_batches(digits: Dataset) -> None:
    for one, other in zip(load_batches(digits), load_batches(digits), strict=True):
        assert equal_batches(one, other)


def test_another_seed_gives_other_batches(digits: Dataset) -> None:
    assert not np.array_equal(load_batches(digits)[0].rows, load_batches(digits, seed=1)[0].rows)


def test_a_later_start_continues_the_same_batches(digits: Dataset) -> None:
    for one, other in zip(load_batches(digits)[2:], load_batches(digits, first=2), strict=True):
        assert equal_batches(one, other)


def test_the_augmentation_of_an_image_does_not_depend_on_its_batch(digits: Dataset) -> None:
    fifty = np.concatenate([batch.images for batch in load_batches(digits, last=2)])
    twenty = np.concatenate(
        [batch.images for batch in make_loader(digits, 20).training_batches(seed=0, first_step=0, end_step=5)]
    )
    assert np.array_equal(fifty, twenty)


def test_an_image_is_augmented_anew_in_the_next_epoch(digits: Dataset) -> None:
    shown = load_batches(digits, last=58)
    rows, images = (np.concatenate([getattr(batch, part) for batch in shown]) for part in ("rows", "images"))
    first, second = np.flatnonzero(rows == 7)[:2]
    assert not np.array_equal(images[first], images[second])


def test_the_copies_of_an_image_in_a_balanced_epoch_are_augmented_differently(digits: Dataset) -> None:
    classes = (digits.train.targets == 0).astype(np.int64)  # a tenth of the images is half of an epoch
    shown = load_batches(digits, last=28, balanced=classes)
    rows, images = (np.concatenate([getattr(batch, part) for batch in shown]) for part in ("rows", "images"))
    assert np.mean(classes[rows]) == pytest.approx(0.5, abs=0.03)
    row = int(rows[np.flatnonzero(classes[rows])[0]])
    copies = images[rows == row]
    assert len(copies) >= 4 and len(np.unique(copies.reshape(len(copies), -1), axis=0)) == len(copies)


def test_streams_of_random_numbers_differ_by_purpose_and_by_length() -> None:
    draws = {generator(*numbers).random() for numbers in ((1, 2), (2, 1), (1, 2, 0), (1,), (2, 2))}
    assert len(draws) == 5


def test_random_numbers_are_the_same_on_every_machine_and_for_every_integer_type() -> None:
    # A recorded number: a seed must give the same run on every machine and in every version.
    assert generator(3, 0, 7).random() == generator(3, np.int64(0), np.int32(7)).random() == 0.7171935017905471
    assert generator(3, 2**80).random() != generator(3, 0).random()


def test_evaluation_has_every_image_once_in_order_and_fills_up_the_last_batch(digits: Dataset) -> None:
    held = DataLoader(
        digits.held_out, targets_for_task(digits.held_out, digits.classes, digits.task, "classes"), CONFIG, 50
    )
    shown = list(held.evaluation_batches())
    rows = np.concatenate([batch.rows for batch in shown])
    assert np.array_equal(rows[:359], np.arange(359)) and {len(batch.rows) for batch in shown} == {50}


def test_batches_are_uint8_images_with_channels_last(digits: Dataset) -> None:
    batch = load_batches(digits)[0]
    assert batch.images.shape == (50, 8, 8, 1) and batch.images.dtype == np.uint8


# Augmentation ---------------------------------------------------------------------------------------------------------

FIGURE = Image.fromarray(np.pad(np.arange(1, 37, dtype=np.uint8).reshape(6, 6) * 7, 5))


def test_without_options_an_image_is_unchanged() -> None:
    assert np.array_equal(random_affine(FIGURE, Augment(), generator(1)), FIGURE)


def test_about_half_of_the_images_are_flipped_exactly() -> None:
    shown = [np.asarray(random_affine(FIGURE, Augment(flip=True), generator(i))) for i in range(100)]
    mirrored = sum(np.array_equal(image, np.fliplr(FIGURE)) for image in shown)
    kept = sum(np.array_equal(image, FIGURE) for image in shown)
    assert mirrored + kept == 100 and 35 <= mirrored <= 65


def centre_of_mass(image: Image.Image) -> np.ndarray:
    weights = np.asarray(image, np.float64)
    return (np.indices(weights.shape) * weights).sum((1, 2)) / weights.sum()


def test_a_shift_moves_the_image_by_up_to_its_share() -> None:
    moves = [
        centre_of_mass(random_affine(FIGURE, Augment(shift=0.2), generator(i))) - centre_of_mass(FIGURE) for i in range(50)
    ]
    assert 2.5 < np.abs(moves).max() <= 0.2 * 16 + 0.1


def test_rotation_and_scale_keep_the_centre() -> None:
    dot = np.zeros((17, 17), np.uint8)
    dot[7:10, 7:10] = 255
    for i in range(20):
        turned = random_affine(Image.fromarray(dot), Augment(rotate=30, scale=1.3), generator(i))
        assert centre_of_mass(turned) == pytest.approx([8, 8], abs=0.1)


def test_an_oblong_image_is_cropped_to_its_centre() -> None:
    bars = Image.fromarray(np.tile(np.repeat(np.array([0, 255, 0], np.uint8), 20), (20, 1)))
    assert np.asarray(resize_and_center_crop(bars, (20, 20))).min() == 255


# Images that cannot be read -------------------------------------------------------------------------------------------


def test_an_unreadable_image_stops_training_and_is_named(photos: Path) -> None:
    source = open_dataset(f"folder:{photos}", 0.25)
    for name in source.train.names:
        Path(name).write_bytes(b"")
    with pytest.raises(InputError, match="replace or remove the file"):
        list(make_loader(source, 4).training_batches(seed=0, first_step=0, end_step=1))


def damage_one_image(photos: Path) -> tuple[Dataset, str]:
    """Damage one training image; return the data set and the name of the image."""
    source = open_dataset(f"folder:{photos}", 0.25)
    Path(source.train.names[2]).write_bytes(b"damaged")
    return source, source.train.names[2]


def test_a_skipped_image_is_replaced_by_the_next_and_marked_in_the_batch(photos: Path) -> None:
    source, name = damage_one_image(photos)
    [batch] = load_batches(source, last=1, batch=9, augment=Augment(), skip_damaged=True)
    assert [source.train.names[row] for row in batch.rows[~batch.readable]] == [name]
    [place], [follows] = np.flatnonzero(~batch.readable), np.flatnonzero(batch.rows == 3)
    assert np.array_equal(batch.images[place], batch.images[follows])
    assert batch.targets[place] == batch.targets[follows]


def test_a_batch_of_only_unreadable_images_is_skipped_too(photos: Path) -> None:
    source, name = damage_one_image(photos)
    found = load_batches(source, last=9, batch=1, augment=Augment(), skip_damaged=True)
    [batch] = [batch for batch in found if not batch.readable.all()]
    assert [source.train.names[row] for row in batch.rows] == [name]


def test_the_message_about_an_unreadable_image_ends_with_the_hint(photos: Path) -> None:
    source, name = damage_one_image(photos)
    with pytest.raises(InputError, match=f"{re.escape(name)} .*remove the file; or leave it out$"):
        load_batches(source, last=1, batch=9, error_hint="; or leave it out")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.EIO, errno.ENOENT])
def test_an_inaccessible_image_is_not_skipped_as_damaged(
    photos: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    source, _ = damage_one_image(photos)
    deny_access(monkeypatch, Path(source.train.names[3]), number)  # the one that would replace the damaged image
    with pytest.raises(FileAccessError, match=re.escape(source.train.names[3])):
        load_batches(source, last=1, batch=9, skip_damaged=True)


def test_skipping_stops_if_no_image_can_be_read(photos: Path) -> None:
    source, _ = damage_one_image(photos)
    for name in source.train.names:
        Path(name).write_bytes(b"")
    with pytest.raises(InputError, match="replace or remove the file"):
        load_batches(source, last=1, batch=4, skip_damaged=True)


# Who prepares the batches ---------------------------------------------------------------------------------------------


def test_processes_prepare_the_same_batches_as_threads(digits: Dataset) -> None:
    many = load_batches(digits, first=27, last=31, workers=2)  # across the end of an epoch
    for one, other in zip(load_batches(digits, first=27, last=31), many, strict=True):
        assert equal_batches(one, other)


def test_worker_processes_report_an_unreadable_image_too(photos: Path) -> None:
    source, name = damage_one_image(photos)
    with pytest.raises(InputError, match=re.escape(name)):
        load_batches(source, last=3, batch=4, workers=1)


def test_each_host_prepares_its_part_of_the_same_batches(digits: Dataset) -> None:
    parts = [load_batches(digits, last=31, local_indices=np.arange(50)[part::2]) for part in range(2)]
    for whole, *halves in zip(load_batches(digits, last=31), *parts, strict=True):
        for part, half in enumerate(halves):
            assert np.array_equal(whole.images[part::2], half.images) and np.array_equal(whole.rows[part::2], half.rows)


# Repetition and mixing ------------------------------------------------------------------------------------------------


def test_repeated_images_are_adjacent_and_augmented_differently(digits: Dataset) -> None:
    [batch] = load_batches(digits, last=1, batch=48, augment=dataclasses.replace(AFFINE, repeats=3))
    rows, images = batch.rows.reshape(16, 3), batch.images.reshape(16, 3, -1)
    assert len({*rows[:, 0].tolist()}) == 16 and (rows == rows[:, :1]).all()
    assert all(len({image.tobytes() for image in three}) == 3 for three in images)


def test_the_mix_of_a_step_depends_on_the_seed_and_the_step(digits: Dataset) -> None:
    options: dict[str, Any] = {"augment": Augment(mixup=0.2, cutmix=1.0)}
    first, again = (load_batches(digits, last=4, **options) for _ in range(2))
    assert all(equal_batches(one, other) for one, other in zip(first, again, strict=True))
    assert len({(float(batch.mix.share), *batch.mix.box.tolist()) for batch in first if batch.mix}) == 4


def test_without_mixing_a_batch_has_no_mix(digits: Dataset) -> None:
    assert load_batches(digits, last=1)[0].mix is None


# Targets --------------------------------------------------------------------------------------------------------------


def test_labels_made_from_classes_are_one_hot(digits: Dataset) -> None:
    found = targets_for_task(digits.train, digits.classes, digits.task, "labels")
    assert found.shape == (1438, 10) and np.array_equal(found.argmax(1), digits.train.targets)
    assert np.array_equal(found.sum(1), np.ones(1438))


def test_values_made_from_classes_are_the_numbers_in_their_names(digits: Dataset) -> None:
    assert np.array_equal(targets_for_task(digits.train, digits.classes, digits.task, "values")[:, 0], digits.train.targets)


def test_values_of_classes_without_numbers_are_refused(photos: Path) -> None:
    source = open_dataset(f"folder:{photos}", 0.25)
    with pytest.raises(InputError, match="'ant'"):
        targets_for_task(source.train, source.classes, source.task, "values")


@pytest.mark.parametrize("name", ["inf", "-inf", "nan", "1e400", "1e39", "1_0"])
def test_values_of_classes_whose_names_are_not_finite_numbers_are_refused(digits: Dataset, name: str) -> None:
    with pytest.raises(InputError, match=f"and '{name}' is not one: rename it"):
        targets_for_task(digits.train, (*"012345678", name), "classes", "values")


@pytest.mark.parametrize(("kind", "task"), [("labels", "classes"), ("labels", "values"), ("values", "labels")])
def test_labels_and_values_allow_no_other_task(digits: Dataset, kind: Any, task: Any) -> None:
    examples = Examples(digits.train.read, np.ones((1438, 2), np.float32), digits.train.names)
    with pytest.raises(InputError, match=f"--task {task} needs classes, and the data has {kind}"):
        targets_for_task(examples, ("a", "b"), kind, task)


@pytest.mark.parametrize("kind", ["labels", "values"])
def test_labels_and_values_are_unchanged(digits: Dataset, kind: Any) -> None:
    examples = Examples(digits.train.read, np.eye(1438, 2, dtype=np.float32), digits.train.names)
    assert np.array_equal(targets_for_task(examples, ("a", "b"), kind, kind), examples.targets)


@pytest.mark.parametrize(
    ("kind", "task", "outputs"),
    [
        ("classes", "classes", 3),
        ("classes", "labels", 3),
        ("classes", "values", 1),
        ("labels", "labels", 3),
        ("values", "values", 3),
    ],
)
def test_the_number_of_outputs_follows_from_the_data_and_the_task(kind: Any, task: Any, outputs: int) -> None:
    assert num_outputs(("0", "1", "2"), kind, task) == outputs


def test_held_out_images_have_their_own_filter_and_share(digits: Dataset) -> None:
    augment = Augment(filter="bilinear_aliased", held_out_filter="box", share=0.5)
    shown = next(iter(make_loader(digits, augment=augment).evaluation_batches())).images[3]
    assert np.array_equal(shown[..., 0], resize_and_center_crop(digits.train.read(3), (8, 8), 0.5, "box"))
