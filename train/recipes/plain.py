"""Plain Vision Transformers from scratch: "Better plain ViT baselines for ImageNet-1k" (arXiv 2205.01580).

For ImageNet's 1.28 million images the recipe is big_vision's configs/vit_s16_i1k.py.  Fewer images need a shorter run, a
smaller batch and less augmentation.  Good values are known for two data sets, the 1,438 digits and ImageNet.  Between them,
the epochs, the batch size and the learning rate are power laws of the number of images; a run prints the values at its
start.
"""

import math
from collections.abc import Callable

from train.recipes.augmentation import Augment
from train.recipes.recipe import DataInfo, Model, Optimizer, Recipe

IMAGENET = DataInfo(images=1_281_167, channels=3)
DIGITS_IMAGES = 1438  # training images of the digits
SMALL_DATASET = 100_000  # images; fewer images need less augmentation than ImageNet

LIGHT_AUGMENT = Augment(rotate=5, shift=0.06, scale=1.05)  # handwriting itself varies more than this
MEDIUM_AUGMENT = Augment(crop="resized", crop_area=(0.35, 1.0), flip=True)
STRONG_AUGMENT = Augment(
    crop="inception",
    filter="bilinear_aliased",
    flip=True,
    randaugment=(2, 10),
    mixup=0.2,
    share=224 / 256,
    held_out_filter="box",
)

PLAIN_OVERRIDES = (
    "tokens.class_token=False",
    "positions.kind=fixed",
    "positions.table=sincos_2d_big_vision",
    "mlp.activation=gelu_tanh",
    "head.pool=mean",
    "head.init=zeros",
)


def vit_s16(data: DataInfo = IMAGENET) -> Recipe:
    """Plain ViT-S/16: no class token, fixed positions, mean pooling of the patches, a hidden layer before the head.

    python -m train.jax --config vit_s16
    python -m train.jax --config vit_s16 --data parquet:imagenet-1k/data

    On 1,797 handwritten digits, the default data.  Hardware: 2 cores of an AMD EPYC.  Time: 90 s.  Accuracy: about 98 % of
    359 held-out images.

    On ImageNet-1k: 90 epochs, batch size 1,024, 10,000 steps of warm-up to 1e-3, then a cosine to 0, weight decay 0.1 times
    the learning rate.  Published: 76.5 % in 6 h 30 min on a TPU v3-8 (big_vision), 76.9 % in 5 h 41 min on 8 A100
    (EIFY/mup-vit); with --epochs 300, 80.0 %.  This project has not repeated it, for lack of hardware.
    """
    return _plain(data, Model(name="vit_s16_plain"))


def vit_ti16(data: DataInfo = IMAGENET) -> Recipe:
    """Plain ViT-Ti/16 with a linear head; the recipe of vit_s16.

    python -m train.jax --config vit_ti16 --data parquet:imagenet-1k/data

    Hardware: 8 H100.  Time: 5 minutes of computing, planned with --dtype bfloat16; reading 115 million images takes
    longer.  Accuracy: none is published for this recipe; DeiT's Ti has 72.2 % after 300 epochs (arXiv 2012.12877).
    """
    return _plain(data, Model(name="vit_ti16", changes=PLAIN_OVERRIDES))


def vit_b16(data: DataInfo = IMAGENET) -> Recipe:
    """Plain ViT-B/16 with a linear head; the recipe of vit_s16, in bfloat16.

    python -m train.jax --config vit_b16 --data parquet:imagenet-1k/data --mesh data=-1

    Hardware: 8 H100.  Time: 1.1 h, planned.  Accuracy: none is published for this recipe; the first ViT-B/16 on ImageNet-1k
    alone had 77.9 %, after fine-tuning at 384 pixels (arXiv 2010.11929, table 5).
    """
    return _plain(data, Model(name="vit_b16", changes=PLAIN_OVERRIDES), dtype="bfloat16")


def vit_l16(data: DataInfo = IMAGENET) -> Recipe:
    """Plain ViT-L/16 with a linear head; the recipe of vit_s16, in bfloat16, fully sharded over 8 devices.

    python -m train.jax --config vit_l16 --data parquet:imagenet-1k/data --mesh data=-1,fsdp=8

    Hardware: 8 H100.  Time: 3.8 h, planned.  Accuracy: none is published for this recipe; the first ViT-L/16 on ImageNet-1k
    alone had 76.5 %, less than B/16, after fine-tuning at 384 pixels (arXiv 2010.11929, table 5): for a larger model, so
    few images need the augmentation of augreg_b16 or deit3_s16.
    """
    return _plain(data, Model(name="vit_l16", changes=PLAIN_OVERRIDES), dtype="bfloat16")


def _plain(data: DataInfo, model: Model, **fields: object) -> Recipe:
    few = data.images < SMALL_DATASET
    batch = 2 ** round(math.log2(interpolate(data.images, 64, 1024)))
    return Recipe(
        model=model,
        augment=(LIGHT_AUGMENT if data.channels == 1 else MEDIUM_AUGMENT) if few else STRONG_AUGMENT,
        optimizer=Optimizer(lr=float(f"{interpolate(data.images, 4e-4, 1e-3):.1g}"), weight_decay=0.05 if few else 0.1),
        batch_size=batch,
        epochs=float(f"{interpolate(data.images, 10, 90):.2g}"),
        warmup=0.1 if few else "10000steps",
        **fields,  # type: ignore[arg-type]
    )


def interpolate(images: int, digits: float, imagenet: float) -> float:
    """Return the power law of the number of images through `digits` at 1,438 images and `imagenet` at 1.28 million.

    It is constant outside of that range.
    """
    position = math.log(images / DIGITS_IMAGES) / math.log(IMAGENET.images / DIGITS_IMAGES)
    return digits * (imagenet / digits) ** min(max(position, 0.0), 1.0)


RECIPES: tuple[Callable[[DataInfo], Recipe], ...] = (vit_s16, vit_ti16, vit_b16, vit_l16)
