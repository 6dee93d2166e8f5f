"""Configs of published models by name.

`vit_s16` is ViT-S with a patch size of 16.  Each family is one function, and its published sizes are one line of `_MODELS`.
Image size and pixel normalization are those of the published weights.  Keyword arguments change any field of
the config: `get("deit3_b16", image_size=384)`.

Source of every family, in addition to its own: timm 1.0.31 (timm/models/vision_transformer.py, deit.py, eva.py).  Tests
compare the parameter count and the GMACs of each model with those that timm publishes.
"""

from collections.abc import Callable
from functools import cache, partial
from string import digits
from typing import Any, Literal, NamedTuple

from vit_spec.config import ViTConfig
from vit_spec.errors import InputError, nearest
from vit_spec.parts import Attention, Head, Mlp, Norms, Pixels, Positions, Regularisation, Resampling, Tokens


class Size(NamedTuple):
    """The size of the transformer blocks."""

    width: int
    depth: int
    num_heads: int
    mlp_dim: int


# big_vision models/vit.py, decode_variant, after table 2 of "Scaling Vision Transformers" (arXiv 2106.04560)
# and, for so400m, table 2 of arXiv 2305.13035.  "g" is giant and "G" is gigantic.
SIZES = {
    "mu": Size(32, 1, 2, 128),  # not published; for fast tests
    "ti": Size(192, 12, 3, 768),
    "s": Size(384, 12, 6, 1536),
    "m": Size(512, 12, 8, 2048),
    "b": Size(768, 12, 12, 3072),
    "l": Size(1024, 24, 16, 4096),
    "so400m": Size(1152, 27, 16, 4304),
    "h": Size(1280, 32, 16, 5120),
    "g": Size(1408, 40, 16, 6144),
    "gopt": Size(1536, 40, 16, 6144),  # big_vision's "g-opt", SigLIP 2's giant
    "G": Size(1664, 48, 16, 8192),
    "22b": Size(6144, 48, 48, 24576),  # table 1 of arXiv 2302.05442
}

# timm/data/constants.py
IMAGENET = Pixels(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
CLIP = Pixels(mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711))

# Facebook's fine-tuning scripts and transformers resample without antialiasing; timm antialiases in every family.
PLAIN_BICUBIC = Resampling(kernel="bicubic", antialias=False)
DINO_BICUBIC = Resampling(kernel="bicubic", antialias=False, offset=0.1)

# Facebook initializes tokens with trunc_normal_(std=.02), which truncates at +-2: a hundred standard deviations.
NORMAL = "normal(0.02)"


def _config(size: Size, patch: int, image: int | tuple[int, int] = 224, **fields: Any) -> ViTConfig:
    height, width = image if isinstance(image, tuple) else (image, image)
    return ViTConfig(image_size=(height, width), patch_size=(patch, patch), **size._asdict(), **fields)


# Families ---------------------------------------------------------------------------------------------------


def _vit(size: str, patch: int) -> ViTConfig:
    """The plain model: "An Image is Worth 16x16 Words" (2010.11929), "How to train your ViT?" (2106.10270).

    GELU is exact, as in timm; Google's code uses Flax's default, the tanh approximation.  To run Google's weights as they
    were trained, add mlp={"activation": "gelu_tanh"}.
    """
    return _config(SIZES[size], patch)


def _vit_s16_plain() -> ViTConfig:
    """ "Better plain ViT baselines for ImageNet-1k" (arXiv 2205.01580): big_vision configs/vit_s16_i1k.py."""
    return _config(
        SIZES["s"],
        16,
        tokens=Tokens(class_token=False),
        positions=Positions(kind="fixed", table="sincos_2d_big_vision"),
        mlp=Mlp(activation="gelu_tanh"),
        head=Head(pool="mean", hidden=384, init="zeros"),
    )


