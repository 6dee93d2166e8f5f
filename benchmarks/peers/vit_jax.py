"""The JAX twin, with the training step of `train.jax`."""

from pathlib import Path
from typing import Any

import numpy as np
from jax import Array

import parity
import vit_jax
from benchmarks.peers import CLIP, LEARNING_RATE, WEIGHT_DECAY, Dtype, Inputs
from benchmarks.peers.jax_model import JaxModel, Scalars
from train.data.batches import Batch
from train.jax.engine import JaxEngine
from train.recipes import Optimizer, Recipe
from vit_spec import ViTConfig


class Twin(JaxModel):
    """The twin, whose model and parameters are those of the trainer's engine."""

    def __init__(self, config: ViTConfig, weights: Path | None, dtype: Dtype) -> None:
        self._config, self._weights, self._dtype = config, weights, dtype

    def prepare(self, inputs: Inputs, compiled: bool, bfloat16: bool) -> None:
        """Make everything that a step needs: the engine, and the batch on the device."""
        count = len(inputs.pixels)
        optimizer = Optimizer(lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, clip=CLIP)
        self._engine: Any = JaxEngine(
            self._config,
            Recipe(batch_size=count, dtype=self._dtype, optimizer=optimizer),
            task="classes",
            learning_rate=lambda step: LEARNING_RATE,
            initial_weights=None if self._weights is None else parity.load(self._weights),
            folder=Path("unused"),
        )
        self._apply = lambda params, images: self._engine._model.apply({"params": params}, images)
        self._place(inputs)
        self._single: Any = None
        self._batch = Batch(inputs.pixels, inputs.targets, np.arange(count), np.ones(count, bool))
        placed = self._engine._shard_batch(self._batch)
        self._engine._shard_batch = lambda batch: placed  # the batch stays on the device, for every contestant

    def compiler_options(self, batch_size: int) -> dict[str, Any] | None:
        """Return the options that the twin documents."""
        return vit_jax.compiler_options(self._config, batch_size)

    @property
    def params(self) -> Any:
        """The parameters of the engine."""
        return self._engine.state.params

    def latency(self) -> Array:
        """Return the logits of one normalized image, by the function for inference, with the weights of the first call."""
        if self._single is None:
            self._single = vit_jax.compile_forward(self._engine._model, self.params, batch_size=1)
        return self._single(self._image)

    def step(self) -> Scalars:
        """Do a step of `train.jax`; return the loss, and the norm of its gradient."""
        metrics = self._engine.step(self._batch)
        return metrics["loss"], metrics["grad_norm"]


def load(config: ViTConfig, weights: Path | None, dtype: Dtype) -> Twin:
    """Return the twin.  weights: None for the initial weights of the trainer."""
    return Twin(config, weights, dtype)
