"""Write the files of a run: whole, or not at all, with errors of one line."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vit_spec import InputError
from vit_spec.errors import DISK_FULL_ERRNOS

FOLDER_GONE = "the run's folder is gone; put it back to resume, or give the same command to start again from step 0"


@contextmanager
def convert_write_errors(path: Path) -> Iterator[None]:
    """Convert an OSError from writing a file, or a file in this folder, into an InputError of one line."""
    try:
        yield
    except OSError as error:
        remedy = "make room there" if error.errno in DISK_FULL_ERRNOS else "correct that"
        remedy = f"{remedy}, then give the same --run to resume" if path.parent.is_dir() else FOLDER_GONE
        raise InputError(f"cannot write {path} ({error.strerror or error}): {remedy}") from None


def atomic_write(path: Path, content: bytes) -> None:
    """Replace a file atomically: it has the old or the new content.  A link is replaced, not its target."""
    temporary = temporary_path(path)
    with convert_write_errors(path):
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:
            file.write(content)
        os.replace(temporary, path)


def temporary_path(path: Path) -> Path:
    """Return the path that `atomic_write` writes to before it replaces a file."""
    return path.with_name(f".{path.name}.new")


def file_sha256(path: Path) -> str | None:
    """Return the SHA-256 of a file in hexadecimal; None if the path is not a file or cannot be read."""
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
