"""Distributed checkpoints: their metadata is read as data, and their chunks are assembled on demand."""

import os
import pickle
import warnings
from collections import OrderedDict

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parity.checkpoints.containers.container import ArraySpec, File
from parity.checkpoints.containers.dcp import CONTAINER
from vit_spec import InputError

torch = pytest.importorskip("torch")

from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int8, np.int64, np.bool_]


def random_bits(dtype, shape=(3, 4), seed=0):
    """Return an array of random bits, or of random booleans."""
    dtype = np.dtype(dtype)
    raw = np.random.default_rng(seed).integers(0, 2 if dtype.kind == "b" else 256, (*shape, dtype.itemsize), np.uint8)
    return raw.view(dtype)[..., 0]


def tensor(array):
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def save(path, state):
    """Write a checkpoint with torch, in one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(state, checkpoint_id=path, no_dist=True)


def load(path, state):
    """Read a checkpoint with torch into the tensors of `state`, in one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(state, checkpoint_id=path, no_dist=True)


def write_chunked_checkpoint(folder, whole, chunks, file="__0_0.distcp"):
    """Write a checkpoint of one tensor "w" in chunks, as many processes would write it.

    Args:
        folder: the folder to write, which may exist.
        whole: the tensor.
        chunks: (offsets, sizes) of each chunk.
        file: the file name that `.metadata` has for the chunks; they are always in __0_0.distcp.
    """
    folder.mkdir(exist_ok=True)
    data, places, parts = b"", {}, []
    for number, (offsets, sizes) in enumerate(chunks):
        offsets, sizes = torch.Size(offsets), torch.Size(sizes)
        part = whole[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))].clone()
        torch.save(part, folder / "part")
        piece = (folder / "part").read_bytes()
        places[MetadataIndex("w", offsets, number)] = _StorageInfo(file, len(data), len(piece))
        parts.append(ChunkStorageMetadata(offsets, sizes))
        data += piece
    (folder / "part").unlink()
    (folder / "__0_0.distcp").write_bytes(data)
    entry = TensorStorageMetadata(TensorProperties(dtype=whole.dtype), whole.shape, parts)
    metadata = Metadata({"w": entry}, storage_data=places)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def error_message(path):
    """Return the error for a folder that is refused: one line that has its path."""
    with pytest.raises(InputError) as error:
        for array in CONTAINER.open(path).arrays.values():
            np.asarray(array)
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    return str(error.value)


# Reading --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_checkpoints_of_torch_are_read_bit_for_bit(tmp_path, dtype):
    arrays = {"w": random_bits(dtype), "scalar": random_bits(dtype, ()), "empty": random_bits(dtype, (0, 3))}
    save(tmp_path / "c", {key: tensor(array) for key, array in arrays.items()})
    for (key,), stored in CONTAINER.open(tmp_path / "c").arrays.items():
        assert (stored.shape, stored.dtype) == (arrays[key].shape, arrays[key].dtype)
        assert np.asarray(stored).tobytes() == arrays.pop(key).tobytes()
    assert not arrays


def test_nested_tensors_have_their_key_path_and_other_entries_are_listed_as_not_read(tmp_path):
    state = {"model": {"fc.weight": torch.ones(2)}, "list": [torch.ones(1)], "epoch": 3}
    save(tmp_path / "c", state)
    contents = CONTAINER.open(tmp_path / "c")
    assert set(contents.arrays) == {("model", "fc.weight"), ("list", "0")}
    assert contents.metadata == {"epoch": "not read"}


