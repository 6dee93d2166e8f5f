"""Choice of the held-out images: those of a split that comes with the data, or a share of every class.

The choice depends on the targets alone and not on a run's seed, so all runs are evaluated on the same images.
"""

import contextlib
import re
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from train.data.order import rows_by_class
from train.data.rng import SPLIT, generator
from train.data.sources.examples import UNSPLIT, Dataset, DatasetSplits, Examples, Targets, shared_groups
from train.recipes import Task
from vit_spec import InputError, nearest

MAX_CLASSES = 100_000  # ImageNet-21k has 21,841
DEFAULT_SHARE = 0.2  # held out where neither the data nor the user chooses
VALIDATION_NAMES = ("val", "valid", "validation", "dev")
HELD_OUT_NAMES = (*VALIDATION_NAMES, "test")
SPLIT_NAMES = ("train", *HELD_OUT_NAMES)
SMALL_IMAGE = 64  # pixels: if the first image is no larger, all images are taken to have its size
MAX_UNREADABLE = 100  # images to try until one can be read
SIZE_SAMPLES = 5  # images whose sizes are read for the median


def canonical_split(word: str) -> str:
    """Return which of `SPLIT_NAMES` a word stands for, or `UNSPLIT`.

    Case is ignored; "training" and "testing" stand for "train" and "test".
    """
    name = {"training": "train", "testing": "test"}.get(word.lower(), word.lower())
    return name if name in SPLIT_NAMES else UNSPLIT


def split_words(name: str) -> list[str]:
    """Return the words of the name of a file or folder, in lower case: one of them may stand for a split."""
    return re.findall(r"[a-z]+", name.lower())


def choose_held_out(data: DatasetSplits, held_out: float | str | None) -> Dataset:
    """Choose the training and the held-out images; read the first image and check every target.

    held_out: see `train.data.sources.open_dataset`.

    Raises:
        InputError: a missing split, a split without images, invalid targets, or training images of a single class.
    """
    train_name, held_out_name = _choose_splits(data, held_out)
    train = load_split(data, train_name)
    if data.task == "classes" and len(only := np.unique(train.targets)) == 1:
        raise InputError(f"{data.place} holds one class, {data.classes[only[0]]}: a classifier needs two or more")
    notes = [*data.notes, *train.notes]
    if held_out_name is not None:
        evaluation = load_split(data, held_out_name)
        notes += evaluation.notes
        others = [name for name in VALIDATION_NAMES if name in data.splits and name != held_out_name]
        rest = f"; {_join_words(others)} not used" if others and held_out_name in VALIDATION_NAMES else ""
        numbers = f"{len(evaluation):,} images; {len(train):,} in {train_name}"
        notes.append(f"held out: the split {held_out_name} of the data, {numbers}{rest}")
        if shared := shared_groups(train, evaluation):
            row, other = shared[0]
            notes.append(
                f"groups with images in both {train_name} and {held_out_name}, which make results too good: "
                f"{len(shared):,}, such as that of {train.names[row]} and {evaluation.names[other]}; "
                "--held-out 0.1 keeps groups together"
            )
    else:
        share = held_out if isinstance(held_out, float) else DEFAULT_SHARE
        rows = split_rows(train.targets, data.task, share, train.groups)
        if data.task == "classes" and len(train) and not len(rows[1]) and train.groups is None:
            raise InputError(
                f"{data.place}: each of its {len(train)} classes has one image, and none can be held out: add images"
                f"{data.advice}"
            )
        train, evaluation = (train.take(part) for part in rows)
        notes.append(_describe_held_out(data, train_name, train, len(evaluation), share))
    for part, purpose in ((train, "train on"), (evaluation, "evaluate the model on")):
        if not len(part):
            raise InputError(f"{data.place} leaves no images to {purpose}: add images, or change --held-out")
    if data.task == "classes":
        notes += _check_trained_classes(train, evaluation, data.classes)
    first, size = _first_readable_image(train), data.size
    grey, (width, height) = first.mode == "L", first.size
    if size is None:
        size = (height, width) if max(first.size) <= SMALL_IMAGE else None
        small = f" of {height}x{width} pixels" if size else ""
        notes.append(f"images are taken as {'grey' if grey else 'colour'}{small}, as the first one is")
    return Dataset(train, evaluation, data.task, data.classes, 1 if grey else 3, size, tuple(notes), held_out_name)


