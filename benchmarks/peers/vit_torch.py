"""The PyTorch twin, with the training step of `train.torch`."""

from pathlib import Path
from typing import Any

import numpy as np

import parity
from benchmarks.peers import CLIP, LEARNING_RATE, WEIGHT_DECAY, Dtype, Inputs
from benchmarks.peers.torch_model import Scalars, TorchModel
from train.data.batches import Batch
from train.recipes import Optimizer, Recipe
from train.torch.engine import TorchEngine
from vit_spec import ViTConfig


class Twin(TorchModel):
    """The twin: the model that the trainer's engine trains, compiled as the engine compiles it."""

    def __init__(self, config: ViTConfig, weights: Path | None, dtype: Dtype) -> None:
        self._config, self._weights, self._dtype = config, weights, dtype
        self._logits, self._bfloat16 = lambda output: output, False  # the engine has set the dtype

    def prepare(self, inputs: Inputs, compiled: bool, bfloat16: bool) -> None:
        """Make everything that a step needs: the engine, and the batch on the device."""
        self._place(inputs)
        count = len(inputs.pixels)
        optimizer = Optimizer(lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, clip=CLIP)
        self._engine: Any = TorchEngine(
            self._config,
            Recipe(batch_size=count, dtype=self._dtype, compile="on" if compiled else "off", optimizer=optimizer),
            task="classes",
            learning_rate=lambda step: LEARNING_RATE,
            initial_weights=None if self._weights is None else parity.load(self._weights),
            folder=Path("unused"),
        )
        self.module, self._call = self._engine._model, self._engine._forward
        self._batch = Batch(inputs.pixels, inputs.targets, np.arange(count), np.ones(count, bool))
        placed = self._engine._place(self._batch)
        self._engine._place = lambda batch: placed  # the batch stays on the device, for every contestant

    def step(self) -> Scalars:
        """Do a step of `train.torch`; return the loss, and the norm of its gradient."""
        metrics = self._engine.step(self._batch)
        return metrics["loss"], metrics["grad_norm"]


def load(config: ViTConfig, weights: Path | None, dtype: Dtype) -> Twin:
    """Return the twin.  weights: None for the initial weights of the trainer."""
    return Twin(config, weights, dtype)
