"""Why do weights not give the outputs that they should?  The causes that are known, tried singly and in pairs."""

from parity.comparison.diagnosis.diagnose import against, diagnose
from parity.comparison.diagnosis.expectations import AS_SHOWN, Expected, expected, load, read
from parity.comparison.diagnosis.remedy import Source
from parity.comparison.diagnosis.report import Cause, Diagnosis

__all__ = ["AS_SHOWN", "Cause", "Diagnosis", "Expected", "Source", "against", "diagnose", "expected", "load", "read"]
