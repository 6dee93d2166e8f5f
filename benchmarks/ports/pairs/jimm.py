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
VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
}
VISION = {**SIZES, "image_size": 16, "patch_size": 4}


def _vit(dtype: str) -> Any:
    import jax.numpy as jnp
    from flax import nnx
    from jimm.models.vit import VisionTransformer

    return VisionTransformer(5, 3, 16, 4, 2, 4, 48, 32, 0.0, dtype=getattr(jnp, dtype), rngs=nnx.Rngs(0))


def _other_vit(**options: Any) -> Any:
    import transformers

    config = transformers.ViTConfig(**VIT, num_labels=5, **options)
    config._attn_implementation = "eager"
    return TorchCall(transformers.ViTForImageClassification(config), lambda module, x: module(x).logits)


def _base(dtype: str, **options: Any) -> Any:
    import jax.numpy as jnp
    from flax import nnx
    from jimm.common.vit import VisionTransformerBase

    sizes = {"img_size": 16, "patch_size": 4, "in_channels": 3, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
    more = {"mlp_dim": 48, "layernorm_epsilon": 1e-6, "dtype": getattr(jnp, dtype), "rngs": nnx.Rngs(0)}
    return VisionTransformerBase(**sizes, **more, **options)


def _other_base(**options: Any) -> Any:
    import transformers

    config = transformers.ViTConfig(**VIT, layer_norm_eps=1e-6, **options)
    config._attn_implementation = "eager"
    model = transformers.ViTModel(config, add_pooling_layer=False)
    return TorchCall(model, lambda module, x: module(x).last_hidden_state[:, 0])


OF_JIMM = "jimm VisionTransformerBase, layernorm_epsilon 1e-6"
TANH = {"hidden_act": "gelu_pytorch_tanh"}
for name, dtype in (("vit", "float64"), ("vit_default_dtype", "float32")):
    PAIRS.add(
        name,
        f"{OF_JIMM}, dtype {dtype}",
        "transformers ViTModel, layer_norm_eps 1e-6, tanh GELU",
        lambda dtype=dtype: of_nnx(_base(dtype), _other_base(**TANH), floats(2, 16, 16, 3), **IMAGE_AXES),
    )
PAIRS.add(
    "vit_quick_gelu",
    f"{OF_JIMM}, quick GELU",
    "transformers ViTModel, layer_norm_eps 1e-6, quick GELU",
    lambda: of_nnx(
        _base("float64", use_quick_gelu=True), _other_base(hidden_act="quick_gelu"), floats(2, 16, 16, 3), **IMAGE_AXES
    ),
)


@PAIRS.pair("vit_x_timm", f"{OF_JIMM}, dtype float64", "timm VisionTransformer, tanh GELU")
def _() -> Built:
    from functools import partial

    import torch
    from timm.models.vision_transformer import VisionTransformer

    gelu = partial(torch.nn.GELU, approximate="tanh")
    module = VisionTransformer(16, 4, 3, 0, embed_dim=32, depth=2, num_heads=4, mlp_ratio=1.5, act_layer=gelu)
    return of_nnx(_base("float64"), module, floats(2, 16, 16, 3), **IMAGE_AXES)


@PAIRS.pair(
    "vit_as_published",
    "jimm VisionTransformer",
    "transformers ViTForImageClassification",
    disagreement="the eps of jimm's blocks is 1e-6 whatever its model asks for, because layernorm_epsilon is not passed on "
    "(jimm/common/vit.py:193), and google/vit-base-patch16-224 has 1e-12; jimm applies the GELU by tanh "
    "(jimm/common/transformer.py:90), and transformers the one by erf",
)
def _() -> Built:
    return of_nnx(_vit("float64"), _other_vit(), floats(2, 16, 16, 3), **IMAGE_AXES)


def _clip(**options: Any) -> Any:
    import transformers

    more = {"hidden_act": "quick_gelu", **options}
    text, vision = {**TEXT, "eos_token_id": 2, **more}, {**VISION, **more}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=64)
    config._attn_implementation = "eager"
    return config


def _jimm_clip() -> Any:
    import jax.numpy as jnp
    from flax import nnx
    from jimm.models.clip import CLIP

    return CLIP(**OF_BOTH, dtype=jnp.float64, rngs=nnx.Rngs(0))


@PAIRS.pair(
    "clip_as_published",
    "jimm CLIP",
    "transformers CLIPModel",
    disagreement="the eps of jimm's blocks is 1e-6, because layernorm_epsilon is not passed on (jimm/common/vit.py:193, "
    "and jimm/models/clip.py for the text), and that of CLIP 1e-5",
)
def _() -> Built:
    import transformers

    module = TorchCall(
        transformers.CLIPModel(_clip()), lambda module, x, t: module(pixel_values=x, input_ids=t).logits_per_image
    )
    return of_nnx(_jimm_clip(), module, (floats(2, 16, 16, 3), tokens(2, 9, high=60)), **IMAGE_AXES)


@PAIRS.pair("siglip", "jimm SigLIP, dtype float64", "transformers SiglipModel, tanh GELU")
def _() -> Built:
    import jax.numpy as jnp
    import transformers
    from flax import nnx
    from jimm.models.siglip import SigLIP

    config = transformers.SiglipConfig(text_config={**TEXT, **TANH}, vision_config={**VISION, **TANH})
    config._attn_implementation = "eager"
    module = TorchCall(
        transformers.SiglipModel(config), lambda module, x, t: module(pixel_values=x, input_ids=t).logits_per_image
    )
    inputs = (floats(2, 16, 16, 3), tokens(2, 9, high=60))
    return of_nnx(SigLIP(**OF_BOTH, dtype=jnp.float64, rngs=nnx.Rngs(0)), module, inputs, **IMAGE_AXES)
