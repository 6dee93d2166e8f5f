"""Which parameter of a block is which row of `vit_spec.rows`, by the order of use and by sizes.

The order of use tells more than names: the layer that is used first in a block is its first norm, whatever it is called.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from parity.comparison.any_model.names import words as words_of
from parity.comparison.own_model.keys import Leaf, group_heads, join_words
from parity.comparison.own_model.units import Unit, find_units

_LAYER_SCALE = 1e-5  # the initial value, which has no effect on trained weights


@dataclass(frozen=True)
class Roles:
    """A hypothesis on the roles of parameters.

    Attributes:
        fields: the config fields that follow from it.
        leaves: the name of a row -> the parameter of the user's model.
        words: axis -> the words for its indices in keys.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    leaves: Mapping[str, Leaf] = field(default_factory=dict)
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __or__(self, other: "Roles") -> "Roles":
        return Roles({**self.fields, **other.fields}, {**self.leaves, **other.leaves}, {**self.words, **other.words})


def find_block_roles(leaves: Sequence[Leaf], width: int) -> Iterator[Roles]:
    """Yield the roles that the parameters of a block may have, the likeliest first."""
    variants: list[tuple[Sequence[Leaf], int | None]] = [(leaves, None)]
    if grouped := group_heads(leaves):
        variants.append(grouped)
    for several, heads in variants:
        units = find_units(several)
        layers = [unit for unit in units if unit.kind == "linear"]
        others = [unit for unit in units if unit.kind != "linear"]
        sizes = {unit: unit.weight.size * (heads or 1 if "head" in unit.weight.axes else 1) for unit in layers}
        for count in (2, 3):
            for mlp, attention in ((layers[-count:], layers[:-count]), (layers[:count], layers[count:])):
                for first in find_mlp_roles(mlp, sizes, width, "blocks.mlp"):
                    for second in _attention_roles(attention, sizes, width, heads):
                        for rest in _norm_roles(
                            others, attention, mlp, second.fields["inner"], first.fields["mlp_dim"], width
                        ):
                            yield first | second | rest


def find_mlp_roles(layers: Sequence[Unit], sizes: Mapping[Unit, int], width: int, name: str) -> Iterator[Roles]:
    """Yield the roles of the two layers of an MLP, or of the three of a gated one; `name` begins those of their rows."""
    if len(layers) < 2:
        return
    *first, second = layers
    hidden, ratio = sizes[second] // width, sum(sizes[unit] for unit in first) / sizes[second]
    biases = {unit.bias is not None for unit in layers}
    if sizes[second] % width or ratio not in (1, 2) or len(biases) != 1 or len({sizes[unit] for unit in first}) != 1:
        return
    if len(first) > 1 and ratio != 2:
        return
    found = join(first, "glu", f"{name}.fc1")
    if found is None:
        return
    leaves = {**found.leaves, **leaves_of(f"{name}.fc2", second)}
    fields: dict[str, Any] = {"mlp_dim": hidden, "mlp.bias": biases.pop()}
    if ratio == 2:
        fields["mlp.activation"] = "swiglu"
    yield Roles(fields, leaves, found.words)


def _attention_roles(layers: Sequence[Unit], sizes: Mapping[Unit, int], width: int, heads: int | None) -> Iterator[Roles]:
    """Yield the roles of the layers of attention: for queries, keys and values one to three, and the output projection."""
    total = sum(sizes[unit] for unit in layers)
    for proj in (None, *layers[-1:]):
        inputs = layers if proj is None else layers[:-1]
        inner = total // ((3 if proj is None else 4) * width)
        # 1 for a layer of queries, keys or values alone, 2 for one of two of them.
        counts = [sizes[unit] / (inner * width) for unit in inputs] if inner else []
        if sorted(counts) not in ([3], [1, 2], [1, 1, 1]) or (proj and sizes[proj] != inner * width):
            continue
        fields: dict[str, Any] = {"inner": inner, "attention.proj": proj is not None}
        leaves: dict[str, Leaf] = {}
        if proj:
            fields["attention.proj_bias"] = proj.bias is not None
            leaves |= leaves_of("blocks.attn.proj", proj)
        if heads:
            fields["num_heads"] = heads
        for found in _pair_roles(inputs, counts) if len(inputs) == 2 else _input_roles(inputs):
            yield found | Roles(fields, leaves)


