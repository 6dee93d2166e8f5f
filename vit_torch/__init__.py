"""The object twin: a Vision Transformer in PyTorch."""

from vit_torch.execution import Execution
from vit_torch.model import ViT
from vit_torch.use import attention_maps, intermediates, load

__all__ = ["Execution", "ViT", "attention_maps", "intermediates", "load"]
