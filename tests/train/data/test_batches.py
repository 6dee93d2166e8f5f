"""Variation, order and targets: the same for the same seed, whatever prepares them."""

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
from tests.train.data.test_sources import withheld
from train.data.augment import fit, vary
from train.data.batches import Batch, Feed, num_outputs, targets
from train.data.rng import generator
from train.data.sources import Examples, Source, Unavailable, open_source
from train.recipes import Augment
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


def feed(source: Source, batch: int = 50, augment: Augment = LIVELY, **options: Any) -> Feed:
    answers = targets(source.train, source.classes, source.kind, "classes")
    return Feed(source.train, answers, CONFIG, batch, augment, **options)


def batches(source: Source, first: int = 0, last: int = 3, seed: int = 0, **options: Any) -> list[Batch]:
    return list(feed(source, **options).training(seed=seed, first=first, last=last))


def same(one: Batch, other: Batch) -> bool:
    return all(map(np.array_equal, leaves(one), leaves(other)))


def leaves(batch: Batch) -> list[np.ndarray]:
    return [*batch[:4], *(batch.mix or ())]


# Order and variation --------------------------------------------------------------------------------------------------


def test_every_epoch_shows_every_image_once(digits: Source) -> None:
    rows = np.concatenate([batch.rows for batch in batches(digits, last=58)])[: 2 * 1438]
    assert sorted(rows[:1438]) == sorted(rows[1438:]) == [*range(1438)]


def test_every_epoch_has_an_order_of_its_own(digits: Source) -> None:
    rows = np.concatenate([batch.rows for batch in batches(digits, last=58)])
    assert not np.array_equal(rows[:1438], rows[1438:2876])


def test_the_same_seed_gives_the_same_batches(digits: Source) -> None:
    for one, other in zip(batches(digits), batches(digits), strict=True):
        assert same(one, other)


def test_another_seed_gives_other_batches(digits: Source) -> None:
    assert not np.array_equal(batches(digits)[0].rows, batches(digits, seed=1)[0].rows)


def test_a_later_start_continues_the_same_batches(digits: Source) -> None:
    for one, other in zip(batches(digits)[2:], batches(digits, first=2), strict=True):
        assert same(one, other)


def test_the_variation_of_an_image_does_not_depend_on_its_batch(digits: Source) -> None:
    fifty = np.concatenate([batch.images for batch in batches(digits, last=2)])
    twenty = np.concatenate([batch.images for batch in feed(digits, 20).training(seed=0, first=0, last=5)])
    assert np.array_equal(fifty, twenty)


def test_the_same_image_is_varied_anew_in_the_next_epoch(digits: Source) -> None:
    shown = batches(digits, last=58)
    rows, images = (np.concatenate([getattr(batch, part) for batch in shown]) for part in ("rows", "images"))
    first, second = np.flatnonzero(rows == 7)[:2]
    assert not np.array_equal(images[first], images[second])


def test_streams_of_random_numbers_differ_by_purpose_and_by_length() -> None:
    draws = {generator(*numbers).random() for numbers in ((1, 2), (2, 1), (1, 2, 0), (1,), (2, 2))}
    assert len(draws) == 5


def test_random_numbers_are_the_same_on_every_machine_and_for_numbers_of_any_kind() -> None:
    # The number is recorded: a seed has to mean the same run wherever and whenever it is used.
    assert generator(3, 0, 7).random() == generator(3, np.int64(0), np.int32(7)).random() == 0.7171935017905471
    assert generator(3, 2**80).random() != generator(3, 0).random()


def test_held_out_images_come_once_in_order_and_the_last_batch_is_full(digits: Source) -> None:
    held = Feed(digits.held_out, targets(digits.held_out, digits.classes, digits.kind, "classes"), CONFIG, 50)
    shown = list(held.evaluation())
    rows = np.concatenate([batch.rows for batch in shown])
    assert np.array_equal(rows[:359], np.arange(359)) and {len(batch.rows) for batch in shown} == {50}


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


# Images that cannot be read -------------------------------------------------------------------------------------------


def test_an_unreadable_image_stops_training_by_its_name(photos: Path) -> None:
    source = open_source(f"folder:{photos}", 0.25)
    for name in source.train.names:
        Path(name).write_bytes(b"")
    with pytest.raises(InputError, match="replace or remove the file"):
        list(feed(source, 4).training(seed=0, first=0, last=1))


def spoilt(photos: Path) -> tuple[Source, str]:
    """Photographs of which one of the training images is damaged, and its name."""
    source = open_source(f"folder:{photos}", 0.25)
    Path(source.train.names[2]).write_bytes(b"damaged")
    return source, source.train.names[2]


def test_where_unreadable_images_are_skipped_the_next_stands_in_and_the_batch_says_so(photos: Path) -> None:
    source, name = spoilt(photos)
    [batch] = batches(source, last=1, batch=9, augment=Augment(), skip=True)
    assert [source.train.names[row] for row in batch.rows[~batch.read]] == [name]
    [place], [follows] = np.flatnonzero(~batch.read), np.flatnonzero(batch.rows == 3)
    assert np.array_equal(batch.images[place], batch.images[follows])
    assert batch.targets[place] == batch.targets[follows]


def test_a_batch_of_none_but_unreadable_images_is_skipped_too(photos: Path) -> None:
    source, name = spoilt(photos)
    found = batches(source, last=9, batch=1, augment=Augment(), skip=True)
    [batch] = [batch for batch in found if not batch.read.all()]
    assert [source.train.names[row] for row in batch.rows] == [name]


