"""Mistakes in the layers of the PyTorch twin."""

from functools import partial

from tests.faults.planting import Fault

_fault = partial(Fault, file="vit_torch/layers.py")

FAULTS = [
    _fault(
        name="eps left at PyTorch's 1e-5",
        old="super().__init__(prod(dims), config.norms.eps, bias=config.norms.bias)",
        new="super().__init__(prod(dims), bias=config.norms.bias)",
        part=r"blocks\.0\.norm1",
        cause="LayerNorm eps is 1e-05",
    ),
    _fault(
        name="variance divided by n - 1",
        old="y = F.layer_norm(wide, self.normalized_shape, weight, bias, self.eps)",
        new="variance, mean = torch.var_mean(wide, -1, keepdim=True)\n"
        "            y = (wide - mean) / (variance + self.eps).sqrt() * weight + bias",
        part=r"blocks\.0\.norm1",
        cause="the variance is divided by n - 1",
    ),
    _fault(
        name="statistics in float32 for any input dtype",
        old="return torch.promote_types(x.dtype, torch.float32)",
        new="return torch.float32",
        part=r"blocks\.0\.norm1",
    ),
    _fault(
        name="tanh approximation of GELU",
        old='return F.gelu(x, approximate="none")',
        new='return F.gelu(x, approximate="tanh")',
        part=r"blocks\.0\.mlp: activation",
        cause="activation is gelu_tanh",
    ),
    _fault(
        name="quick GELU's 1.702 as 1.7",
        old="1.702",
        new="1.7",
        model="clip_b16",
        part=r"blocks\.0\.mlp: activation",
    ),
    _fault(
        name="gate and value of SwiGLU swapped",
        old="gate, value = x.unbind(-2)",
        new="value, gate = x.unbind(-2)",
        model="dinov2_g14",
        part=r"blocks\.0\.mlp: activation",
        cause="gate and value of the MLP are swapped",
    ),
    _fault(
        name="layer scale added to one",
        old="return x * self.gamma.to(x.dtype)",
        new="return x * (1 + self.gamma.to(x.dtype))",
        model="dinov2_s14",
        part=r"blocks\.0\.ls1",
    ),
    _fault(
        name="layer scale detached",
        old="return x * self.gamma.to(x.dtype)",
        new="return x * self.gamma.data.to(x.dtype)",
        model="dinov2_s14",
        part=r"blocks\.1\.ls2(\.gamma)? in the backward pass",
    ),
    _fault(
        name="biases of linear maps dropped",
        old="x = linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))",
        new="x = linear(x, self.weight.to(x.dtype), None)",
        part=r"blocks\.0\.attn\.qkv",
    ),
    _fault(
        name="bias of the patches dropped",
        old="return linear(x, self.weight.to(x.dtype).flatten(1), None if self.bias is None else self.bias.to(x.dtype))",
        new="return linear(x, self.weight.to(x.dtype).flatten(1), None)",
        part=r"patch_embed\.proj",
        cause="patch_embed.proj has no bias",
    ),
    _fault(
        name="pixels of a patch channels-last",
        old=".permute(0, 2, 4, 1, 3, 5)",
        new=".permute(0, 2, 4, 3, 5, 1)",
        part=r"patch_embed\.proj",
        cause=r"pixels of a patch .*\(.*\)",
    ),
    _fault(
        name="patches column by column",
        old=".permute(0, 2, 4, 1, 3, 5)",
        new=".permute(0, 4, 2, 1, 3, 5)",
        part=r"patch_embed\.proj",
    ),
    _fault(
        name="dropout on in evaluation",
        old="return F.dropout(x, rate, module.training)",
        new="return F.dropout(x, rate)",
        changes={"regularisation": {"mlp_drop": 0.2}},
        part=r"blocks\.0\.mlp(\.fc2|: output)?",
    ),
    _fault(
        name="drop path on in evaluation",
        old="    if not module.training:\n        return x\n",
        new="",
        changes={"regularisation": {"drop_path": 0.5}},
        part=r"blocks\.1: sum",
    ),
    _fault(
        name="cosines and sines rounded to bfloat16",
        old='torch.tensor(table, dtype=dtype if table.dtype.kind == "f" else torch.int64) for',
        new="torch.tensor(table, dtype=torch.bfloat16).to(dtype) for",
        model="dinov3_s16",
        part="cosines",
    ),
    _fault(
        name="fixed positions through float32",
        old='torch.tensor(table, dtype=dtype if table.dtype.kind == "f" else torch.int64) for',
        new="torch.tensor(table, dtype=torch.float32).to(dtype) for",
        model="article_rectangular",
        part="positions",
    ),
    _fault(
        name="base of the rotation 10000, not 100",
        old="tables = make(self.config, grid)",
        new="tables = make(self.config.replace(positions={'rotary_base': 10000.0}), grid)",
        model="dinov3_s16",
        part="cosines",
        cause="rotary base is 10000",
    ),
]
