"""The learning rate, a pure function of the step that both trainers share."""

from typing import Any

import numpy as np


def warmup_cosine(step: Any, *, peak: float, warmup: float, total: float) -> Any:
    """Return the learning rate of update `step`, counted from 0: a straight line from zero, then half a cosine to zero.

        peak * min(1, step / warmup) * (1 + cos(pi * progress)) / 2
        progress = (step - warmup) / (total - warmup), held to [0, 1]

    `warmup` and `total` are numbers of updates.  `step` is a number or a numpy array, for a float64 result, or an array
    of jax, also while it is traced.  big_vision, `utils.create_learning_rate_schedule` with decay_type="cosine".
    """
    xp = step.__array_namespace__() if hasattr(step, "__array_namespace__") else np
    ramp = xp.minimum(1.0, step / warmup) if warmup else 1.0
    progress = xp.clip((step - warmup) / max(total - warmup, 1), 0.0, 1.0)
    return peak * ramp * (1 + xp.cos(np.pi * progress)) / 2
