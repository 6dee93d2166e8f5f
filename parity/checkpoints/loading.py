"""Load a checkpoint for a model: change its head and image size as requested, and warn about assumptions."""

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from parity.checkpoints.assumptions import AssumptionWarning
from parity.checkpoints.reading import StrPath, load
from parity.checkpoints.weights import Checkpoint
from vit_spec.config import coerce_field


class SurgeryWarning(UserWarning):
    """Weights were changed while a model was loaded, because the caller asked for another head or image size."""


def load_for_model(
    path: StrPath,
    *,
    format: str | None = None,
    given: Mapping[str, Any] | None = None,
    strip: str | None = None,
    ignore: Sequence[str] = (),
    num_classes: int | None = None,
    image_size: int | tuple[int, int] | None = None,
) -> Checkpoint:
    """Load a checkpoint, and change its head and image size as requested.

    Args:
        path: see `load`.
        format: see `load`.
        given: see `load`.
        strip: see `load`.
        ignore: see `load`.
        num_classes: number of outputs of the classifier.  A number other than that of the checkpoint makes a new classifier
            with random weights; 0 removes the classifier; None keeps it.
        image_size: in pixels, (height, width) or the side of a square.  Positions are resampled to it; None keeps it.

    Warns:
        AssumptionWarning: lists all assumptions in one line, if there are any; and in another the fields of `given` that
            replace another value, which the file states.
        SurgeryWarning: describes a change; one warning for each change.

    Raises:
        InputError: for the reasons given in `load` and in the functions of `parity.surgery`.
    """
    size = None if image_size is None else coerce_field("image_size", image_size)
    checkpoint = load(path, format=format, given=given, strip=strip, ignore=ignore)
    if checkpoint.assumed:
        fields = ", ".join(f"{each.field}={each.value!r} ({each.why})" for each in checkpoint.assumed)
        message = f"{path} does not determine its model; assumed: {fields}. Confirm or correct with given={{FIELD: VALUE}}"
        _warn_caller(message, AssumptionWarning)
    if checkpoint.overridden:
        overrides = ". ".join(each.describe("given") for each in checkpoint.overridden)
        _warn_caller(f"{path}: {overrides}", AssumptionWarning)
    config = checkpoint.config
    changes: dict[str, Any] = {}
    if size is not None and size != config.image_size:
        changes["image_size"] = size
    if num_classes is not None and num_classes != config.num_classes:
        changes |= {"num_classes": num_classes} if num_classes else {"drop_head": True}
    if changes:
        from parity.checkpoints import surgery

        checkpoint, lines = surgery.apply(checkpoint, changes)
        for line in lines:
            _warn_caller(f"{path}: {line}", SurgeryWarning)
    return checkpoint


def _warn_caller(message: str, category: type[Warning]) -> None:
    """Issue a warning at the line of the caller: the innermost line outside of this project's packages."""
    loaded = [sys.modules[name] for name in ("parity", "vit_jax", "vit_torch") if name in sys.modules]
    our_folders = [os.path.dirname(module.__file__ or "") for module in loaded]
    depth, frame = 1, sys._getframe()
    while frame.f_back and os.path.dirname(frame.f_code.co_filename).startswith(tuple(our_folders)):
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, category, stacklevel=depth)
