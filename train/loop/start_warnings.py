"""Warnings in the table at the start: choices that make the result of a run worse or misleading."""

import math

from train.data.sources import Dataset, typical_size
from train.loop.request import Request
from train.recipes import RECIPES, DataInfo, Recipe, model_config
from train.recipes.plain import SMALL_DATASET
from vit_spec import ViTConfig

MIN_WARNED_FACTOR = 4  # warn if both sides of images become this many times smaller
LARGER_RECIPE = "vit_ti16"  # the recipe for larger images that the warning names


def start_warnings(request: Request, config: ViTConfig) -> list[str]:
    """Return a line for each choice to warn of, with what to do instead."""
    return [
        *_downscaling_warnings(request, config),
        *_test_split_warnings(request.source),
        *_undefined_metric_warnings(request),
    ]


def _test_split_warnings(source: Dataset) -> list[str]:
    """Warn if the best weights are selected on the test split."""
    if source.split != "test":
        return []
    instead = "--held-out 0.1 selects them on a tenth of the training images and leaves the test split unseen"
    return [f"the best weights are selected on the test split, so their result on it is too good; {instead}"]


def _undefined_metric_warnings(request: Request) -> list[str]:
    """Warn if the metric that selects the best weights is undefined; not in a dry run, which has few held-out images."""
    task, targets = request.recipe.task or request.source.task, request.source.held_out.targets
    if task != "labels" or request.dry_run or (targets != targets[:1]).any():
        return []
    return [
        "all held-out images have the same labels, so auroc is undefined: no weights are the best, and --patience does not "
        "end the run; choose --held-out images with and without each label"
    ]


def _downscaling_warnings(request: Request, config: ViTConfig) -> list[str]:
    """Warn if images become `MIN_WARNED_FACTOR` times smaller or more on both sides, and name what keeps more detail."""
    name, recipe, source = request[:3]
    size = typical_size(source.train)  # of several images: the first may be an exception
    if size is None:
        return []
    factor = min(have / wanted for have, wanted in zip(size, config.image_size, strict=True))
    if factor < MIN_WARNED_FACTOR:
        return []
    what = f"images of {size[0]}x{size[1]} are resized to {config.image_size[0]}x{config.image_size[1]}"
    advice = _larger_images_advice(name, recipe, source, config)
    return [f"{what}, {factor:.1f} times smaller on each side, and lose details; {advice}"]


def _larger_images_advice(name: str, recipe: Recipe, source: Dataset, config: ViTConfig) -> str:
    """Return advice: the recipe with larger images, or the option that makes images larger if that recipe does not."""
    known = DataInfo(len(source.train), source.channels, source.size)
    model = RECIPES[LARGER_RECIPE](known).model
    size = model_config(model, num_outputs=2, in_channels=source.channels, size=source.size).image_size
    if recipe.init is not None or math.prod(size) <= math.prod(config.image_size):
        twice = " ".join(str(2 * side) for side in config.image_size)
        return f"--model.image-size {twice} keeps more, at four times the cost or more"
    task = f" --task {recipe.task}" if recipe.task else ""
    finetune = "" if len(source.train) >= SMALL_DATASET else ", and --config finetune with --init suits few images"
    return f"--config {LARGER_RECIPE}{task} resizes to {size[0]}x{size[1]}{finetune}"
