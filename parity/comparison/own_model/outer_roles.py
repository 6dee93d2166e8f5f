"""Which parameter outside of the blocks is which row of `vit_spec.rows`: patch projection, tokens, positions and head."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from parity.comparison.any_model.names import words as words_of
from parity.comparison.own_model.block_roles import Roles, leaves_of
from parity.comparison.own_model.keys import Leaf
from parity.comparison.own_model.model import ImageShape
from parity.comparison.own_model.pooling_roles import find_pooling_roles
from parity.comparison.own_model.units import Unit, find_units

Sizes = tuple[int, int]


def find_stem_roles(leaves: Sequence[Leaf], width: int, images: ImageShape, norm_bias: bool) -> Iterator[Roles]:
    """Yield the roles of the parameters that are used before the blocks, the likeliest first.

    norm_bias: whether the norms of the blocks have a bias; others are like them.
    """
    units = find_units(leaves)
    norms = [unit for unit in units if unit.kind == "norm" or (not norm_bias and _is_norm_vector(unit))]
    rest = [unit for unit in units if unit not in norms]
    if any(unit.weight.size != width for unit in norms):
        return
    matrices = [unit for unit in rest if unit.kind == "linear"]
    likely = sorted(matrices, key=lambda unit: (len(unit.weight.shape) != 4, unit.bias is None, unit.rank))
    for projection in likely:
        if any(unit.rank < projection.rank for unit in norms):  # a norm of flattened patches
            continue
        others = [unit for unit in rest if unit is not projection]
        for patch in _patch_sizes(projection.weight, width, images):
            fields: dict[str, Any] = {
                "width": width,
                "image_size": (images.height, images.width),
                "patch_size": patch,
                "in_channels": images.channels,
                "tokens.patch_bias": projection.bias is not None,
            }
            cells = (images.height // patch[0]) * (images.width // patch[1])
            first = Roles(fields, leaves_of("patch_embed.proj", projection))
            for second, third in product(_stem_norms(norms), list(_tokens(others, width, cells))):
                yield first | second | third


def _is_norm_vector(unit: Unit) -> bool:
    """Return whether a vector without a bias is the weight of a norm, and no token: by its shape or its name."""
    parts = [word for part in unit.weight.key.replace("/", ".").split(".") for word in words_of(part)]
    return unit.kind == "vector" and len(unit.weight.shape) == 1 and ("norm" in parts or "scale" in parts)


def _patch_sizes(weight: Leaf, width: int, images: ImageShape) -> Iterator[Sizes]:
    """Yield the sizes of patches that a projection may take, (height, width); the most square ones first."""
    length = weight.size // width
    if weight.size % width or length % images.channels:
        return
    pixels = length // images.channels
    if len(weight.shape) == 4:
        dims = list(weight.shape)
        for used in (width, images.channels):
            if used not in dims:
                return
            dims.remove(used)
        options = [(dims[0], dims[1])]
    else:
        options = [(ph, pixels // ph) for ph in range(1, pixels + 1) if pixels % ph == 0]
        options.sort(key=lambda size: abs(size[0] - size[1]))
    for ph, pw in options:
        if ph * pw == pixels and images.height % ph == 0 and images.width % pw == 0:
            yield ph, pw


def _stem_norms(norms: Sequence[Unit]) -> Iterator[Roles]:
    """Yield the roles of the norms ahead of the blocks: none, one or two."""
    names = ("patch_embed.norm", "norm_pre")
    options: dict[int, list[tuple[str, ...]]] = {0: [()], 1: [(names[1],), (names[0],)], 2: [names]}
    for chosen in options.get(len(norms), []):
        fields = {"norms.after_patches": names[0] in chosen, "norms.before_blocks": names[1] in chosen}
        leaves: dict[str, Leaf] = {}
        for name, unit in zip(chosen, norms, strict=True):
            leaves |= leaves_of(name, unit)
        yield Roles(fields, leaves)


def _tokens(units: Sequence[Unit], width: int, cells: int) -> Iterator[Roles]:
    """Yield the roles of tokens and positions.

    cells: the number of patches.
    """
    if any(unit.bias or unit.weight.size % width for unit in units):
        return
    singles = [unit.weight for unit in units if unit.weight.size == width]
    tables = [unit.weight for unit in units if unit.weight.size > width]
    for table in [*tables, None]:
        registers = [leaf for leaf in tables if leaf is not table]
        for named in _token_names(singles, registers):
            count = sum(leaf.size // width for leaf in named.values())
            fields: dict[str, Any] = {
                "tokens.class_token": "cls_token" in named,
                "tokens.distillation": "dist_token" in named,
                "tokens.registers": named["reg_token"].size // width if "reg_token" in named else 0,
            }
            if table is None:
                yield Roles(fields, named)
                continue
            rows = table.size // width - cells
            covers = {"all": count, "none": 0, "class": int("cls_token" in named)}
            if name := next((name for name, covered in covers.items() if covered == rows), ""):
                fields |= {"positions.kind": "learned", "positions.covers": name}
                yield Roles(fields, {**named, "pos_embed": table})


def _token_names(singles: Sequence[Leaf], registers: Sequence[Leaf]) -> Iterator[dict[str, Leaf]]:
    """Yield the roles of the tokens ahead of the patches, which are in the order of their use."""
    several = {"reg_token": registers[0]} if registers else {}
    if len(registers) > 1 or len(singles) > 2:
        return
    if not singles:
        yield several
    elif len(singles) == 1:
        yield {"cls_token": singles[0], **several}
        if not several:
            yield {"reg_token": singles[0]}
    else:
        for first, second in (singles, singles[::-1]):
            yield {"cls_token": first, "dist_token": second, **several}
            if not several:
                yield {"cls_token": first, "reg_token": second}


def find_head_roles(
    leaves: Sequence[Leaf], width: int, output: tuple[int, ...], block: Roles, distillation: bool
) -> Iterator[Roles]:
    """Yield the roles of the parameters that are used after the blocks, the likeliest first.

    output: the shape of the output.
    block: the roles in a block.
    """
    single = _single_output(leaves, width) if output[-1] == 1 else None
    units = find_units([leaf for leaf in leaves if single is None or leaf not in single.leaves])
    for pooling, rest in [(Roles(), units), *find_pooling_roles(units, width, block)]:
        layers = [*(unit for unit in rest if unit.kind == "linear"), *([single] if single else [])]
        norms = [unit for unit in rest if unit.kind != "linear"]
        for found in _classifier_roles(layers, norms, width, output, block.fields["norms.bias"], distillation):
            if not pooling.fields or not found.fields["token_mean"]:
                yield pooling | found


def _classifier_roles(
    layers: Sequence[Unit],
    norms: Sequence[Unit],
    width: int,
    output: tuple[int, ...],
    norm_bias: bool,
    distillation: bool,
) -> Iterator[Roles]:
    """Yield the roles of the layers of the classifier, and of the norms around the pooling."""
    if any((unit.kind == "norm") != norm_bias for unit in norms):
        return
    for named, fields in _layers(layers, output, width, distillation):
        pooled = fields.pop("pooled")
        for chosen in _head_norms(norms, width, pooled):
            found: dict[str, Leaf] = {}
            for name, unit in {**named, **chosen}.items():
                found |= leaves_of(name, unit)
            places = {"norms.after_blocks": "norm" in chosen, "norms.after_pool": "fc_norm" in chosen}
            yield Roles({**fields, **places, "token_mean": pooled == 2 * width}, found)


def _single_output(leaves: Sequence[Leaf], width: int) -> Unit | None:
    """Return the last layer if it has one output, so that its matrix has one row."""
    found = [leaf for leaf in leaves if len(leaf.shape) == 2 and 1 in leaf.shape and leaf.size >= width]
    if not found:
        return None
    weight = found[-1]
    biases = [leaf for leaf in leaves if leaf.size == 1 and leaf.parent == weight.parent and leaf is not weight]
    return Unit("linear", weight, biases[0] if len(biases) == 1 else None)


def _layers(
    layers: Sequence[Unit], output: tuple[int, ...], width: int, distillation: bool
) -> Iterator[tuple[dict[str, Unit], dict[str, Any]]]:
    """Yield the linear layers of the head by their names, and the fields that follow."""
    labels, sizes = output[-1], [unit.weight.size for unit in layers]
    biases = [unit.bias is not None for unit in layers]
    if not layers:
        if labels in (width, 2 * width):
            yield {}, {"num_classes": 0, "head.hidden": None, "pooled": labels}
        return
    common = {"num_classes": labels, "head.bias": biases[-1]}
    if len(layers) == 1 and not distillation:
        for pooled in (width, 2 * width):
            if sizes[0] == labels * pooled:
                yield {"head": layers[0]}, {**common, "head.hidden": None, "pooled": pooled}
    if len(layers) == 2 and distillation and sizes == [labels * width] * 2 and biases[0] == biases[1]:
        yield {"head": layers[0], "head_dist": layers[1]}, {**common, "head.hidden": None, "pooled": width}
        yield {"head": layers[1], "head_dist": layers[0]}, {**common, "head.hidden": None, "pooled": width}
    if len(layers) == 2 and not distillation and biases[0]:
        hidden = sizes[1] // labels
        for pooled in (width, 2 * width):
            if sizes == [hidden * pooled, labels * hidden]:
                yield {"pre_logits": layers[0], "head": layers[1]}, {**common, "head.hidden": hidden, "pooled": pooled}


def _head_norms(norms: Sequence[Unit], width: int, pooled: int) -> Iterator[dict[str, Unit]]:
    """Yield the norms after the blocks by their names: "norm" is over all tokens, "fc_norm" of the pooled feature."""
    sizes = [unit.weight.size for unit in norms]
    if not norms:
        yield {}
    elif len(norms) == 1:
        if sizes == [width]:
            yield {"norm": norms[0]}
        if sizes == [pooled]:
            yield {"fc_norm": norms[0]}
    elif sizes == [width, pooled]:
        yield {"norm": norms[0], "fc_norm": norms[1]}
