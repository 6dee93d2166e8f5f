"""The functional twin in training: its state on a mesh of devices, and the two compiled functions that use it."""

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import parity
import vit_jax
from parity.checkpoints.weights import Checkpoint
from train.data.augment import Mix, mixed_images, mixed_targets
from train.data.batches import Batch
from train.jax import sharding
from train.jax.checkpoints import WARMED_UP, Checkpoints
from train.jax.losses import loss_and_score, shares
from train.jax.optimizers import frozen, optimizer
from train.jax.parameter_tree import tree
from train.loop.engine import Evaluated
from train.loop.metrics import BATCH_SCORE, LEADING
from train.loop.peak_rates import peak_rate
from train.mesh import replicated, share_batch
from train.recipes import Recipe, Task
from train.recipes.schedule import mean_share
from vit_jax.use import quick_to_compile
from vit_spec import ViTConfig

Tree = Any
Metrics = dict[str, Array]


class State(NamedTuple):
    """Everything that a step changes.

    params, moments: the weights, and what the optimizer keeps.
    ema: the running mean of the weights, in their form, as `train.recipes.schedule.mean_share` says; None without one.
    step: steps done, int32.
    sound: False once a loss or a gradient was not finite and the recipe does not skip such steps; then nothing moves.
    """

    params: Tree
    moments: Any
    ema: Tree
    step: Array
    sound: Array


