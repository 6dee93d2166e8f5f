"""In how many parts one CPU computes a training step."""

from typing import Any

import pytest

import vit_spec
from train.jax.one_cpu import blocks_per_iteration, num_parts
from train.recipes import Recipe


@pytest.mark.parametrize(
    ("name", "batch_size", "accumulate", "parts"),
    [
        ("vit_s16", 32, 1, 4),
        ("vit_s16", 32, 2, 4),
        ("vit_s16", 32, 8, 8),
        ("vit_s16", 36, 1, 4),
        ("vit_s16", 31, 1, 1),  # parts of one image have too few tokens
        ("vit_s16", 8, 1, 1),
        ("vit_b16", 32, 1, 4),
        ("vit_ti16", 64, 1, 8),
        ("vit_h14", 32, 1, 4),  # 257 tokens
        ("dinov2_s14", 4, 1, 2),  # 1,370 tokens
    ],
)
def test_parts_are_small_but_have_enough_tokens(name: str, batch_size: int, accumulate: int, parts: int) -> None:
    assert num_parts(vit_spec.get(name, num_classes=10), Recipe(batch_size=batch_size, accumulate=accumulate)) == parts


@pytest.mark.parametrize(
    "changes",
    [{"image_size": (32, 32)}, {"regularisation": vit_spec.Regularisation(drop_path=0.1)}],
    ids=["short", "random"],
)
def test_short_steps_and_models_with_random_layers_are_not_divided(changes: dict[str, Any]) -> None:
    assert num_parts(vit_spec.get("vit_s16", num_classes=10, **changes), Recipe(batch_size=32)) == 1


@pytest.mark.parametrize(("changes", "unroll"), [({}, 12), ({"image_size": (32, 32)}, None)], ids=["real", "small"])
def test_steps_of_real_models_have_no_loop_even_for_two_images(changes: dict[str, Any], unroll: int | None) -> None:
    config = vit_spec.get("vit_ti16", num_classes=1000, **changes)
    assert blocks_per_iteration(config, Recipe(batch_size=2)) == unroll
