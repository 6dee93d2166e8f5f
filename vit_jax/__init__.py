"""The JAX twin: a functional Vision Transformer in Flax linen, which `vit_jax.nnx` wraps as an NNX module."""

from typing import TYPE_CHECKING, Any

from vit_spec.missing_packages import installation_named

with installation_named():
    from vit_jax.api import attention_maps, compile_forward, init, intermediates, load, unstacked
    from vit_jax.compilation import compiler_options
    from vit_jax.execution import Execution
    from vit_jax.model import ViT
    from vit_jax.pixels import normalize

if TYPE_CHECKING:
    from vit_jax.nnx_module import nnx

__all__ = [
    "Execution",
    "ViT",
    "attention_maps",
    "compile_forward",
    "compiler_options",
    "init",
    "intermediates",
    "load",
    "nnx",
    "normalize",
    "unstacked",
]

if not TYPE_CHECKING:  # a type checker would assume that a module with __getattr__ has every attribute

    def __getattr__(name: str) -> Any:
        if name != "nnx":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from vit_jax.nnx_module import nnx  # on first use: importing flax.nnx takes most of a second

        globals()[name] = nnx
        return nnx