def _vit_22b14() -> ViTConfig:
    """ "Scaling Vision Transformers to 22 Billion Parameters" (arXiv 2302.05442).

    Attention and MLP are parallel, norms neither subtract the mean nor have a bias, and queries, keys and values have no
    bias (section 2).  The matrices of the blocks have 21,743 million parameters, as in table 1; the paper's classifier is
    that of JFT.
    """
    return _config(
        SIZES["22b"],
        14,
        tokens=Tokens(class_token=False),
        attention=Attention(qkv_bias="none", qk_norm=True),
        mlp=Mlp(activation="gelu_tanh"),
        norms=Norms(kind="rms", bias=False, order="parallel"),
        head=Head(pool="attention"),
    )


def _deit(size: str, patch: int, distilled: bool = False) -> ViTConfig:
    """DeiT (arXiv 2012.12877), with or without distillation token: facebookresearch/deit models.py."""
    return _config(
        SIZES[size],
        patch,
        pixels=IMAGENET,
        tokens=Tokens(init=NORMAL, distillation=distilled),
        resampling=PLAIN_BICUBIC,
    )


def _deit3(size: str, patch: int) -> ViTConfig:
    """DeiT III (arXiv 2204.07118): facebookresearch/deit models_v2.py.

    Positions are added before the class token is prepended, so the class token has no position.  Layer scale starts at
    1e-4 there and at 1e-6 in timm, which matters only for training from scratch.
    """
    return _config(
        SIZES[size],
        patch,
        pixels=IMAGENET,
        tokens=Tokens(init=NORMAL),
        positions=Positions(covers="none"),
        resampling=PLAIN_BICUBIC,
        norms=Norms(layer_scale=1e-4),
    )


def _dino(size: str, patch: int) -> ViTConfig:
    """DINO (arXiv 2104.14294), the backbone: facebookresearch/dino vision_transformer.py."""
    return _config(
        SIZES[size],
        patch,
        num_classes=0,
        pixels=IMAGENET,
        tokens=Tokens(init=NORMAL),
        resampling=DINO_BICUBIC,
    )


def _dinov2(size: str, patch: int, registers: int = 0) -> ViTConfig:
    """DINOv2 (arXiv 2304.07193), without or with registers (2309.16588): facebookresearch/dinov2 hub/backbones.py.

    DINOv2's giant has another size than "g" and "G", and a gated MLP.  Meta's checkpoints with registers have a position
    for the class token.  timm adds this position to the class token itself, which is the same function with other keys and
    shapes.  The named models follow timm; positions={"covers": "class"} follows Meta.
    """
    giant = size == "g"  # vit_giant2 in models/vision_transformer.py; mlp_dim is 4 * 1536 * 2 / 3
    return _config(
        Size(1536, 40, 24, 4096) if giant else SIZES[size],
        patch,
        image=518,
        num_classes=0,
        pixels=IMAGENET,
        tokens=Tokens(init="normal(1e-6)", registers=registers),
        positions=Positions(covers="none" if registers else "all"),
        resampling=Resampling(kernel="bicubic", antialias=True) if registers else DINO_BICUBIC,
        mlp=Mlp(activation="swiglu" if giant else "gelu"),
        norms=Norms(layer_scale=1e-5),
    )


