"""Inference with the JAX twin."""

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
        pixels = checkpoint.config.pixels
        # Freed memory is kept in the main thread only; see `train.loop.process.keep_freed_memory`.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        model = vit_jax.ViT(checkpoint.config, vit_jax.Execution(precision="highest"))
        self._params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), parity.to_jax(checkpoint))

        def normalize(images: Array) -> Array:
            mean, std = (jnp.asarray(values, jnp.float32) for values in (pixels.mean, pixels.std))
            return (images.astype(jnp.float32) / 255 - mean) / std

        self._predict = jax.jit(lambda params, images: model.apply({"params": params}, normalize(images)))
        self._attention_maps = jax.jit(lambda params, images: vit_jax.attention_maps(model, params, normalize(images)))

    def predict(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return logits or features, (B, outputs)."""
        return np.asarray(self._predict(self._params, images))

    def attention_maps(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the attention weights of the last block, (B, heads, T, T)."""
        return np.asarray(self._attention_maps(self._params, images))
