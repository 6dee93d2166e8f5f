"""Why do weights not give the outputs that they should?  The causes that are known, tried singly and in pairs."""

from parity.diagnosis.diagnose import against, diagnose
from parity.diagnosis.expectations import AS_SHOWN, Expected, expected, load, read
from parity.diagnosis.remedy import Source
from parity.diagnosis.report import Cause, Diagnosis

__all__ = ["AS_SHOWN", "Cause", "Diagnosis", "Expected", "Source", "against", "diagnose", "expected", "load", "read"]
