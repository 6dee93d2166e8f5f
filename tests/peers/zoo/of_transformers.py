"""The ViT-like classes of transformers, with their heads, and config fields that change the function."""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.utils import logging

from tests.goldens.peers import float64, rng_for  # before transformers: it makes torchvision importable
from tests.peers.zoo.noise import perturb, uninitialised
from tests.peers.zoo.outcomes import AS_ASSUMED, NotInConfig, Peer, Property

logging.disable_progress_bar()
logging.set_verbosity_error()

VERSION = transformers.__version__
Run = Callable[[nn.Module, Tensor], Tensor]


def output(model: nn.Module, pixels: Tensor) -> Tensor:
    """Return the output of a model: logits, an embedding, a pooled feature, or the first token."""
    out = model(pixels)
    for name in ("logits", "cls_logits", "image_embeds", "pooler_output"):
        if getattr(out, name, None) is not None:
            return getattr(out, name)
    return out.last_hidden_state[:, 0]


def _mean(model: nn.Module, pixels: Tensor) -> Tensor:
    return model(pixels).last_hidden_state.mean(1)


def _first(part: str) -> Run:
    """Return a function that computes the first token of a part of the model: the output of the encoder alone."""
    return lambda model, pixels: getattr(model, part)(pixels).last_hidden_state[:, 0]


def _both(model: nn.Module, pixels: Tensor) -> Tensor:
    """Return the mean of DeiT's two tokens, which the twins compute for a distilled model without classifiers."""
    return getattr(model, "deit", model)(pixels).last_hidden_state[:, :2].mean(1)


def _tower(model: nn.Module, pixels: Tensor) -> Tensor:
    pooled = model.vision_model(pixels).pooler_output
    return model.visual_projection(pooled) if hasattr(model, "visual_projection") else pooled


def _in_order(model: nn.Module, pixels: Tensor) -> Tensor:
    """Return the class token of a masked autoencoder that masks nothing and does not shuffle the patches."""
    encoder = getattr(model, "vit", model)
    encoder.config.mask_ratio = encoder.embeddings.config.mask_ratio = 0.0
    count = encoder.embeddings.position_embeddings.shape[1] - 1
    return encoder(pixels, noise=torch.arange(count).expand(len(pixels), -1) / count).last_hidden_state[:, 0]


def _patches(model: nn.Module, pixels: Tensor) -> Tensor:
    """Return the output of SigLIP 2 for images, which it accepts as flattened patches."""
    side = vision_config(model).patch_size
    batch, channels, height, width = pixels.shape
    rows, columns = height // side, width // side
    flat = (
        pixels.reshape(batch, channels, rows, side, columns, side)
        .permute(0, 2, 4, 3, 5, 1)
        .reshape(batch, rows * columns, -1)
    )
    mask = torch.ones(batch, rows * columns, dtype=torch.long)
    out = model(flat, pixel_attention_mask=mask, spatial_shapes=torch.tensor([[rows, columns]] * batch))
    return out.logits if hasattr(out, "logits") else out.pooler_output


def _encoder(model: nn.Module, pixels: Tensor) -> Tensor:
    """Return the pooled token of the encoder of an image captioner, which is a ViT with its pooler."""
    return model.encoder(pixels).pooler_output


def _normed(model: nn.Module, pixels: Tensor) -> Tensor:
    """Return the class token that a backbone computes before it returns feature maps."""
    hidden = model(pixels, output_hidden_states=True).hidden_states[-1]
    return (model.layernorm if hasattr(model, "layernorm") else model.norm)(hidden)[:, 0]


def _last_block(model: nn.Module, pixels: Tensor) -> Tensor:
    """Return the class token after the last block of a Beit, which has a norm after it only without mean pooling."""
    return model.beit.layernorm(model(pixels, output_hidden_states=True).hidden_states[-1])[:, 0]


_TEXT = {"num_hidden_layers": 1, "vocab_size": 99, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96}
_TOWERS = {"vision_config": {"num_hidden_layers": 1}, "text_config": _TEXT}
_CAPTIONER = {
    "encoder": {"model_type": "vit", "num_hidden_layers": 1},
    "decoder": {"model_type": "bert", "num_hidden_layers": 1, "vocab_size": 99},  # without a projection between them
}
_DECODER = {"decoder_num_hidden_layers": 1, "decoder_hidden_size": 96, "decoder_num_attention_heads": 3}


