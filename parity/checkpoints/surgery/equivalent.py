"""Other parameters for the same function, where a format wants them: positions of prefix tokens, the bias of keys."""

from typing import Literal

import numpy as np

from parity.checkpoints.surgery.edit import Changed, changed, float64
from parity.checkpoints.weights import Checkpoint, check, parameter, rounded
from vit_spec import InputError, ViTConfig, rows

TABLE = "pos_embed"
BIAS, Q_BIAS, V_BIAS = "blocks.attn.qkv.bias", "blocks.attn.q_bias", "blocks.attn.v_bias"


def fold_class_position(checkpoint: Checkpoint) -> Changed:
    """Add to each prefix token the row that it has in the learned table, and take these rows away.

    The function stays the same: the sum is what entered the blocks.

    Raises:
        InputError: no learned table, or one without such rows.
    """
    before = checkpoint.config
    _hold_to_learned(before)
    if not (covered := before.num_covered):
        raise InputError(
            f"{TABLE} has rows for patches only, positions.covers={before.positions.covers!r}: nothing to fold"
        )
    table, first = parameter(checkpoint, TABLE), 0
    changes = {TABLE: table[covered:]}
    for name, count in _prefix(before).items():
        if first < covered:
            token = parameter(checkpoint, name)
            row = table[first : first + count].reshape(token.shape)
            changes[name] = rounded(float64(token) + float64(row), token.dtype)
        first += count
    done = f"{TABLE} loses {_rows(covered)}, folded into {', '.join(name for name in changes if name != TABLE)}"
    return changed(checkpoint, before.replace(positions={"covers": "none"}), changes, ()), done


def unfold_class_position(checkpoint: Checkpoint, covers: Literal["all", "class"] | None = None) -> Changed:
    """Give prefix tokens rows of zeros in the learned table, as formats want that have rows there.

    covers: which tokens; by default the class token where there are registers (as in DINOv2), and otherwise all.

    Raises:
        InputError: no learned table, or no token without a row.
    """
    before = checkpoint.config
    _hold_to_learned(before)
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
    return changed(checkpoint, config, changes, ()), f"{TABLE} gains {_rows(missing)} of zeros, covers={covers!r}"


def _hold_to_learned(config: ViTConfig) -> None:
    if config.positions.kind != "learned":
        raise InputError(f"positions.kind is {config.positions.kind!r}: only a learned table has rows to fold and unfold")


def _prefix(config: ViTConfig) -> dict[str, int]:
    """Return the parameters that prefix tokens are, in the order of the sequence, and how many tokens each is."""
    declared = rows(config)
    names = [name for name in ("cls_token", "dist_token", "reg_token") if name in declared]
    return {name: declared[name].size // config.width for name in names}


def _rows(count: int) -> str:
    return f"{count} row{'s' if count > 1 else ''}"


def add_key_bias(checkpoint: Checkpoint) -> Changed:
    """Give queries, keys and values a bias together, of zeros where they had none; the function stays the same.

    Raises:
        InputError: keys have a bias.
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
        bias, whose = np.zeros(shape, check(checkpoint)["blocks.attn.qkv.weight"]), "queries, keys and values"
    return changed(checkpoint, config, {BIAS: bias}, ()), f"{BIAS}: {whose} get a bias of zeros"


def drop_key_bias(checkpoint: Checkpoint) -> Changed:
    """Take the bias of keys away, and leave those of queries and values.

    A bias b adds q . b to all scores of a query q, and softmax does not see what is added to all: the function stays the
    same whatever b is.  Where keys are normalised or turned after the bias it is seen, and must be zero.

    Raises:
        InputError: keys have none, or one that counts.
    """
    before = checkpoint.config
    if before.attention.qkv_bias != "qkv":
        raise InputError(f"keys have no bias to drop: attention.qkv_bias is {before.attention.qkv_bias!r}")
    bias = parameter(checkpoint, BIAS)  # (block, qkv, head, dim)
    norm = float(np.linalg.norm(float64(bias[:, 1])))
    seen = [name for name in ("attention.qk_norm", "positions.rotary") if before.at(name) not in (False, "none")]
    if norm != 0 and seen:
        raise InputError(
            f"the bias of keys has norm {norm:.3g}, and with {' and '.join(seen)} attention depends on it: "
            "keep it, or choose a format that has a place for it"
        )
    changes = {Q_BIAS: bias[:, 0], V_BIAS: bias[:, 2]}
    done = f"{BIAS}: the keys' part dropped, norm {norm:.3g}" + (", which softmax does not see" if norm else "")
    return changed(checkpoint, before.replace(attention={"qkv_bias": "qv"}), changes, ()), done
