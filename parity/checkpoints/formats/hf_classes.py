"""The classes of transformers: what each returns for images, and whether the twins compute it."""

import re
from collections.abc import Mapping
from typing import Any

from parity.checkpoints.formats.behaviour import behaviour_of_module, common_behaviour
from parity.checkpoints.formats.evidence import Evidence
from vit_spec import InputError

BACKBONE_FIELDS = ("apply_layernorm", "out_features", "out_indices")  # of a Backbone, see `_check_feature_maps`

# Output of a class for images -> the classes of transformers 4 and 5 for these models, without the prefix TF or Flax.
# The twins compute the outputs POOLED, PROJECTED (the pooled output through a projection) and CLASSIFIED (logits, or the
# input of the classifier if there is none).  RETURNED are no single vector, so the output of the twins is an assumption.
# The twins cannot compute UNSUPPORTED.
POOLED, PROJECTED, CLASSIFIED = "the pooled output", "the projected output", "logits"
TOKENS, MAPS, IMAGE = "all tokens", "feature maps", "a reconstruction of the image"
RETURNED = (TOKENS, MAPS, IMAGE)
UNSUPPORTED = {
    "BeitBackbone": "feature maps without a norm",
    "BeitForMaskedImageModeling": "logits of visual tokens for each patch",
    "BeitForSemanticSegmentation": "logits for each pixel",
    "CLIPForImageClassification": "the mean of the patches before the last norm",
    "Data2VecVisionForSemanticSegmentation": "logits for each pixel",
    "DeiTForImageClassification": "the class token alone",
    "SiglipForImageClassification": "the mean of the patches after the last norm",
}
_HEADS = {  # the layers of such a class besides the model; those of others are classifier.*
    "BeitForMaskedImageModeling": "layernorm.* or lm_head.*",
    "BeitForSemanticSegmentation": "fpn*.*, decode_head.* or auxiliary_head.*",
    "Data2VecVisionForSemanticSegmentation": "fpn*.*, decode_head.* or auxiliary_head.*",
}
_OUTPUTS = {
    POOLED: "BeitModel CLIPVisionModel DINOv3ViTModel Dinov2Model Dinov2WithRegistersModel SiglipModel SiglipVisionModel",
    PROJECTED: "CLIPModel CLIPVisionModelWithProjection",
    CLASSIFIED: "BeitForImageClassification Data2VecVisionForImageClassification DeiTForImageClassificationWithTeacher "
    "Dinov2ForImageClassification Dinov2WithRegistersForImageClassification ViTForImageClassification",
    TOKENS: "Data2VecVisionModel DeiTModel ViTMAEModel ViTModel",
    MAPS: "DINOv3ViTBackbone Dinov2Backbone Dinov2WithRegistersBackbone",
    IMAGE: "DeiTForMaskedImageModeling ViTForMaskedImageModeling ViTMAEForPreTraining",
}
CLASSES = {name: output for output, names in _OUTPUTS.items() for name in names.split()} | UNSUPPORTED
MODELS = {  # model_type -> the beginning of the names of its classes
    "beit": "Beit",
    "clip": "CLIP",
    "clip_vision_model": "CLIP",
    "data2vec-vision": "Data2VecVision",
    "deit": "DeiT",
    "dinov2": "Dinov2",
    "dinov2_with_registers": "Dinov2WithRegisters",
    "dinov3_vit": "DINOv3ViT",
    "siglip": "Siglip",
    "siglip_vision_model": "Siglip",
    "vit": "ViT",
    "vit_mae": "ViTMAE",
}


# Classes whose own keys have no prefix -> the prefix of these keys in classes that contain them.
_BARE_CLASSES = {
    "BeitModel": "beit",
    "Data2VecVisionModel": "data2vec_vision",
    "DeiTModel": "deit",
    "Dinov2Backbone": "dinov2",
    "Dinov2Model": "dinov2",
    "Dinov2WithRegistersBackbone": "dinov2_with_registers",
    "Dinov2WithRegistersModel": "dinov2_with_registers",
    "ViTMAEModel": "vit",
    "ViTModel": "vit",
}
_VISION_CLASSES = ("CLIPVisionModel", "CLIPVisionModelWithProjection", "SiglipVisionModel")  # without a text tower


def unread_layers(evidence: Evidence, name: str = "") -> Mapping[str, str]:
    """Return layers that are not read, each with the assumption that it does not change the output of the model.

    The classes of transformers do not use these layers for their output.  Custom classes may have layers with the same
    names and use them.  Nothing is assumed about a layer that the class in config.json has.

    Args:
        evidence: what the checkpoint shows about the model.
        name: the class in config.json; "" for none.
    """
    found = {key.split(".")[-3] for key in evidence.ignored_arrays if re.search(r"\b(pooler\.dense|decoder\.0)\.\w+$", key)}
    found -= {"decoder"} if name.endswith("ForMaskedImageModeling") else set()
    if name in _VISION_CLASSES:
        found |= {key.partition(".")[0] for key in evidence.ignored_arrays if re.match(r"text_|logit_", key)}
    return dict.fromkeys(sorted(found), "without effect on the output of the model")


def _module_around(evidence: Evidence, name: str) -> str:
    """Return the path of the class in config.json within another module, as the keys show it; "" if there is none.

    Without another module, transformers 5 writes the image towers of CLIP and SigLIP without the prefix "vision_model",
    except for weights that it has read with this prefix.
    """
    if name in _BARE_CLASSES and "bare" not in evidence.variant.split("-"):  # "v4-bare" in PyTorch, "bare-gated" in Flax
        return _BARE_CLASSES[name]
    version = str(evidence.notes["config.json"].get("transformers_version", ""))
    is_tower = name in ("CLIPVisionModel", "SiglipVisionModel") and evidence.variant == "v4"
    return "vision_model" if is_tower and re.match(r"([5-9]|\d\d)\.", version) else ""


