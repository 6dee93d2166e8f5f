"""Recipes for the five article models on the tasks of their articles, which say little about the training."""

from collections.abc import Callable

from train.recipes.augmentation import Augment
from train.recipes.plain import IMAGENET
from train.recipes.recipe import DataInfo, Model, Optimizer, Recipe


def article_xray_rope(data: DataInfo = IMAGENET) -> Recipe:
    """Findings in chest x-rays, several per image, evaluated by the AUROC of each; data: NIH's table beside its images.

    python -m train.jax --config article_xray_rope --data 'csv:Data_Entry_2017.csv?missing=skip'

    Images of one patient stay on one side of the split, which `train_val_list.txt` and `test_list.txt` give if present.

    Hardware: 1 H100.  Time: a minute of computing for the 86,524 training images, planned; reading them ten times takes
    longer.  AUROC: none is published for this model; a DenseNet pretrained on photographs has 0.807, the mean over
    14 findings, on that split (arXiv 1803.04565).
    """
    return Recipe(
        model=Model(name="article_xray_rope"),
        task="labels",
        augment=Augment(rotate=5, shift=0.05, scale=1.1),
        optimizer=Optimizer(lr=1e-4, weight_decay=0.05),
        batch_size=32,
        epochs=10,
    )


def article_multihead(data: DataInfo = IMAGENET) -> Recipe:
    """The ViT-B/16 of the multi-head article, with dropout 0.1, on photographs in class folders.

    python -m train.jax --config article_multihead --data folder:PATH

    Hardware: 8 H100.  Time: 0.4 h for ImageNet-1k, planned.  Accuracy: none is published, also not in the article.
    """
    return Recipe(
        model=Model(name="article_multihead"),
        augment=Augment(crop="inception", flip=True),
        optimizer=Optimizer(lr=3e-4, weight_decay=0.1),
        batch_size=64 if data.images < 100_000 else 512,
        epochs=30,
    )


def article_sincos(data: DataInfo = IMAGENET) -> Recipe:
    """The article model without output projections, ten classes: CIFAR-10.

    python -m train.jax --config article_sincos --data cifar:cifar-10-batches-py --model.image-size 64 64

    Hardware: 1 H100.  Time: 20 s of computing for 50,000 images, planned.  Accuracy: none is published, also not in the
    article.
    """
    return Recipe(
        model=Model(name="article_sincos"),
        augment=Augment(crop="simple", flip=True),
        optimizer=Optimizer(lr=1e-4, weight_decay=0.05),
        batch_size=64,
        epochs=30,
    )


def article_rectangular(data: DataInfo = IMAGENET) -> Recipe:
    """Regression of a number from wide grey images, 60x100 pixels, by mean squared error; data: a table with values.

    python -m train.jax --config article_rectangular --data 'csv:table.csv?target=value'

    Hardware: 1 H100.  Time: a second for every 1,500 images, planned.  Error: none is published, and neither are the data.
    """
    return Recipe(
        model=Model(name="article_rectangular"),
        task="values",
        optimizer=Optimizer(lr=1e-4, weight_decay=0.05),
        batch_size=32,
        epochs=30,
    )


def article_dino(data: DataInfo = IMAGENET) -> Recipe:
    """DINO's ViT-S/16 with a classifier and positions resampled to any image size; usually with --init.

    python -m train.jax --config article_dino --init hf://timm/vit_small_patch16_224.dino --data folder:PATH

    Hardware: 1 H100.  Time: 0.25 h for ImageNet-1k, planned.  Accuracy: 81.5 % there after DINO's own, longer fine-tuning
    (arXiv 2104.14294, table 6); none is published for this recipe.
    """
    return Recipe(
        model=Model(name="article_dino"),
        augment=Augment(crop="resized", crop_area=(0.25, 1.0), flip=data.channels == 3),
        optimizer=Optimizer(lr=2e-4, weight_decay=0.05, layer_decay=0.75),
        batch_size=64,
        epochs=10,
    )


RECIPES: tuple[Callable[[DataInfo], Recipe], ...] = (
    article_xray_rope,
    article_multihead,
    article_sincos,
    article_rectangular,
    article_dino,
)
