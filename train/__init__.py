"""Training: recipes, data, the training loop, inference, and a trainer for each framework."""

import sys

from vit_spec.errors import InputError
from vit_spec.shadowing import check_not_shadowed

try:
    check_not_shadowed("parity")
except InputError as _error:
    if sys.argv[0] != "-m":  # as `sys` documents, -m while Python imports the packages of `python -m train.jax`
        raise
    # `parity.terminal` cannot be imported here; the text of an InputError is printable by itself.
    sys.stderr.write(f"error: {_error}\n")
    sys.exit(2)
