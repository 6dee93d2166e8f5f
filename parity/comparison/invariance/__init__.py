"""Batch invariance and determinism: how much an image's outputs depend on its batch, its place, threads and devices."""

from parity.comparison.invariance.measurement import invariance
from parity.comparison.invariance.report import Change, InvarianceReport

__all__ = ["Change", "InvarianceReport", "invariance"]
