"""transformers 4, from a folder: FlaxViTForImageClassification, the last version with Flax."""

from pathlib import Path

from flax.serialization import msgpack_restore
from transformers import FlaxViTForImageClassification
from transformers import ViTConfig as Settings

from benchmarks.peers import Dtype
from benchmarks.peers.jax_model import JaxModel
from vit_spec import ViTConfig


def load(config: ViTConfig, weights: Path, dtype: Dtype) -> JaxModel:
    """Return the linen module of the class, which takes images (B, H, W, C)."""
    settings = Settings(
        hidden_size=config.width,
        num_hidden_layers=config.depth,
        num_attention_heads=config.num_heads,
        intermediate_size=config.mlp_dim,
        image_size=config.image_size[0],
        patch_size=config.patch_size[0],
        num_channels=config.in_channels,
        num_labels=config.num_classes,
        layer_norm_eps=config.norms.eps,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    module = FlaxViTForImageClassification(settings, _do_init=False).module
    params = msgpack_restore(weights.read_bytes())
    return JaxModel(lambda params, images: module.apply({"params": params}, images).logits, params)
