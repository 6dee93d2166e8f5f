"""Checkpoints of big_vision from before 2022, as fix_old_checkpoints (big_vision/models/vit.py) describes them.

Positions lay in the encoder, or at the root with a row for the class token; the pooling head's parts lay at the root.
"""

from math import isqrt

from parity.checkpoints.formats.big_vision import pools
from parity.checkpoints.formats.format import Evidence, Format
from parity.checkpoints.formats.linen import ALWAYS, ASSUMED, LOOP, MAP_HEAD, SPELLINGS, class_row, positions
from parity.checkpoints.formats.untold import in_words

HEADS = {"": MAP_HEAD, "-inlined": MAP_HEAD.replace("MAPHead_0/", "")}
TABLES = {"encoder": positions("Transformer/pos_embedding"), "root": positions("pos_embedding")}


def recognises(evidence: Evidence) -> bool:
    """Where patches make a square and one row more is there, it is the class token's: big_vision itself looks for that."""
    rows = evidence.sizes.get("token", 0)
    return "cls_token" in evidence.axes and rows > 0 and isqrt(rows) ** 2 + 1 == rows


FORMAT = Format(
    name="big_vision-old",
    what="big_vision before 2022: positions in the encoder, or with a row for the class token",
    separator="/",
    tables={f"{name}{suffix}": LOOP + head + table for name, table in TABLES.items() for suffix, head in HEADS.items()},
    spellings=SPELLINGS,
    always={**ALWAYS, "positions.kind": "learned", "positions.covers": class_row, "head.pool": pools},
    assumed=ASSUMED,
    recognises=recognises,
    untold=in_words,
)
