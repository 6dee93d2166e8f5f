"""Checkpoints of the JAX trainer: the checksums of their arrays."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("orbax.checkpoint")

import jax.numpy as jnp

from train.jax.checkpoints import VERSION, CheckpointStore, _checksums
from vit_spec import InputError


class State(NamedTuple):
    """A training state of a few arrays, of all kinds of dtypes."""

    step: Any
    kernel: Any
    half: Any
    frozen: Any


def make_state() -> State:
    entries = np.random.default_rng(0).normal(size=(2, 8, 16))
    kernel = jnp.asarray(entries, jnp.float32)
    return State(jnp.int32(5), kernel, kernel.astype(jnp.bfloat16), kernel > 0)


@pytest.mark.parametrize("order", [[1, 0, 2, 3], [2, 3, 0, 1], [0, 3, 2, 1]])
def test_checksums_tell_exchanged_parts_of_an_array_apart(order: list[int]) -> None:
    """The parts have 2^17 words, of which the lower half is zero: the numbers are exact in bfloat16."""
    parts = jnp.asarray(np.random.default_rng(0).normal(size=(4, 256, 512)), jnp.bfloat16).astype(jnp.float32)
    assert _checksums({"kernel": parts}, VERSION) != _checksums({"kernel": parts[jnp.array(order)]}, VERSION)


def weighted_sum(array: np.ndarray) -> int:
    """Return the checksum of versions up to 3: the sum modulo 2^32 of all words, each times twice its index plus 1."""
    words = np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}").astype(np.uint64).ravel()
    return int((words * (2 * np.arange(words.size, dtype=np.uint64) + 1)).sum() % 2**32)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_checkpoint_of_a_version_with_other_checksums_is_verified_and_restored(is_damaged: bool, tmp_path: Path) -> None:
    state = make_state()
    store = CheckpointStore(tmp_path / "c", keep=1)
    store.save(5, state, {}, rank=None)
    store.close()
    file = tmp_path / "c" / "5" / "_CHECKPOINT_METADATA"
    metadata = json.loads(file.read_text())
    assert metadata["custom_metadata"]["version"] == 4
    sums = {f".{name}": weighted_sum(np.asarray(array)) for name, array in state._asdict().items()}
    assert sums.keys() == metadata["custom_metadata"]["digest"].keys()
    sums[".half"] += is_damaged
    metadata["custom_metadata"] |= {"version": 3, "digest": sums}
    file.write_text(json.dumps(metadata))
    store = CheckpointStore(tmp_path / "c", keep=1)
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    if is_damaged:
        with pytest.raises(InputError, match=r"step 5: the checksum of \.half is wrong"):
            store.restore_newest(target)
    else:
        restored = store.restore_newest(target)
        assert restored is not None and restored[0] == 5 and restored[3] == 3
        assert all(map(np.array_equal, restored[1], state))
    store.close()
