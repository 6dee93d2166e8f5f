"""All hypotheses on the roles of the parameters of a model, before anything is computed with them."""

from collections.abc import Iterator, Mapping, Sequence

from parity.comparison.own_model.block_roles import Roles, find_block_roles
from parity.comparison.own_model.candidate import Candidate
from parity.comparison.own_model.keys import Blocks, Leaf, Shape, find_blocks
from parity.comparison.own_model.model import ImageShape
from parity.comparison.own_model.outer_roles import find_head_roles, find_stem_roles
from vit_spec import InputError


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
    for width in _widths(blocks.inner):
        of_blocks = list(find_block_roles(blocks.inner, width))
        if not of_blocks:
            reasons.append(f"the parameters of a block, {_listed(blocks.inner)}, do not fit any block of ViTConfig")
        for block in of_blocks:
            norm_bias = block.fields["norms.bias"]
            stems = list(find_stem_roles(before, width, images, norm_bias))
            if not stems:
                reasons.append(
                    f"the parameters ahead of the blocks, {_listed(before)}, are not a projection of patches of images of "
                    f"{images.height}x{images.width} with {images.channels} channels, tokens, positions and norms"
                )
            for stem in stems:
                heads = list(find_head_roles(after, width, output, norm_bias, stem.fields["tokens.distillation"]))
                if not heads:
                    reasons.append(
                        f"the parameters after the blocks, {_listed(after)}, are not norms and a classifier with "
                        f"{output[-1]} outputs"
                    )
                for head in heads:
                    yield block | stem | head


def _widths(leaves: Sequence[Leaf]) -> list[int]:
    """Return the lengths that all matrices of a block have as a dimension, those of most vectors first."""
    matrices = [leaf for leaf in leaves if leaf.is_matrix]
    common = set.intersection(*(set(leaf.inner_shape) for leaf in matrices)) - {1}
    vectors = [leaf.size for leaf in leaves if not leaf.is_matrix]
    return sorted(common, key=lambda width: -vectors.count(width))


def _listed(leaves: Sequence[Leaf]) -> str:
    shown = [f"{leaf.key} {leaf.shape}" for leaf in leaves[:16]]
    rest = f" and {len(leaves) - 16} more" if len(leaves) > 16 else ""
    return f"[{'; '.join(shown) or 'none'}{rest}]"
