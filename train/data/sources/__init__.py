"""Where images come from, each source as a training set and a held-out set with what a model should answer.

    digits                  1,797 handwritten digits that come with scikit-learn       digits.py
    folder:PATH             class folders of image files                               folder.py
    parquet:PATH            the layout of data sets on the Hugging Face hub            parquet.py
    hf://OWNER/NAME         the same, fetched from the hub                             hub.py
    npz:FILE                MedMNIST's and Keras's arrays                              npz.py
    idx:PATH                MNIST's files                                              idx.py
    cifar:PATH              CIFAR's batches, as pickles or as bare bytes               cifar.py
    csv:TABLE.csv           a table beside a folder of images                          table.py
    tar:PATTERN             WebDataset's shards                                        tar.py

Adding one is a function from a place and options to `splitting.Found`, and a line in `_KINDS`.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

from train.data.sources import cifar, digits, folder, hub, idx, npz, parquet, table, tar
from train.data.sources.decoding import decode, read_image
from train.data.sources.examples import Examples, Source
from train.data.sources.files import Unavailable, unless_damaged
from train.data.sources.splitting import Found, choose, stratified, typical_size
from vit_spec import InputError, nearest

__all__ = ["Examples", "Source", "Unavailable", "decode", "open_source", "read_image", "stratified"]
__all__ += ["typical_size"]


class _Kind(NamedTuple):
    form: str
    find: Callable[..., Found]
    options: tuple[str, ...] = ()


_KINDS = {
    "digits": _Kind("digits", digits.find),
    "folder": _Kind("folder:PATH", folder.find),
    "parquet": _Kind("parquet:PATH", parquet.find, parquet.OPTIONS),
    "hf": _Kind("hf://OWNER/NAME", hub.find, parquet.OPTIONS),
    "npz": _Kind("npz:FILE", npz.find),
    "idx": _Kind("idx:PATH", idx.find),
    "cifar": _Kind("cifar:PATH", cifar.find),
    "csv": _Kind("csv:TABLE.csv", table.find, table.OPTIONS),
    "tar": _Kind("tar:PATTERN", tar.find),
}


def open_source(spec: str, held_out: float | str | None = None) -> Source:
    """Open a data set.

    spec: a kind and a place, such as "folder:photos", with options where a kind has some: "csv:t.csv?target=age".
    held_out: what a model is judged by.  A share: that much of every class of the training images, whatever other splits
        there are.  A name: that split, such as "val" or "test".  None: the validation split that comes with the data, or
        else the test split, or else 0.2 of every class.

    Raises:
        InputError: an unknown kind or option, a place that holds something else than its kind says, no such split, no
            images, answers that are none, or a first image that cannot be read.
    """
    if isinstance(held_out, float) and not 0 < held_out < 1:
        raise InputError(f"held_out is {held_out}: give a share between 0 and 1, or the name of a split")
    name, colon, where = spec.partition(":")
    kind = _KINDS.get(name)
    if kind is not None and name != "digits" and not where:
        raise InputError(f"{spec!r} does not say where the images are: give {kind.form}")
    if kind is None or (name == "digits" and colon):
        forms = ", ".join(known.form for known in _KINDS.values())
        raise InputError(f"unknown data {spec!r}: give one of {forms}{nearest(name, _KINDS)}")
    if name == "digits":
        return choose(digits.find(), held_out)
    place, options = _options(where, kind)
    try:
        return choose(kind.find(place, **options), held_out)
    except OSError as error:
        unless_damaged(error, error.filename or place)
        raise


def _options(where: str, kind: _Kind) -> tuple[str, dict[str, str]]:
    """Take "?a=x&b=y" off the end of a place.  A question mark that no such pair follows belongs to the place."""
    match = re.fullmatch(r"(.*?)\?(\w+=.*)", where, re.DOTALL)
    if not match:
        return where, {}
    options: dict[str, str] = {}
    for pair in match[2].split("&"):
        option, _, value = pair.partition("=")
        if option not in kind.options or not value:
            takes = f"the options of {kind.form} are {', '.join(kind.options)}" if kind.options else "it takes none"
            raise InputError(f"{pair!r} is no option of {kind.form}: {takes}{nearest(option, kind.options)}")
        options[option] = value
    return match[1], options
