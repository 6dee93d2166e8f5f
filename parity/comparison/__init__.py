"""Comparison of models: intermediates, outputs, gradients, training steps, and the cause of a difference."""
