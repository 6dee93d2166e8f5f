"""The losses of the three tasks in JAX, and the metric that is reported beside the loss of a training step."""

import jax
import jax.numpy as jnp
from jax import Array

from train.recipes import Task


def loss_and_metric(
    task: Task, outputs: Array, targets: Array, *, sigmoid: bool = False, weights: Array | None = None
) -> tuple[Array, Array]:
    """Return the loss and the metric of each image, (B,) and (B,), float32 or wider.

    classes: outputs (B, classes); targets (B,) class indices, or (B, classes) probabilities that sum to 1.  Loss: softmax
        cross-entropy; with `sigmoid`, as for labels.  Metric: accuracy, 1 if the largest output is the class (of
        probabilities: the most probable class), else 0.
    labels: outputs (B, labels), targets (B, labels) from 0 to 1.  Loss: the mean over labels of the binary cross-entropy
        of sigmoid(output); big_vision's `sigmoid_xent` sums over labels instead.  Metric: the fraction of labels for which
        output and target are on the same side of one half.
    values: outputs (B, values), targets (B, values).  Loss: mean squared error.  Metric: mean absolute error.

    weights: weights of the terms of the loss, see `train.data.class_weights`; None: 1.  Of a softmax (classes,): the term
        -t log p of each class, as `torch.nn.functional.cross_entropy` has them.  Of a sigmoid (2, outputs): the terms
        -(1 - t) log(1 - p) and -t log p.
    """
    x = outputs.astype(jnp.promote_types(outputs.dtype, jnp.float32))
    if task == "classes":
        # A product with one-hot targets, because the gradient of indexing would be a scatter.
        # The log-sum-exp has no factor, because the probabilities sum to 1.
        target_probs = jax.nn.one_hot(targets, x.shape[1], dtype=x.dtype) if targets.ndim == 1 else targets
        if sigmoid:
            loss = _binary_cross_entropy(x, target_probs, weights).mean(1)
        elif weights is None:
            loss = jax.nn.logsumexp(x, axis=1) - (target_probs * x).sum(1)
        else:
            terms = weights.astype(x.dtype) * target_probs
            loss = terms.sum(1) * jax.nn.logsumexp(x, axis=1) - (terms * x).sum(1)
        return loss, (x.argmax(1) == target_probs.argmax(1)).astype(x.dtype)
    if task == "labels":
        return _binary_cross_entropy(x, targets, weights).mean(1), ((x > 0) == (targets > 0.5)).astype(x.dtype).mean(1)
    difference = x - targets
    return jnp.square(difference).mean(1), jnp.abs(difference).mean(1)


def _binary_cross_entropy(x: Array, targets: Array, weights: Array | None) -> Array:
    """Return -w1 t log s(x) - w0 (1 - t) log(1 - s(x)), where s is the sigmoid, without overflow.

    weights: w0 and w1, (2, outputs); None: 1.
    """
    if weights is None:
        return jax.nn.softplus(x) - targets * x
    without, with_label = weights.astype(x.dtype)
    return (without * (1 - targets) + with_label * targets) * jax.nn.softplus(x) - with_label * targets * x


def teacher_loss(outputs: Array, of_teacher: Array, temperature: float | None) -> Array:
    """Return the loss of each image with the teacher's answers as targets, (B,), float32 or wider.

    Source: DeiT (arXiv 2012.12877), equations 2 and 3.  hard: the cross-entropy with the teacher's most likely class.
    soft: T^2 KL(softmax(teacher / T) || softmax(student / T)), which DeiT's code also divides by the number of classes.

    outputs, of_teacher: logits, (B, classes).
    temperature: T; None: hard.
    """
    wide = jnp.promote_types(outputs.dtype, jnp.float32)
    x, y = outputs.astype(wide), of_teacher.astype(wide)
    if temperature is None:
        return loss_and_metric("classes", x, y.argmax(1))[0]
    log_p, log_q = jax.nn.log_softmax(y / temperature), jax.nn.log_softmax(x / temperature)
    return temperature**2 * (jnp.exp(log_p) * (log_p - log_q)).sum(1)


def soft_targets(task: Task, targets: Array, outputs: int, smoothing: float) -> Array:
    """Return targets that can be mixed: class indices (B,) become probabilities (B, outputs).

    They are float32, or float64 in JAX's x64 mode, where mixing in float32 would round by 1e-8.

    smoothing: label smoothing s (arXiv 1512.00567, section 7): 1 becomes 1 - s + s / K, and 0 becomes s / K, where K is
        the number of classes, or 2 for labels.
    """
    if task == "classes":
        return (1 - smoothing) * jax.nn.one_hot(targets, outputs) + smoothing / outputs
    targets = targets.astype(float)
    return (1 - smoothing) * targets + smoothing / 2 if task == "labels" else targets
