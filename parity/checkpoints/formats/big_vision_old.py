"""Checkpoints of big_vision from before 2022, as fix_old_checkpoints (big_vision/models/vit.py) describes them.

The position table is in the encoder, or at the root with a row for the class token.  The parts of the pooling head may be
at the root too (variants "...-inlined").
"""

from math import isqrt

from parity.checkpoints.formats.behaviour import common_behaviour
from parity.checkpoints.formats.big_vision import allowed_pools
from parity.checkpoints.formats.evidence import Evidence
from parity.checkpoints.formats.format import Format
from parity.checkpoints.formats.linen import (
    ASSUMED,
    CONSTRAINTS,
    LOOP,
    MAP_HEAD,
    SPELLINGS,
    covers_class_token,
    position_line,
)

HEAD_TABLES = {"": MAP_HEAD, "-inlined": MAP_HEAD.replace("MAPHead_0/", "")}
POSITION_LINES = {"encoder": position_line("Transformer/pos_embedding"), "root": position_line("pos_embedding")}


def recognises(evidence: Evidence) -> bool:
    """Return whether the table has a square number of rows, and one for the class token.  big_vision checks the same."""
    rows = evidence.sizes.get("token", 0)
    return "cls_token" in evidence.axes and rows > 0 and isqrt(rows) ** 2 + 1 == rows


FORMAT = Format(
    name="big_vision-old",
    description="big_vision before 2022: positions in the encoder, or with a row for the class token",
    separator="/",
    tables={
        f"{name}{suffix}": LOOP + head + table
        for name, table in POSITION_LINES.items()
        for suffix, head in HEAD_TABLES.items()
    },
    spellings=SPELLINGS,
    constraints={
        **CONSTRAINTS,
        "positions.kind": "learned",
        "positions.covers": covers_class_token,
        "head.pool": allowed_pools,
    },
    assumed=ASSUMED,
    recognises=recognises,
    assumed_behaviour=common_behaviour,
)
