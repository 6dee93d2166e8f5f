"""The functional twin as it is used: weights in, and numbers for images out."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

import parity
import vit_jax
from parity.checkpoints.weights import Checkpoint


class Twin:
    """See `train.inference.model.Network`; it runs on jax's default device."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        pixels = checkpoint.config.pixels
        model = vit_jax.ViT(checkpoint.config, vit_jax.Execution(precision="highest"))
        self._params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), parity.to_jax(checkpoint))

        def seen(images: Array) -> Array:
            mean, std = (jnp.asarray(values, jnp.float32) for values in (pixels.mean, pixels.std))
            return (images.astype(jnp.float32) / 255 - mean) / std

        self._answer = jax.jit(lambda params, images: model.apply({"params": params}, seen(images)))
        self._look = jax.jit(lambda params, images: vit_jax.attention_maps(model, params, seen(images)))

    def outputs(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return logits or features, (B, outputs)."""
        return np.asarray(self._answer(self._params, images))

    def attention(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return the last block's attention weights, (B, heads, T, T)."""
        return np.asarray(self._look(self._params, images))
