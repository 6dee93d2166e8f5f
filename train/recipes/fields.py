"""The fields of a recipe in messages: their flags and values as a user types them, and the error about an invalid value."""

from typing import Any

from vit_spec import InputError


class FieldError(InputError):
    """A field of a recipe has an invalid value.  The message names the field; the command line names its flag instead.

    field: its dotted name.
    problem: the rest of the message, with the space or the colon before it.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}{problem}")
        self.field, self.problem = field, problem

    def of_flag(self) -> InputError:
        """Return the error that names the flag of the field."""
        return InputError(f"{flag_name(self.field)}{self.problem}")


def flag_name(field: str) -> str:
    """Return the flag of a field as typed: --optimizer.weight-decay."""
    return "--" + field.replace("_", "-")


def format_value(value: Any) -> str:
    """Return the value of a field as typed: 31 instead of 31.0, and "3 4" instead of (3, 4)."""
    if isinstance(value, list | tuple):
        return " ".join(map(format_value, value))
    return f"{value:.15g}" if isinstance(value, float) else str(value)
