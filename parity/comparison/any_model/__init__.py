"""Any model of flax against any model of PyTorch: which parameter is which, and whether both compute the same."""

from parity.comparison.any_model.assertion import assert_parity, compare_models

__all__ = ["assert_parity", "compare_models"]
