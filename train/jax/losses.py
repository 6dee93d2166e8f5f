"""The three losses in jax, and the score of a batch that stands beside them while training."""

import jax
import jax.numpy as jnp
from jax import Array

from train.recipes import Task


def loss_and_score(task: Task, outputs: Array, targets: Array, *, sigmoid: bool = False) -> tuple[Array, Array]:
    """Return each image's loss and score, (B,) and (B,), in at least float32.

    classes: outputs (B, classes), targets (B,) class numbers, or (B, classes) shares that sum to 1; softmax
        cross-entropy, and whether the largest output is the class, or the class of the largest share (accuracy).  With
        `sigmoid` each class is asked for by itself, as labels are.
    labels: outputs (B, labels), targets (B, labels) from 0 to 1; the mean over labels of the binary cross-entropy of
        sigmoid(output), and the share of labels on the right side of one half (label accuracy).  big_vision's
        `sigmoid_xent` sums over labels instead.
    values: outputs (B, values), targets (B, values); the mean square of the difference, and its mean size (MAE).
    """
    x = outputs.astype(jnp.promote_types(outputs.dtype, jnp.float32))
    if task == "classes":
        # A product for both: the gradient of a lookup would be a scatter.
        wanted = jax.nn.one_hot(targets, x.shape[1], dtype=x.dtype) if targets.ndim == 1 else targets
        loss = _entropy(x, wanted).mean(1) if sigmoid else jax.nn.logsumexp(x, axis=1) - (wanted * x).sum(1)
        return loss, (x.argmax(1) == wanted.argmax(1)).astype(x.dtype)  # the shares sum to 1
    if task == "labels":
        return _entropy(x, targets).mean(1), ((x > 0) == (targets > 0.5)).mean(1)
    difference = x - targets
    return jnp.square(difference).mean(1), jnp.abs(difference).mean(1)


def _entropy(x: Array, targets: Array) -> Array:
    """-t log s(x) - (1 - t) log(1 - s(x)), s the sigmoid, without overflow."""
    return jax.nn.softplus(x) - targets * x


def shares(task: Task, targets: Array, outputs: int, smoothing: float) -> Array:
    """Return targets as numbers that can be mixed: class numbers (B,) as shares of classes, (B, outputs) float32.

    smoothing: share of every class's target, and of every label's, that is spread evenly over all answers (arXiv
        1512.00567, section 7): 1 becomes 1 - s + s / K, and 0 becomes s / K; K is 2 for labels.
    """
    if task == "classes":
        return (1 - smoothing) * jax.nn.one_hot(targets, outputs) + smoothing / outputs
    return (1 - smoothing) * targets + smoothing / 2 if task == "labels" else targets
