"""Tell a user about fields that a file does not state, or that the user replaced."""

from dataclasses import dataclass, field
from typing import Any

from parity.checkpoints.formats import Fields
from vit_spec.config import coerce_field


class AssumptionWarning(UserWarning):
    """A model was loaded whose config is not what its file states: fields were assumed, or overridden by the caller."""


@dataclass(frozen=True)
class Assumption:
    """A property that changes the function and that nothing in the file states.

    Attributes:
        field: a field of `ViTConfig`, e.g. "norms.eps"; or a property that has no field, e.g. "patch extraction".
        value: the assumed value of the field, e.g. 1e-6; or text, e.g. "without overlap".
        why: the reason for the value, e.g. "as in most models".
    """

    field: str
    value: Any
    why: str


@dataclass(frozen=True)
class Inferred:
    """Fields that follow from the tensors and from the fields known so far, which have precedence over them.

    Attributes:
        proven: the fields that the tensors show.
        assumed: the fields that they do not show.
    """

    proven: Fields = field(default_factory=dict)
    assumed: tuple[Assumption, ...] = ()

    @property
    def fields(self) -> dict[str, Any]:
        """All values, by field."""
        return {**self.proven, **{each.field: each.value for each in self.assumed}}


@dataclass(frozen=True)
class Override:
    """A config override that replaces another value, which the file states.

    Attributes:
        field: a field of `ViTConfig`, e.g. "norms.eps".
        value: the value that the user gave.
        stated: the value in the file.
    """

    field: str
    value: Any
    stated: Any

    def describe(self, option: str) -> str:
        """Return the override in one line; option: what gave it, e.g. "--set"."""
        return f"{self.field} is {self.value!r} by {option}; the file states {self.stated!r}"


def find_overridden(stated: Fields, given: Fields) -> tuple[Override, ...]:
    """Return the config overrides of the user that replace another value, which the file states.

    Args:
        stated: the fields that the file states, by dotted field name.
        given: config overrides of the user, by dotted field name.
    """
    values = {name: coerce_field(name, value) for name, value in given.items()}
    return tuple(Override(name, value, stated[name]) for name, value in values.items() if stated.get(name, value) != value)
