"""Patches: functions that change one model of the PyTorch twin in place."""

from collections.abc import Callable, Iterator
from typing import Any

Patch = Callable[[Any], None]  # changes a `vit_torch.ViT` in place
Change = Callable[[str, Any], Any]  # the name of an intermediate and its value, to the value that is used instead


class Inapplicable(Exception):
    """A cause that says nothing of this model: it lacks the part that the cause is about."""


def kept(part: Any, change: Change) -> None:
    """Replace what a part of the model computes under a name by change(name, value); later changes see earlier values."""
    keep, show = part.keep, part.show
    part.keep = lambda name, value: keep(name, change(name, value))
    part.show = lambda name, value: show(name, change(name, value))


def at(name: str, function: Callable[[Any], Any]) -> Patch:
    """Return the patch that replaces the intermediate `name` by function(intermediate).

    name: as `vit_torch.intermediates` names it; "blocks.*.attn" stands for that of every block.
    """

    def patch(model: Any) -> None:
        modules = dict(model.named_modules())
        for one in _expanded(name, model):
            owner, _, leaf = one.rpartition(".")
            if one in modules:
                modules[one].register_forward_hook(lambda module, inputs, output: function(output))
            elif hasattr(modules.get(owner), "keep"):
                kept(modules[owner], _named(leaf, function))
            else:
                raise Inapplicable(f"this model has no {one}")

    return patch


def _named(leaf: str, function: Callable[[Any], Any]) -> Change:
    return lambda name, value: function(value) if name == leaf else value


def _expanded(name: str, model: Any) -> Iterator[str]:
    if "*" not in name:
        yield name
        return
    for number in range(len(model.blocks)):
        yield name.replace("*", str(number))


def only(patch: Patch, number: int) -> Patch:
    """Return a patch of blocks, norms or attention confined to one block."""

    def confined(model: Any) -> None:
        patch(_Block(model, number))

    return confined


class _Block:
    """One block in the place of a whole model, as far as a patch looks at it."""

    def __init__(self, model: Any, number: int) -> None:
        block = model.blocks[number]
        self.config, self.blocks = model.config, [block]
        self.modules, self.named_modules = block.modules, block.named_modules


def there(part: Any, what: str) -> Any:
    """Return a part of a model.

    Raises:
        Inapplicable: there is none.
    """
    if part is None:
        raise Inapplicable(f"this model has no {what}")
    return part
