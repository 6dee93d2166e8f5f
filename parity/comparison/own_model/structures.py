"""All hypotheses on the roles of the parameters of a model, before anything is computed with them."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from parity.comparison.own_model.block_roles import Roles, find_block_roles
from parity.comparison.own_model.candidate import Candidate
from parity.comparison.own_model.keys import Blocks, Leaf, Shape, find_blocks
from parity.comparison.own_model.model import ImageShape
from parity.comparison.own_model.outer_roles import find_head_roles, find_stem_roles
from parity.comparison.own_model.units import Unit, find_units
from vit_spec import InputError

_MLP_BEFORE = (
    "if its attention reads the output of its MLP, a copy of the class with attention first computes the same with one "
    "more block, where the first block has an attention of zeros and the last one an MLP of zeros; if both read the same "
    "input, let a copy of the class compute attention first"
)
_MLP_BEFORE_POST = "a class whose norms come after the MLP and attention can only be converted if its attention is first"
_AHEAD = "ahead of the blocks"


def find_candidates(
    shapes: Mapping[str, Shape], order: Sequence[str], images: ImageShape, output: tuple[int, ...]
) -> Iterator[Candidate]:
    """Yield the hypotheses on a model that its keys, their shapes and the order of their use allow, the likeliest first.

    Args:
        shapes: the shapes of the parameters, by key.
        order: the keys in the order of use.
        images: the images.
        output: the shape of the output.

    Raises:
        InputError: there are none; the message says what was not found.
    """
    divisions = find_blocks(shapes, order)
    if not divisions:
        raise InputError(
            "no repeated blocks were found among its parameters: a ViT has blocks of the same parameters, with a number in "
            "their keys, or stacked on the first axis"
        )
    reasons: list[str] = []
    is_found = False
    for blocks in divisions:
        if blocks.disorder:
            reasons.append(f"its blocks do not run in the order of their numbers: {blocks.disorder}")
            continue
        for roles in _roles(blocks, images, output, reasons):
            is_found = True
            yield Candidate(roles, blocks.depth)
    if not is_found:
        raise InputError(reasons[0] if reasons else "its parameters are not those of a ViT")


def _roles(blocks: Blocks, images: ImageShape, output: tuple[int, ...], reasons: list[str]) -> Iterator[Roles]:
    start = blocks.inner[0].rank
    before = [leaf for leaf in blocks.outer if leaf.rank < start]
    after = [leaf for leaf in blocks.outer if leaf.rank > start]
    widths = _widths(blocks.inner)
    if not widths:
        reasons.append(_no_width(blocks.inner))
    for width in widths:
        of_blocks = list(find_block_roles(blocks.inner, width))
        if not of_blocks and not reasons:
            expected, find = "do not fit any block of ViTConfig", partial(find_block_roles, width=width)
            reasons.append(_other_order(blocks.inner, find) or _misfit(blocks.inner, find, "of a block", expected, width))
        for block in of_blocks:
            find_stems = partial(find_stem_roles, width=width, images=images, norm_bias=block.fields["norms.bias"])
            stems = list(find_stems(before))
            if not stems and not reasons:
                expected = (
                    f"are not a projection of patches of images of {images.height}x{images.width} with {images.channels} "
                    "channels, tokens, positions and norms"
                )
                reasons.append(_misfit(before, find_stems, _AHEAD, expected, width))
            for stem in stems:
                distillation = stem.fields["tokens.distillation"]
                find_heads = partial(find_head_roles, width=width, output=output, block=block, distillation=distillation)
                heads = list(find_heads(after))
                if not heads and not reasons:
                    expected = f"are not norms, attention pooling and a classifier with {output[-1]} outputs"
                    reasons.append(_misfit(after, find_heads, "after the blocks", expected, width))
                for head in heads:
                    yield block | stem | head


def _widths(leaves: Sequence[Leaf]) -> list[int]:
    """Return the lengths that all matrices of a block have as a dimension, those of most vectors first."""
    matrices = [leaf for leaf in leaves if leaf.is_matrix]
    common = set.intersection(*(set(leaf.inner_shape) for leaf in matrices)) - {1}
    vectors = [leaf.size for leaf in leaves if not leaf.is_matrix]
    return sorted(common, key=lambda width: -vectors.count(width))


def _no_width(leaves: Sequence[Leaf]) -> str:
    """Return why a block has no width: which of its matrices does not have the dimension that the largest ones have."""
    matrices = [leaf for leaf in leaves if leaf.is_matrix]
    entries = Counter[int]()
    for leaf in matrices:
        entries.update(dict.fromkeys(set(leaf.inner_shape) - {1}, leaf.size))
    width = max(entries, key=lambda length: (entries[length], -length))
    other = next(leaf for leaf in matrices if width not in leaf.inner_shape)
    return (
        f"{other.key} {other.shape} has no dimension of the width {width}, which each layer of a block must take or "
        "return; a layer on a part of the width, such as that of one head, is the same as one on all of it whose other "
        "entries are zero, which a copy of the class and of the checkpoint can have; any other is not in ViTConfig"
    )


def _other_order(leaves: Sequence[Leaf], find: Callable[[Sequence[Leaf]], Iterator[Roles]]) -> str:
    """Return that a block has its MLP before attention, if it fits ViTConfig in the other order; else ""."""
    ordered = sorted(leaves, key=lambda leaf: leaf.rank)
    for start in range(1, len(ordered)):
        turned = [replace(leaf, rank=rank) for rank, leaf in enumerate((*ordered[start:], *ordered[:start]))]
        for roles in find(turned):
            first: dict[str, int] = {}  # of attention and of the MLP, in the order of the class
            for branch in ("blocks.attn.", "blocks.mlp."):
                ranks = [leaf.rank for name, leaf in roles.leaves.items() if name.startswith(branch)]
                first[branch] = min((rank + start) % len(ordered) for rank in ranks)
            if first["blocks.mlp."] < first["blocks.attn."]:
                mlp, attention = (ordered[first[branch]].key for branch in ("blocks.mlp.", "blocks.attn."))
                is_pre = first["blocks.mlp."] > 0  # the block begins with a norm
                return (
                    f"a block uses {mlp}, of its MLP, before {attention}, of its attention, and ViTConfig has attention "
                    f"first: {_MLP_BEFORE if is_pre else _MLP_BEFORE_POST}"
                )
    return ""


def _misfit(
    leaves: Sequence[Leaf], find: Callable[[Sequence[Leaf]], Iterator[Roles]], where: str, expected: str, width: int
) -> str:
    """Return why parameters have no roles: the layer without which the others have some; else all of them.

    find: yields the roles of parameters.
    where: where the parameters are.
    expected: the end of a message with all of them.
    """
    units = find_units(leaves)
    for unit in sorted(units, key=lambda unit: unit.weight.size):
        rest = [leaf for leaf in leaves if leaf not in unit.leaves]
        if any(True for _ in find(rest)):
            others = f"but for all other parameters {where}"
            is_early = where == _AHEAD and any(other.kind == "linear" and other.rank > unit.rank for other in units)
            return f"--like has no place for {_listed(unit.leaves)}, {others}: {_kind(unit, width, is_early)}"
    return f"the parameters {where}, {_listed(leaves)}, {expected}"


def _kind(unit: Unit, width: int, is_early: bool) -> str:
    """Return what a layer without a role may be, and what to do.

    is_early: whether it is ahead of a linear layer that is itself ahead of the blocks.
    """
    if unit.kind == "norm" and is_early:
        return (
            f"a norm of {unit.weight.size} entries, such as one of flattened patches ahead of their projection, is in no "
            "config: only a model without it can be converted"
        )
    if unit.kind != "linear" and unit.weight.size < width:
        return (
            "it may be a learned temperature or gate; if it scales the scores of attention, multiply it into the weights "
            "of the queries, in a copy of the class and in the checkpoint"
        )
    return "if ViTConfig has such a part, write a table by hand; otherwise only a model without it can be converted"


def _listed(leaves: Sequence[Leaf]) -> str:
    shown = [f"{leaf.key} {leaf.shape}" for leaf in leaves[:16]]
    rest = f" and {len(leaves) - 16} more" if len(leaves) > 16 else ""
    return f"[{'; '.join(shown) or 'none'}{rest}]"