class JaxEngine:
    """A `vit_jax.ViT` with its optimizer on a mesh: images are split over it, and so is the state, as the mesh says.

    task: what is learnt.
    rate: the learning rate of the step that follows so many others; it is traced.
    start: the weights to start from; None: drawn by the recipe's seed.
    folder: where checkpoints are kept.
    described: names of classes and the like, which files of weights are to hold, as `parity.save` takes them.

    Raises:
        InputError: a mesh that is not understood or does not fit; a batch that it does not divide.
    """

    def __init__(
        self,
        config: ViTConfig,
        recipe: Recipe,
        *,
        task: Task,
        rate: Callable[[Array], Array],
        start: Checkpoint | None,
        folder: Path,
        described: Mapping[str, Any] | None = None,
    ) -> None:
        self.config, self._recipe, self._task, self._rate, self._folder = config, recipe, task, rate, folder
        self.mesh = sharding.make(recipe.mesh, config)
        share_batch(recipe.batch_size, recipe.accumulate, self.mesh.shape)
        half = jnp.bfloat16 if recipe.dtype == "bfloat16" else None
        self._model = vit_jax.ViT(config, vit_jax.Execution(dtype=half, remat=recipe.remat))
        self._optimizer = optimizer(recipe.optimizer, config, self.mesh)
        self._frozen = frozen(recipe.optimizer, config)
        self._images = sharding.images(self.mesh)
        self._everywhere = NamedSharding(self.mesh, PartitionSpec())
        self._state: State = self._begin(start)
        self._checkpoints: Checkpoints | None = None
        self._described = described or {}
        self._asked = 0  # how often, whether to stop

    @property
    def distributed(self) -> bool:
        """Whether other processes take part in the run."""
        return jax.process_count() > 1

    @property
    def is_main(self) -> bool:
        """Whether this is the process that speaks and writes for all."""
        return jax.process_index() == 0

    @property
    def hardware(self) -> str:
        """The mesh and what it is made of."""
        return sharding.described(self.mesh)

    @property
    def replicated(self) -> str:
        """Which weights the mesh leaves whole where it is to split them; empty where these are few."""
        return replicated(self.config, self.mesh.shape)

    @property
    def batch_rows(self) -> np.ndarray:
        """Which images of a batch this process is to feed, (B here,)."""
        return sharding.rows_here(self.mesh, self._recipe.batch_size)

    def step(self, batch: Batch) -> Metrics:
        """Start one update and return its metrics, scalars that may still be on their way."""
        placed = self._place(batch)
        with jax.transfer_guard("disallow"):
            self._state, metrics = self._update(self._state, *placed)
        return metrics

    @property
    def averages(self) -> bool:
        """Whether there is a running mean of the weights beside the raw ones."""
        return self._state.ema is not None

    def evaluate(self, batch: Batch, *, raw: bool = False) -> Evaluated:
        """Return the outputs (B, num_outputs), each image's loss (B,) and whether it was read (B,).

        raw: use the raw weights, although there is a running mean.
        """
        images, targets, _ = self._place(batch)
        read = jax.make_array_from_process_local_data(self._images, batch.read)
        return Evaluated(*self._judge(self._chosen(raw), images, targets, read))

    def attention(self, images: np.ndarray) -> np.ndarray:
        """Return the last block's attention weights of some images (N, H, W, C) uint8: (N, heads, T, T)."""
        return np.asarray(self._attend(self._chosen(), images))

    def save_weights(self, path: Path, *, raw: bool = False) -> None:
        """Write the weights that `evaluate` uses, and the config with them, as safetensors.  raw: as for `evaluate`."""
        weights = jax.tree.map(self._gathered, self._chosen(raw))
        if self.is_main:
            parity.save(path, weights, self.config, format="jax", force=True, **self._described)

    def _chosen(self, raw: bool = False) -> Tree:
        """Return the running mean of the weights where there is one, unless the raw weights are asked for."""
        return self._state.params if raw or self._state.ema is None else self._state.ema

    def save_checkpoint(self, step: int, note: dict[str, Any]) -> None:
        """Begin to write a checkpoint: the state, and a note."""
        self._kept.save(step, self._state, note)

    def restore(self) -> tuple[int, dict[str, Any]] | None:
        """Go back to the newest checkpoint that can be read; return its step and note, or None where there is none."""
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self._state)
        if (found := self._kept.newest(like)) is None:
            return None
        step, self._state, note, version = found
        if version < WARMED_UP and self.averages and mean_share(step, memory=self._recipe.ema) > 1 - self._recipe.ema:
            copied = jax.jit(lambda params: jax.tree.map(jnp.copy, params), out_shardings=self.places.params)
            self._state = self._state._replace(ema=copied(self._state.params))
            remark = f"the mean of weights begins anew at step {step:,}: an older version mixed initial weights into it"
            return step, note | {"remark": remark}
        return step, note

    def profile(self, folder: Path | None) -> None:
        """Begin to record with jax's profiler into a folder, for TensorBoard; or end it."""
        if folder is None:
            jax.profiler.stop_trace()
        else:
            jax.profiler.start_trace(str(folder))

    @property
    def peak_rate(self) -> float | None:
        """Floating point operations a second of all devices at most, dense and in bfloat16; None where it is not known."""
        each = peak_rate(self.mesh.devices.flat[0].device_kind)
        return None if each is None else each * self.mesh.size

    def preempted(self) -> bool:
        """Whether all processes are to stop after this step, because one of them was told to; to be asked in each."""
        # jax settles on a number of the future, and knows none ahead of the first: it counts from 0, also in a resumed run.
        self._asked += 1
        return self.distributed and bool(multihost_utils.reached_preemption_sync_point(self._asked))

    def close(self) -> None:
        """Wait until what was begun is written."""
        if self._checkpoints is not None:
            self._checkpoints.close()

    @property
    def _kept(self) -> Checkpoints:
        if self._checkpoints is None:
            leading = LEADING[self._task]
            better = -1.0 if leading == "mae" else 1.0

            def rank(note: dict[str, Any]) -> float | None:
                found = better * note["last"][leading] if note["looked"] else math.nan
                return None if math.isnan(found) else found

            self._checkpoints = Checkpoints(self._folder, keep=self._recipe.keep, rank=rank)
        return self._checkpoints

    def _gathered(self, array: Array) -> np.ndarray:
        """All of an array that the mesh splits, on the host: one at a time, since a device holds all of it meanwhile."""
        return np.asarray(
            array if array.is_fully_addressable else jax.jit(lambda x: x, out_shardings=self._everywhere)(array)
        )

    def _place(self, batch: Batch) -> tuple[Array, Array, Any]:
        def split(local: np.ndarray) -> Array:
            return jax.make_array_from_process_local_data(self._images, local)

        images, targets = split(batch.images), split(batch.targets)
        return images, targets, jax.device_put(batch.mix, self._everywhere)

    # The state ---------------------------------------------------------------------------------------------------

    @cached_property
    def places(self) -> State:
        """Where each part of the state lies."""
        shapes = jax.eval_shape(self._drawn, None)
        params = sharding.parameters(self.mesh, self.config)
        beside = jax.tree.map(lambda leaf, place: (leaf.shape, place), shapes.params, params)
        return State(*(sharding.like_parameters(part, beside) for part in shapes))

    def _begin(self, start: Checkpoint | None) -> State:
        """The state ahead of the first step, each device holding its own part from the first."""
        params = None
        if start is not None:
            wide = jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), parity.to_jax(start))
            params = jax.device_put(wide, self.places.params)
        return jax.jit(self._drawn, out_shardings=self.places, compiler_options=quick_to_compile())(params)

    def _drawn(self, start: Tree | None) -> State:
        params = vit_jax.init(self.config, self._recipe.seed) if start is None else start
        ema = params if self._recipe.ema else None
        return State(params, self._optimizer.init(params), ema, jnp.zeros((), jnp.int32), jnp.ones((), bool))

    # What is compiled --------------------------------------------------------------------------------------------

    @cached_property
    def _update(self) -> Callable[..., tuple[State, Metrics]]:
        """The step, compiled once and ahead of time: another shape is an error then, and never a second compilation."""
        jitted = jax.jit(
            self._train,
            donate_argnums=0,
            in_shardings=(self.places, self._images, self._images, self._everywhere),
            out_shardings=(self.places, self._everywhere),
        )
        return jitted.lower(*self.shapes).compile()

    @cached_property
    def _judge(self) -> Callable[..., tuple[Array, ...]]:
        return jax.jit(
            self._judged,
            in_shardings=(self.places.params, self._images, self._images, self._images),
            out_shardings=self._everywhere,
        )

    @cached_property
    def _attend(self) -> Callable[..., Array]:
        def attend(params: Tree, images: Array) -> Array:
            return vit_jax.attention_maps(self._model, params, self._seen(images))

        return jax.jit(attend, out_shardings=self._everywhere, compiler_options=quick_to_compile())

    @property
    def shapes(self) -> tuple[Any, ...]:
        """What a step takes, as shapes: the state, images, targets and their mixing."""
        b, (height, width), channels = self._recipe.batch_size, self.config.image_size, self.config.in_channels
        numbers = self._task == "classes"
        targets = jax.ShapeDtypeStruct(*(((b,), np.int32) if numbers else ((b, self.config.num_classes), np.float32)))
        images = jax.ShapeDtypeStruct((b, height, width, channels), np.uint8)
        one, box = jax.ShapeDtypeStruct((), np.float32), jax.ShapeDtypeStruct((4,), np.int32)
        mix = Mix(one, box, one) if self._recipe.augment.mixes else None  # type: ignore[arg-type]
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self._state), images, targets, mix

    def _train(self, state: State, images: Array, targets: Array, mix: Mix | None) -> tuple[State, Metrics]:
        noise = jax.random.fold_in(jax.random.key(self._recipe.seed), state.step)
        (loss, score), grads = self._gradient(state.params, images, targets, mix, noise)
        norm = optax.tree.norm(grads)
        rate = self._rate(state.step.astype(float))  # float32, or float64 where jax's x64 mode is on
        updates, moments = self._optimizer.update(grads, state.moments, state.params, rate=rate)
        params = optax.apply_updates(state.params, updates)
        sound = state.sound & jnp.isfinite(loss) & jnp.isfinite(norm)
        moved = State(params, moments, self._averaged(state.ema, params, state.step + 1), state.step + 1, sound)
        skipped = self._recipe.non_finite == "skip"
        stays = state._replace(step=state.step + skipped, sound=state.sound & skipped)
        after = jax.tree.map(lambda new, old: jnp.where(sound, new, old), moved, stays)
        metrics = {"loss": loss, BATCH_SCORE[self._task]: score, "grad_norm": norm, "lr": rate}
        return after, metrics

    def _gradient(
        self, params: Tree, images: Array, targets: Array, mix: Mix | None, noise: Array
    ) -> tuple[tuple[Array, Array], Tree]:
        """The mean loss and score of a batch, and the loss's gradient, taken in `accumulate` parts one after the other.

        Part j holds the images j, j + n, j + 2n, ..., so that each device has as many of its own in every part.
        """
        n, smoothing = self._recipe.accumulate, self._recipe.label_smoothing
        if mix is not None or smoothing:
            targets = shares(self._task, targets, self.config.num_classes, smoothing)
        repeats = self._recipe.augment.repeats  # which stand side by side: an image is not mixed with itself
        partners = (jnp.roll(images, repeats, axis=0), jnp.roll(targets, repeats, axis=0)) if mix is not None else None

        def objective(params: Tree, part: Any, noise: Array) -> tuple[Array, Array]:
            # Nothing is computed for the gradient of what is frozen, and of what lies ahead of it.
            params = jax.tree.map(lambda p, stays: jax.lax.stop_gradient(p) if stays else p, params, self._frozen)
            (images, targets), partners = part
            x = self._seen(images)
            if partners is not None:
                assert mix is not None
                x = mixed_images(mix, x, self._seen(partners[0]))
                targets = mixed_targets(mix, targets, partners[1])
            outputs = self._apply(params, x, train=True, rngs={"dropout": noise})
            loss, score = self._scored(outputs, targets)
            return loss.mean(), score.mean()

        differentiate = jax.value_and_grad(objective, has_aux=True)
        whole = ((images, targets), partners)
        if n == 1:
            return differentiate(params, whole, noise)

        def add(total: Any, numbered: tuple[Array, Any]) -> tuple[Any, None]:
            number, part = numbered
            return jax.tree.map(jnp.add, total, differentiate(params, part, jax.random.fold_in(noise, number))), None

        parts = jax.tree.map(lambda x: x.reshape(-1, n, *x.shape[1:]).swapaxes(0, 1), whole)
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(differentiate, params, whole, noise))
        total, _ = jax.lax.scan(add, nothing, (jnp.arange(n), parts))
        return jax.tree.map(lambda x: x / n, total)

    def _averaged(self, ema: Tree, params: Tree, step: Array) -> Tree:
        if ema is None:
            return None
        share = mean_share(step.astype(float), memory=self._recipe.ema)
        # In float32, 0.9999 mean + 0.0001 p is not p where the mean is: its two factors do not add up to 1.
        return jax.tree.map(lambda mean, p: (mean + share * (p - mean)).astype(p.dtype), ema, params)

    def _judged(self, params: Tree, images: Array, targets: Array, read: Array) -> tuple[Array, Array, Array]:
        outputs = self._apply(params, self._seen(images))
        return outputs, self._scored(outputs, targets)[0], read

    def _scored(self, outputs: Array, targets: Array) -> tuple[Array, Array]:
        return loss_and_score(self._task, outputs, targets, sigmoid=self._recipe.loss == "sigmoid")

    def _seen(self, images: Array) -> Array:
        """uint8 images as the network was made to see them: (x / 255 - mean) / std."""
        mean, std = jnp.asarray(self.config.pixels.mean), jnp.asarray(self.config.pixels.std)
        return (images.astype(mean.dtype) / 255 - mean) / std

    def _apply(self, params: Tree, x: Array, **options: Any) -> Array:
        """Run the model on its mesh; its matrices are rounded first, so that what devices send each other is narrow."""
        narrow = self._model.execution.dtype
        if narrow is not None:
            decays = tree(self.config, lambda parameter: parameter.row.decays)
            params = jax.tree.map(lambda p, matrix: p.astype(narrow) if matrix else p, params, decays)
        with sharding.held(self.mesh, self.config):
            return self._model.apply({"params": params}, x, **options)  # type: ignore[return-value]
