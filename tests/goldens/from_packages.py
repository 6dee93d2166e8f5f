"""Golden files of torchvision and vit-pytorch."""

import importlib.metadata
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.vision_transformer import VisionTransformer, interpolate_embeddings
from vit_pytorch import SimpleViT, ViT

from tests.goldens.golden import Golden
from tests.goldens.peers import Outputs, State, case, float64, golden, rename_keys, reshape_entries, tiny_config
from vit_spec import ViTConfig


@case
def torchvision_hidden() -> Golden:
    """A hidden layer with tanh before the classifier; positions resampled to another grid with corners aligned."""
    config = tiny_config(
        image_size=(12, 12),
        resampling={"antialias": False, "align_corners": True},
        head={"hidden": 9},
    )
    options: dict[str, Any] = {
        "patch_size": 4,
        "num_layers": config.depth,
        "num_heads": config.num_heads,
        "hidden_dim": config.width,
        "mlp_dim": config.mlp_dim,
        "num_classes": config.num_classes,
        "representation_size": config.head.hidden,
    }

    def rename(state: State) -> State:
        rules = {
            "class_token": "cls_token",
            "conv_proj": "patch_embed.proj",
            r"^encoder\.pos_embedding": "pos_embed",
            r"^encoder\.layers\.encoder_layer_": "blocks.",
            r"^encoder\.ln": "norm",
            r"ln_(\d)": r"norm\1",
            r"self_attention\.in_proj_": "attn.qkv.",
            r"self_attention\.out_proj": "attn.proj",
            r"mlp\.0": "mlp.fc1",
            r"mlp\.3": "mlp.fc2",
            r"^heads\.": "",
        }
        return rename_keys(state, rules)

    def run(model: Any, images: Tensor) -> Outputs:
        larger = VisionTransformer(20, **options).eval()
        larger.load_state_dict(interpolate_embeddings(20, 4, model.state_dict()))
        return {"logits": larger(images)}

    with float64():
        model, peer = VisionTransformer(12, **options), f"torchvision {torchvision.__version__}"
        return golden("torchvision_hidden", model, config, rename, run, peer=peer, size=(20, 20))


def lucidrains_options(config: ViTConfig) -> dict[str, Any]:
    """Return the arguments of vit-pytorch's classes for a config."""
    return {
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_classes": config.num_classes,
        "dim": config.width,
        "depth": config.depth,
        "heads": config.num_heads,
        "dim_head": config.head_dim,
        "mlp_dim": config.mlp_dim,
    }


def without_patch_norms(model: Any) -> None:
    """Remove the norms around the projection of patches (1 and 3), which `ViTConfig` cannot express."""
    model.to_patch_embedding[1] = model.to_patch_embedding[3] = nn.Identity()


def lucidrains_names(config: ViTConfig, state: State, fc1: str, fc2: str) -> State:
    """Rename a state dict of vit-pytorch.

    fc1, fc2: the numbers of the two linear layers in the MLP's Sequential.
    """
    rules = {
        r"^to_patch_embedding\.2": "patch_embed.proj",
        r"^transformer\.norm": "norm",
        r"^transformer\.layers\.(\d+)\.0\.norm": r"blocks.\1.norm1",
        r"^transformer\.layers\.(\d+)\.0\.to_qkv": r"blocks.\1.attn.qkv",
        r"^transformer\.layers\.(\d+)\.0\.to_out(\.0)?": r"blocks.\1.attn.proj",
        r"^transformer\.layers\.(\d+)\.1\.net\.0": r"blocks.\1.norm2",
        rf"^transformer\.layers\.(\d+)\.1\.net\.{fc1}": r"blocks.\1.mlp.fc1",
        rf"^transformer\.layers\.(\d+)\.1\.net\.{fc2}": r"blocks.\1.mlp.fc2",
        "(linear|mlp)_head": "head",
    }
    state, (ph, pw) = rename_keys(state, rules), config.patch_size
    flat = state["patch_embed.proj.weight"]  # its inputs are (rows, columns, channels)
    state["patch_embed.proj.weight"] = flat.reshape(-1, ph, pw, config.in_channels).permute(0, 3, 1, 2)
    return state