def _pair_roles(layers: Sequence[Unit], counts: Sequence[float]) -> Iterator[Roles]:
    """Yield the roles of two layers, of which one is for two of queries, keys and values, the likeliest first."""
    if len({unit.bias is None for unit in layers}) != 1:
        return
    single, pair = sorted(layers, key=lambda unit: counts[layers.index(unit)])
    pieces = [("[qkv=0]", "[qkv=1:kv]"), ("[qkv=2]", "[qkv=0:kv]")]
    for several in pieces if "value" not in _words_of(single) else reversed(pieces):
        leaves = {
            f"{name}{piece}": leaf
            for unit, piece in zip((single, pair), several, strict=True)
            for name, leaf in leaves_of("blocks.attn.qkv", unit).items()
        }
        yield Roles({"attention.qkv_bias": "none" if single.bias is None else "qkv"}, leaves)


def _input_roles(inputs: Sequence[Unit]) -> Iterator[Roles]:
    """Yield the roles of one layer for queries, keys and values, or of three."""
    ordered = by_name(inputs) if len(inputs) == 3 else list(inputs)
    given = [unit.bias is not None for unit in ordered]
    fields: dict[str, Any] = {}
    leaves: dict[str, Leaf] = {}
    if len(inputs) == 3 and sum(given) == 2:  # keys have no bias, because it does not change the softmax
        missing = given.index(False)
        q, v = (unit for n, unit in enumerate(ordered) if n != missing)
        assert q.bias and v.bias
        leaves |= {"blocks.attn.q_bias": q.bias, "blocks.attn.v_bias": v.bias}
        ordered, fields["attention.qkv_bias"] = [q, ordered[missing], v], "qv"
        ordered = [replace(unit, bias=None) for unit in ordered]
    elif len(set(given)) == 1:
        fields["attention.qkv_bias"] = "qkv" if given[0] else "none"
    else:
        return
    found = join(ordered, "qkv", "blocks.attn.qkv")
    if found is not None:
        yield found | Roles(fields, leaves)


def by_name(units: Sequence[Unit]) -> list[Unit]:
    """Return the three layers of queries, keys and values in this order, if names tell two, else in the order of use."""
    named = {}
    for unit in units:
        found = [word for word in ("query", "key", "value") if word in _words_of(unit)]
        if len(found) == 1:
            named[found[0]] = unit
    rest = [unit for unit in units if unit not in named.values()]
    if len(named) < 2 or len(named) + len(rest) != 3:
        return list(units)
    return [named[word] if word in named else rest[0] for word in ("query", "key", "value")]


def _words_of(unit: Unit) -> list[str]:
    """Return the words in the key of a layer, in one spelling."""
    return [word for part in unit.weight.key.replace("/", ".").split(".") for word in words_of(part)]


def join(units: Sequence[Unit], axis: str, name: str) -> Roles | None:
    """Return the roles of layers that are one row, with the axis in the key; None if their keys have no common pattern."""
    if len(units) == 1:
        return Roles({}, leaves_of(name, units[0]))
    leaves: dict[str, Leaf] = {}
    words: dict[str, tuple[str, ...]] = {}
    for kind in ("weight", "bias"):
        several = [getattr(unit, kind) for unit in units]
        if None in several:
            continue
        joined = join_words([leaf.key for leaf in several], axis)
        if joined is None or words.setdefault(axis, joined[1]) != joined[1] or len({leaf.shape for leaf in several}) > 1:
            return None
        leaves[f"{name}.{kind}"] = replace(several[0], key=joined[0], axes=(*several[0].axes, axis))
    return Roles({}, leaves, words)


def leaves_of(name: str, unit: Unit) -> dict[str, Leaf]:
    """Return the parameters of a layer by the names of the rows."""
    return {f"{name}.weight": unit.weight} | ({f"{name}.bias": unit.bias} if unit.bias else {})


