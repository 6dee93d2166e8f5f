"""The settings of a run: its recipe, its model and its lineage, as config.json and each checkpoint have them."""

from itertools import takewhile
from typing import Any

from train.loop.lineage import CHANGEABLE, TRAINER, Lineage, flatten
from train.loop.saved_run import ADDED
from train.recipes.fields import describe_difference

# Fields of config.json that may differ when a run resumes, or that are compared otherwise.
NOT_COMPARED = {"name", "id", "lineage", TRAINER, *(f"recipe.{name}" for name in CHANGEABLE)}
_MISSING = "not there"  # in place of the value of a field that config.json lacks

Settings = dict[str, Any]


def changes_since(settings: Settings, step: int, saved: Settings) -> Lineage:
    """Return the changes of the recipe of a run since a checkpoint was saved.

    settings: of the run.
    step, saved: step of the checkpoint, and the settings in it; {} in one of an older version.
    """
    lineage = settings["lineage"]
    pairs = zip(lineage, saved.get("lineage", []), strict=False)
    known = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return [each for each in lineage[known:] if each["step"] >= step]


def describe_other_settings(settings: Settings, step: int, saved: Settings) -> str:
    """Return how the settings of a checkpoint differ from those that the run had at its step; "" if not at all.

    The changes of `--resume` from this step on are left out.

    settings, step, saved: see `changes_since`.  Checkpoints of older versions do not differ.
    """
    if not saved:
        return ""
    later = changes_since(settings, step, saved)
    mine, theirs = (ADDED | flatten(each) for each in (settings, saved))
    for name, (was, now) in (pair for each in reversed(later) for pair in each["changes"].items()):
        if mine.get(f"recipe.{name}") == now:  # else config.json was edited after the change
            mine[f"recipe.{name}"] = was
    mine["lineage"] = settings["lineage"][: len(settings["lineage"]) - len(later)]
    names = differing(theirs, mine, NOT_COMPARED - {"lineage"})
    return describe_differences(names, theirs, mine) if names else ""


def differing(theirs: dict[str, Any], mine: dict[str, Any], ignored: set[str]) -> list[str]:
    """Return the names of the values that differ, except those to ignore."""
    names = [name for name in (*mine, *sorted(theirs.keys() - mine.keys())) if name not in ignored]
    return [name for name in names if mine.get(name, _MISSING) != theirs.get(name, _MISSING)]


def describe_differences(names: list[str], theirs: dict[str, Any], mine: dict[str, Any]) -> str:
    """Return words about values that differ: the first of them, and the names of the others."""
    name, *others = names
    more = f", and {', '.join(others[:5])}{', ...' * (len(others) > 5)} differ too" if others else ""
    return describe_difference(name, *(each.get(name, _MISSING) for each in (theirs, mine))) + more
