"""Surgery: operations that change the shapes or the function of a checkpoint.

A conversion copies bits and computes nothing; operations that compute are in this package.  Each operation returns the new
checkpoint and one line that describes the change.  The new checkpoint has the format of the old one if that format can
store it, else "torch".  An operation reads only the parameters that it changes, computes in float64, and rounds once, to
the parameter's own dtype; it raises InputError if a finite number would become infinite.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from parity.checkpoints.surgery.edit import Changed
from parity.checkpoints.surgery.equivalent import (
    add_key_bias,
    drop_key_bias,
    fold_class_position,
    learn_positions,
    unfold_class_position,
)
from parity.checkpoints.surgery.head import drop_head, new_head, select_outputs
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
    "learn_positions",
    "new_head",
    "resize",
    "select_outputs",
    "unfold_class_position",
]

SIZE_OPERATIONS = ("image_size", "patch_size", "resampling")  # `resize` does them together
VALUE_OPERATIONS: dict[str, Callable[..., Changed]] = {"in_channels": adapt_channels, "num_classes": new_head}
FLAG_OPERATIONS: dict[str, Callable[[Checkpoint], Changed]] = {
    function.__name__: function
    for function in (drop_head, learn_positions, fold_class_position, unfold_class_position, add_key_bias, drop_key_bias)
}


def apply(checkpoint: Checkpoint, operations: Mapping[str, Any]) -> tuple[Checkpoint, list[str]]:
    """Apply several operations; return the new checkpoint, and a line for each operation.

    Args:
        checkpoint: the checkpoint, which is not changed.
        operations: image_size, patch_size, resampling, in_channels and num_classes with their values; drop_head,
            learn_positions, fold_class_position, unfold_class_position, add_key_bias and drop_key_bias with True.  The
            operations are applied in this order, whatever the order of the mapping.

    Raises:
        InputError: an operation is unknown or cannot be applied.
    """
    known = [*SIZE_OPERATIONS, *VALUE_OPERATIONS, *FLAG_OPERATIONS]
    if unknown := [name for name in operations if name not in known]:
        raise InputError(f"unknown surgery {unknown[0]!r}{nearest(unknown[0], known) or f': give some of {known}'}")
    sizes = {name: operations[name] for name in SIZE_OPERATIONS if name in operations}
    steps: list[Callable[[Checkpoint], Changed]] = [partial(resize, **sizes)] if sizes else []
    steps += [
        partial(function, **{name: operations[name]}) for name, function in VALUE_OPERATIONS.items() if name in operations
    ]
    steps += [function for name, function in FLAG_OPERATIONS.items() if operations.get(name)]
    lines = []
    for step in steps:
        checkpoint, line = step(checkpoint)
        lines.append(line)
    return checkpoint, lines