VIT_PYTORCH = f"vit-pytorch {importlib.metadata.version('vit-pytorch')}"


@case
def lucidrains_vit() -> Golden:
    """Heads whose widths do not add up to the model's, eps 1e-5, no bias of queries, keys and values."""
    config = tiny_config(attention={"head_dim": 6, "qkv_bias": "none"}, norms={"eps": 1e-5})

    def rename(state: State) -> State:
        rules = {"^cls_token": "cls_token", "^pos_embedding": "pos_embed"}
        state = rename_keys(lucidrains_names(config, state, "1", "4"), rules)
        return reshape_entries(state, cls_token=(1, 1, -1), pos_embed=(1, -1, config.width))

    with float64():
        model = ViT(**lucidrains_options(config))
        without_patch_norms(model)
        return golden("lucidrains_vit", model, config, rename, logits, peer=VIT_PYTORCH)


@case
def lucidrains_simple_vit() -> Golden:
    """SimpleViT: the fixed 2-D table of big_vision, no class token, the mean, no bias after attention."""
    config = tiny_config(
        tokens={"class_token": False},
        positions={"kind": "fixed", "table": "sincos_2d_big_vision"},
        attention={"qkv_bias": "none", "proj_bias": False},
        norms={"eps": 1e-5},
        head={"pool": "mean"},
    )

    def rename(state: State) -> State:
        return lucidrains_names(config, state, "1", "3")

    with float64():
        model = SimpleViT(**lucidrains_options(config))
        without_patch_norms(model)
        return golden("lucidrains_simple_vit", model, config, rename, logits, peer=VIT_PYTORCH)


def logits(model: Any, images: Tensor) -> Outputs:
    """Return the logits as the only output."""
    return {"logits": model(images)}


class EncoderViT(nn.Module):
    """A ViT around `torch.nn.TransformerEncoder`, as many tutorials write it."""

    def __init__(self, config: ViTConfig, **options: Any) -> None:
        super().__init__()
        self.proj = nn.Conv2d(config.in_channels, config.width, config.patch_size, config.patch_size)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.width))
        self.pos_embed = nn.Parameter(torch.zeros(1, config.num_tokens, config.width))
        layer = nn.TransformerEncoderLayer(config.width, config.num_heads, config.mlp_dim, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(layer, config.depth, enable_nested_tensor=False)
        self.head = nn.Linear(config.width, config.num_classes)

    def tokens(self, images: Tensor) -> Tensor:
        """Return the output of the encoder, (B, T, width)."""
        patches = self.proj(images).flatten(2).transpose(1, 2)
        return self.encoder(torch.cat([self.cls_token.expand(len(images), -1, -1), patches], 1) + self.pos_embed)


def encoder(name: str, config: ViTConfig, **options: Any) -> Golden:
    """Return the golden file of a ViT around `torch.nn.TransformerEncoder`."""

    def rename(state: State) -> State:
        rules = {
            r"^proj": "patch_embed.proj",
            r"^encoder\.layers\.": "blocks.",
            r"self_attn\.in_proj_": "attn.qkv.",
            r"self_attn\.out_proj": "attn.proj",
            r"linear(\d)": r"mlp.fc\1",
        }
        return rename_keys(state, rules)

    def run(model: Any, images: Tensor) -> Outputs:
        tokens = model.tokens(images)
        return {"logits": model.head(tokens[:, 0]), f"blocks.{config.depth - 1}": tokens}

    with float64():
        return golden(name, EncoderViT(config, **options), config, rename, run, peer=f"torch {torch.__version__}")


@case
def torch_encoder_post_norm() -> Golden:
    """`torch.nn.TransformerEncoder` with its defaults: norms after the sums, ReLU, eps 1e-5."""
    config = tiny_config(mlp={"activation": "relu"}, norms={"eps": 1e-5, "order": "post", "after_blocks": False})
    return encoder("torch_encoder_post_norm", config)


@case
def torch_encoder_pre_norm() -> Golden:
    """`torch.nn.TransformerEncoder` with norm_first=True and GELU."""
    config = tiny_config(norms={"eps": 1e-5, "after_blocks": False})
    return encoder("torch_encoder_pre_norm", config, norm_first=True, activation="gelu")
