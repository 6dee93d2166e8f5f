"""Values for JSON, which has no NaN and no infinite numbers."""

import math
from typing import Any


def replace_non_finite(value: Any) -> Any:
    """Return a value of dicts, lists and numbers with None in place of infinite numbers and NaN."""
    if isinstance(value, dict):
        return {key: replace_non_finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [replace_non_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
