"""Where a block looks in a sample image, according to either twin in float32."""

from dataclasses import dataclass
from functools import partial

import numpy as np

from parity.checkpoints.weights import Checkpoint, to_jax, to_torch
from parity.comparison.framework_settings import compiler_options, strict
from parity.comparison.tolerances import Array
from vit_spec import ViTConfig


@dataclass(frozen=True)
class Maps:
    """One block's attention to the patches of an image.

    image: (H, W, 3), as a person sees it, in [0, 1].
    jax, torch: (heads, rows, columns): the share of its attention that the class token gives each patch; without a class
        token, that all tokens give it on average.
    block: counted from 0.
    of: whose attention it is: "the class token" or "all tokens".
    """

    image: Array
    jax: Array
    torch: Array
    block: int
    of: str

    @property
    def difference(self) -> Array:
        """JAX less PyTorch."""
        difference: Array = self.jax - self.torch
        return difference


def maps(checkpoint: Checkpoint, image: Array | None = None, block: int = -1) -> Maps:
    """Show both twins an image, and take one block's attention.

    Args:
        image: (H, W, C), normalised; by default a drawing of the config's size.
        block: which, from the end where it is negative.
    """
    config = checkpoint.config
    if image is None:
        image = _normalised(drawing(*config.image_size), config)
    images, grid = np.asarray(image, np.float32)[None], config.grid_of(*image.shape[:2])
    with strict():
        of_jax, of_torch = (_patches(look(checkpoint, images, block), config, grid) for look in (_jax, _torch))
    of = "the class token" if config.tokens.class_token else "all tokens"
    return Maps(_seen(image, config), of_jax, of_torch, range(config.depth)[block], of)


def drawing(height: int, width: int) -> Array:
    """A ball on a plane, (H, W, 3) in [0, 1]: something to look at, in any size."""
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


def _normalised(picture: Array, config: ViTConfig) -> Array:
    """What the network sees of a picture in [0, 1]; grey where it does not see three colours."""
    grey = picture.mean(-1, keepdims=True).repeat(config.in_channels, -1)
    seen: Array = ((picture if config.in_channels == 3 else grey) - config.pixels.mean) / config.pixels.std
    return seen


def _seen(image: Array, config: ViTConfig) -> Array:
    """The way back."""
    picture = np.clip(image * config.pixels.std + config.pixels.mean, 0, 1)
    if config.in_channels != 3:
        picture = picture.mean(-1, keepdims=True).repeat(3, -1)
    return picture


def _patches(weights: Array, config: ViTConfig, grid: tuple[int, int]) -> Array:
    """(heads, T, T) -> (heads, rows, columns)."""
    rows = weights[:, 0] if config.tokens.class_token else weights.mean(1)
    return rows[:, config.num_prefix :].reshape(-1, *grid)


def _jax(checkpoint: Checkpoint, images: Array, block: int) -> Array:
    import jax
    import jax.numpy as jnp

    import vit_jax

    model = vit_jax.ViT(checkpoint.config, vit_jax.Execution(precision="highest"))
    params = jax.tree.map(lambda array: jnp.asarray(array, jnp.float32), to_jax(checkpoint))
    look = jax.jit(partial(vit_jax.attention_maps, model, block=block), compiler_options=compiler_options())
    weights: Array = np.asarray(look(params, jnp.asarray(images)))[0]
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
