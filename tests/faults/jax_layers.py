"""Mistakes in the layers of the JAX twin."""

from functools import partial

from tests.faults.planting import Fault

_fault = partial(Fault, file="vit_jax/layers.py")

FAULTS = [
    _fault(
        name="eps left at Flax's 1e-6",
        old="norms.eps, norms.kind",
        new="1e-6, norms.kind",
        model="clip_b16",
        part="norm_pre",
        cause="LayerNorm eps is 1e-06",
    ),
    _fault(
        name="eps outside the root",
        old="factor = 1 / jnp.sqrt(variance + eps)",
        new="factor = 1 / (jnp.sqrt(variance) + eps)",
        part=r"blocks\.0\.norm1",
        cause="eps is added to the standard deviation",
    ),
    _fault(
        name="variance divided by n - 1",
        old="variance = stored(_mean(jnp.square(centred), axes))",
        new="variance = jnp.var(x, axes, keepdims=True, ddof=1)",
        part=r"blocks\.0\.norm1",
        cause="the variance is divided by n - 1",
    ),
    _fault(
        name="variance as E[x^2] - E[x]^2, tokens far from zero",
        old="variance = stored(_mean(jnp.square(centred), axes))",
        new="variance = _mean(jnp.square(x), axes) - jnp.square(_mean(x, axes))",
        offset=30.0,
        level="precision",
        part=r"blocks\.0\.norm1",
    ),
    _fault(
        name="norm without subtracting the mean",
        old="centred = x - stored(_mean(x, axes)) if centre else x",
        new="centred = x",
        part=r"blocks\.0\.norm1",
        cause=r"norms do not subtract the mean \(RMSNorm\)",
    ),
    _fault(
        name="variance detached",
        old="return y, (dy - y * _mean(y * dx, axes)) * factor",
        new="return y, dy * factor",
        part="(norm|blocks.1: output) in the backward pass",
    ),
    _fault(
        name="norm's bias scaled too",
        old="y + bias.astype(y.dtype)",
        new="y + bias.astype(y.dtype) * scale.astype(y.dtype)",
        part=r"blocks\.0\.norm1",
    ),
    _fault(
        name="statistics in float32 for any input dtype",
        old="return jnp.promote_types(x.dtype, jnp.float32)",
        new="return jnp.float32",
        part=r"blocks\.0\.norm1",
    ),
    _fault(
        name="tanh approximation of GELU, Flax's default",
        old="return x * normal_cdf(x)",
        new="return nn.gelu(x)",
        part=r"blocks\.0\.mlp: activation",
        cause="activation is gelu_tanh",
    ),
    _fault(
        name="exact GELU for its approximation",
        old="return nn.gelu(x, approximate=True)",
        new="return nn.gelu(x, approximate=False)",
        model="siglip_b16",
        part=r"blocks\.0\.mlp: activation",
        cause="activation is gelu",
    ),
    _fault(
        name="GEGLU for SwiGLU",
        old="return nn.silu(gate) * value",
        new="return nn.gelu(gate) * value",
        model="dinov2_g14",
        part=r"blocks\.0\.mlp: activation",
    ),
    _fault(
        name="layer scale left out",
        old="return recompute_in_backward(partial(_wide, jnp.multiply))(x, self.gamma)",
        new="return x",
        model="dinov2_s14",
        part=r"blocks\.0\.ls1",
        cause="layer scale is left out in both halves",
    ),
    _fault(
        name="biases of linear maps dropped",
        old="precision=self.execution.precision)\n"
        "        # The gradient of the bias is a sum over tokens, slow on GPUs in the kernel that computes its summands.\n"
        "        return x if self.bias is None else gradient_separately(_wide(jnp.add, x, self.bias))\n\n\nclass Patch",
        new="precision=self.execution.precision)\n        return x\n\n\nclass Patch",
        part=r"blocks\.0\.attn\.qkv",
    ),
    _fault(
        name="patches not transposed before the reshape",
        old="width // pw, pw, c).swapaxes(2, 3)",
        new="width // pw, pw, c)",
        part=r"patch_embed\.proj",
    ),
    _fault(
        name="cosines and sines through float32",
        old='jnp.asarray(table, dtype if table.dtype.kind == "f" else int) for',
        new="jnp.asarray(table, jnp.float32).astype(dtype) for",
        model="dinov3_s16",
        part="cosines",
    ),
]
