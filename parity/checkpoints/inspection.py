"""List the parameters of a checkpoint, and find values in them that are probably a fault, such as NaN."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from parity.checkpoints.arrays import FLOAT_DTYPES
from parity.checkpoints.columns import parameter_of
from parity.checkpoints.formats import get
from parity.checkpoints.layout import READ_CHUNK, Array
from parity.checkpoints.weights import Checkpoint, validate
from vit_spec import rows

MAX_EXAMINED_BYTES = 512 << 20  # values of larger checkpoints are examined only on request: reading them takes long

# dtype -> the bit masks of the exponent and of the mantissa
_FLOAT_MASKS = {"float16": (0x7C00, 0x03FF), "bfloat16": (0x7F80, 0x007F), "float32": (0x7F80_0000, 0x007F_FFFF)}
_FLOAT_MASKS["float64"] = (0x7FF0_0000_0000_0000, 0x000F_FFFF_FFFF_FFFF)


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter of a checkpoint.

    Attributes:
        name: as in `vit_spec.rows`; of a piece, as in `parity.checkpoints.columns`.
        key: the pattern of the keys of its arrays; see `parity.checkpoints.layout`.
        axes: the axes of each array; see `parity.checkpoints.layout`.
        shape: the shape of each array.
        dtype: the dtype of each array.
        arrays: the number of arrays.
        entries: the number of entries of all arrays.
        nbytes: the size of all arrays in bytes.
        suspicious: what is suspicious in its values, e.g. "3 NaN"; None if they were not examined.
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


def list_parameters(checkpoint: Checkpoint, values: bool | None = None) -> Iterator[ParameterInfo]:
    """Yield every parameter of a checkpoint.

    Args:
        checkpoint: the checkpoint.
        values: whether to examine the values, which reads the whole file; None examines the values of small files only.
    """
    config, dtypes, declared = checkpoint.config, validate(checkpoint), rows(checkpoint.config)
    total = sum(declared[name].size * dtype.itemsize for name, dtype in dtypes.items())
    examine = total <= MAX_EXAMINED_BYTES if values is None else values
    for name, layout in get(checkpoint.format).layouts(config).items():
        keys, size = layout.keys(config.sizes), prod(config.sizes[axis] for axis in layout.parameter_axes)
        odd = find_suspicious_values([checkpoint.arrays[key] for key in keys]) if examine else None
        shape, dtype = layout.shape(config.sizes), dtypes[parameter_of(name)]
        yield ParameterInfo(
            name, layout.key, layout.axes_text, shape, dtype.name, len(keys), size, size * dtype.itemsize, odd
        )


def find_suspicious_values(arrays: list[Any]) -> tuple[str, ...]:
    """Return what is suspicious in the values of a parameter: NaN, infinities, denormal numbers, nothing but zeros."""
    counts = dict.fromkeys(("NaN", "infinite", "denormal", "other than zero"), 0)
    for array in arrays:
        for chunk in _chunks(array):
            exponent_mask, mantissa_mask = _FLOAT_MASKS[chunk.dtype.name]
            bits = chunk.view(f"u{chunk.itemsize}")
            exponent, has_mantissa = bits & exponent_mask, (bits & mantissa_mask) != 0
            counts["NaN"] += int(np.count_nonzero((exponent == exponent_mask) & has_mantissa))
            counts["infinite"] += int(np.count_nonzero((exponent == exponent_mask) & ~has_mantissa))
            counts["denormal"] += int(np.count_nonzero((exponent == 0) & has_mantissa))
            counts["other than zero"] += int(np.count_nonzero(bits & (exponent_mask | mantissa_mask)))
    odd = [f"{count:,} {what}" for what, count in counts.items() if count and what != "other than zero"]
    return tuple(odd) if counts["other than zero"] else ("all zero",)


def _chunks(array: Any) -> Iterator[Array]:
    """Yield the entries of an array, `READ_CHUNK` bytes at a time."""
    step = READ_CHUNK // FLOAT_DTYPES[array.dtype.name].itemsize
    size = int(np.prod(array.shape, dtype=np.int64))
    for first in range(0, size, step):
        yield array.read(first, min(size, first + step))
