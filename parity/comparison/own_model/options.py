"""The values to try for config fields that neither names nor shapes of a model show, the likeliest first."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice, permutations, product
from typing import Any

from parity.checkpoints.columns import Piece, pieces_of
from parity.checkpoints.layout import FIXED_SIZES
from parity.comparison.own_model.candidate import Candidate, Dims
from parity.comparison.own_model.model import Trace
from vit_spec import InputError
from vit_spec.parts import GATED_ACTIVATIONS, UNGATED_ACTIVATIONS
from vit_spec.positions import SCALED_ROTARY, TABLES

_EPS = (1e-6, 1e-5, 1e-12, 1e-8, 1e-3)
_ACTIVATIONS = tuple(dict.fromkeys(("gelu", "gelu_tanh", "relu", "silu", *UNGATED_ACTIVATIONS)))
_ROTARY = ("axial", "dinov3", "eva", "rope_vit")
_ROTARY_BASES = (100.0, 10000.0)
_ROTARY_GRIDS = (None, (16, 16), (14, 14))  # a grid of the model's own size is the same as None
_MAX_SKIPS = 50  # layouts to try with values added to the output of attention
_MAX_ORDERED = 4  # layouts to try with other orders of queries, keys and values
MAX_CANDIDATES = 500  # from one of the functions below


class Options:
    """The values to try, from the settings and the operations of the user's model.

    Attributes:
        given: values that the user stated; no other is tried.
    """

    def __init__(self, settings: Sequence[tuple[str, Any]], trace: Trace, given: dict[str, Any]) -> None:
        self.given = given
        self._settings = settings
        self._numbers = trace.numbers

    def initial(self, candidate: Candidate) -> Candidate:
        """Return the candidate with a value for each field that it needs."""
        fields = {"num_heads": next(iter(self.heads(candidate))), **candidate.roles.fields}
        first = candidate.with_fields(**{**fields, **self.given})
        if "pool_inner" in fields:
            first = first.with_fields(head__pool_heads=self.pool_heads(first)[0])
        return first

    def contradiction(self, candidate: Candidate) -> str:
        """Return the field of `given` that the parameters contradict; "" if there is none."""
        for name, value in self.given.items():
            shown = candidate.roles.fields.get(name, value)
            if shown != value and name != "norms.layer_scale":
                return f"--set {name}={value!r}, but the parameters show {shown!r}"
        return ""

    def stem_and_head(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield candidates that differ outside of the blocks: pooling, kind of norms, positions, layouts."""
        fields = candidate.roles.fields
        kinds = ["layer"] if fields["norms.bias"] else ["rms", "layer"]
        positions: list[dict[str, Any]] = [{}]
        if "pos_embed" not in candidate.roles.leaves:
            tables = [
                {"positions.kind": "fixed", "positions.table": table} for table in self._of("positions.table", TABLES)
            ]
            covers = ["none", "all", "class"] if fields["tokens.class_token"] else ["all"]
            positions = [{"positions.kind": "none"}]
            positions += [{**t, "positions.covers": c} for t in tables for c in self._of("positions.covers", covers)]
            positions = [
                p for p in positions if self.given.get("positions.kind", p["positions.kind"]) == p["positions.kind"]
            ]
        pools = [p for p in self._pools(candidate) if all(self.given.get(n, v) == v for n, v in p.items())]
        choices = [
            pools,
            positions,
            [{"norms.kind": kind} for kind in self._of("norms.kind", kinds)],
            [{"norms.eps": next(iter(self.eps()))}],
        ]
        for several in _by_likelihood(choices):
            merged = {name: value for each in several for name, value in each.items()}
            yield from _layouts(candidate.with_fields(**merged), ("head.weight", "pre_logits.weight", "pos_embed"))

    def epsilons(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield candidates that differ in the epsilon of norms, which changes the outputs far less than all else."""
        yield from (candidate.with_fields(norms__eps=eps) for eps in self.eps()[1:])

    def patches(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield candidates that differ in the order of the entries of a patch."""
        yield from _layouts(candidate, ("patch_embed.proj.weight",))

    def mlp(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield candidates that differ in the MLP."""
        gated = candidate.roles.fields.get("mlp.activation") in GATED_ACTIVATIONS
        for kind in GATED_ACTIVATIONS if gated else self._of("mlp.activation", self._activations()):
            chosen = candidate.with_fields(mlp__activation=kind)
            words = chosen.roles.words.get("glu", ())
            orders = [chosen.with_words("glu", order) for order in permutations(words)] if words else [chosen]
            if gated and not words:  # the values may come before the gate in their array
                orders.append(chosen.with_order("glu", (1, 0)))
            for ordered in orders:
                for each in _layouts(ordered, ("blocks.mlp.fc1.weight", "blocks.mlp.fc2.weight")):
                    yield _follow(each, "blocks.mlp.fc1.weight", ("blocks.mlp.fc1.bias",))

    def attention(self, candidate: Candidate, is_usual: bool = False) -> Iterator[Candidate]:
        """Yield candidates that differ in attention: heads, layout of queries, keys and values, scale.

        is_usual: yield only those with the first numbers of heads, and the first scale.
        """
        words = candidate.roles.words.get("qkv", ())
        free = "blocks.attn.q_bias" not in candidate.roles.leaves  # else the bias shows which layer is that of the keys
        orders = list(permutations(words)) if free else [words]
        likely: list[list[Candidate]] = []
        usual: list[list[Candidate]] = []
        other: list[list[Candidate]] = []
        named = len(self._named_heads(candidate)) or 3
        for n, heads in enumerate(self.heads(candidate)[: named if is_usual else None]):
            for m, scale in enumerate(self._scales(candidate, heads)[: None if n < named and not is_usual else 1]):
                chosen = candidate.with_fields(num_heads=heads, attention__scale=scale)
                for order in orders:
                    ordered = chosen.with_words("qkv", order) if words else chosen
                    layouts = _layouts(ordered, ("blocks.attn.qkv.weight", "blocks.attn.proj.weight"))
                    (other if m else likely if n < named else usual).append(layouts)
                if not words and n < named and not m:
                    other.append([each for layout in likely[-1][:_MAX_ORDERED] for each in _other_orders(layout)])
        followers = ("blocks.attn.qkv.bias", "blocks.attn.q_bias", "blocks.attn.v_bias")
        for each in chain.from_iterable(map(_round_robin, (likely, usual, other))):
            yield _follow(each, "blocks.attn.qkv.weight", followers)

    def value_skip(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield candidates with values added to the output of attention, unless the user excludes it."""
        if not self.given.get("attention.value_skip", True):
            return
        for each in islice(self.attention(candidate), _MAX_SKIPS):
            yield each.with_fields(attention__value_skip=True)

    def rotary(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield candidates with rotary embeddings, and different layouts of attention."""
        own = [*(value for value in self._numbers if value > 5), *self._named("base|theta", float, int)]
        bases = self._of("positions.rotary_base", [*map(float, own), *_ROTARY_BASES])
        starts, grids = self._of("positions.rotary_start", (0.0, 1.0)), self._of("positions.rotary_grid", _ROTARY_GRIDS)
        kinds = []
        for kind, base in product(self._of("positions.rotary", _ROTARY), bases):
            places = product(starts, grids) if kind in SCALED_ROTARY else [(0.0, None)]
            kinds += [(kind, base, start, grid) for start, grid in places]
        for each, (kind, base, start, grid) in _by_likelihood([list(self.attention(candidate, is_usual=True)), kinds]):
            yield each.with_fields(
                positions__rotary=kind,
                positions__rotary_base=base,
                positions__rotary_start=start,
                positions__rotary_grid=grid,
            )

    def pooling(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield candidates that differ in attention pooling: heads, layouts; the candidate itself without such pooling."""
        if candidate.config.head.pool != "attention":
            yield candidate
            return
        names = [f"attn_pool.{name}" for name in ("q", "kv", "proj", "mlp.fc1", "mlp.fc2")]
        weights = [f"{name}.weight" for name in names]
        several = [_layouts(candidate.with_fields(head__pool_heads=heads), weights) for heads in self.pool_heads(candidate)]
        for each in _round_robin(several):
            for name in names:
                each = _follow(each, f"{name}.weight", (f"{name}.bias",))
            yield each

    def pool_heads(self, candidate: Candidate) -> list[int | None]:
        """Return the numbers of heads of attention pooling to try; None is that of the blocks."""
        fields = candidate.roles.fields
        if "head.pool_heads" in self.given:
            return [self.given["head.pool_heads"]]
        inner, width = fields["pool_inner"], fields["width"]
        found: list[int | None] = [None] if inner == fields["inner"] else []
        if inner == width:
            found += [*self._named_heads(candidate), *(n for n in range(1, width + 1) if width % n == 0)]
            found = [None if n == fields["num_heads"] and inner == fields["inner"] else n for n in found]
        return [heads for heads in dict.fromkeys(found) if candidate.fits_pool_heads(heads)] or found[:1]

    def eps(self) -> list[float]:
        """Return the epsilons to try: those of the operations and settings first."""
        own = [value for value in self._numbers if 0 < value < 1e-2]
        return list(self._of("norms.eps", dict.fromkeys([*own, *self._named("eps", float), *_EPS])))

    def factors(self) -> list[float]:
        """Return the constants of the operations by which the class may multiply or divide an array, as factors."""
        own = [value for value in self._numbers if 1e-3 < abs(value) < 1e3]
        # A trace has no integers, such as that of x / 2.
        return [each for value in (*own, 2.0) for each in (value, 1 / value)]

    def several_eps(self) -> str:
        """Return a text with the epsilons of the model if it has several; else ""."""
        own = sorted({value for value in self._numbers if 0 < value < 1e-2})
        return f"its norms have the epsilons {', '.join(map(repr, own))}, ViTConfig has one for all" if len(own) > 1 else ""

    def heads(self, candidate: Candidate) -> list[int]:
        """Return the numbers of heads to try: those of the settings first, then by the usual dimension of a head."""
        fields = candidate.roles.fields
        inner = fields["inner"]
        if "num_heads" in self.given:
            return [self.given["num_heads"]]
        if "num_heads" in fields and "head" in {a for leaf in candidate.roles.leaves.values() for a in leaf.axes}:
            return [fields["num_heads"]]
        if norm := candidate.roles.leaves.get("blocks.attn.q_norm.weight"):
            return [inner // norm.size]
        divisors = [n for n in range(1, inner + 1) if inner % n == 0]
        usual = sorted(divisors, key=lambda n: abs(inner / n - 64))
        found = list(dict.fromkeys([*self._named_heads(candidate), *usual]))
        return [heads for heads in found if candidate.fits_heads(heads)] or found

    def _named_heads(self, candidate: Candidate) -> list[int]:
        """Return the numbers of heads in the settings."""
        inner = candidate.roles.fields["inner"]
        found = [value for value in self._named("head|^h$", int) if value > 0 and inner % value == 0]
        widths = [value for value in self._named("dim.*head|head.*dim", int) if value > 0 and inner % value == 0]
        return [*found, *(inner // value for value in widths)]

    def _scales(self, candidate: Candidate, heads: int) -> list[float | None]:
        if "attention.scale" in self.given:
            return [self.given["attention.scale"]]
        fields = candidate.roles.fields
        usual = (fields["inner"] // heads) ** -0.5
        own = [value for value in self._numbers if 1e-2 < value < 1.5 and abs(value / usual - 1) > 1e-12]
        own = [each for value in own for each in (value, usual / value)]
        return list(dict.fromkeys([None, fields["width"] ** -0.5, 1.0, *own[:8]]))

    def _activations(self) -> list[str]:
        texts = [str(value).lower() for name, value in self._settings if re.search("act|approximate|hidden_act", name)]
        named = [kind for kind in _ACTIVATIONS for text in texts if kind.replace("_", "") in text.replace("_", "")]
        named += ["gelu_tanh"] if "tanh" in texts else []
        return list(dict.fromkeys([*named, *_ACTIVATIONS]))

    def count_prefix(self, candidate: Candidate) -> int:
        """Return the number of tokens ahead of the patches."""
        names = ("tokens.class_token", "tokens.distillation", "tokens.registers")
        return sum(candidate.roles.fields[name] for name in names)

    def _pools(self, candidate: Candidate) -> Iterator[dict[str, Any]]:
        fields, prefix = candidate.roles.fields, self.count_prefix(candidate)
        if fields["token_mean"]:
            yield {"head.pool": "token_mean"}
            return
        if "pool_inner" in fields:
            yield {"head.pool": "attention"}
            if prefix:
                yield {"head.pool": "attention", "head.pool_prefix": True}
            return
        if fields.get("output_axes") == 3:
            yield {"head.pool": "none"}
            return
        if fields["tokens.class_token"]:
            yield {"head.pool": "token"}
        yield {"head.pool": "mean"}
        if prefix:
            yield {"head.pool": "mean", "head.pool_prefix": True}

    def _of(self, name: str, values: Iterable[Any]) -> list[Any]:
        return [self.given[name]] if name in self.given else list(dict.fromkeys(values))

    def _named(self, pattern: str, *kinds: type) -> list[Any]:
        """Return the settings whose names match a pattern, and whose values have one of these types."""
        found = [v for name, v in self._settings if type(v) in kinds and re.search(pattern, name, re.IGNORECASE)]
        return list(dict.fromkeys(found))


def _by_likelihood(choices: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Return all combinations; those with few choices that are not the first come first."""
    indexed = product(*(range(len(each)) for each in choices))
    ordered = sorted(indexed, key=lambda numbers: (sum(n > 0 for n in numbers), sum(numbers)))[:MAX_CANDIDATES]
    return [tuple(each[n] for each, n in zip(choices, numbers, strict=True)) for numbers in ordered]


def _layouts(candidate: Candidate, names: Sequence[str]) -> list[Candidate]:
    """Return the candidate with all layouts of some rows; [] if its config is invalid."""
    present = [piece for name in names for piece in pieces_of(candidate.roles.leaves, name)]
    try:
        options: list[list[tuple[str, Dims]]] = [[(name, dims) for dims in candidate.layouts_of(name)] for name in present]
    except (InputError, KeyError):
        return []
    found = []
    for several in _by_likelihood(options):
        chosen = candidate
        for name, dims in several:
            chosen = chosen.with_dims(name, dims)
        found.append(chosen)
    return found


def _other_orders(candidate: Candidate) -> Iterator[Candidate]:
    """Yield the candidate with each other order of queries, keys and values in their array, or of two of them."""
    pieces = [Piece.parse(name) for name in pieces_of(candidate.roles.leaves, "blocks.attn.qkv.weight")]
    for axis in (piece.part if piece.axis else "qkv" for piece in pieces):
        if axis is not None:
            _, *orders = permutations(range(FIXED_SIZES[axis]))
            yield from (candidate.with_order(axis, order) for order in orders)


def _follow(candidate: Candidate, name: str, others: Sequence[str]) -> Candidate:
    """Return the candidate with the axes of biases in the order that they have in the weight."""
    for weight, other in product(pieces_of(candidate.roles.leaves, name), others):
        order = [axis for dim in candidate.dims.get(weight, ()) for axis in dim]
        other += weight.removeprefix(name)  # the same piece
        if other in candidate.roles.leaves:
            layouts = candidate.layouts_of(other)
            axes = {axis for dims in layouts[:1] for dim in dims for axis in dim}
            wanted = [axis for axis in order if axis in axes]
            fitting = [dims for dims in layouts if [axis for dim in dims for axis in dim if axis in wanted] == wanted]
            candidate = candidate.with_dims(other, fitting[0]) if fitting else candidate
    return candidate


def _round_robin(several: Sequence[Sequence[Candidate]]) -> Iterator[Candidate]:
    """Yield the first of each list, then the second of each, and so on."""
    count = 0
    for n in range(max(map(len, several), default=0)):
        for each in several:
            if n < len(each) and count < MAX_CANDIDATES:
                count += 1
                yield each[n]
