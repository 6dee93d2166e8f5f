"""Convert checkpoints between formats without losing a bit, and prove that two models compute the same function.

Names are imported lazily, on first use: reading a checkpoint does not import the code that compares models.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parity.checkpoints import surgery
    from parity.checkpoints.assumptions import AssumptionWarning
    from parity.checkpoints.conversion import to_jax, to_torch
    from parity.checkpoints.format_file import register_format
    from parity.checkpoints.loading import SurgeryWarning
    from parity.checkpoints.reading import load
    from parity.checkpoints.weights import Checkpoint
    from parity.checkpoints.writing import convert, save, write
    from parity.comparison.any_model import assert_parity, compare_models
    from parity.comparison.invariance import invariance
    from parity.comparison.own_model import derive_table
    from parity.comparison.twins import compare

__all__ = [
    "AssumptionWarning",
    "Checkpoint",
    "SurgeryWarning",
    "assert_parity",
    "compare",
    "compare_models",
    "convert",
    "derive_table",
    "invariance",
    "load",
    "register_format",
    "save",
    "surgery",
    "to_jax",
    "to_torch",
    "write",
]

if not TYPE_CHECKING:  # a type checker would assume that a module with __getattr__ has every attribute
    _MODULES = {
        "AssumptionWarning": "checkpoints.assumptions",
        "Checkpoint": "checkpoints.weights",
        "SurgeryWarning": "checkpoints.loading",
        "assert_parity": "comparison.any_model",
        "compare": "comparison.twins",
        "compare_models": "comparison.any_model",
        "convert": "checkpoints.writing",
        "derive_table": "comparison.own_model",
        "invariance": "comparison.invariance.measurement",
        "load": "checkpoints.reading",
        "register_format": "checkpoints.format_file",
        "save": "checkpoints.writing",
        "surgery": "checkpoints.surgery",
        "to_jax": "checkpoints.conversion",
        "to_torch": "checkpoints.conversion",
        "write": "checkpoints.writing",
    }

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = import_module(f"parity.{_MODULES[name]}")
        attribute = globals()[name] = module if _MODULES[name].endswith(name) else getattr(module, name)
        return attribute

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
