"""Run a command: its exit code, and expected errors in one line."""

import errno
import re
import signal
from collections.abc import Callable

from parity.failed_imports import one_line_import_errors
from parity.terminal import checked_stdout, print_error, print_note
from vit_spec import InputError
from vit_spec.errors import DISK_FULL_ERRNOS
from vit_spec.missing_packages import missing_packages, not_installed

BAD_INPUT = 2
INTERRUPTED = 130  # the exit code that shells give a program ended by Ctrl-C
_NO_MEMORY = "not enough memory: give a smaller input, or use a machine with more memory"
# PyTorch and JAX raise different types of error, so out-of-memory errors are recognized by their message.
_OUT_OF_MEMORY = re.compile("allocate memory|out of memory|RESOURCE_EXHAUSTED")


def run_command(run: Callable[[], int], framework: str | None = None) -> int:
    """Run a command and return its exit code; print expected errors in one line, without a traceback.

    Args:
        run: the command; returns its exit code.
        framework: the package that the command will need, so that an error about another missing package names both.

    Returns:
        The command's exit code; 2 for invalid input; 130 after Ctrl-C; 141 if the reader of its output has ended.
    """
    try:
        with checked_stdout(), one_line_import_errors():
            return run()
    except InputError as error:
        print_error(error)
    except ModuleNotFoundError as error:
        print_error(_missing_packages(error, framework))
    except BrokenPipeError:  # the reader of the output has ended, such as `head`
        return 128 + signal.SIGPIPE
    except OSError as error:
        print_error(_NO_MEMORY if error.errno == errno.ENOMEM else _describe_os_error(error))
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _OUT_OF_MEMORY.search(str(error)):
            raise
        print_error(_NO_MEMORY)
    except KeyboardInterrupt:
        print_note("interrupted; what was saved before is kept")
        return INTERRUPTED
    return BAD_INPUT


def _missing_packages(error: ModuleNotFoundError, framework: str | None) -> str:
    """Return the message about a missing package, and about the framework if it is missing too."""
    if error.name is None:  # a library raised it with a text alone
        return str(error)
    missing = missing_packages(framework) if framework else []
    return not_installed(list(dict.fromkeys([*missing, error.name.partition(".")[0]])))


def _describe_os_error(error: OSError) -> str:
    """Return the message about an error of the system, such as a file that cannot be read; it may not know its name."""
    remedy = ""
    if error.errno in DISK_FULL_ERRNOS:
        remedy = "; make room, or write elsewhere"
    elif isinstance(error, PermissionError):
        remedy = "; give this user access, or give another path"
    elif error.filename:
        remedy = "; give another path"
    return f"{f'{error.filename}: ' if error.filename else ''}{error.strerror or error}{remedy}"
