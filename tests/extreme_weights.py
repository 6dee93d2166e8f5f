"""Weights on which a function amplifies rounding, saturates, cancels, overflows or underflows; drawn from a seed.

`KINDS` names what is done to ordinary weights, each a function of the tensors by name and of a generator, in place.
`CONFIGS` are few, so that what XLA has compiled serves many draws: odd and tiny structures, and blocks of real widths.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

import vit_spec
from tests.twins import perturbed, pictures, small
from vit_spec import ViTConfig

Tensors = dict[str, np.ndarray]
Rng = np.random.Generator


def tensors(params: dict[str, Any], prefix: str = "") -> Tensors:
    """Return every array of a nested tree by its path."""
    found: Tensors = {}
    for name, value in params.items():
        path = f"{prefix}/{name}" if prefix else name
        found |= tensors(value, path) if isinstance(value, dict) else {path: value}
    return found


def _some(found: Tensors, rng: Rng, *words: str) -> np.ndarray:
    """One of the tensors whose path has one of these words."""
    names = [name for name in found if any(word in name for word in words)]
    return found[names[rng.integers(len(names))]]


def _all_scaled(low: float, high: float) -> Callable[[Tensors, Rng], None]:
    def change(found: Tensors, rng: Rng) -> None:
        factor = 10 ** rng.uniform(low, high)
        for array in found.values():
            array *= factor

    return change


def _each_scaled(found: Tensors, rng: Rng) -> None:
    for array in found.values():
        array *= 10 ** rng.normal(0, 1)


def _outliers(found: Tensors, rng: Rng) -> None:
    for array in found.values():
        flat = array.reshape(-1)
        flat[rng.integers(flat.size, size=max(1, flat.size // 100))] *= 10 ** rng.uniform(1, 4)


def _norm_large(found: Tensors, rng: Rng) -> None:
    _some(found, rng, "norm1/scale", "norm2/scale", "norm/scale")[...] *= 1000


def _subnormal(found: Tensors, rng: Rng) -> None:
    for _ in range(rng.integers(1, 4)):
        _some(found, rng, "kernel", "scale")[...] *= np.float32(1e-39)


def _all_subnormal(found: Tensors, rng: Rng) -> None:
    for array in found.values():
        array *= np.float32(1e-39)


def _zeros(found: Tensors, rng: Rng) -> None:
    for _ in range(rng.integers(1, 4)):
        _some(found, rng, "kernel", "scale", "bias", "pos_embed")[...] = 0


def _all_zero(found: Tensors, rng: Rng) -> None:
    for array in found.values():
        array[...] = 0


def _constant_tokens(found: Tensors, rng: Rng) -> None:
    """Every channel of every token the same, so that the first norm divides by the root of eps."""
    for name, array in found.items():
        if "patch_embed" in name or "pos_embed" in name or "token" in name:
            array[...] = 0
    found["patch_embed/proj/bias"][...] = rng.choice([1 / 3, 1e4 / 3])


def _far_from_zero(found: Tensors, rng: Rng) -> None:
    found["patch_embed/proj/bias"][...] += 10 ** rng.uniform(2, 6)


def _steep(found: Tensors, rng: Rng) -> None:
    found["blocks/attn/qkv/kernel"][...] *= 10 ** rng.uniform(0.5, 3)


def _huge(found: Tensors, rng: Rng) -> None:
    for _ in range(2):
        array = _some(found, rng, "kernel")
        array[...] = np.clip(array * 10.0 ** rng.uniform(12, 30), -1e37, 1e37)


def _small(found: Tensors, rng: Rng) -> None:
    for _ in range(3):
        _some(found, rng, "kernel", "scale")[...] *= np.float32(10 ** rng.uniform(-30, -8))


KINDS: dict[str, Callable[[Tensors, Rng], None]] = {
    "all weights times 4 to 10": _all_scaled(0.6, 1),
    "all weights times 10 to 300": _all_scaled(1, 2.5),
    "all weights times 0.001 to 0.1": _all_scaled(-3, -1),
    "each tensor times its own power of ten": _each_scaled,
    "outliers of 10 to 10,000 times": _outliers,
    "a norm's weight times 1000": _norm_large,
    "some tensors subnormal": _subnormal,
    "all tensors subnormal": _all_subnormal,
    "some tensors zero": _zeros,
    "all tensors zero": _all_zero,
    "constant tokens": _constant_tokens,
    "tokens far from zero": _far_from_zero,
    "attention saturated": _steep,
    "some tensors times 1e12 to 1e30": _huge,
    "some tensors times 1e-30 to 1e-8": _small,
}


def _tiny(**changes: Any) -> ViTConfig:
    base = {"width": 2, "num_heads": 1, "mlp_dim": 2, "depth": 1, "image_size": (4, 4), "patch_size": (2, 2)}
    return vit_spec.get("vit_s16", num_classes=3).replace(**{**base, **changes})


CONFIGS: dict[str, ViTConfig] = {
    "small": small(vit_spec.get("vit_s16")),
    "small, four blocks": small(vit_spec.get("dinov2_s14"), depth=4),
    "small, attention pooling": small(vit_spec.get("siglip_b16")),
    "small, rotary": small(vit_spec.get("dinov3_s16")),
    "width 1": _tiny(width=1, mlp_dim=1),
    "width 2": _tiny(),
    "width 2, three blocks": _tiny(depth=3, mlp_dim=5),
    "one token": _tiny(
        width=8, mlp_dim=16, num_heads=2, image_size=(2, 2), tokens={"class_token": False}, head={"pool": "mean"}
    ),
    "one output": _tiny(width=8, mlp_dim=16, num_heads=2, num_classes=1),
    "width 192": vit_spec.get("vit_ti16", num_classes=10).replace(image_size=(48, 64), depth=2),
    "width 384": vit_spec.get("vit_s16", num_classes=100).replace(image_size=(64, 64), depth=2),
}


def drawn(seed: int) -> tuple[str, str, ViTConfig, dict[str, Any], np.ndarray]:
    """Return the name of the config and of the kind, and a model's config, parameters and images; kinds take turns."""
    rng = np.random.default_rng([17, seed])
    kind = list(KINDS)[seed % len(KINDS)]
    name = list(CONFIGS)[rng.integers(len(CONFIGS))]
    config = CONFIGS[name]
    return name, kind, config, extreme(perturbed(config, seed), kind, seed), pictures(config, seed=seed)


def extreme(params: dict[str, Any], kind: str, seed: int) -> dict[str, Any]:
    """Change parameters, in place, and return them."""
    with np.errstate(under="ignore"):
        KINDS[kind](tensors(params), np.random.default_rng([18, seed]))
    return params
