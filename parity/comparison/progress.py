"""Types of the functions that comparisons report their progress to."""

from collections.abc import Callable

StepProgress = Callable[[str], None]  # (description of the step that begins)
CountProgress = Callable[[str, int, int], None]  # (description of the step that begins, number done, total)
