"""`folder:PATH`: class folders, PATH/CLASS/*.jpg; or PATH/train and PATH/val (valid, validation, dev, test), each so.

It is how ImageNet is unpacked, and what torchvision calls an image folder.  Classes are numbered in the order of their
names.  Image files (`decoding.SUFFIXES`) count, at any depth and beyond links to folders; a note says how many others are
there.  Names that begin with a dot are ignored.

Splits are told by their names, in any case, training and testing among them.  A folder of such a name is a class where it
holds images and no folders of images, and the folders beside it do too.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from train.data.sources.decoding import SUFFIXES
from train.data.sources.examples import Examples, Files, examples
from train.data.sources.files import below
from train.data.sources.splitting import SPLITS, WHOLE, Found, split_called
from vit_spec import InputError, nearest

_OR_A_SHARE = "or judge by a share of the training images, --held-out 0.2"


def find(place: str) -> Found:
    """Look into a folder; only the training images are listed at once.

    Raises:
        InputError: a folder that is missing, empty, or laid out in another way.
    """
    path = Path(place).expanduser()
    if not path.is_dir():
        raise InputError(f"{path} is not a folder: give folder:PATH with PATH/CLASS/*.jpg inside")
    splits = _splits(path, _folders(path)) or {WHOLE: path}
    base = "train" if "train" in splits else next(iter(splits))
    first, classes = _class_folders(splits[base])

    def other(split: str) -> Callable[[], Examples]:
        return lambda: _renumbered(splits[split], splits[base], classes)

    return Found(str(path), {name: other(name) for name in splits} | {base: lambda: first}, "classes", classes)


def _splits(path: Path, folders: Sequence[str]) -> dict[str, Path]:
    """Return the folders that are splits, by the splits they are; none where all of them are classes."""
    called = [name for name in folders if split_called(name)]
    others = [name for name in folders if not split_called(name)]
    sure = [name for name in called if any(_holds_images(path / name / inside) for inside in _folders(path / name))]
    if not sure and (others or len(called) < 2):
        return {}
    if stray := next((name for name in others if _holds_images(path / name)), None):
        raise InputError(
            f"{path} has {stray} beside the split {sure[0]}: call it train, val or test, or move it out; "
            f"or, if {sure[0]} is a class, take its images out of their folders{nearest(stray.lower(), SPLITS)}"
        )
    splits: dict[str, Path] = {}
    for name in called:
        if (split := split_called(name)) in splits:
            raise InputError(f"{path} has two folders for {split}, {splits[split].name} and {name}: move one of them out")
        splits[split] = path / name
    return splits


def _holds_images(path: Path) -> bool:
    return any(True for _ in below(str(path), SUFFIXES))


def _renumbered(path: Path, base: Path, classes: tuple[str, ...]) -> Examples:
    """Return the images of another split under the class numbers of the first one."""
    if unknown := sorted(set(_folders(path)) - set(classes)):
        raise InputError(f"{path / unknown[0]} has no counterpart in {base}: both need the same classes, {_OR_A_SHARE}")
    found, names = _class_folders(path, f", {_OR_A_SHARE}")
    numbers = np.array([classes.index(name) for name in names], np.int64)
    return replace(found, answers=numbers[found.answers])


def _folders(path: Path) -> list[str]:
    with os.scandir(path) as entries:
        return sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())


def _class_folders(path: Path, otherwise: str = "") -> tuple[Examples, tuple[str, ...]]:
    """Return the images below a folder of class folders, and the classes' names.

    otherwise: what else can be done where there are none.
    """
    folders = _folders(path)
    if not folders:
        raise InputError(f"{path} holds no class folders: put images into {path}/CLASS/{otherwise}")
    counts: list[int] = []
    others: list[str] = []

    def paths() -> Iterator[str]:
        for folder in folders:
            count = 0
            for image in below(str(path / folder), SUFFIXES, others):
                count += 1
                yield f"{folder}/{image}"
            if not count:
                raise InputError(f"{path / folder} holds no images ({', '.join(SUFFIXES)}): add some, or remove the folder")
            counts.append(count)

    reader = Files(path, paths())
    answers: NDArray[np.int64] = np.repeat(np.arange(len(folders)), counts)
    with os.scandir(path) as entries:
        images = (entry for entry in entries if entry.name.lower().endswith(SUFFIXES) and entry.name[0] != ".")
        loose = sorted(entry.path for entry in images if not entry.is_dir())
    notes = (
        *_left_out(loose, f"in no class folder of {path.name}"),
        *_left_out(others, f"in class folders of {path.name}, no images by their names"),
    )
    return examples(reader, answers, notes), tuple(folders)


def _left_out(paths: Sequence[str], what: str) -> tuple[str, ...]:
    return (f"files left out: {len(paths):,} {what}, such as {paths[0]}",) if paths else ()
