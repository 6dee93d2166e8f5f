"""What is in a file: its parameters one by one, and numbers among them that should make a reader stop."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.checkpoints.formats import get
from parity.checkpoints.layout import PIECE, Array
from parity.checkpoints.weights import FLOATS, Checkpoint, check
from vit_spec import rows

EXAMINED = 512 << 20  # bytes of weights that are looked through unasked: reading more would be waited for

# Bits of a number's exponent and mantissa, by dtype.
_BITS = {"float16": (0x7C00, 0x03FF), "bfloat16": (0x7F80, 0x007F), "float32": (0x7F80_0000, 0x007F_FFFF)}
_BITS["float64"] = (0x7FF0_0000_0000_0000, 0x000F_FFFF_FFFF_FFFF)


@dataclass(frozen=True)
class Entry:
    """One parameter of a file.

    name: as in `vit_spec.rows`.
    key, axes, shape, dtype: of each of its arrays.
    arrays, entries, nbytes: how many, in all.
    suspicious: what is odd in its numbers, e.g. "3 NaN"; None where they were not examined.
    """

    name: str
    key: str
    axes: str
    shape: tuple[int, ...]
    dtype: str
    arrays: int
    entries: int
    nbytes: int
    suspicious: tuple[str, ...] | None


def entries(checkpoint: Checkpoint, values: bool | None = None) -> Iterator[Entry]:
    """Yield every parameter of a checkpoint.

    values: whether to look at the numbers, for which all of the file is read; None looks at small files alone.
    """
    config, dtypes, found = checkpoint.config, check(checkpoint), rows(checkpoint.config)
    total = sum(found[name].size * dtype.itemsize for name, dtype in dtypes.items())
    look = total <= EXAMINED if values is None else values
    for name, layout in get(checkpoint.format).layouts(config).items():
        keys, size = layout.keys(config.sizes), found[name].size
        odd = suspicious([checkpoint.arrays[key] for key in keys]) if look else None
        shape, dtype = layout.shape(config.sizes), dtypes[name]
        yield Entry(name, layout.key, layout.axes, shape, dtype.name, len(keys), size, size * dtype.itemsize, odd)


def suspicious(arrays: list[Any]) -> tuple[str, ...]:
    """Return what is odd in the numbers of a parameter: NaN, infinities, denormal numbers, nothing but zeros."""
    counts = dict.fromkeys(("NaN", "infinite", "denormal", "other than zero"), 0)
    for array in arrays:
        for piece in _pieces(array):
            exponent, mantissa = _BITS[piece.dtype.name]
            bits = piece.view(f"u{piece.itemsize}")
            edge, fraction = bits & exponent, (bits & mantissa) != 0
            counts["NaN"] += int(np.count_nonzero((edge == exponent) & fraction))
            counts["infinite"] += int(np.count_nonzero((edge == exponent) & ~fraction))
            counts["denormal"] += int(np.count_nonzero((edge == 0) & fraction))
            counts["other than zero"] += int(np.count_nonzero(bits & (exponent | mantissa)))
    odd = [f"{count:,} {what}" for what, count in counts.items() if count and what != "other than zero"]
    return tuple(odd) if counts["other than zero"] else ("all zero",)


def _pieces(array: Any) -> Iterator[Array]:
    """Yield the entries of an array, a few megabytes at a time."""
    step = PIECE // FLOATS[array.dtype.name].itemsize
    size = int(np.prod(array.shape, dtype=np.int64))
    for first in range(0, size, step):
        yield array.read(first, min(size, first + step))
