"""`digits`: 1,797 handwritten digits, 8x8 grey, that ship inside scikit-learn (E. Alpaydin and C. Kaynak, UCI, 1998)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from train.data.sources.examples import Pixels, examples
from train.data.sources.splitting import WHOLE, Found


def find() -> Found:
    """Return the digits; they come without splits."""
    answers = _load().target.astype(np.int64)
    return Found(
        "digits", {WHOLE: lambda: examples(Pixels(_pixels, "digit"), answers)}, "classes", tuple("0123456789"), (8, 8)
    )


def _load() -> Any:
    from sklearn.datasets import load_digits

    return load_digits()


def _pixels() -> NDArray[np.uint8]:
    return np.rint(_load().images * (255 / 16)).astype(np.uint8)  # grey levels come as 0 to 16
