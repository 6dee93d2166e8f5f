"""The contents of the folder of a run: the names of its files, its recipe, its model and its changes."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from parity.checkpoints.containers.folders import BEST_FILE, NEWEST_FILE
from train.checkpoints.trainers import FRAMEWORKS, trainer_of
from train.loop.checkpoint_folder import converted_folder, replaced_folder
from train.loop.lineage import TRAINER, Lineage, extend_lineage
from train.loop.metrics_file import Record
from train.recipes import Recipe, parse_recipe, recipe_to_json
from train.recipes.fields import to_json
from vit_spec import InputError, ViTConfig, bounded_json, nearest

CHECKPOINTS = "checkpoints"
DATA_FILE = "data.json"
WEIGHTS = (NEWEST_FILE, BEST_FILE, "weights_raw.safetensors", "best_raw.safetensors")
UNFINISHED_FILE = ".first-checkpoint-unfinished"  # exists while there are weights and perhaps no complete checkpoint
MAX_CONFIG_BYTES = 1 << 24  # of config.json: the names of 21,843 classes take 3 MB

# Fields that earlier versions did not write, with the value that says what these did.
ADDED: dict[str, Any] = {
    "recipe.rng": "own",
    "recipe.class_weights": "none",
    "recipe.sampling": "uniform",
    "recipe.teacher_set": [],
    "recipe.distillation": "hard",
    "recipe.distillation_weight": 0.5,
    "recipe.distillation_temperature": 3.0,
}


def read_config(path: Path) -> Record | None:
    """Return the content of config.json in a folder; None if there is none.

    Raises:
        InputError: it cannot be read.
    """
    file = path / "config.json"
    try:
        found = bounded_json.read_object(file, max_bytes=MAX_CONFIG_BYTES, allow_nan=True)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, InputError) as error:
        raise InputError(
            f"{file} cannot be read ({error}): put it back as it was; or move it away, and give --run a new folder and "
            f"--init {path} to start from the weights"
        ) from None
    # Older versions wrote Infinity for --optimizer.clip inf.
    return {name: to_json(value) for name, value in found.items()}


def read_run_config(path: Path) -> Record | None:
    """Return the content of config.json of the run in a folder; None if there is none, or it is another program's."""
    try:
        found = read_config(path)
    except InputError:
        return None
    return found if found is not None and isinstance(found.get("recipe"), dict) and "data" in found else None


def is_run(path: Path) -> bool:
    """Return whether a folder holds a run."""
    return read_run_config(path) is not None


def read_run_recipe(path: Path) -> tuple[str, Recipe]:
    """Return the name and the recipe of the run in a folder; the folder is its `run`.

    Raises:
        InputError: it holds no run (the message suggests the nearest run beside it), or its recipe cannot be read.
    """
    if (config := read_config(path)) is None or not {"recipe", "data"} <= config.keys():
        runs = [file.parent.name for file in path.parent.glob("*/config.json") if is_run(file.parent)]
        hint = nearest(path.name, runs) or ": check the path"
        raise InputError(f"{path} holds no run (there is no config.json of one){hint}")
    try:
        recipe = parse_recipe(config["recipe"])
    except InputError as error:
        raise InputError(
            f"the recipe in {path / 'config.json'} cannot be read: {error}; or put the file back as it was, or give --run "
            f"a new folder and --init {path} to start from its weights"
        ) from None
    name = config.get("name")
    return name if isinstance(name, str) and name else path.name, dataclasses.replace(recipe, run=str(path))


def saved_model_config(path: Path) -> ViTConfig | None:
    """Return the model config of the run in a folder; None if it has no checkpoints or no readable config.

    Raises:
        OSError: the folder of checkpoints cannot be listed.
    """
    if not has_checkpoints(path):
        return None
    try:
        return ViTConfig.from_json(json.dumps((read_config(path) or {})["model"]))
    except (ValueError, LookupError, TypeError):
        return None  # `RunFolder` reports what is wrong with the folder


def missing_best_note(place: str, path: str) -> str:
    """Return a line that says so if a run folder has no best weights, so that its newest ones were read; else "".

    place: what the user gave.
    path: the file that was read.
    """
    run = Path(os.path.expanduser(place))
    if Path(path) != run / NEWEST_FILE or not is_run(run):
        return ""
    return f"{run} has no {BEST_FILE}: its newest weights are used, {path}"


def extended_lineage(path: Path, recipe: Recipe, trainer: str | None = None) -> Lineage:
    """Return the changes of the run in a folder, the first one first, with those of a recipe and a trainer at last.

    trainer: None for the run's own.

    It is empty if the folder holds no run, or if nothing has changed.

    Raises:
        InputError: config.json has changes that no run writes.
    """
    if (saved := read_run_config(path)) is None:
        return []
    before = {name.removeprefix("recipe."): value for name, value in ADDED.items()} | saved["recipe"]
    step = max(_checkpoint_steps(path), default=0)
    recorded = saved.get(TRAINER)  # older versions recorded none
    was = recorded if recorded in (*FRAMEWORKS, trainer) else trainer_of(checkpoints_folder(path)) or trainer
    try:
        return extend_lineage(
            saved.get("lineage", []), before, recipe_to_json(recipe), (str(was), trainer or str(was)), step
        )
    except InputError as error:
        raise InputError(f"{path / 'config.json'} has {error}") from None


def has_checkpoints(path: Path) -> bool:
    """Whether a run has a complete checkpoint."""
    return bool(_checkpoint_steps(path))


def checkpoints_folder(path: Path) -> Path:
    """Return the folder of a run's checkpoints, without links or "..".

    A checkpoint that is being replaced is beside the folder, not beside a link to it; and tensorstore refuses "..".
    """
    return (path / CHECKPOINTS).resolve()


def _checkpoint_steps(path: Path) -> set[int]:
    """Return the steps of the complete checkpoints of a run, under their names or set aside while others replaced them."""
    checkpoints = checkpoints_folder(path)
    newest = checkpoints if checkpoints.exists() else converted_folder(checkpoints)
    folders = [folder for folder in (newest, replaced_folder(checkpoints)) if folder.is_dir()]
    return {int(each.name) for folder in folders for each in folder.iterdir() if each.name.isdecimal()}
