"""The provenance of a comparison: the versions of the frameworks, and digests of weights and inputs."""

import hashlib
import platform
from collections.abc import Mapping

import numpy as np

from parity.checkpoints.layout import Array
from vit_spec.missing_packages import require_packages

_FINGERPRINT = 12  # hexadecimal digits, which tell apart the arrays of two runs; the digest of all is not shortened


def framework_versions() -> dict[str, str]:
    """Return the versions of both frameworks, NumPy and Python, and the machine type.

    Raises:
        InputError: a framework is not installed.
    """
    require_packages("the comparison runs a Flax and a PyTorch model", "jax", "flax", "torch")
    import flax
    import jax
    import torch

    versions = {"jax": jax.__version__, "flax": flax.__version__, "torch": torch.__version__, "numpy": np.__version__}
    return {**versions, "python": platform.python_version(), "machine": platform.machine()}


def digest(*groups: Mapping[str, Array]) -> str:
    """Return the SHA-256 of arrays with their keys, dtypes and shapes."""
    out = hashlib.sha256()
    for key, array in (item for group in groups for item in sorted(group.items())):
        out.update(f"{key} {array.dtype} {array.shape} ".encode() + array.tobytes())
    return out.hexdigest()


def fingerprints(arrays: Mapping[str, Array]) -> dict[str, str]:
    """Return for each array its shape and the beginning of its digest, as in "(4, 2) 3f29c0a81b44"."""
    return {key: f"{x.shape} {digest({'': x})[:_FINGERPRINT]}" for key, x in arrays.items()}
