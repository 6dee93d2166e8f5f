"""The losses of the three tasks in PyTorch, and the metric that is reported beside the loss of a training step."""

import torch
from torch import Tensor
from torch.nn import functional as F

from train.recipes import Task


def loss_and_metric(
    task: Task, outputs: Tensor, targets: Tensor, *, sigmoid: bool = False, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the loss and the metric of each image, (B,) and (B,), float32 or wider.

    The tasks, losses, metrics and weights are those of `train.jax.losses.loss_and_metric`.  Targets of classes are indices
    (B,) int64, or probabilities (B, classes).
    """
    x = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    if task == "classes":
        is_index = targets.ndim == 1
        if sigmoid:
            target_probs = F.one_hot(targets, x.shape[1]).to(x.dtype) if is_index else targets
            loss = _binary_cross_entropy(x, target_probs, weights).mean(1)
        elif is_index:
            loss = x.logsumexp(1) - x.gather(1, targets[:, None])[:, 0]
            loss = loss if weights is None else weights.to(x.dtype)[targets] * loss
        elif weights is not None:
            terms = weights.to(x.dtype) * targets
            loss = terms.sum(1) * x.logsumexp(1) - (terms * x).sum(1)
        else:
            loss = x.logsumexp(1) - (targets * x).sum(1)
        return loss, (x.argmax(1) == (targets if is_index else targets.argmax(1))).to(x.dtype)
    if task == "labels":
        return _binary_cross_entropy(x, targets, weights).mean(1), ((x > 0) == (targets > 0.5)).to(x.dtype).mean(1)
    difference = x - targets
    return difference.square().mean(1), difference.abs().mean(1)


def _binary_cross_entropy(x: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """Return -w1 t log s(x) - w0 (1 - t) log(1 - s(x)), where s is the sigmoid, without overflow.

    weights: w0 and w1, (2, outputs); None: 1.
    """
    softplus = torch.logaddexp(x, torch.zeros_like(x))  # F.softplus returns x from 20 on, with an error of 2e-9
    if weights is None:
        return softplus - targets * x
    without, with_label = weights.to(x.dtype)
    return (without * (1 - targets) + with_label * targets) * softplus - with_label * targets * x


def teacher_loss(outputs: Tensor, of_teacher: Tensor, temperature: float | None) -> Tensor:
    """Return the loss of each image with the teacher's answers as targets; see `train.jax.losses.teacher_loss`."""
    wide = torch.promote_types(outputs.dtype, torch.float32)
    x, y = outputs.to(wide), of_teacher.to(wide)
    if temperature is None:
        return loss_and_metric("classes", x, y.argmax(1))[0]
    log_p, log_q = (y / temperature).log_softmax(1), (x / temperature).log_softmax(1)
    return temperature**2 * (log_p.exp() * (log_p - log_q)).sum(1)


def soft_targets(task: Task, targets: Tensor, outputs: int, smoothing: float) -> Tensor:
    """Return targets that can be mixed, in torch's default dtype; see `train.jax.losses.soft_targets`."""
    if task == "classes":
        one_hot = F.one_hot(targets, outputs).to(torch.get_default_dtype())
        return (1 - smoothing) * one_hot + smoothing / outputs
    targets = targets.to(torch.get_default_dtype())
    return (1 - smoothing) * targets + smoothing / 2 if task == "labels" else targets
