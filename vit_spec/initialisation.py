"""Initial distributions of parameters, described as data: each twin samples them with its own random number generator."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from vit_spec.errors import InputError, nearest
from vit_spec.typed_fields import MAX_FLOAT

# Standard deviation of a standard normal distribution truncated at +-2:
# var = 1 - 2 * 2 * phi(2) / (Phi(2) - Phi(-2)).
TRUNCATED_STD = math.sqrt(1 - 4 * math.exp(-2) / math.sqrt(2 * math.pi) / math.erf(math.sqrt(2)))

_ARGUMENTS = {"zeros": 0, "ones": 0, "constant": 1, "normal": 1, "trunc_normal": 1, "uniform": 2}


@dataclass(frozen=True)
class Law:
    """The initial distribution of a parameter, whose entries are independent except in "rotary".

    A "trunc_normal" is a normal distribution truncated at two of its standard deviations.  Its `std` is the standard
    deviation after truncation, which the samples have.  Frameworks differ in both conventions.

    Attributes:
        kind: "constant" (value), "normal" (std), "trunc_normal" (std), "uniform" (low, high) or "rotary" (base), the
            frequencies of `positions.rotary_frequencies` with a random angle of each head.
        arguments: the numbers in parentheses.
    """

    kind: str
    arguments: tuple[float, ...]

    @classmethod
    def parse(cls, text: str, field: str, alternatives: Sequence[str] = ()) -> Self:
        """Parse a distribution such as "trunc_normal(0.02)"; "zeros" and "ones" take no argument.

        Args:
            text: the distribution.
            field: the config field that has this text, for error messages.
            alternatives: other texts that the field accepts, for error messages.

        Raises:
            InputError: the text is not a distribution, or its samples overflow float32.
        """
        match = re.fullmatch(r"(\w+)(?:\((.*)\))?", text)
        name = match[1] if match else text
        try:
            arguments = tuple(float(x) for x in match[2].split(",")) if match and match[2] else ()
        except ValueError:
            arguments = (math.nan,)
        if name not in _ARGUMENTS or len(arguments) != _ARGUMENTS[name] or not all(map(math.isfinite, arguments)):
            examples = "zeros, ones, constant(0.1), normal(0.02), trunc_normal(0.02), uniform(0, 1)"
            near = "" if name in _ARGUMENTS else nearest(name, [*_ARGUMENTS, *alternatives])
            raise InputError(f"{field} is {text!r}: give one of {', '.join([examples, *alternatives])}{near}")
        is_degenerate = arguments[0] >= arguments[1] if name == "uniform" else "normal" in name and arguments[0] <= 0
        if is_degenerate:
            raise InputError(f"{field} is {text!r}: give a positive standard deviation, or bounds with low < high")
        # Samples of a normal distribution stay within ten standard deviations; bounds are subtracted from each other.
        largest = MAX_FLOAT / (10 if "normal" in name else 2 if name == "uniform" else 1)
        if any(abs(argument) > largest for argument in arguments):
            raise InputError(f"{field} is {text!r}: its samples overflow float32; give numbers of at most {largest:.1e}")
        if name in ("zeros", "ones"):
            return cls("constant", (float(name == "ones"),))
        return cls(name, arguments)

    @property
    def mean(self) -> float:
        """Mean of an entry."""
        return {"constant": self.arguments[0], "uniform": sum(self.arguments) / 2}.get(self.kind, 0.0)

    @property
    def std(self) -> float:
        """Standard deviation of an entry; not for "rotary", whose entries differ in it."""
        if self.kind == "uniform":
            low, high = self.arguments
            return (high - low) / math.sqrt(12)
        return 0.0 if self.kind == "constant" else self.arguments[0]


ZEROS = Law("constant", (0.0,))
ONES = Law("constant", (1.0,))


def lecun_normal(fan_in: int) -> Law:
    """Return the truncated normal of variance 1 / fan_in (LeCun et al., Efficient BackProp, 1998, as in flax)."""
    return Law("trunc_normal", (fan_in**-0.5,))


def xavier_uniform(fan_in: int, fan_out: int) -> Law:
    """Return the uniform distribution of variance 2 / (fan_in + fan_out) (Glorot and Bengio, 2010)."""
    bound = math.sqrt(6 / (fan_in + fan_out))
    return Law("uniform", (-bound, bound))
