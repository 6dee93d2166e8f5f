"""Layer-wise learning-rate decay, and freezing by the parameter names of the PyTorch twin."""

import numpy as np
import pytest

import vit_spec
from train.recipes.param_groups import lr_multipliers
from vit_spec import InputError

CONFIG = vit_spec.get("vit_ti16", depth=3, width=16, num_heads=2, mlp_dim=32, num_classes=10)


def test_every_row_has_multipliers_one_for_each_block() -> None:
    found = lr_multipliers(CONFIG)
    assert found.keys() == vit_spec.rows(CONFIG).keys()
    assert all(rates.shape == ((3,) if name.startswith("blocks.") else ()) for name, rates in found.items())
    assert all((rates == 1).all() for rates in found.values())


def test_each_layer_has_a_share_of_the_learning_rate_of_the_next_layer() -> None:
    found = lr_multipliers(CONFIG, layer_decay=0.5)
    assert found["head.weight"] == found["norm.bias"] == 1
    assert found["blocks.mlp.fc1.weight"].tolist() == [0.125, 0.25, 0.5]
    assert found["patch_embed.proj.weight"] == found["pos_embed"] == found["cls_token"] == 0.0625


def test_patterns_freeze_modules_single_blocks_and_biases() -> None:
    found = lr_multipliers(CONFIG, freeze=["patch_embed.*", "blocks.[01].*", "*.bias"])
    frozen = {name for name, rates in found.items() if (rates == 0).all()}
    assert {"patch_embed.proj.weight", "head.bias", "norm.bias"} <= frozen and "head.weight" not in frozen
    assert found["blocks.attn.qkv.weight"].tolist() == [0, 0, 1]
    assert found["blocks.attn.qkv.bias"].tolist() == [0, 0, 0]


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InputError, match=r"'pach_embed\.proj\.weight', .* did you mean 'patch_embed\.proj\.weight'"):
        lr_multipliers(CONFIG, freeze=["head.*", "pach_embed.proj.weight"])


def test_patterns_that_freeze_everything_are_refused() -> None:
    with pytest.raises(InputError, match=r"freeze \* freezes every parameter"):
        lr_multipliers(CONFIG, freeze=["*"])


def test_the_layer_ids_are_those_of_beit() -> None:
    # BEiT's get_num_layer_for_vit: 0 for tokens, positions and patches, i + 1 for block i, depth + 1 for everything else.
    layers = {name: np.log(rates) / np.log(0.9) for name, rates in lr_multipliers(CONFIG, layer_decay=0.9).items()}
    assert np.allclose(4 - layers["blocks.norm1.weight"], [1, 2, 3])
    assert np.isclose(4 - layers["pos_embed"], 0) and np.isclose(4 - layers["head.weight"], 4)
