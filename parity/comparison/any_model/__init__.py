"""Comparison of any Flax model with any PyTorch module: match their parameters, then compare outputs and gradients."""

from parity.comparison.any_model.assertion import assert_parity, compare_models

__all__ = ["assert_parity", "compare_models"]
