"""Tests, in folders that mirror the packages; what several of them use lies here."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"  # real weights and images; tests that need them skip where they are absent
