"""The engine of `train.loop` in JAX: the training state on a mesh of devices, and the compiled functions that use it."""

import json
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
from train.checkpoints.orbax_files import WARMED_UP_EMA, find_part, is_count
from train.checkpoints.training_state import TrainingState, without_placeholders
from train.data.augment import Mix, mix_images, mix_targets
from train.data.batches import Batch
from train.jax import one_cpu, sharding
from train.jax.checkpoints import CheckpointStore
from train.jax.cluster import check_same_on_all_processes
from train.jax.losses import loss_and_metric, soft_targets
from train.jax.optimizers import frozen_mask, make_optimizer, update_scales, zero_frozen
from train.jax.parameter_tree import Tree, path_names, tree
from train.jax.teacher import TeacherModel
from train.loop import heartbeat
from train.loop.checkpoint_folder import check_of_json, checkpoint_rank, parse_loop_state
from train.loop.engine import CheckpointCheck, EvalOutput, RestoredCheckpoint
from train.loop.loop_state import LoopState
from train.loop.metrics import BATCH_METRIC
from train.loop.peak_flops import peak_flops
from train.loop.process import release_freed_memory
from train.loop.teacher import Teacher
from train.mesh import describe, images_per_device, replication_note
from train.recipes import Recipe, Task
from train.recipes.param_groups import lr_multipliers
from train.recipes.schedule import ema_step_size
from vit_jax.compilation import fast_compile_options
from vit_jax.noise import random_key
from vit_spec import InputError, ViTConfig

Metrics = dict[str, Array]


class State(NamedTuple):
    """The training state: everything that a step changes.  Checkpoints store it under these names.

    params: the weights, a pytree as `vit_jax.init` returns it.
    moments: the optimizer state.
    ema: the exponential moving average of the weights, a pytree like `params`; None without one.
    step: number of steps done, int32.
    sound: False once a loss or a gradient norm was not finite, unless the recipe skips such steps.  Steps then change
        nothing.
    """

    params: Tree
    moments: Any
    ema: Tree
    step: Array
    sound: Array


