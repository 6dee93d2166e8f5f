"""The engine of `train.loop` in PyTorch: the training state on one device, and the step that changes it."""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import parity
import vit_torch
from parity.checkpoints.weights import Checkpoint
from train.data.augment import Mix, mix_images, mix_targets
from train.data.batches import Batch
from train.loop.checkpoint_folder import checkpoint_rank
from train.loop.engine import EvalOutput, LoopState
from train.loop.metrics import BATCH_METRIC
from train.loop.peak_flops import peak_flops
from train.mesh import axis_sizes, describe, images_per_device, replication_note
from train.recipes import Recipe, Task
from train.recipes.schedule import ema_step_size
from train.torch.checkpoints import CheckpointStore, Snapshot
from train.torch.losses import loss_and_metric, soft_targets
from train.torch.optimizers import make_optimizer
from vit_spec import InputError, ViTConfig

Metrics = dict[str, Tensor]


class State(NamedTuple):
    """The training state: everything that a step changes, besides the weights in the model and the optimizer's moments.

    ema: the exponential moving average of the weights, by name; None without one.
    step: number of steps done.
    sound: False after a step that was not finite has stopped the run.
    """

    ema: dict[str, Tensor] | None
    step: int = 0
    sound: bool = True


class TorchEngine:
    """The training state of the PyTorch twin, and what changes and evaluates it.

    `train.loop.engine.Engine` describes its members, and `EngineFactory` its arguments.
    """

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
    ) -> None:
        """Prepare the first step.

        Raises:
            InputError: the mesh has several devices, or the batch is one that `accumulate` does not divide.
        """
        self.config, self._recipe, self._task, self._folder = config, recipe, task, folder
        self._learning_rate, self._metadata = learning_rate, metadata or {}
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise InputError("train.torch runs in one process: start it without torchrun")
        self._sizes = axis_sizes(recipe.mesh, 1, config)
        images_per_device(recipe.batch_size, recipe.accumulate, self._sizes)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dtype = torch.bfloat16 if recipe.dtype == "bfloat16" else None
        self._execution = vit_torch.Execution(dtype=dtype, remat=recipe.remat)
        self._model = self._make_model(initial_weights)
        self._params = dict(self._model.named_parameters())
        self._optimizer = make_optimizer(recipe.optimizer, config, self._params)
        trained = set(self._optimizer.names)
        for name, parameter in self._params.items():
            parameter.requires_grad_(name in trained)
        ema = {name: p.detach().clone() for name, p in self._params.items()} if recipe.ema else None
        self._mean_model = self._model if ema is None else self._model_of(ema)
        self._state = State(ema)
        self._checkpoints: CheckpointStore | None = None
        self._profiler: torch.profiler.profile | None = None

    is_distributed, is_main = False, True

    @property
    def hardware(self) -> str:
        """The mesh and its devices, as text."""
        return describe(self._sizes, self._device_name)

    @property
    def peak_flops(self) -> float | None:
        """Peak dense bfloat16 FLOP/s of the device; None if it is not known."""
        return peak_flops(self._device_name)

    @property
    def _device_name(self) -> str:
        return torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else self._device.type

    @property
    def replication_note(self) -> str:
        """A line that names the parameters that stay replicated although the mesh should shard them; "" if they are few."""
        return replication_note(self.config, self._sizes)

    @property
    def batch_rows(self) -> np.ndarray:
        """Indices of the images of a batch that this process loads, (B of this process,)."""
        return np.arange(self._recipe.batch_size)

    def _make_model(self, start: Checkpoint | None) -> vit_torch.ViT:
        if start is None:
            torch.manual_seed(self._recipe.seed)
            return vit_torch.ViT(self.config, self._execution).to(self._device)
        return self._model_of(
            {
                name: tensor.to(self._device, torch.promote_types(tensor.dtype, torch.float32), copy=True)
                for name, tensor in parity.to_torch(start).items()
            }
        )

    def _model_of(self, weights: dict[str, Tensor]) -> vit_torch.ViT:
        """Return a model whose parameters are these tensors."""
        with torch.device("meta"):  # no weights are initialized: `load_state_dict` assigns them
            model = vit_torch.ViT(self.config, self._execution)
        model.load_state_dict(weights, assign=True)
        return model

    @property
    def has_ema(self) -> bool:
        """Whether there is an EMA of the weights."""
        return self._state.ema is not None

    def step(self, batch: Batch) -> Metrics:
        """Do one training step, and return its metrics, scalars."""
        images, targets, mix = self._place(batch)
        step = self._state.step
        self._model.train()
        loss, metric = self._loss_and_gradient(images, targets, mix, step)
        rate = float(self._learning_rate(step))
        sound = self._state.sound and bool(loss.isfinite())
        norm = self._optimizer.step(rate, sound)
        sound = sound and bool(norm.isfinite())
        skip = self._recipe.non_finite == "skip"
        if sound:
            self._update_ema(step + 1)
        self._state = self._state._replace(step=step + (sound or skip), sound=self._state.sound and (sound or skip))
        return {"loss": loss, BATCH_METRIC[self._task]: metric, "grad_norm": norm, "lr": torch.tensor(rate)}

    def _loss_and_gradient(self, images: Tensor, targets: Tensor, mix: Mix | None, step: int) -> tuple[Tensor, Tensor]:
        """Compute the mean loss and metric of a batch, and leave the gradient of the loss in `.grad`.

        Part j of `accumulate` has the images j, j + n, j + 2n, ....
        """
        n, smoothing = self._recipe.accumulate, self._recipe.label_smoothing
        if mix is not None or smoothing:
            targets = soft_targets(self._task, targets, self.config.num_classes, smoothing)
        repeats = self._recipe.augment.repeats  # repeats of an image are adjacent: no image is mixed with itself
        partners = (images.roll(repeats, 0), targets.roll(repeats, 0)) if mix is not None else None
        for parameter in self._params.values():
            parameter.grad = None
        losses, metrics = [], []
        for j in range(n):
            torch.manual_seed(_seed(self._recipe.seed, step, j))
            x, y = self._normalize(images[j::n]), targets[j::n]
            if mix is not None and partners is not None:
                x = mix_images(mix, x, self._normalize(partners[0][j::n]))
                y = mix_targets(mix, y, partners[1][j::n])
            loss, metric = self._loss_and_metric(self._model(x.permute(0, 3, 1, 2)), y)
            (loss.mean() / n).backward()
            losses.append(loss.detach().mean())
            metrics.append(metric.detach().mean())
        return torch.stack(losses).mean(), torch.stack(metrics).mean()

    @torch.no_grad()
    def _update_ema(self, step: int) -> None:
        if self._state.ema is not None:
            step_size = float(ema_step_size(step, decay=self._recipe.ema))
            # mean + c (p - mean), as in `train.jax`; torch's lerp computes that where c is below 0.5.
            means = [*self._state.ema.values()]
            differences = torch._foreach_sub([self._params[name] for name in self._state.ema], means)
            torch._foreach_add_(means, differences, alpha=step_size)

    @torch.no_grad()
    def evaluate(self, batch: Batch, *, raw: bool = False) -> EvalOutput:
        """Return outputs (B, num_outputs), the loss of each image (B,), and whether it could be read (B,).

        raw: use the weights themselves, even if there is an EMA.
        """
        images, targets, _ = self._place(batch)
        outputs = self._eval_model(raw)(self._to_input(images))
        loss = self._loss_and_metric(outputs, targets)[0]
        wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        return EvalOutput(wide.cpu(), loss.cpu(), batch.readable)

    @torch.no_grad()
    def attention_maps(self, images: np.ndarray) -> np.ndarray:
        """Return the attention weights of the last block, (N, heads, T, T), for images (N, H, W, C) uint8."""
        x = self._to_input(torch.tensor(images, device=self._device))
        return vit_torch.attention_maps(self._eval_model(), x).cpu().numpy()

    def save_weights(self, path: Path, *, raw: bool = False) -> None:
        """Write the weights that `evaluate` uses, with the config, as safetensors.  raw: as for `evaluate`."""
        weights = {name: tensor.detach().cpu() for name, tensor in self._eval_model(raw).named_parameters()}
        parity.save(path, weights, self.config, format="torch", force=True, **self._metadata)

    def save_checkpoint(self, step: int, loop_state: LoopState) -> None:
        """Start to write a checkpoint: the training state and the state of the loop."""
        self._checkpoint_store.save(step, self._snapshot(), loop_state)

    def restore_checkpoint(self, step: int | None = None) -> tuple[int, LoopState] | None:
        """Restore the newest readable checkpoint, or that of `step`; return its step and the loop's state, or None."""
        store, target = self._checkpoint_store, self._snapshot()
        if (restored := store.restore_newest(target) if step is None else store.restore(step, target)) is None:
            return None
        step, snapshot, loop_state = restored
        with torch.no_grad():
            for name, tensor in target.tensors.items():
                tensor.copy_(snapshot.tensors[name])
        numbers = snapshot.numbers
        self._optimizer.updates.fill_(numbers["updates"])
        self._state = self._state._replace(step=step, sound=bool(numbers["sound"]))
        return step, loop_state

    def _snapshot(self) -> Snapshot:
        """Return the training state: the tensors themselves, by names that begin with those of the parts."""
        tensors = {f"params.{name}": p.detach() for name, p in self._params.items()}
        for kind, moments in self._optimizer.moments.items():
            tensors |= {f"{kind}.{name}": each for name, each in zip(self._optimizer.names, moments, strict=True)}
        tensors |= {f"ema.{name}": each for name, each in (self._state.ema or {}).items()}
        return Snapshot(tensors, {"updates": int(self._optimizer.updates), "sound": int(self._state.sound)})

    def profile(self, folder: Path | None) -> None:
        """Start PyTorch's profiler, which writes a trace for TensorBoard into `folder`; None: stop it."""
        if folder is not None:
            write = torch.profiler.tensorboard_trace_handler(str(folder))
            self._profiler = torch.profiler.profile(on_trace_ready=write)
            self._profiler.start()
        elif self._profiler is not None:
            self._profiler.stop()

    def should_stop(self) -> bool:
        """Return False: the loop handles the signals of a single process."""
        return False

    def close(self) -> None:
        """Wait until all checkpoints are written."""
        if self._checkpoints is not None:
            self._checkpoints.close()

    @property
    def _checkpoint_store(self) -> CheckpointStore:
        if self._checkpoints is None:
            rank = partial(checkpoint_rank, self._task)
            self._checkpoints = CheckpointStore(self._folder, keep=self._recipe.keep, rank=rank)
        return self._checkpoints

    def _eval_model(self, raw: bool = False) -> vit_torch.ViT:
        """Return the model with the EMA of the weights if there is one and `raw` is False, else that with the weights."""
        return (self._model if raw else self._mean_model).eval()

    def _place(self, batch: Batch) -> tuple[Tensor, Tensor, Mix | None]:
        """Return images, targets and mixing on the device; class numbers are int64."""
        images, targets = (torch.tensor(array, device=self._device) for array in (batch.images, batch.targets))
        targets = targets.long() if self._task == "classes" else targets
        on_device: list[Any] = [torch.as_tensor(x, device=self._device) for x in batch.mix or ()]
        mix = Mix(*on_device) if on_device else None
        return images, targets, mix

    def _loss_and_metric(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return loss_and_metric(self._task, outputs, targets, sigmoid=self._recipe.loss == "sigmoid")

    def _to_input(self, images: Tensor) -> Tensor:
        """Return the input of the model, (B, C, H, W), for images (B, H, W, C) uint8."""
        return self._normalize(images).permute(0, 3, 1, 2)

    def _normalize(self, images: Tensor) -> Tensor:
        """Normalize uint8 images: (x / 255 - mean) / std, in torch's default dtype."""
        dtype = torch.get_default_dtype()
        mean, std = (
            torch.tensor(each, dtype=dtype, device=self._device)
            for each in (self.config.pixels.mean, self.config.pixels.std)
        )
        return (images.to(dtype) / 255 - mean) / std


def _seed(seed: int, step: int, part: int) -> int:
    """Return the seed of the model's random numbers in a part of a step."""
    return int(np.random.SeedSequence((seed, step, part)).generate_state(1, np.uint64)[0] >> np.uint64(1))