def _norm_roles(
    units: Sequence[Unit], attention: Sequence[Unit], mlp: Sequence[Unit], inner: int, hidden: int, width: int
) -> Iterator[Roles]:
    """Yield the roles of norms, layer scales and separate biases, by their places between the linear layers."""
    a, m = [unit.rank for unit in attention], [unit.rank for unit in mlp]
    leaves: dict[str, Leaf] = {}
    qkv_bias: dict[str, Any] = {}
    biases = [unit for unit in units if unit.kind == "vector" and unit.weight.is_bias and unit.weight.size == inner]
    if len(biases) == 2:
        leaves |= {"blocks.attn.q_bias": biases[0].weight, "blocks.attn.v_bias": biases[1].weight}
        qkv_bias["attention.qkv_bias"] = "qv"
    elif biases:
        return
    split = _split_norms([unit for unit in units if unit not in biases], a, m, inner, hidden, width)
    if split is None:
        return
    norms, outside = split
    names = {name for name, _ in norms}
    fields = {
        "attention.qk_norm": "blocks.attn.q_norm" in names,
        "attention.out_norm": "blocks.attn.norm" in names,
        "mlp.norm": "blocks.mlp.norm" in names,
        **qkv_bias,
    }
    start, last = min(*a, *m), max(*a, *m)
    between = (max(a), min(m)) if min(a) < min(m) else (max(m), min(a))
    before = [unit for unit in outside if unit.rank < start]
    middle = [unit for unit in outside if between[0] < unit.rank < between[1]]
    after = [unit for unit in outside if unit.rank > last]
    for order, shared, named, scales in _orders(before, middle, after, attention_first=min(a) < min(m)):
        every = [*norms, *named]
        has_bias = {unit.kind == "norm" for _, unit in every}
        if len(has_bias) != 1 or any(unit.kind == "norm" for _, unit in scales):
            continue
        found = dict(leaves)
        for name, unit in every:
            found |= leaves_of(name, unit)
        found |= {f"blocks.{name}.gamma": unit.weight for name, unit in scales}
        chosen = {
            **fields,
            "norms.order": order,
            "norms.shared_norm": shared,
            "norms.bias": has_bias == {True},
            "norms.layer_scale": _LAYER_SCALE if scales else None,
            "norms.mlp_layer_scale": len(scales) != 1 or order == "parallel",
        }
        yield Roles(chosen, found)


_Named = list[tuple[str, Unit]]


def _split_norms(
    units: Sequence[Unit], attention: Sequence[int], mlp: Sequence[int], inner: int, hidden: int, width: int
) -> tuple[_Named, list[Unit]] | None:
    """Return the norms inside attention and MLP by their names, and the other units; None if a size fits no norm.

    attention, mlp: the ranks of their linear layers.
    """
    norms: dict[str, Unit] = {}
    outside: list[Unit] = []
    narrow = [
        unit for unit in units if unit.weight.size != width and min(attention) < unit.rank and unit.weight.size < inner
    ]
    for unit in units:
        if min(mlp) < unit.rank < max(mlp):
            name, size = "blocks.mlp.norm", hidden
        elif unit in narrow:
            if len(narrow) != 2:
                return None
            name, size = f"blocks.attn.{'qk'[_norm_order(narrow).index(unit)]}_norm", narrow[0].weight.size
        elif min(attention) < unit.rank < max(attention):
            name, size = "blocks.attn.norm", inner
        else:
            name, size = "", width
        if unit.weight.size != size or name in norms:
            return None
        if name:
            norms[name] = unit
        else:
            outside.append(unit)
    return list(norms.items()), outside


def _norm_order(units: Sequence[Unit]) -> list[Unit]:
    """Return the norms of queries and of keys: as their names say, else in the order of use."""
    named: dict[str, Unit] = {}
    for unit in units:
        parts = {word for part in unit.weight.key.replace("/", ".").replace("_", ".").split(".") for word in words_of(part)}
        named |= {word: unit for word in ("query", "key") if word in parts}
    return [named["query"], named["key"]] if len(named) == 2 and named["query"] is not named["key"] else list(units)


def _orders(
    before: list[Unit], middle: list[Unit], after: list[Unit], attention_first: bool
) -> Iterator[tuple[str, bool, _Named, _Named]]:
    """Yield order, shared norm, named norms and named layer scales for the layers around attention and MLP."""
    counts = (len(before), len(middle), len(after))
    if counts[0] == 1:
        first = ("blocks.norm1", before[0])
        if counts == (1, 0, 0):
            yield "parallel", False, [first], []
            yield "pre", True, [first], []
        elif counts == (1, 0, 1):
            yield "parallel", False, [first], [("ls1", after[0])]
        elif not attention_first:
            return
        elif counts == (1, 1, 0):
            yield "pre", False, [first, ("blocks.norm2", middle[0])], []
        elif counts[1] == 2:
            norms = [first, ("blocks.norm2", middle[1])]
            if len(after) < 2:
                yield "pre", False, norms, [("ls1", middle[0]), *(("ls2", unit) for unit in after)]
        elif counts == (1, 1, 1):
            yield "pre", True, [first], [("ls1", middle[0]), ("ls2", after[0])]
    elif not before and attention_first:
        if counts[1:] == (1, 1):
            norms = [("blocks.norm1", middle[0]), ("blocks.norm2", after[0])]
            yield "post", False, norms, []
            yield "res_post", False, norms, []
        elif counts[1:] in ((2, 2), (2, 1)):
            norms = [("blocks.norm1", middle[1]), ("blocks.norm2", after[-1])]
            yield "post", False, norms, [("ls1", middle[0]), *(("ls2", unit) for unit in after[:-1])]
