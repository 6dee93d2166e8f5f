"""The trainers, and which of them wrote the checkpoints in a folder."""

from pathlib import Path

FRAMEWORKS = {"train.jax": "JAX", "train.torch": "PyTorch"}
# A file that each checkpoint of a trainer has.
MARKERS = {"train.jax": "_CHECKPOINT_METADATA", "train.torch": "checkpoint.json"}


def trainer_of(folder: Path) -> str | None:
    """Return the trainer whose checkpoints are in a folder; None if there are none, or the folder does not exist."""
    return next((name for name, marker in MARKERS.items() if any(folder.glob(f"[0-9]*/{marker}"))), None)
