"""Random weights with which a model amplifies rounding errors, saturates, cancels, overflows or underflows.

`KINDS` maps a description to a function that changes ordinary weights in place, given the tensors by name and a random
number generator.  `CONFIGS` are few, so that compiled XLA programs serve many examples: unusual and tiny structures, and
blocks of real widths.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

import vit_spec
from tests.twins import perturbed_params, random_images, small_config
from vit_spec import ViTConfig

Tensors = dict[str, np.ndarray]
Rng = np.random.Generator


def flatten_params(params: dict[str, Any], prefix: str = "") -> Tensors:
    """Return every array of a nested dict by its path."""
    tensors: Tensors = {}
    for name, value in params.items():
        path = f"{prefix}/{name}" if prefix else name
        tensors |= flatten_params(value, path) if isinstance(value, dict) else {path: value}
    return tensors


def _pick_tensor(tensors: Tensors, rng: Rng, *words: str) -> np.ndarray:
    """Return a random tensor whose path has one of these words."""
    names = [name for name in tensors if any(word in name for word in words)]
    return tensors[names[rng.integers(len(names))]]


def _scale_all(low: float, high: float) -> Callable[[Tensors, Rng], None]:
    def scale(tensors: Tensors, rng: Rng) -> None:
        factor = 10 ** rng.uniform(low, high)
        for array in tensors.values():
            array *= factor

    return scale


def _scale_each(tensors: Tensors, rng: Rng) -> None:
    for array in tensors.values():
        array *= 10 ** rng.normal(0, 1)


def _add_outliers(tensors: Tensors, rng: Rng) -> None:
    for array in tensors.values():
        flat = array.reshape(-1)
        flat[rng.integers(flat.size, size=max(1, flat.size // 100))] *= 10 ** rng.uniform(1, 4)


def _enlarge_norm(tensors: Tensors, rng: Rng) -> None:
    _pick_tensor(tensors, rng, "norm1/scale", "norm2/scale", "norm/scale")[...] *= 1000


def _make_some_subnormal(tensors: Tensors, rng: Rng) -> None:
    for _ in range(rng.integers(1, 4)):
        _pick_tensor(tensors, rng, "kernel", "scale")[...] *= np.float32(1e-39)


def _make_all_subnormal(tensors: Tensors, rng: Rng) -> None:
    for array in tensors.values():
        array *= np.float32(1e-39)


def _zero_some(tensors: Tensors, rng: Rng) -> None:
    for _ in range(rng.integers(1, 4)):
        _pick_tensor(tensors, rng, "kernel", "scale", "bias", "pos_embed")[...] = 0


def _zero_all(tensors: Tensors, rng: Rng) -> None:
    for array in tensors.values():
        array[...] = 0


def _make_tokens_constant(tensors: Tensors, rng: Rng) -> None:
    """Make every channel of every token the same, so that the first norm divides by the root of eps."""
    for name, array in tensors.items():
        if "patch_embed" in name or "pos_embed" in name or "token" in name:
            array[...] = 0
    tensors["patch_embed/proj/bias"][...] = rng.choice([1 / 3, 1e4 / 3])


def _move_tokens_from_zero(tensors: Tensors, rng: Rng) -> None:
    tensors["patch_embed/proj/bias"][...] += 10 ** rng.uniform(2, 6)


def _saturate_attention(tensors: Tensors, rng: Rng) -> None:
    tensors["blocks/attn/qkv/kernel"][...] *= 10 ** rng.uniform(0.5, 3)


def _enlarge_some(tensors: Tensors, rng: Rng) -> None:
    for _ in range(2):
        array = _pick_tensor(tensors, rng, "kernel")
        array[...] = np.clip(array * 10.0 ** rng.uniform(12, 30), -1e37, 1e37)


def _shrink_some(tensors: Tensors, rng: Rng) -> None:
    for _ in range(3):
        _pick_tensor(tensors, rng, "kernel", "scale")[...] *= np.float32(10 ** rng.uniform(-30, -8))


KINDS: dict[str, Callable[[Tensors, Rng], None]] = {
    "all weights times 4 to 10": _scale_all(0.6, 1),
    "all weights times 10 to 300": _scale_all(1, 2.5),
    "all weights times 0.001 to 0.1": _scale_all(-3, -1),
    "each tensor times its own power of ten": _scale_each,
    "outliers of 10 to 10,000 times": _add_outliers,
    "a norm's weight times 1000": _enlarge_norm,
    "some tensors subnormal": _make_some_subnormal,
    "all tensors subnormal": _make_all_subnormal,
    "some tensors zero": _zero_some,
    "all tensors zero": _zero_all,
    "constant tokens": _make_tokens_constant,
    "tokens far from zero": _move_tokens_from_zero,
    "attention saturated": _saturate_attention,
    "some tensors times 1e12 to 1e30": _enlarge_some,
    "some tensors times 1e-30 to 1e-8": _shrink_some,
}


def _tiny_config(**changes: Any) -> ViTConfig:
    base = {"width": 2, "num_heads": 1, "mlp_dim": 2, "depth": 1, "image_size": (4, 4), "patch_size": (2, 2)}
    return vit_spec.get("vit_s16", num_classes=3).replace(**{**base, **changes})


CONFIGS: dict[str, ViTConfig] = {
    "small": small_config(vit_spec.get("vit_s16")),
    "small, four blocks": small_config(vit_spec.get("dinov2_s14"), depth=4),
    "small, attention pooling": small_config(vit_spec.get("siglip_b16")),
    "small, rotary": small_config(vit_spec.get("dinov3_s16")),
    "width 1": _tiny_config(width=1, mlp_dim=1),
    "width 2": _tiny_config(),
    "width 2, three blocks": _tiny_config(depth=3, mlp_dim=5),
    "one token": _tiny_config(
        width=8, mlp_dim=16, num_heads=2, image_size=(2, 2), tokens={"class_token": False}, head={"pool": "mean"}
    ),
    "one output": _tiny_config(width=8, mlp_dim=16, num_heads=2, num_classes=1),
    "width 192": vit_spec.get("vit_ti16", num_classes=10).replace(image_size=(48, 64), depth=2),
    "width 384": vit_spec.get("vit_s16", num_classes=100).replace(image_size=(64, 64), depth=2),
}


def draw_example(seed: int) -> tuple[str, str, ViTConfig, dict[str, Any], np.ndarray]:
    """Return the name of a config, a kind of weights, the config, parameters and images; seeds cycle through `KINDS`."""
    rng = np.random.default_rng([17, seed])
    kind = list(KINDS)[seed % len(KINDS)]
    name = list(CONFIGS)[rng.integers(len(CONFIGS))]
    config = CONFIGS[name]
    return name, kind, config, make_extreme(perturbed_params(config, seed), kind, seed), random_images(config, seed=seed)


def make_extreme(params: dict[str, Any], kind: str, seed: int) -> dict[str, Any]:
    """Change parameters in place to a kind of extreme weights, and return them."""
    with np.errstate(under="ignore"):
        KINDS[kind](flatten_params(params), np.random.default_rng([18, seed]))
    return params
