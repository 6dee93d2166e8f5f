"""Tiny models of Hugging Face transformers with random weights, with which the formats are compared."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers

from parity.checkpoints.formats import get
from tests.goldens.golden import noise
from tests.goldens.peers import fill, float64, rng_for

PEER = f"transformers {transformers.__version__}"
SIZES = {
    "hidden_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 18,
    "image_size": 12,
    "patch_size": 4,
    "num_labels": 5,
    "attn_implementation": "eager",
}


@dataclass(frozen=True)
class Case:
    """A class of transformers, and the outputs that the twins must compute from its weights.

    name: the name of the case.
    format: the name of the format, without the variant.
    cls: the name of the class.
    variant: the variant of the format that `save_pretrained` writes.
    options: fields of its config.
    logits: its outputs for images -> the outputs that the twins compute; by default its logits.
    build: arguments of the class besides the config.
    """

    name: str
    format: str
    cls: str
    variant: str
    options: dict[str, Any] = field(default_factory=dict)
    logits: Callable[[Any], torch.Tensor] = lambda out: out.logits
    build: dict[str, Any] = field(default_factory=dict)

    def model(self) -> Any:
        """Return the model with random weights in the default dtype."""
        cls = getattr(transformers, self.cls)
        model = cls(cls.config_class(**{**SIZES, **self.options}), **self.build).eval()
        with torch.no_grad():
            fill(model, rng_for(self.name))
            for name, parameter in model.named_parameters():
                if name.endswith("position_embeddings"):  # MAE does not train it, so `fill` skips it
                    parameter.copy_(torch.tensor(noise(rng_for(self.name), tuple(parameter.shape), 0.5)))
        return model

    @property
    def variant_in_memory(self) -> str:
        """The variant of the keys in memory: that of transformers 5, except for classes that have kept their names."""
        variant = self.variant.replace("v4", "v5")
        return variant if variant in get(self.format).tables and "Projection" not in self.cls else self.variant

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the images."""
        size = self.options.get("image_size", SIZES["image_size"])
        return (size, size) if isinstance(size, int) else tuple(size)

    def images(self) -> np.ndarray:
        """Return images, (2, C, H, W), in float64."""
        return noise(rng_for(f"{self.name} images"), (2, self.options.get("num_channels", 3), *self.size), 1.0)

    def run(self, model: Any, images: np.ndarray, **arguments: Any) -> np.ndarray:
        """Return the outputs of a model for images, in its own dtype."""
        if self.format == "hf-vit-mae":  # it shuffles patches in the order of this noise
            count = images.shape[2] * images.shape[3] // 16
            arguments["noise"] = torch.arange(count).expand(len(images), -1) / count
        with torch.no_grad():
            dtype = next(model.parameters()).dtype
            return self.logits(model(torch.tensor(images).to(dtype), **arguments)).numpy()

    def exact(self) -> tuple[Any, np.ndarray]:
        """Return the model in float64, with weights that float32 represents exactly, and its outputs in float64."""
        weights = self.model().state_dict()
        with float64():
            model = self.model().double()
            model.load_state_dict({key: value.double() for key, value in weights.items()})
            return model, self.run(model, self.images())


def pooled(out: Any) -> torch.Tensor:
    return out.pooler_output


def first_token(out: Any) -> torch.Tensor:
    return out.last_hidden_state[:, 0]


def mean_of_two_tokens(out: Any) -> torch.Tensor:
    """Return the mean of the class token and DeiT's distillation token."""
    return out.last_hidden_state[:, :2].mean(1)


def image_embeds(out: Any) -> torch.Tensor:
    return out.image_embeds


WIDE = {"image_size": [12, 20]}
OBLONG = {"image_size": [12, 20], "patch_size": [4, 10]}
BARE = {"add_pooling_layer": False}
DINO = {"mlp_ratio": 2}
GATED = {"mlp_ratio": 2, "use_swiglu_ffn": True}
ROPE = {"hidden_size": 16, "num_attention_heads": 2, "num_register_tokens": 2}
NO_BIAS = {"query_bias": False, "key_bias": False, "value_bias": False, "proj_bias": False}
ALL_BIAS = {"query_bias": True, "key_bias": True, "value_bias": True}
MAE = {"mask_ratio": 0.0, "decoder_num_hidden_layers": 1, "decoder_hidden_size": 8, "decoder_num_attention_heads": 2}

TABLES, SHARED = {"use_relative_position_bias": True}, {"use_shared_relative_position_bias": True}
ABSOLUTE, CLASS_TOKEN = {"use_absolute_position_embeddings": True}, {"use_mean_pooling": False}
PLAIN = {"hidden_act": "gelu_pytorch_tanh", "layer_scale_init_value": 0.0}

