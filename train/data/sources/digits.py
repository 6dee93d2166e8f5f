"""`digits`: 1,797 handwritten digits, 8x8 grey, that ship with scikit-learn (E. Alpaydin and C. Kaynak, UCI, 1998)."""

import gzip
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from train.data.sources.examples import UNSPLIT, ArrayImages, DatasetSplits, make_examples


def open_splits() -> DatasetSplits:
    """Return the digits, which come without splits."""
    targets = _read_rows()[:, 64].astype(np.int64)
    return DatasetSplits(
        "digits",
        {UNSPLIT: lambda: make_examples(ArrayImages(_digit_images, "digit"), targets)},
        "classes",
        tuple("0123456789"),
        (8, 8),
    )


@cache
def _read_rows() -> NDArray[np.uint8]:
    """Return 64 pixels from 0 to 16 and then the class of each digit, (1797, 65) uint8.

    The file is that of `sklearn.datasets.load_digits`.  scikit-learn is not imported, because that takes long.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed.
    """
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
    with gzip.open(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt") as file:
        return np.loadtxt(file, delimiter=",").astype(np.uint8)


def _digit_images() -> NDArray[np.uint8]:
    return np.rint(_read_rows()[:, :64].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
