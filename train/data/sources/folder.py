"""`folder:PATH`: class folders, PATH/CLASS/*.jpg; or splits of class folders, PATH/train and PATH/val.

This is how ImageNet is unpacked, and torchvision calls it an image folder.  Classes are numbered in the order of their
names.  Image files (`decoding.SUFFIXES`) are found at any depth and through links to folders; a note counts the other
files.  Names that begin with a dot are ignored.
A link to a folder that another class or split has too is refused.

A split is a folder named train, val, valid, validation, dev, test, training or testing, in any case.  Such a folder is a
class instead if it contains images and no folders of images, and the folders beside it do too.  Classes that can only be
splits under other names (seg_train and seg_test), and classes that contain splits, are refused.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from train.data.sources.decoding import SUFFIXES
from train.data.sources.examples import UNSPLIT, DatasetSplits, Examples, ImageFiles, make_examples
from train.data.sources.files import follow_link, walk_files
from train.data.sources.splitting import SPLIT_NAMES, canonical_split, split_words
from vit_spec import InputError, nearest
from vit_spec.printable import is_in_other_form

_OR_A_SHARE = "or hold out a share of the training images, --held-out 0.2"


def open_splits(place: str) -> DatasetSplits:
    """Open a folder; only the training images are listed at once.

    Raises:
        InputError: a folder that is missing, empty, or laid out in another way.
    """
    path = Path(place)
    if not path.is_dir():
        raise InputError(f"{path} is not a folder: give folder:PATH with PATH/CLASS/*.jpg inside")
    splits = _split_folders(path, _subfolders(path)) or {UNSPLIT: path}
    base = "train" if "train" in splits else next(iter(splits))
    entered = {os.path.realpath(path)}
    for folder in splits.values():
        _follow_if_link(folder, entered)
    first, classes = _load_class_folders(splits[base], entered)
    if len(classes) == 1:
        _refuse_wrapping_folder(splits[base], classes[0], is_split=base != UNSPLIT)

    def load_other(split: str) -> Callable[[], Examples]:
        return lambda: _load_other_split(splits[split], splits[base], classes, {*entered})

    return DatasetSplits(str(path), {name: load_other(name) for name in splits} | {base: lambda: first}, "classes", classes)


def _split_folders(path: Path, folders: Sequence[str]) -> dict[str, Path]:
    """Return the folders that are splits, by canonical name; an empty dict if all folders are classes."""
    named = [name for name in folders if canonical_split(name)]
    others = [name for name in folders if not canonical_split(name)]
    certain = [name for name in named if any(_has_images(path / name / inside) for inside in _subfolders(path / name))]
    if not certain and (others or len(named) < 2):
        _refuse_split_words(path, folders)
        return {}
    if stray := next((name for name in others if _has_images(path / name)), None):
        raise InputError(
            f"{path} has {stray} beside the split {certain[0]}: call it train, val or test, or move it out; "
            f"or, if {certain[0]} is a class, take its images out of their folders{nearest(stray.lower(), SPLIT_NAMES)}"
        )
    splits: dict[str, Path] = {}
    for name in named:
        if (split := canonical_split(name)) in splits:
            raise InputError(f"{path} has two folders for {split}, {splits[split].name} and {name}: move one of them out")
        splits[split] = path / name
    return splits


def _refuse_split_words(path: Path, folders: Sequence[str]) -> None:
    """Refuse folders that look like splits under names of another form, such as seg_train, seg_test and seg_pred.

    They do if their names have words for the training split and for another one, and each other name shares a word with
    these: a class called bullet_train or test_tube is beside classes of unrelated names.
    """
    words = {name: {*split_words(name)} for name in folders}
    splits = {name: split for name in folders for word in words[name] if (split := canonical_split(word))}
    shared = {word for name in splits for word in words[name]}
    if "train" in splits.values() and len({*splits.values()}) > 1 and all(shared & words[name] for name in folders):
        raise InputError(
            f"{path} has folders that look like splits and not like classes, {' and '.join(list(splits)[:2])}: "
            "name them train, val or test, with the folders of the classes directly inside"
        )


def _refuse_wrapping_folder(path: Path, name: str, *, is_split: bool) -> None:
    """Refuse a single class folder that contains folders of images: these are the classes or the splits."""
    if inside := next((inside for inside in _subfolders(path / name) if _has_images(path / name / inside)), None):
        remedy = f"move the folders of {path / name} into {path}" if is_split else f"give folder:{path / name}"
        raise InputError(
            f"{path} has one class folder, {name}, with folders of images inside, such as {inside}: "
            f"if these are the classes or splits, {remedy}"
        )


def _refuse_splits_inside(folder: Path) -> None:
    """Refuse a class folder that contains splits, whose test images would be trained on."""
    splits = {split: name for name in _subfolders(folder) if (split := canonical_split(name))}
    if "train" in splits and len(splits) > 1:
        other = next(name for split, name in splits.items() if split != "train")
        raise InputError(
            f"{folder} is a class that has the splits {splits['train']} and {other} inside: put the images into "
            f"{folder.parent / splits['train'] / folder.name} and {folder.parent / other / folder.name}; "
            "or rename these folders, if their images are to be mixed"
        )


def _has_images(path: Path) -> bool:
    return any(True for _ in walk_files(str(path), SUFFIXES))


def _follow_if_link(folder: Path, entered: set[str]) -> None:
    """Refuse a link to a folder that is read already.  entered: see `follow_link`."""
    if folder.is_symlink():
        follow_link(str(folder), entered)


def _load_other_split(path: Path, base: Path, classes: tuple[str, ...], entered: set[str]) -> Examples:
    """Return the images of another split, with the class numbers of the training split.  entered: see `follow_link`."""
    if unknown := sorted(set(_subfolders(path)) - set(classes)):
        if is_in_other_form(unknown[0], classes):
            raise InputError(
                f"{path / unknown[0]} has a name that {base} has in another Unicode form, such as é as two characters: "
                "give both folders the same name"
            )
        raise InputError(f"{path / unknown[0]} has no counterpart in {base}: both need the same classes, {_OR_A_SHARE}")
    examples, names = _load_class_folders(path, entered, f", {_OR_A_SHARE}")
    numbers = np.array([classes.index(name) for name in names], np.int64)
    return replace(examples, targets=numbers[examples.targets])


def _subfolders(path: Path) -> list[str]:
    with os.scandir(path) as entries:
        return sorted(entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir())


def _load_class_folders(path: Path, entered: set[str], alternative: str = "") -> tuple[Examples, tuple[str, ...]]:
    """Return the images below a folder of class folders, and the names of the classes.

    entered: see `follow_link`.
    alternative: added to the message if there are no class folders: what else the user can do.
    """
    folders = _subfolders(path)
    if not folders:
        raise InputError(f"{path} holds no class folders: put images into {path}/CLASS/{alternative}")
    if len(folders) > 1:  # a single one may contain all splits, see `_refuse_wrapping_folder`
        for folder in folders:
            _refuse_splits_inside(path / folder)
    counts: list[int] = []
    others: list[str] = []

    def paths() -> Iterator[str]:
        for folder in folders:
            count = 0
            _follow_if_link(path / folder, entered)
            for image in walk_files(str(path / folder), SUFFIXES, others, entered):
                count += 1
                yield f"{folder}/{image}"
            if not count:
                raise InputError(f"{path / folder} holds no images ({', '.join(SUFFIXES)}): add some, or remove the folder")
            counts.append(count)

    reader = ImageFiles(path, paths())
    targets: NDArray[np.int64] = np.repeat(np.arange(len(folders)), counts)
    with os.scandir(path) as entries:
        images = (entry for entry in entries if entry.name.lower().endswith(SUFFIXES) and entry.name[0] != ".")
        loose = sorted(entry.path for entry in images if not entry.is_dir())
    notes = (
        *_ignored_files_note(loose, f"in no class folder of {path.name}"),
        *_ignored_files_note(others, f"in class folders of {path.name}, without the suffix of an image"),
    )
    return make_examples(reader, targets, notes), tuple(folders)


def _ignored_files_note(paths: Sequence[str], description: str) -> tuple[str, ...]:
    return (f"files left out: {len(paths):,} {description}, such as {paths[0]}",) if paths else ()
