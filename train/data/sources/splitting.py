"""Which images are held out: those of a split that comes with the data, or a share of every class.

A choice made here depends on the answers alone and not on a run's seed, so that runs are judged by the same images.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from train.data.rng import SPLIT, generator
from train.data.sources.examples import Answers, Examples, Source
from train.recipes import Task
from vit_spec import InputError, nearest

MOST = 100_000  # classes; ImageNet-21k has 21,841
SHARE = 0.2  # held out where neither the data nor the user says
VALIDATION = ("val", "valid", "validation", "dev")
HELD_OUT = (*VALIDATION, "test")
SPLITS = ("train", *HELD_OUT)
SMALL = 64  # pixels: data whose first image is no larger are taken as small images all alike
FIRST = 100  # images of which one has to be readable
LOOKED_AT = 5  # images whose sizes are asked for
WHOLE = ""  # the name of the one part of data that come without splits


@dataclass(frozen=True)
class Found:
    """What a place holds, before it is decided what is held out.

    where: the place, for messages.
    parts: gives the examples of each split by its name in the data, when asked: "train", "val", "test" and the like; or
        those of `WHOLE` alone.
    groups: for each example of a part, the number of what must not be divided, such as a patient; (N,) int64.
    """

    where: str
    parts: Mapping[str, Callable[[], Examples]]
    kind: Task
    classes: tuple[str, ...]
    size: tuple[int, int] | None = None
    groups: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def split_called(word: str) -> str:
    """Return which of `SPLITS` a word stands for, in any case, training and testing among them; else `WHOLE`."""
    name = {"training": "train", "testing": "test"}.get(word.lower(), word.lower())
    return name if name in SPLITS else WHOLE


def choose(found: Found, held_out: float | str | None) -> Source:
    """Decide what is trained on and what is held out, and look at the first image and at every answer.

    held_out: see `train.data.sources.open_source`.

    Raises:
        InputError: no such split, a split without images, answers that are none, or training images of one class.
    """
    base, judge = _names(found, held_out)
    train = _checked(found, base)
    if found.kind == "classes" and len(only := np.unique(train.answers)) == 1:
        raise InputError(
            f"{found.where} holds one class, {found.classes[only[0]]}: a model needs two or more to tell apart"
        )
    notes = [*found.notes, *train.notes]
    if judge is not None:
        held = _checked(found, judge)
        notes += held.notes
        notes.append(f"the split is given: {len(train):,} images in {base}, {len(held):,} in {judge}")
    else:
        share = held_out if isinstance(held_out, float) else SHARE
        rows = divided(train.answers, found.kind, share, found.groups.get(base))
        if found.kind == "classes" and len(train) and not len(rows[1]) and base not in found.groups:
            raise InputError(
                f"{found.where}: each of its {len(train)} classes has one image, and none can be held out: add images, or "
                "choose other answers; numbers that are values stand in a column of another name than label"
            )
        train, held = (train.take(part) for part in rows)
        notes.append(_made(found, base, len(train), len(held), share))
    for part, what in ((train, "train on"), (held, "judge the model by")):
        if not len(part):
            raise InputError(f"{found.where} leaves no images to {what}: add images, or change --held-out")
    if found.kind == "classes":
        notes += _untaught(train, held, found.classes)
    first, size = _first(train), found.size
    grey, (width, height) = first.mode == "L", first.size
    if size is None:
        size = (height, width) if max(first.size) <= SMALL else None
        small = f" of {height}x{width} pixels" if size else ""
        notes.append(f"images are taken as {'grey' if grey else 'colour'}{small}, as the first one is")
    return Source(train, held, found.kind, found.classes, 1 if grey else 3, size, tuple(notes), judge)


def _first(train: Examples) -> Image.Image:
    """Return the first image that can be read; one that cannot is an error only where it is to be trained on."""
    for row in range(min(len(train), FIRST)):
        with contextlib.suppress(InputError):
            return train.read(row)
    return train.read(0)


def typical_size(examples: Examples) -> tuple[int, int] | None:
    """Return the median height and width of some images, evenly spread over all; None where none of them can be read."""
    sizes = []
    for row in sorted({*np.linspace(0, len(examples) - 1, LOOKED_AT).round().astype(int).tolist()}):
        with contextlib.suppress(InputError):
            sizes.append(examples.read(row).size)
    if not sizes:
        return None
    width, height = np.median(sizes, axis=0).astype(int).tolist()
    return height, width


def numbered(answers: Answers, where: object) -> tuple[str, ...]:
    """Names for classes that have none: their numbers, from 0 to the highest.

    Raises:
        InputError: so high a number that it says something else, such as which image this is.
    """
    highest = int(answers.max(initial=-1))
    if highest >= MOST:
        raise InputError(f"{where} has the class number {highest:,}: expected class numbers from 0, below {MOST:,}")
    return tuple(map(str, range(highest + 1)))


def _names(found: Found, held_out: float | str | None) -> tuple[str, str | None]:
    """Return the names of the part to train on and of the part to judge by; None: of what is divided."""
    parts = list(found.parts)
    base = "train" if "train" in parts or len(parts) > 1 else parts[0]
    if base not in parts:
        raise InputError(f"{found.where} has {_listed(parts)} but no train split: add it, or give one split alone")
    others = [name for name in HELD_OUT if name in parts and name != base]
    if isinstance(held_out, float):
        return base, None
    if held_out is None:
        return base, others[0] if others else None
    alike = VALIDATION if held_out in VALIDATION else (held_out,)
    judge = held_out if held_out in others else next((name for name in others if name in alike), None)
    if judge is None:
        there = f"it has {_listed(others)}" if others else f"it comes without; give a share, such as {SHARE}"
        raise InputError(f"{found.where} has no split {held_out!r} to judge by: {there}{nearest(held_out, others)}")
    return base, judge


def _listed(names: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _made(found: Found, base: str, train: int, held: int, share: float) -> str:
    how = "drawn by chance" if found.kind == "values" else f"of every {'class' if found.kind == 'classes' else 'label'}"
    together = ", groups kept together" if base in found.groups else ""
    aside = [name for name in found.parts if name != base]
    left = f"; {_listed(aside)} left aside" if aside else f"; {base} is all there is" if base in HELD_OUT else ""
    return f"held out: {held:,} of {train + held:,} images, {share:.0%} {how}{together}, the same for every seed{left}"


def _checked(found: Found, name: str) -> Examples:
    """Return the examples of a part; refuse answers that are none of its kind, naming the first image that has one."""
    part = found.parts[name]()
    answers, count = part.answers, len(found.classes)
    wrong: Any
    if found.kind == "classes":
        wrong, wanted = np.logical_or(answers < 0, answers >= count), f"a class number from 0 to {count - 1}"
    elif found.kind == "labels":
        wrong, wanted = ((answers != 0) & (answers != 1)).any(1), "0 or 1 for every label"
    else:
        wrong, wanted = (~np.isfinite(answers)).any(1), "a finite number"
    if wrong.any():
        row = int(wrong.argmax())
        raise InputError(
            f"{part.names[row]} has the answer {np.array2string(answers[row], separator=', ', max_line_width=10**6)}: "
            f"{wanted} was expected; {int(wrong.sum()):,} of {len(part):,} are wrong"
        )
    return part


def _untaught(train: Examples, held: Examples, classes: tuple[str, ...]) -> list[str]:
    """Refuse a class that is judged but never shown; return a note on those that are neither."""
    taught = np.bincount(train.answers, minlength=len(classes)) > 0
    if (~taught[held.answers]).any():
        row = int((~taught[held.answers]).argmax())
        name = classes[int(held.answers[row])]
        raise InputError(f"{held.names[row]} is of class {name!r}, of which no image is trained on: add some, or remove it")
    if len(absent := [classes[i] for i in np.flatnonzero(~taught)]):
        have = "has" if len(absent) == 1 else "have"
        return [f"{len(absent)} of {len(classes)} classes {have} no image, such as {absent[0]!r}"]
    return []


# Dividing -------------------------------------------------------------------------------------------------------------


def divided(
    answers: Answers, kind: Task, share: float, groups: NDArray[np.int64] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split 0..N-1 into training and held-out rows, each sorted, `share` of them held out.

    Classes go by `stratified`, labels by `iterative`, values by chance.  Rows of one group stay on one side: then
    `iterative` places groups, by how many images of each class or label they have.
    """
    if kind == "classes" and groups is None:
        return stratified(answers.astype(np.int64), share)
    if kind == "values":
        shown = np.zeros((len(answers), 0), np.int64)
    elif kind == "labels":
        shown = (answers > 0).astype(np.int64)
    else:
        shown = np.eye(int(answers.max(initial=-1)) + 1, dtype=np.int64)[answers.astype(np.int64)]
    _, place = np.unique(np.arange(len(answers)) if groups is None else groups, return_inverse=True)
    sizes = np.bincount(place)
    counts = np.zeros((len(sizes), shown.shape[1]), np.int64)
    np.add.at(counts, place, shown)
    mask = iterative(counts, sizes, share)[place]
    return np.flatnonzero(~mask), np.flatnonzero(mask)


