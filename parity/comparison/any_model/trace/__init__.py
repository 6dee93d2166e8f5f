"""Execution of a model operation by operation: its values, its parts with a fixed dtype, and the origin of a difference."""
