"""Mistakes in the attention of the JAX twin."""

from functools import partial

from tests.faults.planting import Fault

_fault = partial(Fault, file="vit_jax/attention.py")

FAULTS = [
    _fault(
        name="no scale of scores",
        old="q = (scale * q.astype(at_least_float32(q))).astype(q.dtype)",
        new="",
        part=r"blocks\.0\.attn: scores",
        cause="score scale is 1",
    ),
    _fault(
        name="scale of the width, not of a head",
        old="    if _uses_cudnn(",
        new="    scale = module.config.width**-0.5\n    if _uses_cudnn(",
        part=r"blocks\.0\.attn: scores",
        cause=r"score scale is (width|\(heads \* head_dim\)) \*\* -0\.5",
    ),
    _fault(
        name="heads split without the transpose",
        old="(jnp.swapaxes(x, 1, 2) for x in (q, k, v))  # (B, H, T, D)",
        new="(x.reshape(x.shape[0], x.shape[2], x.shape[1], d) for x in (q, k, v))",
        part=r"blocks\.0\.attn: scores",
    ),
    _fault(
        name="heads merged without the transpose",
        old="return jnp.swapaxes(x.astype(v.dtype), 1, 2)",
        new="return x.astype(v.dtype).reshape(x.shape[0], x.shape[2], x.shape[1], d)",
        part=r"blocks\.0\.attn: heads",
    ),
    _fault(
        name="softmax normalized over all tokens at once",
        old="total = weights.sum(-1, keepdims=True)",
        new="total = weights.sum((-2, -1), keepdims=True)",
        part=r"blocks\.0\.attn: (weights|heads)",
    ),
    _fault(
        name="softmax without its maximum, scores large",
        old="weights = stored_exp(scores - lax.stop_gradient(scores.max(-1, keepdims=True)))",
        new="weights = stored_exp(scores)",
        changes={"attention": {"scale": 60.0}},
        level="precision",
        part=r"blocks\.[01]\.attn: (weights|heads)( in the backward pass)?",
    ),
    _fault(
        name="sum of the softmax detached",
        old="total = weights.sum(-1, keepdims=True)",
        new="total = lax.stop_gradient(weights.sum(-1, keepdims=True))",
        part=r"blocks\.1\.attn: (scores|weights|heads) in the backward pass",
    ),
    _fault(
        name="attention weights in bfloat16",
        old="dot(weights.astype(v.dtype), v,",
        new="dot(weights.astype(jnp.bfloat16).astype(v.dtype), v,",
        part=r"blocks\.0\.attn: heads",
    ),
    _fault(
        name="halves rotated where neighbours are pairs",
        old='if kind == "dinov3":',
        new='if kind != "none":',
        model="article_xray_rope",
        part=r"blocks\.0\.attn: q",
    ),
    _fault(
        name="second half rotated in the opposite direction",
        old="rotated = jnp.concatenate([-second, first], -1)",
        new="rotated = jnp.concatenate([second, -first], -1)",
        model="dinov3_s16",
        part=r"blocks\.0\.attn: q",
        cause="queries and keys are rotated in the opposite direction",
    ),
]
