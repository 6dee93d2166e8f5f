"""Text files with one entry per line, such as class names."""

import re
from pathlib import Path

from vit_spec import bounded_json


def read_lines(path: Path, *, max_bytes: int) -> list[str]:
    r"""Return the lines of a UTF-8 file, without blanks at their ends, a byte order mark, and blank lines at the end.

    Lines end in \n, \r\n or \r: names may have other characters that `str.splitlines` takes for ends, such as U+2028.

    Raises:
        OSError, ValueError: the file cannot be read, is longer than `max_bytes`, or is not UTF-8.
    """
    text = bounded_json.read_bytes(path, max_bytes=max_bytes).decode("utf-8-sig")
    if "\0" in text:
        raise ValueError("it has the character NUL, as text in UTF-16 does when it is read as UTF-8")
    stripped = text.rstrip()
    return [line.strip() for line in re.split(r"\r\n|\n|\r", stripped)] if stripped else []
