"""Small runs, to try things out on two cores."""

from collections.abc import Callable
from dataclasses import replace

from train.recipes.augmentation import Augment
from train.recipes.plain import IMAGENET, LIGHT_AUGMENT, MEDIUM_AUGMENT
from train.recipes.recipe import DataInfo, Model, Optimizer, Recipe


def tiny(data: DataInfo = IMAGENET) -> Recipe:
    """A ViT of 0.2 million parameters on the digits at their own 8x8 pixels, to try things out.

    python -m train.jax --config tiny

    Hardware: 2 cores of an AMD EPYC. Time: 30 s. Held-out accuracy: 96.4 % (seed 0), in JAX and in PyTorch.
    """
    shape = ("patch_size=2", "width=64", "depth=4", "num_heads=4", "mlp_dim=256")
    return Recipe(
        model=Model(name="vit_ti16", image_size=(8, 8), changes=shape),
        augment=LIGHT_AUGMENT,
        optimizer=Optimizer(lr=2e-3),
        epochs=30,
        eval_every=5,
        save_every=5,
    )


def tiny_labels(data: DataInfo = IMAGENET) -> Recipe:
    """`tiny` with ten independent labels, "is it a 0?" to "is it a 9?" (sigmoid), evaluated by AUROC.

    python -m train.jax --config tiny_labels

    Hardware: 2 cores of an AMD EPYC. Time: 30 s. Held-out AUROC: 0.998, the mean over labels (seed 0).
    """
    return replace(tiny(data), task="labels")


def tiny_values(data: DataInfo = IMAGENET) -> Recipe:
    """`tiny` as a regression of the digit as a number, evaluated by its mean absolute error and R2.

    python -m train.jax --config tiny_values

    Hardware: 2 cores of an AMD EPYC. Time: 35 s. Held-out error: 0.75, R2 0.815 (seed 0); in PyTorch 0.73
    and 0.818.
    """
    return replace(tiny(data), task="values")


def cifar10(data: DataInfo = IMAGENET) -> Recipe:
    """A ViT of 1.2 million parameters for about ten thousand colour images of 32x32 pixels, from scratch, on two cores.

    python -m train.jax --config cifar10 --data parquet:cifar10

    Images are enlarged to 36x36 and cut into 36 patches of 6x6, because the time of a step is proportional to the number of
    patches.  Crops, mixup and label smoothing reduce overfitting to so few images.

    Hardware: 2 cores of an AMD EPYC. Time: 30 min. Accuracy: 67.1 % of CIFAR-10's 10,000 test images, after 32 epochs of
    10,000 training images, a fifth of all (seed 0); 60 % after 16.
    """
    shape = ("patch_size=6", "width=128", "depth=6", "num_heads=4", "mlp_dim=512")
    plain = ("tokens.class_token=False", "positions.kind=fixed", "positions.table=sincos_2d_big_vision", "head.pool=mean")
    return Recipe(
        model=Model(name="vit_ti16", image_size=(36, 36), changes=(*shape, *plain)),
        augment=Augment(crop="resized", crop_area=(0.35, 1.0), flip=True, mixup=0.2),
        optimizer=Optimizer(name="muon", lr=3e-3, weight_decay=0.1, beta2=0.99),
        epochs=32,
        label_smoothing=0.1,
        eval_every=4,
        save_every=2,
    )


def small_photos(data: DataInfo = IMAGENET) -> Recipe:
    """Fine-tuning on a few hundred to a few thousand photographs, on a laptop.

    python -m train.jax --config small_photos --init timm:vit_tiny_patch16_224.augreg_in21k_ft_in1k --data folder:photos

    With --init, the model is that of the weights.  Without, a model of 1.2 million parameters is trained from scratch at
    64x64 pixels, with a lower accuracy.

    The run has 20,000 images, but not fewer than 10 epochs nor more than 60.  AdamW with layer-wise learning-rate decay of
    0.75, crops of at least 35 % of the image, mirror images, label smoothing.

    Hardware: 2 cores of an AMD EPYC.  Time: 21 min for 20,000 images with ViT-Ti/16 at 224x224 (16 images/s), 2 min from
    scratch.  Accuracy: of 5,000 test images of five classes of CIFAR-10, with 400 training images of each class, 66.1 %
    from scratch, and 70.1 % from weights trained on 4,000 images of other classes; with 20 of each, 44.0 % and 53.7 %.
    """
    plain = ("tokens.class_token=False", "positions.kind=fixed", "positions.table=sincos_2d_big_vision", "head.pool=mean")
    shape = ("patch_size=8", "width=128", "depth=6", "num_heads=4", "mlp_dim=512")
    return Recipe(
        model=Model(name="vit_ti16", image_size=(64, 64), changes=(*shape, *plain)),
        augment=replace(MEDIUM_AUGMENT, flip=data.channels == 3),
        optimizer=Optimizer(lr=5e-4, weight_decay=0.05, layer_decay=0.75),
        batch_size=32,
        epochs=float(min(max(round(20_000 / data.images), 10), 60)),
        label_smoothing=0.1,
    )


RECIPES: tuple[Callable[[DataInfo], Recipe], ...] = (tiny, tiny_labels, tiny_values, cifar10, small_photos)
