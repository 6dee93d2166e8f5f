"""How long something takes, as a person says it: "90 epochs", "2000steps", "1e6 examples", "10%"."""

import re

from vit_spec import InputError, nearest

UNITS = {"step": "steps", "epoch": "epochs", "example": "examples", "percent": "percent", "%": "percent"}


def steps(text: float | str, *, alone: str, batch_size: int, images: int, total: float = float("nan")) -> float:
    """Return a duration in steps, not rounded.

    text: a number with a unit: steps, epochs, examples (images shown) or percent of the run; singular or plural, with or
        without a space.  A number alone is counted in `alone`: one of these, or "share", of the run.
    images: how many make an epoch.
    total: the steps of the whole run, which percents and shares are of.

    Raises:
        InputError: no number, a negative one, an unknown unit, or a percentage of a run whose length is not known yet.
    """
    value, unit = parse(text, alone=alone)
    if unit == "share" and total != total:
        raise InputError(f"{text!r} is a share of what it is to say: give epochs, steps or examples")
    return value * {"steps": 1.0, "epochs": images / batch_size, "examples": 1 / batch_size, "share": total}[unit]


def parse(text: float | str, *, alone: str) -> tuple[float, str]:
    """Return the number and the unit ("steps", "epochs", "examples", "share") of a duration.

    Raises:
        InputError: as `steps`, but for percentages.
    """
    found = re.fullmatch(r"([+-]?[\d._]+(?:e[+-]?\d+)?)\s*([a-z%]*)", str(text).strip().lower())
    try:
        value, word = float(found[1]), found[2]  # type: ignore[index]
    except (TypeError, ValueError):
        raise InputError(f"{text!r} is no duration: write such as 90epochs, 2000steps, 1e6examples or 10%") from None
    unit = UNITS.get(word if word == "percent" else word.removesuffix("s")) if word else alone
    if unit is None:
        raise InputError(f"{text!r} has an unknown unit{nearest(word, UNITS.values())}: steps, epochs, examples or %")
    if not 0 <= value < float("inf"):
        raise InputError(f"{text!r} is no duration: give 0 or more")
    return (value / 100, "share") if unit == "percent" else (value, unit)
