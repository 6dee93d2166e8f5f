"""How precise expected outputs are, as far as their digits and the weights tell."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from parity.checkpoints.layout import Array
from parity.comparison.tolerances import RATIO_MAX, UNIT

TYPES = ("bfloat16", "float16", "float32")  # from narrow to wide, ahead of float64
DIGITS = range(2, 10)  # of numbers that were printed
FEW = 8  # entries; of fewer the digits may be round by chance


@dataclass(frozen=True)
class Written:
    """How outputs were rounded when they were written.

    digits: "4 decimals", "6 significant digits", or nothing where all digits of a type are there.
    error: the relRMS that this rounding makes at most.
    """

    digits: str = ""
    error: float = 0.0


@dataclass(frozen=True)
class Level:
    """Something that makes two computations of the same function differ, and by how much.

    what: in words, e.g. "rounding to float32".
    error: relRMS of the outputs, estimated by running the model with and without it.
    least: the smallest error that it makes, up to chance; a much smaller one has another reason.
    """

    what: str
    error: float
    least: float = 0.0

    @property
    def tolerance(self) -> float:
        """The error up to which this explains a difference."""
        return RATIO_MAX * self.error

    def explains(self, error: float) -> bool:
        """Whether outputs may differ so much for this reason."""
        return self.least <= error <= self.tolerance


def narrowest(*arrays: Array) -> str:
    """Return the narrowest type that holds every entry: numbers that were computed in it and written in a wider one."""
    types: Mapping[str, Any] = dict(zip(TYPES, (ml_dtypes.bfloat16, np.float16, np.float32), strict=True))
    with np.errstate(over="ignore", invalid="ignore"):
        for name, kind in types.items():
            if all(_held(array.astype(np.float64), kind) for array in arrays):
                return name
    return "float64"


def _held(wide: Array, kind: Any) -> bool:
    return np.array_equal(wide.astype(kind).astype(np.float64), wide)


def rounded_weights(weights: Iterable[Array]) -> str:
    """Return "bfloat16" or "float16" where all weights are numbers of that type, although wider ones hold them."""
    kind = narrowest(*weights)
    return kind if kind in TYPES[:2] else ""


def written(outputs: Array) -> Written:
    """Return to how many digits outputs were rounded, if they were: numbers that were printed, and read again."""
    values = outputs.astype(np.float64).ravel()
    size = float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0
    if values.size < FEW or not size or not np.isfinite(values).all():
        return Written()
    unit = UNIT["float32"] if narrowest(values) == "float32" else UNIT["float64"]
    largest = float(np.abs(values).max())
    decimals, digits = Written(), Written()
    for count in DIGITS:
        scaled = values * 10.0**count
        near = np.abs(scaled - np.rint(scaled)) <= 4 * unit * np.abs(scaled)
        if 4 * unit * largest * 10.0**count < 1 / 50 and near.all():
            decimals = Written(f"{count} decimals", 0.5 * 10.0**-count / size)
            break
    for count in DIGITS:
        short = np.array([float(f"{value:.{count - 1}e}") for value in values])
        if 10.0**-count > 50 * unit and (np.abs(short - values) <= 4 * unit * np.abs(values)).all():
            digits = Written(f"{count} significant digits", 0.5 * 10.0 ** (1 - count))
            break
    # Each fits the other with more of them: five digits of a small number are many decimals.
    return digits if digits.error > 10 * decimals.error else decimals
