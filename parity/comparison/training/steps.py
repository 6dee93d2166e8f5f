"""Training steps of either twin: mean squared error, its gradient, and the twin's own AdamW.

The parameters of either twin are given as one flat vector, in the order of a state dict.  Gradients and moments are
converted with the same layouts as weights.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, count, pairwise
from math import prod
from typing import Any

import numpy as np

from parity.checkpoints.conversion import to_jax
from parity.checkpoints.layout import Array
from parity.comparison.framework_settings import compiler_options, strict_settings
from parity.comparison.training.adamw import AdamWSettings, ParameterSlices, StepState
from vit_spec import ViTConfig, rows


@dataclass(frozen=True, eq=False)
class TrainingTask:
    """The model to train, and its data.

    shapes: shapes of all parameters by their names in a state dict.
    batches: (B, H, W, C) float32 each, used in turn.
    seed: seed of the targets.
    """

    config: ViTConfig
    shapes: dict[str, tuple[int, ...]]
    batches: tuple[Array, ...]
    seed: int

    @cached_property
    def slices(self) -> ParameterSlices:
        """Slices of the parameters in a flat vector."""
        ends = accumulate(map(prod, self.shapes.values()), initial=0)
        declared = (rows(self.config)[".".join(w for w in name.split(".") if not w.isdigit())] for name in self.shapes)
        return ParameterSlices(
            tuple(self.shapes), tuple(slice(*pair) for pair in pairwise(ends)), tuple(r.decays for r in declared)
        )

    @cached_property
    def jax_indices(self) -> Array:
        """For each entry of the JAX twin's parameters, in the order of `jax.tree.leaves`, its index in a flat vector."""
        import jax

        numbered = np.arange(self.slices.slices[-1].stop, dtype=np.float64)
        leaves = jax.tree.leaves(to_jax(self.state_dict(numbered), self.config))
        return np.concatenate([leaf.ravel() for leaf in leaves]).astype(np.int64)

    def state_dict(self, vector: Array) -> dict[str, Array]:
        """Return the parameters in a flat vector by name, as views with their shapes."""
        return {name: part.reshape(self.shapes[name]) for name, _, [part] in self.slices.split(vector)}

    def target(self, step: int, shape: tuple[int, ...]) -> Array:
        """Return standard normal targets for the outputs of a step's batch; `shape` is the shape of the outputs."""
        return np.random.default_rng([self.seed, 1, step % len(self.batches)]).standard_normal(shape)


@dataclass(frozen=True)
class Step:
    """Result of a training step.

    loss: loss before the update.
    arrays: part of a `StepState` -> arrays of all parameters; gradients before clipping, moments and weights after the
        update.
    indices: for each entry of the concatenated arrays, its index in a flat vector; None if the order is the same.

    The arrays may share memory with the twin's: read them before the next step runs.
    """

    loss: float
    arrays: dict[str, list[Any]]
    indices: Array | None = None

    def vector(self, part: str) -> Array:
        """Return one part of a `StepState` as a flat vector, in the dtype of its arrays."""
        flat = np.concatenate([np.asarray(array).ravel() for array in self.arrays[part]])
        if self.indices is None:
            return flat
        vector = np.empty_like(flat)
        vector[self.indices] = flat
        return vector

    @property
    def state(self) -> StepState:
        """All parts as flat vectors."""
        return StepState(**{part: self.vector(part) for part in self.arrays})


Trainer = Callable[[Array], Iterator[Step]]  # takes a flat vector of weights, trains in its dtype, yields steps without end