@dataclass(frozen=True)
class Class:
    """A class of transformers.

    run: (model, images) -> the output that the twins must compute.
    options: fields of its config besides a depth of one.
    build: arguments of the class besides the config.
    """

    name: str
    run: Run = output
    options: dict[str, Any] = field(default_factory=dict)
    build: dict[str, Any] = field(default_factory=dict)


CLASSES = {
    label: Class(label.partition(",")[0], *rest)
    for label, *rest in (
        ("ViTForImageClassification",),
        ("ViTModel",),
        ("ViTModel, no pooler", output, {}, {"add_pooling_layer": False}),
        ("ViTForMaskedImageModeling", _first("vit")),
        ("DeiTForImageClassification",),
        ("DeiTForImageClassificationWithTeacher",),
        ("DeiTModel",),
        ("DeiTModel, no pooler", _both, {}, {"add_pooling_layer": False}),
        ("DeiTForMaskedImageModeling", _both),
        ("Dinov2ForImageClassification",),
        ("Dinov2ForImageClassification, gated", output, {"use_swiglu_ffn": True}),
        ("Dinov2Model",),
        ("Dinov2Backbone", _normed),
        ("Dinov2WithRegistersForImageClassification",),
        ("Dinov2WithRegistersModel",),
        ("Dinov2WithRegistersBackbone", _normed),
        ("DINOv3ViTModel",),
        ("DINOv3ViTModel, gated", output, {"use_gated_mlp": True, "hidden_act": "silu", "num_register_tokens": 4}),
        ("DINOv3ViTBackbone", _normed),
        ("SiglipVisionModel",),
        ("SiglipVisionModel, no head", _mean, {"vision_use_head": False}),
        ("SiglipForImageClassification", output, {"vision_config": {"num_hidden_layers": 1}}),
        ("SiglipModel", _tower, _TOWERS),
        ("Siglip2VisionModel", _patches, {"image_size": 256}),
        ("Siglip2ForImageClassification", _patches, {"vision_config": {"num_hidden_layers": 1}}),
        ("CLIPVisionModel",),
        ("CLIPVisionModelWithProjection",),
        ("CLIPForImageClassification", output, {"vision_config": {"num_hidden_layers": 1}}),
        ("CLIPModel", _tower, _TOWERS),
        ("AltCLIPModel", _tower, _TOWERS),
        ("ChineseCLIPModel", _tower, _TOWERS),
        ("CLIPSegModel", _tower, _TOWERS),
        ("MetaClip2Model", _tower, _TOWERS),
        ("ViTMAEModel", _in_order),
        ("ViTMAEForPreTraining", _in_order, _DECODER),
        ("ViTMSNForImageClassification",),
        ("ViTMSNModel",),
        ("BeitForImageClassification",),
        ("BeitForImageClassification, absolute", output, {"use_absolute_position_embeddings": True}),
        ("BeitModel",),
        ("BeitBackbone", _last_block),
        ("Data2VecVisionForImageClassification",),
        ("BeitForImageClassification, relative", output, {"use_relative_position_bias": True}),
        ("Data2VecVisionModel",),
        ("Data2VecVisionModel, shared", output, {"use_shared_relative_position_bias": True}),
        ("IJepaForImageClassification",),
        ("IJepaModel", _mean),
        ("Aimv2VisionModel",),
        ("MetaClip2VisionModel",),
        ("MetaClip2VisionModelWithProjection",),
        ("AltCLIPVisionModel",),
        ("ChineseCLIPVisionModel",),
        ("CLIPSegVisionModel",),
        ("MLCDVisionModel",),
        ("OwlViTVisionModel",),
        ("BlipVisionModel",),
        ("VisionEncoderDecoderModel", _encoder, _CAPTIONER),
        ("RfDetrDinov2Backbone", _normed, {"image_size": 168}),
        ("Tipsv2VisionModel",),
        ("Tipsv2VisionBackbone", _normed),
        ("PixioModel",),
        ("YolosModel",),
        ("VitDetModel",),
        ("ViTHybridModel",),
    )
    if hasattr(transformers, label.partition(",")[0])
}
_VISION = r"(VisionModel\w*|VisionTransformer|ForImageClassification\w*|Backbone|ForPreTraining|(?<!PreTrained)Model)$"


