"""Tolerances of every comparison of two models, each with its derivation.

**Measure.** Two tensors are compared norm-wise, tensor by tensor: relRMS = ||a - b|| / ||reference||, with Euclidean
norms.  An entry-wise relative error means nothing where an entry crosses zero.

**G0, the same function** (float64 on CPU).  Two correct implementations differ by rounding errors alone, which measure
a few 1e-15 for a ViT of any depth.  The tolerance is `FLOAT64_TOLERANCE` = 1e-12, about 500 times that.  A wrong
formula is far outside of it: a LayerNorm eps of 1e-5 instead of 1e-6 makes a difference seven orders of magnitude larger
than the tolerance.  Weights after many optimizer steps may differ by `FLOAT64_TRAINING_TOLERANCE` = 1e-10: each step of
Adam divides by the root of a running mean of squared gradients, which amplifies the rounding errors of earlier steps where
gradients are small.

**G1, the same precision** (float32).  Neither twin is exact, so each is compared with the float64 result.

- Both errors are at most `FLOAT32_TOLERANCE` = 5e-6.  Measured errors of deep ViTs are 20 to 30 unit roundoffs of 6e-8,
  up to 1.8e-6, and the tolerance is about three times that.  A function with a larger condition number has larger
  errors, which are measured for the two twins (see below).  `assert_parity` does not measure them, and estimates them
  from float64, where G0 has shown that the formulas are right: the float32 tolerance is the largest error in float64,
  times the ratio of the two unit roundoffs, 2^29, where that is more than 5e-6.  G0 bounds it, so it is never more than
  1e-12 times 2^29 = 5.4e-4.  The tests of batch invariance use the larger of the estimate and the measured errors.
- The larger of the two errors is at most `RMS_ERROR_RATIO` = 2 times the smaller, and `MAX_ERROR_RATIO` = 4 times for
  the largest error of an entry, plus a tenth of the tolerance (`ERROR_RATIO_SLACK`), since a difference of a few unit
  roundoffs says nothing about either twin.

**Few entries.** A root-mean-square over few entries varies by chance.  The mean of n squared independent normal errors
has the relative standard deviation sqrt(2 / n), so the logarithm of its root has 1 / sqrt(2 n), and the logarithm of
the ratio of two such roots has 1 / sqrt(n).  Both tests of G1 compare such a ratio: the relRMS, and the ratio of two
errors.  So both are widened by five standard deviations, the factor `five_sigma_factor(n)` = exp(5/sqrt(n)).  It is 1.05
for ten thousand entries, 5 for ten and 34 for two: both outputs of a model with one output, for two images, may happen to
be nearly zero.  For ten entries the factor of 2 becomes 10, as in PyTorch's own comparison of compiled with eager models
(torch/_dynamo/utils.py, `same`).

**Amplified rounding errors.** The tolerances above hold for functions that amplify rounding errors no more than models
with ordinary weights.  Where a tensor is outside of them, `parity.comparison.amplification` measures the condition of this
function at these weights: it perturbs every operand of every operation by up to `PERTURBATION_ROUNDOFFS` = 16 unit
roundoffs, and takes the largest change of each tensor in float64.  The tolerance of the whole model is that change, times
`AMPLIFIED_ERROR_FACTOR` = 12.  Amplified rounding errors point in few directions, so the factor is that of four
entries, exp(5/sqrt(4)).

The number of directions is also measured.  Two random vectors in n dimensions have a cosine whose mean square is 1 / n,
so n is one over the mean square of the cosine between the changes of two perturbed passes.  Where n is less than the
number of entries, it takes their place in exp(5/sqrt(n)).  An example is a softmax over hundreds of rows of which one
has two nearly equal scores: nearly all of the rounding error is in that row.

Such a tolerance may be wide enough to hide a wrong formula.  So it is accepted only if, in addition, every part of the
model is correct in isolation.  Each part is given the reference's input, and its output must be within the tolerances
above, or within the measured rounding errors of that part alone.  One part amplifies little, even where a whole model
amplifies much.

`assert_parity` has no reference of the parts of other models.  Where tensors differ by more than 1e-12 in float64, but by
no more than `MAX_UNDIVIDED_TOLERANCE` = 1e-9, it perturbs every weight and input of the PyTorch module by up to 16 unit
roundoffs, and 12 times the change of a tensor is its tolerance, at most 1e-9.  The change is the largest of up to 8
perturbations, as many as explain all differences: one may happen to change a tensor of one entry little.  Batch norm over a
few entries in each of 50 layers needs it.  A fault that is smaller than this tolerance passes, as a constant that is
rounded to 8 digits may; one that is rounded to float32 changes results by about 6e-8, and is found.

**Long sums.** A sum of n terms in float32 has an error of up to about c sqrt(n) unit roundoffs of the sum of the
magnitudes, with probability 1 - 2 exp(-c^2/2) if rounding errors are independent (Higham and Mary, A New Approach to
Probabilistic Rounding Error Analysis, 2019, theorem 2.4).  If the terms are added in pairs, the error is a few roundoffs.
Libraries choose the order for speed.  Of two right models that sum over all pixels of a batch, one may have ten times the
error of the other.  So where two models fail G1, `assert_parity` runs each with every operation computed in float64 and
its results rounded to float32, which leaves the errors of the formulas.  These decide, if the actual errors are at most
`long_sum_error(n)` for the longest sum: c is 5, and the error is at most a quarter of the unit roundoff of TF32, so that
products in a lower precision do not pass for long sums.

**Tensors that cannot be judged.** The report names these, and they count as neither right nor wrong:

- a tensor whose measured rounding errors are more than `MAX_TOLERANCE`: such a wide tolerance would hide wrong formulas;
- a tensor with numbers that the type cannot represent, or whose powers in a norm it cannot represent
  (`OVERFLOW_THRESHOLD`, `NORM_POWERS`);
- in a whole model, a tensor that is computed from one whose relative rounding error is more than `MAX_LINEAR_ERROR` =
  0.1.  A function does not respond linearly to such a large error.  An example is the gradient of a norm, which grows if
  the deviation of the input of the norm happens to shrink.  The next pass may then have an error a hundred times larger
  than the passes that were measured.

**G2, half precision and TF32.** As G1, with weights and images rounded to the type first, because that rounding is no
error of either twin.  Sums are kept in float32 and only the operands and results of operations are rounded to the type,
so errors are a few unit roundoffs of it, and the tolerance is `TOLERANCE_IN_ROUNDOFFS` = 5 of them: 2e-2 for bfloat16,
2.5e-3 for float16 and TF32.

**G3, training in float32.** The weights of the two frameworks may differ by `TRAINING_NOISE_FACTOR` = 3 times the
difference between two runs of one framework, if in one of them each weight is moved by one unit in the last place, at the
start and after each step.  Adam's first steps are the signs of gradients, and the sign of a gradient that is nearly zero
is decided by rounding errors.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from parity.checkpoints.layout import Array

FLOAT64_TOLERANCE = 1e-12  # G0: relRMS of every tensor in float64
FLOAT64_TRAINING_TOLERANCE = 1e-10  # G0: relRMS of what many optimizer steps change in the weights
FLOAT32_TOLERANCE = 5e-6  # G1: relRMS from the float64 result
FLOAT32_OVER_FLOAT64_ROUNDOFF = 2**29  # the unit roundoff of float32 over that of float64
RMS_ERROR_RATIO, MAX_ERROR_RATIO = 2.0, 4.0  # G1: larger error over smaller, as root-mean-square and as largest entry
ERROR_RATIO_SLACK = 1 / 10  # G1: part of the tolerance by which errors may differ whatever their ratio
TRAINING_NOISE_FACTOR = 3.0  # G3
UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "tf32": 2.0**-11, "float16": 2.0**-11, "bfloat16": 2.0**-8}
TOLERANCE_IN_ROUNDOFFS = 5  # G2: tolerance of a low-precision type, in its unit roundoffs
# Largest absolute error of a result that underflows.  XLA on CPU makes subnormal numbers zero, so the error is up to the
# smallest normal number; float16 keeps subnormal numbers, so its error is up to half of the smallest subnormal number.
UNDERFLOW_ERROR = {"float64": 2.0**-1022, "float32": 2.0**-126, "bfloat16": 2.0**-126, "float16": 2.0**-25}
# Largest number that counts as representable in a type: 2 to 16 times less than its maximum.
OVERFLOW_THRESHOLD = {"float64": 2.0**1020, "float32": 2.0**126, "bfloat16": 2.0**126, "float16": 2.0**15}
# The powers of its input that a norm computes, in the forward and in the backward pass.  Norms run in at least float32,
# which holds the cube of every float16 number.
NORM_POWERS = {"float64": (2, 3), "float32": (2, 3), "bfloat16": (2, 3), "float16": (1, 1)}
PERTURBATION_ROUNDOFFS = 16  # for all tested weights, correct twins differ by at most 1.1 times the effect of 8 roundoffs
AMPLIFIED_ERROR_FACTOR = math.exp(5 / math.sqrt(4))  # tolerance of a whole model, over its measured rounding errors
MAX_TOLERANCE = {"float64": 1e-6, "float32": 0.1, "bfloat16": 0.5, "float16": 0.5}  # a wider one would hide wrong formulas
MAX_UNDIVIDED_TOLERANCE = 1e-9  # G0: tolerance of a function whose operations are not tested one by one
MAX_LINEAR_ERROR = 0.1  # relRMS up to which later operations respond about linearly to rounding errors


def five_sigma_factor(entries: float) -> float:
    """Return exp(5 / sqrt(entries)), five standard deviations of the ratio of two root-mean-squares.

    entries: number of independent entries in each root-mean-square; less than 1 counts as 1.
    """
    return math.exp(5 / math.sqrt(max(entries, 1)))


def amplified_float64_tolerance(rounding: float) -> float:
    """Return the tolerance of G0 for a tensor which 16 unit roundoffs of weights and inputs change by a relRMS."""
    return max(FLOAT64_TOLERANCE, min(AMPLIFIED_ERROR_FACTOR * rounding, MAX_UNDIVIDED_TOLERANCE))


def long_sum_error(terms: int) -> float:
    """Return the largest relRMS in float32 that the order in which n terms are added explains.

    terms: n, the number of terms of the longest sum.
    """
    return min(5 * math.sqrt(terms) * UNIT_ROUNDOFF["float32"], UNIT_ROUNDOFF["tf32"] / 4)


@dataclass(frozen=True)
class ErrorNorms:
    """Norms of the difference between a tensor, or several, and a reference.

    entries: number of entries.
    norm, largest, signed_sum: Euclidean norm, largest magnitude and sum of the error.
    tensor_norm, inner_product: norm of the tensor, and its inner product with the reference.
    reference_norm, reference_largest: Euclidean norm and largest magnitude of the reference.
    allclose_tolerance: the smallest t with |a - b| <= t + t |b| for every entry: with rtol = atol = t, numpy's
        `assert_allclose` passes.
    directions: number of independent directions that the error points in, where that was measured.

    The fields are norms and not sums of squares, because the square of a gradient of 1e-170 or of an output of 1e170 is
    outside of the range of float64.
    """

    entries: int = 0
    norm: float = 0.0
    largest: float = 0.0
    signed_sum: float = 0.0
    tensor_norm: float = 0.0
    inner_product: float = 0.0
    reference_norm: float = 0.0
    reference_largest: float = 0.0
    allclose_tolerance: float = 0.0
    directions: float = math.inf

    @classmethod
    def of(cls, a: Any, reference: Any) -> Self:
        """Compare an array with a reference.

        The error is infinite if the shapes differ, or if NaN or infinities are at different entries.
        """
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
        """Return the infinite error of a tensor that cannot be compared."""
        return cls(entries, math.inf, math.inf, math.inf, allclose_tolerance=math.inf)

    def combined_with(self, other: "ErrorNorms") -> "ErrorNorms":
        """Return the error of both tensors taken as one."""
        return ErrorNorms(
            self.entries + other.entries,
            math.hypot(self.norm, other.norm),
            max(self.largest, other.largest),
            self.signed_sum + other.signed_sum,
            math.hypot(self.tensor_norm, other.tensor_norm),
            self.inner_product + other.inner_product,
            math.hypot(self.reference_norm, other.reference_norm),
            max(self.reference_largest, other.reference_largest),
            max(self.allclose_tolerance, other.allclose_tolerance),
        )

    def cosine_with(self, other: "ErrorNorms", between: "ErrorNorms") -> float:
        """Return the cosine between this error and another of the same reference, by the law of cosines.

        between: the difference of the two tensors themselves.
        """
        a, b, c = self.norm, other.norm, between.norm
        if not (a > 0 and b > 0 and math.hypot(a, b, c) < math.inf):
            return 0.0
        return max(-1.0, min(1.0, (a / b + b / a - c / a * (c / b)) / 2))

    def reference_size(self, scale: float = 0.0) -> float:
        """Return the norm of the reference, with its root-mean-square taken as at least `scale`."""
        return max(self.reference_norm, scale * math.sqrt(self.entries))

    def relative_rms(self, scale: float = 0.0) -> float:
        """Return relRMS, with the root-mean-square of the reference taken as at least `scale`."""
        return _ratio(self.norm, self.reference_size(scale))

    def relative_max(self, scale: float = 0.0) -> float:
        """Return the largest error over the largest entry of the reference, taken as at least `scale`."""
        return _ratio(self.largest, max(self.reference_largest, scale))

    def bias(self, scale: float = 0.0) -> float:
        """Return the mean signed error over the root-mean-square of the reference, taken as at least `scale`."""
        entries = max(self.entries, 1)
        reference = max(self.reference_norm / math.sqrt(entries), scale)
        return math.copysign(_ratio(abs(self.signed_sum) / entries, reference), self.signed_sum)

    @property
    def cosine(self) -> float:
        """Cosine between the tensor and the reference; 1 if both are zero, 0 if it cannot be computed."""
        size = self.tensor_norm * self.reference_norm
        if not math.isfinite(self.norm) or not math.isfinite(size) or not math.isfinite(self.inner_product):
            return 0.0
        return min(1.0, self.inner_product / size) if size else float(not self.norm)

    def is_explained_by(self, rounding: "ErrorNorms | None", factor: float) -> bool:
        """Return whether the error is at most `factor` times a measured rounding error, or is underflow of float64."""
        if self.largest <= PERTURBATION_ROUNDOFFS * UNDERFLOW_ERROR["float64"]:
            return True
        return rounding is not None and math.isfinite(self.norm) and self.norm <= factor * rounding.norm


@dataclass(frozen=True)
class ErrorBudget:
    """Tolerance of checks G1 and G2 for two tensors that are compared with the same reference.

    dtype: the type that both were computed in.
    float64_error: largest error of this function in float64, from which its amplification of rounding errors is estimated
        if it was not measured.
    rounding: change of the tensor by `PERTURBATION_ROUNDOFFS` unit roundoffs at every operation, if it was measured.
    """

    dtype: str = "float32"
    float64_error: float = 0.0
    rounding: ErrorNorms | None = None

    @property
    def base_tolerance(self) -> float:
        """Largest allowed relRMS for a function that does not amplify rounding errors."""
        return FLOAT32_TOLERANCE if self.dtype == "float32" else TOLERANCE_IN_ROUNDOFFS * UNIT_ROUNDOFF[self.dtype]

    @property
    def tolerance(self) -> float:
        """Largest allowed relRMS for this function."""
        measured = AMPLIFIED_ERROR_FACTOR * self.rounding.relative_rms() if self.rounding else 0.0
        return max(
            self.base_tolerance
            * max(1.0, FLOAT32_OVER_FLOAT64_ROUNDOFF * min(FLOAT64_TOLERANCE, self.float64_error) / FLOAT32_TOLERANCE),
            measured,
        )

    def is_amplified(self, scale: float = 0.0) -> bool:
        """Return whether the measured rounding errors are more than the base tolerance."""
        return self.rounding is not None and self.rounding.norm > self.base_tolerance * self.rounding.reference_size(scale)

    def are_within_tolerance(self, a: ErrorNorms, b: ErrorNorms, *, scale: float = 0.0, entries: int | None = None) -> bool:
        """Return whether both errors are within the tolerance of the type and of the function; see `accepts`."""
        factor, tolerance = (
            five_sigma_factor(a.entries if entries is None else entries),
            replace(self, rounding=None).tolerance,
        )
        far = max(a, b, key=lambda error: error.norm)
        if far.norm <= factor * tolerance * far.reference_size(scale):
            return math.isfinite(far.norm)
        return self.is_amplified(scale) and far.is_explained_by(self.rounding, AMPLIFIED_ERROR_FACTOR)

    def are_similar(self, a: ErrorNorms, b: ErrorNorms, *, scale: float = 0.0, entries: int | None = None) -> bool:
        """Return whether neither error is much larger than the other; see `accepts`."""
        few = self.rounding.directions if self.rounding is not None else math.inf
        factor = five_sigma_factor(min(a.entries if entries is None else entries, few))
        near, far = sorted((a.norm, b.norm))
        low, high = sorted((a.largest, b.largest))
        size_max = max(a.reference_largest, scale)
        slack, slack_max = (
            ERROR_RATIO_SLACK * self.base_tolerance * a.reference_size(scale),
            ERROR_RATIO_SLACK * self.base_tolerance * size_max,
        )
        if self.rounding is not None and self.is_amplified(scale):
            # One twin alone may have all of the measured error, for example if only one makes subnormal numbers zero.
            slack, slack_max = self.rounding.norm, self.rounding.largest
        elif self.rounding is not None and self.rounding.largest > self.base_tolerance * size_max:
            # Few entries may have all of the error, for example those of a softmax with two nearly equal scores.
            slack_max = self.rounding.largest
        return far <= RMS_ERROR_RATIO * factor * near + slack and high <= MAX_ERROR_RATIO * factor * low + slack_max

    def are_of_sums(self, a: ErrorNorms, b: ErrorNorms, *, terms: int, scale: float = 0.0) -> bool:
        """Return whether both errors may be those of sums of so many terms; `scale` is that of `accepts`."""
        limit = max(self.tolerance, long_sum_error(terms))
        return all(error.norm <= limit * error.reference_size(scale) < math.inf for error in (a, b))

    def accepts(self, a: ErrorNorms, b: ErrorNorms, *, scale: float = 0.0, entries: int | None = None) -> bool:
        """Return whether both errors are within the tolerance, and neither is much larger than the other.

        scale: smallest root-mean-square that the reference is taken to have; see `ErrorNorms.relative_rms`.
        entries: number of independent entries, if it is not the number of all entries.
        """
        return all(test(a, b, scale=scale, entries=entries) for test in (self.are_within_tolerance, self.are_similar))

    def __str__(self) -> str:
        tolerance = replace(self, rounding=None).tolerance
        why = "" if tolerance == self.base_tolerance else f", since its error in float64 is {self.float64_error:.0e}"
        return (
            f"in {self.dtype} relRMS {tolerance:.0e} from float64{why}; the larger error at most {RMS_ERROR_RATIO:.0f} "
            f"times the smaller, or {MAX_ERROR_RATIO:.0f} times for the largest entry, plus "
            f"{ERROR_RATIO_SLACK * self.base_tolerance:.0e}; the first three numbers times exp(5 / sqrt(n)) for n entries"
        )


def _norm(x: Array) -> float:
    """Return the Euclidean norm, also where squares overflow or underflow."""
    squares = float(np.vdot(x, x))
    if 1e-280 < squares < 1e280:
        return math.sqrt(squares)
    largest = float(np.abs(x).max(initial=0.0))
    if not 0.0 < largest < math.inf:
        return largest
    scaled = np.ldexp(x, -math.frexp(largest)[1])
    return float(np.ldexp(math.sqrt(float(np.vdot(scaled, scaled))), math.frexp(largest)[1]))  # infinite if it overflows


def _ratio(error: float, reference: float) -> float:
    if not error:
        return 0.0
    if error == math.inf:  # also if the reference is infinite
        return math.inf
    return error / reference if reference else math.inf
