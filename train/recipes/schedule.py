"""The learning rate and the step size of the moving average (EMA) of the weights: pure functions of the step."""

from typing import Any, Literal

import numpy as np

DecayShape = Literal["cosine", "constant", "rsqrt"]


def learning_rate(
    step: Any,
    *,
    peak: float,
    warmup: float,
    total: int,
    shape: DecayShape = "cosine",
    cooldown: float = 0.0,
    offset: float = 0.0,
) -> Any:
    """Return the learning rate of update `step`, counted from 0, of `total`:

        peak * min(1, n / warmup) * shape * min(1, remaining / cooldown),   n = step + offset,  remaining = total - step

        cosine    (1 + cos(pi * progress)) / 2,  progress = 1 - remaining / (total + offset - warmup), clipped to [0, 1]
        constant  1
        rsqrt     sqrt(warmup / max(n, warmup)), which does not depend on the total (arXiv 2106.04560)

    It is a linear warm-up from zero, the shape, and a linear cooldown to zero; a warmup or cooldown of 0 is left out.
    `warmup`, `total`, `cooldown` and `offset` are numbers of updates.  `offset` is added to the updates done so far, if a
    run has changed its batch size.  `step` is a number or a numpy array, for a float64 result, or an array of jax, traced
    or not.  For integer steps, the result in float32 is that in float64 up to rounding.  Source: big_vision,
    `utils.create_learning_rate_schedule`.
    """
    xp = step.__array_namespace__() if hasattr(step, "__array_namespace__") else np
    done, remaining = step + offset, total - step  # `total + offset - done` would round to multiples of its last digit
    rate = peak * (xp.minimum(1.0, done / warmup) if warmup else 1.0)
    if shape == "cosine":
        # 1 + cos(pi * progress) would cancel near the end: in float32, it is 0 in the last steps of a long run.
        share = xp.clip(remaining / max(total + offset - warmup, 1), 0.0, 1.0)
        rate = rate * xp.sin(np.pi / 2 * share) ** 2
    if shape == "rsqrt":
        rate = rate * xp.sqrt(max(warmup, 1) / xp.maximum(done, max(warmup, 1)))
    return rate * xp.clip(remaining / cooldown, 0.0, 1.0) if cooldown else rate


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
