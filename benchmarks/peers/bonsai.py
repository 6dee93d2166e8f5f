"""jax-ml/bonsai, from a clone: its ViT in Flax NNX."""

from pathlib import Path
from typing import Any

import jax
from bonsai.models.vit.modeling import ModelConfig, ViTClassificationModel
from flax import nnx
from safetensors.numpy import load_file

from benchmarks.peers import Dtype
from benchmarks.peers.jax_model import JaxModel
from vit_spec import ViTConfig


def load(config: ViTConfig, weights: Path, dtype: Dtype) -> JaxModel:
    """Return the class of bonsai."""
    model = ViTClassificationModel(
        ModelConfig(
            image_size=config.image_size,
            patch_size=config.patch_size,
            num_channels=config.in_channels,
            hidden_dim=config.width,
            attn_dropout_prob=0.0,
            dropout_prob=0.0,
            num_heads=config.num_heads,
            mlp_dim=config.mlp_dim,
            eps=config.norms.eps,
            num_layers=config.depth,
            num_labels=config.num_classes,
        ),
        rngs=nnx.Rngs(0),
    )
    graph, state, rest = nnx.split(model, nnx.Param, ...)
    params: dict[Any, Any] = nnx.to_pure_dict(state)
    arrays = load_file(weights)

    def filled(path: jax.tree_util.KeyPath, leaf: object) -> object:
        return arrays[jax.tree_util.keystr(path, simple=True, separator="/")]

    params = jax.tree_util.tree_map_with_path(filled, params)
    return JaxModel(lambda params, images: nnx.merge(graph, params, rest)(images, rngs=None), params)
