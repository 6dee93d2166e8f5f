"""The ViT of keras-hub, `ViTBackbone` and `ViTImageClassifier`: variables by their paths, as `get_state_tree()` has them.

Keras' own files (.weights.h5, .keras) are HDF5, which needs h5py.  In them, a variable is a number in its layer.

With `pooling="gap"`, the mean includes the class token if there is one.

Source: keras-hub 0.32.0, src/models/vit/vit_backbone.py, vit_layers.py, vit_image_classifier.py.
"""

from collections.abc import Mapping

from parity.checkpoints.formats.behaviour import common_behaviour
from parity.checkpoints.formats.evidence import Evidence, Fields
from parity.checkpoints.formats.format import Format
from parity.checkpoints.formats.library_files import LibraryFiles
from parity.checkpoints.formats.linen import SPELLINGS
from parity.checkpoints.formats.tables import COMMON_CONSTRAINTS, unsupported_head_width
from vit_spec import InputError, ViTConfig

_BACKBONE, _CLASSIFIER = "keras_hub>ViTBackbone", "keras_hub>ViTImageClassifier"  # registered names

TABLE = """
    patch_embed.proj.weight | vit_patching_and_embedding/patch_embedding/kernel        | ph pw rgb width
    patch_embed.proj.bias   | vit_patching_and_embedding/patch_embedding/bias          | width
    cls_token               | vit_patching_and_embedding/class_token                   | 1 1 width
    pos_embed               | vit_patching_and_embedding/position_embedding/embeddings | token width

    blocks.norm1.weight     | vit_encoder/transformer_block_{block+1}/ln_1/gamma                  | width
    blocks.norm1.bias       | vit_encoder/transformer_block_{block+1}/ln_1/beta                   | width
    blocks.attn.qkv.weight  | vit_encoder/transformer_block_{block+1}/mha/{qkv}/kernel            | width head dim
    blocks.attn.qkv.bias    | vit_encoder/transformer_block_{block+1}/mha/{qkv}/bias              | head dim
    blocks.attn.proj.weight | vit_encoder/transformer_block_{block+1}/mha/attention_output/kernel | head dim width
    blocks.attn.proj.bias   | vit_encoder/transformer_block_{block+1}/mha/attention_output/bias   | width
    blocks.norm2.weight     | vit_encoder/transformer_block_{block+1}/ln_2/gamma                  | width
    blocks.norm2.bias       | vit_encoder/transformer_block_{block+1}/ln_2/beta                   | width
    blocks.mlp.fc1.weight   | vit_encoder/transformer_block_{block+1}/mlp/dense_1/kernel          | width ff
    blocks.mlp.fc1.bias     | vit_encoder/transformer_block_{block+1}/mlp/dense_1/bias            | ff
    blocks.mlp.fc2.weight   | vit_encoder/transformer_block_{block+1}/mlp/dense_2/kernel          | ff width
    blocks.mlp.fc2.bias     | vit_encoder/transformer_block_{block+1}/mlp/dense_2/bias            | width

    norm.weight       | vit_encoder/ln/gamma | width
    norm.bias         | vit_encoder/ln/beta  | width
    pre_logits.weight | pre_logits/kernel    | pooled feature
    pre_logits.bias   | pre_logits/bias      | feature
    head.weight       | predictions/kernel   | feature label
    head.bias         | predictions/bias     | label
"""


def unsupported(config: ViTConfig, variant: str) -> str:
    """Return the values of a config that the classes cannot have together; "" if there are none."""
    biases = config.attention.qkv_bias == "qkv", config.attention.proj_bias
    if biases[0] != biases[1]:
        return f"attention.qkv_bias={config.attention.qkv_bias!r} with attention.proj_bias={config.attention.proj_bias}"
    if config.tokens.class_token and config.positions.covers == "none":
        return "positions.covers='none' with a class token"
    return unsupported_head_width(config)


def assumed_behaviour(evidence: Evidence) -> Mapping[str, str]:
    """Return the assumptions about what neither a tensor nor the config.json of the whole model shows."""
    described = (evidence.notes.get("config.json") or {}).get("registered_name")
    if described == _CLASSIFIER or (described == _BACKBONE and "head.weight" not in evidence.axes):
        return {}
    found = dict(common_behaviour(evidence))
    if "head.weight" in evidence.axes:
        found["activation of the outputs"] = "none: the argument activation of ViTImageClassifier is None"
    return found


def read_config(evidence: Evidence) -> Fields:
    """Return the fields that the config.json or task.json of a preset states.

    Raises:
        InputError: it is that of another class, or of a model that the twins cannot compute.
    """
    content = evidence.notes.get("config.json") or {}
    if "registered_name" not in content:
        return {}
    name, given = content["registered_name"], content["config"]
    fields: dict[str, object] = {}
    if name == _CLASSIFIER:
        if given["activation"] not in (None, "linear"):
            raise InputError(
                f"its config.json says activation {given['activation']!r}: only models with logits can be read"
            )
        class_token = given["backbone"]["config"]["use_class_token"]
        pools = {"gap": "mean", **({"token": "token"} if class_token else {})}
        if given["pooling"] not in pools:
            raise InputError(f"its config.json says pooling {given['pooling']!r}, which ViTConfig cannot express here")
        fields |= {"head.pool": pools[given["pooling"]], "head.hidden": given["intermediate_dim"]}
        fields["head.pool_prefix"] = given["pooling"] == "gap" and class_token
        name, given = given["backbone"]["registered_name"], given["backbone"]["config"]
    if name != _BACKBONE:
        raise InputError(
            f"its config.json is of {name!r}: only ViTBackbone and ViTImageClassifier of keras-hub can be read"
        )
    height, width, _ = given["image_shape"]
    return {
        **fields,
        "image_size": (height, width),
        "patch_size": tuple(given["patch_size"]),
        "num_heads": given["num_heads"],
        "norms.eps": given["layer_norm_epsilon"],
    }


FORMAT = Format(
    name="keras-hub",
    description="ViT of keras-hub, variables by their paths",
    separator="/",
    tables={"": TABLE},
    spellings=SPELLINGS,
    ignored_keys={
        r"optimizer_variables/.*": "state of the optimizer",
        r"metrics_variables/.*": "state of the metrics",
        r"(.*/)?seed_generator\w*/.*": "random number generators of dropout",
    },
    constraints={
        **COMMON_CONSTRAINTS,
        "tokens.distillation": False,
        "tokens.registers": 0,
        "positions.kind": "learned",
        "positions.rotary": "none",
        "attention.qkv_bias": ("qkv", "none"),
        "attention.proj_bias": (True, False),
        "attention.qk_norm": False,
        "mlp.activation": "gelu",
        "norms.before_blocks": False,
        "norms.after_blocks": True,
        "norms.after_pool": False,
        "norms.layer_scale": None,
        "head.pool": lambda config: ("token", "mean") if config.tokens.class_token else "mean",
        "head.pool_prefix": lambda config: config.head.pool == "mean" and config.tokens.class_token,
        "head.bias": True,
    },
    unsupported=unsupported,
    assumed={"norms.eps": 1e-6},
    read_config=read_config,
    assumed_behaviour=assumed_behaviour,
    library=LibraryFiles(config_key="registered_name"),
)
