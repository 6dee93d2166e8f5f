"""Inference with the JAX twin."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

import parity
import vit_jax
from parity.checkpoints.weights import Checkpoint


class TwinPredictor:
    """The predictor (`train.inference.model.Predictor`) of the JAX twin, on JAX's default device."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        # Freed memory is kept in the main thread only; see `train.loop.process.keep_freed_memory`.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        self._config, self._pixels = checkpoint.config, checkpoint.config.pixels
        self._model = vit_jax.ViT(self._config, vit_jax.Execution(precision="highest"))
        self._params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), parity.to_jax(checkpoint))

        self._programs: dict[int, Callable[..., Array]] = {}
        self._attention_maps = jax.jit(
            lambda params, images: vit_jax.attention_maps(self._model, params, vit_jax.normalize(images, self._pixels))
        )

    def _program(self, batch_size: int) -> Callable[..., Array]:
        def run(params: Any, images: Array) -> Array:
            x = vit_jax.normalize(images, self._pixels)
            return self._model.apply({"params": params}, x)  # type: ignore[return-value]

        if batch_size not in self._programs:
            options = vit_jax.compiler_options(self._config, batch_size)
            self._programs[batch_size] = jax.jit(run, compiler_options=options)
        return self._programs[batch_size]

    def predict(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return logits or features, (B, outputs)."""
        return np.asarray(self._program(len(images))(self._params, images))

    def attention_maps(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the attention weights of the last block, (B, heads, T, T)."""
        return np.asarray(self._attention_maps(self._params, images))