def _dinov3(size: str, gated: bool = False) -> ViTConfig:
    """DINOv3 (arXiv 2508.10104): facebookresearch/dinov3 hub/backbones.py.

    "plus" models have a gated MLP; their mlp_dim, 6 * width * 2 / 3, is that of the size without "plus".  Meta's
    checkpoints have biases of queries and values (zero until fine-tuned), and so has this config, like timm's
    *_dinov3_qkvb.  timm's *_dinov3 is attention={"qkv_bias": "none"}, which the 7B model always has.  The feature is the
    class token, as in Meta's code; timm takes the mean of the patch tokens.  The image size is timm's.
    """
    width, depth, _, mlp_dim = SIZES[size]
    return _config(
        Size(width, depth, width // 64, mlp_dim),
        16,
        image=256,
        num_classes=0,
        pixels=IMAGENET,
        tokens=Tokens(init=NORMAL, registers=4),
        positions=Positions(kind="none", rotary="dinov3", rotary_base=100.0),
        attention=Attention(qkv_bias="qv"),
        mlp=Mlp(activation="swiglu" if gated else "gelu"),
        norms=Norms(eps=1e-5, layer_scale=1e-5),
    )


def _dinov3_7b16() -> ViTConfig:
    """DINOv3 7B, the teacher of the other DINOv3 models: wider heads, gated MLP, no biases of queries, keys and values."""
    return _dinov3("s", gated=True).replace(**Size(4096, 40, 32, 8192)._asdict(), attention={"qkv_bias": "none"})


def _mae(size: str, patch: int) -> ViTConfig:
    """MAE (arXiv 2111.06377), the encoder: facebookresearch/mae models_mae.py.

    Positions are a fixed table in pre-training; the checkpoints contain it, and fine-tuning trains it.  Fine-tuned
    classifiers have head={"pool": "mean"} and norms={"after_blocks": False, "after_pool": True}.
    """
    return _config(
        SIZES[size],
        patch,
        num_classes=0,
        pixels=IMAGENET,
        tokens=Tokens(init=NORMAL),
        positions=Positions(table="sincos_2d_mae"),
        resampling=PLAIN_BICUBIC,
    )


def _clip(size: str, patch: int, embedding: int, activation: Literal["gelu", "quick_gelu"], image: int = 224) -> ViTConfig:
    """The image encoder of CLIP (arXiv 2103.00020): openai/CLIP clip/model.py, open_clip transformer.py.

    num_classes is the dimension of the shared embedding; the classifier is CLIP's projection, which has no bias.
    """
    law = f"normal({SIZES[size].width ** -0.5})"
    return _config(
        SIZES[size],
        patch,
        image=image,
        num_classes=embedding,
        pixels=CLIP,
        tokens=Tokens(patch_bias=False, init=law),
        positions=Positions(table=law),
        mlp=Mlp(activation=activation),
        norms=Norms(eps=1e-5, before_blocks=True),
        head=Head(bias=False, init=law),
    )


def _siglip(size: str, patch: int, image: int = 224) -> ViTConfig:
    """The image encoder of SigLIP (arXiv 2303.15343) and SigLIP 2 (2502.14786): big_vision models/vit.py.

    GELU is the tanh approximation there and in transformers; some of timm's entrypoints declare it exact.
    """
    return _config(
        SIZES[size],
        patch,
        image=image,
        num_classes=0,
        tokens=Tokens(class_token=False),
        positions=Positions(table=f"normal({SIZES[size].width ** -0.5})"),
        resampling=Resampling(kernel="bilinear", antialias=False, align_corners=True),
        mlp=Mlp(activation="gelu_tanh"),
        head=Head(pool="attention"),
    )


def _eva02(size: str, patch: int) -> ViTConfig:
    """EVA-02 (arXiv 2303.11331): baaivision/EVA, EVA-02/asuka; the models that are fine-tuned on ImageNet.

    The base and large models have norms between the gate and the second layer of the MLP, the smaller ones have none.
    """
    width, depth, heads, _ = SIZES[size]
    large = size in ("b", "l")
    return _config(
        Size(width, depth, heads, int(width * 8 / 3)),
        patch,
        image=448 if large else 336,
        pixels=CLIP,
        tokens=Tokens(init=NORMAL),
        positions=Positions(rotary="eva", rotary_grid=(16, 16)),
        attention=Attention(qkv_bias="qv"),
        mlp=Mlp(activation="swiglu", norm=large),
        norms=Norms(after_blocks=False, after_pool=True),
        head=Head(pool="mean"),
    )


def _eva02_e14_clip() -> ViTConfig:
    """The enormous image encoder of EVA-02-CLIP (arXiv 2303.15389), whose norms come after attention and MLP."""
    return _config(
        Size(1792, 64, 16, 15360),
        14,
        num_classes=1024,
        pixels=CLIP,
        tokens=Tokens(init=NORMAL),
        attention=Attention(qkv_bias="qv"),
        norms=Norms(order="res_post"),
    )


def _beit3(size: str, patch: int) -> ViTConfig:
    """The vision expert of BEiT-3 (arXiv 2208.10442) with a classifier: microsoft/unilm, beit3; torchscale's sub-LN."""
    return _config(
        SIZES[size],
        patch,
        pixels=IMAGENET,
        tokens=Tokens(init=NORMAL),
        attention=Attention(out_norm=True),
        mlp=Mlp(norm=True),
        norms=Norms(eps=1e-5, after_blocks=False, after_pool=True),
        head=Head(pool="mean"),
    )


def _beit(size: str, patch: int) -> ViTConfig:
    """BEiT (arXiv 2106.08254) with its classifier: microsoft/unilm, beit.  Each block has its own relative positions."""
    return _config(
        SIZES[size],
        patch,
        tokens=Tokens(init=NORMAL),
        positions=Positions(kind="none", relative="table"),
        attention=Attention(qkv_bias="qv"),
        norms=Norms(layer_scale=0.1 if size == "b" else 1e-5, after_blocks=False, after_pool=True),
        head=Head(pool="mean"),
    )


def _relpos(size: str, patch: int) -> ViTConfig:
    """timm's VisionTransformerRelPos, vit_relpos_*: relative positions by an MLP, without a class token."""
    return _config(
        SIZES[size],
        patch,
        tokens=Tokens(class_token=False),
        positions=Positions(kind="none", relative="mlp", relative_dim=128),
        attention=Attention(qkv_bias="none"),
        norms=Norms(layer_scale=1e-6, after_blocks=False, after_pool=True),
        head=Head(pool="mean"),
    )


def _vit_b16_rpn() -> ViTConfig:
    """timm's vit_base_patch16_rpn_224: the norms of a block come after attention and MLP, before the sums."""
    return _config(
        SIZES["b"],
        16,
        tokens=Tokens(class_token=False),
        attention=Attention(qkv_bias="none"),
        norms=Norms(order="res_post", after_blocks=False, after_pool=True),
        head=Head(pool="mean"),
    )


def _naflex(size: str, patch: int, square: bool = False, factorized: bool = False) -> ViTConfig:
    """timm's NaFlexVit, naflexvit_*_gap: a grid of positions, resized to images of other sizes, and four registers."""
    return _config(
        SIZES[size],
        patch,
        image=256,
        tokens=Tokens(class_token=False, registers=4, init="normal(1e-6)"),
        positions=Positions(covers="none", factorized=factorized),
        resampling=Resampling(kernel="bilinear", antialias=False, square=square)
        if factorized
        else Resampling(square=square),
        norms=Norms(layer_scale=1e-5, after_blocks=False, after_pool=True),
        head=Head(pool="mean"),
    )


def _aimv2(size: str, patch: int) -> ViTConfig:
    """AIMv2 (arXiv 2411.14402): apple/ml-aim, aim-v2.  The feature is the mean of the tokens, as in timm."""
    sizes = {"l": Size(1024, 24, 8, 2816), "h": Size(1536, 24, 12, 4096)}
    return _config(
        sizes[size],
        patch,
        num_classes=0,
        pixels=CLIP,
        tokens=Tokens(class_token=False),
        attention=Attention(qkv_bias="none", proj_bias=False),
        mlp=Mlp(activation="swiglu", bias=False),
        norms=Norms(kind="rms", bias=False, eps=1e-5, after_patches=True),
        head=Head(pool="mean"),
    )


def _pe(size: str, patch: int, image: int, **fields: Any) -> ViTConfig:
    """The Perception Encoder (arXiv 2504.13181): facebookresearch/perception_models, core/vision_encoder/pe.py.

    Coordinates of rotary positions are scaled to the grid of the published resolution, and count from 1.
    """
    grid = image // patch
    config = _config(
        SIZES[size],
        patch,
        image=image,
        num_classes=0,
        tokens=Tokens(patch_bias=False),
        positions=Positions(rotary="rope_vit", rotary_start=1.0, rotary_grid=(grid, grid)),
        norms=Norms(eps=1e-5, before_blocks=True),
    )
    return config.replace(**fields)


def _pe_core(size: str, patch: int, image: int, embedding: int) -> ViTConfig:
    """PE core, the image encoder of a CLIP model: attention pooling over all tokens, and a projection without a bias."""
    head = Head(pool="attention", pool_prefix=True, pool_heads=8, bias=False)
    return _pe(size, patch, image, num_classes=embedding, head=head)


def _pe_spatial(size: str, patch: int, image: int) -> ViTConfig:
    """PE spatial, for dense prediction, without a norm after the blocks; the feature is the mean of the patch tokens."""
    return _pe(size, patch, image, norms={"after_blocks": False}, head={"pool": "mean"})


def _pe_lang_l14() -> ViTConfig:
    """PE lang, aligned with a language model: 23 blocks with layer scale, and no norm after them."""
    config = _pe_spatial("l", 14, 448)
    return config.replace(depth=23, norms={"layer_scale": 0.1})


def _rope_vit(size: str, patch: int, mixed: bool = False, absolute: bool = False) -> ViTConfig:
    """RoPE-ViT (arXiv 2403.13298): naver-ai/rope-vit.  Axial or mixed rotary positions, with or without learned ones."""
    rotary: Literal["mixed", "rope_vit"] = "mixed" if mixed else "rope_vit"
    return _config(
        SIZES[size],
        patch,
        pixels=IMAGENET,
        tokens=Tokens(init=NORMAL),
        positions=Positions(
            kind="learned" if absolute else "none", covers="none", rotary=rotary, rotary_base=10.0 if mixed else 100.0
        ),
        norms=Norms(layer_scale=1e-4),
    )


def _sapiens2_b16() -> ViTConfig:
    """Sapiens2 (arXiv 2604.21681), the base model: facebookresearch/sapiens2.  Layer scale applies to attention only."""
    return _config(
        SIZES["b"],
        16,
        image=(1024, 768),
        num_classes=0,
        pixels=IMAGENET,
        tokens=Tokens(init=NORMAL, registers=8),
        positions=Positions(kind="none", rotary="dinov3", rotary_base=100.0),
        attention=Attention(qk_norm=True),
        mlp=Mlp(activation="swiglu"),
        norms=Norms(kind="rms", bias=False, layer_scale=1.0, mlp_layer_scale=False),
    )


# Five articles that implement a ViT from scratch ------------------------------------------------------------
# Choices that an article leaves open are big_vision's: 224 pixels, patch size 16, mlp_dim = 4 * width, pixels from
# -1 to 1.  The articles use torch's nn.LayerNorm, whose eps is 1e-5.


def _article_xray_rope() -> ViTConfig:
    """Multi-label classification of chest X-rays; rotary position embeddings only."""
    return _config(
        Size(768, 6, 8, 1024),
        16,
        in_channels=1,
        num_classes=10,
        tokens=Tokens(init="normal(1.0)"),
        positions=Positions(kind="none", rotary="axial"),
        norms=Norms(eps=1e-5, after_blocks=False),
    )


def _article_multihead() -> ViTConfig:
    """ViT-B/16 built on torch's nn.MultiheadAttention; its classifier is a norm and a linear layer."""
    return _config(
        SIZES["b"],
        16,
        pixels=IMAGENET,  # 1000 classes: ImageNet with torchvision's transforms
        tokens=Tokens(init="normal(1.0)"),
        positions=Positions(table="normal(1.0)"),
        norms=Norms(eps=1e-5, after_blocks=False, after_pool=True),
        regularisation=Regularisation(pos_drop=0.1, mlp_drop=0.1),
    )


def _article_sincos() -> ViTConfig:
    """Learned positions initialized as sinusoids; one norm per block, no output projection, no activation."""
    return _config(
        Size(768, 8, 6, 3072),
        16,
        num_classes=10,
        tokens=Tokens(init="uniform(0, 1)"),
        positions=Positions(table="sincos_1d"),
        attention=Attention(proj=False, scale=6**-0.5),  # the article divides by the root of num_heads, not of head_dim
        mlp=Mlp(activation="none"),
        norms=Norms(eps=1e-5, shared_norm=True, after_blocks=False),
        regularisation=Regularisation(mlp_drop=0.1),
    )


def _article_rectangular() -> ViTConfig:
    """ "Vision Transformers, Explained" (lanl/vision_transformers_explained): regression of one number from a wide image.

    Attention adds the values to the output of the projection (modules/attention.py), as in T2T-ViT.
    """
    return _config(
        Size(768, 12, 4, 3072),
        20,
        image=(60, 100),
        in_channels=1,
        num_classes=1,
        pixels=Pixels(mean=(0.0,), std=(1.0,)),  # mountains.npy has values in [0, 1] and is not normalized
        tokens=Tokens(init="trunc_normal(0.02)"),
        positions=Positions(kind="fixed", table="sincos_1d"),
        attention=Attention(qkv_bias="none", value_skip=True),
        norms=Norms(eps=1e-5),
    )


def _article_dino() -> ViTConfig:
    """DINO's own backbone, used for its features and attention maps."""
    return _dino("s", 16)


# Names ------------------------------------------------------------------------------------------------------

ConfigBuilder = Callable[[], ViTConfig]


def _family(pattern: str, family: Callable[[str, int], ViTConfig], words: str) -> dict[str, ConfigBuilder]:
    """Return the config builders of a family by model name.

    Args:
        pattern: the model name, with {} for a word.
        family: builds the config from a size, which is a key of `SIZES`, and a patch size in pixels.
        words: sizes and patch sizes, separated by spaces: "so400m14" is so400m with patches of 14 pixels.
    """
    builds: dict[str, ConfigBuilder] = {}
    for word in words.split():
        size = word.rstrip(digits)
        builds[pattern.format(word)] = partial(family, size, int(word.removeprefix(size)))
    return builds


_MODELS: dict[str, ConfigBuilder] = {
    **_family("vit_{}", _vit, "mu16 ti16 s32 s16 m16 b32 b16 b8 l32 l16 l14 so400m16 so400m14 h14 g14 G14"),
    "vit_22b14": _vit_22b14,
    "vit_s16_plain": _vit_s16_plain,
    **_family("deit_{}", _deit, "ti16 s16 b16"),
    **_family("deit_{}_distilled", partial(_deit, distilled=True), "ti16 s16 b16"),
    **_family("deit3_{}", _deit3, "s16 m16 b16 l16 h14"),
    **_family("dino_{}", _dino, "s16 s8 b16 b8"),
    **_family("dinov2_{}", _dinov2, "s14 b14 l14 g14"),
    **_family("dinov2_{}_reg4", partial(_dinov2, registers=4), "s14 b14 l14 g14"),
    "dinov3_s16": partial(_dinov3, "s"),
    "dinov3_s16plus": partial(_dinov3, "s", gated=True),
    "dinov3_b16": partial(_dinov3, "b"),
    "dinov3_l16": partial(_dinov3, "l"),
    "dinov3_h16plus": partial(_dinov3, "h", gated=True),
    "dinov3_7b16": _dinov3_7b16,
    **_family("mae_{}", _mae, "b16 l16 h14"),
    # Four models by OpenAI, then three by open_clip, whose sizes are in src/open_clip/model_configs/ViT-{H,g,bigG}-14.json.
    "clip_b32": partial(_clip, "b", 32, 512, "quick_gelu"),
    "clip_b16": partial(_clip, "b", 16, 512, "quick_gelu"),
    "clip_l14": partial(_clip, "l", 14, 768, "quick_gelu"),
    "clip_l14_336": partial(_clip, "l", 14, 768, "quick_gelu", image=336),
    "clip_h14": partial(_clip, "h", 14, 1024, "gelu"),
    "clip_g14": partial(_clip, "g", 14, 1024, "gelu"),
    "clip_G14": partial(_clip, "G", 14, 1280, "gelu"),
    "siglip_b32": partial(_siglip, "b", 32, image=256),
    "siglip_b16": partial(_siglip, "b", 16),
    "siglip_l16": partial(_siglip, "l", 16, image=256),
    "siglip_so400m16": partial(_siglip, "so400m", 16, image=256),
    "siglip_so400m14": partial(_siglip, "so400m", 14),
    "siglip_gopt16": partial(_siglip, "gopt", 16, image=256),
    **_family("eva02_{}", _eva02, "ti14 s14 b14 l14"),
    "eva02_e14_clip": _eva02_e14_clip,
    **_family("beit_{}", _beit, "b16 l16"),
    **_family("beit3_{}", _beit3, "b16 l16"),
    **_family("relpos_{}", _relpos, "s16 m16 b16"),
    "vit_b16_rpn": _vit_b16_rpn,
    **_family("naflex_{}", _naflex, "b16"),
    **_family("naflex_{}_par", partial(_naflex, square=True), "b16"),
    **_family("naflex_{}_parfac", partial(_naflex, square=True, factorized=True), "b16"),
    **_family("aimv2_{}", _aimv2, "l14 h14"),
    "pe_core_ti16": partial(_pe_core, "ti", 16, 384, 512),
    "pe_core_s16": partial(_pe_core, "s", 16, 384, 512),
    "pe_core_b16": partial(_pe_core, "b", 16, 224, 1024),
    "pe_core_l14": partial(_pe_core, "l", 14, 336, 1024),
    "pe_lang_l14": _pe_lang_l14,
    "pe_spatial_ti16": partial(_pe_spatial, "ti", 16, 512),
    "pe_spatial_s16": partial(_pe_spatial, "s", 16, 512),
    "pe_spatial_b16": partial(_pe_spatial, "b", 16, 512),
    "pe_spatial_l14": partial(_pe_spatial, "l", 14, 448),
    **_family("rope_{}", _rope_vit, "s16 b16 l16"),
    **_family("rope_{}_ape", partial(_rope_vit, absolute=True), "s16 b16 l16"),
    **_family("rope_{}_mixed", partial(_rope_vit, mixed=True), "s16 b16 l16"),
    **_family("rope_{}_mixed_ape", partial(_rope_vit, mixed=True, absolute=True), "s16 b16 l16"),
    "sapiens2_b16": _sapiens2_b16,
    "article_xray_rope": _article_xray_rope,
    "article_multihead": _article_multihead,
    "article_sincos": _article_sincos,
    "article_rectangular": _article_rectangular,
    "article_dino": _article_dino,
}


def names() -> list[str]:
    """Return the names of all models, grouped by family."""
    return list(_MODELS)


@cache
def _base_config(name: str) -> ViTConfig:
    return _MODELS[name]()


def get(name: str, **changes: Any) -> ViTConfig:
    """Return the config of a named model, with some fields changed as by `ViTConfig.replace`.

    >>> vit_spec.get("vit_s16", num_classes=10, image_size=(64, 64))

    Args:
        name: one of `vit_spec.names()`.
        changes: fields of the config and their new values.

    Raises:
        InputError: an unknown name, an unknown field or an invalid value.
    """
    if name not in _MODELS:
        hint = nearest(name, names())
        raise InputError(f"unknown model {name!r}{hint}; `python -m parity models` lists them all")
    return _base_config(name).replace(**changes)
