"""How far two tensors are apart, and how far they may be: every bar of the gates, and where it comes from.

The measure is norm-wise, tensor by tensor: relRMS = ||a - b|| / ||reference||.  Entry-by-entry measures mean nothing where
an entry crosses zero.

G0, the same function: in float64 on CPU two right implementations part by rounding alone, a few 1e-15 for a ViT of any
depth.  The bar of 1e-12 leaves room for 500 times that; a LayerNorm eps of 1e-5 for 1e-6 is seven orders of magnitude
above it.  Weights after many optimizer steps may part by 1e-10: each step divides by the root of a running mean of
squares, which for small gradients amplifies the rounding of the step before.

G1, the same quality: in float32 each side is as near to the float64 result as the other, within a factor of 2 (4 for the
largest entry), and both are nearer than 5e-6, 20 to 30 roundings of 6e-8 with room for 3.  Luck shrinks with numbers:
the logarithm of the ratio of two root-mean-squares over n entries scatters by 1 / sqrt(n).  A relRMS is such a ratio, and
so is that of two errors; so both bars are widened by five of these, exp(5 / sqrt(n)): by 1.05 for ten thousand entries, by
5 for ten, which makes 10 of the factor of 2 (as in PyTorch's own comparison of compiled with eager models,
torch/_dynamo/utils.py `same`), and by 34 for two: the outputs of a model with one output, for two images, may both happen
to be nearly zero.

Amplified rounding.  The tolerances above are those of a function that amplifies rounding as ordinary weights do.  Where a
tensor is outside of them, `parity.comparison.amplification` measures what `ROUNDINGS` roundings at every operation make
of it in float64, and the tolerance is that, times `FEW`: what is amplified points in few directions, as if it had four
entries.  The number of directions is measured too: for errors in n independent directions, the mean square of the cosine
between two of them is 1 / n.  Where n is less than the number of entries, n replaces it in exp(5 / sqrt(n)): in a softmax
over hundreds of rows, one row may have two nearly equal scores and all of the rounding error.
Such a tolerance may be wide.  So the whole is trusted only if each part on its own, fed what the reference was fed, is
within the tolerances above, or within what rounding makes of that part alone, which is little, however much a whole model
makes of it.  Where even that is more than `JUDGED`, or the type cannot hold the numbers (`LARGEST`), nothing can be said of
the tensor, and the report says so.  Nor can it of what is computed from a tensor that rounding changes by more than
`SWAMPED`: functions bend over such a distance, the gradient of a norm is as large as its deviation happens to be small,
and the next pass may be a hundred times farther off than those that were measured.

G2, half precision and TF32: as G1, with weights and images rounded to the type first, for that rounding is nobody's fault.
Sums are kept in float32 there and only what an operation takes and gives is rounded, so five units of the type are the
ceiling: 2e-2 for bfloat16, 2.5e-3 for float16 and TF32.

G3, trajectories in float32: two frameworks may part no further than 3 times what one of them parts from itself when its
weights are moved by one rounding, at the start and after each step.  Adam's first steps are the signs of gradients, and
tiny gradients have signs by luck.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

FUNCTION = 1e-12  # G0: what float64 rounding explains, with room for 500
TRAJECTORY = 1e-10  # G0, after many optimizer steps
PRECISION = 5e-6  # G1: a float32 result of a deep ViT is 20 to 30 roundings (6e-8 each) away
COARSER = 2**29  # G1: float32's rounding over float64's
RATIO, RATIO_MAX = 2.0, 4.0  # G1: how much worse one side's rounding may be than the other's
SLACK = 1 / 10  # G1: of the bar; a difference of a few roundings is no verdict on either side
NOISE = 3.0  # G3
UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "tf32": 2.0**-11, "float16": 2.0**-11, "bfloat16": 2.0**-8}
TIMES = 5  # G2: units of the type that a result may be away
LEAST = {"float64": 2.0**-1022, "float32": 2.0**-126, "bfloat16": 2.0**-126, "float16": 2.0**-25}  # what underflow leaves
LARGEST = {"float64": 2.0**1020, "float32": 2.0**126, "bfloat16": 2.0**126, "float16": 2.0**15}  # that a type holds
# What the forward pass and the backward pass of a norm do to their input, in at least float32: squares, and cubes.
POWERS = {"float64": (2, 3), "float32": (2, 3), "bfloat16": (2, 3), "float16": (1, 1)}
ROUNDINGS = 16  # at every operation: right twins are within 1.1 times what 8 make, of any weights that were tried
FEW = math.exp(5 / math.sqrt(4))  # what of it a whole model may be away: amplified rounding points in few directions
JUDGED = {"float64": 1e-6, "float32": 0.1, "bfloat16": 0.5, "float16": 0.5}  # a wider tolerance is no test of a formula
SWAMPED = 0.1  # relRMS up to which what follows in a whole model is about linear in the roundings ahead of it


def luck(entries: float) -> float:
    """Return the factor by which the ratio of two root-mean-squares over so many entries may be off by chance."""
    return math.exp(5 / math.sqrt(max(entries, 1)))


@dataclass(frozen=True)
class Error:
    """Norms over the entries of a tensor, or of several, that is compared with a reference.

    entries: how many.
    norm, largest, signed: of the error: the Euclidean norm, the largest size, the sum.
    own_norm, product: the norm of the tensor, and its inner product with the reference.
    reference_norm, reference_largest: of the reference.
    tolerance: the smallest t with which |a - b| <= t + t |b| holds for every entry, as numpy's assert_allclose takes it.
    directions: how many independent directions the error points in, where that was measured.

    Norms rather than sums of squares: the square of a gradient of 1e-170, or of an output of 1e170, is no float64.
    """

    entries: int = 0
    norm: float = 0.0
    largest: float = 0.0
    signed: float = 0.0
    own_norm: float = 0.0
    product: float = 0.0
    reference_norm: float = 0.0
    reference_largest: float = 0.0
    tolerance: float = 0.0
    directions: float = math.inf

    @classmethod
    def of(cls, a: Any, reference: Any) -> Self:
        """Compare two arrays; the error is infinite where shapes, NaN or infinities part."""
        a, reference = np.asarray(a, np.float64), np.asarray(reference, np.float64)
        if a.shape != reference.shape:
            return cls.infinite(reference.size)
        finite = np.isfinite(reference)
        if not finite.all():
            if not np.array_equal(a[~finite], reference[~finite], equal_nan=True):
                return cls.infinite(reference.size)
            a, reference = a[finite], reference[finite]
        with np.errstate(over="ignore", invalid="ignore"):
            error, size = a - reference, np.abs(reference)
            if not np.isfinite(error).all():
                return cls.infinite(reference.size)
            sums = (_norm(error), np.abs(error).max(initial=0), error.sum(), _norm(a), np.vdot(a, reference))
            tolerance = (np.abs(error) / (1 + size)).max(initial=0)
            of_reference = (_norm(reference), size.max(initial=0))
        return cls(finite.size, *map(float, (*sums, *of_reference, tolerance)))

    @classmethod
    def infinite(cls, entries: int = 1) -> Self:
        """What cannot be compared."""
        return cls(entries, math.inf, math.inf, math.inf, tolerance=math.inf)

    def joined(self, other: "Error") -> "Error":
        """The error of both tensors as one."""
        return Error(
            self.entries + other.entries,
            math.hypot(self.norm, other.norm),
            max(self.largest, other.largest),
            self.signed + other.signed,
            math.hypot(self.own_norm, other.own_norm),
            self.product + other.product,
            math.hypot(self.reference_norm, other.reference_norm),
            max(self.reference_largest, other.reference_largest),
            max(self.tolerance, other.tolerance),
        )

    def cosine_with(self, other: "Error", between: "Error") -> float:
        """The cosine between this error and another from the same reference; `between`: the one from the other."""
        a, b, c = self.norm, other.norm, between.norm
        if not (a > 0 and b > 0 and math.hypot(a, b, c) < math.inf):
            return 0.0
        return max(-1.0, min(1.0, (a / b + b / a - c / a * (c / b)) / 2))

    def size(self, scale: float = 0.0) -> float:
        """The norm of the reference, whose root-mean-square counts as at least `scale`."""
        return max(self.reference_norm, scale * math.sqrt(self.entries))

    def relative_rms(self, scale: float = 0.0) -> float:
        """relRMS, against a root-mean-square of at least `scale`."""
        return _ratio(self.norm, self.size(scale))

    def relative_max(self, scale: float = 0.0) -> float:
        """The largest error over the largest entry, which counts as at least `scale`."""
        return _ratio(self.largest, max(self.reference_largest, scale))

    def bias(self, scale: float = 0.0) -> float:
        """The mean error with its sign, over the root-mean-square of the reference: what does not average out."""
        entries = max(self.entries, 1)
        reference = max(self.reference_norm / math.sqrt(entries), scale)
        return math.copysign(_ratio(abs(self.signed) / entries, reference), self.signed)

    @property
    def cosine(self) -> float:
        """The cosine between the tensor and the reference; 1 where both are zero, 0 where nothing can be said."""
        size = self.own_norm * self.reference_norm
        if not math.isfinite(self.norm) or not math.isfinite(size) or not math.isfinite(self.product):
            return 0.0
        return min(1.0, self.product / size) if size else float(not self.norm)

    def explained(self, rounding: "Error | None", factor: float) -> bool:
        """Whether the error is at most `factor` times what rounding makes, or what float64's underflow leaves."""
        if self.largest <= ROUNDINGS * LEAST["float64"]:
            return True
        return rounding is not None and math.isfinite(self.norm) and self.norm <= factor * rounding.norm


