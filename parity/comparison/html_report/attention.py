"""Attention maps of the last block for a sample image, computed by both twins in float32."""

from dataclasses import dataclass
from functools import partial

import numpy as np

from parity.checkpoints.conversion import to_jax, to_torch
from parity.checkpoints.layout import Array
from parity.checkpoints.weights import Checkpoint
from parity.comparison.framework_settings import compiler_options, strict_settings
from vit_spec import ViTConfig


@dataclass(frozen=True)
class AttentionMaps:
    """Attention of one block to the patches of an image.

    image: the image before normalization, (H, W, 3) in [0, 1].
    jax, torch: attention weights of the class token for each patch, (heads, rows, columns); without a class token, the mean
        over all tokens.
    block: index of the block, from 0.
    of: the tokens that attend to the patches: "the class token" or "all tokens".
    """

    image: Array
    jax: Array
    torch: Array
    block: int
    of: str

    @property
    def difference(self) -> Array:
        """The attention weights of JAX minus those of PyTorch."""
        difference: Array = self.jax - self.torch
        return difference

    @property
    def are_finite(self) -> bool:
        """Whether no weight is NaN, as where the products of queries and keys exceed the range of float32."""
        return bool(np.isfinite(self.jax).all() and np.isfinite(self.torch).all())


def compute_attention_maps(checkpoint: Checkpoint) -> AttentionMaps:
    """Compute the attention of the last block for a drawing of the config's image size, in both twins."""
    config = checkpoint.config
    image, block = _normalize(sample_image(*config.image_size), config), config.depth - 1
    images, grid = np.asarray(image, np.float32)[None], config.grid_of(*config.image_size)
    with strict_settings():
        of_jax, of_torch = (_patch_weights(run(checkpoint, images, block), config, grid) for run in (_jax, _torch))
    of = "the class token" if config.tokens.class_token else "all tokens"
    return AttentionMaps(_denormalize(image, config), of_jax, of_torch, block, of)


def sample_image(height: int, width: int) -> Array:
    """Return a drawing of a ball on a plane, (height, width, 3), in [0, 1]."""
    y, x = np.meshgrid(np.linspace(0, 1, height), np.linspace(0, 1, width), indexing="ij")
    sky = np.stack([0.55 + 0.35 * y, 0.72 + 0.18 * y, 0.92 - 0.02 * y], -1)
    ground = np.stack([0.42 - 0.18 * y, 0.5 - 0.2 * y, 0.36 - 0.14 * y], -1)
    picture = np.where((y > 0.66)[..., None], ground, sky)
    shadow = ((x - 0.63) / 0.3) ** 2 + ((y - 0.83) / 0.06) ** 2
    picture *= np.clip(shadow, 0.45, 1)[..., None]
    radius = np.hypot(x - 0.55, y - 0.52)[..., None]
    light = np.clip(1.15 - 1.6 * np.hypot(x - 0.45, y - 0.4), 0.2, 1)[..., None]
    ball = light * np.array([0.93, 0.38, 0.2])
    inside = np.clip((0.3 - radius) * min(height, width), 0, 1)  # an edge of one pixel
    result: Array = inside * ball + (1 - inside) * picture
    return result


def _normalize(picture: Array, config: ViTConfig) -> Array:
    """Normalize an image in [0, 1] for the model; it becomes grey if the model does not take three channels."""
    grey = picture.mean(-1, keepdims=True).repeat(config.in_channels, -1)
    normalized: Array = ((picture if config.in_channels == 3 else grey) - config.pixels.mean) / config.pixels.std
    return normalized


def _denormalize(image: Array, config: ViTConfig) -> Array:
    """Undo `_normalize`: return an image in [0, 1], clipped, with three channels."""
    picture = np.clip(image * config.pixels.std + config.pixels.mean, 0, 1)
    if config.in_channels != 3:
        picture = picture.mean(-1, keepdims=True).repeat(3, -1)
    return picture


def _patch_weights(weights: Array, config: ViTConfig, grid: tuple[int, int]) -> Array:
    """Select the attention to the patches, (heads, rows, columns), from attention weights (heads, tokens, tokens)."""
    rows = weights[:, 0] if config.tokens.class_token else weights.mean(1)
    return rows[:, config.num_prefix :].reshape(-1, *grid)


def _jax(checkpoint: Checkpoint, images: Array, block: int) -> Array:
    import jax
    import jax.numpy as jnp

    import vit_jax

    model = vit_jax.ViT(checkpoint.config, vit_jax.Execution(precision="highest"))
    params = jax.tree.map(lambda array: jnp.asarray(array, jnp.float32), to_jax(checkpoint))
    compute = jax.jit(partial(vit_jax.attention_maps, model, block=block), compiler_options=compiler_options())
    weights: Array = np.asarray(compute(params, jnp.asarray(images)))[0]
    return weights


def _torch(checkpoint: Checkpoint, images: Array, block: int) -> Array:
    import torch

    import vit_torch

    with torch.device("meta"):
        model = vit_torch.ViT(checkpoint.config).eval()
    model.load_state_dict({key: tensor.float() for key, tensor in to_torch(checkpoint).items()}, assign=True)
    with torch.inference_mode():
        weights = vit_torch.attention_maps(model, torch.from_numpy(images).permute(0, 3, 1, 2), block)
    return np.asarray(weights[0])