GRIDS = {
    "rows": [((0, 0, 0), (3, 5, 2)), ((3, 0, 0), (4, 5, 2))],
    "columns": [((0, 0, 0), (7, 2, 2)), ((0, 2, 0), (7, 3, 2))],
    "rows and columns, in no order": [
        ((3, 2, 0), (4, 3, 2)),
        ((0, 0, 0), (3, 2, 2)),
        ((3, 0, 0), (4, 2, 2)),
        ((0, 2, 0), (3, 3, 2)),
    ],
    "an empty chunk": [((0, 0, 0), (7, 5, 2)), ((7, 0, 0), (0, 5, 2))],
}


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_are_assembled_in_any_range(tmp_path, grid, dtype):
    whole = torch.arange(70).reshape(7, 5, 2).to(dtype)
    stored = CONTAINER.open(write_chunked_checkpoint(tmp_path / "c", whole, GRIDS[grid])).arrays["w",]
    for first, last in [(0, 70), (0, 1), (13, 14), (29, 31), (25, 70), (69, 70), (5, 5)]:
        assert stored.read(first, last).astype(np.float32).tolist() == list(range(first, last))


def test_torch_reads_the_chunked_checkpoint_of_these_tests(tmp_path):
    whole = torch.arange(70.0).reshape(7, 5, 2)
    state = {"w": torch.zeros(7, 5, 2)}
    load(write_chunked_checkpoint(tmp_path / "c", whole, GRIDS["rows and columns, in no order"]), state)
    assert torch.equal(state["w"], whole)


def test_only_the_chunk_with_the_requested_elements_is_read(tmp_path, monkeypatch):
    folder = write_chunked_checkpoint(
        tmp_path / "c", torch.arange(4096.0).reshape(64, 64), [((n, 0), (16, 64)) for n in range(0, 64, 16)]
    )
    size = os.path.getsize(folder / "__0_0.distcp")
    places, read_into = [], File.read_into
    monkeypatch.setattr(
        File, "read_into", lambda self, out, at: (places.append((at, out.nbytes)), read_into(self, out, at))[1]
    )
    CONTAINER.open(folder).arrays["w",].read(20 * 64, 21 * 64)
    assert [count for _, count in places] == [256]
    assert size / 4 < places[0][0] < size / 2


def test_code_in_metadata_is_refused_and_not_run(tmp_path):
    witness = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {witness}",)

    folder = write_chunked_checkpoint(tmp_path / "c", torch.ones(2), [((0,), (2,))])
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = {"w": OrderedDict(a=[Evil()])}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "asks to call posix.system: weights never need code" in error_message(folder)
    assert not witness.exists()


def test_code_in_a_shard_is_refused_and_not_run(tmp_path):
    witness = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {witness}",)

    folder = write_chunked_checkpoint(tmp_path / "c", torch.ones(2), [((0,), (2,))])
    torch.save(Evil(), folder / "__0_0.distcp")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (index,) = metadata.storage_data
    metadata.storage_data[index] = _StorageInfo("__0_0.distcp", 0, os.path.getsize(folder / "__0_0.distcp"))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "asks to call posix.system" in error_message(folder)
    assert not witness.exists()


def test_a_folder_is_recognised_by_its_metadata(tmp_path):
    assert CONTAINER.recognises(write_chunked_checkpoint(tmp_path / "c", torch.ones(2), [((0,), (2,))]), b"")
    assert not CONTAINER.recognises(tmp_path, b"")


# Writing --------------------------------------------------------------------------------------------------------------

ARRAYS = {np.dtype(dtype).name: random_bits(dtype) for dtype in DTYPES} | {
    "a.b": random_bits(np.float32, ()),
    "empty": random_bits(np.float32, (0, 3)),
}


def write_arrays(path, arrays, piece=5):
    """Write arrays with the container under test, in reverse order and in pieces of `piece` elements."""
    with CONTAINER.create(path, {key: ArraySpec(array.shape, array.dtype) for key, array in arrays.items()}, {}) as writer:
        for key in reversed(arrays):
            flat = np.ascontiguousarray(arrays[key]).reshape(-1)
            for first in range(0, flat.size, piece):
                writer.write(key, first, flat[first : first + piece])


def test_torch_loads_written_arrays_bit_for_bit(tmp_path):
    write_arrays(tmp_path / "c", ARRAYS)
    state = {key: torch.zeros_like(tensor(array)) for key, array in ARRAYS.items()}
    load(tmp_path / "c", state)
    for key, array in ARRAYS.items():
        assert state[key].reshape(-1).view(torch.uint8).numpy().tobytes() == array.tobytes()


