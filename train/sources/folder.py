"""`folder:PATH`: class folders, PATH/CLASS/*.jpg; or PATH/train and PATH/val (valid, validation, test), each of them so.

It is how ImageNet is unpacked, and what torchvision calls an image folder.  Classes are numbered in the order of their
names.  JPEG, PNG and WebP files count, at any depth; others are ignored, as are names that begin with a dot.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from train.sources.decoding import SUFFIXES
from train.sources.examples import Examples, Files, examples
from train.sources.splitting import HELD_OUT, WHOLE, Found
from vit_spec import InputError


def find(place: str) -> Found:
    """Look into a folder; only the training images are listed at once.

    Raises:
        InputError: a folder that is missing, empty, or laid out in another way.
    """
    path = Path(place).expanduser()
    if not path.is_dir():
        raise InputError(f"{path} is not a folder: give folder:PATH with PATH/CLASS/*.jpg inside")
    given = [name for name in HELD_OUT if (path / name).is_dir()]
    if not given or not (path / "train").is_dir():
        whole, classes = _class_folders(path)
        return Found(str(path), {WHOLE: lambda: whole}, "classes", classes)
    train, classes = _class_folders(path / "train")

    def held(name: str) -> Callable[[], Examples]:
        return lambda: _renumbered(path, name, classes)

    return Found(str(path), {"train": lambda: train, **{name: held(name) for name in given}}, "classes", classes)


def _renumbered(path: Path, split: str, classes: tuple[str, ...]) -> Examples:
    """Return the images of another split under the class numbers of the training images."""
    found, names = _class_folders(path / split)
    if unknown := sorted(set(names) - set(classes)):
        raise InputError(f"{path / split / unknown[0]} has no counterpart in {path / 'train'}: both need the same classes")
    numbers = np.array([classes.index(name) for name in names], np.int64)
    return Examples(found.read, numbers[found.answers], found.names)


def _class_folders(path: Path) -> tuple[Examples, tuple[str, ...]]:
    """Return the images below a folder of class folders, and the classes' names."""
    with os.scandir(path) as entries:
        folders = sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())
    if not folders:
        raise InputError(f"{path} holds no class folders: put images into {path}/CLASS/")
    counts: list[int] = []

    def paths() -> Iterator[str]:
        for folder in folders:
            count = 0
            for image in images(str(path / folder)):
                count += 1
                yield f"{folder}/{image}"
            if not count:
                raise InputError(f"{path / folder} holds no images ({', '.join(SUFFIXES)}): add some, or remove the folder")
            counts.append(count)

    reader = Files(path, paths())
    if len(folders) == 1:
        raise InputError(f"{path} holds one class folder, {folders[0]}: a model needs two or more to tell apart")
    answers: NDArray[np.int64] = np.repeat(np.arange(len(folders)), counts)
    return examples(reader, answers), tuple(folders)


def images(folder: str) -> Iterator[str]:
    """Yield the paths of image files below a folder, relative to it, sorted, without asking for each file's kind."""
    with os.scandir(folder) as entries:
        found = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
    for entry in found:
        if entry.name.lower().endswith(SUFFIXES):
            yield entry.name
        elif entry.is_dir(follow_symlinks=False):
            for image in images(entry.path):
                yield f"{entry.name}/{image}"
