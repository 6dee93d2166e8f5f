"""Training: recipes, data, the training loop, inference, and a trainer for each framework."""

import sys

from vit_spec.errors import InputError
from vit_spec.shadowing import check_not_shadowed

try:
    check_not_shadowed("parity")
except InputError as _error:
    if sys.argv[0] != "-m":  # as `sys` documents, -m while Python imports the packages of `python -m train.jax`
        raise
    print(f"error: {_error}", file=sys.stderr)
    sys.exit(2)
