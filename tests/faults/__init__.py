"""Faults that the comparison of the twins must detect: each is one mistake in a twin, a format or an optimizer."""

from tests.faults import (
    formats,
    jax_attention,
    jax_layers,
    jax_model,
    optimizers,
    torch_attention,
    torch_layers,
    torch_model,
)
from tests.faults.planting import Fault, plant_fault

_MODULES = (torch_layers, torch_attention, torch_model, jax_layers, jax_attention, jax_model, formats, optimizers)
FAULTS: list[Fault] = [fault for module in _MODULES for fault in module.FAULTS]

__all__ = ["FAULTS", "Fault", "plant_fault"]