def make_jax_trainer(task: TrainingTask, settings: AdamWSettings) -> Trainer:
    """Return a function that trains the JAX twin on CPU; it compiles once for each dtype."""
    import jax
    import jax.numpy as jnp

    import vit_jax
    import vit_jax.optimizer

    config, cpu = task.config, jax.devices("cpu")[0]
    model = vit_jax.ViT(config, vit_jax.Execution(precision="highest"))
    params = to_jax(task.state_dict(np.zeros(task.slices.slices[-1].stop)), config)
    decays = vit_jax.optimizer.decay_mask(config, params)
    optimizer = vit_jax.optimizer.adamw(settings.learning_rate, **settings.options, decays=decays)

    def loss(params: Any, images: Any, target: Any) -> Any:
        return jnp.square(model.apply({"params": params}, images) - target).mean()

    def step(params: Any, moments: Any, images: Any, target: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, images, target)
        updates, moments = optimizer.update(gradient, moments, params)
        return value, gradient, moments, jax.tree.map(jnp.add, params, updates)

    with jax.default_device(cpu):
        compiled = jax.jit(step, compiler_options=compiler_options())

    def train(start: Array) -> Iterator[Step]:
        is_float64 = start.dtype == np.float64
        with jax.enable_x64(is_float64), jax.default_device(cpu):
            params = jax.tree.map(jnp.asarray, to_jax(task.state_dict(start), config))
            moments = optimizer.init(params)
            outputs = jax.eval_shape(model.apply, {"params": params}, jnp.asarray(task.batches[0], start.dtype))
        for t in count():
            with strict_settings(), jax.enable_x64(is_float64), jax.default_device(cpu):
                images = jnp.asarray(task.batches[t % len(task.batches)], start.dtype)
                target = jnp.asarray(task.target(t, outputs.shape), start.dtype)
                value, gradient, moments, params = compiled(params, moments, images, target)
            parts = {"gradient": gradient, "mean": moments.mean, "square": moments.square, "params": params}
            yield Step(float(value), {part: jax.tree.leaves(tree) for part, tree in parts.items()}, task.jax_indices)

    return train


def perturb_by_one_ulp(weights: Array, rng: np.random.Generator) -> Array:
    """Return the weights, each changed by one unit in the last place, up or down at random."""
    result: Array = np.nextafter(weights, rng.choice(np.array([-np.inf, np.inf], weights.dtype), weights.shape))
    return result


def make_torch_trainer(task: TrainingTask, settings: AdamWSettings, rng: np.random.Generator | None = None) -> Trainer:
    """Return a function that trains the PyTorch twin on CPU.

    rng: perturb every weight after each step with this generator; see `perturb_by_one_ulp`.
    """
    import torch

    import vit_torch
    import vit_torch.optimizer

    config = task.config

    def train(start: Array) -> Iterator[Step]:
        with torch.device("meta"):
            model = vit_torch.ViT(config).eval()
        weights = {name: torch.tensor(array) for name, array in task.state_dict(start).items()}
        model.load_state_dict(weights, assign=True)
        by_name = dict(model.named_parameters())
        params = [by_name[name] for name in task.shapes]
        decays = vit_torch.optimizer.decay_mask(config, by_name)
        optimizer = vit_torch.optimizer.AdamW(by_name, settings.learning_rate, **settings.options, decays=decays)
        for t in count():
            with strict_settings():
                images = torch.tensor(task.batches[t % len(task.batches)], dtype=params[0].dtype)
                outputs = model(images.permute(0, 3, 1, 2))
                target = torch.tensor(task.target(t, tuple(outputs.shape)), dtype=outputs.dtype)
                loss = (outputs - target).square().mean()
                optimizer.zero_grad()
                loss.backward()
                gradient = [grad.numpy().copy() for grad in (p.grad for p in params) if grad is not None]
                optimizer.step()
            if rng is not None:
                with torch.no_grad():
                    for p in params:
                        p.copy_(torch.from_numpy(perturb_by_one_ulp(p.numpy(), rng)))
            states = [optimizer.state[p] for p in params]
            means, squares = ([state[key].numpy() for state in states] for key in ("exp_avg", "exp_avg_sq"))
            after = [p.detach().numpy() for p in params]
            yield Step(float(loss.detach()), {"gradient": gradient, "mean": means, "square": squares, "params": after})

    return train
