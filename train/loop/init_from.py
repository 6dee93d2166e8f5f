"""Starting from weights that are there: any file, folder or name of the hub that the parity layer reads."""

from typing import Any

import parity
from parity.checkpoints import surgery
from parity.checkpoints.config_overrides import assignments
from parity.checkpoints.surgery.edit import changed
from parity.checkpoints.weights import Checkpoint
from train.loop.run_folder import best
from train.recipes import Recipe, changes
from vit_spec import InputError, rows

TIMM = "timm:"


def opened(recipe: Recipe, *, num_outputs: int, in_channels: int) -> tuple[Checkpoint, list[str]]:
    """Return the weights that `recipe.init` names, brought to the data and the recipe, and a line for each thing done.

    The network is the one that the weights come from: `model.name` does not count.  `model.image_size` resamples positions,
    another number of outputs gets a new head, drawn by the recipe's seed, and `model.changes` may change what has no
    parameters, such as regularisation.drop_path=0.1.

    Raises:
        InputError: nothing there, no known weights, or a change that the weights do not bear.
    """
    name = best(recipe.init or "")
    path = f"hf://timm/{name.removeprefix(TIMM)}" if name.startswith(TIMM) else name
    try:
        checkpoint = parity.load(path, given=assignments(recipe.init_set))
    except InputError as error:
        raise type(error)(str(error).replace("--set ", "--init-set ")) from None  # as the trainer has it
    notes = [f"weights are from {name}", *(f"{each.field} is taken to be {each.value}" for each in checkpoint.assumed)]
    before, wanted = checkpoint.config, recipe.model.in_channels or in_channels
    operations: dict[str, Any] = {}
    if recipe.model.image_size and recipe.model.image_size != before.image_size:
        operations["image_size"] = recipe.model.image_size
    if wanted != before.in_channels:
        operations["in_channels"] = wanted
    checkpoint, done = surgery.apply(checkpoint, operations)
    if num_outputs != before.num_classes:
        checkpoint, line = surgery.new_head(checkpoint, num_outputs, seed=recipe.seed)
        done.append(line)
    else:
        notes.append(f"its head of {num_outputs} outputs is kept")
    if told := changes(recipe.model):
        checkpoint = _told(checkpoint, told)
    return checkpoint, notes + done


def _told(checkpoint: Checkpoint, told: dict[str, Any]) -> Checkpoint:
    """The same weights under a config of which some fields are others."""
    config = checkpoint.config.replace(**told)
    was, now = (rows(each) for each in (checkpoint.config, config))
    if {name: row.shape for name, row in was.items()} != {name: row.shape for name, row in now.items()}:
        raise InputError(
            "--model.changes changes weights that --init brings: leave out what has a size or weights of its own"
        )
    return changed(checkpoint, config, {}, told)
