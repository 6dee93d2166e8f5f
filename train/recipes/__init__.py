"""Recipes: everything that decides what a run learns, and named ones that work.

A recipe is a function from what is known of the data to a `Recipe`; its docstring gives command, hardware, time and the
number to expect, with its source.  What nobody has measured is said: a time that is "planned" is what `--plan` reckons for
devices that reach 40 % of their peak in bfloat16, `--plan 8x80GiB@989TFLOPs,450GB/s` for 8 H100.  Every field can be
changed on the command line: `--epochs 3 --optimizer.lr 1e-3 --model.changes depth=4`.
"""

from collections.abc import Callable

from train.recipes import articles, plain, published, small
from train.recipes.augmentation import Augment
from train.recipes.published import FROM_WEIGHTS
from train.recipes.recipe import Known, Model, Optimizer, Recipe, Task, changes, fields, model_config

__all__ = ["FROM_WEIGHTS", "IMAGENET", "RECIPES", "Augment", "Known", "Model", "Optimizer", "Recipe", "Task"]
__all__ += ["changes", "fields", "model_config"]

IMAGENET = plain.IMAGENET

RECIPES: dict[str, Callable[[Known], Recipe]] = {
    function.__name__: function for module in (plain, published, articles, small) for function in module.RECIPES
}
