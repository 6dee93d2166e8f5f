"""Public functions of the PyTorch twin: load a model, read its intermediates and attention maps."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from vit_spec import InputError
from vit_spec.errors import block_index, nearest
from vit_spec.shadowing import check_not_shadowed
from vit_torch.attention import attention_scores
from vit_torch.execution import Execution
from vit_torch.layers import ViTModule
from vit_torch.model import ViT


def load(
    path: str | PathLike[str],
    execution: Execution | None = None,
    *,
    format: str | None = None,
    given: Mapping[str, Any] | None = None,
    strip: str | None = None,
    ignore: Sequence[str] = (),
    num_classes: int | None = None,
    image_size: int | tuple[int, int] | None = None,
) -> ViT:
    """Return the model of a checkpoint, in evaluation mode; see `parity.load` for what can be read.

    Args:
        path: a checkpoint file or folder, a run folder (its best weights), or "hf://owner/name".
        execution: execution options of the model.
        format: the name of the checkpoint's format; by default it is detected.
        given: config overrides by dotted field name, such as {"norms.eps": 1e-5}.
        strip: the beginning of the model's keys if it is not a known wrapper, such as "net.vit."; see `parity.load`.
        ignore: regular expressions for whole keys that are not parameters of the model; see `parity.load`.
        num_classes: replace the classifier by a new one with this number of outputs; 0 removes it.
        image_size: (height, width) in pixels, or the side of a square; positions are resampled to it.

    Warns:
        parity.AssumptionWarning: lists the config fields that the checkpoint does not specify, and the assumed values;
            and those of `given` that replace another value, which it specifies.
        parity.SurgeryWarning: describes the changes that num_classes or image_size made.

    Raises:
        vit_spec.InputError: the path does not exist, or is not a checkpoint of a ViT.
    """
    check_not_shadowed("parity")
    import parity.checkpoints.loading  # the only import of a higher layer: parity reads all formats

    checkpoint = parity.checkpoints.loading.load_for_model(
        path,
        format=format,
        given=given,
        strip=strip,
        ignore=ignore,
        num_classes=num_classes,
        image_size=image_size,
    )
    with torch.device("meta"):  # do not initialize parameters that are replaced below
        model = ViT(checkpoint.config, execution)
    model.load_state_dict(parity.to_torch(checkpoint), assign=True)
    return model.eval()


def intermediates(model: ViT, images: Tensor, fed: Mapping[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits and all named intermediates of a forward pass, in the order of computation.

    The output of a module has the module's name ("patch_embed", "blocks.3.attn", "blocks.3", "norm").  Intermediates inside
    modules have their own names: "tokens", "positions", "embed" (the input of the blocks), "blocks.3.attn.q", "k", "v"
    (after norms and rotary embedding), "scores", "weights", "heads" (before the output projection), "blocks.3.sum" (after
    the first residual connection), "blocks.3.mlp.activation", "pool".  An intermediate that is computed twice has two
    names: "fc_norm" and "fc_norm (2)".  `vit_jax.intermediates` uses the same names.  "scores" and "weights" are recorded
    only with `Execution(attention="explicit")`.  The backward pass recomputes no block, whatever `Execution.remat` is.

    Args:
        model: the model.
        images: (B, C, H, W).
        fed: values by name that replace intermediates in the forward pass.  In training, "blocks.3.drop_path" is the mask
            (B, 1, 1) of stochastic depth for attention, and "blocks.3.drop_path (2)" the mask for the MLP; both can be fed.

    Raises:
        vit_spec.InputError: the model is wrapped, as by `torch.compile`; or `fed` has a name that replaces nothing.
    """
    if not issubclass(type(model), ViT):  # isinstance holds for what torch.compile returns
        raise InputError(f"the model is a {type(model).__name__}: expected a vit_torch.ViT; give the model that it wraps")
    found: dict[str, Tensor] = {}
    counts: Counter[str] = Counter()

    def record(prefix: str, name: str, value: Tensor) -> Tensor:
        name = ".".join(filter(None, (prefix, name))) or "logits"
        counts[name] += 1
        name += f" ({counts[name]})" if counts[name] > 1 else ""
        found[name] = value
        return fed[name] if fed and name in fed else value

    def record_output(name: str, module: nn.Module, inputs: Any, value: Tensor) -> Tensor:
        return record(name, "", value)

    named = list(model.named_modules())
    hooks = [module.register_forward_hook(partial(record_output, name)) for name, module in named]
    parts = [(name, module) for name, module in named if isinstance(module, ViTModule)]
    for name, module in parts:
        module.on_intermediate = partial(record, name)
    try:
        logits = model(images)
    finally:
        for hook in hooks:
            hook.remove()
        for _, module in parts:
            module.on_intermediate = None
    if unused := [name for name in fed or () if name not in found]:
        raise InputError(
            f"fed names {', '.join(map(repr, unused))}, which this forward pass does not compute: give names that "
            f"intermediates returns{nearest(unused[0], found)}"
        )
    return logits, found


def attention_maps(model: ViT, images: Tensor, block: int = -1) -> Tensor:
    """Return the attention weights of a block, (B, heads, T, T): row t has the weights of the query of token t.

    The class token has index 0; patches start at index `config.num_prefix`, in row-major order of the image.

    Args:
        model: the model.
        images: (B, C, H, W).
        block: index of the block; negative indices count from the last block.

    Raises:
        vit_spec.InputError: the model is wrapped, as by `torch.compile`, or has no such block.
    """
    _, found = intermediates(model, images)
    block = block_index(block, model.config.depth)
    q, k = (found[f"blocks.{block}.attn.{name}"].transpose(1, 2) for name in "qk")  # (B, H, T, D)
    scores = attention_scores(q, k, model.config.scale)
    if model.config.positions.relative != "none":
        scores = scores + found["rel_pos" if model.config.positions.relative_shared else f"blocks.{block}.attn.rel_pos"]
    return scores.softmax(-1)
