"""The definition of a format in a user's file, and the digest that identifies an array in it."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from parity.checkpoints.formats.evidence import Fields
from parity.checkpoints.layout import Array


@dataclass(frozen=True)
class Definition:
    """The file in which a user defines a format; see `parity/checkpoints/format_file.py`.

    Attributes:
        source: the path of the file, for messages.
        table: what the file says about the models of the format, as text that `format_file.parse_format` accepts.  Files
            that are written in the format contain it.
        lines: parameter, or piece of one -> the number of its line in the file.
        optional: the parameters that a checkpoint may lack.
        wrappers: beginnings of keys to remove, such as "net.vit.", besides those that are always removed.
        ignored: regular expression for whole keys that are not parameters -> the reason.
        constants: for some of these expressions, the digest that the arrays must have: see `digest`.
        fields: the fields of the config that all models of the format have.
        field_lines: each of these fields -> the number of its line in the file.
        proven: the proof that the model is the one that the config describes, as text; "" without one.
    """

    source: str
    table: str
    lines: Mapping[str, int]
    optional: frozenset[str] = frozenset()
    wrappers: tuple[str, ...] = ()
    ignored: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, str] = field(default_factory=dict)
    fields: Fields = field(default_factory=dict)
    field_lines: Mapping[str, int] = field(default_factory=dict)
    proven: str = ""

    @property
    def version(self) -> str:
        """Eight hexadecimal digits that identify `table`: formats of one name may have other tables."""
        return hashlib.sha256(self.table.encode()).hexdigest()[:8]

    def place(self, parameter: str) -> str:
        """Return the file and the number of the line of a parameter, such as "mine.txt:12"."""
        return f"{self.source}:{self.lines[parameter]}"

    def place_of_field(self, name: str) -> str:
        """Return the file and the number of the line that sets a field, such as "mine.txt:3"."""
        return f"{self.source}:{self.field_lines[name]}"


def digest(array: Array) -> str:
    """Return twelve hexadecimal digits that identify the dtype, the shape and the bits of an array."""
    described = f"{array.dtype.name} {array.shape} ".encode()
    return hashlib.sha256(described + np.ascontiguousarray(array).tobytes()).hexdigest()[:12]
