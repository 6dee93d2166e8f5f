"""lucidrains' vit-pytorch: ViT, of versions before 1.0."""

from pathlib import Path

from safetensors.torch import load_file
from vit_pytorch import ViT

from benchmarks.peers import Dtype
from benchmarks.peers.torch_model import TorchModel
from vit_spec import ViTConfig


def load(config: ViTConfig, weights: Path, dtype: Dtype) -> TorchModel:
    """Return the class of vit-pytorch."""
    model = ViT(
        image_size=config.image_size,
        patch_size=config.patch_size,
        num_classes=config.num_classes,
        dim=config.width,
        depth=config.depth,
        heads=config.num_heads,
        mlp_dim=config.mlp_dim,
        channels=config.in_channels,
        dim_head=config.head_dim,
    )
    model.load_state_dict(load_file(weights))
    return TorchModel(model)
