"""Mistakes in the attention of the PyTorch twin."""

from functools import partial

from tests.faults.planting import Fault

_fault = partial(Fault, file="vit_torch/attention.py")

FAULTS = [
    _fault(
        name="no scale passed to the fused kernel",
        old="dropout_p=rate, scale=scale)",
        new="dropout_p=rate)",
        model="article_sincos",
        part=r"blocks\.0\.attn: heads",
        cause=r"score scale is head_dim \*\* -0\.5",
    ),
    _fault(
        name="causal mask in the fused kernel",
        old="dropout_p=rate, scale=scale)",
        new="dropout_p=rate, scale=scale, is_causal=True)",
        part=r"blocks\.0\.attn: heads",
        cause=r"no token attends to later tokens \(causal mask\)",
    ),
    _fault(
        name="fused kernel in half precision in float32 alone",
        old="x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=rate, scale=scale)",
        new="half = torch.float16 if q.dtype == torch.float32 else q.dtype\n"
        "        x = F.scaled_dot_product_attention(*(x.to(half) for x in (q, k, v)), scale=scale).to(q.dtype)",
        level="precision",
        part=r"blocks\.0\.attn: heads",
    ),
    _fault(
        name="softmax over queries",
        old="weights = scores.softmax(-1)",
        new="weights = scores.softmax(-2)",
        part=r"blocks\.0\.attn: (weights|heads)",
        cause="softmax runs over queries",
    ),
    _fault(
        name="scale inside and outside the product",
        old="return (q @ k.transpose(2, 3))",
        new="return scale * (q @ k.transpose(2, 3))",
        part=r"blocks\.0\.attn: scores",
        cause="score scale is 1 / head_dim",
    ),
    _fault(
        name="attention weights detached",
        old="x = dropout(module, weights, rate, noise, Site.ATTENTION).to(v.dtype) @ v",
        new="x = dropout(module, weights.detach(), rate, noise, Site.ATTENTION).to(v.dtype) @ v",
        part=r"blocks\.1\.attn: (scores|weights|heads) in the backward pass",
    ),
    _fault(
        name="attention dropout on in evaluation",
        old="rate if module.training else 0.0",
        new="rate",
        changes={"regularisation": {"attn_drop": 0.3}},
        part=r"blocks\.0\.attn: (weights|heads)",
    ),
    _fault(
        name="heads merged without the transpose",
        old="    return x.transpose(1, 2)\n",
        new="    return x.reshape(x.shape[0], x.shape[2], x.shape[1], x.shape[3])\n",
        part=r"blocks\.0\.attn: heads",
    ),
    _fault(
        name="rotation in the opposite direction",
        old="torch.stack([-wide[..., 1::2], wide[..., ::2]], -1)",
        new="torch.stack([wide[..., 1::2], -wide[..., ::2]], -1)",
        model="article_xray_rope",
        part=r"blocks\.0\.attn: q",
        cause="queries and keys are rotated in the opposite direction",
    ),
    _fault(
        name="neighbours rotated where halves are pairs",
        old='if kind == "dinov3":',
        new='if kind == "none":',
        model="dinov3_s16",
        part=r"blocks\.0\.attn: q",
    ),
]