VIT, DINOV2, REG = "ViTForImageClassification", "Dinov2ForImageClassification", "Dinov2WithRegistersForImageClassification"
BEIT, DATA2VEC = "BeitForImageClassification", "Data2VecVisionForImageClassification"
CASES = [
    Case("vit", "hf-vit", VIT, "v4", WIDE),
    Case("vit_oblong", "hf-vit", VIT, "v4", OBLONG),
    Case(
        "vit_no_bias", "hf-vit", VIT, "v4", {"qkv_bias": False, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-5}
    ),
    Case("vit_one_channel", "hf-vit", VIT, "v4", {"num_channels": 1, "num_labels": 1, "hidden_act": "relu"}),
    Case("vit_pooler", "hf-vit", "ViTModel", "v4-bare", {**WIDE, "pooler_output_size": 7}, pooled),
    Case("vit_features", "hf-vit", "ViTModel", "v4-bare", WIDE, first_token, BARE),
    Case("deit", "hf-deit", "DeiTForImageClassificationWithTeacher", "v4", WIDE),
    Case("deit_features", "hf-deit", "DeiTModel", "v4-bare", {"hidden_act": "quick_gelu"}, mean_of_two_tokens, BARE),
    Case("dinov2", "hf-dinov2", DINOV2, "v4", DINO),
    Case("dinov2_gated", "hf-dinov2", DINOV2, "v4-gated", GATED),
    Case("dinov2_no_classifier", "hf-dinov2", DINOV2, "v4", {**DINO, "num_labels": 0}),
    Case("dinov2_features", "hf-dinov2", "Dinov2Model", "v4-bare", {**DINO, "hidden_act": "linear"}, pooled),
    Case("dinov2_gated_features", "hf-dinov2", "Dinov2Model", "v4-gated-bare", {**GATED, "qkv_bias": False}, pooled),
    Case("dinov2_reg", "hf-dinov2-reg", REG, "v4", {**DINO, "num_register_tokens": 2}),
    Case("dinov2_reg_gated", "hf-dinov2-reg", REG, "v4-gated", GATED),
    Case("dinov2_reg_no_classifier", "hf-dinov2-reg", REG, "v4", {**DINO, "num_labels": 0}),
    Case("dinov2_reg_features", "hf-dinov2-reg", "Dinov2WithRegistersModel", "v4-bare", DINO, pooled),
    Case("dinov3", "hf-dinov3", "DINOv3ViTModel", "v4", {**ROPE, **WIDE}, pooled),
    Case(
        "dinov3_gated", "hf-dinov3", "DINOv3ViTModel", "v4", {**ROPE, "use_gated_mlp": True, "hidden_act": "silu"}, pooled
    ),
    Case("dinov3_no_registers", "hf-dinov3", "DINOv3ViTModel", "v4", {**ROPE, "num_register_tokens": 0}, pooled),
    Case("dinov3_no_bias", "hf-dinov3", "DINOv3ViTModel", "v4", {**ROPE, **NO_BIAS, "rope_theta": 50.0}, pooled),
    Case("dinov3_all_bias", "hf-dinov3", "DINOv3ViTModel", "v4", {**ROPE, **ALL_BIAS}, pooled),
    Case("siglip", "hf-siglip", "SiglipVisionModel", "v5", {}, pooled),
    Case("clip", "hf-clip", "CLIPVisionModel", "v5", {}, pooled),
    Case("clip_projection", "hf-clip", "CLIPVisionModelWithProjection", "v4", {"projection_dim": 5}, image_embeds),
    Case("vit_mae", "hf-vit-mae", "ViTMAEModel", "v4-bare", {**MAE, **WIDE}, first_token),
    Case("beit", "hf-beit", BEIT, "v4", TABLES),
    Case("beit_shared", "hf-beit", BEIT, "v4", {**SHARED, **ABSOLUTE, **CLASS_TOKEN, "image_size": 14}),
    Case("beit_absolute", "hf-beit", BEIT, "v4", {**ABSOLUTE, **PLAIN, "layer_norm_eps": 1e-5}),
    Case("beit_mean", "hf-beit", "BeitModel", "v4-bare", {**TABLES, "hidden_act": "relu"}, pooled),
    Case("beit_class_token", "hf-beit", "BeitModel", "v4-bare", {**SHARED, **CLASS_TOKEN, **PLAIN}, pooled),
    Case("beit_features", "hf-beit", "BeitModel", "v4-bare", {**SHARED, "use_mask_token": False}, first_token, BARE),
    Case("data2vec", "hf-data2vec", DATA2VEC, "v4", {**SHARED, "num_channels": 1}),
    Case("data2vec_tables", "hf-data2vec", DATA2VEC, "v4", {**TABLES, **CLASS_TOKEN}),
    Case("data2vec_no_classifier", "hf-data2vec", DATA2VEC, "v4", {**ABSOLUTE, **PLAIN, "num_labels": 0}),
    Case("data2vec_features", "hf-data2vec", "Data2VecVisionModel", "v4-bare", SHARED, first_token),
    Case("data2vec_normed", "hf-data2vec", "Data2VecVisionModel", "v4-bare", {**TABLES, **CLASS_TOKEN}, first_token),
]
