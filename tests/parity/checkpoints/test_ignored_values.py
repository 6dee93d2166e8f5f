"""Arrays that are ignored because of their values: other values are refused, in files of all origins and in memory."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import parity
from parity.checkpoints.conversion import converted_arrays
from parity.checkpoints.formats import formats
from parity.checkpoints.formats import get as get_format
from parity.checkpoints.weights import Checkpoint
from parity.checkpoints.writing import write
from vit_spec import InputError, ViTConfig, get
from vit_spec.positions import relative_index

TINY = ViTConfig(image_size=12, patch_size=4, width=16, depth=2, num_heads=2, mlp_dim=24, num_classes=5)
WITHOUT_BIAS = TINY.replace(head={"bias": False})
BEIT = TINY.replace(
    positions={"kind": "none", "relative": "table"},
    attention={"qkv_bias": "qv"},
    norms={"eps": 1e-12, "layer_scale": 0.1, "after_blocks": False, "after_pool": True},
    head={"pool": "mean"},
)
CLIP = TINY.replace(tokens={"patch_bias": False}, norms={"before_blocks": True}, head={"bias": False})
SIGLIP = TINY.replace(num_classes=0, tokens={"class_token": False}, head={"pool": "attention"})
DINOV3 = get("dinov3_s16", image_size=48, width=16, depth=2, num_heads=2, mlp_dim=24)
HEADS = {"num_heads": 2}
TIMM_INDEX = "blocks.1.attn.relative_position_index"
HF_INDEX = "beit.encoder.layer.1.attention.attention.relative_position_bias.relative_position_index"

Arrays = dict[str, np.ndarray]


def random_arrays(config: ViTConfig, format: str) -> Arrays:
    """Return random arrays for every key of a format, and its constants."""
    rng, layouts = np.random.default_rng(0), get_format("torch").layouts(config)
    arrays = {
        key: rng.normal(size=layout.shape(config.sizes)).astype(np.float32)
        for layout in layouts.values()
        for key in layout.keys(config.sizes)
    }
    return dict(converted_arrays(Checkpoint(config, "torch", arrays), format))


def theirs(tmp_path: Path, config: ViTConfig, format: str, more: Mapping[str, np.ndarray]) -> Path:
    """Save arrays of a format without metadata, with some added or replaced, and return the path."""
    save_file({**random_arrays(config, format), **more}, tmp_path / "theirs.safetensors")
    return tmp_path / "theirs.safetensors"


def ours(tmp_path: Path, config: ViTConfig, format: str, change: Callable[[Arrays], object]) -> Path:
    """Write a file with our metadata, change its arrays, save it with the same metadata, and return its path."""
    path = tmp_path / "ours.safetensors"
    write(Checkpoint(config, format, random_arrays(config, format)), path, format)
    with safe_open(path, "np") as file:
        metadata = file.metadata()
    arrays = load_file(path)
    change(arrays)
    save_file(arrays, path, metadata)
    return path


def refusal(path: Path, **options: Any) -> str:
    """Return the message of the error, one line, with which a file is refused."""
    with pytest.raises(InputError) as caught:
        parity.load(path, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_check_of_values_is_that_of_an_ignored_key() -> None:
    checks = {name: get_format(name).ignored_values.keys() - get_format(name).ignored_keys.keys() for name in formats()}
    assert not any(checks.values())


def test_the_users_config_does_not_drop_the_bias_of_a_classifier(tmp_path: Path) -> None:
    bias = np.array([0, 0, 0, 0, 1e-30], np.float32)
    given = {**HEADS, "head.bias": False}
    what = "head.bias of format 'timm' has other values than expected (zeros, for a classifier without a bias)"
    assert what in refusal(theirs(tmp_path, TINY, "timm", {"head.bias": bias}), format="timm", given=given)
    zeros = theirs(tmp_path, TINY, "timm", {"head.bias": np.zeros(5, np.float32)})
    assert not parity.load(zeros, format="timm", given=given).config.head.bias


def test_a_bias_that_was_trained_in_a_file_of_ours_is_refused_and_read_if_the_user_says_so(tmp_path: Path) -> None:
    path = ours(tmp_path, WITHOUT_BIAS, "timm", lambda arrays: arrays["head.bias"].fill(0.5))
    assert "head.bias of format 'timm' has other values than expected" in refusal(path)
    found = parity.load(path, given={"head.bias": True})
    assert found.config.head.bias and np.array_equal(parity.to_torch(found)["head.bias"], np.full(5, 0.5, np.float32))


def test_weights_in_memory_have_the_values_for_which_they_are_ignored() -> None:
    arrays = random_arrays(WITHOUT_BIAS, "timm")
    assert "head.bias" not in parity.to_torch(Checkpoint(WITHOUT_BIAS, "timm", arrays))
    with pytest.raises(InputError, match=r"head\.bias of format 'timm' has other values"):
        parity.to_torch(Checkpoint(WITHOUT_BIAS, "timm", {**arrays, "head.bias": np.ones(5, np.float32)}))


@pytest.mark.parametrize(
    ("config", "format", "key"),
    [(BEIT, "timm", TIMM_INDEX), (BEIT, "hf-beit", HF_INDEX), (TINY, "timm", TIMM_INDEX)],
    ids=["timm", "transformers", "no relative positions"],
)
def test_an_index_of_relative_positions_with_another_convention_is_refused(
    tmp_path: Path, config: ViTConfig, format: str, key: str
) -> None:
    index = relative_index((3, 3), 1).astype(np.int64)
    parity.load(theirs(tmp_path, config, format, {key: index}), given=HEADS)
    for other in (index.T.copy(), index[:9, :9].copy(), index[1:].copy()):  # the key from the query, and other shapes
        assert f"{key} of format '{format}' has other values than expected (numbers that follow from the grid" in refusal(
            theirs(tmp_path, config, format, {key: other}), given=HEADS
        )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_an_index_is_compared_as_it_is_rounded_with_the_whole_state_dict(tmp_path: Path, dtype: str) -> None:
    """The 2,212 offsets of 24 x 24 patches are rounded in both dtypes."""
    config = BEIT.replace(image_size=(96, 96))
    index = relative_index(config.grid, 1).astype(dtype)
    assert parity.load(theirs(tmp_path, config, "timm", {TIMM_INDEX: index}), given=HEADS).config.image_size == (96, 96)
    assert f"{TIMM_INDEX} of" in refusal(theirs(tmp_path, config, "timm", {TIMM_INDEX: index.T.copy()}), given=HEADS)


@pytest.mark.parametrize("image_size", [(8, 56), (56, 8), (20, 20)])
def test_the_index_shows_the_image_size_where_the_offsets_fit_several_grids(
    tmp_path: Path, image_size: tuple[int, int]
) -> None:
    """2 x 14, 14 x 2 and 5 x 5 patches have 81 offsets."""
    config = BEIT.replace(image_size=image_size)
    index = relative_index(config.grid, 1).astype(np.int64)
    found = parity.load(theirs(tmp_path, config, "timm", {TIMM_INDEX: index}), given=HEADS)
    assert found.config.image_size == image_size
    assert "image_size" not in {each.field for each in found.assumed}
    assumed = parity.load(theirs(tmp_path, config, "timm", {}), given=HEADS)
    assert assumed.config.image_size == (20, 20) and "image_size" in {each.field for each in assumed.assumed}
    wrong = {**HEADS, "image_size": (56, 8) if image_size != (56, 8) else (8, 56)}
    assert f"{TIMM_INDEX} of" in refusal(theirs(tmp_path, config, "timm", {TIMM_INDEX: index}), given=wrong)


@pytest.mark.parametrize(("config", "format", "rows"), [(CLIP, "hf-clip", 10), (SIGLIP, "hf-siglip", 9)])
def test_position_ids_in_another_order_are_refused(tmp_path: Path, config: ViTConfig, format: str, rows: int) -> None:
    key = "vision_model.embeddings.position_ids"
    ids = np.arange(rows)[None]
    parity.load(theirs(tmp_path, config, format, {key: ids}), given=HEADS)
    for other in (ids[:, ::-1].copy(), ids[:, :-1].copy(), ids + 1):
        message = refusal(theirs(tmp_path, config, format, {key: other}), given=HEADS)
        assert f"{key} of format '{format}' has other values than expected (the numbers 0, 1, 2, ...)" in message


@pytest.mark.parametrize("key", ["rope_embed.periods", "blocks.1.attn.qkv.bias_mask"])
def test_other_constants_in_a_dinov3_of_ours_are_refused(tmp_path: Path, key: str) -> None:
    path = ours(tmp_path, DINOV3, "dinov3", lambda arrays: arrays.update({key: arrays[key] + 1}))
    assert f"{key} of format 'dinov3' has other values than expected" in refusal(path)


def test_a_rotary_base_that_contradicts_the_periods_is_refused(tmp_path: Path) -> None:
    path = theirs(tmp_path, DINOV3, "dinov3", {})
    assert "rope_embed.periods" in refusal(path, given={"positions.rotary_base": 50.0})


class Unreadable:
    """An array that is too large to be read."""

    shape, dtype = (100_000, 100_000), np.dtype(np.int64)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        raise AssertionError("its shape shows that it is not the constant")


def test_a_large_array_in_the_place_of_a_constant_is_refused_before_it_is_read() -> None:
    key = "vision_model.embeddings.position_ids"
    with pytest.raises(InputError, match=rf"{key} of format 'hf-clip' has other values"):
        parity.to_torch(Checkpoint(CLIP, "hf-clip", {**random_arrays(CLIP, "hf-clip"), key: Unreadable()}))


def test_the_second_copy_of_a_layer_in_a_file_of_ours_equals_the_first(tmp_path: Path) -> None:
    config = get("article_multihead", image_size=32, width=16, depth=2, num_heads=2, mlp_dim=24, num_classes=5)
    copy = "vit.1.mlp.seq.3.weight"
    path = ours(tmp_path, config, "article_multihead:linear", lambda arrays: arrays.update({copy: arrays[copy] + 1}))
    assert f"{copy} differs from vit.1.mlp.linear2.weight, of which it is a copy" in refusal(path)
