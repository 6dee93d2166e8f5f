"""Golden files: what both twins agreed on once, in float64, so that whatever moves later is named.

`record` writes one, `verify` computes it again with the versions and on the machine at hand, `table` shows its history.
"""

from parity.comparison.golden.drift import History, Moved, Verification, table
from parity.comparison.golden.file import Golden, Record, Tensor
from parity.comparison.golden.subject import read_subject
from parity.comparison.golden.verification import record, verify

__all__ = [
    "Golden",
    "History",
    "Moved",
    "Record",
    "Tensor",
    "Verification",
    "read_subject",
    "record",
    "table",
    "verify",
]
