"""The parameter names of the article's ViT-B/16, which uses torch.nn.MultiheadAttention.

Its MLP registers each layer twice, by name and in an nn.Sequential, so a state dict has two equal copies of each layer.
"""

import re
from collections.abc import Callable, Mapping

import numpy as np

from parity.checkpoints.formats.article import article_format
from parity.checkpoints.formats.behaviour import common_behaviour
from parity.checkpoints.formats.evidence import Evidence
from parity.checkpoints.layout import Array
from vit_spec import ViTConfig

TABLE = """
    patch_embed.proj.weight | patch_embedding.conv.weight                      | width rgb ph pw
    patch_embed.proj.bias   | patch_embedding.conv.bias                        | width
    cls_token               | class_embedding                                  | 1 1 width
    pos_embed               | position_embedding                               | 1 token width
    blocks.norm1.weight     | vit.{block}.attention.layer.weight               | width
    blocks.norm1.bias       | vit.{block}.attention.layer.bias                 | width
    blocks.attn.qkv.weight  | vit.{block}.attention.attention.in_proj_weight   | (qkv head dim) width
    blocks.attn.qkv.bias    | vit.{block}.attention.attention.in_proj_bias     | (qkv head dim)
    blocks.attn.proj.weight | vit.{block}.attention.attention.out_proj.weight  | width (head dim)
    blocks.attn.proj.bias   | vit.{block}.attention.attention.out_proj.bias    | width
    blocks.norm2.weight     | vit.{block}.mlp.norm.weight                      | width
    blocks.norm2.bias       | vit.{block}.mlp.norm.bias                        | width
    blocks.mlp.fc1.weight   | vit.{block}.mlp.linear1.weight                   | ff width
    blocks.mlp.fc1.bias     | vit.{block}.mlp.linear1.bias                     | ff
    blocks.mlp.fc2.weight   | vit.{block}.mlp.linear2.weight                   | width ff
    blocks.mlp.fc2.bias     | vit.{block}.mlp.linear2.bias                     | width
    fc_norm.weight          | classifier.0.weight                              | pooled
    fc_norm.bias            | classifier.0.bias                                | pooled
    head.weight             | classifier.1.weight                              | label feature
    head.bias               | classifier.1.bias                                | label
"""

DUPLICATES = """
    blocks.mlp.fc1.weight | vit.{block}.mlp.seq.0.weight | ff width
    blocks.mlp.fc1.bias   | vit.{block}.mlp.seq.0.bias   | ff
    blocks.mlp.fc2.weight | vit.{block}.mlp.seq.3.weight | width ff
    blocks.mlp.fc2.bias   | vit.{block}.mlp.seq.3.bias   | width
"""


def uncalled_norm(value: float) -> Callable[[ViTConfig], Array]:
    """Return a function that returns the initial weights or biases of the norms that are never called, (blocks, width).

    Args:
        value: the value of every entry.
    """
    return lambda config: np.full((config.depth, config.width), value)


def assumed_behaviour(evidence: Evidence) -> Mapping[str, str]:
    """Return the assumptions about what no tensor shows.

    One is that a norm is never called, if its values are not the initial ones: a model that calls it has the same keys.
    """
    found = dict(common_behaviour(evidence))
    norms = {key: array for key, array in evidence.ignored_arrays.items() if re.fullmatch(_UNCALLED_NORM, key)}
    trained = any(np.any(array.read(0, array.size) != key.endswith("weight")) for key, array in norms.items())
    if trained:
        found["vit.{block}.norm"] = "never called, although its values differ from the initial ones"
    return found


_UNCALLED_NORM = r"vit\.\d+\.norm\.(weight|bias)"
FORMAT = article_format(
    "article_multihead",
    "the article with torch's MultiheadAttention",
    {"linear": TABLE, "seq": TABLE.replace("linear1", "seq.0").replace("linear2", "seq.3")},
    assumed_behaviour=assumed_behaviour,
    duplicates=DUPLICATES,
    constants={
        "vit.{block}.norm.weight | width": uncalled_norm(1.0),
        "vit.{block}.norm.bias | width": uncalled_norm(0.0),
    },
    ignored_keys={
        r"vit\.\d+\.mlp\.seq\.[03]\.(weight|bias)": "the same array as linear1 or linear2",
        _UNCALLED_NORM: "a norm that the model never calls",
    },
)
