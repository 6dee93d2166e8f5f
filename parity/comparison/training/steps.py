"""One training step after another, in either twin: a mean squared distance, its gradient, and the twin's own AdamW.

All numbers of a twin are handed out as one vector, in the order of a state dict, whichever twin they are of: the columns
that carry weights carry gradients and moments too.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, count, pairwise
from math import prod
from typing import Any

import numpy as np

from parity.checkpoints.weights import to_jax
from parity.comparison.framework_settings import compiler_options, strict
from parity.comparison.tolerances import Array
from parity.comparison.training.adamw import Segments, Setting, State
from vit_spec import ViTConfig, rows


@dataclass(frozen=True, eq=False)
class Course:
    """What is trained, and on what.

    shapes: of all parameters, by their names in a state dict.
    batches: (B, H, W, C) each, taken in turn.
    seed: of what the outputs are to become.
    """

    config: ViTConfig
    shapes: dict[str, tuple[int, ...]]
    batches: tuple[Array, ...]
    seed: int

    @cached_property
    def segments(self) -> Segments:
        """Where each parameter lies in a vector."""
        ends = accumulate(map(prod, self.shapes.values()), initial=0)
        declared = (rows(self.config)[".".join(w for w in name.split(".") if not w.isdigit())] for name in self.shapes)
        return Segments(
            tuple(self.shapes), tuple(slice(*pair) for pair in pairwise(ends)), tuple(r.decays for r in declared)
        )

    @cached_property
    def places(self) -> Array:
        """Where in a vector each entry of the JAX twin's parameters lies, leaf by leaf."""
        import jax

        numbered = np.arange(self.segments.slices[-1].stop, dtype=np.float64)
        leaves = jax.tree.leaves(to_jax(self.state_dict(numbered), self.config))
        return np.concatenate([leaf.ravel() for leaf in leaves]).astype(np.int64)

    def state_dict(self, vector: Array) -> dict[str, Array]:
        """A vector's parameters by name: views."""
        return {name: part.reshape(self.shapes[name]) for name, _, [part] in self.segments.each(vector)}

    def target(self, step: int, shape: tuple[int, ...]) -> Array:
        """What the outputs of a step's batch are to become, standard normal."""
        return np.random.default_rng([self.seed, 1, step % len(self.batches)]).standard_normal(shape)


@dataclass(frozen=True)
class Step:
    """What a step did.

    loss: before it.
    kept: the twin's gradients, as they came, and what the step left behind, each a list of arrays.
    places: where the entries lie in a vector, where that is not one after another.

    The arrays may be the twin's own: read them before the next step is asked for.
    """

    loss: float
    kept: dict[str, list[Any]]
    places: Array | None = None

    def vector(self, part: str) -> Array:
        """One part of a `State`, in the type that it was computed in."""
        flat = np.concatenate([np.asarray(array).ravel() for array in self.kept[part]])
        if self.places is None:
            return flat
        vector = np.empty_like(flat)
        vector[self.places] = flat
        return vector

    @property
    def state(self) -> State:
        """All of them."""
        return State(**{part: self.vector(part) for part in self.kept})


Walk = Callable[[Array], Iterator[Step]]  # from a vector of weights, in its type, for as long as steps are asked for


def jax_walk(course: Course, setting: Setting) -> Walk:
    """Return what trains the JAX twin on the CPU; it is compiled once for each type."""
    import jax
    import jax.numpy as jnp

    import vit_jax
    import vit_jax.optimizer

    config, cpu = course.config, jax.devices("cpu")[0]
    model = vit_jax.ViT(config, vit_jax.Execution(precision="highest"))
    params = to_jax(course.state_dict(np.zeros(course.segments.slices[-1].stop)), config)
    decays = vit_jax.optimizer.decay_mask(config, params)
    optimizer = vit_jax.optimizer.adamw(setting.learning_rate, **setting.options, decays=decays)

    def loss(params: Any, images: Any, target: Any) -> Any:
        return jnp.square(model.apply({"params": params}, images) - target).mean()

    def step(params: Any, moments: Any, images: Any, target: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, images, target)
        updates, moments = optimizer.update(gradient, moments, params)
        return value, gradient, moments, jax.tree.map(jnp.add, params, updates)

    with jax.default_device(cpu):
        compiled = jax.jit(step, compiler_options=compiler_options())

    def walk(start: Array) -> Iterator[Step]:
        wide = start.dtype == np.float64
        with jax.enable_x64(wide), jax.default_device(cpu):
            params = jax.tree.map(jnp.asarray, to_jax(course.state_dict(start), config))
            moments = optimizer.init(params)
            outputs = jax.eval_shape(model.apply, {"params": params}, jnp.asarray(course.batches[0], start.dtype))
        for t in count():
            with strict(), jax.enable_x64(wide), jax.default_device(cpu):
                images = jnp.asarray(course.batches[t % len(course.batches)], start.dtype)
                target = jnp.asarray(course.target(t, outputs.shape), start.dtype)
                value, gradient, moments, params = compiled(params, moments, images, target)
            kept = {"gradient": gradient, "mean": moments.mean, "square": moments.square, "params": params}
            yield Step(float(value), {part: jax.tree.leaves(tree) for part, tree in kept.items()}, course.places)

    return walk


def moved(weights: Array, rng: np.random.Generator) -> Array:
    """Return weights of which each is moved by one unit in the last place of its type, up or down."""
    result: Array = np.nextafter(weights, rng.choice(np.array([-np.inf, np.inf], weights.dtype), weights.shape))
    return result


def torch_walk(course: Course, setting: Setting, rng: np.random.Generator | None = None) -> Walk:
    """Return what trains the PyTorch twin on the CPU.

    rng: where it is given, each weight is moved after each step; see `moved`.
    """
    import torch

    import vit_torch
    import vit_torch.optimizer

    config = course.config

    def walk(start: Array) -> Iterator[Step]:
        with torch.device("meta"):
            model = vit_torch.ViT(config).eval()
        weights = {name: torch.tensor(array) for name, array in course.state_dict(start).items()}
        model.load_state_dict(weights, assign=True)
        by_name = dict(model.named_parameters())
        params = [by_name[name] for name in course.shapes]
        decays = vit_torch.optimizer.decay_mask(config, by_name)
        optimizer = vit_torch.optimizer.AdamW(by_name, setting.learning_rate, **setting.options, decays=decays)
        for t in count():
            with strict():
                images = torch.tensor(course.batches[t % len(course.batches)], dtype=params[0].dtype)
                outputs = model(images.permute(0, 3, 1, 2))
                target = torch.tensor(course.target(t, tuple(outputs.shape)), dtype=outputs.dtype)
                loss = (outputs - target).square().mean()
                optimizer.zero_grad()
                loss.backward()
                gradient = [grad.numpy().copy() for grad in (p.grad for p in params) if grad is not None]
                optimizer.step()
            if rng is not None:
                with torch.no_grad():
                    for p in params:
                        p.copy_(torch.from_numpy(moved(p.numpy(), rng)))
            states = [optimizer.state[p] for p in params]
            means, squares = ([state[key].numpy() for state in states] for key in ("exp_avg", "exp_avg_sq"))
            after = [p.detach().numpy() for p in params]
            yield Step(float(loss.detach()), {"gradient": gradient, "mean": means, "square": squares, "params": after})

    return walk
