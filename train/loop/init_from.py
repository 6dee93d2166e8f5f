"""The initial weights of a run: those that `--init` names, in any file that `parity` reads, or shared random numbers."""

from collections.abc import Sequence
from typing import Any

import numpy as np

import parity
from parity.checkpoints import surgery
from parity.checkpoints.config_overrides import parse_overrides
from parity.checkpoints.conversion import replace_parameters
from parity.checkpoints.surgery.edit import apply_changes
from parity.checkpoints.weights import Checkpoint
from train.data.rng import WEIGHTS, generator
from train.loop.class_names import match_outputs
from train.loop.saved_run import missing_best_note
from train.recipes import Recipe, config_overrides
from vit_spec import InputError, ViTConfig, rows
from vit_spec.sampling import sample_row

TIMM_PREFIX = "timm:"


def draw_initial_weights(config: ViTConfig, seed: int) -> Checkpoint:
    """Return initial float32 weights for `--rng shared`: the same whatever the framework.

    Each parameter has random numbers of its own, whatever others there are.
    """
    parameters: dict[str, Any] = {
        name: sample_row(config, row, generator(WEIGHTS, seed, *name.encode())).astype(np.float32)
        for name, row in rows(config).items()
    }
    return replace_parameters(Checkpoint(config, "jax", {}), config, parameters)


def load_initial_weights(
    recipe: Recipe, *, num_outputs: int, in_channels: int, names: Sequence[str] = ()
) -> tuple[Checkpoint, list[str]]:
    """Load the weights that `recipe.init` names, and adapt them to the data and the recipe.

    The model is that of the weights: `model.name` is ignored.  `model.image_size` resamples the position embedding, and
    `model.changes` may change fields of the config that have no parameters, such as regularisation.drop_path=0.1.  Of a
    head whose labels have all names, the outputs with these names are kept, in their order.  Other labels, or another
    number of outputs, get a new head, initialized with the recipe's seed.

    Args:
        recipe: the recipe.
        num_outputs: the number of outputs that the data need.
        in_channels: the channels of the data.
        names: names of the outputs; empty if they have none.

    Returns:
        The weights with their config, and a line for each assumption, override of what the file states, and change.

    Raises:
        InputError: there is nothing to load, the format is unknown, or a change does not fit the weights.
    """
    name, checkpoint, notes = load_weights(recipe.init or "", recipe.init_set, "--init-set")
    notes.insert(0, f"initial weights are from {name}")
    before, wanted = checkpoint.config, recipe.model.in_channels or in_channels
    operations: dict[str, Any] = {}
    if recipe.model.image_size and recipe.model.image_size != before.image_size:
        operations["image_size"] = recipe.model.image_size
    if wanted != before.in_channels:
        operations["in_channels"] = wanted
    checkpoint, done = surgery.apply(checkpoint, operations)
    checkpoint, line = _fit_head(checkpoint, num_outputs, names, recipe.seed)
    done.append(line)
    if overrides := config_overrides(recipe.model):
        checkpoint = _with_overrides(checkpoint, overrides)
    return checkpoint, notes + done


def _fit_head(checkpoint: Checkpoint, num_outputs: int, names: Sequence[str], seed: int) -> surgery.Changed:
    """Return weights whose outputs are those of the data, and a line that says so; see `load_initial_weights`."""
    labels, count = checkpoint.labels, checkpoint.config.num_classes
    if not names or labels is None:
        if num_outputs == count:
            return checkpoint, f"the head of {num_outputs} outputs is kept"
        return surgery.new_head(checkpoint, num_outputs, seed=seed)
    try:
        outputs = match_outputs("the head", labels, count, checkpoint.task, names).tolist()
    except InputError as error:
        checkpoint, line = surgery.new_head(checkpoint, num_outputs, seed=seed)
        return checkpoint, f"{line}; {error}"
    if outputs == list(range(count)):
        return checkpoint, f"the head is kept: its {num_outputs} outputs have the names of the data"
    checkpoint, line = surgery.select_outputs(checkpoint, outputs)
    return checkpoint, f"{line}, by the names of the data"


def load_weights(place: str, overrides: Sequence[str], flag: str) -> tuple[str, Checkpoint, list[str]]:
    """Load weights for a trainer: a run's best ones, or any file or hf:// name that `parity` reads, or timm:NAME.

    Args:
        place: the run or the file.
        overrides: config overrides of the file, as FIELD=VALUE.
        flag: the flag that gives them.

    Returns:
        The name of the file, the weights, and a line for each assumption and for each override of what the file states.

    Raises:
        InputError: there is nothing to load, or the format is unknown.
    """
    name = f"hf://timm/{place.removeprefix(TIMM_PREFIX)}" if place.startswith(TIMM_PREFIX) else place
    given = parse_overrides(overrides, flag)
    try:
        checkpoint = parity.load(name, given=given)
    except InputError as error:
        message = str(error).replace("--set ", f"{flag} ")  # the trainer's name of that flag
        message = message.replace("(with --ignore REGEX,", "(by `python -m parity convert --ignore REGEX`,")
        message = message.replace("; --strip ", "; `python -m parity convert` with --strip ")
        raise type(error)(message) from None
    newest = missing_best_note(place, checkpoint.path)
    notes = [*([newest] if newest else []), *(f"{each.field} is {each.value}" for each in checkpoint.assumed)]
    read = place if name.startswith("hf://") else checkpoint.path  # that of a name on the hub is in the cache
    return read, checkpoint, [*notes, *(each.describe(flag) for each in checkpoint.overridden)]


def _with_overrides(checkpoint: Checkpoint, overrides: dict[str, Any]) -> Checkpoint:
    """Return the same weights with other values of fields of their config."""
    config = checkpoint.config.with_fields(overrides)
    was, now = (rows(each) for each in (checkpoint.config, config))
    if {name: row.shape for name, row in was.items()} != {name: row.shape for name, row in now.items()}:
        raise InputError("--model.changes changes parameters that --init loads: change only fields that have no parameters")
    return apply_changes(checkpoint, config, {}, overrides)
