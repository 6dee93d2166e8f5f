"""The learning rate and the share of the running mean, pure functions of the step that both trainers share."""

from typing import Any, Literal

import numpy as np

Shape = Literal["cosine", "constant", "rsqrt"]


def learning_rate(
    step: Any, *, peak: float, warmup: float, total: float, shape: Shape = "cosine", cooldown: float = 0.0
) -> Any:
    """Return the learning rate of update `step`, counted from 0, of `total`:

        peak * min(1, step / warmup) * shape(step) * min(1, (total - step) / cooldown)

        cosine    (1 + cos(pi * progress)) / 2,  progress = (step - warmup) / (total - warmup), held to [0, 1]
        constant  1
        rsqrt     sqrt(warmup / max(step, warmup)), of which the next step knows no end (arXiv 2106.04560)

    A straight line from zero, the shape, and a straight line to zero; no warmup or no cooldown leaves its line out.
    `warmup`, `total` and `cooldown` are numbers of updates.  `step` is a number or a numpy array, for a float64 result,
    or an array of jax, also while it is traced.  big_vision, `utils.create_learning_rate_schedule`.
    """
    xp = step.__array_namespace__() if hasattr(step, "__array_namespace__") else np
    rate = peak * (xp.minimum(1.0, step / warmup) if warmup else 1.0)
    if shape == "cosine":
        progress = xp.clip((step - warmup) / max(total - warmup, 1), 0.0, 1.0)
        rate = rate * (1 + xp.cos(np.pi * progress)) / 2
    if shape == "rsqrt":
        rate = rate * xp.sqrt(max(warmup, 1) / xp.maximum(step, max(warmup, 1)))
    return rate * xp.clip((total - step) / cooldown, 0.0, 1.0) if cooldown else rate


def mean_share(step: Any, *, memory: float) -> Any:
    """Return the share c of the newest weights in the running mean of weights after update `step`, counted from 1:

        mean <- mean + c (weights - mean),   c = max(1 - memory, 9 / (step + 8))

    The memory is warmed up: it is 0 at first, so that nothing of the initial weights stays in the mean, and it reaches back
    over a ninth of the updates so far, until that is 1 / (1 - memory) updates.  With the memory constant, a mean of 0.9999
    would be 98 % initial weights after 200 updates; with Adam's bias correction it would weigh all 200 alike.  The rule is
    that of TensorFlow's `ExponentialMovingAverage(num_updates)`, one update earlier.  `step` is as for `learning_rate`.
    """
    xp = step.__array_namespace__() if hasattr(step, "__array_namespace__") else np
    return xp.maximum(1 - memory, 9 / (step + 8))
