"""Files like those that the repositories of Facebook and OpenAI write: timm's models with renamed keys.

timm's own loaders (`checkpoint_filter_fn`), which are independent of this project, read these files.
"""

import argparse
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.goldens.peers import fill, float64, rng_for  # first: it makes torchvision importable

# isort: split
import numpy as np
import timm
import torch
from timm.models import eva, vision_transformer
from torch import Tensor, nn

from tests.goldens.golden import noise

PEER = f"timm {timm.__version__}"
State = dict[str, Tensor]
SIZES = {"patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 3, "mlp_ratio": 1.5}
ROTARY = {**SIZES, "embed_dim": 16, "num_heads": 2}


@dataclass(frozen=True)
class Case:
    """A file of a repository.

    format: the format as which it must be recognised.
    architecture, options: timm's model that computes the same function.
    names: regular expression for timm's keys -> its replacement.
    more: model -> further entries of the file, which may replace renamed entries.
    wrap: state dict -> the content of the file.
    given: fields of the config that neither the tensors nor the file determine.
    """

    format: str
    architecture: str
    options: dict[str, Any]
    names: dict[str, str] = field(default_factory=dict)
    more: Callable[[nn.Module], State] = lambda model: {}
    wrap: Callable[[State], Any] = lambda state: state
    given: dict[str, Any] = field(default_factory=lambda: {"num_heads": 3})

    @functools.cached_property
    def model(self) -> nn.Module:
        """timm's model with random weights."""
        options = {"num_classes": 0, "img_size": 12, **SIZES, **self.options}
        with float64():
            model = timm.create_model(self.architecture, **options).double().eval()
            fill(model, rng_for(f"{self.format} {sorted(self.options)}"))
            if "clip" in self.architecture:
                model.head.bias.zero_()
        return model

    @functools.cached_property
    def images(self) -> np.ndarray:
        """Two images, (2, C, H, W)."""
        return noise(rng_for(self.format), (2, 3, *self.model.patch_embed.img_size), 1.0)

    def logits(self, model: nn.Module | None = None) -> np.ndarray:
        """Return the logits of a model, by default timm's, for the images."""
        with float64():
            return (model or self.model)(torch.tensor(self.images)).numpy()

    def state(self) -> State:
        """Return the weights under the names of the repository."""
        state = dict(self.model.state_dict())
        for pattern, name in self.names.items():
            renamed = {re.sub(pattern, name, key): value for key, value in state.items()}
            assert renamed.keys() != state.keys() and len(renamed) == len(state), pattern
            state = renamed
        merged = ("q_bias", "v_bias")  # DINOv3 stores these in one array, which `more` adds
        return {key: value for key, value in state.items() if not key.endswith(merged)} | self.more(self.model)

    def file(self) -> Any:
        """Return the object that the repository's script saves."""
        return self.wrap(self.state())

    def read_by_timm(self, state: State) -> nn.Module:
        """Return a new model with the weights that timm's own loader reads from a file of the repository."""
        options = {"num_classes": 0, "img_size": 12, **SIZES, **self.options}
        with float64():
            model = timm.create_model(self.architecture, **options).double().eval()
            if isinstance(model, eva.Eva):
                read = eva.checkpoint_filter_fn(state, model)
            else:
                read = vision_transformer.checkpoint_filter_fn(state, model, adapt_layer_scale=True)
            model.load_state_dict(read, strict=True)
        return model


def _dino(state: State) -> Any:
    head = {"head.mlp.0.weight": torch.ones(4, 12), "head.last_layer.weight_g": torch.ones(4, 1)}
    teacher = {f"backbone.{key}": value for key, value in state.items()} | head
    student = {f"module.{key}": -value for key, value in teacher.items()}
    return {"student": student, "teacher": teacher, "epoch": 3, "dino_loss": {"center": torch.ones(1, 4)}}


def _decoder(model: nn.Module) -> State:
    return {
        "mask_token": torch.ones(1, 1, 8),
        "decoder_pos_embed": torch.ones(1, 10, 8),
        "decoder_embed.weight": torch.ones(8, 12),
        "decoder_blocks.0.attn.qkv.weight": torch.ones(24, 8),
        "decoder_norm.weight": torch.ones(8),
        "decoder_pred.weight": torch.ones(48, 8),
    }


def _mask_token(model: nn.Module) -> State:
    return {"mask_token": torch.ones(1, model.embed_dim)}


def _unfolded(model: nn.Module) -> State:
    """Return the class token and its position separately; timm stores their sum."""
    position = torch.tensor(noise(rng_for("position"), (1, 1, model.embed_dim), 0.5))
    folded = model.cls_token.detach()
    return {
        **_mask_token(model),
        "cls_token": folded - position,
        "pos_embed": torch.cat([position, model.pos_embed.detach()], dim=1),
    }


def _dinov3(model: nn.Module) -> State:
    width, heads = model.embed_dim, model.blocks[0].attn.num_heads
    count = width // heads // 4
    state = {**_mask_token(model), "rope_embed.periods": 100.0 ** (torch.arange(count) / count)}
    for n, block in enumerate(model.blocks):
        if block.attn.q_bias is not None:
            k_bias = torch.full((width,), 7.0, dtype=torch.float64)  # the mask sets it to zero
            bias = torch.cat([block.attn.q_bias.detach(), k_bias, block.attn.v_bias.detach()])
            mask = torch.cat([torch.ones(width), torch.zeros(width), torch.ones(width)])
            state |= {f"blocks.{n}.attn.qkv.bias": bias, f"blocks.{n}.attn.qkv.bias_mask": mask}
    return state


DINOV3_NAMES = {r"reg_token": "storage_tokens", r"gamma_(\d)": r"ls\1.gamma"}
GATED = {r"mlp\.fc1_g": "mlp.w1", r"mlp\.fc1_x": "mlp.w2", r"mlp\.fc2": "mlp.w3"}
CLIP_NAMES = {
    r"^cls_token": "class_embedding",
    r"^pos_embed": "positional_embedding",
    r"^patch_embed\.proj": "conv1",
    r"^norm_pre": "ln_pre",
    r"^norm\.": "ln_post.",
    r"^blocks": "transformer.resblocks",
    r"\.norm(\d)": r".ln_\1",
    r"attn\.qkv\.": "attn.in_proj_",
    r"attn\.proj": "attn.out_proj",
    r"mlp\.fc1": "mlp.c_fc",
    r"mlp\.fc2": "mlp.c_proj",
    r"^head\.weight": "proj",
}


def _visual(state: State) -> State:
    """Return the state dict of OpenAI: no axes of length one, a transposed projection, an image and a text tower."""
    tower = {key: value for key, value in state.items() if key != "head.bias"}
    tower |= {"class_embedding": tower["class_embedding"][0, 0], "positional_embedding": tower["positional_embedding"][0]}
    tower["proj"] = tower["proj"].T.contiguous()
    text = {"transformer.resblocks.0.ln_1.weight": torch.ones(3), "positional_embedding": torch.ones(7, 3)}
    others = {"logit_scale": torch.ones(()), "vocab_size": torch.tensor(9), "text_projection": torch.ones(3, 5)}
    return {f"visual.{key}": value for key, value in tower.items()} | text | others


def _args(**arguments: Any) -> Callable[[State], Any]:
    return lambda state: {"model": state, "epoch": 9, "args": argparse.Namespace(**arguments)}


CASES = {
    "dino": Case("dino", "vit_base_patch16_224", {}, wrap=_dino),
    "mae": Case("mae", "vit_base_patch16_224", {}, more=_decoder, wrap=lambda state: {"model": state}),
    "mae_finetuned": Case(
        "mae",
        "vit_base_patch16_224",
        {"global_pool": "avg", "num_classes": 5},
        wrap=_args(global_pool=True, finetune="mae.pth", layer_decay=0.65),
    ),
    "deit": Case("deit:deit", "deit_base_patch16_224", {"num_classes": 5}, wrap=_args(distillation_type="none")),
    "deit_distilled": Case(
        "deit:deit", "deit_base_distilled_patch16_224", {"num_classes": 5}, wrap=_args(distillation_type="hard")
    ),
    "deit3": Case(
        "deit:deit3",
        "deit3_base_patch16_224",
        {"num_classes": 5},
        {r"ls(\d)\.gamma": r"gamma_\1"},
        wrap=lambda state: {"model": state},
    ),
    "dinov2": Case("dinov2:mlp", "vit_base_patch14_dinov2", {}, more=_mask_token),
    "dinov2_registers": Case(
        "dinov2:mlp", "vit_base_patch14_reg4_dinov2", {"reg_tokens": 2}, {"reg_token": "register_tokens"}, _unfolded
    ),
    "dinov2_giant": Case(
        "dinov2:swiglu",
        "vit_giant_patch14_dinov2",
        {"mlp_ratio": 3},
        {r"mlp\.fc1": "mlp.w12", r"mlp\.fc2": "mlp.w3"},
        _mask_token,
        wrap=lambda state: {"teacher": {f"backbone.{key}": value for key, value in state.items()}},
    ),
    "dinov3": Case(
        "dinov3:mlp",
        "vit_base_patch16_dinov3_qkvb",
        {**ROTARY, "img_size": (12, 20), "global_pool": "token"},
        DINOV3_NAMES,
        _dinov3,
        given={},
    ),
    "dinov3_plus": Case(
        "dinov3:swiglu",
        "vit_small_plus_patch16_dinov3_qkvb",
        {**ROTARY, "global_pool": "token"},
        {**DINOV3_NAMES, **GATED},
        _dinov3,
        given={},
    ),
    "dinov3_without_biases": Case(
        "dinov3:mlp", "vit_base_patch16_dinov3", {**ROTARY, "global_pool": "token"}, DINOV3_NAMES, _dinov3, given={}
    ),
    "clip": Case("openai-clip:clip", "vit_base_patch16_clip_quickgelu_224", {"num_classes": 5}, CLIP_NAMES, wrap=_visual),
}
