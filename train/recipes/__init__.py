"""Recipes: everything that decides what a run learns, and named ones that work.

A recipe is a function from what is known of the data to a `Recipe`; its docstring gives command, hardware, time and the
number to expect.  Every field can be changed on the command line: `--epochs 3 --optimizer.lr 1e-3 --model.changes depth=4`.
"""

from collections.abc import Callable

from train.augment.options import Augment
from train.recipes import articles, plain, published, small
from train.recipes.recipe import Known, Model, Optimizer, Recipe, Task, changes, fields, model_config

__all__ = ["IMAGENET", "RECIPES", "Augment", "Known", "Model", "Optimizer", "Recipe", "Task"]
__all__ += ["changes", "fields", "model_config"]

IMAGENET = plain.IMAGENET

RECIPES: dict[str, Callable[[Known], Recipe]] = {
    function.__name__: function for module in (plain, published, articles, small) for function in module.RECIPES
}
