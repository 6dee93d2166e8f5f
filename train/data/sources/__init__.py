"""Data sources: each kind of `--data` opens a data set as training images and held-out images with their targets.

    digits                  1,797 handwritten digits that come with scikit-learn       digits.py
    folder:PATH             class folders of image files                               folder.py
    parquet:PATH            Parquet files as data sets on the Hugging Face hub         parquet.py
    hf://OWNER/NAME         the same, downloaded from the hub                          hub.py
    npz:FILE                arrays as MedMNIST and Keras store them                    npz.py
    idx:PATH                MNIST's files                                              idx.py
    cifar:PATH              CIFAR's batches, as pickles or as binary records           cifar.py
    csv:TABLE.csv           a table beside a folder of images                          table.py
    tar:PATTERN             WebDataset shards                                          tar.py

To add a source:

1. Write a module with a function `open_splits(place, **options)` that returns an `examples.DatasetSplits`.  `place` is what
   follows the prefix in `--data PREFIX:PLACE`, with the home folder for a leading "~"; `options` are the pairs of
   `?name=value` behind it, as text.
2. Make the `Examples` of each split from an `examples.ImageReader`.  `ArrayImages` and `ImageFiles` are two such readers.
3. Add a line to `_SOURCES` below.

`splitting.choose_held_out` does the rest for every source: it checks the targets and chooses the held-out images.
"""

import glob
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from train.data.sources import cifar, digits, folder, hub, idx, npz, parquet, table, tar
from train.data.sources.decoding import decode, read_image
from train.data.sources.examples import Dataset, DatasetSplits, Examples
from train.data.sources.files import FileAccessError, raise_if_inaccessible
from train.data.sources.splitting import (
    DEFAULT_SHARE,
    VALIDATION_NAMES,
    choose_held_out,
    load_split,
    set_test_aside,
    stratified_split,
    typical_size,
)
from vit_spec import InputError, nearest

__all__ = ["Dataset", "Examples", "FileAccessError", "decode", "open_dataset", "read_image", "stratified_split"]
__all__ += ["open_test_split", "place_exists", "takes_place", "typical_size"]


_PLACE_AND_OPTIONS = re.compile(r"(.*?)\?(\w+=.*)", re.DOTALL)
TEST_OPTION = "test"  # of every source: the share of the training images that is set aside


class _SourceKind(NamedTuple):
    """A kind of `--data`: how a user writes it, the function that opens it, and the names of its options."""

    usage: str
    open_splits: Callable[..., DatasetSplits]
    options: tuple[str, ...] = ()

    @property
    def takes_place(self) -> bool:
        """Whether the user writes a place behind the prefix."""
        return ":" in self.usage


_SOURCES = {
    "digits": _SourceKind("digits", digits.open_splits),
    "folder": _SourceKind("folder:PATH", folder.open_splits),
    "parquet": _SourceKind("parquet:PATH", parquet.open_splits, parquet.OPTIONS),
    "hf": _SourceKind("hf://OWNER/NAME", hub.open_splits, parquet.OPTIONS),
    "npz": _SourceKind("npz:FILE", npz.open_splits),
    "idx": _SourceKind("idx:PATH", idx.open_splits),
    "cifar": _SourceKind("cifar:PATH", cifar.open_splits),
    "csv": _SourceKind("csv:TABLE.csv", table.open_splits, table.OPTIONS),
    "tar": _SourceKind("tar:PATTERN", tar.open_splits),
}


def takes_place(prefix: str) -> bool:
    """Return whether a prefix of `--data` has a place behind it, as in "folder:PATH"; False for an unknown prefix."""
    return prefix in _SOURCES and _SOURCES[prefix].takes_place


def place_exists(where: str) -> bool:
    """Return whether there is anything at a path, or at one that a pattern fits, as it follows a prefix of `--data`."""
    match = _PLACE_AND_OPTIONS.fullmatch(where)
    path = os.path.expanduser(match[1] if match else where)
    pattern = re.sub(r"\{[^{}]*\}", "*", path)  # a range in braces may have a million names
    return os.path.exists(path) or any(glob.iglob(pattern))


