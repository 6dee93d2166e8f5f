"""The trainers, and which of them wrote the checkpoints in a folder."""

from pathlib import Path

FRAMEWORKS = {"train.jax": "JAX", "train.torch": "PyTorch"}
# A file that each checkpoint of a trainer has.
MARKERS = {"train.jax": "_CHECKPOINT_METADATA", "train.torch": "checkpoint.json"}


def trainer_of(folder: Path) -> str | None:
    """Return the trainer whose complete checkpoints are in a folder; None if there are none, or the folder is not there."""
    files = ((name, file) for name, marker in MARKERS.items() for file in folder.glob(f"[0-9]*/{marker}"))
    return next((name for name, file in files if file.parent.name.isdecimal()), None)
