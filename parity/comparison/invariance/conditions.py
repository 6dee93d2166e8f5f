"""The batches that `parity.invariance` runs, and the comparison of the outputs of an image in two of them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from parity.checkpoints.layout import Array
from parity.comparison.any_model.tensor_comparison import error_of
from parity.comparison.invariance.report import TWICE, Change
from parity.comparison.tolerances import ErrorNorms

Outputs = Mapping[str, Array]  # by name; axis 0 is the batch

IN_ORDER = "in order"  # the name of the batch that most others are compared with
ALONE = "alone"


@dataclass(frozen=True)
class Batch:
    """A batch that is compared with a reference.

    condition: what changes from the reference, for the report.
    inputs: the arrays of the batch.
    images: for each compared entry of the batch, the image of the given inputs that it has; further entries are padding.
    places: the entries of the batch that are compared.
    reference: `ALONE` or `IN_ORDER`.
    """

    condition: str
    inputs: tuple[Array, ...]
    images: NDArray[np.intp]
    places: NDArray[np.intp]
    reference: str = IN_ORDER


def batches(inputs: Sequence[Array]) -> Iterator[Batch]:
    """Yield every batch that is compared, made of the given inputs (N, ...)."""
    count = len(inputs[0])
    every = np.arange(count)
    yield Batch(TWICE, tuple(inputs), every, every)
    for size in sorted({2, count}):
        some = every[:size]
        yield Batch(f"alone and in a batch of {size}", tuple(x[:size] for x in inputs), some, some, ALONE)
    yield Batch("the batch in reverse order", tuple(x[::-1] for x in inputs), every[::-1], every)
    yield Batch("each image at the next place", tuple(np.roll(x, 1, 0) for x in inputs), np.roll(every, 1), every)
    kept = every[: (count + 1) // 2]
    zeros = tuple(np.concatenate([x[kept], np.zeros_like(x[len(kept) :])]) for x in inputs)
    yield Batch("padded with zeros", zeros, kept, kept)
    others = tuple(np.concatenate([x[kept], _reversed_entries(x[len(kept) :])]) for x in inputs)
    yield Batch("padded with other images", others, kept, kept)


def compare(
    condition: str, dtype: str, reference: Outputs, found: Outputs, images: Array | None = None, places: Array | None = None
) -> list[Change]:
    """Return the change of each output; tolerances are None.

    Args:
        condition: the name of the condition, for the changes.
        dtype: the name of the dtype of the outputs, for the changes.
        reference: outputs of all images, in the order of the given inputs.
        found: outputs of a batch.
        images, places: as in `Batch`; None compares all in order.
    """
    changes = []
    for name, expected in reference.items():
        a = found[name] if places is None else found[name][places]
        b = expected if images is None else expected[images]
        size = error_of(name, b, b)
        scale = size.reference_norm / math.sqrt(max(size.entries, 1))
        errors = [error_of(name, x, y) for x, y in zip(a, b, strict=True)]
        changes.append(
            Change(
                condition,
                dtype,
                name,
                bit_equal=a.tobytes() == b.tobytes(),
                difference=max(error.relative_rms(scale) for error in errors),
                largest=ErrorNorms.of(a, b).largest,
                ulps=_ulps(a, b),
                tolerance=None,
            )
        )
    return changes


def _reversed_entries(x: Array) -> Array:
    """Return other images with the same values: the entries of each image in reverse order."""
    return x.reshape(len(x), -1)[:, ::-1].reshape(x.shape)


def _ulps(a: Array, b: Array) -> int | None:
    """Return the largest number of steps between neighbouring floating-point numbers that separate two entries."""
    if a.dtype.kind in "iub" or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return None
    signed = np.dtype(f"i{a.itemsize}")

    def ordered(x: Array) -> Array:
        """Return integers in the order of the numbers, both zeros as 0."""
        bits = np.ascontiguousarray(x).view(signed)
        return np.where(bits < 0, np.iinfo(signed).min - bits, bits)

    # The distance between two float64 numbers may exceed the range of int64, but not that of uint64.
    low, high = np.minimum(ordered(a), ordered(b)), np.maximum(ordered(a), ordered(b))
    unsigned = np.dtype(f"u{a.itemsize}")
    return int((high.astype(unsigned) - low.astype(unsigned)).max(initial=0))
