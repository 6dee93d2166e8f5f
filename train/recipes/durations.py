"""Durations as a user writes them: "90 epochs", "2000steps", "1e6 examples", "10%"."""

import re

from vit_spec import InputError, nearest

UNITS = {"step": "steps", "epoch": "epochs", "example": "examples", "percent": "percent", "%": "percent"}


def duration_in_steps(
    text: float | str, *, default_unit: str, batch_size: int, images: int, total: float = float("nan")
) -> float:
    """Return a duration in steps, not rounded.

    text: a number with a unit: steps, epochs, examples (training images) or percent of the run; singular or plural, with or
        without a space.
    default_unit: the unit of a number alone: "steps", "epochs", "examples", or "share" (of the run).
    images: the number of images in an epoch.
    total: the number of steps of the whole run, for percentages and shares.

    Raises:
        InputError: not a number, a negative number, an unknown unit, or a percentage without a total.
    """
    value, unit = parse_duration(text, default_unit=default_unit)
    if unit == "share" and total != total:
        raise InputError(
            f"{text!r} is a share of the run, but this sets the length of the run: give epochs, steps or examples"
        )
    return value * {"steps": 1.0, "epochs": images / batch_size, "examples": 1 / batch_size, "share": total}[unit]


def parse_duration(text: float | str, *, default_unit: str) -> tuple[float, str]:
    """Return the number and the unit ("steps", "epochs", "examples", "share") of a duration.

    Raises:
        InputError: as `duration_in_steps`, except for percentages.
    """
    match = re.fullmatch(r"([+-]?[\d._]+(?:e[+-]?\d+)?)\s*([a-z%]*)", str(text).strip().lower())
    try:
        value, word = float(match[1]), match[2]  # type: ignore[index]
    except (TypeError, ValueError):
        raise InputError(
            f"{text!r} is not a duration: write, for example, 90epochs, 2000steps, 1e6examples or 10%"
        ) from None
    unit = UNITS.get(word if word == "percent" else word.removesuffix("s")) if word else default_unit
    if unit is None:
        raise InputError(f"{text!r} has an unknown unit{nearest(word, UNITS.values())}: steps, epochs, examples or %")
    if not 0 <= value < float("inf"):
        given = f"{text:g}" if isinstance(text, float) else repr(text)
        raise InputError(f"{given} is not a duration: give 0 or more")
    return (value / 100, "share") if unit == "percent" else (value, unit)