class JaxEngine:
    """The engine of `train.loop` for a `vit_jax.ViT`: batch and training state are sharded over a mesh.

    See `train.loop.engine.Engine` for its members and `EngineFactory` for its arguments.  `learning_rate` is traced.

    Attributes:
        config: the model.
        mesh: the devices by axis.
        state: the training state, which a step replaces.
    """

    trainer = "train.jax"

    def __init__(
        self,
        config: ViTConfig,
        recipe: Recipe,
        *,
        task: Task,
        learning_rate: Callable[[Array], Array],
        initial_weights: Checkpoint | None,
        folder: Path,
        metadata: Mapping[str, Any] | None = None,
        class_weights: np.ndarray | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        """Prepare the first step.

        Raises:
            InputError: as for `make_mesh`, `images_per_device` and `shared_key`.
        """
        self.config, self._recipe, self._task, self._folder = config, recipe, task, folder
        self._learning_rate = learning_rate
        self.mesh = sharding.make_mesh(recipe.mesh, config)
        images_per_device(recipe.batch_size, recipe.accumulate, self.mesh.shape)
        self._seed_key = shared_key(recipe.seed) if recipe.rng == "shared" else random_key(recipe.seed)
        execution, self._parts = self._choose_execution()
        self._model = vit_jax.ViT(config, execution)
        self._optimizer = make_optimizer(recipe.optimizer, config, self.mesh)
        self._update_scales = update_scales(config, recipe.optimizer.layer_decay, recipe.optimizer.freeze)
        self._frozen_mask = frozen_mask(self._update_scales)
        self._batch_sharding = sharding.batch_sharding(self.mesh)
        self._replicated = NamedSharding(self.mesh, PartitionSpec())
        self._teacher = None if teacher is None else TeacherModel(teacher, config, recipe, self._replicated)
        self.state: State = self._make_state(initial_weights)
        self._checkpoints: CheckpointStore | None = None
        self._metadata, self._class_weights = metadata or {}, class_weights
        self._stop_polls = 0  # calls of `should_stop`

    @property
    def is_distributed(self) -> bool:
        """Whether the run has several processes."""
        return jax.process_count() > 1

    @property
    def _is_on_cpu(self) -> bool:
        return self.mesh.devices.flat[0].platform == "cpu"

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes the run folder."""
        return jax.process_index() == 0

    @property
    def hardware(self) -> str:
        """The mesh and its devices, as text."""
        return describe(self.mesh.shape, self.mesh.devices.flat[0].device_kind)

    @property
    def replication_note(self) -> str:
        """A line that names the parameters that stay replicated although the mesh should shard them; "" if they are few."""
        return replication_note(self.config, self.mesh.shape)

    @property
    def batch_rows(self) -> np.ndarray:
        """Indices of the images of a batch that this process loads, (B of this process,)."""
        return sharding.process_rows(self.mesh, self._recipe.batch_size)

    def step(self, batch: Batch) -> Metrics:
        """Start one training step and return its metrics: scalars that may not be computed yet."""
        placed = self._shard_batch(batch)
        with jax.transfer_guard("disallow"):
            self.state, metrics = self.compiled_step(self.state, *placed, *self._teacher_params)
        return metrics

    @property
    def has_ema(self) -> bool:
        """Whether there is an EMA of the weights."""
        return self.state.ema is not None

    def evaluate(self, batch: Batch, *, raw: bool = False) -> EvalOutput:
        """Return outputs (B, num_outputs), the loss of each image (B,), and whether it could be read (B,).

        raw: use the weights themselves, even if there is an EMA.
        """
        images, targets, _ = self._shard_batch(batch)
        readable = jax.make_array_from_process_local_data(self._batch_sharding, batch.readable)
        return EvalOutput(*self._compiled_eval(self._eval_params(raw), images, targets, readable))

    def attention_maps(self, images: np.ndarray) -> np.ndarray:
        """Return the attention weights of the last block, (N, heads, T, T), for images (N, H, W, C) uint8."""
        return np.asarray(self._compiled_attention(self._eval_params(), images))

    def save_weights(self, path: Path, *, raw: bool = False) -> None:
        """Write the weights that `evaluate` uses, with the config, as safetensors.  raw: as for `evaluate`."""
        weights = jax.tree.map(self._to_host, self._eval_params(raw))
        if self.is_main:
            parity.save(path, weights, self.config, format="jax", force=True, **self._metadata)

    def _eval_params(self, raw: bool = False) -> Tree:
        """Return the EMA of the weights if there is one and `raw` is False, else the weights."""
        return self.state.params if raw or self.state.ema is None else self.state.ema

    def save_checkpoint(self, step: int, loop_state: LoopState) -> None:
        """Start to write a checkpoint: the training state and the state of the loop."""
        rank = checkpoint_rank(self._task, loop_state)
        self._checkpoint_store.save(step, self.state, loop_state.to_json(), rank=rank)

    def adopt(self, state: TrainingState, loop_state: LoopState, folder: Path) -> None:
        """Take over the training state of a checkpoint of `train.torch`, and write it to a checkpoint in another folder."""
        state.check_moments(lr_multipliers(self.config, freeze=self._recipe.optimizer.freeze))
        self.state = self._from_training_state(state)
        store = CheckpointStore(folder, keep=2)  # the best and the newest
        rank = checkpoint_rank(self._task, loop_state)
        store.save(state.step, self.state, loop_state.to_json(), rank=rank)
        store.close()

    def _from_training_state(self, state: TrainingState) -> State:
        """Return a training state without a framework as this engine's, whose present arrays are deleted."""
        leaves, structure = jax.tree_util.tree_flatten_with_path(self.state)
        paths = [path_names(path) for path, _ in leaves]
        parts: dict[str, dict[str, Array]] = {}
        for path, (_, leaf) in zip(paths, leaves, strict=True):
            if found := find_part(path):
                parts.setdefault(found[0], {})[found[1]] = leaf
        moments = without_placeholders(parts, self.config, "jax")
        numbers = {"step": state.step, "sound": state.sound}

        def convert(path: tuple[str, ...], leaf: Array) -> Array:
            if (found := find_part(path)) and found[1] in moments[found[0]]:
                array = state.array(*found, "jax", leaf.dtype)
            elif is_count(path):
                array = np.full(leaf.shape, state.updates, leaf.dtype)
            elif path[0] in numbers:
                array = np.full(leaf.shape, numbers[path[0]], leaf.dtype)
            else:  # constants, and what optax stores in place of moments that a parameter does not have
                return leaf
            shape, placed = leaf.shape, leaf.sharding
            leaf.delete()  # the devices need not hold two states
            return jax.make_array_from_callback(shape, placed, array.__getitem__)

        return jax.tree.unflatten(structure, [convert(path, leaf) for path, (_, leaf) in zip(paths, leaves, strict=True)])

    def restore_checkpoint(
        self, step: int | None = None, *, check: CheckpointCheck | None = None
    ) -> RestoredCheckpoint | None:
        """Restore the newest readable checkpoint, or that of `step`; return its step and the loop's state, or None.

        check: see `train.loop.engine.Engine`.
        """
        check_json = check_of_json(self._task, check)
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.state)
        store = self._checkpoint_store
        restored = store.restore_newest(target, check_json) if step is None else store.restore(step, target, check_json)
        if restored is None:
            return None
        step, self.state, saved_state, version = restored
        note = ""
        if version < WARMED_UP_EMA and self.has_ema and ema_step_size(step, decay=self._recipe.ema) > 1 - self._recipe.ema:
            copied = jax.jit(lambda params: jax.tree.map(jnp.copy, params), out_shardings=self.shardings.params)
            self.state = self.state._replace(ema=copied(self.state.params))
            note = f"the EMA restarts at step {step:,}: an older version mixed the initial weights into it"
        return RestoredCheckpoint(step, parse_loop_state(self._task, saved_state), note)

    def profile(self, folder: Path | None) -> None:
        """Start JAX's profiler, which writes a trace for TensorBoard into `folder`; None: stop it."""
        if folder is None:
            jax.profiler.stop_trace()
        else:
            jax.profiler.start_trace(str(folder))

    @property
    def peak_flops(self) -> float | None:
        """Peak dense bfloat16 FLOP/s of all devices together; None if it is not known."""
        each = peak_flops(self.mesh.devices.flat[0].device_kind)
        return None if each is None else each * self.mesh.size

    def synchronize(self) -> None:
        """Wait until all processes of the run have called this method."""
        if self.is_distributed:
            multihost_utils.sync_global_devices("train.jax")

    def from_main(self, value: Any) -> Any:
        """Return the value that the main process gives; every process calls it."""
        if not self.is_distributed:
            return value
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        length = int(multihost_utils.broadcast_one_to_all(np.int32(len(text))))
        text = multihost_utils.broadcast_one_to_all(np.resize(text, length))  # all processes give arrays of one shape
        return json.loads(np.asarray(text).tobytes())

    def should_stop(self) -> bool:
        """Return whether all processes stop after this step because one received SIGTERM; called in each process."""
        # JAX agrees on a future number of calls, starting from 0, so calls are counted also in a resumed run.
        self._stop_polls += 1
        return self.is_distributed and bool(multihost_utils.reached_preemption_sync_point(self._stop_polls))

    def close(self) -> None:
        """Wait until all checkpoints are written."""
        if self._checkpoints is not None:
            self._checkpoints.close()
        heartbeat.stop()

    @property
    def _checkpoint_store(self) -> CheckpointStore:
        if self._checkpoints is None:
            self._checkpoints = CheckpointStore(self._folder, keep=self._recipe.keep)
        return self._checkpoints

    def _to_host(self, array: Array) -> np.ndarray:
        """Copy an array to the host.  Copy one at a time, because each is replicated on every device meanwhile."""
        return np.asarray(
            array if array.is_fully_addressable else jax.jit(lambda x: x, out_shardings=self._replicated)(array)
        )

    def _shard_batch(self, batch: Batch) -> tuple[Array, Array, Any]:
        def shard(local: np.ndarray) -> Array:
            return jax.make_array_from_process_local_data(self._batch_sharding, local)

        images, targets = shard(batch.images), shard(batch.targets)
        placed = images, targets, sharding.place(batch.mix, self._replicated)
        # While inputs are copied, jax starts a computation in another thread, which does not keep its memory; see
        # `train.jax.runtime.keep_freed_memory`.
        return jax.block_until_ready(placed) if self._is_on_cpu else placed

    def _choose_execution(self) -> tuple[vit_jax.Execution, int]:
        """Return how the model is computed, and in how many parts the gradient of a batch."""
        recipe = self._recipe
        dtype = jnp.bfloat16 if recipe.dtype == "bfloat16" else None
        # By default jax rounds the operands of float32 products on GPUs (TF32) and TPUs, which PyTorch does not.
        precision = "highest" if dtype is None else None
        parts, unroll = recipe.accumulate, None
        if any(self.mesh.shape[axis] > 1 for axis in ("fsdp", "tensor")):
            unroll = 1  # in a loop, matrices that are sharded are gathered for one block at a time
        elif self.mesh.size == 1 and self._is_on_cpu:
            parts, unroll = one_cpu.num_parts(self.config, recipe), one_cpu.blocks_per_iteration(self.config, recipe)
        return vit_jax.Execution(dtype=dtype, precision=precision, remat=recipe.remat, unroll=unroll), parts

    # The training state ------------------------------------------------------------------------------------------

    @cached_property
    def shardings(self) -> State:
        """The sharding of each array of the state."""
        shapes = jax.eval_shape(self._initial_state, None)
        params = sharding.parameter_shardings(self.mesh, self.config)
        known = jax.tree.map(lambda leaf, placed: (leaf.shape, placed), shapes.params, params)
        return State(*(sharding.shardings_like_parameters(part, known) for part in shapes))

    def _make_state(self, start: Checkpoint | None) -> State:
        """Return the initial state.  It is created sharded: no device ever holds all of it."""
        params = None
        if start is not None:
            float32 = jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), parity.to_jax(start))
            check_same_on_all_processes(float32, "the initial weights")
            params = sharding.place(float32, self.shardings.params)
        return jax.jit(self._initial_state, out_shardings=self.shardings, compiler_options=fast_compile_options())(params)

    def _initial_state(self, start: Tree | None) -> State:
        params = vit_jax.init(self.config, self._recipe.seed) if start is None else start
        ema = params if self._recipe.ema else None
        return State(params, self._optimizer.init(params), ema, jnp.zeros((), jnp.int32), jnp.ones((), bool))

    @property
    def _teacher_params(self) -> tuple[Tree, ...]:
        """The last argument of a step, if there is a teacher."""
        return () if self._teacher is None else (self._teacher.params,)

    # Compiled functions ------------------------------------------------------------------------------------------

    @cached_property
    def compiled_step(self) -> Callable[..., tuple[State, Metrics]]:
        """The training step, compiled once: a batch of another shape is an error, not a second compilation."""
        jitted = jax.jit(
            self._train,
            donate_argnums=0,
            in_shardings=(
                *(self.shardings, self._batch_sharding, self._batch_sharding, self._replicated),
                *(self._replicated for _ in self._teacher_params),
            ),
            out_shardings=(self.shardings, self._replicated),
            compiler_options=self._compiler_options(self._recipe.batch_size // self._parts),
        )
        compiled = jitted.lower(*self.shapes).compile()
        release_freed_memory()
        return compiled

    @cached_property
    def _compiled_eval(self) -> Callable[..., tuple[Array, ...]]:
        return jax.jit(
            self._eval_step,
            in_shardings=(self.shardings.params, self._batch_sharding, self._batch_sharding, self._batch_sharding),
            out_shardings=self._replicated,
            compiler_options=self._compiler_options(self._recipe.batch_size),
        )

    def _compiler_options(self, images: int) -> dict[str, Any] | None:
        """Return the options for programs that compute this many images at a time, on one device."""
        return vit_jax.compiler_options(self.config, images) if self.mesh.size == 1 else None

    @cached_property
    def _compiled_attention(self) -> Callable[..., Array]:
        def attend(params: Tree, images: Array) -> Array:
            return vit_jax.attention_maps(self._model, params, vit_jax.normalize(images, self.config.pixels))

        return jax.jit(attend, out_shardings=self._replicated, compiler_options=fast_compile_options())

    @property
    def shapes(self) -> tuple[Any, ...]:
        """Shapes and dtypes of the arguments of a step: state, images, targets, mixing, and the teacher if there is one."""
        b, (height, width), channels = self._recipe.batch_size, self.config.image_size, self.config.in_channels
        is_class = self._task == "classes"
        targets = jax.ShapeDtypeStruct(*(((b,), np.int32) if is_class else ((b, self.config.num_classes), np.float32)))
        images = jax.ShapeDtypeStruct((b, height, width, channels), np.uint8)
        one, box = jax.ShapeDtypeStruct((), np.float32), jax.ShapeDtypeStruct((4,), np.int32)
        mix = Mix(one, box, one) if self._recipe.augment.mixes else None  # type: ignore[arg-type]
        state, *teacher = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (self.state, *self._teacher_params)
        )
        return state, images, targets, mix, *teacher

    def _train(
        self, state: State, images: Array, targets: Array, mix: Mix | None, teacher: Tree = None
    ) -> tuple[State, Metrics]:
        key = jax.random.fold_in(self._seed_key, state.step)
        (loss, metric), grads = self._loss_and_gradient(state.params, images, targets, mix, key, teacher)
        # The backward pass also computes the gradients of blocks that are frozen while others of their stack are not.
        norm = optax.tree.norm(zero_frozen(grads, self._update_scales) if self._recipe.optimizer.freeze else grads)
        rate = jnp.asarray(self._learning_rate(state.step), float)  # float32, or float64 in JAX's x64 mode
        sound = state.sound & jnp.isfinite(loss) & jnp.isfinite(norm)
        updates, moments = self._optimizer.update(grads, state.moments, state.params, rate=rate, sound=sound)
        params = optax.apply_updates(state.params, updates)
        updated = State(params, moments, self._update_ema(state.ema, params, state.step + 1), state.step + 1, sound)
        skip = self._recipe.non_finite == "skip"
        # The optimizer has kept its moments already: it updates them in place.
        unchanged = state._replace(moments=moments, step=state.step + skip, sound=state.sound & skip)
        state = jax.tree.map(lambda new, old: jnp.where(sound, new, old), updated, unchanged)
        metrics = {"loss": loss, BATCH_METRIC[self._task]: metric, "grad_norm": norm, "lr": rate}
        return state, metrics

    def _loss_and_gradient(
        self, params: Tree, images: Array, targets: Array, mix: Mix | None, key: Array, teacher: Tree
    ) -> tuple[tuple[Array, Array], Tree]:
        """Return the mean loss and metric of a batch and the gradient of the loss, accumulated over n parts.

        Part j has the images j, j + n, j + 2n, ..., so that each part has equally many images of each device.
        """
        n, smoothing = self._parts, self._recipe.label_smoothing
        if mix is not None or smoothing:
            targets = soft_targets(self._task, targets, self.config.num_classes, smoothing)
        repeats = self._recipe.augment.repeats  # repeats of an image are adjacent: no image is mixed with itself
        partners = (jnp.roll(images, repeats, axis=0), jnp.roll(targets, repeats, axis=0)) if mix is not None else None

        def objective(params: Tree, part: Any, key: Array) -> tuple[Array, Array]:
            # So the backward pass computes no gradients of frozen parameters, and ends where all earlier ones are frozen.
            params = jax.tree.map(
                lambda p, is_frozen: jax.lax.stop_gradient(p) if is_frozen else p, params, self._frozen_mask
            )
            (images, targets), partners = part
            x = vit_jax.normalize(images, self.config.pixels)
            if partners is not None:
                assert mix is not None
                x = mix_images(mix, x, vit_jax.normalize(partners[0], self.config.pixels))
                targets = mix_targets(mix, targets, partners[1])
            weights = None if self._class_weights is None else jnp.asarray(self._class_weights)
            if self._teacher is None:
                outputs = self._apply(params, x, train=True, key=key)
                loss, metric = self._loss_and_metric(outputs, targets, weights)
                return loss.mean(), metric.mean()
            has_two = self.config.tokens.distillation
            outputs = self._apply(params, x, train=True, key=key, both_heads=has_two)
            first, second = jnp.unstack(outputs, axis=1) if has_two else (outputs, outputs)
            loss = self._loss_and_metric(first, targets, weights)[0]
            metric = self._loss_and_metric((first + second) / 2, targets)[1]
            return self._teacher.add_loss(teacher, loss, x, second).mean(), metric.mean()

        differentiate = jax.value_and_grad(objective, has_aux=True)
        whole = ((images, targets), partners)
        if n == 1:
            return differentiate(params, whole, key)

        def add(total: Any, numbered: tuple[Array, Any]) -> tuple[Any, None]:
            number, part = numbered
            return jax.tree.map(jnp.add, total, differentiate(params, part, jax.random.fold_in(key, number))), None

        parts = jax.tree.map(lambda x: x.reshape(-1, n, *x.shape[1:]).swapaxes(0, 1), whole)
        shapes = jax.eval_shape(objective, params, whole, key), params  # the gradient has the shapes of the parameters
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        total, _ = jax.lax.scan(add, zeros, (jnp.arange(n), parts))
        return jax.tree.map(lambda x: x / n, total)

    def _update_ema(self, ema: Tree, params: Tree, step: Array) -> Tree:
        if ema is None:
            return None
        step_size = ema_step_size(step.astype(float), decay=self._recipe.ema)
        # Not 0.9999 ema + 0.0001 p: in float32 these factors do not add up to 1, so the EMA of a constant p would drift.
        return jax.tree.map(lambda average, p: (average + step_size * (p - average)).astype(p.dtype), ema, params)

    def _eval_step(self, params: Tree, images: Array, targets: Array, readable: Array) -> tuple[Array, Array, Array]:
        outputs = self._apply(params, vit_jax.normalize(images, self.config.pixels))
        return outputs, self._loss_and_metric(outputs, targets)[0], readable

    def _loss_and_metric(self, outputs: Array, targets: Array, weights: Array | None = None) -> tuple[Array, Array]:
        return loss_and_metric(self._task, outputs, targets, sigmoid=self._recipe.loss == "sigmoid", weights=weights)

    def _apply(self, params: Tree, x: Array, **options: Any) -> Array:
        """Apply the model on the mesh.  In mixed precision, matrices are rounded to bfloat16 before they are gathered."""
        dtype = self._model.execution.dtype
        if dtype is not None:
            decays = tree(self.config, lambda parameter: parameter.row.decays)
            params = jax.tree.map(lambda p, is_matrix: p.astype(dtype) if is_matrix else p, params, decays)
        with sharding.constrain_modules(self.mesh, self.config, self._recipe.remat):
            return self._model.apply({"params": params}, x, **options)  # type: ignore[return-value]


def shared_key(seed: int) -> Array:
    """Return the key of a seed for `--rng shared`, whatever jax's default generator is.

    Raises:
        InputError: jax is set to draw other random numbers.
    """
    if not jax.config.jax_threefry_partitionable:  # type: ignore[attr-defined]
        raise InputError(
            "--rng shared needs jax_threefry_partitionable, which is off: leave JAX_THREEFRY_PARTITIONABLE unset"
        )
    return random_key(seed, impl="threefry2x32")
