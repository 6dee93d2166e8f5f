"""The JAX twin: a functional Vision Transformer in Flax linen."""

from vit_jax.api import attention_maps, init, intermediates, load, unstacked
from vit_jax.execution import Execution
from vit_jax.model import ViT

__all__ = ["Execution", "ViT", "attention_maps", "init", "intermediates", "load", "unstacked"]
