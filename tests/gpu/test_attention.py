"""Fused attention on a GPU is as close to float64 as the explicit form, forward and backward, also for odd lengths."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")

import jax.numpy as jnp
from flax import linen as nn

import vit_jax
import vit_spec
import vit_torch
from vit_jax.attention import attention as jax_attention
from vit_jax.layers import ViTModule as JaxModule
from vit_torch.attention import attention as torch_attention
from vit_torch.layers import ViTModule as TorchModule

# Tokens of 224 pixels in patches of 16, without and with a class token; of 224 in patches of 14; of 518 in patches of 14,
# with a class token and four registers.
LENGTHS = [196, 197, 257, 1374]
BATCH, HEADS = 2, 3
CONFIG = vit_spec.get("vit_s16")


class Pass(NamedTuple):
    """The output of attention, and the gradients of its inner product with a given array."""

    out: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


def run_jax(kind: Any, scale: float, arrays: list[np.ndarray], dtype: Any) -> Pass:
    """Run the JAX twin's attention on its default device.  arrays: q, k, v and the gradient of the output."""
    module = JaxModule(CONFIG, vit_jax.Execution(attention=kind))

    def loss(q: Any, k: Any, v: Any, gradient: Any) -> Any:
        out = nn.apply(partial(jax_attention, scale=scale, rate=0.0, noise=None), module)({}, q, k, v)
        return (out.astype(jnp.float32) * gradient).sum(), out

    placed = [jnp.asarray(array, dtype) for array in arrays[:3]]
    gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(*placed, arrays[3])
    return Pass(*(np.asarray(each, np.float64) for each in (out, *gradients)))


def run_torch(kind: Any, scale: float, arrays: list[np.ndarray], dtype: torch.dtype, device: str = "cuda") -> Pass:
    """Run the PyTorch twin's attention."""
    module = TorchModule(CONFIG, vit_torch.Execution(attention=kind)).eval()
    q, k, v = (torch.tensor(array, dtype=dtype, device=device, requires_grad=True) for array in arrays[:3])
    out = torch_attention(module, q, k, v, scale, 0.0)
    (out * torch.tensor(arrays[3], dtype=dtype, device=device)).sum().backward()
    return Pass(*(each.detach().double().cpu().numpy() for each in (out, q.grad, k.grad, v.grad)))


@pytest.mark.parametrize("dim", [64, 72, 80])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_fused_attention_is_as_precise_as_the_explicit_form(tokens: int, dim: int) -> None:
    rng = np.random.default_rng(tokens * dim)
    rounded = [jnp.asarray(rng.standard_normal((BATCH, tokens, HEADS, dim)), jnp.bfloat16) for _ in range(4)]
    arrays = [np.asarray(each, np.float32) for each in rounded]
    exact = run_torch("explicit", dim**-0.5, arrays, torch.float64, "cpu")
    found = {
        "jax": [run_jax(kind, dim**-0.5, arrays, jnp.bfloat16) for kind in ("explicit", "cudnn", "auto")],
        "torch": [run_torch(kind, dim**-0.5, arrays, torch.bfloat16) for kind in ("explicit", "fused")],
    }
    for framework, (explicit, *fused) in found.items():
        for name, reference in exact._asdict().items():
            norm, (least, *others) = (
                np.linalg.norm(reference),
                [np.linalg.norm(getattr(each, name) - reference) for each in (explicit, *fused)],
            )
            assert all(error <= 2 * least for error in others), f"{framework} {name}: {others} against {least}"
            assert least <= 0.01 * norm, f"{framework} {name}: {least / norm}"  # 2.6 units in the last place of bfloat16
