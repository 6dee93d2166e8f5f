"""transformers 5: ViTForImageClassification, with its default attention (`scaled_dot_product_attention`)."""

from pathlib import Path

from safetensors.torch import load_file
from transformers import ViTConfig as Settings
from transformers import ViTForImageClassification

from benchmarks.peers import Dtype
from benchmarks.peers.torch_model import TorchModel
from vit_spec import ViTConfig


def load(config: ViTConfig, weights: Path, dtype: Dtype) -> TorchModel:
    """Return the class of transformers."""
    settings = Settings(
        hidden_size=config.width,
        num_hidden_layers=config.depth,
        num_attention_heads=config.num_heads,
        intermediate_size=config.mlp_dim,
        image_size=config.image_size,
        patch_size=config.patch_size,
        num_channels=config.in_channels,
        num_labels=config.num_classes,
        layer_norm_eps=config.norms.eps,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = ViTForImageClassification(settings)
    model.load_state_dict(load_file(weights))
    return TorchModel(model, lambda output: output.logits)
