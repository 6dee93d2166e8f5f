"""Helpers for tests of the twins: small versions of named models, and parameters and images that reveal wrong mappings."""

from functools import cache
from typing import Any

import numpy as np
import pytest

import vit_spec
from vit_spec import ViTConfig

# XLA's fusion of matrix kernels on CPU has given wrong results (jaxlib 0.10.2, jax#39103): the twins are tested with and
# without it.
NO_KERNEL_FUSION: dict[str, Any] = {"xla_cpu_experimental_ynn_fusion_type": ""}


def small_config(config: ViTConfig, depth: int = 2) -> ViTConfig:
    """Return a config of the same structure with reduced depth and width, and a grid that is not square."""
    heads, dim = 2, 8
    rows, columns = (3, 2) if config.grid[0] != config.grid[1] else (2, 3)
    return config.replace(
        image_size=(rows * config.patch_size[0], columns * config.patch_size[1]),
        width=heads * dim,
        num_heads=heads,
        depth=depth,
        mlp_dim=24,
        num_classes=min(config.num_classes, 5),
        head={"hidden": config.head.hidden and 12},
    )


@cache
def small_models() -> dict[str, ViTConfig]:
    """Return every distinct structure among the named models, by the comma-separated names that share it.

    The patch size, and initial standard deviations that depend on the width, do not count as differences.
    """
    names: dict[ViTConfig, list[str]] = {}
    for name in vit_spec.names():
        config = small_config(vit_spec.get(name))
        laws = {path: config.at(path) for path in ("tokens.init", "positions.table", "head.init")}
        common: dict[str, Any] = {"patch_size": 5, "image_size": tuple(5 * side for side in config.grid)}
        for path, law in laws.items():
            if str(law).startswith("normal("):
                part, leaf = path.split(".")
                common.setdefault(part, {})[leaf] = "normal(0.03)"
        names.setdefault(config.replace(**common), []).append(name)
    return {",".join(shared): config for config, shared in names.items()}


def perturbed_params(config: ViTConfig, seed: int = 0) -> dict[str, Any]:
    """Return parameters of the JAX twin without zeros, ones or symmetries, so that a wrong mapping changes the outputs.

    The scale of matrices stays that of their initial distributions: much larger matrices amplify rounding errors.
    """
    torch = pytest.importorskip("torch")
    import parity
    import vit_torch

    rng, declared = np.random.default_rng(seed), vit_spec.rows(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        state_dict = vit_torch.ViT(config).state_dict()
    for name, tensor in state_dict.items():
        law = declared[".".join(word for word in name.split(".") if not word.isdigit())].law
        scale = 0.3 * law.std if law and law.std > 1e-3 else 0.1
        tensor += torch.tensor(rng.normal(0, scale, tensor.shape), dtype=tensor.dtype)
    return parity.to_jax(state_dict, config)


def random_images(config: ViTConfig, size: tuple[int, int] | None = None, seed: int = 1) -> np.ndarray:
    """Return two images, (2, H, W, C), float32, of noise on a gradient."""
    height, width = size or config.image_size
    slope = np.linspace(-1, 1, height)[:, None, None] + np.linspace(0, 0.5, width)[:, None]
    noise = np.random.default_rng(seed).standard_normal((2, height, width, config.in_channels))
    return (noise + slope).astype(np.float32)
