"""Do both twins train alike?  Optimizer steps in both, and what is at fault where they part."""

from parity.comparison.training.trajectories import Trajectories, trajectories

__all__ = ["Trajectories", "trajectories"]
