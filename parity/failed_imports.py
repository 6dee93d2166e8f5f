"""Report packages that are installed and cannot be imported, such as a framework whose CUDA libraries are missing."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from vit_spec import InputError
from vit_spec.errors import first_line

_OWN_PACKAGES = {"__main__", "vit_spec", "vit_jax", "vit_torch", "parity", "train"}


@contextmanager
def one_line_import_errors() -> Iterator[None]:
    """Convert an error that another package raises while it is imported to an InputError that names the package.

    A missing package stays a ModuleNotFoundError: the commands say what installs it.

    Raises:
        InputError: a package is installed and cannot be imported.
    """
    try:
        yield
    except (ModuleNotFoundError, InputError, MemoryError):
        raise
    except Exception as error:
        package = _package_of_import(error)
        if package is None:
            raise
        raise InputError(
            f"the package {package} is installed and cannot be imported ({first_line(error)}): install it again"
        ) from None


def _package_of_import(error: Exception) -> str | None:
    """Return the first package of others whose import raised an error; None if no import raised it."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if frame.f_code.co_name == "<module>" and package not in _OWN_PACKAGES:
            return package
    return None
