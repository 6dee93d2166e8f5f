"""Hypotheses about fields of the config and about the preprocessing of the images."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from parity.checkpoints.layout import Array
from parity.checkpoints.surgery import MODES
from parity.comparison.diagnosis.hypothesis import Edit, Hypothesis, per_channel
from vit_spec import Pixels, ViTConfig, rows
from vit_spec.parts import UNGATED_ACTIVATIONS
from vit_spec.positions import SCALED_ROTARY, TABLES

EPS = (1e-5, 1e-6, 1e-12, 1e-8, 1e-7, 1e-3, 1e-4, 1e-9, 1e-10)
KNOWN_PIXELS = {  # statistics by which models usually normalize their images
    "mean 0.5 and std 0.5": Pixels(),
    "ImageNet's": Pixels(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
    "CLIP's": Pixels(mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711)),
    "mean 0 and std 1 (range 0 to 1)": Pixels(mean=(0.0,), std=(1.0,)),
    "mean 0 and std 1/255 (range 0 to 255)": Pixels(mean=(0.0,), std=(1 / 255,)),
}


def config_hypotheses(c: ViTConfig, size: tuple[int, int], normalized: bool) -> Iterator[Hypothesis]:
    """Yield hypotheses about fields of the config and about the preprocessing, the likeliest of each kind first.

    size: (height, width) of the images.
    normalized: whether the images were given normalized; otherwise they were given as pixels.
    """
    yield from _activation_eps_scale(c)
    yield from _norms(c)
    yield from _pixels(c, normalized)
    yield from _heads(c)
    yield from _pooling(c)
    yield from _positions(c, size)
    yield from _removable_parts(c)


def _field_values(family: str, field: str, values: dict[str, Any], blocks_unchanged: bool = False) -> Iterator[Hypothesis]:
    """Yield a hypothesis for each value of a field; if a value has several names, it gets the first.

    values: name -> value.
    """
    names = {value: name for name, value in reversed(values.items())}
    for value, name in reversed(names.items()):
        yield Hypothesis(f"{family} is {name}", family, fields={field: value}, blocks_unchanged=blocks_unchanged)


def _activation_eps_scale(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield other activations, LayerNorm eps and scales of the attention scores."""
    if not c.mlp.is_gated:
        yield from _field_values("activation", "mlp.activation", {kind: kind for kind in UNGATED_ACTIVATIONS})
    yield from _field_values("LayerNorm eps", "norms.eps", {f"{eps:g}": eps for eps in EPS})
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
    yield from _field_values("score scale", "attention.scale", scales)


NORM_ORDERS = {  # value of norms.order -> the cause in words
    "pre": "norms come before attention and MLP (pre-norm)",
    "post": "norms come after the sums (post-norm)",
    "res_post": "norms come after attention and MLP, before the sums (res-post-norm)",
}