def test_an_image_that_stops_training_is_told_with_how_to_go_on_without(photos: Path) -> None:
    source, name = spoilt(photos)
    with pytest.raises(InputError, match=f"{re.escape(name)} .*remove the file; or leave it out$"):
        batches(source, last=1, batch=9, advice="; or leave it out")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.EIO, errno.ENOENT])
def test_an_image_that_the_system_does_not_give_is_not_skipped_as_damaged(
    photos: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    source, _ = spoilt(photos)
    withheld(monkeypatch, Path(source.train.names[3]), number)  # which would stand for the damaged one
    with pytest.raises(Unavailable, match=re.escape(source.train.names[3])):
        batches(source, last=1, batch=9, skip=True)


def test_where_no_image_can_be_read_skipping_ends(photos: Path) -> None:
    source, _ = spoilt(photos)
    for name in source.train.names:
        Path(name).write_bytes(b"")
    with pytest.raises(InputError, match="replace or remove the file"):
        batches(source, last=1, batch=4, skip=True)


# Who prepares the batches ---------------------------------------------------------------------------------------------


def test_processes_prepare_the_same_batches_as_threads(digits: Source) -> None:
    many = batches(digits, first=27, last=31, workers=2)  # across the end of an epoch
    for one, other in zip(batches(digits, first=27, last=31), many, strict=True):
        assert same(one, other)


def test_an_unreadable_image_is_told_by_processes_as_by_threads(photos: Path) -> None:
    source, name = spoilt(photos)
    with pytest.raises(InputError, match=re.escape(name)):
        batches(source, last=3, batch=4, workers=1)


def test_hosts_prepare_their_parts_of_the_same_batches(digits: Source) -> None:
    parts = [batches(digits, last=31, here=np.arange(50)[part::2]) for part in range(2)]
    for whole, *halves in zip(batches(digits, last=31), *parts, strict=True):
        for part, half in enumerate(halves):
            assert np.array_equal(whole.images[part::2], half.images) and np.array_equal(whole.rows[part::2], half.rows)


# Repetition and mixing ------------------------------------------------------------------------------------------------


def test_repeated_images_stand_together_and_are_varied_apart(digits: Source) -> None:
    [batch] = batches(digits, last=1, batch=48, augment=dataclasses.replace(LIVELY, repeats=3))
    rows, images = batch.rows.reshape(16, 3), batch.images.reshape(16, 3, -1)
    assert len({*rows[:, 0].tolist()}) == 16 and (rows == rows[:, :1]).all()
    assert all(len({image.tobytes() for image in three}) == 3 for three in images)


def test_a_step_is_mixed_as_the_seed_says_and_each_step_its_own_way(digits: Source) -> None:
    options: dict[str, Any] = {"augment": Augment(mixup=0.2, cutmix=1.0)}
    first, again = (batches(digits, last=4, **options) for _ in range(2))
    assert all(same(one, other) for one, other in zip(first, again, strict=True))
    assert len({(float(batch.mix.share), *batch.mix.box.tolist()) for batch in first if batch.mix}) == 4


def test_without_mixing_a_batch_says_nothing_of_it(digits: Source) -> None:
    assert batches(digits, last=1)[0].mix is None


# Targets --------------------------------------------------------------------------------------------------------------


def test_labels_are_one_for_the_class_and_zero_for_the_others(digits: Source) -> None:
    found = targets(digits.train, digits.classes, digits.kind, "labels")
    assert found.shape == (1438, 10) and np.array_equal(found.argmax(1), digits.train.answers)
    assert np.array_equal(found.sum(1), np.ones(1438))


def test_values_are_the_names_of_the_classes_as_numbers(digits: Source) -> None:
    assert np.array_equal(targets(digits.train, digits.classes, digits.kind, "values")[:, 0], digits.train.answers)


def test_values_of_classes_without_numbers_are_refused(photos: Path) -> None:
    source = open_source(f"folder:{photos}", 0.25)
    with pytest.raises(InputError, match="'ant'"):
        targets(source.train, source.classes, source.kind, "values")


@pytest.mark.parametrize("name", ["inf", "-inf", "nan", "1e400", "1e39", "1_0"])
def test_values_of_classes_whose_names_are_no_finite_numbers_are_refused(digits: Source, name: str) -> None:
    with pytest.raises(InputError, match=f"and '{name}' is none: rename it"):
        targets(digits.train, (*"012345678", name), "classes", "values")


@pytest.mark.parametrize(("kind", "task"), [("labels", "classes"), ("labels", "values"), ("values", "labels")])
def test_labels_and_values_are_asked_only_as_what_they_are(digits: Source, kind: Any, task: Any) -> None:
    examples = Examples(digits.train.read, np.ones((1438, 2), np.float32), digits.train.names)
    with pytest.raises(InputError, match=f"--task {task} needs classes, and the data has {kind}"):
        targets(examples, ("a", "b"), kind, task)


@pytest.mark.parametrize("kind", ["labels", "values"])
def test_labels_and_values_come_as_they_are(digits: Source, kind: Any) -> None:
    examples = Examples(digits.train.read, np.eye(1438, 2, dtype=np.float32), digits.train.names)
    assert np.array_equal(targets(examples, ("a", "b"), kind, kind), examples.answers)


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
def test_kind_and_task_say_how_many_outputs_a_model_has(kind: Any, task: Any, outputs: int) -> None:
    assert num_outputs(("0", "1", "2"), kind, task) == outputs


def test_held_out_images_are_brought_to_size_their_own_way(digits: Source) -> None:
    augment = Augment(filter="bilinear_aliased", held_out_filter="box", share=0.5)
    shown = next(iter(feed(digits, augment=augment).evaluation())).images[3]
    assert np.array_equal(shown[..., 0], fit(digits.train.read(3), (8, 8), 0.5, "box"))
