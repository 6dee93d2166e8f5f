"""The PyTorch twin: a Vision Transformer as an nn.Module."""

from vit_spec.missing_packages import installation_named

with installation_named():
    from vit_torch.api import attention_maps, intermediates, load
    from vit_torch.execution import Execution
    from vit_torch.model import ViT
    from vit_torch.noise import Key, random_key
    from vit_torch.pixels import normalize

__all__ = ["Execution", "Key", "ViT", "attention_maps", "intermediates", "load", "normalize", "random_key"]