def set_test_aside(data: DatasetSplits, share: float) -> DatasetSplits:
    """Return data with a split "test", a share of the training images, which then has them no more.

    Raises:
        InputError: there is a test split already, or the share leaves no images for one of both.
    """
    train_name, _ = _choose_splits(data, None)
    if "test" in data.splits:
        raise InputError(f"{data.place} has a test split: leave ?test={share:g} out")
    whole = load_split(data, train_name)
    kept, aside = split_rows(whole.targets, data.task, share, whole.groups)
    if not len(kept) or not len(aside):
        raise InputError(
            f"{data.place} has {len(whole)} images, of which ?test={share:g} leaves none to train on or to test"
        )
    others = {name: split for name, split in data.splits.items() if name != train_name}
    parts = {"train": kept, "test": aside}
    how, part = _describe_choice(data, whole), len(aside) / len(whole)
    return replace(
        data,
        splits={name: partial(whole.take, rows) for name, rows in parts.items()} | others,
        notes=(*data.notes, *whole.notes, f"set aside as test: {len(aside):,} of {len(whole):,} images, {part:.0%} {how}"),
    )


def _first_readable_image(train: Examples) -> Image.Image:
    """Return the first image that can be read.  A damaged image is an error only when training reaches it."""
    for row in range(min(len(train), MAX_UNREADABLE)):
        with contextlib.suppress(InputError):
            return train.read(row)
    return train.read(0)


def typical_size(examples: Examples) -> tuple[int, int] | None:
    """Return the median (height, width) of `SIZE_SAMPLES` evenly spaced images; None if none of them can be read."""
    sizes = []
    for row in sorted({*np.linspace(0, len(examples) - 1, SIZE_SAMPLES).round().astype(int).tolist()}):
        with contextlib.suppress(InputError):
            sizes.append(examples.read(row).size)
    if not sizes:
        return None
    width, height = np.median(sizes, axis=0).astype(int).tolist()
    return height, width


def numbered_classes(targets: Targets, place: object) -> tuple[str, ...]:
    """Return names for classes that have none: "0", "1" and so on to the highest class number.

    Raises:
        InputError: a class number so high that it must mean something else, such as the image's number.
    """
    highest = int(targets.max(initial=-1))
    if highest >= MAX_CLASSES:
        raise _number_too_high(place, highest)
    return tuple(map(str, range(highest + 1)))


def to_class_numbers(integers: NDArray[Any], place: object) -> NDArray[np.int64]:
    """Return integers of any type as class numbers.

    Raises:
        InputError: a number above those of int64, which would become negative.
    """
    if (highest := int(integers.max(initial=0))) > np.iinfo(np.int64).max:
        raise _number_too_high(place, highest)
    return np.asarray(integers, np.int64)


def _number_too_high(place: object, number: int) -> InputError:
    return InputError(f"{place} has the class number {number:,}: expected class numbers from 0, below {MAX_CLASSES:,}")


def _choose_splits(data: DatasetSplits, held_out: float | str | None) -> tuple[str, str | None]:
    """Return the names of the training split and of the held-out split; None: a share of the training split."""
    splits = list(data.splits)
    train = "train" if "train" in splits or len(splits) > 1 else splits[0]
    if train not in splits:
        raise InputError(f"{data.place} has {_join_words(splits)} but no train split: add it, or give one split alone")
    others = [name for name in HELD_OUT_NAMES if name in splits and name != train]
    if isinstance(held_out, float):
        return train, None
    if held_out is None:
        return train, others[0] if others else None
    synonyms = VALIDATION_NAMES if held_out in VALIDATION_NAMES else (held_out,)
    chosen = held_out if held_out in others else next((name for name in others if name in synonyms), None)
    if chosen is None:
        available = (
            f"it has {_join_words(others)}" if others else f"it comes without splits; give a share, such as {DEFAULT_SHARE}"
        )
        raise InputError(f"{data.place} has no split {held_out!r} to evaluate on: {available}{nearest(held_out, others)}")
    return train, chosen


