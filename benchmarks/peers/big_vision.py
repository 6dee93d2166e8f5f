"""google-research/big_vision, from a clone: ViT with a class token, its blocks in a Python loop, as its configs have it."""

import sys
from pathlib import Path
from types import ModuleType

import big_vision
import numpy as np
from flax.traverse_util import unflatten_dict

from benchmarks.peers import Dtype
from benchmarks.peers.jax_model import JaxModel
from vit_spec import ViTConfig

# It needs TensorFlow, and the models use it only to read checkpoints: an empty module takes its place.
big_vision.utils = sys.modules["big_vision.utils"] = ModuleType("big_vision.utils")
from big_vision.models import vit  # noqa: E402


def load(config: ViTConfig, weights: Path, dtype: Dtype) -> JaxModel:
    """Return big_vision's module."""
    model = vit.Model(
        config.num_classes,
        patch_size=config.patch_size,
        width=config.width,
        depth=config.depth,
        mlp_dim=config.mlp_dim,
        num_heads=config.num_heads,
        pool_type="tok",
        rep_size=False,
        dtype_mm=dtype,
    )
    with np.load(weights) as file:
        params = unflatten_dict({key: file[key] for key in file.files if not key.startswith("__")}, sep="/")
    return JaxModel(lambda params, images: model.apply({"params": params}, images, train=True)[0], params)
