"""The probability that a wrong cause reproduces the expected outputs by chance.

Equal images, images that hardly differ and classes with equal weights give many outputs but little information, so the
number of outputs says little.  Instead, the effects of all known causes on the outputs show in how many independent
directions the outputs can move, and how far.  The effect of a wrong cause is assumed to be a random sample of a normal
distribution with these directions and sizes.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from parity.checkpoints.layout import Array
from parity.comparison.tolerances import FLOAT64_TOLERANCE

FEW_OUTPUTS = 8  # with so few independent outputs, no number is solved for and no layer is named as the likeliest
MAX_OUTPUTS = 1_000  # if there are more outputs, evenly spaced ones represent all of them
MAX_CHANCE = 1e-2  # largest accepted probability that any of the models that were run matches by chance


@dataclass(frozen=True)
class EffectDistribution:
    """The distribution of the effects of wrong causes on the outputs.

    deviations: (independent directions,), the root mean square of an effect along each principal direction, as a share of
        the size (2-norm) of the effect, the largest first.
    """

    deviations: Array = field(repr=False)

    @classmethod
    def of(cls, effects: Iterable[Array]) -> "EffectDistribution":
        """Return the distribution of these effects, each of which is scaled to size 1.

        effects: arrays of equal size, the outputs with one cause applied minus those of the unchanged model.
        """
        rows = [effect.ravel()[:: 1 + (effect.size - 1) // MAX_OUTPUTS] for effect in effects]
        sizes = [float(np.linalg.norm(row)) for row in rows]
        unit = [row / size for row, size in zip(rows, sizes, strict=True) if 0 < size < math.inf]
        if not unit:
            return cls(np.zeros(0))
        deviations = np.linalg.svd(np.stack(unit), compute_uv=False) / math.sqrt(len(unit))
        return cls(deviations[deviations > FLOAT64_TOLERANCE])  # smaller ones are rounding errors

    def independent_outputs(self, resolution: float) -> int:
        """Return the number of directions in which effects exceed `resolution`, a share of the size of an effect."""
        return int((self.deviations > resolution).sum())

    def chance(self, remaining: float, numbers: int = 0, models: int = 1) -> float:
        """Return an upper bound on the probability that one of several wrong causes leaves so small an error.

        A sample of a normal distribution is within some distance of a given point with at most this probability: the volume
        of the ball with this radius, times the largest density.  Each number of leading directions gives such a bound, and
        the smallest bound is used.

        Args:
            remaining: the error that remains, as a share of the error of the unchanged model.
            numbers: how many numbers were solved for; each of them removes the error along one direction.
            models: how many causes were tried.
        """
        deviations = self.deviations[numbers:]
        if remaining <= 0:
            return 0.0 if len(deviations) else 1.0
        count = np.arange(1, len(deviations) + 1)
        volumes = count / 2 * math.log(2) + np.array([math.lgamma(n / 2 + 1) for n in count])
        bounds = np.cumsum(math.log(remaining) - np.log(deviations)) - volumes
        return min(1.0, models * math.exp(min(0.0, float(bounds.min(initial=0.0)))))