def other_classes() -> Iterator[str]:
    """Yield the names of all other classes of transformers that take images.  This imports all of them."""
    known = {each.name for each in CLASSES.values()}
    for name in dir(transformers):
        cls = getattr(transformers, name, None) if re.search(_VISION, name) else None
        if name not in known and inspect.isclass(cls) and issubclass(cls, transformers.PreTrainedModel):
            if str(cls.main_input_name).startswith("pixel_values") and not name.startswith("Auto"):
                yield name


_PARTS = ("vision_config", "encoder")  # fields of a larger model's config that contain the config of its ViT
_DEPTHS = ("num_hidden_layers", "encoder_layers", "num_encoder_blocks", "decoder_layers")


def peer(label: str, **options: Any) -> Peer:
    """Return a peer: a class of `CLASSES`, or another one, with config fields and one block."""
    kind = CLASSES.get(label, Class(label))
    name = " ".join([label, *(f"{key}={value!r}" for key, value in options.items())])
    cls = getattr(transformers, kind.name)
    chosen = {"num_labels": 7, **kind.options}
    if part := next((name for name in _PARTS if name in chosen), ""):
        chosen[part] = {**chosen[part], **options}
    else:
        depth = {key: 1 for key in _DEPTHS if hasattr(cls.config_class(), key)}
        chosen = {**depth, **chosen, **options}
    with float64(), uninitialised():
        model = cls(cls.config_class(**chosen, attn_implementation="eager"), **kind.build).double().eval()
    perturb(model, name)
    config = vision_config(model)
    images = rng_for(f"{name} images").standard_normal((1, getattr(config, "num_channels", 3), *image_size(model)))
    found = Peer(name, model, images, kind.run, PROPERTIES)
    return found if label in CLASSES or _returns_features(found) else replace(found, run=None)


def _returns_features(one: Peer) -> bool:
    """Return whether a class computes one vector for each image.  Others need further inputs, or return feature maps."""
    try:
        return one.outputs().ndim == 2
    except Exception:  # each class raises its own exceptions
        return False


def vision_config(model: nn.Module) -> Any:
    """Return the config of a ViT; for a larger model, the config of its vision tower or encoder."""
    return next((getattr(model.config, name) for name in _PARTS if hasattr(model.config, name)), model.config)


def image_size(model: nn.Module) -> tuple[int, int]:
    """Return the height and width of a model's images."""
    own = getattr(vision_config(model), "image_size", 224)
    return (own, own) if isinstance(own, int) else tuple(own)


def save_each_way(one: Peer, path: Path) -> Iterator[tuple[str, Path, bool]]:
    """Save a model as a folder and as state dicts; yield the name of the way, the path, and whether it has no config."""
    one.model.save_pretrained(path / "folder")
    yield "folder", path / "folder", False
    saved = path / "bare" / "model.safetensors"
    saved.parent.mkdir()
    (path / "folder" / "model.safetensors").rename(saved)
    yield "bare", saved, True
    torch.save(one.model.state_dict(), path / "bare" / "state.pth")
    yield "bare, keys in memory", path / "bare" / "state.pth", True


# Properties that no tensor shows -------------------------------------------------------------------------------------

_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "linear": "none",
}
_LAYERS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "quick_gelu": "quick_gelu", "relu": "relu", "none": "linear"}
_ACTIVATION_ATTRIBUTES = ("activation_fn", "intermediate_act_fn", "activation", "act_fn", "act")


def _eps(model: nn.Module) -> Any:
    found = {module.eps for module in model.modules() if isinstance(module, nn.LayerNorm)}
    return found.pop() if len(found) == 1 else NotInConfig(f"eps of {found}")


def _assume_eps(model: nn.Module, value: float) -> None:
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = value


def _activation(model: nn.Module) -> Any:
    config = vision_config(model)
    if getattr(config, "use_swiglu_ffn", False) or getattr(config, "use_gated_mlp", False):
        return "swiglu"
    return _ACTIVATIONS.get(config.hidden_act, NotInConfig(config.hidden_act))