def _join_words(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _describe_held_out(data: DatasetSplits, train_name: str, train: Examples, held_out: int, share: float) -> str:
    unused = [name for name in data.splits if name != train_name]
    only = f"; {train_name} is the only split" if train_name in HELD_OUT_NAMES else ""
    rest = f"; {_join_words(unused)} not used" if unused else only
    how = _describe_choice(data, train)
    return f"held out: {held_out:,} of {len(train) + held_out:,} images, {share:.0%} {how}, the same for every seed{rest}"


def _describe_choice(data: DatasetSplits, train: Examples) -> str:
    how = "drawn at random" if data.task == "values" else f"of every {'class' if data.task == 'classes' else 'label'}"
    return how + ", groups kept together" * (train.groups is not None)


def load_split(data: DatasetSplits, name: str) -> Examples:
    """Return the examples of a split.

    Raises:
        InputError: a target is invalid for the task; the message names the first such image.
    """
    split = data.splits[name]()
    targets, count = split.targets, len(data.classes)
    wrong: Any
    remedy = "correct them, or leave these images out"
    if data.task == "classes":
        wrong = np.logical_or(targets < 0, targets >= count)
        expected = f"a class number from 0{f' to {count - 1}' if count > 1 else ''}"
        remedy = "number the classes from 0, or leave these images out"
    elif data.task == "labels":
        wrong, expected = ((targets != 0) & (targets != 1)).any(1), "0 or 1 for every label"
    else:
        wrong, expected = (~np.isfinite(targets)).any(1), "a finite number"
    if wrong.any():
        row = int(wrong.argmax())
        raise InputError(
            f"{split.names[row]} has the target {np.array2string(targets[row], separator=', ', max_line_width=10**6)}: "
            f"expected {expected}; {int(wrong.sum()):,} of {len(split):,} are wrong: {remedy}"
        )
    return split


def _check_trained_classes(train: Examples, held_out: Examples, classes: tuple[str, ...]) -> list[str]:
    """Refuse a held-out class without training images; return a note on classes without any image."""
    trained = np.bincount(train.targets, minlength=len(classes)) > 0
    if (~trained[held_out.targets]).any():
        row = int((~trained[held_out.targets]).argmax())
        name = classes[int(held_out.targets[row])]
        raise InputError(
            f"{held_out.names[row]} is of class {name!r}, which has no training images: add some, or remove it"
        )
    if len(absent := [classes[i] for i in np.flatnonzero(~trained)]):
        have = "has" if len(absent) == 1 else "have"
        return [f"{len(absent)} of {len(classes)} classes {have} no image, such as {absent[0]!r}"]
    return []


# Splits ---------------------------------------------------------------------------------------------------------------


def split_rows(
    targets: Targets, task: Task, share: float, groups: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split 0..N-1 into training and held-out rows, both sorted, with `share` of them held out.

    Classes are split by `stratified_split`, labels by `iterative_stratification`, values at random.

    groups: (N,) the group of each row; the rows of a group stay on one side.  `iterative_stratification` then assigns whole
        groups, by the number of images of each class or label in them.
    """
    if task == "classes" and groups is None:
        return stratified_split(targets.astype(np.int64), share)
    if task == "values":
        one_hot = np.zeros((len(targets), 0), np.int64)
    elif task == "labels":
        one_hot = (targets > 0).astype(np.int64)
    else:
        one_hot = np.eye(int(targets.max(initial=-1)) + 1, dtype=np.int64)[targets.astype(np.int64)]
    _, group = np.unique(np.arange(len(targets)) if groups is None else groups, return_inverse=True)
    sizes = np.bincount(group)
    counts = np.zeros((len(sizes), one_hot.shape[1]), np.int64)
    np.add.at(counts, group, one_hot)
    mask = iterative_stratification(counts, sizes, share)[group]
    return np.flatnonzero(~mask), np.flatnonzero(mask)


def stratified_split(labels: NDArray[np.int64], share: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split 0..N-1 into training and held-out rows, both sorted, with `share` of every class held out (rounded).

    A class with one image keeps it for training.  A class with more holds out at least one and keeps at least one.

    labels: (N,) the class of each image.
    """
    held_out: list[int] = []
    for rows in rows_by_class(labels):
        if (count := min(max(1, round(share * len(rows))), len(rows) - 1)) > 0:
            held_out += generator(SPLIT, int(labels[rows[0]])).permutation(rows)[:count].tolist()
    mask = np.zeros(len(labels), bool)
    mask[held_out] = True
    return np.flatnonzero(~mask), np.flatnonzero(mask)


def iterative_stratification(counts: NDArray[np.int64], sizes: NDArray[np.int64], share: float) -> NDArray[np.bool_]:
    """Return which of M groups are held out, (M,) bool, so that `share` of each label is held out.

    Iterative stratification (Sechidis, Tsoumakas and Vlahavas, 2011, algorithm 1): take the label with the fewest groups
    left, and put each of its groups on the side that still needs most of that label, or else most images.  Groups without a
    label come last.  The paper has single images instead of groups, and leaves the order to chance; here the order is drawn
    once.

    counts: (M, K) images of each label in a group.    sizes: (M,) images in a group.
    """
    order = generator(SPLIT).permutation(len(sizes))
    has_label = counts > 0
    left = has_label.sum(0)
    held_out, assigned = np.zeros(len(sizes), bool), np.zeros(len(sizes), bool)
    shares = np.array([1 - share, share])
    needed, images = shares[:, None] * counts.sum(0), (shares * sizes.sum()).tolist()

    def assign(group: int, needs: tuple[float, float]) -> None:
        side = int((needs[1], images[1]) > (needs[0], images[0]))
        held_out[group], assigned[group] = bool(side), True
        images[side] -= float(sizes[group])
        needed[side] -= counts[group]

    while left.any():
        label = int(np.where(left > 0, left, left.max() + 1).argmin())
        for group in order[has_label[order, label] & ~assigned[order]]:
            assign(int(group), (needed[0, label], needed[1, label]))
            left -= has_label[group]
    for group in order[~assigned[order]]:
        assign(int(group), (0.0, 0.0))
    return held_out
