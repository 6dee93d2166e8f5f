"""Open weights for use as a model: change head or image size where asked for, and warn of what was assumed."""

import os
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from parity.checkpoints.config_inference import AssumptionWarning
from parity.checkpoints.reading import Source, load
from parity.checkpoints.weights import Checkpoint


class SurgeryWarning(UserWarning):
    """Weights were changed on the way to a model because the caller asked for another head or image size."""


def for_model(
    path: Source,
    *,
    format: str | None = None,
    given: Mapping[str, Any] | None = None,
    num_classes: int | None = None,
    image_size: int | tuple[int, int] | None = None,
) -> Checkpoint:
    """Return weights as `load` does, changed to what is asked for; warn of what was assumed and of what was changed.

    Args:
        path, format, given: as for `load`.
        num_classes: width of the classifier: another one is drawn anew, 0 takes it away; None keeps it.
        image_size: in pixels, (height, width) or the side of a square: positions are resampled to it; None keeps it.

    Warns:
        AssumptionWarning: what of the config nothing in the file tells, one line for all fields.
        SurgeryWarning: what was changed, one line a change.

    Raises:
        InputError: as `load` and the functions of `parity.surgery` do.
    """
    checkpoint = load(path, format=format, given=given)
    if checkpoint.assumed:
        fields = ", ".join(f"{each.field}={each.value!r} ({each.why})" for each in checkpoint.assumed)
        told = f"{path} does not tell all of its model; assumed: {fields}. Confirm or correct with given={{FIELD: VALUE}}"
        _warn(told, AssumptionWarning)
    config = checkpoint.config
    changes: dict[str, Any] = {}
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    if size is not None and tuple(size) != config.image_size:
        changes["image_size"] = tuple(size)
    if num_classes is not None and num_classes != config.num_classes:
        changes |= {"num_classes": num_classes} if num_classes else {"drop_head": True}
    if changes:
        from parity.checkpoints import surgery

        checkpoint, lines = surgery.apply(checkpoint, changes)
        for line in lines:
            _warn(f"{path}: {line}", SurgeryWarning)
    return checkpoint


def _warn(message: str, category: type[Warning]) -> None:
    """Warn at the line of the caller's code, which is the first one outside of this project's packages."""
    loaded = [sys.modules[name] for name in ("parity", "vit_jax", "vit_torch") if name in sys.modules]
    ours = [os.path.dirname(module.__file__ or "") for module in loaded]
    depth, frame = 1, sys._getframe()
    while frame.f_back and os.path.dirname(frame.f_code.co_filename).startswith(tuple(ours)):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, category, stacklevel=depth)
