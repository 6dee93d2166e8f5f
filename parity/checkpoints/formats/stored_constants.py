"""Arrays of constants that libraries store beside the parameters: whether they have the values that the twins compute."""

from math import isqrt

import numpy as np

from parity.checkpoints.formats.evidence import Evidence, Fields
from parity.checkpoints.layout import Array
from vit_spec import ViTConfig
from vit_spec.positions import relative_index

INDEX = "relative_position_index"  # the last word of the key of an index of relative positions


def is_zero(array: Array, config: ViTConfig) -> bool:
    """Return whether all entries are zero."""
    return not array.any()


def is_position_ids(array: Array, config: ViTConfig) -> bool:
    """Return whether an array has the number of each row of the position table, in order."""
    return _is_stored(array.reshape(-1), np.arange(config.sizes["token"]))


def is_relative_index(array: Array, config: ViTConfig) -> bool:
    """Return whether an array is `vit_spec.positions.relative_index` of a model."""
    return _is_stored(array, relative_index(config.grid, config.num_prefix))


def _is_stored(array: Array, numbers: Array) -> bool:
    """Return whether an array has these numbers, rounded to its dtype: a whole state dict may be in half precision."""
    return np.array_equal(array, numbers.astype(array.dtype))


def image_size_of_index(evidence: Evidence) -> Fields:
    """Return the image size for which the first index of relative positions in a file is right; {} if there is none.

    The rows of the table of offsets, (2 gh - 1)(2 gw - 1), and the patches in the index, gh * gw, yield the two sides of
    the grid; the values of the index yield their order.
    """
    index = next((array for key, array in evidence.ignored_arrays.items() if key.endswith(INDEX)), None)
    if index is None or "offset" not in evidence.sizes or not {"ph", "pw"} <= evidence.sizes.keys():
        return {}
    prefix = sum(name in evidence.axes for name in ("cls_token", "dist_token")) + evidence.sizes.get("register", 0)
    patches, offsets = index.shape[0] - prefix, evidence.sizes["offset"] - (3 if prefix else 0)
    total = (4 * patches + 1 - offsets) // 2  # gh + gw
    difference = isqrt(max(total**2 - 4 * patches, 0))
    short, long = (total - difference) // 2, (total + difference) // 2
    if min(short, patches) < 1 or short * long != patches or index.shape != (patches + prefix,) * 2:
        return {}
    for rows, columns in ((short, long), (long, short)):
        if _is_stored(np.asarray(index), relative_index((rows, columns), prefix)):
            return {"image_size": (rows * evidence.sizes["ph"], columns * evidence.sizes["pw"])}
    return {}
