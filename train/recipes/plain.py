"""Plain Vision Transformers from nothing: "Better plain ViT baselines for ImageNet-1k" (arXiv 2205.01580).

The recipe is big_vision's configs/vit_s16_i1k.py for ImageNet's 1.28 million images.  Fewer images want a shorter run, a
smaller batch and less variation.  Between the two data sets that it was tried on, the 1,438 digits and ImageNet, epochs,
batch and learning rate go as powers of the number of images; a run says at its start what that comes to.
"""

import math
from collections.abc import Callable

from train.recipes.augmentation import Augment
from train.recipes.recipe import Known, Model, Optimizer, Recipe

IMAGENET = Known(images=1_281_167, channels=3)
DIGITS = 1438  # images
FEW = 100_000  # below that ImageNet's variation is too much of a good thing

LIGHT = Augment(rotate=5, shift=0.06, scale=1.05)  # handwriting varies more than this, so nothing becomes unlikely
MIDDLE = Augment(crop="resized", crop_area=(0.35, 1.0), flip=True)
FULL = Augment(
    crop="inception",
    filter="bilinear_aliased",
    flip=True,
    randaugment=(2, 10),
    mixup=0.2,
    share=224 / 256,
    held_out_filter="box",
)

PLAIN = (
    "tokens.class_token=False",
    "positions.kind=fixed",
    "positions.table=sincos_2d_big_vision",
    "mlp.activation=gelu_tanh",
    "head.pool=mean",
    "head.init=zeros",
)


def vit_s16(known: Known = IMAGENET) -> Recipe:
    """ViT-S/16, the plain one: no class token, fixed positions, the mean of all patches, a hidden layer ahead of the head.

    python -m train.jax --config vit_s16
    python -m train.jax --config vit_s16 --data parquet:imagenet-1k/data

    On 1,797 handwritten digits, the default data.  Hardware: 2 cores of an AMD EPYC.  Time: 95 s.  Accuracy: 98.9 % of
    359 held-out images (seed 0).

    On ImageNet-1k: 90 epochs of batches of 1,024, 10,000 steps of warm-up, 1e-3 with a cosine to 0, decay 0.1 times the
    rate.  Published: 76.5 % in 6 h 30 min on a TPU v3-8 (big_vision), 76.9 % in 5 h 41 min on 8 A100 (EIFY/mup-vit); with
    --epochs 300, 80.0 %.  Nobody here has had the hardware to repeat it.
    """
    return _plain(known, Model(name="vit_s16_plain"))


def vit_ti16(known: Known = IMAGENET) -> Recipe:
    """ViT-Ti/16, the plain one with a linear head; the recipe of vit_s16.

    python -m train.jax --config vit_ti16 --data parquet:imagenet-1k/data

    Hardware: 8 H100.  Time: 5 minutes of computing, planned with --dtype bfloat16; in truth what it takes to read 115
    million images.  Accuracy: none is published for this recipe; DeiT's Ti has 72.2 % after 300 epochs (arXiv 2012.12877).
    """
    return _plain(known, Model(name="vit_ti16", changes=PLAIN))


def vit_b16(known: Known = IMAGENET) -> Recipe:
    """ViT-B/16, the plain one with a linear head; the recipe of vit_s16, in bfloat16.

    python -m train.jax --config vit_b16 --data parquet:imagenet-1k/data --mesh data=-1

    Hardware: 8 H100.  Time: 1.1 h, planned.  Accuracy: none is published for this recipe; the first ViT-B/16 on ImageNet-1k
    alone had 77.9 %, after fine-tuning at 384 pixels (arXiv 2010.11929, table 5).
    """
    return _plain(known, Model(name="vit_b16", changes=PLAIN), dtype="bfloat16")


def vit_l16(known: Known = IMAGENET) -> Recipe:
    """ViT-L/16, the plain one with a linear head; the recipe of vit_s16, in bfloat16, its weights split over devices.

    python -m train.jax --config vit_l16 --data parquet:imagenet-1k/data --mesh data=-1,fsdp=8

    Hardware: 8 H100.  Time: 3.8 h, planned.  Accuracy: none is published for this recipe; the first ViT-L/16 on ImageNet-1k
    alone had 76.5 %, less than B/16, after fine-tuning at 384 pixels (arXiv 2010.11929, table 5): so few images want the
    variation of augreg_b16 or deit3_s16.
    """
    return _plain(known, Model(name="vit_l16", changes=PLAIN), dtype="bfloat16")


def _plain(known: Known, model: Model, **more: object) -> Recipe:
    few = known.images < FEW
    batch = 2 ** round(math.log2(between(known.images, 64, 1024)))
    return Recipe(
        model=model,
        augment=(LIGHT if known.channels == 1 else MIDDLE) if few else FULL,
        optimizer=Optimizer(lr=float(f"{between(known.images, 4e-4, 1e-3):.1g}"), weight_decay=0.05 if few else 0.1),
        batch_size=batch,
        epochs=float(f"{between(known.images, 10, 90):.2g}"),
        warmup=0.1 if few else "10000steps",
        **more,  # type: ignore[arg-type]
    )


def between(images: int, digits: float, imagenet: float) -> float:
    """Return the power of the number of images that is `digits` at 1,438 of them, and `imagenet` at 1.28 million."""
    place = math.log(images / DIGITS) / math.log(IMAGENET.images / DIGITS)
    return digits * (imagenet / digits) ** min(max(place, 0.0), 1.0)


RECIPES: tuple[Callable[[Known], Recipe], ...] = (vit_s16, vit_ti16, vit_b16, vit_l16)