@dataclass(frozen=True)
class Budget:
    """What gates G1 and G2 allow two sides that are compared with the same reference.

    dtype: what both computed in.
    worst: the function's own worst difference in float64, which says how it amplifies rounding, where none is measured.
    rounding: what it makes of `ROUNDINGS` roundings of the type at every operation, where that has been measured.
    """

    dtype: str = "float32"
    worst: float = 0.0
    rounding: Error | None = None

    @property
    def bar(self) -> float:
        """How far from the reference a function that does not amplify rounding may be."""
        return PRECISION if self.dtype == "float32" else TIMES * UNIT[self.dtype]

    @property
    def ceiling(self) -> float:
        """How far from the reference this function may be."""
        measured = FEW * self.rounding.relative_rms() if self.rounding else 0.0
        return max(self.bar * max(1.0, COARSER * min(FUNCTION, self.worst) / PRECISION), measured)

    def amplifies(self, scale: float = 0.0) -> bool:
        """Whether rounding explains more than the bar allows."""
        return self.rounding is not None and self.rounding.norm > self.bar * self.rounding.size(scale)

    def near_enough(self, a: Error, b: Error, *, scale: float = 0.0, entries: int | None = None) -> bool:
        """Whether both sides are as near to the reference as the type, and the function, allow."""
        factor, ceiling = luck(a.entries if entries is None else entries), replace(self, rounding=None).ceiling
        far = max(a, b, key=lambda error: error.norm)
        if far.norm <= factor * ceiling * far.size(scale):
            return math.isfinite(far.norm)
        return self.amplifies(scale) and far.explained(self.rounding, FEW)

    def equally_near(self, a: Error, b: Error, *, scale: float = 0.0, entries: int | None = None) -> bool:
        """Whether neither side is much farther from the reference than the other."""
        few = self.rounding.directions if self.rounding is not None else math.inf
        factor = luck(min(a.entries if entries is None else entries, few))
        near, far = sorted((a.norm, b.norm))
        low, high = sorted((a.largest, b.largest))
        size_max = max(a.reference_largest, scale)
        slack, slack_max = SLACK * self.bar * a.size(scale), SLACK * self.bar * size_max
        if self.rounding is not None and self.amplifies(scale):
            slack, slack_max = self.rounding.norm, self.rounding.largest  # which may hit one side alone, as underflow does
        elif self.rounding is not None and self.rounding.largest > self.bar * size_max:
            slack_max = self.rounding.largest  # all of it in few entries, as where two scores of a softmax are nearly equal
        return far <= RATIO * factor * near + slack and high <= RATIO_MAX * factor * low + slack_max

    def holds(self, a: Error, b: Error, *, scale: float = 0.0, entries: int | None = None) -> bool:
        """Whether both sides are near enough, and equally near.

        scale: the least root-mean-square that counts; see `Error.relative_rms`.
        entries: how many of the entries are independent, where that is not all of them.
        """
        return all(test(a, b, scale=scale, entries=entries) for test in (self.near_enough, self.equally_near))

    def __str__(self) -> str:
        ceiling = replace(self, rounding=None).ceiling
        why = "" if ceiling == self.bar else f", since in float64 it amplifies rounding to {self.worst:.0e}"
        return (
            f"in {self.dtype} within {ceiling:.0e} of float64{why}; one side within {RATIO:.0f} times the other's "
            f"distance, or {RATIO_MAX:.0f} times for the largest entry, and {SLACK * self.bar:.0e} more; the first three "
            "widened by exp(5 / sqrt(n)) for n entries"
        )


def _norm(x: Array) -> float:
    """The Euclidean norm, also where squares overflow or underflow."""
    squares = float(np.vdot(x, x))
    if 1e-280 < squares < 1e280:
        return math.sqrt(squares)
    largest = float(np.abs(x).max(initial=0.0))
    if not 0.0 < largest < math.inf:
        return largest
    scaled = np.ldexp(x, -math.frexp(largest)[1])
    return float(np.ldexp(math.sqrt(float(np.vdot(scaled, scaled))), math.frexp(largest)[1]))  # infinite where it is


def _ratio(error: float, reference: float) -> float:
    if not error:
        return 0.0
    if error == math.inf:  # also of an infinite reference, from which nothing can be told
        return math.inf
    return error / reference if reference else math.inf
