"""Tests, in folders that mirror the packages, and helper modules that several of them share."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"  # real weights and images; tests that need them skip where they are absent
