"""What a user is warned of at the start of a run: choices that spoil its result."""

import math

from train.data.sources import Source, typical_size
from train.loop.request import Request
from train.recipes import RECIPES, Known, Recipe, model_config
from train.recipes.plain import FEW
from vit_spec import ViTConfig

REDUCED = 4  # how many times smaller each side of an image becomes where that is said
LARGER = "vit_ti16"  # the recipe for larger images that is named then


def cautions(request: Request, config: ViTConfig) -> list[str]:
    """Return a line for each choice that spoils the result of a run, with what to do instead."""
    return [*_reduced(request, config), *_selected_by_test(request.source)]


def _selected_by_test(source: Source) -> list[str]:
    """What is to be known of a result on the images by which the best weights are selected."""
    if source.split != "test":
        return []
    instead = "--held-out 0.1 selects them by a tenth of the training images, and leaves the test split unseen"
    return [f"the best weights are selected by the test split, so their result on it is too good; {instead}"]


def _reduced(request: Request, config: ViTConfig) -> list[str]:
    """What is lost of images that are resized to less than a quarter of their sides, and what loses less."""
    name, recipe, source = request[:3]
    size = typical_size(source.train)  # of several images: the first may be an exception
    if size is None:
        return []
    factor = min(have / wanted for have, wanted in zip(size, config.image_size, strict=True))
    if factor < REDUCED:
        return []
    what = f"images of {size[0]}x{size[1]} are resized to {config.image_size[0]}x{config.image_size[1]}"
    return [f"{what}, {factor:.1f} times smaller a side: details are lost; {_larger(name, recipe, source, config)}"]


def _larger(name: str, recipe: Recipe, source: Source, config: ViTConfig) -> str:
    """Name the recipe for larger images, or where the recipe's are as large, the option."""
    known = Known(len(source.train), source.channels, source.size)
    model = RECIPES[LARGER](known).model
    size = model_config(model, num_outputs=2, in_channels=source.channels, size=source.size).image_size
    if recipe.init is not None or math.prod(size) <= math.prod(config.image_size):
        twice = " ".join(str(2 * side) for side in config.image_size)
        return f"--model.image-size {twice} keeps more, at four times the cost or more"
    task = f" --task {recipe.task}" if recipe.task else ""
    shorter = "" if len(source.train) >= FEW else ", and --config finetune with --init suits few images"
    return f"--config {LARGER}{task} resizes to {size[0]}x{size[1]}{shorter}"
