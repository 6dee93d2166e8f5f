"""The learning rate and the step size of the moving average (EMA) of the weights: pure functions of the step."""

from typing import Any, Literal

import numpy as np

DecayShape = Literal["cosine", "constant", "rsqrt"]


def learning_rate(
    step: Any, *, peak: float, warmup: float, total: float, shape: DecayShape = "cosine", cooldown: float = 0.0
) -> Any:
    """Return the learning rate of update `step`, counted from 0, of `total`:

        peak * min(1, step / warmup) * shape(step) * min(1, (total - step) / cooldown)

        cosine    (1 + cos(pi * progress)) / 2,  progress = (step - warmup) / (total - warmup), clipped to [0, 1]
        constant  1
        rsqrt     sqrt(warmup / max(step, warmup)), which does not depend on the total (arXiv 2106.04560)

    It is a linear warm-up from zero, the shape, and a linear cooldown to zero; a warmup or cooldown of 0 is left out.
    `warmup`, `total` and `cooldown` are numbers of updates.  `step` is a number or a numpy array, for a float64 result, or
    an array of jax, traced or not.  Source: big_vision, `utils.create_learning_rate_schedule`.
    """
    xp = step.__array_namespace__() if hasattr(step, "__array_namespace__") else np
    rate = peak * (xp.minimum(1.0, step / warmup) if warmup else 1.0)
    if shape == "cosine":
        progress = xp.clip((step - warmup) / max(total - warmup, 1), 0.0, 1.0)
        rate = rate * (1 + xp.cos(np.pi * progress)) / 2
    if shape == "rsqrt":
        rate = rate * xp.sqrt(max(warmup, 1) / xp.maximum(step, max(warmup, 1)))
    return rate * xp.clip((total - step) / cooldown, 0.0, 1.0) if cooldown else rate


def ema_step_size(step: Any, *, decay: float) -> Any:
    """Return the step size c of the exponential moving average (EMA) of the weights after update `step`, counted from 1:

        mean <- mean + c (weights - mean),   c = max(1 - decay, 9 / (step + 8))

    The decay is warmed up.  It is 0 at first, so the initial weights do not stay in the mean.  Then the mean covers about
    the last ninth of the updates so far, until that is 1 / (1 - decay) updates.  With a constant decay of 0.9999, the mean
    would be 98 % initial weights after 200 updates; with Adam's bias correction, it would weight all 200 updates alike.
    The rule is that of TensorFlow's `ExponentialMovingAverage(num_updates)`, one update earlier.  `step` is as for
    `learning_rate`.
    """
    xp = step.__array_namespace__() if hasattr(step, "__array_namespace__") else np
    return xp.maximum(1 - decay, 9 / (step + 8))
