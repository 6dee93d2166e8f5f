"""Hypotheses about one layer: a cause of the catalogue in one block only, or an operation on a parameter or intermediate.

These are not known mistakes.  If no cause of the catalogue matches, they show in which layer the difference arises, and
which operation reproduces it.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from parity.comparison.diagnosis import patches
from parity.comparison.diagnosis.hypothesis import FIX_REFERENCE_CODE, Edit, Hypothesis
from parity.comparison.diagnosis.implementation_hypotheses import block_field_hypotheses
from parity.comparison.diagnosis.roundings import round_to
from parity.comparison.diagnosis.weight_hypotheses import AFTER_BLOCKS
from vit_spec import ViTConfig, rows

RELOAD_PARAMETER = (
    "copy this parameter again from the model that made the expected outputs; "
    "`python -m parity diagnose SRC --against ORIGINAL` compares every parameter with that model's"
)


def single_block_hypotheses(c: ViTConfig, hypotheses: list[Hypothesis]) -> Iterator[Hypothesis]:
    """Yield each cause in the first block only, then each in the second block only, and so on."""
    if c.depth == 1:
        return
    for number in range(c.depth):
        for hypothesis in (*hypotheses, *block_field_hypotheses(c)):
            if (confined := hypothesis.in_block(number)) is not None:
                yield confined


def operations(c: ViTConfig) -> Iterator[Hypothesis]:
    """Yield simple operations on each intermediate and each parameter, in all blocks and in each single block."""
    for name in intermediate_names(c):
        for what, function in _intermediate_operations(c, name).items():
            patch = patches.patch_intermediate(name, function)
            yield Hypothesis(
                f"{display_name(name)}: {what}",
                f"operation on {name}",
                patch=patch,
                lowers_precision_of="operation" if what.startswith("rounded to") else None,
                manual_fix=FIX_REFERENCE_CODE,
                layer=layer_of(name),
                blocks_unchanged=is_after_blocks(name),
            )
    for name, row in rows(c).items():
        for what, code in _parameter_operations(row.axes, row.shape).items():
            edit = Edit(name, code)
            yield Hypothesis(
                f"{name}: {what}",
                f"operation on {name}",
                edits=(edit,),
                blocks_unchanged=is_after_blocks(name),
                manual_fix=RELOAD_PARAMETER,
                layer=layer_of(name),
            )
            for number in range(c.depth) if name.startswith("blocks.") and c.depth > 1 else ():
                in_block, layer = edit.in_block(number), layer_of(name, number)
                text = f"{name} of block {number}: {what}"
                yield Hypothesis(text, f"operation on {name}", edits=(in_block,), layer=layer, manual_fix=RELOAD_PARAMETER)


def intermediate_names(c: ViTConfig) -> Iterator[str]:
    """Yield the names of the intermediates to change; "blocks.*.attn" means this intermediate of every block."""
    yield "patch_embed"
    if c.positions.kind != "none":
        yield from ("tokens", "positions")
    if c.norms.before_blocks:
        yield "norm_pre"
    yield "embed"
    block_parts = ["norm1", *(("attn.q_norm", "attn.k_norm") if c.attention.qk_norm else ()), "attn.q", "attn.k", "attn.v"]
    block_parts += ["attn.scores", "attn.heads", *(("attn.norm",) if c.attention.out_norm else ()), "attn"]
    if c.norms.order != "parallel":
        block_parts += ["sum", *(("norm2",) if c.norms.has_second else ())]
    block_parts += ["mlp.fc1", "mlp.activation", *(("mlp.norm",) if c.mlp.norm else ()), "mlp"]
    for number in ("*", *range(c.depth)) if c.depth > 1 else ("*",):
        for part in block_parts:
            yield f"blocks.{number}.{part}"
        if number != c.depth - 1 or not c.norms.after_blocks:
            yield f"blocks.{number}"
    for name, is_present in (
        ("norm", c.norms.after_blocks),
        ("attn_pool", c.head.pool == "attention"),
        ("pool", c.head.pool != "none"),
        ("fc_norm", c.norms.after_pool),
        ("hidden", c.head.hidden is not None),
        ("head", c.num_classes),
    ):
        if is_present:
            yield name


def display_name(name: str) -> str:
    """Return the name of an intermediate as it is printed."""
    return name.replace("blocks.*", "blocks") if "*" in name else name


def layer_of(name: str, number: int | None = None) -> str:
    """Return the layer of a parameter or of an intermediate, or "" for all blocks.

    number: the block, for a parameter of a single block.
    """
    name = re.sub(r"\.(weight|bias|gamma|latent)$", "", name)
    if number is not None:
        return name.replace("blocks.", f"blocks.{number}.", 1)
    is_every_block = name.startswith("blocks.") and not re.match(r"blocks\.\d", name)
    return "" if is_every_block else name


def is_after_blocks(name: str) -> bool:
    """Return whether a parameter or an intermediate comes after the blocks."""
    return f"{name}.".startswith((*AFTER_BLOCKS, "pool.", "hidden."))


def _intermediate_operations(c: ViTConfig, name: str) -> dict[str, Callable[[Any], Any]]:
    """Return named operations on an intermediate: (B, T, ...), (B, H, T, S) for scores, or (B, features)."""
    operations: dict[str, Callable[[Any], Any]] = {
        f"rounded to {dtype}": round_to(dtype) for dtype in ("bfloat16", "float16")
    }
    if name in ("pool", "attn_pool", "fc_norm", "hidden", "head"):
        axes = {"channels": -1}
    elif name.endswith("scores"):
        axes = {"tokens": -1, "heads": 1}
    elif name.endswith(("attn.q", "attn.k", "attn.v", "attn.heads")):
        axes = {"tokens": 1, "heads": 2, "channels": -1}
    else:
        axes = {"tokens": 1, "channels": -1}
    for what, axis in axes.items():
        operations[f"{what} in reverse"] = partial(_flip, axis)
        operations[f"{what} one place late"] = partial(_roll, 1, axis)
        operations[f"{what} one place early"] = partial(_roll, -1, axis)
    return operations


def _flip(axis: int, x: Any) -> Any:
    return x.flip(axis)


def _roll(steps: int, axis: int, x: Any) -> Any:
    return x.roll(steps, axis)


def _parameter_operations(axes: tuple[str, ...], shape: tuple[int, ...]) -> dict[str, str]:
    """Return named operations on a parameter with these axes, as the code of an `Edit`."""
    operations = {}
    for axis, word in enumerate(axes):
        if word == "block" or shape[axis] == 1:
            continue
        operations[f"{word} in reverse"] = f"np.flip({{w}}, {axis})"
        operations[f"{word} one place late"] = f"np.roll({{w}}, 1, {axis})"
        operations[f"{word} one place early"] = f"np.roll({{w}}, -1, {axis})"
    for dtype, code in {
        "float16": "{w}.astype(np.float16).astype({w}.dtype)",
        "bfloat16": "round_to({w}, FLOAT_DTYPES['bfloat16']).astype({w}.dtype)",
    }.items():
        operations[f"rounded to {dtype}"] = code
    return operations
