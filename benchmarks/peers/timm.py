"""timm's VisionTransformer."""

from pathlib import Path

from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer

from benchmarks.peers import Dtype
from benchmarks.peers.torch_model import TorchModel
from vit_spec import ViTConfig


def load(config: ViTConfig, weights: Path | None, dtype: Dtype) -> TorchModel:
    """Return the class with the arguments of its named models, such as vit_small_patch16_224.

    weights: None for the library's initial weights.
    """
    model = VisionTransformer(
        config.image_size,
        config.patch_size,
        config.in_channels,
        config.num_classes,
        embed_dim=config.width,
        depth=config.depth,
        num_heads=config.num_heads,
        mlp_ratio=config.mlp_dim / config.width,
    )
    if weights is not None:
        model.load_state_dict(load_file(weights))
    return TorchModel(model)