def _gate(model: nn.Module) -> Any:
    act = vision_config(model).hidden_act
    return (
        AS_ASSUMED
        if act in ("silu", "swish") or not getattr(vision_config(model), "use_gated_mlp", False)
        else NotInConfig(act)
    )


def _assume_gate(model: nn.Module, value: str) -> None:
    _assume_activation(model, "silu")


def _pooler(model: nn.Module) -> Any:
    act = getattr(model.config, "pooler_act", "tanh")
    return AS_ASSUMED if act == "tanh" else NotInConfig(act)


def _assume_pooler(model: nn.Module, value: str) -> None:
    model.pooler.activation = nn.Tanh()


def _pool(model: nn.Module) -> str:
    """Return the pool of a class; "token" for a class that does not pool, whose class token `run` takes."""
    if re.match("Beit|Data2VecVision", type(model).__name__):  # the norm of the pooler is that of the mean
        return "mean" if any(name.endswith("pooler.layernorm.weight") for name, _ in model.named_parameters()) else "token"
    return "token_mean" if re.match("Dinov2.*ForImageClassification", type(model).__name__) else "token"


# Class -> the output for images that is assumed of its weights if it has no classifier.
_WITHOUT_CLASSIFIER: dict[str, Run] = {
    "DeiTForImageClassification": lambda model, pixels: _both(model, pixels),
    "CLIPForImageClassification": lambda model, pixels: model.vision_model(pixels).pooler_output,
    "SiglipForImageClassification": lambda model, pixels: model.vision_model(pixels).pooler_output,
}


def _outputs(model: nn.Module) -> Any:
    return NotInConfig("those of another token") if type(model).__name__ in _WITHOUT_CLASSIFIER else AS_ASSUMED


def _assume_outputs(model: nn.Module, value: str) -> None:
    run = _WITHOUT_CLASSIFIER[type(model).__name__]
    model.forward = lambda pixels: SimpleNamespace(logits=run(model, pixels))


def _assume_activation(model: nn.Module, value: str) -> None:
    for name, module in list(model.named_modules()):
        for place in _ACTIVATION_ATTRIBUTES:
            if hasattr(module, place) and "pooler" not in name:
                setattr(module, place, ACT2FN[_LAYERS.get(value, "silu")])


def _windows(model: nn.Module) -> Any:
    count = getattr(model.config, "num_windows", 1)
    return AS_ASSUMED if count == 1 else NotInConfig(f"{count} x {count}")


def _assume_no_windows(model: nn.Module, value: str) -> None:
    for module in model.modules():
        if hasattr(module, "num_windows"):
            module.num_windows = 1
    model.config.num_windows = 1


def _positions(model: nn.Module) -> str:
    is_added = getattr(vision_config(model), "use_absolute_position_embeddings", _rotary(model) != "dinov3")
    return "learned" if is_added else "none"


def _base(model: nn.Module) -> Any:
    return float(getattr(vision_config(model), "rope_theta", 100.0))


def _rotary(model: nn.Module) -> Any:
    names = {type(module).__name__ for module in model.modules()}
    if "DINOv3ViTRopePositionEmbedding" in names:
        return "dinov3"
    others = [name for name in names if re.search("Rope|Rotary", name)]
    return NotInConfig(others[0]) if others else "none"


PROPERTIES = {
    "norms.eps": Property(_eps, _assume_eps),
    "mlp.activation": Property(_activation, _assume_activation),
    "num_heads": Property(lambda model: vision_config(model).num_attention_heads),
    "positions.kind": Property(_positions),
    "positions.rotary": Property(_rotary),
    "positions.rotary_base": Property(_base),
    "rotation": Property(lambda model: AS_ASSUMED),  # `_rotary` reports the difference
    "head.pool": Property(_pool),
    "attention.scale": Property(lambda model: None),
    "attention.value_skip": Property(lambda model: False),
    "image_size": Property(image_size),
    "MLP gate": Property(_gate, _assume_gate),
    "activation of pre_logits": Property(_pooler, _assume_pooler),
    "attention pattern": Property(_windows, _assume_no_windows),
    "outputs": Property(_outputs, _assume_outputs),
    "norms.order": Property(lambda model: "pre"),
    "norms.kind": Property(lambda model: "layer"),
    "residual connections": Property(lambda model: AS_ASSUMED),
    "norms without weights": Property(lambda model: AS_ASSUMED),
    "patch extraction": Property(lambda model: AS_ASSUMED),
    "relative positions": Property(lambda model: AS_ASSUMED),
    "use of blocks": Property(lambda model: AS_ASSUMED),
    "further operations": Property(lambda model: AS_ASSUMED),
    "code around the model": Property(lambda model: AS_ASSUMED),  # the properties above describe it
    "use of positions": Property(lambda model: AS_ASSUMED),
    "head.pool_prefix": Property(lambda model: False),
    "head.pool_heads": Property(lambda model: None),
    "mean pooling": Property(lambda model: AS_ASSUMED),
    "masked patches": Property(lambda model: AS_ASSUMED),  # `run` masks none
    "pooler": Property(lambda model: AS_ASSUMED),
    "decoder": Property(lambda model: AS_ASSUMED),
    "weights": Property(lambda model: AS_ASSUMED),  # `run` uses the same weights
}


