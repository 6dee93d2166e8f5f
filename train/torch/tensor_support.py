"""Which models tensor parallelism divides in PyTorch; without a framework, since a plan refuses the others too."""

from vit_spec import InputError, ViTConfig


def check_tensor_support(config: ViTConfig) -> None:
    """Refuse models in which something between the two layers needs all heads or hidden units.

    Raises:
        InputError: the model has a norm of all heads or all hidden units, or attention without a projection.
    """
    options, mlp = config.attention, config.mlp
    needs = {"attention.out_norm": options.out_norm, "attention.proj=False": not options.proj}
    needs |= {"attention.value_skip": options.value_skip, "mlp.norm": mlp.norm}
    if found := [name for name, is_set in needs.items() if is_set]:
        raise InputError(f"train.torch cannot divide models with {found[0]} by --mesh tensor: give data and fsdp")
