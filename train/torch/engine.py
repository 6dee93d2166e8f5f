"""The training step and the evaluation of the PyTorch trainer, in one process and on one device.

They are those of `train.loop.engine.Engine`.  Its other members, such as checkpoints, are not here yet.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import parity
import vit_torch
from parity.checkpoints.weights import Checkpoint
from train.data.augment import Mix, mix_images, mix_targets
from train.data.batches import Batch
from train.loop.engine import EvalOutput
from train.loop.metrics import BATCH_METRIC
from train.mesh import axis_sizes, images_per_device
from train.recipes import Recipe, Task
from train.recipes.schedule import ema_step_size
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
    ) -> None:
        """Prepare the first step.

        Raises:
            InputError: the recipe needs several devices, has --remat dots, or a batch that `accumulate` does not divide.
        """
        self.config, self._recipe, self._task = config, recipe, task
        self._learning_rate = learning_rate
        images_per_device(recipe.batch_size, recipe.accumulate, axis_sizes(recipe.mesh, 1, config))
        if recipe.remat == "dots":
            raise InputError("--remat dots is only in train.jax: give none or full")
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = self._make_model(initial_weights)
        self._params = dict(self._model.named_parameters())
        self._optimizer = make_optimizer(recipe.optimizer, config, self._params)
        trained = set(self._optimizer.names)
        for name, parameter in self._params.items():
            parameter.requires_grad_(name in trained)
        ema = {name: p.detach().clone() for name, p in self._params.items()} if recipe.ema else None
        self._state = State(ema)

    def _make_model(self, start: Checkpoint | None) -> vit_torch.ViT:
        dtype = torch.bfloat16 if self._recipe.dtype == "bfloat16" else None
        execution = vit_torch.Execution(dtype=dtype, remat=self._recipe.remat)  # type: ignore[arg-type]
        if start is None:
            torch.manual_seed(self._recipe.seed)
            return vit_torch.ViT(self.config, execution).to(self._device)
        with torch.device("meta"):  # no weights are initialized: `load_state_dict` assigns them
            model = vit_torch.ViT(self.config, execution)
        weights = {
            name: tensor.to(self._device, torch.promote_types(tensor.dtype, torch.float32), copy=True)
            for name, tensor in parity.to_torch(start).items()
        }
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

    @torch.inference_mode()
    def evaluate(self, batch: Batch, *, raw: bool = False) -> EvalOutput:
        """Return outputs (B, num_outputs), the loss of each image (B,), and whether it could be read (B,).

        raw: use the weights themselves, even if there is an EMA.
        """
        images, targets, _ = self._place(batch)
        self._model.eval()
        x = self._normalize(images).permute(0, 3, 1, 2)
        outputs = torch.func.functional_call(self._model, dict(self._eval_params(raw)), (x,))
        loss = self._loss_and_metric(outputs, targets)[0]
        wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        return EvalOutput(wide.cpu(), loss.cpu(), batch.readable)

    def _eval_params(self, raw: bool = False) -> Mapping[str, Tensor]:
        """Return the EMA of the weights if there is one and `raw` is False, else the weights."""
        return self._params if raw or self._state.ema is None else self._state.ema

    def _place(self, batch: Batch) -> tuple[Tensor, Tensor, Mix | None]:
        """Return images, targets and mixing on the device; class numbers are int64."""
        images, targets = (torch.from_numpy(array).to(self._device) for array in (batch.images, batch.targets))
        targets = targets.long() if self._task == "classes" else targets
        on_device: list[Any] = [torch.as_tensor(x, device=self._device) for x in batch.mix or ()]
        mix = Mix(*on_device) if on_device else None
        return images, targets, mix

    def _loss_and_metric(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return loss_and_metric(self._task, outputs, targets, sigmoid=self._recipe.loss == "sigmoid")

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
