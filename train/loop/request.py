"""The run that a command line asks for."""

from typing import TYPE_CHECKING, NamedTuple

from train.recipes import Recipe

if TYPE_CHECKING:
    from train.data.sources import Source  # loads Pillow, which --help and --list do not need


class Request(NamedTuple):
    """The name of a recipe, the recipe as changed, its data, and the command itself.

    command: as it would be typed, without --run.
    dry: whether one step is all that is wanted.
    """

    name: str
    recipe: Recipe
    source: "Source"
    command: str
    dry: bool = False
