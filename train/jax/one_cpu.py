"""How one CPU computes a long training step: in parts that fit into its caches, and without a loop over the blocks."""

import vit_spec
from train.recipes import Recipe
from vit_spec import Regularisation, ViTConfig

# FLOPs of a training step from which compilation may take longer for a faster step.
LONG_STEP = 2e11

# A part of a batch has hidden units of at most this many bytes in float32, but no fewer tokens than this.  Measured on an
# L3 cache of 32 MB: 32 images of ViT-S/16 in four parts of 10 MB take 0.91 of the time, and half the memory.  Two parts of
# 788 tokens of ViT-B/16 take as long as one, and four parts of 394 take 1.1 times as long: each slices the weights, and
# adds its gradient to the sum.
HIDDEN_BYTES, FEWEST_TOKENS = 10e6, 750


def is_long(config: ViTConfig, recipe: Recipe) -> bool:
    """Return whether a training step has more than `LONG_STEP` FLOPs."""
    return 3 * recipe.batch_size * vit_spec.flops(config) > LONG_STEP


def blocks_per_iteration(config: ViTConfig, recipe: Recipe) -> int | None:
    """Return `unroll` of `vit_jax.Execution`; None for its default.

    A loop over the blocks fills stacked arrays with zeros and copies the activations of each block into them.  Without it,
    a long step takes 0.9 times as long, and compilation 0.6 s longer per block.
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
    most = max(HIDDEN_BYTES / (4 * config.mlp_dim), FEWEST_TOKENS) / config.num_tokens
    part = max((n for n in range(1, images + 1) if images % n == 0 and n <= most), default=images)
    return recipe.batch_size // part if part * config.num_tokens >= FEWEST_TOKENS else recipe.accumulate
