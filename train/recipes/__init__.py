"""Recipes: the complete configuration of a training run, and named recipes that work.

A recipe is a function of `DataInfo` that returns a `Recipe`.  Its docstring gives the command, the hardware, the time and
the expected result, with its source, and says what nobody has measured.  A "planned" time is the estimate of `--plan` for
devices that reach 40 % of their peak in bfloat16: `--plan 8x80GiB@989TFLOPs,450GB/s` for 8 H100.  Every field can be
changed on the command line: `--epochs 3 --optimizer.lr 1e-3 --model.changes depth=4`.
"""

from collections.abc import Callable

from train.recipes import articles, plain, published, small
from train.recipes.augmentation import Augment
from train.recipes.published import REQUIRE_INIT
from train.recipes.recipe import (
    OPTIMIZERS,
    DataInfo,
    Model,
    Optimizer,
    Recipe,
    Task,
    config_overrides,
    flatten_fields,
    model_config,
    parse_recipe,
    recipe_to_json,
)

__all__ = ["IMAGENET", "OPTIMIZERS", "RECIPES", "REQUIRE_INIT", "Augment", "DataInfo", "Model", "Optimizer", "Recipe"]
__all__ += ["Task", "config_overrides", "flatten_fields", "model_config", "parse_recipe", "recipe_to_json"]

IMAGENET = plain.IMAGENET

RECIPES: dict[str, Callable[[DataInfo], Recipe]] = {
    function.__name__: function for module in (plain, published, articles, small) for function in module.RECIPES
}
