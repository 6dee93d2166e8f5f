"""torchvision's VisionTransformer."""

from pathlib import Path

from safetensors.torch import load_file
from torchvision.models.vision_transformer import VisionTransformer

from benchmarks.peers import Dtype
from benchmarks.peers.torch_model import TorchModel
from vit_spec import ViTConfig


def load(config: ViTConfig, weights: Path, dtype: Dtype) -> TorchModel:
    """Return the class of torchvision, which takes square images and patches."""
    model = VisionTransformer(
        config.image_size[0],
        config.patch_size[0],
        config.depth,
        config.num_heads,
        config.width,
        config.mlp_dim,
        num_classes=config.num_classes,
    )
    model.load_state_dict(load_file(weights))
    return TorchModel(model)