def open_dataset(spec: str, held_out: float | str | None = None) -> Dataset:
    """Open a data set.

    spec: the value of `--data`: a prefix and a place, such as "folder:photos"; some sources take options, such as
        "csv:t.csv?target=age".  "folder:photos?test=0.2" sets a share of the training images aside as the split "test".
    held_out: the images that evaluation uses.  A share: that share of every class of the training images, whatever other
        splits there are.  A name: the split of that name, such as "val" or "test".  None: the validation split if the data
        has one, else the test split, else 0.2 of every class.

    Raises:
        InputError: an unknown prefix or option, a place that holds something else than its prefix says, a missing split, no
            images, invalid targets, or a first image that cannot be read.
    """
    if isinstance(held_out, float) and not 0 < held_out < 1:
        raise InputError(f"held_out is {held_out}: give a share between 0 and 1, or the name of a split")
    with _opened(spec) as (data, is_set_aside):
        has_validation = any(split in data.splits for split in VALIDATION_NAMES)
        is_default = is_set_aside and held_out is None and not has_validation
        return choose_held_out(data, DEFAULT_SHARE if is_default else held_out)


def open_test_split(spec: str) -> Examples | None:
    """Return the split "test" of a data set; None if it has none.

    Raises:
        InputError: as `open_dataset`.
    """
    with _opened(spec) as (data, _):
        return load_split(data, "test") if "test" in data.splits else None


@contextmanager
def _opened(spec: str) -> Iterator[tuple[DatasetSplits, bool]]:
    """Yield the splits of a data set, and whether a test split was set aside.

    Raises:
        InputError: as `open_dataset`; also for an OSError in the context.
    """
    name, colon, where = spec.partition(":")
    if name.startswith("digits?"):
        name, where = "digits", name.removeprefix("digits")
    kind = _SOURCES.get(name)
    if kind is not None and kind.takes_place and not where:
        raise InputError(f"{spec!r} does not say where the images are: give {kind.usage}")
    if kind is None or (colon and not kind.takes_place):
        usages = ", ".join(known.usage for known in _SOURCES.values())
        raise InputError(f"unknown data {spec!r}: give one of {usages}{nearest(name, _SOURCES)}")
    place, options = _parse_options(os.path.expanduser(where), kind)
    share = options.pop(TEST_OPTION, None)
    try:
        data = kind.open_splits(*([place] if kind.takes_place else []), **options)
        yield (data, False) if share is None else (set_test_aside(data, _parse_share(share)), True)
    except OSError as error:
        raise_if_inaccessible(error, error.filename or place)
        raise


def _parse_share(text: str) -> float:
    """Return the share of `?test=SHARE`; raise InputError if it is none."""
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise InputError(f"?{TEST_OPTION}={text}: give a share between 0 and 1, such as {TEST_OPTION}=0.2")
    return share


def _parse_options(where: str, kind: _SourceKind) -> tuple[str, dict[str, str]]:
    """Split "PLACE?a=x&b=y" into the place and its options.

    A question mark that no NAME=VALUE follows belongs to the place.
    """
    match = _PLACE_AND_OPTIONS.fullmatch(where)
    if not match:
        return where, {}
    if os.path.exists(where):
        raise InputError(f"{where} exists, but its ? begins the options: rename it, or give a link to it")
    options: dict[str, str] = {}
    for pair in match[2].split("&"):
        option, _, value = pair.partition("=")
        known = (*kind.options, TEST_OPTION)
        if option in known and not value:
            raise InputError(f"{pair!r} has no value: give one, or leave it out")
        if option not in known:
            allowed = f"give {', '.join(f'{name}=...' for name in known)}"
            raise InputError(f"{pair!r} is not an option of {kind.usage}: {allowed}{nearest(option, known)}")
        options[option] = value
    return match[1], options