def assumed_behaviour(evidence: Evidence) -> Mapping[str, str]:
    """Return the assumptions about what no tensor shows.

    With a config.json, up to three kinds remain: the vector that is the output, if config.json names no class, or one that
    returns no single vector; layers that this class lacks; and the code of a module around the class.
    """
    outputs = _outputs(evidence)
    if not model_type(evidence):
        return {"outputs": outputs, **common_behaviour(evidence), **unread_layers(evidence)}
    name = stated_class(evidence)
    found = dict(unread_layers(evidence, name))
    if module := _module_around(evidence, name):
        found |= behaviour_of_module(evidence, module)
    if not name:
        found["outputs"] = f"{outputs}; config.json names no class in architectures"
    elif CLASSES[name] in RETURNED and "pre_logits.weight" not in evidence.axes:
        found["outputs"] = f"{outputs}; {name} returns {CLASSES[name]}"
    elif name == "BeitModel" and not {"norm.weight", "fc_norm.weight"} & evidence.axes.keys():
        found["outputs"] = f"{outputs}; the weights lack the pooler of {name}"
    return found


def _outputs(evidence: Evidence) -> str:
    """Return the vector that the twins compute from these parameters, in words."""
    axes = evidence.axes
    if "head.weight" in axes:
        return "those of both classifiers" if "head_dist.weight" in axes else "those of the classifier"
    if "pre_logits.weight" in axes:
        return "those of the pooler"
    if "attn_pool.latent" in axes:
        return "those of the attention pooling"
    if "fc_norm.weight" in axes:
        return "the mean of the patches, after its norm"
    both = "the mean of the class token and the distillation token" if "dist_token" in axes else "the class token"
    return f"{both}, after the last {'norm' if 'norm.weight' in axes else 'block'}"


def model_type(evidence: Evidence) -> str:
    """Return `model_type` in config.json; "" if there is none."""
    return str(evidence.notes.get("config.json", {}).get("model_type", ""))


def stated_class(evidence: Evidence) -> str:
    """Return the class that config.json names in `architectures`, without the prefix TF or Flax; "" if it names none.

    Raises:
        InputError: it names several classes, or one that is not one of transformers' for its model_type.
    """
    named, kind = evidence.notes["config.json"].get("architectures"), model_type(evidence)
    listed = named if isinstance(named, list) else [named] if named else []
    names = [re.sub("^(TF|Flax)", "", str(name)) for name in listed]
    for name in names:
        owner = max((start for start in MODELS.values() if name.startswith(start)), key=len, default="")
        if name not in CLASSES or owner != MODELS[kind]:
            raise InputError(
                f"its config.json says that its class is {name!r}, which is not one of transformers' for model_type "
                f"{kind!r} and may compute another function: remove architectures from it if it does not"
            )
    if len(set(names)) > 1:
        raise InputError(
            f"its config.json names several classes, {', '.join(map(repr, names))}: leave the class of these weights in "
            f"architectures"
        )
    return names[0] if names else ""


def check_class(name: str, evidence: Evidence, content: Mapping[str, Any]) -> None:
    """Raise InputError if the twins do not compute the output of a class, or the weights are not those of the class.

    Args:
        name: the result of `stated_class`, or "".
        evidence: what the checkpoint shows about the model.
        content: the fields of config.json.
    """
    what, output, axes = f"its config.json says that its class is {name!r}", CLASSES.get(name, ""), evidence.axes
    if name in UNSUPPORTED:
        raise InputError(
            f"{what}, whose output is {output}: not supported; remove architectures from config.json, and any "
            f"{_HEADS.get(name, 'classifier.*')} from the weights, to get {_outputs(evidence)}"
        )
    mismatch = ""
    if "head.weight" in axes and output in (POOLED, *RETURNED):
        mismatch = "has no classifier, but the weights have one"
    if "head.weight" not in axes and output == PROJECTED:
        mismatch = "has a projection, but the weights have none"
    if "pre_logits.weight" in axes and output not in (TOKENS, ""):
        mismatch = "has no pooler, but the weights have one"
    if "head.weight" not in axes and output == CLASSIFIED and len(content.get("id2label") or ()) > 0:
        mismatch = f"has a classifier of {len(content['id2label'])} classes, but the weights have none"
    if mismatch:
        raise InputError(f"{what}, which {mismatch}: give the config.json of these weights")
    if output == MAPS:
        _check_feature_maps(name, evidence.sizes["block"], content)


def _check_feature_maps(name: str, depth: int, content: Mapping[str, Any]) -> None:
    """Raise InputError if a class does not return the feature map of the last block after the last norm.

    Args:
        name: the class.
        depth: the number of blocks.
        content: the fields of config.json.
    """
    for field, last in {"out_indices": (depth, -1), "out_features": (f"stage{depth}",)}.items():
        given = content.get(field)
        if given is not None and not any(stage in last for stage in (given if isinstance(given, list) else [given])):
            raise InputError(
                f"its config.json says {field} {given!r}, which omits the last block: only the last feature map is "
                "supported; remove out_indices and out_features to get it"
            )
    # DINOv3ViTBackbone normalizes the last feature map whatever this field says.
    if not content.get("apply_layernorm", True) and not name.startswith("DINOv3"):
        raise InputError(
            f"its config.json says apply_layernorm {content['apply_layernorm']!r}: only feature maps after the last norm "
            f"are supported"
        )
