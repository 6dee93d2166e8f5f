"""A ViT around `torch.nn.TransformerEncoder`, as tutorials write it: the blocks' keys are PyTorch's, the others vary.

The keys of the encoder are those of the attribute `encoder`, `transformer`, `transformer_encoder` or `blocks`.  For the
patch projection, the tokens, the positions and the classifier, the names in `ALIASES` are read too.  No tensor shows the
order of the norms: PyTorch's default is post-norm with ReLU, which `norm_first=True` and `activation="gelu"` change.  Both
are assumptions: give --set norms.order=pre or --set mlp.activation=gelu.

Source: torch 2.13, torch/nn/modules/transformer.py, TransformerEncoderLayer.
"""

from parity.checkpoints.formats.behaviour import common_behaviour
from parity.checkpoints.formats.format import Format
from parity.checkpoints.formats.tables import COMMON_CONSTRAINTS, unsupported_head_width
from vit_spec import ViTConfig
from vit_spec.parts import UNGATED_ACTIVATIONS

TABLE = """
    patch_embed.proj.weight | patch_embed.weight | width rgb ph pw
    patch_embed.proj.bias   | patch_embed.bias   | width
    cls_token               | cls_token          | 1 1 width
    pos_embed               | pos_embed          | 1 token width

    blocks.norm1.weight     | encoder.layers.{block}.norm1.weight              | width
    blocks.norm1.bias       | encoder.layers.{block}.norm1.bias                | width
    blocks.attn.qkv.weight  | encoder.layers.{block}.self_attn.in_proj_weight  | (qkv head dim) width
    blocks.attn.qkv.bias    | encoder.layers.{block}.self_attn.in_proj_bias    | (qkv head dim)
    blocks.attn.proj.weight | encoder.layers.{block}.self_attn.out_proj.weight | width (head dim)
    blocks.attn.proj.bias   | encoder.layers.{block}.self_attn.out_proj.bias   | width
    blocks.norm2.weight     | encoder.layers.{block}.norm2.weight              | width
    blocks.norm2.bias       | encoder.layers.{block}.norm2.bias                | width
    blocks.mlp.fc1.weight   | encoder.layers.{block}.linear1.weight            | ff width
    blocks.mlp.fc1.bias     | encoder.layers.{block}.linear1.bias              | ff
    blocks.mlp.fc2.weight   | encoder.layers.{block}.linear2.weight            | width ff
    blocks.mlp.fc2.bias     | encoder.layers.{block}.linear2.bias              | width

    norm.weight    | encoder.norm.weight | width
    norm.bias      | encoder.norm.bias   | width
    fc_norm.weight | norm.weight         | pooled
    fc_norm.bias   | norm.bias           | pooled
    head.weight    | head.weight         | label feature
    head.bias      | head.bias           | label
"""
# Other names -> the names in the table.
ALIASES = {
    r"(transformer_encoder|transformer|blocks|encoder\.encoder|encoder\.transformer)\.(?=layers\.\d|norm\.)": "encoder.",
    r"(patch_embed(ding|dings)?\.(proj|projection|conv|0)|patch_embedding|patch_embeddings|conv_proj|patch_proj|proj|conv)"
    r"\.(?=weight|bias)": "patch_embed.",
    r"(class_token|cls)$": "cls_token",
    r"(pos_embedding|position_embedding|positional_embedding|position_embeddings|pos_emb)$": "pos_embed",
    r"(mlp_head\.0|head\.0|classifier\.0)\.": "norm.",
    r"(mlp_head\.1|head\.1|classifier\.1|classifier|mlp_head|fc|fc_out)\.(?=weight|bias)": "head.",
}


def unsupported(config: ViTConfig, variant: str) -> str:
    """Return the values in a config that `TransformerEncoderLayer` cannot express; "" if there are none."""
    biases = {config.attention.qkv_bias == "qkv", config.attention.proj_bias, config.mlp.bias, config.norms.bias}
    return unsupported_head_width(config) or ("" if len(biases) == 1 else "biases in some layers of a block only")


FORMAT = Format(
    name="torch-encoder",
    description="a ViT around torch.nn.TransformerEncoder",
    separator=".",
    tables={"": TABLE},
    aliases=ALIASES,
    constraints={
        **{name: value for name, value in COMMON_CONSTRAINTS.items() if name not in ("mlp.bias", "norms.bias")},
        "tokens.distillation": False,
        "tokens.registers": 0,
        "positions.kind": "learned",
        "positions.rotary": "none",
        "attention.qkv_bias": ("qkv", "none"),
        "attention.qk_norm": False,
        "mlp.activation": UNGATED_ACTIVATIONS,
        "norms.order": ("post", "pre"),
        "norms.before_blocks": False,
        "norms.layer_scale": None,
        "head.hidden": None,
    },
    unsupported=unsupported,
    assumed={"norms.eps": 1e-5, "norms.order": "post", "norms.kind": "layer", "mlp.activation": "relu"},
    assumed_behaviour=common_behaviour,
)
