"""Published recipes for ImageNet-1k, with their departures from the originals.

The results on ImageNet are those of the publications; this project has not repeated them, for lack of hardware.
"""

from collections.abc import Callable
from dataclasses import replace

from train.recipes.augmentation import Augment
from train.recipes.plain import IMAGENET, STRONG_AUGMENT
from train.recipes.recipe import DataInfo, Model, Optimizer, Recipe

DEIT = Augment(
    crop="resized",
    crop_area=(0.08, 1.0),
    filter="bicubic",
    flip=True,
    randaugment=(2, 9),
    erase=0.25,
    mixup=0.8,
    cutmix=1.0,
    repeats=3,
    share=0.875,
)
DEIT3 = Augment(
    crop="simple", filter="bicubic", flip=True, three_augment=True, jitter=0.3, mixup=0.8, cutmix=1.0, repeats=3
)


def deit_s16(data: DataInfo = IMAGENET) -> Recipe:
    """DeiT-S (arXiv 2012.12877): strong augmentation instead of more images.

    python -m train.jax --config deit_s16 --data parquet:imagenet-1k/data

    300 epochs, batch size 1,024, AdamW at 1e-3, label smoothing, mixup and CutMix, random erasing, repeated augmentation.
    B and Ti: --model.name deit_b16, deit_ti16.  With a teacher: --model.name deit_s16_distilled --teacher WEIGHTS.

    Hardware: 8 V100.  Time: 53 h for B, according to the paper.  Accuracy: 79.8 %; 81.8 % for B, 72.2 % for Ti.
    Reproduced in jax by affjljoo3581/deit3-jax: 79.7 % in 2 h 43 min on a TPU v4-64.

    RandAugment here has big_vision's sixteen operations at a fixed magnitude; DeiT draws the magnitude around 9.
    """
    return Recipe(
        model=Model(name="deit_s16", changes=("regularisation.drop_path=0.1",)),
        augment=DEIT,
        optimizer=Optimizer(lr=1e-3, weight_decay=0.05, clip=float("inf")),
        batch_size=1024,
        epochs=300,
        warmup="5epochs",
        label_smoothing=0.1,
    )


def deit3_s16(data: DataInfo = IMAGENET) -> Recipe:
    """DeiT-III's ViT-S (arXiv 2204.07118): simpler augmentation, a sigmoid loss per class, LAMB.

    python -m train.jax --config deit3_s16 --data parquet:imagenet-1k/data

    400 epochs, batch size 2,048, learning rate 4e-3, at 224 pixels.

    Hardware: a TPU v4-64.  Time: 2 h 38 min in affjljoo3581/deit3-jax, which reaches 80.7 %.  Accuracy: 80.4 % in the
    paper, 81.4 % after 800 epochs.
    """
    return Recipe(
        model=Model(name="deit3_s16", changes=("regularisation.drop_path=0.05",)),
        augment=DEIT3,
        optimizer=Optimizer(name="lamb", lr=4e-3, weight_decay=0.05, clip=1.0),
        batch_size=2048,
        epochs=400,
        warmup="5epochs",
        loss="sigmoid",
    )


def augreg_b16(data: DataInfo = IMAGENET) -> Recipe:
    """ViT-B/16 of "How to train your ViT?" (arXiv 2106.10270), with its medium augmentation, on ImageNet-1k alone.

    python -m train.jax --config augreg_b16 --data parquet:imagenet-1k/data --mesh data=-1 --remat dots

    300 epochs, batch size 4,096, Adam at 1e-3 with 10,000 steps of warm-up, weight decay 0.1 times the learning rate,
    stochastic depth and dropout 0.1, RandAugment(2, 15), mixup 0.5.  This is scenic's imagenet_augreg_vit_config, except
    that its loss is a sigmoid per class with a head bias that begins at -6.9; here it is a softmax, from zero.

    Hardware: 8 H100.  Time: 3.6 h, planned.  Accuracy: 79.2 % for Google's own weights, from a stronger
    augmentation and 20,000 steps of fine-tuning (timm's results, vit_base_patch16_224.augreg_in1k).
    """
    noise = ("regularisation.drop_path=0.1", "regularisation.mlp_drop=0.1", "regularisation.pos_drop=0.1")
    return Recipe(
        model=Model(name="vit_b16", changes=(*noise, "mlp.activation=gelu_tanh")),
        augment=replace(STRONG_AUGMENT, randaugment=(2, 15), mixup=0.5),
        optimizer=Optimizer(lr=1e-3, weight_decay=0.1),
        batch_size=4096,
        epochs=300,
        warmup="10000steps",
        dtype="bfloat16",
    )


def finetune(data: DataInfo = IMAGENET) -> Recipe:
    """Fine-tuning of pretrained weights, at their own resolution or another; it needs --init.

    python -m train.jax --config finetune --init hf://timm/vit_small_patch16_224.augreg_in21k --data folder:PATH
    python -m train.jax --config finetune --init weights.safetensors --model.image-size 384 384 --data folder:PATH

    AdamW with layer-wise learning-rate decay of 0.75 (BEiT, arXiv 2106.08254; MAE, arXiv 2111.06377), and crops of at
    least half of the image.

    Hardware: 2 cores of an AMD EPYC.  Time: 21 min, a ViT of 0.8 million parameters on 10,000 images of CIFAR-10.
    Accuracy: from 51.8 % to 55.5 % of its 10,000 test images (seed 0).
    """
    return Recipe(
        augment=Augment(crop="resized", crop_area=(0.5, 1.0), flip=data.channels == 3),
        optimizer=Optimizer(lr=5e-4, weight_decay=0.05, layer_decay=0.75),
        batch_size=64 if data.images < 100_000 else 512,
        epochs=10,
    )


def linear_probe(data: DataInfo = IMAGENET) -> Recipe:
    """A linear classifier on frozen features, with augmentation; it needs --init.  See also `python -m train.evaluate`.

    python -m train.jax --config linear_probe --init hf://timm/vit_small_patch16_224.dino --data folder:PATH

    Everything but the head is frozen; SGD with momentum 0.9 and no weight decay, as in DINO's eval_linear.py.

    Hardware: 2 cores of an AMD EPYC.  Time: 14 min, a ViT of 0.8 million parameters on 10,000 images of CIFAR-10.
    Accuracy: from 51.8 % to 52.4 % of its 10,000 test images (seed 0).  Published: 77.0 % on ImageNet-1k for the weights
    above, from the concatenated tokens of the last four blocks (facebookresearch/dino); here from the last block only.
    """
    return Recipe(
        augment=Augment(crop="resized", crop_area=(0.08, 1.0), flip=data.channels == 3),
        optimizer=Optimizer(name="sgd", lr=0.01, weight_decay=0.0, clip=float("inf"), freeze=("[!h]*",)),
        batch_size=64 if data.images < 100_000 else 1024,
        epochs=20,
        warmup=0,
    )


REQUIRE_INIT = (finetune.__name__, linear_probe.__name__)  # recipes that need --init
RECIPES: tuple[Callable[[DataInfo], Recipe], ...] = (deit_s16, deit3_s16, augreg_b16, finetune, linear_probe)
