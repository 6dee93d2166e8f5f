"""The optimizers of both trainers from the same state and gradients: how far their updates are apart, and from float64.

Run `python -m benchmarks.optimizers [--model vit_ti16]`.  It prints the table of docs/reference/numerics.md.  Weights and
gradients are random, the latter a new draw in each of four steps, and the fourth update is measured.  Updates are much
larger than weights, so that the weights after an update tell it.  A difference is the norm over all parameters, relative
to the norm of the update.  The last two columns are of the rules that optax and torch have under the same name, with the
same settings, also in float32 and from the same reference.
"""

import argparse
import platform
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
import optax
import torch

import parity
import vit_jax
import vit_spec
from parity.checkpoints.weights import as_checkpoint
from train.jax.optimizers import make_optimizer as make_jax
from train.jax.parameter_tree import tree
from train.recipes import OPTIMIZERS, Optimizer
from train.torch.optimizers import make_optimizer
from train.torch.parameter_tree import tree as torch_tree
from vit_spec import ViTConfig

STEPS, RATE, NO_CLIP = 4, 1.0, 1e9
Updates = dict[str, np.ndarray]  # by the names of the PyTorch twin


@cache
def random_tree(config: ViTConfig, seed: int, dtype: Any) -> Any:
    """Return weights (seed 0) or gradients with the shapes of the JAX twin's parameters; float32 has their values."""
    rng, scale = np.random.default_rng(seed), 1.0 if seed else 0.02
    shapes = jax.eval_shape(lambda: vit_jax.init(config))
    return jax.tree.map(lambda x: (scale * rng.standard_normal(x.shape)).astype(np.float32).astype(dtype), shapes)


@cache
def random_dict(config: ViTConfig, seed: int, dtype: Any) -> dict[str, torch.Tensor]:
    """Return the same arrays by the names of the PyTorch twin."""
    return to_torch(random_tree(config, seed, dtype), config)


def to_torch(arrays: Any, config: ViTConfig) -> dict[str, torch.Tensor]:
    """Return arrays of the JAX twin by the names of the PyTorch twin."""
    return dict(parity.to_torch(as_checkpoint(arrays, config, "jax")))


def of_jax(config: ViTConfig, transformation: Any, dtype: Any, **options: Any) -> Updates:
    """Return the last update of an optax transformation."""
    params = random_tree(config, 0, dtype)
    state, update, before = transformation.init(params), jax.jit(transformation.update), params
    for n in range(1, STEPS + 1):
        updates, state = update(random_tree(config, n, dtype), state, params, **options)
        before, params = params, optax.apply_updates(params, updates)
    change = jax.tree.map(lambda new, old: np.asarray(new, np.float64) - np.asarray(old, np.float64), params, before)
    return {name: each.numpy() for name, each in to_torch(change, config).items()}


def of_torch(config: ViTConfig, make: Callable[[dict[str, torch.Tensor]], Callable[[], Any]], dtype: Any) -> Updates:
    """Return the last update of an optimizer of PyTorch; `make` takes the parameters by name and returns its step."""
    params = {name: each.clone() for name, each in random_dict(config, 0, dtype).items()}
    step, before = make(params), {}
    for n in range(1, STEPS + 1):
        before = {name: each.double().clone() for name, each in params.items()}
        for name, gradient in random_dict(config, n, dtype).items():
            params[name].grad = gradient.clone()
        step()
    return {name: (each.double() - before[name]).numpy() for name, each in params.items()}


def own(settings: Optimizer, config: ViTConfig) -> Callable[[dict[str, torch.Tensor]], Callable[[], Any]]:
    """Return a function that makes the step of `train.torch`."""

    def make(params: dict[str, torch.Tensor]) -> Callable[[], Any]:
        optimizer = make_optimizer(settings, config, params)
        return lambda: optimizer.step(RATE)

    return make


def library_of_jax(o: Optimizer, config: ViTConfig) -> Any:
    """Return optax's rule of the same name; None if it has none with these settings."""
    decays = tree(config, lambda parameter: parameter.row.decays)
    adam: dict[str, Any] = {"b1": o.beta1, "b2": o.beta2, "eps": o.eps, "weight_decay": o.weight_decay, "mask": decays}
    if o.name == "adamw":
        return optax.adamw(RATE, **adam)
    if o.name == "lion":
        return optax.lion(RATE, o.beta1, o.beta2, weight_decay=o.weight_decay, mask=decays)
    if o.name == "sgd":
        return optax.chain(
            optax.trace(o.beta1), optax.add_decayed_weights(o.weight_decay, decays), optax.scale_by_learning_rate(RATE)
        )
    return None


def library_of_torch(o: Optimizer, config: ViTConfig) -> Callable[[dict[str, torch.Tensor]], Callable[[], Any]] | None:
    """Return a function that makes the step of torch's rule of the same name; None if it has none with these settings."""
    if o.name != "adamw":  # SGD adds the decay to the gradient before the momentum
        return None
    decays = torch_tree(config, lambda each: each.parameter.row.decays)

    def make(params: dict[str, torch.Tensor]) -> Callable[[], Any]:
        groups = [
            {"params": [p for name, p in params.items() if decays[name] == flag], "weight_decay": o.weight_decay * flag}
            for flag in (True, False)
        ]
        return torch.optim.AdamW(groups, lr=RATE, betas=(o.beta1, o.beta2), eps=o.eps).step

    return make


def difference(one: Updates, other: Updates) -> float:
    """Return the norm of the difference of two updates over the norm of the second."""
    error = sum(float(np.square(one[name] - each).sum()) for name, each in other.items())
    return (error / sum(float(np.square(each).sum()) for each in other.values())) ** 0.5


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="vit_ti16")
    config = vit_spec.get(parser.parse_args().model)
    versions = ", ".join(f"{package} {version(package)}" for package in ("jax", "optax", "torch"))
    print(f"{platform.machine()}, Python {platform.python_version()}, {versions}\n")
    print("| optimizer | JAX - PyTorch, float64 | JAX, float32 | PyTorch, float32 | optax, float32 | torch, float32 |")
    print("|---|---|---|---|---|---|")
    for name in OPTIMIZERS:
        settings = Optimizer(name=name, clip=NO_CLIP)
        ours = make_jax(settings, config)
        exact = of_torch(config, own(settings, config), np.float64)
        with jax.enable_x64(True):
            row = [difference(of_jax(config, ours, np.float64, rate=RATE), exact)]
        row.append(difference(of_jax(config, ours, np.float32, rate=np.float32(RATE)), exact))
        row.append(difference(of_torch(config, own(settings, config), np.float32), exact))
        theirs, other = library_of_jax(settings, config), library_of_torch(settings, config)
        cells = [f"{each:.1e}" for each in row]
        cells.append(f"{difference(of_jax(config, theirs, np.float32), exact):.1e}" if theirs is not None else "")
        cells.append(f"{difference(of_torch(config, other, np.float32), exact):.1e}" if other is not None else "")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