def _norms(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield other orders of norms in a block, and norms without a bias of the other kind."""
    for order, name in NORM_ORDERS.items() if c.norms.order != "parallel" else ():
        if order != c.norms.order and (order != "res_post" or c.norms.layer_scale is None):
            yield Hypothesis(name, "norms of a block", fields={"norms.order": order})
    if not c.norms.bias:
        kind, what = ("layer", "subtract the mean (LayerNorm)") if c.norms.kind == "rms" else ("rms", "are RMSNorm")
        yield Hypothesis(f"norms {what}", "LayerNorm formula", fields={"norms.kind": kind})


def _pixels(c: ViTConfig, normalized: bool) -> Iterator[Hypothesis]:
    """Yield other normalization statistics and axis orders of the images; RGB statistics need a model with 3 channels."""
    wanted, family = c.pixels, "normalization"
    known = dict(KNOWN_PIXELS)
    if min(wanted.mean) > 0:
        known["the standard deviation as mean and the mean as standard deviation"] = Pixels(
            mean=wanted.std, std=wanted.mean
        )
    for what, pixels in known.items():
        if len(pixels.mean) not in (1, c.in_channels) or pixels == wanted:
            continue
        fields = {"pixels.mean": pixels.mean, "pixels.std": pixels.std}
        yield Hypothesis(f"images are normalized by {what}", family, fields=fields)
        if normalized:
            name = f"these images were normalized by {what} instead of the config's pixels"
            fix = f"normalize the images by pixels.mean={wanted.mean} and pixels.std={wanted.std}, then compare again"
            yield Hypothesis(name, family, images=_renormalize(pixels, wanted), manual_fix=fix)
    twice = _renormalize(Pixels(mean=(0.0,), std=(1.0,)), wanted)
    yield Hypothesis("images are normalized twice", family, images=twice, manual_fix=NORMALIZE_ONCE)
    if not normalized:
        fields = {
            name: tuple(n / 255 for n in getattr(wanted, name.partition(".")[2])) for name in ("pixels.mean", "pixels.std")
        }
        yield Hypothesis(
            "images are normalized by statistics for the range 0 to 1, but range from 0 to 255", family, fields=fields
        )
    if c.image_size[0] == c.image_size[1]:
        fix = "give the images with the height axis before the width axis"
        name = "height and width of the images are swapped"
        yield Hypothesis(name, "image axes", images=lambda images: images.swapaxes(2, 3), manual_fix=fix)
    for name, axis in (("mirrored left to right", 3), ("upside down", 2)):
        flip = partial(np.flip, axis=axis)
        yield Hypothesis(f"images are {name}", "image axes", images=flip, manual_fix=f"give images that are not {name}")


NORMALIZE_ONCE = "normalize the images only once in the code that made the expected outputs"


def _renormalize(old: Pixels, new: Pixels) -> Callable[[Array], Array]:
    """Return the function that takes images normalized by `old` and normalizes them by `new` instead."""

    def change(images: Array) -> Array:
        changed: Array = (images * per_channel(old.std) + per_channel(old.mean) - per_channel(new.mean)) / per_channel(
            new.std
        )
        return changed

    return change


def _heads(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield other numbers of heads, first the ones that give a usual width of a head."""
    inner = c.num_heads * c.head_dim
    counts = [n for n in range(1, inner + 1) if inner % n == 0 and n != c.num_heads and (n == 1 or inner // n >= 4)]
    for count in sorted(counts, key=lambda n: (inner // n not in (64, 32, 80, 128, 72, 88), abs(n - c.num_heads))):
        fields: dict[str, Any] = {"num_heads": count}
        if c.attention.head_dim is not None:
            fields["attention.head_dim"] = inner // count
        yield Hypothesis(f"there are {count} heads of {inner // count}", "number of heads", fields=fields)


def _pooling(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield other poolings, and norms before or after the pooling."""
    tokens = {kind: kind for kind in (("token", "mean") if c.tokens.class_token else ())}
    if c.head.pool in tokens and not c.tokens.distillation:
        yield from _field_values("pooling", "head.pool", tokens, blocks_unchanged=True)
    if c.num_prefix and c.head.pool in ("token", "mean", "attention") and not c.tokens.distillation:
        what = "the patch tokens alone" if c.head.pool_prefix else "all tokens"
        fields = {"head.pool_prefix": not c.head.pool_prefix, "head.pool": c.head.pool.replace("token", "mean")}
        yield Hypothesis(f"pooling takes {what}", "pooling", fields=fields, blocks_unchanged=True)
    if c.head.pool == "attention":
        for heads in (n for n in (1, 2, 4, 6, 8, 12, 16) if c.width % n == 0 and n != c.pool_heads):
            name = f"attention pooling has {heads} heads"
            yield Hypothesis(name, "heads of the pooling", fields={"head.pool_heads": heads}, blocks_unchanged=True)
    family = "norm around the pooling"
    if c.norms.after_blocks:
        yield Hypothesis("there is no final norm", family, fields={"norms.after_blocks": False}, blocks_unchanged=True)
    if c.norms.after_pool:
        yield Hypothesis(
            "there is no norm after pooling", family, fields={"norms.after_pool": False}, blocks_unchanged=True
        )
    if c.norms.after_blocks != c.norms.after_pool and c.head.pool != "token_mean":
        old, new = ("norm", "fc_norm") if c.norms.after_blocks else ("fc_norm", "norm")
        fields = {"norms.after_blocks": new == "norm", "norms.after_pool": new == "fc_norm"}
        kinds = ("weight", "bias") if c.norms.bias else ("weight",)
        edits = tuple(Edit(f"{new}.{kind}", f"p('{old}.{kind}')") for kind in kinds)
        what = "after the pooling, not before it" if new == "fc_norm" else "before the pooling, not after it"
        yield Hypothesis(f"the norm comes {what}", family, fields=fields, edits=edits, blocks_unchanged=True)


def _positions(c: ViTConfig, size: tuple[int, int]) -> Iterator[Hypothesis]:
    """Yield other position tables, rotary embeddings, and resampling modes for images of another size."""
    p = c.positions
    if p.kind == "fixed":
        yield from _field_values("position table", "positions.table", {table: table for table in TABLES})
        yield from _field_values(
            "tokens with a position", "positions.covers", {name: name for name in ("all", "class", "none")}
        )
        yield Hypothesis("positions are not added", "position table", fields={"positions.kind": "none"})
    if p.rotary != "none":
        yield from _rotary(c)
    if p.kind == "learned" and c.grid_of(*size) != c.grid:
        for mode, name in {mode: name for name, mode in reversed(MODES.items())}.items():
            values = vars(mode)
            fields = {f"resampling.{field}": value for field, value in values.items()}
            yield Hypothesis(f"positions are resampled as {name} does", "resampling", fields=fields)


def _rotary(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield other kinds of rotary embeddings, other bases, and other coordinates of patches."""
    if c.positions.rotary == "mixed":  # learned frequencies are parameters
        return
    for kind in ("axial", "dinov3", *SCALED_ROTARY, "none"):
        fields: dict[str, Any] = {"positions.rotary": kind}
        if kind not in SCALED_ROTARY:
            fields |= {"positions.rotary_start": 0.0, "positions.rotary_grid": None}
        yield Hypothesis(f"rotary layout is {kind}", "rotary layout", fields=fields)
    bases = (100.0, 10000.0, 1000.0, 10.0, 500000.0, 1000000.0)
    yield from _field_values("rotary base", "positions.rotary_base", {f"{base:g}": base for base in bases})
    if c.positions.rotary in SCALED_ROTARY:
        yield from _field_values("first rotary coordinate", "positions.rotary_start", {"0": 0.0, "1": 1.0, "0.5": 0.5})
        grids = {"that of the images": c.grid, "none": None, "16 x 16": (16, 16), "14 x 14": (14, 14), "24 x 24": (24, 24)}
        yield from _field_values("reference grid of rotary positions", "positions.rotary_grid", grids)


def _removable_parts(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield norms that the reference model lacks or shares between both halves of a block, and the other value skip."""
    if "blocks.attn.q_norm.weight" in rows(c):
        yield Hypothesis("queries and keys are not normalized", "norm of queries", fields={"attention.qk_norm": False})
    if c.norms.before_blocks:
        fields = {"norms.before_blocks": False}
        yield Hypothesis("there is no norm ahead of the blocks", "norm ahead of the blocks", fields=fields)
    if c.norms.has_second:
        yield Hypothesis("one norm serves both halves", "shared norm", fields={"norms.shared_norm": True})
    fields = {"attention.value_skip": not c.attention.value_skip}
    what = "not added" if c.attention.value_skip else "added"
    yield Hypothesis(f"values are {what} to what attention gives", "value skip", fields=fields)
