"""The functional twin: a Vision Transformer in JAX and Flax linen."""

from vit_jax.execution import Execution
from vit_jax.model import ViT
from vit_jax.use import attention_maps, init, intermediates, load, unstacked

__all__ = ["Execution", "ViT", "attention_maps", "init", "intermediates", "load", "unstacked"]
