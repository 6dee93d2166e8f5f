"""Operations that change parameters and not the function, for formats that require them: positions, key bias."""

from typing import Literal

import numpy as np

from parity.checkpoints.conversion import parameter
from parity.checkpoints.formats.format import PROJECTION
from parity.checkpoints.surgery.edit import Changed, apply_changes, round_parameter, to_float64
from parity.checkpoints.weights import Checkpoint, validate
from vit_spec import InputError, ViTConfig, rows
from vit_spec.tables import position_table

TABLE = "pos_embed"
BIAS, Q_BIAS, V_BIAS = "blocks.attn.qkv.bias", "blocks.attn.q_bias", "blocks.attn.v_bias"


def learn_positions(checkpoint: Checkpoint) -> Changed:
    """Write the fixed position table as a learned one, rounded to the dtype of the patch projection.

    The function stays the same up to this rounding, for images of the config's size.  For images of another size a fixed
    table is computed anew, and a learned one is resampled.

    Raises:
        InputError: the position table is not fixed.
    """
    before = checkpoint.config
    if before.positions.kind != "fixed":
        raise InputError(f"positions.kind is {before.positions.kind!r}: only a fixed table can be written as a learned one")
    [exact] = position_table(before, before.grid)
    table = round_parameter(TABLE, exact, validate(checkpoint)[PROJECTION])
    error = float(np.abs(to_float64(table) - exact).max())
    rounded = f"rounded to {table.dtype}, by at most {error:.2g}"
    done = f"{TABLE}: the fixed table {before.positions.table!r}, now learned; {rounded}"
    return apply_changes(checkpoint, before.replace(positions={"kind": "learned"}), {TABLE: table}, ()), done


def fold_class_position(checkpoint: Checkpoint) -> Changed:
    """Add the rows of prefix tokens in the learned position table to these tokens, and remove the rows.

    The function stays the same, because the model adds each row to its token before the blocks.

    Raises:
        InputError: there is no learned table, or it has no rows of prefix tokens.
    """
    before = checkpoint.config
    _require_learned_positions(before)
    if not (covered := before.num_covered):
        raise InputError(
            f"{TABLE} has rows for patches only, positions.covers={before.positions.covers!r}: nothing to fold"
        )
    table, first = parameter(checkpoint, TABLE), 0
    changes = {TABLE: table[covered:]}
    for name, count in _prefix_token_counts(before).items():
        if first < covered:
            token = parameter(checkpoint, name)
            row = table[first : first + count].reshape(token.shape)
            changes[name] = round_parameter(name, to_float64(token) + to_float64(row), token.dtype)
        first += count
    done = f"{TABLE} loses {_count_rows(covered)}, folded into {', '.join(name for name in changes if name != TABLE)}"
    return apply_changes(checkpoint, before.replace(positions={"covers": "none"}), changes, ()), done


def unfold_class_position(checkpoint: Checkpoint, covers: Literal["all", "class"] | None = None) -> Changed:
    """Give prefix tokens rows of zeros in the learned position table, for formats in which they have rows.

    Args:
        checkpoint: the checkpoint.
        covers: which prefix tokens have rows afterwards; by default the class token if there are registers (as in DINOv2),
            else all.

    Raises:
        InputError: there is no learned table, or all these tokens already have rows.
    """
    before = checkpoint.config
    _require_learned_positions(before)
    covers = covers or ("class" if before.tokens.registers else "all")
    config = before.replace(positions={"covers": covers})
    covered, missing = before.num_covered, config.num_covered - before.num_covered
    if missing <= 0:
        raise InputError(
            f"{TABLE} has rows for {covered} of {before.num_prefix} prefix tokens: covers={covers!r} adds none"
        )
    table = parameter(checkpoint, TABLE)
    zeros = np.zeros((missing, before.width), table.dtype)
    changes = {TABLE: np.concatenate([table[:covered], zeros, table[covered:]])}
    return apply_changes(
        checkpoint, config, changes, ()
    ), f"{TABLE} gains {_count_rows(missing)} of zeros, covers={covers!r}"


def _require_learned_positions(config: ViTConfig) -> None:
    """Raise InputError unless the model has a learned position table."""
    if config.positions.kind != "learned":
        raise InputError(f"positions.kind is {config.positions.kind!r}: only a learned table has rows to fold and unfold")


def _prefix_token_counts(config: ViTConfig) -> dict[str, int]:
    """Return the number of tokens of each parameter of prefix tokens, in the order of the token sequence."""
    declared = rows(config)
    names = [name for name in ("cls_token", "dist_token", "reg_token") if name in declared]
    return {name: declared[name].size // config.width for name in names}


def _count_rows(count: int) -> str:
    return f"{count} row{'s' if count > 1 else ''}"


def add_key_bias(checkpoint: Checkpoint) -> Changed:
    """Give queries, keys and values a common bias, which is zero where they had none; the function stays the same.

    Raises:
        InputError: keys already have a bias.
    """
    before = checkpoint.config
    if before.attention.qkv_bias == "qkv":
        raise InputError("keys have a bias already: attention.qkv_bias is 'qkv'")
    config = before.replace(attention={"qkv_bias": "qkv"})
    shape = rows(config)[BIAS].shape  # (block, qkv, head, dim)
    if before.attention.qkv_bias == "qv":
        q, v = parameter(checkpoint, Q_BIAS), parameter(checkpoint, V_BIAS)
        bias, whose = np.stack([q, np.zeros_like(q), v], axis=1), "keys"
    else:
        bias, whose = np.zeros(shape, validate(checkpoint)["blocks.attn.qkv.weight"]), "queries, keys and values"
    return apply_changes(checkpoint, config, {BIAS: bias}, ()), f"{BIAS}: {whose} get a bias of zeros"


def drop_key_bias(checkpoint: Checkpoint) -> Changed:
    """Remove the bias of keys; queries and values keep theirs.

    A bias b of keys adds q . b to all scores of a query q.  Softmax does not change when the same number is added to all
    scores, so the function stays the same for every b.  If keys are normalized or rotated after the bias is added, the
    function depends on b, and b must be zero.

    Raises:
        InputError: keys have no bias, or the function depends on it.
    """
    before = checkpoint.config
    if before.attention.qkv_bias != "qkv":
        raise InputError(f"keys have no bias to drop: attention.qkv_bias is {before.attention.qkv_bias!r}")
    bias = parameter(checkpoint, BIAS)  # (block, qkv, head, dim)
    norm = float(np.linalg.norm(to_float64(bias[:, 1])))
    causes = [name for name in ("attention.qk_norm", "positions.rotary") if before.at(name) not in (False, "none")]
    if norm != 0 and causes:
        raise InputError(
            f"the bias of keys has norm {norm:.3g}, and with {' and '.join(causes)} attention depends on it: "
            "keep it, or choose a format that has a place for it"
        )
    changes = {Q_BIAS: bias[:, 0], V_BIAS: bias[:, 2]}
    done = f"{BIAS}: the bias of keys removed, norm {norm:.3g}" + (", which softmax cancels" if norm else "")
    return apply_changes(checkpoint, before.replace(attention={"qkv_bias": "qv"}), changes, ()), done
