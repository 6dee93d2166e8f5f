"""The run that a command line asks for: a recipe and its data."""

from typing import TYPE_CHECKING, NamedTuple

from train.recipes import Recipe

if TYPE_CHECKING:
    from train.data.sources import Dataset  # loads Pillow, which --help and --list do not need


class Request(NamedTuple):
    """A run that a command line asks for.

    name: name of the recipe.
    recipe: with the fields that the command line changes.
    source: the data set.
    command: the command line as typed, without --run, to print how to resume.
    dry_run: whether to run one step only and save nothing.
    may_change: whether fields of the recipe may differ from those of the run that resumes (`--resume`).
    note: a line about the choice of the recipe for the table at the start; "" for none.
    """

    name: str
    recipe: Recipe
    source: "Dataset"
    command: str
    dry_run: bool = False
    may_change: bool = False
    note: str = ""
