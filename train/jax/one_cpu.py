"""How one CPU computes a long training step: in parts that fit into its caches, and without a loop over the blocks."""

from train.recipes import Recipe
from vit_spec import Regularisation, ViTConfig
from vit_spec.cost import training_flops

# FLOPs of a training step from which compilation may take longer for a faster step: two images of ViT-Ti/16 have 1.5e10.
LONG_STEP = 1e10

# The fewest tokens of a part of a batch.  Fewer than 32 images of ViT-S/16, 6,304 tokens, have activations that fit into an
# L3 cache of 32 MB.  Four parts take 0.9 of the time and half the memory.  But with 788 tokens, two parts of ViT-B/16 take
# 1.05 times as long as one: each slices the weights, and adds its gradient to the sum.
PART_TOKENS = 1500


def is_long(config: ViTConfig, recipe: Recipe) -> bool:
    """Return whether a training step has more than `LONG_STEP` FLOPs."""
    return 3 * recipe.batch_size * training_flops(config) > LONG_STEP


def blocks_per_iteration(config: ViTConfig, recipe: Recipe) -> int | None:
    """Return `unroll` of `vit_jax.Execution`; None for its default.

    A loop over the blocks fills stacked arrays with zeros and copies the activations of each block into them.  Without it,
    a long step takes 0.9 times as long, and compilation 0.2 s longer per block.
    """
    return config.depth if is_long(config, recipe) and recipe.remat == "none" else None


def num_parts(config: ViTConfig, recipe: Recipe) -> int:
    """Return the number of equal parts in which the gradient of a batch is computed: a multiple of `recipe.accumulate`.

    The gradient is the same up to rounding, unless the model drops activations at random: random numbers depend on the
    place of an image in its part.  For such models, it is `recipe.accumulate`.
    """
    if not is_long(config, recipe) or config.regularisation != Regularisation():
        return recipe.accumulate
    images = recipe.batch_size // recipe.accumulate
    sizes = (n for n in range(1, images) if images % n == 0 and n * config.num_tokens >= PART_TOKENS)
    return recipe.batch_size // next(sizes, images)
