"""Moving weights between formats without losing a bit, and proof that the twins are one function of them."""

from parity.checkpoints.config_inference import AssumptionWarning
from parity.checkpoints.loading import SurgeryWarning
from parity.checkpoints.reading import load
from parity.checkpoints.weights import Checkpoint, to_jax, to_torch
from parity.checkpoints.writing import convert, save, write
from parity.comparison.any_model import assert_parity
from parity.comparison.twins import compare

__all__ = [
    "AssumptionWarning",
    "Checkpoint",
    "SurgeryWarning",
    "assert_parity",
    "compare",
    "convert",
    "load",
    "save",
    "to_jax",
    "to_torch",
    "write",
]
