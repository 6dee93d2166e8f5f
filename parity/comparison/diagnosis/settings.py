"""Fields of the config that may be wrong, and what was done to the images."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from parity.checkpoints.layout import Array
from parity.checkpoints.surgery import MODES
from parity.comparison.diagnosis.trial import Edit, Hypothesis
from vit_spec import Pixels, ViTConfig, rows
from vit_spec.positions import TABLES

EPS = (1e-5, 1e-6, 1e-12, 1e-8, 1e-7, 1e-3, 1e-4, 1e-9, 1e-10)
PIXELS = {  # what images are normalised by, by who does it
    "0.5": Pixels(),
    "ImageNet's": Pixels(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
    "CLIP's": Pixels(mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711)),
    "nothing, from 0 to 1": Pixels(mean=(0.0,), std=(1.0,)),
    "nothing, from 0 to 255": Pixels(mean=(0.0,), std=(1 / 255,)),
}


def settings(c: ViTConfig, size: tuple[int, int], normalised: bool) -> Iterator[Hypothesis]:
    """Yield what may be wrong with the config of a model, the likeliest of each kind first.

    size: of the images, (height, width).
    normalised: whether they came normalised, and not as pixels.
    """
    yield from _functions(c)
    yield from _pixels(c, normalised)
    yield from _heads(c)
    yield from _pooling(c)
    yield from _positions(c, size)
    yield from _parts(c)


def _one(family: str, field: str, values: dict[str, Any], tail: bool = False) -> Iterator[Hypothesis]:
    named = {value: what for what, value in reversed(values.items())}
    for value, what in reversed(named.items()):
        yield Hypothesis(f"{family} is {what}", family, fields={field: value}, tail=tail)


def _functions(c: ViTConfig) -> Iterator[Hypothesis]:
    """The activation, eps, and the scale of scores."""
    if c.mlp.activation != "swiglu":
        kinds = ("gelu", "gelu_tanh", "quick_gelu", "relu", "none")
        yield from _one("activation", "mlp.activation", {kind: kind for kind in kinds})
    yield from _one("LayerNorm eps", "norms.eps", {f"{eps:g}": eps for eps in EPS})
    inner = c.num_heads * c.head_dim
    scales = {
        "head_dim ** -0.5": c.head_dim**-0.5,
        "width ** -0.5": c.width**-0.5,
        "num_heads ** -0.5": c.num_heads**-0.5,
        "1": 1.0,
        "1 / head_dim": 1 / c.head_dim,
        "(heads * head_dim) ** -0.5": inner**-0.5,
        "head_dim ** -0.25": c.head_dim**-0.25,
    }
    yield from _one("score scale", "attention.scale", scales)


def _pixels(c: ViTConfig, normalised: bool) -> Iterator[Hypothesis]:
    """What images are normalised by.  The statistics of red, green and blue say nothing of other channels."""
    own, family = c.pixels, "normalisation"
    for what, pixels in PIXELS.items():
        if len(pixels.mean) not in (1, c.in_channels) or pixels == own:
            continue
        fields = {"pixels.mean": pixels.mean, "pixels.std": pixels.std}
        yield Hypothesis(f"images are normalised by {what}", family, fields=fields)
        if normalised:
            name = f"these images were normalised by {what}, and must be by the config's pixels"
            cure = f"normalise the images by pixels.mean={own.mean} and pixels.std={own.std}, then compare again"
            yield Hypothesis(name, family, images=_renormalised(pixels, own), cure=cure)
    twice = _renormalised(Pixels(mean=(0.0,), std=(1.0,)), own)
    yield Hypothesis("images are normalised twice", family, images=twice, cure=ONCE)
    if not normalised:
        fields = {
            name: tuple(n / 255 for n in getattr(own, name.partition(".")[2])) for name in ("pixels.mean", "pixels.std")
        }
        yield Hypothesis("images are normalised as if from 0 to 1, but go from 0 to 255", family, fields=fields)
    if c.image_size[0] == c.image_size[1]:
        cure = "give the images with their height ahead of their width"
        name = "height and width of the images are swapped"
        yield Hypothesis(name, "image axes", images=lambda images: images.swapaxes(2, 3), cure=cure)


ONCE = "normalise the images once, where the expected outputs are made"


def _renormalised(was: Pixels, to: Pixels) -> Callable[[Array], Array]:
    def change(images: Array) -> Array:
        changed: Array = (images * _channels(was.std) + _channels(was.mean) - _channels(to.mean)) / _channels(to.std)
        return changed

    return change


def _channels(values: tuple[float, ...]) -> Any:
    return np.array(values)[:, None, None]


def _heads(c: ViTConfig) -> Iterator[Hypothesis]:
    """Other numbers of heads, those of usual width first."""
    inner = c.num_heads * c.head_dim
    counts = [n for n in range(1, inner + 1) if inner % n == 0 and n != c.num_heads and (n == 1 or inner // n >= 4)]
    for count in sorted(counts, key=lambda n: (inner // n not in (64, 32, 80, 128, 72, 88), abs(n - c.num_heads))):
        fields: dict[str, Any] = {"num_heads": count}
        if c.attention.head_dim is not None:
            fields["attention.head_dim"] = inner // count
        yield Hypothesis(f"there are {count} heads of {inner // count}", "number of heads", fields=fields)


def _pooling(c: ViTConfig) -> Iterator[Hypothesis]:
    """Pooling, and the norms around it."""
    tokens = {kind: kind for kind in (("token", "mean") if c.tokens.class_token else ())}
    if c.head.pool in tokens and not c.tokens.distillation:
        yield from _one("pooling", "head.pool", tokens, tail=True)
    family = "norm around the pooling"
    if c.norms.after_blocks:
        yield Hypothesis("there is no final norm", family, fields={"norms.after_blocks": False}, tail=True)
    if c.norms.after_pool:
        yield Hypothesis("there is no norm after pooling", family, fields={"norms.after_pool": False}, tail=True)
    if c.norms.after_blocks != c.norms.after_pool and c.head.pool != "token_mean":
        old, new = ("norm", "fc_norm") if c.norms.after_blocks else ("fc_norm", "norm")
        fields = {"norms.after_blocks": new == "norm", "norms.after_pool": new == "fc_norm"}
        edits = tuple(Edit(f"{new}.{kind}", f"p('{old}.{kind}')") for kind in ("weight", "bias"))
        what = "after the pooling, not before it" if new == "fc_norm" else "before the pooling, not after it"
        yield Hypothesis(f"the norm comes {what}", family, fields=fields, edits=edits, tail=True)


def _positions(c: ViTConfig, size: tuple[int, int]) -> Iterator[Hypothesis]:
    """Tables, rotary angles, and how a table is carried to images of another size."""
    p = c.positions
    if p.kind == "fixed":
        yield from _one("position table", "positions.table", {table: table for table in TABLES})
        yield from _one("tokens with a position", "positions.covers", {name: name for name in ("all", "class", "none")})
        yield Hypothesis("positions are not added", "position table", fields={"positions.kind": "none"})
    if p.rotary != "none":
        yield from _one("rotary layout", "positions.rotary", {kind: kind for kind in ("axial", "dinov3", "none")})
        bases = (100.0, 10000.0, 1000.0, 10.0, 500000.0, 1000000.0)
        yield from _one("rotary base", "positions.rotary_base", {f"{base:g}": base for base in bases})
    if p.kind == "learned" and c.grid_of(*size) != c.grid:
        for mode, rule in {rule: name for name, rule in reversed(MODES.items())}.items():
            named = vars(mode)
            fields = {f"resampling.{name}": value for name, value in named.items()}
            yield Hypothesis(f"positions are resampled as {rule} does", "resampling", fields=fields)


def _parts(c: ViTConfig) -> Iterator[Hypothesis]:
    """Parts of the model that the other does not have."""
    if "blocks.attn.q_norm.weight" in rows(c):
        yield Hypothesis("queries and keys are not normalised", "norm of queries", fields={"attention.qk_norm": False})
    if c.norms.before_blocks:
        fields = {"norms.before_blocks": False}
        yield Hypothesis("there is no norm ahead of the blocks", "norm ahead of the blocks", fields=fields)
    if not c.norms.shared_norm:
        yield Hypothesis("one norm serves both halves", "shared norm", fields={"norms.shared_norm": True})
    fields = {"attention.value_skip": not c.attention.value_skip}
    what = "not added" if c.attention.value_skip else "added"
    yield Hypothesis(f"values are {what} to what attention gives", "value skip", fields=fields)
