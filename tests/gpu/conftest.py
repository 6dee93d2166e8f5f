"""Tests that need an NVIDIA GPU: run `pytest -m gpu`.  Without a GPU that both frameworks see, they are skipped."""

import importlib.util
from pathlib import Path

import pytest


def _missing() -> str:
    """Return what a test on a GPU lacks here; "" for nothing."""
    for name in ("jax", "torch"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed"
    import jax
    import torch

    if not torch.cuda.is_available():
        return "PyTorch sees no GPU"
    return "" if jax.default_backend() == "gpu" else f"JAX's default device is a {jax.default_backend()}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, and skip them where there is no GPU."""
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    reason = _missing() if here else ""
    for item in here:
        item.add_marker("gpu")
        if reason:
            item.add_marker(pytest.mark.skip(reason=f"needs an NVIDIA GPU in both frameworks: {reason}"))
