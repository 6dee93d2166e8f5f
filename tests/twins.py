"""What the tests of the twins share: named models made small, and weights on which no mistake can hide."""

from functools import cache
from typing import Any

import numpy as np

import vit_spec
from vit_spec import ViTConfig

# XLA's matrix-kernel fusion on CPU has given wrong results (jaxlib 0.10.2, jax#39103): the twins are held to both ways.
FUSION: dict[str, dict[str, Any] | None] = {"fused": None, "unfused": {"xla_cpu_experimental_ynn_fusion_type": ""}}


def small(config: ViTConfig, depth: int = 2) -> ViTConfig:
    """The same structure at reduced depth and width, on a grid that is not square."""
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
    """Every distinct structure among the named models, by the names that share it.

    How large a patch is, and how wide the law of a first weight, which follows the width, make no other structure.
    """
    names: dict[ViTConfig, list[str]] = {}
    for name in vit_spec.names():
        config = small(vit_spec.get(name))
        laws = {path: config.at(path) for path in ("tokens.init", "positions.table", "head.init")}
        alike: dict[str, Any] = {"patch_size": 5, "image_size": tuple(5 * side for side in config.grid)}
        for path, law in laws.items():
            if str(law).startswith("normal("):
                part, leaf = path.split(".")
                alike.setdefault(part, {})[leaf] = "normal(0.03)"
        names.setdefault(config.replace(**alike), []).append(name)
    return {",".join(shared): config for config, shared in names.items()}


def perturbed(config: ViTConfig, seed: int = 0) -> dict[str, Any]:
    """Parameters of the functional twin without a zero, a one or a symmetry, so that a wrong mapping shows.

    Matrices keep the size that their laws give them: much larger ones make a function that amplifies rounding itself.
    """
    import torch

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


def pictures(config: ViTConfig, size: tuple[int, int] | None = None, seed: int = 1) -> np.ndarray:
    """Two images (2, H, W, C) of noise on a slope."""
    height, width = size or config.image_size
    slope = np.linspace(-1, 1, height)[:, None, None] + np.linspace(0, 0.5, width)[:, None]
    noise = np.random.default_rng(seed).standard_normal((2, height, width, config.in_channels))
    return (noise + slope).astype(np.float32)