def stratified(labels: NDArray[np.int64], share: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split 0..N-1 into training and held-out rows, each sorted, `share` of every class held out (rounded).

    A class with a single image keeps it for training, and one with two or more holds out at least one and keeps at least
    one.
    """
    held: list[int] = []
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        count = min(max(1, round(share * len(rows))), len(rows) - 1)
        held += generator(SPLIT, int(label)).permutation(rows)[:count].tolist()
    mask = np.zeros(len(labels), bool)
    mask[held] = True
    return np.flatnonzero(~mask), np.flatnonzero(mask)


def iterative(counts: NDArray[np.int64], sizes: NDArray[np.int64], share: float) -> NDArray[np.bool_]:
    """Return which of M groups are held out, so that each label has its share on both sides: (M,) bool.

    Iterative stratification (Sechidis, Tsoumakas and Vlahavas, 2011, algorithm 1): the label with the fewest groups left
    is placed first, each of its groups on the side that still wants most of that label, or else most images; what has no
    label comes last.  There the groups are single images.  What is left to chance there, the order, is drawn here once.

    counts: (M, K) images of each label in a group.    sizes: (M,) images in a group.
    """
    order = generator(SPLIT).permutation(len(sizes))
    shown = counts > 0
    left = shown.sum(0)
    held, placed = np.zeros(len(sizes), bool), np.zeros(len(sizes), bool)
    shares = np.array([1 - share, share])
    wanted, images = shares[:, None] * counts.sum(0), (shares * sizes.sum()).tolist()

    def place(group: int, wishes: tuple[float, float]) -> None:
        side = int((wishes[1], images[1]) > (wishes[0], images[0]))
        held[group], placed[group] = bool(side), True
        images[side] -= float(sizes[group])
        wanted[side] -= counts[group]

    while left.any():
        label = int(np.where(left > 0, left, left.max() + 1).argmin())
        for group in order[shown[order, label] & ~placed[order]]:
            place(int(group), (wanted[0, label], wanted[1, label]))
            left -= shown[group]
    for group in order[~placed[order]]:
        place(int(group), (0.0, 0.0))
    return held
