"""`digits`: 1,797 handwritten digits, 8x8 grey, that ship with scikit-learn (E. Alpaydin and C. Kaynak, UCI, 1998)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from train.data.sources.examples import UNSPLIT, ArrayImages, DatasetSplits, make_examples


def open_splits() -> DatasetSplits:
    """Return the digits, which come without splits."""
    targets = _load_digits().target.astype(np.int64)
    return DatasetSplits(
        "digits",
        {UNSPLIT: lambda: make_examples(ArrayImages(_digit_images, "digit"), targets)},
        "classes",
        tuple("0123456789"),
        (8, 8),
    )


def _load_digits() -> Any:
    from sklearn.datasets import load_digits

    return load_digits()


def _digit_images() -> NDArray[np.uint8]:
    return np.rint(_load_digits().images * (255 / 16)).astype(np.uint8)  # scikit-learn has grey levels from 0 to 16
