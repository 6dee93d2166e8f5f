"""The precision of expected outputs, inferred from their digits and from the weights."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from parity.checkpoints.layout import Array
from parity.comparison.tolerances import MAX_ERROR_RATIO, UNIT_ROUNDOFF

NARROW_DTYPES = ("bfloat16", "float16", "float32")  # from narrow to wide; float64 comes after them
DIGIT_COUNTS = range(2, 10)  # numbers of digits that printed outputs may have
MIN_ENTRIES = 8  # fewer distinct entries may have round digits by chance


@dataclass(frozen=True)
class DecimalRounding:
    """The decimal rounding of outputs that were printed as text.

    digits: "4 decimals", "6 significant digits", or "" if the outputs have all digits of their dtype.
    error: the largest relRMS that this rounding causes.
    """

    digits: str = ""
    error: float = 0.0


@dataclass(frozen=True)
class RoundingError:
    """A source of rounding error in the expected outputs.

    what: a description, e.g. "rounding to float32".
    error: relRMS of the outputs, estimated by running the model with and without this rounding.
    min_error: the smallest error that it plausibly causes; a smaller difference has another cause.
    """

    what: str
    error: float
    min_error: float = 0.0

    @property
    def tolerance(self) -> float:
        """The largest error that this rounding explains."""
        return MAX_ERROR_RATIO * self.error

    def explains(self, error: float) -> bool:
        """Return whether this rounding explains an error of the outputs."""
        return self.min_error <= error <= self.tolerance


def narrowest_dtype(*arrays: Array) -> str:
    """Return the narrowest dtype that represents every entry exactly.

    Outputs may be stored in a wider dtype than the one that they were computed in.
    """
    dtypes: Mapping[str, Any] = dict(zip(NARROW_DTYPES, (ml_dtypes.bfloat16, np.float16, np.float32), strict=True))
    with np.errstate(over="ignore", invalid="ignore"):
        for name, dtype in dtypes.items():
            if all(_is_exact_in(array.astype(np.float64), dtype) for array in arrays):
                return name
    return "float64"


def _is_exact_in(wide: Array, dtype: Any) -> bool:
    return np.array_equal(wide.astype(dtype).astype(np.float64), wide)


def half_precision_dtype(weights: Iterable[Array]) -> str:
    """Return "bfloat16" or "float16" if it represents all weights exactly, whatever dtype stores them, otherwise ""."""
    dtype = narrowest_dtype(*weights)
    return dtype if dtype in NARROW_DTYPES[:2] else ""


def detect_decimal_rounding(outputs: Array) -> DecimalRounding:
    """Detect whether outputs were rounded to a number of decimal digits, as printed numbers are."""
    rms = float(np.sqrt(np.mean(np.square(outputs.astype(np.float64))))) if outputs.size else 0.0
    values = np.unique(outputs.astype(np.float64))  # equal entries, such as those of equal images, are no further evidence
    dtype = narrowest_dtype(values)
    # Half-precision numbers are short decimal fractions themselves.
    if values.size < MIN_ENTRIES or not rms or not np.isfinite(values).all() or dtype in NARROW_DTYPES[:2]:
        return DecimalRounding()
    unit = UNIT_ROUNDOFF[dtype]
    largest = float(np.abs(values).max())
    decimals, significant = DecimalRounding(), DecimalRounding()
    for count in DIGIT_COUNTS:
        scaled = values * 10.0**count
        is_near = np.abs(scaled - np.rint(scaled)) <= 4 * unit * np.abs(scaled)
        if 4 * unit * largest * 10.0**count < 1 / 50 and is_near.all():
            decimals = DecimalRounding(f"{count} decimals", 0.5 * 10.0**-count / rms)
            break
    for count in DIGIT_COUNTS:
        rounded = np.array([float(f"{value:.{count - 1}e}") for value in values])
        if 10.0**-count > 50 * unit and (np.abs(rounded - values) <= 4 * unit * np.abs(values)).all():
            significant = DecimalRounding(f"{count} significant digits", 0.5 * 10.0 ** (1 - count))
            break
    # Both may fit: a small number with five significant digits has many decimals.  The coarser rounding is the actual one.
    return significant if significant.error > 10 * decimals.error else decimals
