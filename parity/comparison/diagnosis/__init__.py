"""Diagnosis of a checkpoint that does not give the expected outputs: known causes are tried one at a time and in pairs."""

from parity.comparison.diagnosis.diagnose import diagnose, diagnose_against
from parity.comparison.diagnosis.expected_outputs import (
    Expected,
    expected_outputs,
    load_checkpoint,
    read_expected_outputs,
)
from parity.comparison.diagnosis.remedy import CommandLineSource
from parity.comparison.diagnosis.report import Cause, Diagnosis

__all__ = [
    "Cause",
    "CommandLineSource",
    "Diagnosis",
    "Expected",
    "diagnose",
    "diagnose_against",
    "expected_outputs",
    "load_checkpoint",
    "read_expected_outputs",
]
