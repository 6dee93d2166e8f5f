"""Equimo's VisionTransformer in Equinox, which computes one image and is mapped over the batch by jax.vmap."""

from pathlib import Path

import equinox as eqx
import jax
from equimo.models.vit import VisionTransformer
from safetensors.numpy import load_file

from benchmarks.peers import Dtype
from benchmarks.peers.jax_model import JaxModel
from vit_spec import ViTConfig


def load(config: ViTConfig, weights: Path, dtype: Dtype) -> JaxModel:
    """Return the module of Equimo, which takes square images and patches."""
    model = VisionTransformer(
        img_size=config.image_size[0],
        in_channels=config.in_channels,
        dim=config.width,
        patch_size=config.patch_size[0],
        num_heads=config.num_heads,
        depths=[config.depth],
        mlp_ratio=config.mlp_dim / config.width,
        reg_tokens=0,
        num_classes=config.num_classes,
        global_pool="token",
        act_layer="exactgelu",
        eps=config.norms.eps,
        key=jax.random.key(0),
    )
    arrays = load_file(weights)

    def filled(path: jax.tree_util.KeyPath, leaf: object) -> object:
        return arrays[jax.tree_util.keystr(path, simple=True, separator="/")]

    empty, rest = eqx.partition(model, eqx.is_inexact_array)
    params, key = jax.tree_util.tree_map_with_path(filled, empty), jax.random.key(0)

    def apply(params: VisionTransformer, images: jax.Array) -> jax.Array:
        one = eqx.combine(params, rest)
        return jax.vmap(lambda image: one(image, key=key))(images.transpose(0, 3, 1, 2))

    return JaxModel(apply, params)