# Random config fields ------------------------------------------------------------------------------------------------

_FIELDS: dict[str, tuple[Any, ...]] = {
    "hidden_act": tuple(name for name in ACT2FN if name not in ("prelu", "xielu")),
    "layer_norm_eps": (1e-12, 1e-6, 1e-5, 3e-4),
    "image_size": ([48, 80], [32, 128], 64, [240, 96]),
    "num_channels": (1, 2, 4),
    "num_attention_heads": (4, 6, 8, 16),
    "intermediate_size": (1000, 3072),
    "hidden_dropout_prob": (0.1,),
    "attention_probs_dropout_prob": (0.1,),
    "initializer_range": (0.1,),
    "num_labels": (0, 1, 3),
    "rotary_share": (0.5,),  # transformers does not know this field and the next one, and stores them
    "attention_scale": (2.0,),
}
_BEIT = {
    "use_absolute_position_embeddings": (True,),
    "use_relative_position_bias": (True,),
    "use_shared_relative_position_bias": (True,),
    "use_mean_pooling": (False,),
    "layer_scale_init_value": (0.0,),
}
_POOLED = {"qkv_bias": (False,), "pooler_act": ("relu", "tanh", "gelu"), "pooler_output_size": (100,)}
_FIELDS_OF_CLASS: dict[str, dict[str, tuple[Any, ...]]] = {
    "ViT": {**_POOLED, "encoder_stride": (8,)},
    "DeiT": _POOLED,
    "Dinov2": {
        "qkv_bias": (False,),
        "mlp_ratio": (3,),
        "use_swiglu_ffn": (True, False),
        "layerscale_value": (0.1,),
        "drop_path_rate": (0.1,),
        "apply_layernorm": (False,),
        "out_indices": ([0], [0, 1]),
        "reshape_hidden_states": (False,),
        "num_register_tokens": (0, 2),
        "use_mask_token": (False,),
    },
    "DINOv3": {
        "use_gated_mlp": (True, False),
        "rope_theta": (37.5,),
        "query_bias": (False,),
        "key_bias": (True,),
        "value_bias": (False,),
        "proj_bias": (False,),
        "mlp_bias": (False,),
        "num_register_tokens": (0, 3),
        "pos_embed_shift": (0.1,),
        "pos_embed_rescale": (2.0,),
        "layerscale_value": (0.1,),
        "apply_layernorm": (False,),
        "out_indices": ([0], [0, 1]),
    },
    "Siglip": {"vision_use_head": (False,)},
    "Data2VecVision": _BEIT,
    "Beit": _BEIT,
    "Aimv2": {"use_head": (False,), "qkv_bias": (True,), "mlp_bias": (True,), "is_native": (True,)},
}


def random_variation(seed: int) -> tuple[str, dict[str, Any]]:
    """Return a random class with one to three random config fields."""
    rng = np.random.default_rng([seed, 16])
    label = list(CLASSES)[rng.integers(len(CLASSES))]
    more = next((fields for start, fields in _FIELDS_OF_CLASS.items() if label.startswith(start)), {})
    names = [*_FIELDS, *(name for name in more for _ in range(2))]
    chosen = dict.fromkeys(names[index] for index in rng.integers(len(names), size=rng.integers(1, 4)))
    values = {**_FIELDS, **more}
    return label, {name: values[name][rng.integers(len(values[name]))] for name in chosen}
