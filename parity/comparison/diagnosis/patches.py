"""Patches: functions that change one model of the PyTorch twin in place."""

from collections.abc import Callable, Iterator
from typing import Any

Patch = Callable[[Any], None]  # changes a `vit_torch.ViT` in place
Change = Callable[[str, Any], Any]  # (name of an intermediate, its value) -> the value to use instead


class Inapplicable(Exception):
    """Raised when a model lacks the part that a patch changes."""


def intercept(module: Any, change: Change) -> None:
    """Replace each named intermediate of a module by change(name, value); the newest change is applied first."""
    intermediate, record = module.intermediate, module.record
    module.intermediate = lambda name, value: intermediate(name, change(name, value))
    module.record = lambda name, value: record(name, change(name, value))


def patch_intermediate(name: str, function: Callable[[Any], Any]) -> Patch:
    """Return the patch that replaces the intermediate `name` by function(intermediate).

    name: as in `vit_torch.intermediates`; "blocks.*.attn" means this intermediate of every block.
    """

    def patch(model: Any) -> None:
        modules = dict(model.named_modules())
        for full_name in _expand(name, model):
            owner, _, leaf = full_name.rpartition(".")
            if full_name in modules:
                modules[full_name].register_forward_hook(lambda module, inputs, output: function(output))
            elif hasattr(modules.get(owner), "intermediate"):
                intercept(modules[owner], _change_named(leaf, function))
            else:
                raise Inapplicable(f"this model has no {full_name}")

    return patch


def _change_named(leaf: str, function: Callable[[Any], Any]) -> Change:
    return lambda name, value: function(value) if name == leaf else value


def _expand(name: str, model: Any) -> Iterator[str]:
    """Yield the name with "*" replaced by the number of each block."""
    if "*" not in name:
        yield name
        return
    for number in range(len(model.blocks)):
        yield name.replace("*", str(number))


def confine_to_block(patch: Patch, number: int) -> Patch:
    """Return a patch of blocks, norms or attention that is applied to one block only."""

    def confined(model: Any) -> None:
        patch(_SingleBlock(model, number))

    return confined


class _SingleBlock:
    """One block of a model, with the part of the model's interface that patches use."""

    def __init__(self, model: Any, number: int) -> None:
        block = require(model.blocks[number] if number < len(model.blocks) else None, f"block {number}")
        self.config, self.blocks = model.config, [block]
        self.modules, self.named_modules = block.modules, block.named_modules


def require(part: Any, what: str) -> Any:
    """Return a part of a model, or raise `Inapplicable` if it is None."""
    if part is None:
        raise Inapplicable(f"this model has no {what}")
    return part
