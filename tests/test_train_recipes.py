"""Recipes and the command line: every field can be set, and what cannot be is told in a line."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("tyro")

from train.cli import listing, main, parse
from train.recipes import RECIPES, Model, Recipe, model_config
from vit_spec import InputError


def fields(part: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every field of a recipe by its dotted name, with its value."""
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if dataclasses.is_dataclass(value):
            yield from fields(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


OTHERS: dict[str, Any] = {  # where doubling would leave the range, or there is nothing to double
    "model.name": "vit_b16",
    "model.image_size": (48, 64),
    "model.in_channels": 3,
    "model.changes": ("depth=3", "head.pool=mean"),
    "data": "folder:/photos",
    "task": "labels",
    "run": "somewhere",
    "optimizer.beta1": 0.8,
    "optimizer.beta2": 0.95,
    "seed": 7,
}


def other(name: str, value: Any) -> Any:
    if name in OTHERS:
        return OTHERS[name]
    return not value if isinstance(value, bool) else 2 * value


def argument(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        part, _, leaf = flag.rpartition(".")
        return ["--" + (flag if value else f"{part}.no-{leaf}".lstrip("."))]
    return [f"--{flag}", *map(str, value if isinstance(value, tuple) else [value])]


@pytest.mark.parametrize(("name", "value"), [*fields(RECIPES["vit_s16"]())])
def test_every_field_can_be_set_on_the_command_line(name: str, value: Any) -> None:
    wanted = other(name, value)
    _, recipe = parse("train.jax", ["--config", "vit_s16", *argument(name, wanted)])
    assert dict(fields(recipe)) == dict(fields(RECIPES["vit_s16"]())) | {name: wanted}


@pytest.mark.parametrize("form", [["--config", "tiny"], ["--config=tiny"]])
def test_config_names_the_recipe_that_is_changed(form: list[str]) -> None:
    assert parse("train.jax", [*form, "--epochs", "3"]) == ("tiny", dataclasses.replace(RECIPES["tiny"](), epochs=3))


def test_without_config_the_recipe_is_vit_s16() -> None:
    assert parse("train.jax", []) == ("vit_s16", RECIPES["vit_s16"]())


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_says_its_command(name: str) -> None:
    assert f"python -m train.jax --config {name}" in (RECIPES[name].__doc__ or "")


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_listed_and_describes_a_model(name: str) -> None:
    assert name in listing()
    assert model_config(RECIPES[name]().model, num_outputs=10, in_channels=1, grid=(2, 2)).num_classes == 10


def test_help_explains_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse("train.jax", ["--help"])
    said = capsys.readouterr().out
    assert not [name for name, _ in fields(Recipe()) if f"--{name.replace('_', '-')}" not in said]


WRONG = {
    "--config vits16": "unknown recipe 'vits16'; did you mean 'vit_s16'?",
    "--config": "unknown recipe ''",
    "--confg vit_s16": "did you mean '--config'?",
    "--epocs 3": "did you mean '--epochs'?",
    "--optimizer.lrr 3": "did you mean '--optimizer.lr'?",
    "--epochs many": "--epochs: could not convert string to float: 'many'",
    "--model.image-size 3": "--model.image-size",
    "--task guess": "invalid choice 'guess'",
    "--epochs -1": "epochs is -1.0: give a positive number",
    "--held-out 1.5": "held_out is 1.5: give a share between 0 and 1",
    "--augment.scale 0.5": "augment.scale is 0.5: give a factor of 1 or more",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_a_wrong_argument_is_told_in_one_line(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main("train.jax", lambda name, recipe: 0, arguments.split())
    said = capsys.readouterr().err
    assert status == 2 and said.startswith("error: ") and said.count("\n") == 1
    assert WRONG[arguments] in said


def test_interrupted_before_the_run_the_program_leaves_with_130() -> None:
    def interrupted(name: str, recipe: Recipe) -> int:
        raise KeyboardInterrupt

    assert main("train.jax", interrupted, []) == 130


# The network ----------------------------------------------------------------------------------------------------------


def test_small_images_are_enlarged_to_the_grid_that_suits_them() -> None:
    assert model_config(Model(), num_outputs=10, in_channels=1, grid=(2, 2)).image_size == (32, 32)


def test_the_grid_follows_a_changed_patch() -> None:
    model = Model(changes=("patch_size=(4, 6)",))
    assert model_config(model, num_outputs=10, in_channels=1, grid=(2, 2)).image_size == (8, 12)


def test_a_size_that_is_asked_for_wins() -> None:
    assert model_config(Model(image_size=(48, 64)), num_outputs=10, in_channels=1, grid=(2, 2)).image_size == (48, 64)


def test_without_a_grid_images_have_the_models_own_size() -> None:
    assert model_config(Model(), num_outputs=10, in_channels=3, grid=None).image_size == (224, 224)


def test_changes_reach_every_field_of_the_config() -> None:
    model = Model(changes=("depth=3", "head.pool=mean", "norms.eps=1e-5", "norms.layer_scale=None"))
    config = model_config(model, num_outputs=10, in_channels=3, grid=None)
    assert (config.depth, config.head.pool, config.norms.eps, config.norms.layer_scale) == (3, "mean", 1e-5, None)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Model(name="vit_s17"), "did you mean 'vit_s16'"),
        (Model(changes=("widht=3",)), "did you mean 'width'"),
        (Model(changes=("norms.epsilon=3",)), "norms.epsilon"),
        (Model(changes=("nrms.eps=3",)), "did you mean 'norms'"),
        (Model(changes=("depth",)), "write FIELD=VALUE"),
        (Model(image_size=(30, 30)), "not a multiple of the patch"),
    ],
)
def test_a_network_that_cannot_be_is_refused(model: Model, message: str) -> None:
    with pytest.raises(InputError, match=message):
        model_config(model, num_outputs=10, in_channels=3, grid=(2, 2))
