"""Comparison of the twins over optimizer steps, and the cause of a difference."""

from parity.comparison.training.trajectories import TrainingComparison, compare_training

__all__ = ["TrainingComparison", "compare_training"]
