"""The safetensors container: exchange with its own library, lazy reading, shards, and refusal of damaged files."""

import json
import os
from threading import Thread

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import deserialize
from safetensors.numpy import save, save_file

from parity.checkpoints import containers
from parity.checkpoints.containers.container import ArraySpec
from parity.checkpoints.containers.safetensors import CONTAINER, create_sharded
from tests.container_cases import (
    CountReadBytes,
    assert_read_or_refused,
    error_message,
    find_wrong_refusals,
    have_same_bits,
    random_arrays,
    read_all,
    specs_of,
    write_arrays,
    write_in_pieces,
    write_sparse_file,
)
from vit_spec import InputError

DTYPE_CODES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "bool": "BOOL"}


def dtype_code(dtype):
    """Return the name that a header has for a dtype."""
    return DTYPE_CODES.get(dtype.name) or dtype.name.replace("uint", "U").replace("int", "I")


def encode_file(header, data=b""):
    """Return the bytes of a file with a header, given as JSON or as its bytes, valid or not."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def make_entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


# Round trips ----------------------------------------------------------------------------------------------------------


def test_the_safetensors_library_reads_written_arrays(tmp_path):
    arrays = random_arrays()
    found = dict(deserialize(write_arrays(CONTAINER, tmp_path / "a.safetensors", arrays).read_bytes()))
    assert found.keys() == arrays.keys()
    for key, array in arrays.items():
        assert (found[key]["dtype"], found[key]["shape"]) == (dtype_code(array.dtype), list(array.shape))
        assert bytes(found[key]["data"]) == array.tobytes()


def test_files_of_the_safetensors_library_are_read(tmp_path):
    arrays = {key: array for key, array in random_arrays().items() if array.dtype != ml_dtypes.bfloat16}
    save_file(arrays, tmp_path / "a.safetensors", {"format": "pt"})
    contents = CONTAINER.open(tmp_path / "a.safetensors")
    assert have_same_bits(read_all(contents), arrays) and contents.metadata == {"format": "pt"}


@pytest.mark.parametrize("name", ["F8_E4M3", "F8_E5M2", "F8_E8M0"])
def test_8_bit_floats_are_read_and_written(tmp_path, name):
    (tmp_path / "a.safetensors").write_bytes(encode_file({"a": make_entry(name, (2, 3), (0, 6))}, b"abcdef"))
    array = read_all(CONTAINER.open(tmp_path / "a.safetensors"))["a"]
    assert array.tobytes() == b"abcdef"
    again = write_arrays(CONTAINER, tmp_path / "b.safetensors", {"a": array})
    assert dict(deserialize(again.read_bytes()))["a"]["dtype"] == name


def test_complex_numbers_of_the_safetensors_library_are_read(tmp_path):
    arrays = {"a": np.array([[1 + 2j, 3 - 4j]], np.complex64)}
    save_file(arrays, tmp_path / "a.safetensors")
    assert have_same_bits(read_all(CONTAINER.open(tmp_path / "a.safetensors")), arrays)


@pytest.mark.parametrize("name", ["F4", "F6_E2M3", "F6_E3M2"])
def test_an_array_whose_elements_share_bytes_is_named_and_not_called_damaged(tmp_path, name):
    (tmp_path / "a.safetensors").write_bytes(encode_file({"a": make_entry(name, (8,), (0, 6))}, bytes(6)))
    with pytest.raises(InputError, match=f"'a' has the dtype {name}, which is not read: leave it out") as error:
        CONTAINER.open(tmp_path / "a.safetensors")
    assert "damaged" not in str(error.value)


def test_metadata_is_read_back(tmp_path):
    metadata = {"config": '{"größe": 1}', "format": "jax"}
    assert CONTAINER.open(write_arrays(CONTAINER, tmp_path / "a.safetensors", {}, metadata)).metadata == metadata


def test_the_written_bytes_follow_the_specification(tmp_path):
    arrays = {"b": np.array([1, 2], np.float16), "a": np.array([[3]], np.float32)}
    header = {
        "__metadata__": {"format": "jax"},
        "a": make_entry("F32", [1, 1], (0, 4)),
        "b": make_entry("F16", [2], (4, 8)),
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    found = write_arrays(CONTAINER, tmp_path / "a.safetensors", arrays, {"format": "jax"}).read_bytes()
    assert found == encode_file(text, arrays["a"].tobytes() + arrays["b"].tobytes())


def test_every_array_is_aligned(tmp_path):
    contents = CONTAINER.open(write_arrays(CONTAINER, tmp_path / "a.safetensors", random_arrays()))
    assert all(array.offset % array.dtype.itemsize == 0 for array in contents.arrays.values())


def test_arrays_are_written_in_any_order_from_several_threads(tmp_path):
    arrays = random_arrays()
    with CONTAINER.create(tmp_path / "a.safetensors", specs_of(arrays), {}) as writer:
        threads = [Thread(target=write_in_pieces, args=(writer, {key: arrays[key]}, 1)) for key in reversed(arrays)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert have_same_bits(read_all(CONTAINER.open(tmp_path / "a.safetensors")), arrays)


def test_missing_elements_are_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"8 bytes of .*a\.safetensors were never written"):
        with CONTAINER.create(tmp_path / "a.safetensors", {"a": ArraySpec((2,), np.dtype("f4"))}, {}):
            pass


def test_a_full_disk_is_reported_before_anything_is_written(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(InputError, match=r"a\.safetensors needs \d+ bytes of disk space, which are not free"):
        write_arrays(CONTAINER, tmp_path / "a.safetensors", random_arrays())


def test_a_file_system_without_preallocation_can_be_written_to(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    assert have_same_bits(
        read_all(CONTAINER.open(write_arrays(CONTAINER, tmp_path / "a.safetensors", random_arrays()))), random_arrays()
    )


def test_a_dtype_that_safetensors_cannot_store_is_refused(tmp_path):
    with pytest.raises(InputError, match="'a' is complex128, which safetensors cannot store"):
        write_arrays(CONTAINER, tmp_path / "a.safetensors", {"a": np.ones(2, np.complex128)})


# Lazy reading ---------------------------------------------------------------------------------------------------------


def test_arrays_that_save_model_stored_once_have_all_their_keys(tmp_path):
    torch, save_model = pytest.importorskip("torch"), pytest.importorskip("safetensors.torch").save_model
    block, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    model = torch.nn.Sequential(block, other, block, block)
    save_model(model, str(tmp_path / "a.safetensors"))
    contents = CONTAINER.open(tmp_path / "a.safetensors")
    assert {key: np.asarray(array).tolist() for (key,), array in contents.arrays.items()} == {
        key: tensor.tolist() for key, tensor in model.state_dict().items()
    }


def test_metadata_that_names_a_layer_is_no_further_key(tmp_path):
    notes = {"last_trained_layer": "head.weight", "best.head.weight": "head.weight"}
    save_file({"head.weight": np.zeros((2, 3), np.float32)}, tmp_path / "a.safetensors", notes)
    contents = CONTAINER.open(tmp_path / "a.safetensors")
    assert contents.arrays.keys() == {("head.weight",), ("best.head.weight",)}
    assert contents.metadata == {"last_trained_layer": "head.weight"}


def test_opening_reads_headers_only(tmp_path):
    half = 11 * 2**30
    head = encode_file(
        {"a": make_entry("F32", (half,), (0, 4 * half)), "b": make_entry("F32", (half,), (4 * half, 8 * half))}
    )
    path = write_sparse_file(tmp_path / "a.safetensors", head, len(head) + 8 * half)
    with CountReadBytes() as reads:
        contents = CONTAINER.open(path)
        assert contents.arrays[("b",)].read(half - 2, half).tolist() == [0, 0]
    assert reads.bytes < 100_000


# Shards ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path):
    """Write a folder of three shards, and return its path."""
    arrays = {key: np.full(4, n, np.float32) for n, key in enumerate("abc")}
    with create_sharded(tmp_path / "model", specs_of(arrays), {"format": "jax"}, 16) as writer:
        write_in_pieces(writer, arrays)
    return tmp_path / "model"


def index_path(folder):
    return folder / "model.safetensors.index.json"


def edit_weight_map(folder, edit):
    """Call `edit` with the weight_map of the index of a folder, and write the changed index."""
    content = json.loads(index_path(folder).read_text())
    edit(content["weight_map"])
    index_path(folder).write_text(json.dumps(content))


def test_shards_have_the_names_of_hugging_face(sharded):
    names = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert sorted(os.listdir(sharded)) == [*names, "model.safetensors.index.json"]
    content = {"metadata": {"total_size": 48}, "weight_map": dict(zip("abc", names, strict=True))}
    assert json.loads(index_path(sharded).read_text()) == content


def test_a_folder_and_its_index_give_the_same_arrays(sharded):
    expected = {key: np.full(4, n, np.float32) for n, key in enumerate("abc")}
    for path in (sharded, index_path(sharded)):
        contents = containers.open(path)
        assert have_same_bits(read_all(contents), expected)
        assert contents.metadata == {"format": "jax", "index/total_size": 48}


def test_a_shard_alone_is_refused(sharded):
    shard = sharded / "model-00001-of-00003.safetensors"
    assert "is one of 3 shards" in error_message(containers, shard)
    shard.rename(sharded / "all.safetensors")
    assert containers.open(sharded / "all.safetensors").arrays


def test_a_single_shard_has_no_index(tmp_path):
    arrays = random_arrays()
    with create_sharded(tmp_path / "model", specs_of(arrays), {}, 10**6) as writer:
        write_in_pieces(writer, arrays)
    assert os.listdir(tmp_path / "model") == ["model.safetensors"]
    assert have_same_bits(read_all(containers.open(tmp_path / "model")), arrays)


def test_a_shard_can_be_a_symbolic_link_as_in_hub_caches(sharded, tmp_path):
    shard = sharded / "model-00002-of-00003.safetensors"
    os.rename(shard, tmp_path / "blob")
    shard.symlink_to(tmp_path / "blob")
    assert len(containers.open(sharded).arrays) == 3


def test_several_files_without_an_index_are_refused_and_listed(sharded):
    index_path(sharded).unlink()
    assert "'model-00001-of-00003.safetensors', 'model-00002" in error_message(containers, sharded)


@pytest.mark.parametrize(
    "name",
    [
        "../a.safetensors",
        "/etc/a.safetensors",
        "..",
        "x/../a.safetensors",
        "x\\a.safetensors",
        "C:a.safetensors",
        "a.bin",
        3,
    ],
)
def test_an_index_that_names_a_shard_in_another_folder_is_refused(sharded, name):
    edit_weight_map(sharded, lambda places: places.update(a=name))
    assert "a shard is a *.safetensors file in the folder of its index" in error_message(containers, sharded)


@pytest.mark.parametrize(
    ("mutation", "what"),
    [
        (lambda places: places.update(d=places["a"]), "holds 'd', which it does not"),
        (lambda places: places.update(a=places["b"]), "holds 'a', which it does not"),
        (lambda places: places.update(a="missing.safetensors"), "its shard missing.safetensors is missing"),
        (lambda places: places.clear(), "not an index of shards"),
    ],
    ids=["no such key", "wrong file", "no such file", "empty"],
)
def test_an_index_that_contradicts_its_shards_is_refused(sharded, mutation, what):
    edit_weight_map(sharded, mutation)
    assert what in error_message(containers, sharded)


def test_a_file_that_is_not_in_the_index_is_not_read(sharded):
    edit_weight_map(sharded, lambda places: places.pop("b"))
    (sharded / "model-00002-of-00003.safetensors").write_bytes(b"")
    assert set(read_all(containers.open(sharded))) == {"a", "c"}


def test_a_key_that_is_not_in_the_index_is_refused(sharded):
    shard = sharded / "model-00002-of-00003.safetensors"
    shard.unlink()
    write_arrays(CONTAINER, shard, {"b": np.ones(4, np.float32), "extra": np.ones(1, np.float32)})
    assert f"does not say that {shard.name} holds 'extra'" in error_message(containers, sharded)


def test_shards_of_different_models_are_refused(sharded):
    shard = sharded / "model-00002-of-00003.safetensors"
    shard.unlink()
    write_arrays(CONTAINER, shard, {"b": np.ones(4, np.float32)}, {"format": "torch"})
    assert "its shards disagree about 'format'" in error_message(containers, sharded)


def test_a_damaged_shard_is_named_in_the_error(sharded):
    shard = sharded / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert str(shard) in error_message(containers, sharded, index_path(sharded))


def test_an_index_with_a_duplicate_key_is_refused(sharded):
    index_path(sharded).write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}')
    assert "the key 'a' occurs twice" in error_message(containers, sharded)


# Errors ---------------------------------------------------------------------------------------------------------------

F32_ENTRY = make_entry()
DAMAGED = {
    "an empty file": b"",
    "a short length": b"\0\0",
    "no header": (0).to_bytes(8, "little"),
    "a length beyond the file": (50).to_bytes(8, "little") + b"{}",
    "a length beyond the limit": (2**63).to_bytes(8, "little") + b"{}",
    "invalid JSON": encode_file(b"{oops}"),
    "a list": encode_file(b"[]"),
    "not UTF-8": encode_file(b'{"\xff": 1}'),
    "a lone surrogate": encode_file(b'{"__metadata__": {"a": "\\ud800"}}'),
    "too deeply nested": encode_file(b'{"a":' * 5000 + b"1" + b"}" * 5000),
    "a key twice": encode_file(b'{"a": %s, "a": %s}' % ((json.dumps(make_entry()).encode(),) * 2), bytes(8)),
    "an unknown dtype": encode_file({"a": make_entry("F31")}, bytes(8)),
    "a negative length": encode_file({"a": make_entry(shape=(-2,))}, bytes(8)),
    "a length that is a float": encode_file({"a": make_entry(shape=(2.0,))}, bytes(8)),
    "a shape too large for 64 bits": encode_file({"a": make_entry(shape=(2**62, 2**62))}, bytes(8)),
    "an empty array of impossible shape": encode_file({"a": make_entry(shape=(0, 2**62, 2**62), offsets=(0, 0))}),
    "too many dimensions": encode_file({"a": make_entry(shape=(1,) * 65, offsets=(0, 4))}, bytes(4)),
    "an end before the start": encode_file({"a": make_entry(offsets=(8, 0))}, bytes(8)),
    "fewer bytes than the shape": encode_file({"a": make_entry(offsets=(0, 4))}, bytes(4)),
    "data beyond the end": encode_file({"a": make_entry(offsets=(0, 8))}, bytes(4)),
    "a gap": encode_file({"a": F32_ENTRY, "b": make_entry(offsets=(12, 20))}, bytes(20)),
    "an overlap": encode_file({"a": F32_ENTRY, "b": make_entry(offsets=(4, 12))}, bytes(12)),
    "the same bytes twice": encode_file({"a": F32_ENTRY, "b": F32_ENTRY}, bytes(8)),
    "bytes after the end": encode_file({"a": F32_ENTRY}, bytes(9)),
    "a field too many": encode_file({"a": F32_ENTRY | {"more": 1}}, bytes(8)),
    "a field too few": encode_file({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "an entry that is a number": encode_file({"a": 3}),
    "metadata that is not a string": encode_file({"__metadata__": {"a": 1}}),
}


def test_damaged_files_are_refused(tmp_path):
    message = "is not a safetensors file, or is damaged"
    assert not find_wrong_refusals(CONTAINER, tmp_path / "a.safetensors", DAMAGED, message)


def test_a_file_truncated_after_opening_is_refused(tmp_path):
    path = write_arrays(CONTAINER, tmp_path / "a.safetensors", {"a": np.ones(100, np.float32)})
    contents = CONTAINER.open(path)
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(InputError, match=r"a\.safetensors was truncated"):
        read_all(contents)


VALID = save(
    {key: array for key, array in random_arrays().items() if key in ("matrix/float32", "empty/int8", "scalar/bool")}
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, len(VALID) - 1), byte=st.integers(0, 255), length=st.integers(0, len(VALID)))
def test_a_file_with_changed_bytes_is_refused_or_read_with_its_shapes(tmp_path, place, byte, length):
    for number, data in enumerate([VALID[:place] + bytes([byte]) + VALID[place + 1 :], VALID[:length]]):
        (tmp_path / f"{number}.safetensors").write_bytes(data)
        assert_read_or_refused(CONTAINER, tmp_path / f"{number}.safetensors")


# Recognition ----------------------------------------------------------------------------------------------------------


def test_files_and_indexes_are_recognised(sharded, tmp_path):
    for path in (index_path(sharded), sharded / "model-00001-of-00003.safetensors"):
        assert CONTAINER.recognises(path, path.read_bytes()[:4096])


@pytest.mark.parametrize(
    "head", [b"", b"PK\3\4" + bytes(60), b"\x80\x02}q\x00.", b'{"a": 1}', b"\x93NUMPY\1\0" + bytes(60)]
)
def test_other_files_are_not_recognised(tmp_path, head):
    assert not CONTAINER.recognises(tmp_path / "a.json", head)
    assert not CONTAINER.recognises(tmp_path, b"")
