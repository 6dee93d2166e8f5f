"""Changes of a checkpoint that are meant to change its shape or its function, each under its own name.

A conversion computes nothing; what computes is here.  Each function returns the new checkpoint, in the format of the old
one where that can hold it, and one line that says what was done.  It reads the parameters that it changes and no others;
it computes in float64 and rounds once, to the parameter's own type.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from parity.checkpoints.surgery.edit import Changed
from parity.checkpoints.surgery.equivalent import add_key_bias, drop_key_bias, fold_class_position, unfold_class_position
from parity.checkpoints.surgery.head import drop_head, new_head
from parity.checkpoints.surgery.inputs import MODES, adapt_channels, resize
from parity.checkpoints.weights import Checkpoint
from vit_spec import InputError, nearest

__all__ = [
    "MODES",
    "Changed",
    "adapt_channels",
    "add_key_bias",
    "apply",
    "drop_head",
    "drop_key_bias",
    "fold_class_position",
    "new_head",
    "resize",
    "unfold_class_position",
]

SIZES = ("image_size", "patch_size", "resampling")  # together one operation
NUMBERS: dict[str, Callable[..., Changed]] = {"in_channels": adapt_channels, "num_classes": new_head}
SWITCHES: dict[str, Callable[[Checkpoint], Changed]] = {
    function.__name__: function
    for function in (drop_head, fold_class_position, unfold_class_position, add_key_bias, drop_key_bias)
}


def apply(checkpoint: Checkpoint, operations: Mapping[str, Any]) -> tuple[Checkpoint, list[str]]:
    """Return the checkpoint after several operations, and a line for each.

    operations: any of image_size, patch_size, resampling, in_channels and num_classes with their values, and of drop_head,
        fold_class_position, unfold_class_position, add_key_bias and drop_key_bias with True; done in this order.

    Raises:
        InputError: an unknown operation, or as the operations do.
    """
    known = [*SIZES, *NUMBERS, *SWITCHES]
    if unknown := [name for name in operations if name not in known]:
        raise InputError(f"unknown surgery {unknown[0]!r}{nearest(unknown[0], known) or f': give some of {known}'}")
    sizes = {name: operations[name] for name in SIZES if name in operations}
    steps: list[Callable[[Checkpoint], Changed]] = [partial(resize, **sizes)] if sizes else []
    steps += [partial(function, **{name: operations[name]}) for name, function in NUMBERS.items() if name in operations]
    steps += [function for name, function in SWITCHES.items() if operations.get(name)]
    done = []
    for step in steps:
        checkpoint, line = step(checkpoint)
        done.append(line)
    return checkpoint, done
