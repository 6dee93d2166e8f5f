"""Causes at one place: a cause of the catalogue in one block alone, and plain operations on one parameter or intermediate.

These are not mistakes that anybody is known to have made.  They say where a difference comes from, and what is done there,
when nothing in the catalogue does.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from parity.comparison.diagnosis import patches
from parity.comparison.diagnosis.ports import one_block
from parity.comparison.diagnosis.roundings import rounded
from parity.comparison.diagnosis.trial import CURE, Edit, Hypothesis
from vit_spec import ViTConfig, rows

AGAIN = (
    "take this parameter anew from the model that the expected outputs are of; "
    "`python -m parity diagnose SRC --against ORIGINAL` compares every parameter with that model's"
)


def in_blocks(c: ViTConfig, hypotheses: list[Hypothesis]) -> Iterator[Hypothesis]:
    """Yield causes in one block alone, the first block's first."""
    if c.depth == 1:
        return
    for number in range(c.depth):
        for hypothesis in (*hypotheses, *one_block(c)):
            if (confined := hypothesis.confined(number)) is not None:
                yield confined


def operations(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield an operation on one intermediate, or on one parameter, of all blocks and of one."""
    for name in sites(c):
        for what, function in _on_tokens(c, name).items():
            patch = patches.at(name, function)
            yield Hypothesis(f"{told(name)}: {what}", f"operation on {name}", patch=patch, cure=CURE, where=layer(name))
    for name, row in rows(c).items():
        for what, code in _on_axes(row.axes, row.shape).items():
            edit = Edit(name, code)
            yield Hypothesis(f"{name}: {what}", f"operation on {name}", edits=(edit,), where=layer(name), cure=AGAIN)
            for number in range(c.depth) if name.startswith("blocks.") and c.depth > 1 else ():
                here, where = edit.confined(number), layer(name, number)
                what_there = f"{name} of block {number}: {what}"
                yield Hypothesis(what_there, f"operation on {name}", edits=(here,), where=where, cure=AGAIN)


def sites(c: ViTConfig) -> Iterator[str]:
    """Yield the intermediates on which an operation is tried; "blocks.*.attn" stands for that of every block."""
    yield "patch_embed"
    if c.positions.kind != "none":
        yield from ("tokens", "positions")
    if c.norms.before_blocks:
        yield "norm_pre"
    yield "embed"
    parts = ["norm1", *(("attn.q_norm", "attn.k_norm") if c.attention.qk_norm else ()), "attn.q", "attn.k", "attn.v"]
    parts += ["attn.scores", "attn.heads", "attn", "sum", *(("norm2",) if not c.norms.shared_norm else ()), "mlp.fc1"]
    parts += ["mlp.activation", "mlp"]
    for number in ("*", *range(c.depth)) if c.depth > 1 else ("*",):
        for part in parts:
            yield f"blocks.{number}.{part}"
        if number != c.depth - 1 or not c.norms.after_blocks:
            yield f"blocks.{number}"
    for name, present in (
        ("norm", c.norms.after_blocks),
        ("attn_pool", c.head.pool == "attention"),
        ("pool", c.head.pool != "none"),
        ("fc_norm", c.norms.after_pool),
        ("hidden", c.head.hidden is not None),
        ("head", c.num_classes),
    ):
        if present:
            yield name


def told(name: str) -> str:
    """Return the name of an intermediate in words."""
    return name.replace("blocks.*", "blocks") if "*" in name else name


def layer(name: str, number: int | None = None) -> str:
    """Return the module of a parameter, of one block if it is one's, or an intermediate; nothing for all blocks."""
    name = re.sub(r"\.(weight|bias|gamma|latent)$", "", name)
    if number is not None:
        return name.replace("blocks.", f"blocks.{number}.", 1)
    everywhere = name.startswith("blocks.") and not re.match(r"blocks\.\d", name)
    return "" if everywhere else name


def _on_tokens(c: ViTConfig, name: str) -> dict[str, Callable[[Any], Any]]:
    """Operations on an intermediate: (B, T, ...), (B, H, T, S) of scores, or (B, features)."""
    found: dict[str, Callable[[Any], Any]] = {f"rounded to {kind}": rounded(kind) for kind in ("bfloat16", "float16")}
    if name in ("pool", "attn_pool", "fc_norm", "hidden", "head"):
        axes = {"channels": -1}
    elif name.endswith("scores"):
        axes = {"tokens": -1, "heads": 1}
    elif name.endswith(("attn.q", "attn.k", "attn.v", "attn.heads")):
        axes = {"tokens": 1, "heads": 2, "channels": -1}
    else:
        axes = {"tokens": 1, "channels": -1}
    for what, axis in axes.items():
        found[f"{what} in reverse"] = partial(_flipped, axis)
        found[f"{what} one place late"] = partial(_rolled, 1, axis)
        found[f"{what} one place early"] = partial(_rolled, -1, axis)
    return found


def _flipped(axis: int, x: Any) -> Any:
    return x.flip(axis)


def _rolled(steps: int, axis: int, x: Any) -> Any:
    return x.roll(steps, axis)


def _on_axes(axes: tuple[str, ...], shape: tuple[int, ...]) -> dict[str, str]:
    """Operations on a parameter, as the code of an `Edit`."""
    found = {}
    for place, word in enumerate(axes):
        if word == "block" or shape[place] == 1:
            continue
        found[f"{word} in reverse"] = f"np.flip({{w}}, {place})"
        found[f"{word} one place late"] = f"np.roll({{w}}, 1, {place})"
        found[f"{word} one place early"] = f"np.roll({{w}}, -1, {place})"
    for kind, code in {
        "float16": "{w}.astype(np.float16).astype({w}.dtype)",
        "bfloat16": "rounded({w}, FLOATS['bfloat16']).astype({w}.dtype)",
    }.items():
        found[f"rounded to {kind}"] = code
    return found