def test_written_arrays_are_read_bit_for_bit(tmp_path):
    write_arrays(tmp_path / "c", ARRAYS)
    arrays = CONTAINER.open(tmp_path / "c").arrays
    assert {path: np.asarray(array).tobytes() for path, array in arrays.items()} == {
        (key,): array.tobytes() for key, array in ARRAYS.items()
    }
    assert os.listdir(tmp_path) == ["c"]


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["../secret", "/etc/passwd", "..", ".", "", "a/b"])
def test_a_file_outside_the_folder_is_refused(tmp_path, file):
    (tmp_path / "secret").write_bytes(bytes(10000))
    assert "may be outside" in error_message(write_chunked_checkpoint(tmp_path / "c", torch.ones(2), [((0,), (2,))], file))


def test_a_missing_file_is_named_in_the_error(tmp_path):
    assert "lacks '__9_0.distcp'" in error_message(
        write_chunked_checkpoint(tmp_path / "c", torch.ones(2), [((0,), (2,))], "__9_0.distcp")
    )


INVALID_CHUNKS = {
    "a gap": [((0,), (2,))],
    "an overlap": [((0,), (2,)), ((1,), (2,))],
    "beyond": [((0,), (3,)), ((3,), (2,))],
}


@pytest.mark.parametrize("chunks", INVALID_CHUNKS)
def test_chunks_that_do_not_tile_their_tensor_are_refused(tmp_path, chunks):
    assert "do not tile (4,)" in error_message(
        write_chunked_checkpoint(tmp_path / "c", torch.ones(4), INVALID_CHUNKS[chunks])
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [("size", torch.Size([1 << 50, 1 << 50])), ("size", (-1,)), ("size", "w"), ("chunks", None), ("properties", 3)],
)
def test_metadata_with_an_invalid_field_is_refused(tmp_path, field, value):
    folder = write_chunked_checkpoint(tmp_path / "c", torch.ones(2), [((0,), (2,))])
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    object.__setattr__(metadata.state_dict_metadata["w"], field, value)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "damaged" in error_message(folder)


@pytest.mark.parametrize("value", [b"", b"N.", b"}.", b"(]l.", b"garbage"])
def test_invalid_metadata_files_are_refused(tmp_path, value):
    (tmp_path / ".metadata").write_bytes(value)
    error_message(tmp_path)


def test_a_chunk_of_another_shape_than_in_the_metadata_is_refused(tmp_path):
    folder = write_chunked_checkpoint(tmp_path / "c", torch.ones(4), [((0,), (4,))])
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["w"].size = torch.Size([3])
    metadata.state_dict_metadata["w"].chunks = [ChunkStorageMetadata(torch.Size([0]), torch.Size([3]))]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "lacks the chunk of w that the metadata describe" in error_message(folder)


def test_a_truncated_shard_file_is_refused(tmp_path):
    folder = write_chunked_checkpoint(tmp_path / "c", torch.ones(4), [((0,), (2,)), ((2,), (2,))])
    data = (folder / "__0_0.distcp").read_bytes()
    for length in range(0, len(data), 101):
        (folder / "__0_0.distcp").write_bytes(data[:length])
        error_message(folder)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    flips=st.lists(st.tuples(st.integers(0, 1 << 12), st.integers(1, 255)), min_size=1, max_size=4),
    name=st.sampled_from("mw"),
)
def test_a_file_with_changed_bytes_is_refused_or_read_with_its_shapes(tmp_path, flips, name):
    folder = write_chunked_checkpoint(tmp_path / "c", torch.ones(4, 2), [((0, 0), (2, 2)), ((2, 0), (2, 2))])
    file = folder / (".metadata" if name == "m" else "__0_0.distcp")
    data = bytearray(file.read_bytes())
    for place, change in flips:
        data[place % len(data)] ^= change
    file.write_bytes(data)
    try:
        for array in CONTAINER.open(folder).arrays.values():
            assert array.nbytes <= 128
            assert np.asarray(array).shape == array.shape
    except InputError as error:
        assert str(folder) in str(error) and "\n" not in str(error)
