"""Write the files of a run: whole, or not at all, with errors of one line."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vit_spec import InputError
from vit_spec.errors import DISK_FULL_ERRNOS


@contextmanager
def convert_write_errors(path: Path, run: Path) -> Iterator[None]:
    """Convert an error from writing into an InputError of one line.

    Args:
        path: the file, or the folder of a file whose name is not known.
        run: the folder of the run.
    """
    try:
        yield
    except (InputError, FileNotFoundError, NotADirectoryError) as error:
        if gone := folder_gone_error(run):
            raise gone from None
        if isinstance(error, InputError):
            raise
        raise _write_error(path, error) from None
    except OSError as error:
        raise _write_error(path, error) from None


def _write_error(path: Path, error: OSError) -> InputError:
    remedy = "make room there" if error.errno in DISK_FULL_ERRNOS else "correct that"
    return InputError(f"cannot write {path} ({error.strerror or error}): {remedy}, then give the same --run to resume")


def folder_gone_error(run: Path) -> InputError | None:
    """Return the error of a run whose folder was moved or removed after config.json was written; None if it is there.

    Only config.json tells: Orbax makes a folder of that name again for its checkpoints.
    """
    if (run / "config.json").exists():
        return None
    return InputError(
        f"the run's folder {run} is gone (it has no config.json): put the run's folder back (if something is at {run}, "
        "remove it first), then give the same --run to resume"
    )


def atomic_write(path: Path, content: bytes) -> None:
    """Replace a file in a run's folder atomically: it has the old or the new content.

    A link is replaced, not its target.
    """
    temporary = temporary_path(path)
    with convert_write_errors(path, path.parent):
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
