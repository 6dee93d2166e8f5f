"""Mistakes in the optimizers."""

from functools import partial

from tests.faults.planting import Fault

_torch = partial(Fault, file="vit_torch/optimizer.py", level="train")
_jax = partial(Fault, file="vit_jax/optimizer.py", level="train")

FAULTS = [
    _torch(
        name="1e-6 added to the norm that is clipped",
        old="(limit / norm)",
        new="(limit / (norm + 1e-6))",
        part="optimizer: clipping",
    ),
    _torch(
        name="every gradient clipped by itself",
        old="    for g in grads:\n        g.mul_(factor)\n",
        new="    for g in grads:\n        g.mul_((limit / g.norm()).clamp(max=1.0))\n",
        part="optimizer: clipping",
    ),
    _torch(
        name="clipped after the step",
        old='        clip_by_global_norm([p.grad for group in self.param_groups for p in group["params"]], self._clip)\n',
        new="",
        part="optimizer: clipping",
    ),
    _torch(
        name="weight decay on norms and biases",
        old="return rows(config)[row].decays",
        new="return True",
        part="optimizer: weight decay.*",
    ),
    _torch(
        name="weight decay added to the gradient",
        old='p.add_(p, alpha=-rate * group["decay"])',
        new='p.grad.add_(p, alpha=group["decay"])',
        part="optimizer: weight decay.*",
    ),
    _torch(
        name="weight decay without the learning rate",
        old='p.add_(p, alpha=-rate * group["decay"])',
        new='p.add_(p, alpha=-1e-3 * group["decay"])',
        part="optimizer: weight decay.*",
    ),
    _torch(
        name="weight decay after Adam's step",
        old='            for p in group["params"] if group["decay"] else ():\n'
        '                p.add_(p, alpha=-rate * group["decay"])\n'
        "        super().step()\n",
        new="        super().step()\n"
        "        for group in self.param_groups:\n"
        '            for p in group["params"]:\n'
        '                p.add_(p, alpha=-rate * group["decay"])\n',
        part="optimizer: weight decay.*",
    ),
    _torch(
        name="betas swapped",
        old="betas=(b1, b2)",
        new="betas=(b2, b1)",
        part="optimizer: first moment",
    ),
    _torch(
        name="learning rate of the next step",
        old="self._learning_rate(self.updates)",
        new="self._learning_rate(self.updates + 1)",
        part="optimizer: learning rate",
    ),
    _jax(
        name="eps inside the root",
        old="(jnp.sqrt(v / bias_correction2) + eps)",
        new="jnp.sqrt(v / bias_correction2 + eps)",
        part="optimizer: epsilon",
    ),
    _jax(
        name="eps added before the bias correction",
        old="(jnp.sqrt(v / bias_correction2) + eps)",
        new="((jnp.sqrt(v) + eps) / jnp.sqrt(bias_correction2))",
        part="optimizer: epsilon",
    ),
    _jax(
        name="no bias correction of the second moment",
        old="jnp.sqrt(v / bias_correction2)",
        new="jnp.sqrt(v)",
        part="optimizer: second moment's bias correction",
    ),
    _jax(
        name="bias correction in float32",
        old="(-jnp.expm1((step + 1) * math.log(b)) if b else 1.0 for b in (b1, b2))",
        new="(1 - jnp.float32(b) ** (step + 1).astype(jnp.float32) for b in (b1, b2))",
        part="optimizer: (first|second) moment's bias correction",
    ),
    _jax(
        name="weight of the first beta in the second moment",
        old="b2 * v + (1 - b2) * g * g",
        new="b2 * v + (1 - b1) * g * g",
        part="optimizer: second moment",
    ),
    _jax(
        name="gradients always scaled to the limit",
        old="jnp.minimum(1.0, limit / optax.tree.norm(grads))",
        new="(limit / optax.tree.norm(grads))",
        part="optimizer: clipping",
    ),
    _jax(
        name="learning rate counted from one",
        old="rate = learning_rate(step)",
        new="rate = learning_rate(step + 1)",
        part="optimizer: learning rate",
    ),
    _jax(
        name="weight decay on norms and biases",
        old="return rows(config)[row].decays",
        new="return True",
        part="optimizer: weight decay.*",
    ),
]
