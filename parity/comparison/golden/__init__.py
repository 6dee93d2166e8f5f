"""Golden files: recorded float64 results of both twins, against which later runs are verified.

`record` writes a golden file, `verify` computes the same results again with the installed versions on this machine, and
`table` shows the history of golden files.
"""

from parity.comparison.golden.drift import ChangedTensor, History, Verification, table
from parity.comparison.golden.file import Golden, Record, Tensor
from parity.comparison.golden.inputs import read_model
from parity.comparison.golden.verification import record, verify

__all__ = [
    "ChangedTensor",
    "Golden",
    "History",
    "Record",
    "Tensor",
    "Verification",
    "read_model",
    "record",
    "table",
    "verify",
]
