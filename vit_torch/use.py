"""Loading and looking into the object twin."""

from collections import Counter
from collections.abc import Mapping
from functools import partial
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from vit_spec.shadowing import require_own
from vit_torch.execution import Execution
from vit_torch.layers import Part, at_least_float32
from vit_torch.model import ViT


def load(
    path: str | PathLike[str],
    execution: Execution | None = None,
    *,
    format: str | None = None,
    given: Mapping[str, Any] | None = None,
    num_classes: int | None = None,
    image_size: int | tuple[int, int] | None = None,
) -> ViT:
    """Return the model that a file holds, ready for inference; see `parity.load` for what can be read.

    Args:
        path: a file, a folder, a run, or "hf://owner/name".
        execution: how the model runs.
        format: the name of the file's format; by default it is recognised.
        given: fields of the config to set against what the file says, dotted as in {"norms.eps": 1e-5}.
        num_classes: width of the classifier: another one than the file's is drawn anew, 0 takes it away.
        image_size: in pixels, (height, width) or the side of a square: positions are resampled to it.

    Warns:
        parity.AssumptionWarning: names everything about the model that the file does not tell and that was assumed.
        parity.SurgeryWarning: says what num_classes or image_size changed.

    Raises:
        vit_spec.InputError: no such file, or one that is not a ViT's weights.
    """
    require_own("parity")
    import parity.checkpoints.loading  # the one import that points up: parity reads all formats

    checkpoint = parity.checkpoints.loading.for_model(
        path, format=format, given=given, num_classes=num_classes, image_size=image_size
    )
    with torch.device("meta"):  # the weights are about to be replaced
        model = ViT(checkpoint.config, execution)
    model.load_state_dict(parity.to_torch(checkpoint), assign=True)
    return model.eval()


def intermediates(model: ViT, images: Tensor, fed: Mapping[str, Tensor] | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits, and every named intermediate on the way to them, in the order of computation.

    A module's output has the module's name ("patch_embed", "blocks.3.attn", "blocks.3", "norm"); what is between modules
    has one of its own: "tokens", "positions", "embed" (what enters the blocks), "blocks.3.attn.q", "k", "v" (after norms
    and rotations), "scores", "weights", "heads" (ahead of the output projection), "blocks.3.sum" (after the first half),
    "blocks.3.mlp.activation", "pool".  What is computed twice has two names, "fc_norm" and "fc_norm (2)".  The names are
    those of `vit_jax.intermediates`; scores and weights are seen with `Execution(attention="explicit")` alone.

    Args:
        fed: what goes on in the place of the intermediates of these names.  In training, "blocks.3.drop_path" is the mask
            of the first half's images, "blocks.3.drop_path (2)" that of the second half's, and both can be fed.
    """
    found: dict[str, Tensor] = {}
    turns: Counter[str] = Counter()

    def tap(prefix: str, name: str, value: Tensor) -> Tensor:
        name = ".".join(filter(None, (prefix, name))) or "logits"
        turns[name] += 1
        name += f" ({turns[name]})" if turns[name] > 1 else ""
        found[name] = value
        return fed[name] if fed and name in fed else value

    def output(name: str, module: nn.Module, inputs: Any, value: Tensor) -> Tensor:
        return tap(name, "", value)

    named = list(model.named_modules())
    hooks = [module.register_forward_hook(partial(output, name)) for name, module in named]
    parts = [(name, module) for name, module in named if isinstance(module, Part)]
    for name, module in parts:
        module.tap = partial(tap, name)
    try:
        return model(images), found
    finally:
        for hook in hooks:
            hook.remove()
        for _, module in parts:
            module.tap = None


def attention_maps(model: ViT, images: Tensor, block: int = -1) -> Tensor:
    """Return a block's attention weights, (B, heads, T, T): row t says where token t looks.

    The class token is row 0, and patches start at column `config.num_prefix`, row by row of the image.
    """
    block = range(model.config.depth)[block]
    _, found = intermediates(model, images)
    q, k = (found[f"blocks.{block}.attn.{name}"] for name in "qk")
    scores = model.config.scale * torch.einsum("bthd,bshd->bhts", q, k)
    return scores.to(at_least_float32(scores)).softmax(-1)
