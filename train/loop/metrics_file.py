"""The records of a run in metrics.jsonl, one per line."""

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from vit_spec import InputError, bounded_json

Record = dict[str, Any]

MAX_METRICS_BYTES, MAX_RECORDS = 1 << 27, 1 << 20  # more than any run writes


def json_line(record: Record) -> str:
    """Return a record as a line of JSON, which has no NaN: undefined metrics are null."""
    undefined = {name: None for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)}
    return json.dumps(record | undefined) + "\n"


def records_until(records: Iterable[Record], step: int, *, is_evaluated: bool) -> list[Record]:
    """Return the records of the first `step` steps; see `RunFolder.resume_at`."""
    return [record for record in records if record["step"] < step + (is_evaluated or record.get("set") == "train")]


def read_records(metrics: Path) -> Iterator[Record]:
    """Yield the records of metrics.jsonl; skip lines that are no record, such as one that was cut off.

    Raises:
        InputError: the file cannot be read, or is longer than that of any run.
    """
    try:
        data = bounded_json.read_bytes(metrics, max_bytes=MAX_METRICS_BYTES)
        if (count := data.count(b"\n")) > MAX_RECORDS:
            raise InputError(f"it has {count:,} lines")
    except FileNotFoundError:
        return
    except (OSError, InputError) as error:
        raise InputError(f"{metrics} cannot be read ({error}): move it out of the folder to resume without it") from None
    for line in data.splitlines():
        try:
            record = bounded_json.parse_object(line)
        except InputError:
            continue
        if isinstance(record.get("step"), int):
            yield record
