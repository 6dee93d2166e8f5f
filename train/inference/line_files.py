"""Text files with one entry per line, such as class names."""

import re
from pathlib import Path

from vit_spec import bounded_json


def read_lines(path: Path, *, max_bytes: int) -> list[str]:
    r"""Return the lines of a UTF-8 file, without a byte order mark.

    Lines end in \n or \r\n only: names may have other characters that `str.splitlines` takes for ends, such as U+2028.

    Raises:
        OSError, ValueError: the file cannot be read, is longer than `max_bytes`, or is not UTF-8.
    """
    text = bounded_json.read_bytes(path, max_bytes=max_bytes).decode("utf-8-sig")
    lines = re.split(r"\r?\n", text)
    return lines[:-1] if not lines[-1] else lines
