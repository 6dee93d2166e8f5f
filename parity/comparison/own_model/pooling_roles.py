"""Which parameter of attention pooling is which row of `vit_spec.rows`: MAP, a learned query with attention and an MLP."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

from parity.checkpoints.layout import Axis
from parity.comparison.own_model.block_roles import Roles, by_name, find_mlp_roles, join, leaves_of
from parity.comparison.own_model.units import Unit

_NAME = "attn_pool"


def find_pooling_roles(units: Sequence[Unit], width: int, block: Roles) -> Iterator[tuple[Roles, Sequence[Unit]]]:
    """Yield the roles of the layers of attention pooling, the likeliest first, each with the other layers of the head.

    units: the layers after the blocks.
    block: the roles in a block, whose MLP is like that of the pooling.
    """
    layers = [unit for unit in units if unit.kind == "linear"]
    sizes = {unit: unit.weight.size for unit in layers}
    for count in (2, 3):
        for several in (2, 3, 4):
            attention, mlp = layers[:several], layers[several : several + count]
            for first in find_mlp_roles(mlp, sizes, width, f"{_NAME}.mlp"):
                if (
                    first.fields["mlp_dim"] != block.fields["mlp_dim"]
                    or first.fields["mlp.bias"] != block.fields["mlp.bias"]
                ):
                    continue
                if first.words and first.words != {axis: block.words.get(axis) for axis in first.words}:
                    continue
                start, end = max(unit.rank for unit in attention), min(unit.rank for unit in mlp)
                norms = [unit for unit in units if unit.kind != "linear" and start < unit.rank < end]
                latents = [
                    unit for unit in units if unit.kind == "vector" and unit.rank < start and unit.weight.size == width
                ]
                if len(norms) != 1 or norms[0].weight.size != width:
                    continue
                for second in _attention_roles(attention, width):
                    for latent in latents:
                        found = Roles({}, {f"{_NAME}.latent": latent.weight, **leaves_of(f"{_NAME}.norm", norms[0])})
                        used = {*attention, *mlp, *norms, latent}
                        yield replace(first, fields={}) | second | found, [unit for unit in units if unit not in used]


def _attention_roles(layers: Sequence[Unit], width: int) -> Iterator[Roles]:
    """Yield the roles of one, two or three layers of queries, keys and values, and of the output projection."""
    *inputs, proj = layers
    inner = proj.weight.size // width
    sizes = [unit.weight.size for unit in inputs]
    if proj.weight.size % width or any(unit.bias is None for unit in layers) or sum(sizes) != 3 * inner * width:
        return
    fields: dict[str, Any] = {"head.pool": "attention", "pool_inner": inner}
    common = Roles(fields, leaves_of(f"{_NAME}.proj", proj))
    if len(inputs) == 1:
        parts: Mapping[str, Axis] = {"q": Axis("qkv", None, 0), "kv": Axis("qkv", "kv", 1)}
        for name, part in parts.items():
            leaves = leaves_of(f"{_NAME}.{name}", inputs[0])
            common |= Roles({}, {row: replace(leaf, part=part) for row, leaf in leaves.items()})
        yield common
        return
    if len(inputs) == 3:
        inputs = by_name(inputs)
    for query, *rest in permutations(inputs):
        if query.weight.size == inner * width and (keys := join(rest, "kv", f"{_NAME}.kv")):
            yield common | Roles({}, leaves_of(f"{_NAME}.q", query)) | keys
