"""Training: recipes, data, the training loop, inference, and a trainer for each framework."""

import signal
import sys

_IS_COMMAND = sys.argv[:1] == ["-m"]  # as `sys` documents, -m while Python imports the packages of `python -m train.jax`
if _IS_COMMAND and signal.getsignal(signal.SIGINT) == signal.default_int_handler:
    # Ctrl-C ends the imports without a traceback; the command sets its own handler.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from vit_spec.errors import InputError  # noqa: E402  # imports numpy, which takes time
from vit_spec.shadowing import check_not_shadowed  # noqa: E402

try:
    check_not_shadowed("parity")
except InputError as _error:
    if not _IS_COMMAND:
        raise
    # `parity.terminal` cannot be imported here; the text of an InputError is printable by itself.
    sys.stderr.write(f"error: {_error}\n")
    sys.exit(2)
