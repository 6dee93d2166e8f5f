"""Where images come from: `digits` and `folder:PATH`, each as a training set and a held-out set of labelled images."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from train.chance import SPLIT, generator
from vit_spec import InputError, nearest

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
HELD_OUT_FOLDERS = ("val", "valid", "validation", "test")


@dataclass(frozen=True)
class Examples:
    """Labelled images.  `read(i)` gives image i; `labels` its class number, (N,) int64; `names` what it is called."""

    read: Callable[[int], Image.Image]
    labels: NDArray[np.int64]
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Source:
    """A data set: what is trained on, what is held out, and what a model should know about it.

    channels: 1 grey, 3 colour.
    grid: rows and columns of patches that suit images far smaller than the model's own size; None: the model's own size.
    notes: what was decided about the data without being asked, a sentence each.
    """

    train: Examples
    held_out: Examples
    classes: tuple[str, ...]
    channels: int
    grid: tuple[int, int] | None
    notes: tuple[str, ...]


def open_source(spec: str, held_out: float) -> Source:
    """Open `digits` or `folder:PATH`; `held_out` is the share of every class kept out where no split is given.

    Raises:
        InputError: an unknown source; a folder that is missing, empty, or laid out in another way.
    """
    kind, _, where = spec.partition(":")
    match kind:
        case "digits" if not where:
            return digits(held_out)
        case "folder" if where:
            return folder(Path(where).expanduser(), held_out)
    raise InputError(f"unknown data {spec!r}: give digits or folder:PATH{nearest(kind, ('digits', 'folder'))}")


def digits(held_out: float) -> Source:
    """1,797 handwritten digits, 8x8 grey, that ship inside scikit-learn (E. Alpaydin and C. Kaynak, UCI, 1998)."""
    from sklearn.datasets import load_digits

    found = load_digits()
    pixels = np.rint(found.images * (255 / 16)).astype(np.uint8)  # grey levels come as 0 to 16
    labels = found.target.astype(np.int64)

    def read(rows: NDArray[np.int64], i: int) -> Image.Image:
        return Image.fromarray(pixels[rows[i]])

    train, held = (
        Examples(partial(read, rows), labels[rows], [f"digit {row}" for row in rows])
        for rows in stratified(labels, held_out)
    )
    notes = (_split_note(len(train), len(held), held_out),)
    return Source(train, held, tuple("0123456789"), 1, (2, 2), notes)


def folder(path: Path, held_out: float) -> Source:
    """A folder of class folders, PATH/CLASS/*.jpg; or PATH/train and PATH/val, each a folder of class folders.

    Classes are numbered in the order of their names.  JPEG, PNG and WebP files count, at any depth; others are ignored.
    """
    if not path.is_dir():
        raise InputError(f"{path} is not a folder: give folder:PATH with PATH/CLASS/*.jpg inside")
    given = next((path / name for name in HELD_OUT_FOLDERS if (path / name).is_dir()), None)
    if (path / "train").is_dir() and given is not None:
        train, classes = _class_folders(path / "train")
        held, held_classes = _class_folders(given)
        if unknown := sorted(set(held_classes) - set(classes)):
            raise InputError(f"{given / unknown[0]} has no counterpart in {path / 'train'}: both need the same classes")
        held = [(file, classes.index(held_classes[label])) for file, label in held]
        notes: tuple[str, ...] = (f"the split is given: {len(train):,} images in train, {len(held):,} in {given.name}",)
    else:
        files, classes = _class_folders(path)
        parts = stratified(np.array([label for _, label in files]), held_out)
        train, held = ([files[row] for row in rows] for rows in parts)
        notes = (_split_note(len(train), len(held), held_out),)
    for files, what in ((train, "train on"), (held, "judge the model by")):
        if not files:
            raise InputError(f"{path} leaves no images to {what}: add images, or change --held-out")
    with read_image(train[0][0]) as first:
        grey = first.mode in ("1", "L")
    notes += (f"images are taken as {'grey' if grey else 'colour'}, as the first one is",)
    return Source(_files(train), _files(held), tuple(classes), 1 if grey else 3, None, notes)


def read_image(path: Path) -> Image.Image:
    """Decode an image, turned upright as its EXIF orientation says.

    Raises:
        InputError: not readable, not an image, cut short, or with more than 8 bits a channel.
    """
    try:
        with Image.open(path) as image:
            image.load()
            upright = ImageOps.exif_transpose(image)
    except UnidentifiedImageError:
        raise InputError(f"{path} is not an image that can be read: replace or remove the file") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise InputError(f"{path} cannot be read ({error}): replace or remove the file") from None
    if upright.mode[0] in "IF":  # Pillow would cut these off at 255 without a word
        raise InputError(f"{path} has more than 8 bits a channel ({upright.mode}): convert it to 8 bits first")
    return upright


def stratified(labels: NDArray[np.int64], share: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split 0..N-1 into training and held-out rows, each sorted, `share` of every class held out (rounded).

    The choice depends on the labels alone and not on a run's seed, so that runs are judged by the same images.  A class
    with a single image keeps it for training, and one with two or more holds out at least one and keeps at least one.
    """
    held: list[int] = []
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        count = min(max(1, round(share * len(rows))), len(rows) - 1)
        held += generator(SPLIT, int(label)).permutation(rows)[:count].tolist()
    mask = np.zeros(len(labels), bool)
    mask[held] = True
    return np.flatnonzero(~mask), np.flatnonzero(mask)


def _class_folders(path: Path) -> tuple[list[tuple[Path, int]], list[str]]:
    """Return the images below a folder of class folders, each with its class number, and the classes' names."""
    folders = sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not folders:
        raise InputError(f"{path} holds no class folders: put images into {path}/CLASS/")
    files: list[tuple[Path, int]] = []
    for label, entry in enumerate(folders):
        found = [(file, label) for file in sorted(entry.rglob("*")) if file.suffix.lower() in SUFFIXES]
        if not found:
            raise InputError(f"{entry} holds no images ({', '.join(SUFFIXES)}): add some, or remove the folder")
        files += found
    if len(folders) == 1:
        raise InputError(f"{path} holds one class folder, {folders[0].name}: a model needs two or more to tell apart")
    return files, [entry.name for entry in folders]


def _files(files: list[tuple[Path, int]]) -> Examples:
    labels = np.array([label for _, label in files], np.int64)
    return Examples(lambda i: read_image(files[i][0]), labels, [str(file) for file, _ in files])


def _split_note(train: int, held: int, share: float) -> str:
    return f"held out: {held:,} of {train + held:,} images, {share:.0%} of every class, the same for every seed"
