"""The engine of `train.loop` in PyTorch: the training state on a mesh of processes, and the step that changes it."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

import parity
import vit_torch
from parity.checkpoints.weights import Checkpoint
from train.checkpoints.training_state import TrainingState, without_placeholders
from train.data.augment import Mix, mix_images, mix_targets
from train.data.batches import Batch
from train.loop import heartbeat
from train.loop.checkpoint_folder import check_of_json, checkpoint_rank, parse_loop_state
from train.loop.engine import CheckpointCheck, EvalOutput, RestoredCheckpoint
from train.loop.loop_state import LoopState
from train.loop.metrics import BATCH_METRIC
from train.loop.peak_flops import peak_flops
from train.loop.teacher import Teacher
from train.mesh import describe, images_per_device, replication_note
from train.recipes import Recipe, Task
from train.recipes.param_groups import lr_multipliers
from train.recipes.schedule import ema_step_size
from train.torch.checkpoints import CheckpointStore, Snapshot
from train.torch.losses import loss_and_metric, soft_targets
from train.torch.optimizers import make_optimizer, multiplier_of_each
from train.torch.preemption import Preemption
from train.torch.sharding import Placement, ProcessMesh, local
from train.torch.teacher import TeacherModel
from train.torch.tensor_groups import tensor_groups
from train.torch.tensor_support import check_tensor_support
from vit_spec import ViTConfig
from vit_torch.noise import fold_in

Metrics = dict[str, Tensor]


class State(NamedTuple):
    """The training state: everything that a step changes, besides the weights in the model and the optimizer's moments.

    ema: the exponential moving average of the weights, by name; None without one.
    sound: False after a step that was not finite has stopped the run; a scalar on the device.
    step: number of steps done.
    """

    ema: dict[str, Tensor] | None
    sound: Tensor
    step: int = 0


class TorchEngine:
    """The training state of the PyTorch twin, and what changes and evaluates it.

    `train.loop.engine.Engine` describes its members, and `EngineFactory` its arguments.

    Attributes:
        config: the model.
        mesh: the processes by axis.
        state: what a step changes besides the weights and the optimizer's state.
    """

    trainer = "train.torch"

    def __init__(
        self,
        config: ViTConfig,
        recipe: Recipe,
        *,
        task: Task,
        learning_rate: Callable[[Any], Any],
        initial_weights: Checkpoint | None,
        folder: Path,
        metadata: Mapping[str, Any] | None = None,
        class_weights: np.ndarray | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        """Prepare the first step.

        Raises:
            InputError: as for `ProcessMesh`, `train.mesh.images_per_device` and `check_tensor_support`.
        """
        self.config, self._recipe, self._task, self._folder = config, recipe, task, folder
        self._learning_rate, self._metadata = learning_rate, metadata or {}
        self.mesh = ProcessMesh(recipe.mesh, config)
        images_per_device(recipe.batch_size, recipe.accumulate, self.mesh.sizes)
        if self.mesh.sizes["tensor"] > 1:
            check_tensor_support(config, recipe)
        self._device = self.mesh.device
        self._class_weights = None if class_weights is None else torch.tensor(class_weights, device=self._device)
        dtype = torch.bfloat16 if recipe.dtype == "bfloat16" else None
        self._execution = vit_torch.Execution(dtype=dtype, remat=recipe.remat)
        self._model = self._make_model(initial_weights)
        self._ema_model = self._make_ema_model() if recipe.ema else None
        multipliers = multiplier_of_each(recipe.optimizer, config)
        for name, parameter in self._model.named_parameters():
            parameter.requires_grad_(multipliers[name] > 0)
        self._teacher = None if teacher is None else TeacherModel(teacher, config, recipe, dtype, self._device)
        self._is_compiled = recipe.compile == "on" or (recipe.compile == "auto" and self._device.type == "cuda")
        self._forward = self._make_forward()
        self._params = dict(self._model.named_parameters())
        self._optimizer = make_optimizer(recipe.optimizer, config, self._params, self.mesh)
        ema = None if self._ema_model is None else {name: local(p) for name, p in self._ema_model.named_parameters()}
        self.state = State(ema, torch.ones((), dtype=torch.bool, device=self._device))
        self._checkpoints: CheckpointStore | None = None
        self._profiler: torch.profiler.profile | None = None
        self._preemption = Preemption() if self.is_distributed else None

    @property
    def is_distributed(self) -> bool:
        """Whether the run has several processes."""
        return math.prod(self.mesh.sizes.values()) > 1

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes the run folder."""
        return self.mesh.is_main

    @property
    def hardware(self) -> str:
        """The mesh and its devices, as text."""
        return describe(self.mesh.sizes, self._device_name) + ", compiled" * self._is_compiled

    @property
    def peak_flops(self) -> float | None:
        """Peak dense bfloat16 FLOP/s of all devices together; None if it is not known."""
        each = peak_flops(self._device_name)
        return None if each is None else each * math.prod(self.mesh.sizes.values())

    @property
    def _device_name(self) -> str:
        return torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else self._device.type

    @property
    def replication_note(self) -> str:
        """A line that names the parameters that stay replicated although the mesh should shard them; "" if they are few."""
        return replication_note(self.config, self.mesh.sizes)

    @property
    def batch_rows(self) -> np.ndarray:
        """Indices of the images of a batch that this process loads, (B of this process,)."""
        return self.mesh.rows(self._recipe.batch_size)

    def _make_model(self, start: Checkpoint | None) -> vit_torch.ViT:
        """Return the model with its initial weights, on the CPU: the same in every process."""
        if start is None:
            torch.manual_seed(self._recipe.seed)
            return vit_torch.ViT(self.config, self._execution)
        return self._model_of(
            {
                name: tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
                for name, tensor in parity.to_torch(start).items()
            }
        )

    def _model_of(self, weights: dict[str, Tensor]) -> vit_torch.ViT:
        """Return a model whose parameters are these tensors."""
        with torch.device("meta"):  # no weights are initialized: `load_state_dict` assigns them
            model = vit_torch.ViT(self.config, self._execution)
        model.load_state_dict(weights, assign=True)
        return model

    def _make_ema_model(self) -> vit_torch.ViT:
        """Return a model with the EMA of the weights, at first the weights themselves, which are not distributed yet."""
        model = self._model_of({name: p.detach().clone() for name, p in self._model.named_parameters()})
        model.requires_grad_(False)
        self.mesh.distribute(model, self._execution.dtype)
        return model

    def _make_forward(self) -> torch.nn.Module:
        """Distribute the model, and return the module to call in a training step, compiled if `_is_compiled`."""
        # Compiled whole, a step of ViT-S/16 on an H100 takes 0.89 of its time with compiled blocks, but all blocks take as
        # long to compile as they are many.  Blocks that are gathered or computed again are compiled by themselves, once.
        is_once = self._recipe.remat == "none" and not self.is_distributed
        is_whole = self._is_compiled and self._device.type == "cuda" and is_once
        if self._is_compiled:
            for block in (
                *(() if is_whole else self._model.blocks),
                *(self._teacher.model.blocks if self._teacher else ()),
            ):
                block.compile()
        forward = self.mesh.distribute(self._model, self._execution.dtype)
        return cast(torch.nn.Module, torch.compile(forward)) if is_whole else forward

    @property
    def has_ema(self) -> bool:
        """Whether there is an EMA of the weights."""
        return self.state.ema is not None

    def step(self, batch: Batch) -> Metrics:
        """Start one training step and return its metrics: scalars that may not be computed yet."""
        images, targets, mix = self._place(batch)
        step = self.state.step
        self._model.train()
        loss, metric = self._loss_and_gradient(images, targets, mix, step)
        rate = float(self._learning_rate(step))
        norm, sound = self._optimizer.step(rate, self.state.sound & loss.isfinite())
        self._update_ema(step + 1, sound)
        # After a step that has stopped the run, no step changes anything, whatever its number.
        self.state = self.state._replace(step=step + 1, sound=sound | (self._recipe.non_finite == "skip"))
        return {"loss": loss, BATCH_METRIC[self._task]: metric, "grad_norm": norm, "lr": torch.tensor(rate)}

    def _loss_and_gradient(self, images: Tensor, targets: Tensor, mix: Mix | None, step: int) -> tuple[Tensor, Tensor]:
        """Compute the mean loss and metric of a batch, and leave the gradient of the loss in `.grad`.

        Part j of `accumulate` has the images j, j + n, j + 2n, ....
        """
        n, smoothing = self._recipe.accumulate, self._recipe.label_smoothing
        if mix is not None or smoothing:
            targets = soft_targets(self._task, targets, self.config.num_classes, smoothing)
        repeats = self._recipe.augment.repeats  # repeats of an image are adjacent: no image is mixed with itself
        partners = [self.mesh.roll(each, repeats) for each in (images, targets)] if mix is not None else None
        for parameter in self._params.values():
            parameter.grad = None
        losses, metrics = [], []
        for j in range(n):
            key = self._random_numbers(step, j)
            x, y = self._normalize(images[j::n]), targets[j::n]
            if mix is not None and partners is not None:
                x = mix_images(mix, x, self._normalize(partners[0][j::n]))
                y = mix_targets(mix, y, partners[1][j::n])
            with self.mesh.gradients(self._forward, is_last=j == n - 1):
                loss, metric = self._loss_of_images(x.permute(0, 3, 1, 2), y, key)
                (loss.mean() / n).backward()
            losses.append(loss.detach().mean())
            metrics.append(metric.detach().mean())
        means = self.mesh.mean(torch.stack([torch.stack(losses).mean(), torch.stack(metrics).mean()]))
        return means[0], means[1]

    def _loss_of_images(self, x: Tensor, targets: Tensor, key: vit_torch.Key | None) -> tuple[Tensor, Tensor]:
        """Return the training loss and the metric of each image, (B,) and (B,).  x: the input of the model, mixed."""
        if self._teacher is None:
            return self._loss_and_metric(self._forward(x, key), targets, self._class_weights)
        has_two = self.config.tokens.distillation
        outputs = self._forward(x, key, has_two)
        first, second = outputs.unbind(1) if has_two else (outputs, outputs)
        loss = self._loss_and_metric(first, targets, self._class_weights)[0]
        metric = self._loss_and_metric((first + second) / 2, targets)[1]
        return self._teacher.add_loss(loss, x, second), metric

    def _random_numbers(self, step: int, part: int) -> vit_torch.Key | None:
        """Return the key of a part of a step for `--rng shared`; without, seed PyTorch's generator and return None."""
        recipe, mesh = self._recipe, self.mesh
        if recipe.rng == "own":
            torch.manual_seed(_seed(recipe.seed, step, part, mesh.index))
            return None
        key = fold_in(vit_torch.random_key(recipe.seed, device=self._device), step)
        key = fold_in(key, part) if recipe.accumulate > 1 else key
        first_image = mesh.index * (recipe.batch_size // mesh.count // recipe.accumulate)
        return vit_torch.Key(key, first_image, mesh.tensor_index, mesh.sizes["tensor"])

    @torch.no_grad()
    def _update_ema(self, step: int, sound: Tensor) -> None:
        if self.state.ema is not None:
            step_size = float(ema_step_size(step, decay=self._recipe.ema))
            # ema + c (p - ema), as in `train.jax`; torch's lerp computes that where c is below 0.5.
            averages = [*self.state.ema.values()]
            weights = [self._optimizer.placements[name].entries for name in self.state.ema]
            step_size_if_sound = sound.to(averages[0].dtype) * step_size
            for own_weights, own_averages in tensor_groups(weights, averages):
                differences = torch._foreach_sub(own_weights, own_averages)
                torch._foreach_mul_(differences, step_size_if_sound)
                torch._foreach_add_(own_averages, differences)
                del differences  # before the next group has its own

    @torch.no_grad()
    def evaluate(self, batch: Batch, *, raw: bool = False) -> EvalOutput:
        """Return outputs (B, num_outputs), the loss of each image (B,), and whether it could be read (B,).

        raw: use the weights themselves, even if there is an EMA.
        """
        images, targets, _ = self._place(batch)
        model = self._eval_model(raw)
        outputs = model(self._to_input(images))
        self.mesh.reshard(model)
        loss = self._loss_and_metric(outputs, targets)[0]
        wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        readable = torch.tensor(batch.readable, device=self._device)
        return EvalOutput(*(self.mesh.gather_rows(each).cpu() for each in (wide, loss, readable)))

    @torch.no_grad()
    def attention_maps(self, images: np.ndarray) -> np.ndarray:
        """Return the attention weights of the last block, (N, heads, T, T), for images (N, H, W, C) uint8."""
        x = self._to_input(torch.tensor(images, device=self._device))
        return vit_torch.attention_maps(self._eval_model(), x).cpu().numpy()

    def save_weights(self, path: Path, *, raw: bool = False) -> None:
        """Write the weights that `evaluate` uses, with the config, as safetensors.  raw: as for `evaluate`."""
        means = {} if raw else self.state.ema or {}
        places = self._optimizer.placements.items()
        weights = {name: place.full(means.get(name, place.entries)).cpu() for name, place in places}
        if self.is_main:
            parity.save(path, weights, self.config, format="torch", force=True, **self._metadata)

    def save_checkpoint(self, step: int, loop_state: LoopState) -> None:
        """Start to write a checkpoint: the training state and the state of the loop."""
        rank = checkpoint_rank(self._task, loop_state)
        self._checkpoint_store.save(step, self._snapshot, loop_state.to_json(), rank=rank)

    def adopt(self, state: TrainingState, loop_state: LoopState, folder: Path) -> None:
        """Take over the training state of a checkpoint of `train.jax`, and write it to a checkpoint in another folder."""
        state.check_moments(lr_multipliers(self.config, freeze=self._recipe.optimizer.freeze))
        tensors, parts = self._tensors(), dict[str, dict[str, Tensor]]()
        for name, (_, entries) in tensors.items():
            part, _, key = name.partition(".")
            parts.setdefault(part, {})[key] = entries
        for part, found in without_placeholders(parts, self.config, "torch").items():
            for key, entries in found.items():
                place, whole = tensors[f"{part}.{key}"][0], torch.from_numpy(state.array(part, key, "torch", entries.dtype))
                with torch.no_grad():  # factored moments are the same in all processes
                    entries.copy_(place.own(whole) if entries.shape == place.entries.shape else whole)
        self._set_numbers(state.step, state.updates, state.sound)
        store = CheckpointStore(folder, keep=2)  # the best and the newest
        rank = checkpoint_rank(self._task, loop_state)
        store.save(state.step, self._snapshot, loop_state.to_json(), rank=rank)
        store.close()

    def restore_checkpoint(
        self, step: int | None = None, *, check: CheckpointCheck | None = None
    ) -> RestoredCheckpoint | None:
        """Restore the newest readable checkpoint, or that of `step`; return its step and the loop's state, or None.

        check: see `train.loop.engine.Engine`.
        """
        check_json = check_of_json(self._task, check)
        store, target = self._checkpoint_store, self._snapshot(is_empty=True)
        restored = store.restore_newest(target, check_json) if step is None else store.restore(step, target, check_json)
        if restored is None:
            return None
        step, snapshot, saved_state = restored
        with torch.no_grad():
            for name, (place, entries) in self._tensors().items():
                saved = local(snapshot.tensors[name])
                # Factored moments are the same in all processes.
                entries.copy_(place.part(saved) if entries.shape == place.entries.shape else saved)
        self._set_numbers(step, **snapshot.numbers)
        return RestoredCheckpoint(step, parse_loop_state(self._task, saved_state))

    def _set_numbers(self, step: int, updates: int, sound: int) -> None:
        self._optimizer.updates.fill_(updates)
        self.state = self.state._replace(step=step, sound=torch.full_like(self.state.sound, sound))

    def _tensors(self) -> dict[str, tuple[Placement, Tensor]]:
        """Return the tensors of the training state by names that begin with those of the parts.

        Each is the entries on this process, with the placement of the parameter that it belongs to.
        """
        places, optimizer = self._optimizer.placements, self._optimizer
        found = {f"params.{name}": (place, place.entries) for name, place in places.items()}
        for kind, moments in optimizer.moments.items():
            named = zip(optimizer.names, moments, strict=True)
            found |= {f"{kind}.{name}": (places[name], entries) for name, entries in named}
        if self.state.ema is not None:
            found |= {f"ema.{name}": (places[name], entries) for name, entries in self.state.ema.items()}
        return found

    def _snapshot(self, *, is_empty: bool = False) -> Snapshot:
        """Return a copy of the training state on the host, without division along `tensor`.

        A device gathers one tensor at a time.

        is_empty: leave the tensors uninitialized.
        """
        tensors = {
            name: place.empty_on_host(entries) if is_empty else place.copy_to_host(entries)
            for name, (place, entries) in self._tensors().items()
        }
        return Snapshot(tensors, {"updates": int(self._optimizer.updates), "sound": int(self.state.sound)})

    def profile(self, folder: Path | None) -> None:
        """Start PyTorch's profiler, which writes a trace for TensorBoard into `folder`; None: stop it."""
        if folder is not None:
            write = torch.profiler.tensorboard_trace_handler(str(folder))
            self._profiler = torch.profiler.profile(on_trace_ready=write)
            self._profiler.start()
        elif self._profiler is not None:
            self._profiler.stop()

    def synchronize(self) -> None:
        """Wait until all processes of the run have called this method."""
        self.mesh.synchronize()

    def from_main(self, value: Any) -> Any:
        """Return the value that the main process gives; every process calls it."""
        return self.mesh.from_main(value)

    def should_stop(self) -> bool:
        """Return whether all processes stop after this step because one received SIGTERM; called in each process."""
        return self._preemption is not None and self._preemption.should_stop()

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

    def _eval_model(self, raw: bool = False) -> vit_torch.ViT:
        """Return the model with the EMA of the weights if there is one and `raw` is False, else that with the weights."""
        return (self._model if raw or self._ema_model is None else self._ema_model).eval()

    def _place(self, batch: Batch) -> tuple[Tensor, Tensor, Mix | None]:
        """Return images, targets and mixing on the device; class numbers are int64."""
        images, targets = self._to_device(batch.images), self._to_device(batch.targets)
        targets = targets.long() if self._task == "classes" else targets
        on_device: list[Any] = [self._to_device(np.asarray(x)) for x in batch.mix or ()]
        mix = Mix(*on_device) if on_device else None
        return images, targets, mix

    def _to_device(self, array: np.ndarray) -> Tensor:
        """Copy an array to the device.  To a GPU it is sent from pinned memory, which does not wait for earlier work."""
        if self._device.type == "cpu":
            return torch.tensor(array)
        pinned = torch.empty(array.shape, dtype=torch.from_numpy(np.empty(0, array.dtype)).dtype, pin_memory=True)
        pinned.numpy()[...] = array
        return pinned.to(self._device, non_blocking=True)

    def _loss_and_metric(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return loss_and_metric(self._task, outputs, targets, sigmoid=self._recipe.loss == "sigmoid", weights=weights)

    def _to_input(self, images: Tensor) -> Tensor:
        """Return the input of the model, (B, C, H, W), for images (B, H, W, C) uint8."""
        return self._normalize(images).permute(0, 3, 1, 2)

    def _normalize(self, images: Tensor) -> Tensor:
        """Normalize images (B, H, W, C) uint8."""
        return vit_torch.normalize(images, self.config.pixels, channel_dim=-1)


def _seed(seed: int, step: int, part: int, process: int) -> int:
    """Return the seed of the model's random numbers in a part of a step, for the images of a process."""
    return int(np.random.SeedSequence((seed, step, part, process)).generate_state(1, np.uint64)[0] >> np.uint64(1))
