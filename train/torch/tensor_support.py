"""Which runs tensor parallelism divides in PyTorch; without a framework, since a plan refuses the others too."""

from train.recipes import Recipe
from vit_spec import InputError, ViTConfig


def check_tensor_support(config: ViTConfig, recipe: Recipe) -> None:
    """Refuse models in which something between the two layers needs all heads or hidden units, or random numbers of each.

    Raises:
        InputError: the model has a norm of all heads or all hidden units, or attention without a projection; or it has
            dropout of these, and PyTorch's generator, whose state is the same along `tensor`.
    """
    options, mlp = config.attention, config.mlp
    needs = {"attention.out_norm": options.out_norm, "attention.proj=False": not options.proj}
    needs |= {"attention.value_skip": options.value_skip, "mlp.norm": mlp.norm}
    if found := [name for name, is_set in needs.items() if is_set]:
        raise InputError(f"train.torch cannot divide models with {found[0]} by --mesh tensor: give data and fsdp")
    rates = config.regularisation
    dropouts = {"regularisation.attn_drop": rates.attn_drop, "regularisation.mlp_drop": rates.mlp_drop}
    if recipe.rng == "own" and (found := [name for name, rate in dropouts.items() if rate]):
        raise InputError(f"--rng own gives all devices along --mesh tensor one mask of {found[0]}: give --rng shared")
