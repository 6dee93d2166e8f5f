"""Moving weights between formats without losing a bit, and proof that the twins are one function of them."""

from parity.comparison import compare
from parity.files import load
from parity.inference import AssumptionWarning
from parity.loading import SurgeryWarning
from parity.pairs import assert_parity
from parity.weights import Checkpoint, to_jax, to_torch
from parity.writing import convert, save, write

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
