"""Helpers for proofs against the classes of JAX libraries: their source, their weights, their gradients.

Libraries that no package registry has are read from clones.  The environment variable `PARITY_SOURCES` names the folder
that contains the clones, and the revision of a clone is recorded with the proof:

    PARITY_SOURCES=DIR PARITY_PROOFS=DIR python -m pytest tests/peers
"""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import parity
from parity.checkpoints.formats import get as get_format
from parity.checkpoints.weights import Checkpoint
from parity.comparison.tolerances import FLOAT64_TOLERANCE
from tests.goldens.peers import random_parameter

SOURCES_VARIABLE = "PARITY_SOURCES"


def clone(repository: str) -> tuple[Path, str]:
    """Return the folder of a clone, and the repository with the revision of the clone; skip the test without a clone."""
    folder = Path(os.environ.get(SOURCES_VARIABLE, "")) / repository.rpartition("/")[2]
    if SOURCES_VARIABLE not in os.environ or not (folder / ".git").exists():
        pytest.skip(f"needs a clone of {repository} in the folder that {SOURCES_VARIABLE} names", allow_module_level=True)
    command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
    return folder, f"{repository} {subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()}"


def load_module(path: Path, name: str) -> ModuleType:
    """Import one file of a clone under a name of its own, and not the packages around it, which import more libraries."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class _Float64:
    """A module with float64 in place of its narrower dtypes."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return np.float64 if name in ("float32", "bfloat16") else getattr(self._module, name)


@contextmanager
def float64(*modules: ModuleType) -> Iterator[None]:
    """Return a context within which jax has float64, and the code of these modules asks for no narrower dtype.

    Some libraries compute parts in float32 or bfloat16, and so does jax.nn.dot_product_attention, in its softmax.  This
    changes the precision and not the formula.
    """
    import jax
    from jax._src.nn import functions

    numpys = [(module, name) for module in modules for name in ("jnp", "np") if hasattr(module, name)]
    numpys.append((functions, "np"))
    before = [getattr(module, name) for module, name in numpys]
    for (module, name), numpy in zip(numpys, before, strict=True):
        setattr(module, name, _Float64(numpy))
    try:
        with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
            yield
    finally:
        for (module, name), numpy in zip(numpys, before, strict=True):
            setattr(module, name, numpy)


def draw(rng: np.random.Generator, key: str, shape: tuple[int, ...], *, kernels_first: bool = True) -> np.ndarray:
    """Return noise for one parameter, in float64 and exact in float16.

    kernels_first: whether the inputs of a kernel are its first axes, as in Flax and Keras, and not its last.
    """
    words = key.split("/")
    if not kernels_first or words[-1] != "kernel":
        return random_parameter(rng, words[-1], shape)
    separate_heads = len(shape) == 3 and words[-2] in ("query", "key", "value")
    inputs = shape[0] if separate_heads else int(np.prod(shape[:-1]))
    outputs = int(np.prod(shape)) // inputs
    return np.ascontiguousarray(random_parameter(rng, "proj", (outputs, inputs)).T.reshape(shape))


def nested(flat: Mapping[str, Any]) -> dict[Any, Any]:
    """Return nested dictionaries for keys like "layers/0/ln/scale", with integers for numbers as in NNX."""
    tree: dict[Any, Any] = {}
    for key, value in flat.items():
        *parents, leaf = (int(word) if word.isdigit() else word for word in key.split("/"))
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def flat(tree: Any) -> dict[str, Any]:
    """Return the arrays of a pytree by their paths, joined by "/"."""
    import jax

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def assert_gradients(
    checkpoint: Checkpoint, images: np.ndarray, direction: np.ndarray, gradients: Mapping[str, np.ndarray]
) -> None:
    """Assert that the JAX twin has the library's gradient of sum(logits * direction) with respect to every weight.

    A gradient has the shape of its weight, so that the format converts it as it converts the weight.

    images: (B, C, H, W).
    direction: (B, num_classes), or as wide as the features.
    gradients: the gradient of each array of the file, by its key.
    """
    import jax

    import vit_jax

    constants = get_format(checkpoint.format).ignored_values  # whose gradients have other values than they
    learned = {key: each for key, each in gradients.items() if not any(re.fullmatch(one, key) for one in constants)}
    expected = parity.to_jax(Checkpoint(checkpoint.config, checkpoint.format, learned))
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), parity.to_jax(checkpoint))
        model, nhwc = vit_jax.ViT(checkpoint.config), images.transpose(0, 2, 3, 1)
        found = jax.jit(jax.grad(lambda params: (model.apply({"params": params}, nhwc) * direction).sum()))(params)
    theirs, ours = flat(expected), {key: np.asarray(leaf) for key, leaf in flat(found).items()}
    # The softmax cancels the bias of the norm of keys: its gradient is rounding noise, compared with that for queries.
    scales = {key: np.linalg.norm(theirs[key.replace("k_norm/bias", "q_norm/bias")]) for key in theirs}
    errors = {key: float(np.linalg.norm(ours[key] - theirs[key]) / scales[key]) for key in theirs}
    assert max(errors.values()) <= FLOAT64_TOLERANCE, errors
