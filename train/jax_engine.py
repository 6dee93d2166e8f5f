"""The functional twin in training: its state on a mesh of devices, and the two compiled functions that use it."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import parity
import vit_jax
from train.data import Batch
from train.losses import loss_and_score
from train.metrics import BATCH_SCORE
from train.recipes import Recipe
from train.schedule import warmup_cosine
from vit_jax.optimizer import Moments, adamw, decay_mask
from vit_jax.use import quick_to_compile
from vit_spec import InputError, ViTConfig

Tree = Any


class State(NamedTuple):
    """Everything that a step changes.  Once a loss or a gradient is not finite, `sound` is False and nothing moves."""

    params: Tree
    moments: Moments
    step: Array
    sound: Array


class JaxEngine:
    """A `vit_jax.ViT` with its optimizer: images are split over the mesh's axis "data", the state is on every device.

    Raises:
        InputError: a batch that does not divide by the number of devices.
    """

    def __init__(self, config: ViTConfig, recipe: Recipe, *, warmup: float, total: int) -> None:
        devices = jax.device_count()
        if recipe.batch_size % devices:
            near = -(-recipe.batch_size // devices) * devices
            raise InputError(f"--batch-size {recipe.batch_size} does not divide by {devices} devices: give {near}")
        self.config, self._recipe = config, recipe
        self._model = vit_jax.ViT(config)
        o, shapes = recipe.optimizer, jax.eval_shape(partial(vit_jax.init, config))
        self._lr = partial(warmup_cosine, peak=o.lr, warmup=warmup, total=total)
        self._optimizer = adamw(
            self._lr,
            clip=o.clip,
            b1=o.beta1,
            b2=o.beta2,
            eps=o.eps,
            weight_decay=o.weight_decay,
            decays=decay_mask(config, shapes),
        )
        self.mesh = jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,))
        split, whole = (NamedSharding(self.mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
        self._split = split
        self._update = jax.jit(
            self._train, donate_argnums=0, in_shardings=(whole, split, split), out_shardings=(whole, whole)
        )
        self._evaluate = jax.jit(self._judge, in_shardings=(whole, split, split), out_shardings=(whole, whole))
        self._state: State = jax.jit(self._start, out_shardings=whole, compiler_options=quick_to_compile())()

    @property
    def hardware(self) -> str:
        """The mesh and what it is made of."""
        return f"data={self.mesh.size} ({self.mesh.devices.flat[0].device_kind})"

    def step(self, batch: Batch) -> dict[str, Array]:
        """Start one update and return its metrics, scalars that may still be on their way."""
        self._state, metrics = self._update(self._state, *self._place(batch))
        return metrics

    def answer(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Return the model's outputs (B, num_outputs) and each image's loss (B,)."""
        outputs, losses = self._evaluate(self._state.params, *self._place(batch))
        return np.asarray(outputs), np.asarray(losses)

    def save(self, path: Path) -> None:
        """Write the weights, and the config with them, as safetensors."""
        parity.save(path, jax.device_get(self._state.params), self.config, format="jax", force=True)

    def _place(self, batch: Batch) -> tuple[Array, Array]:
        images, targets = jax.device_put((batch.images, batch.targets), self._split)
        return images, targets

    # What is compiled --------------------------------------------------------------------------------------------

    def _start(self) -> State:
        params = vit_jax.init(self.config, self._recipe.seed)
        return State(params, self._optimizer.init(params), jnp.zeros((), jnp.int32), jnp.ones((), bool))

    def _train(self, state: State, images: Array, targets: Array) -> tuple[State, dict[str, Array]]:
        task = self._recipe.task
        noise = jax.random.fold_in(jax.random.key(self._recipe.seed), state.step)

        def objective(params: Tree) -> tuple[Array, Array]:
            outputs = self._apply(params, images, train=True, rngs={"dropout": noise})
            loss, score = loss_and_score(task, outputs, targets)
            return loss.mean(), score.mean()

        (loss, score), grads = jax.value_and_grad(objective, has_aux=True)(state.params)
        norm = optax.tree.norm(grads)
        updates, moments = self._optimizer.update(grads, state.moments, state.params)
        params = optax.apply_updates(state.params, updates)
        sound = state.sound & jnp.isfinite(loss) & jnp.isfinite(norm)
        moved = State(params, moments, state.step + 1, sound)
        after = jax.tree.map(lambda new, old: jnp.where(sound, new, old), moved, state._replace(sound=sound))
        return after, {"loss": loss, BATCH_SCORE[task]: score, "grad_norm": norm, "lr": self._lr(state.step)}

    def _judge(self, params: Tree, images: Array, targets: Array) -> tuple[Array, Array]:
        outputs = self._apply(params, images)
        return outputs, loss_and_score(self._recipe.task, outputs, targets)[0]

    def _apply(self, params: Tree, images: Array, **options: Any) -> Array:
        """uint8 images to outputs, through (x / 255 - mean) / std: what the network was made to see."""
        mean, std = jnp.asarray(self.config.pixels.mean), jnp.asarray(self.config.pixels.std)
        x = (images.astype(jnp.float32) / 255 - mean) / std
        return self._model.apply({"params": params}, x, **options)  # type: ignore[return-value]
