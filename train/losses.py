"""The three losses in jax, and the score of a batch that stands beside them while training."""

import jax
import jax.numpy as jnp
from jax import Array

from train.recipes import Task


def loss_and_score(task: Task, outputs: Array, targets: Array) -> tuple[Array, Array]:
    """Return each image's loss and score, (B,) and (B,), in at least float32.

    classes: outputs (B, classes), targets (B,) class numbers; softmax cross-entropy, and whether the largest output is
        the class (accuracy).
    labels: outputs (B, labels), targets (B, labels) of 0 and 1; the mean over labels of the binary cross-entropy of
        sigmoid(output), and the share of labels on the right side of one half (label accuracy).  big_vision's
        `sigmoid_xent` sums over labels instead.
    values: outputs (B, values), targets (B, values); the mean square of the difference, and its mean size (MAE).
    """
    x = outputs.astype(jnp.promote_types(outputs.dtype, jnp.float32))
    if task == "classes":
        picked = jnp.take_along_axis(x, targets[:, None], axis=1)[:, 0]
        return jax.nn.logsumexp(x, axis=1) - picked, (x.argmax(1) == targets).astype(x.dtype)
    if task == "labels":
        entropy = jax.nn.softplus(x) - targets * x  # = -t log s(x) - (1 - t) log(1 - s(x)), without overflow
        return entropy.mean(1), ((x > 0) == (targets > 0.5)).mean(1)
    difference = x - targets
    return jnp.square(difference).mean(1), jnp.abs(difference).mean(1)
