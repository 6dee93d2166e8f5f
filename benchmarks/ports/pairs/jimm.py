"""jimm: NNX ports of ViT, CLIP and SigLIP of transformers, `--source jimm=CLONE/src`."""

from typing import Any

from benchmarks.ports.declaration import Built, Pairs, TorchCall, floats, of_nnx, tokens

PAIRS = Pairs("jimm", ("jimm",), ("transformers", "timm"), needs=("jimm",))
IMAGE_AXES = {"input_axes": "b y x c <-> b c y x"}
OF_BOTH = {  # jimm derives the number of heads of the images from the width
    "image_resolution": 16,
    "vision_layers": 2,
    "vision_width": 64,
    "vision_patch_size": 4,
    "context_length": 9,
    "vocab_size": 60,
    "transformer_width": 64,
    "transformer_heads": 1,
    "transformer_layers": 2,
}
SIZES = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 1}
TEXT = {**SIZES, "vocab_size": 60, "max_position_embeddings": 9}
VISION = {**SIZES, "image_size": 16, "patch_size": 4}


def _vit(dtype: str) -> Any:
    import jax.numpy as jnp
    from flax import nnx
    from jimm.models.vit import VisionTransformer

    return VisionTransformer(5, 3, 16, 4, 2, 4, 48, 32, 0.0, dtype=getattr(jnp, dtype), rngs=nnx.Rngs(0))


def _other_vit(**options: Any) -> Any:
    import transformers

    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=16,
        patch_size=4,
        num_labels=5,
        attn_implementation="eager",
        **options,
    )
    return TorchCall(transformers.ViTForImageClassification(config), lambda module, x: module(x).logits)


@PAIRS.pair("vit", "jimm VisionTransformer, dtype float64", "transformers ViTForImageClassification, tanh GELU")
def _() -> Built:
    return of_nnx(_vit("float64"), _other_vit(hidden_act="gelu_pytorch_tanh"), floats(2, 16, 16, 3), **IMAGE_AXES)


@PAIRS.pair(
    "vit_default_dtype", "jimm VisionTransformer, dtype float32", "transformers ViTForImageClassification, tanh GELU"
)
def _() -> Built:
    return of_nnx(_vit("float32"), _other_vit(hidden_act="gelu_pytorch_tanh"), floats(2, 16, 16, 3), **IMAGE_AXES)


@PAIRS.pair("vit_as_published", "jimm VisionTransformer", "transformers ViTForImageClassification", disagreement="jimm applies "
    "the GELU by tanh (jimm/common/transformer.py:90, nnx.gelu), and transformers the one by erf")  # fmt: skip
def _() -> Built:
    return of_nnx(_vit("float64"), _other_vit(), floats(2, 16, 16, 3), **IMAGE_AXES)


@PAIRS.pair("vit_x_timm", "jimm VisionTransformer, dtype float64", "timm VisionTransformer, tanh GELU, norms.eps 1e-12")
def _() -> Built:
    from functools import partial

    import torch
    from timm.models.vision_transformer import VisionTransformer

    norm, gelu = partial(torch.nn.LayerNorm, eps=1e-12), partial(torch.nn.GELU, approximate="tanh")
    module = VisionTransformer(
        16, 4, 3, 5, embed_dim=32, depth=2, num_heads=4, mlp_ratio=1.5, norm_layer=norm, act_layer=gelu
    )
    return of_nnx(_vit("float64"), module, floats(2, 16, 16, 3), **IMAGE_AXES)


@PAIRS.pair("clip", "jimm CLIP, dtype float64", "transformers CLIPModel")
def _() -> Built:
    import jax.numpy as jnp
    import transformers
    from flax import nnx
    from jimm.models.clip import CLIP

    text = {**TEXT, "eos_token_id": 2, "hidden_act": "quick_gelu"}
    config = transformers.CLIPConfig(
        text_config=text, vision_config={**VISION, "hidden_act": "quick_gelu"}, projection_dim=64
    )
    config._attn_implementation = "eager"
    module = TorchCall(
        transformers.CLIPModel(config), lambda module, x, t: module(pixel_values=x, input_ids=t).logits_per_image
    )
    inputs = (floats(2, 16, 16, 3), tokens(2, 9, high=60))
    return of_nnx(CLIP(**OF_BOTH, dtype=jnp.float64, rngs=nnx.Rngs(0)), module, inputs, **IMAGE_AXES)


@PAIRS.pair("siglip", "jimm SigLIP, dtype float64", "transformers SiglipModel, tanh GELU")
def _() -> Built:
    import jax.numpy as jnp
    import transformers
    from flax import nnx
    from jimm.models.siglip import SigLIP

    config = transformers.SiglipConfig(text_config=TEXT, vision_config=VISION)
    config._attn_implementation = "eager"
    module = TorchCall(
        transformers.SiglipModel(config), lambda module, x, t: module(pixel_values=x, input_ids=t).logits_per_image
    )
    inputs = (floats(2, 16, 16, 3), tokens(2, 9, high=60))
    return of_nnx(SigLIP(**OF_BOTH, dtype=jnp.float64, rngs=nnx.Rngs(0)), module, inputs, **IMAGE_AXES)
