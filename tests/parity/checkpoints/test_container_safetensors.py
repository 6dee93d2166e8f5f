"""safetensors: as its own library reads and writes it, lazily, in shards, and damaged files are named."""

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

from parity.checkpoints.containers.container import Slot
from parity.checkpoints.containers.safetensors import CONTAINER, create_sharded
from tests.container_cases import CountedReads, draw, put, read, refusal, same_bits, slots, sparse, survives, write
from vit_spec import InputError

NAMES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "bool": "BOOL"}


def code(dtype):
    return NAMES.get(dtype.name) or dtype.name.replace("uint", "U").replace("int", "I")


def file(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


# There and back -------------------------------------------------------------------------------------------------------


def test_what_is_written_its_library_reads(tmp_path):
    arrays = draw()
    found = dict(deserialize(write(CONTAINER, tmp_path / "a.safetensors", arrays).read_bytes()))
    assert found.keys() == arrays.keys()
    for key, array in arrays.items():
        assert (found[key]["dtype"], found[key]["shape"]) == (code(array.dtype), list(array.shape))
        assert bytes(found[key]["data"]) == array.tobytes()


def test_what_its_library_writes_is_read(tmp_path):
    arrays = {key: array for key, array in draw().items() if array.dtype != ml_dtypes.bfloat16}
    save_file(arrays, tmp_path / "a.safetensors", {"format": "pt"})
    contents = CONTAINER.open(tmp_path / "a.safetensors")
    assert same_bits(read(contents), arrays) and contents.notes == {"format": "pt"}


@pytest.mark.parametrize("name", ["F8_E4M3", "F8_E5M2", "F8_E8M0"])
def test_floats_of_eight_bits_come_back(tmp_path, name):
    (tmp_path / "a.safetensors").write_bytes(file({"a": entry(name, (2, 3), (0, 6))}, b"abcdef"))
    array = read(CONTAINER.open(tmp_path / "a.safetensors"))["a"]
    assert array.tobytes() == b"abcdef"
    again = write(CONTAINER, tmp_path / "b.safetensors", {"a": array})
    assert dict(deserialize(again.read_bytes()))["a"]["dtype"] == name


def test_notes_come_back(tmp_path):
    notes = {"config": '{"größe": 1}', "format": "jax"}
    assert CONTAINER.open(write(CONTAINER, tmp_path / "a.safetensors", {}, notes)).notes == notes


def test_the_bytes_are_these(tmp_path):
    arrays = {"b": np.array([1, 2], np.float16), "a": np.array([[3]], np.float32)}
    header = {"__metadata__": {"format": "jax"}, "a": entry("F32", [1, 1], (0, 4)), "b": entry("F16", [2], (4, 8))}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    found = write(CONTAINER, tmp_path / "a.safetensors", arrays, {"format": "jax"}).read_bytes()
    assert found == file(text, arrays["a"].tobytes() + arrays["b"].tobytes())


def test_every_array_is_aligned(tmp_path):
    contents = CONTAINER.open(write(CONTAINER, tmp_path / "a.safetensors", draw()))
    assert all(array.offset % array.dtype.itemsize == 0 for array in contents.arrays.values())


def test_arrays_are_written_in_any_order_from_several_threads(tmp_path):
    arrays = draw()
    with CONTAINER.create(tmp_path / "a.safetensors", slots(arrays), {}) as sink:
        threads = [Thread(target=put, args=(sink, {key: arrays[key]}, 1)) for key in reversed(arrays)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert same_bits(read(CONTAINER.open(tmp_path / "a.safetensors")), arrays)


def test_an_array_that_was_never_put_is_not_passed_over(tmp_path):
    with pytest.raises(ValueError, match=r"8 bytes of .*a\.safetensors were never put"):
        with CONTAINER.create(tmp_path / "a.safetensors", {"a": Slot((2,), np.dtype("f4"))}, {}):
            pass


def test_a_full_disk_is_known_before_anything_is_put(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(InputError, match=r"a\.safetensors takes \d+ bytes, for which there is no room"):
        write(CONTAINER, tmp_path / "a.safetensors", draw())


def test_a_file_system_that_cannot_promise_room_is_written_to_all_the_same(tmp_path, monkeypatch):
    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    assert same_bits(read(CONTAINER.open(write(CONTAINER, tmp_path / "a.safetensors", draw()))), draw())


def test_a_dtype_without_a_name_is_refused(tmp_path):
    with pytest.raises(InputError, match="'a' is complex64, which safetensors has no word for"):
        write(CONTAINER, tmp_path / "a.safetensors", {"a": np.ones(2, np.complex64)})


# Lazily ---------------------------------------------------------------------------------------------------------------


def test_headers_alone_are_read(tmp_path):
    half = 11 * 2**30
    head = file({"a": entry("F32", (half,), (0, 4 * half)), "b": entry("F32", (half,), (4 * half, 8 * half))})
    path = sparse(tmp_path / "a.safetensors", head, len(head) + 8 * half)
    with CountedReads() as reads:
        contents = CONTAINER.open(path)
        assert contents.arrays[("b",)].read(half - 2, half).tolist() == [0, 0]
    assert reads.bytes < 100_000


# Shards ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path):
    """A folder of three shards."""
    arrays = {key: np.full(4, n, np.float32) for n, key in enumerate("abc")}
    with create_sharded(tmp_path / "model", slots(arrays), {"format": "jax"}, 16) as sink:
        put(sink, arrays)
    return tmp_path / "model"


def index(folder):
    return folder / "model.safetensors.index.json"


def change(folder, change):
    content = json.loads(index(folder).read_text())
    change(content["weight_map"])
    index(folder).write_text(json.dumps(content))


def test_shards_are_named_as_hugging_face_names_them(sharded):
    names = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert sorted(os.listdir(sharded)) == [*names, "model.safetensors.index.json"]
    content = {"metadata": {"total_size": 48}, "weight_map": dict(zip("abc", names, strict=True))}
    assert json.loads(index(sharded).read_text()) == content


def test_a_folder_and_its_index_are_read_alike(sharded):
    expected = {key: np.full(4, n, np.float32) for n, key in enumerate("abc")}
    for path in (sharded, index(sharded)):
        contents = CONTAINER.open(path)
        assert same_bits(read(contents), expected)
        assert contents.notes == {"format": "jax", "index/total_size": 48}


def test_what_fits_is_one_file_without_an_index(tmp_path):
    arrays = draw()
    with create_sharded(tmp_path / "model", slots(arrays), {}, 10**6) as sink:
        put(sink, arrays)
    assert os.listdir(tmp_path / "model") == ["model.safetensors"]
    assert same_bits(read(CONTAINER.open(tmp_path / "model")), arrays)


def test_a_shard_may_be_a_link_as_in_hub_caches(sharded, tmp_path):
    shard = sharded / "model-00002-of-00003.safetensors"
    os.rename(shard, tmp_path / "blob")
    shard.symlink_to(tmp_path / "blob")
    assert len(CONTAINER.open(sharded).arrays) == 3


def test_a_folder_of_several_files_lists_them(sharded):
    index(sharded).unlink()
    assert "'model-00001-of-00003.safetensors', 'model-00002" in refusal(CONTAINER, sharded)


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
def test_a_shard_elsewhere_is_refused(sharded, name):
    change(sharded, lambda places: places.update(a=name))
    assert "a shard is a *.safetensors file beside its index" in refusal(CONTAINER, sharded)


@pytest.mark.parametrize(
    ("mutation", "what"),
    [
        (lambda places: places.update(d=places["a"]), "holds 'd', which it does not"),
        (lambda places: places.update(a=places["b"]), "holds 'a', which it does not"),
        (lambda places: places.update(a="missing.safetensors"), "its shard missing.safetensors is not there"),
        (lambda places: places.clear(), "no index of shards"),
    ],
    ids=["no such key", "wrong file", "no such file", "empty"],
)
def test_an_index_and_its_shards_say_the_same(sharded, mutation, what):
    change(sharded, mutation)
    assert what in refusal(CONTAINER, sharded)


def test_a_file_that_the_index_does_not_name_is_not_looked_at(sharded):
    change(sharded, lambda places: places.pop("b"))
    (sharded / "model-00002-of-00003.safetensors").write_bytes(b"")
    assert set(read(CONTAINER.open(sharded))) == {"a", "c"}


def test_a_key_that_the_index_does_not_have_is_refused(sharded):
    shard = sharded / "model-00002-of-00003.safetensors"
    shard.unlink()
    write(CONTAINER, shard, {"b": np.ones(4, np.float32), "extra": np.ones(1, np.float32)})
    assert f"does not say that {shard.name} holds 'extra'" in refusal(CONTAINER, sharded)


def test_shards_of_different_models_are_refused(sharded):
    shard = sharded / "model-00002-of-00003.safetensors"
    shard.unlink()
    write(CONTAINER, shard, {"b": np.ones(4, np.float32)}, {"format": "torch"})
    assert "its shards do not agree about 'format'" in refusal(CONTAINER, sharded)


def test_a_damaged_shard_is_named(sharded):
    shard = sharded / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert str(shard) in refusal(CONTAINER, sharded, index(sharded))


def test_an_index_that_names_a_key_twice_is_refused(sharded):
    index(sharded).write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}')
    assert "'a' is there twice" in refusal(CONTAINER, sharded)


# What is refused ------------------------------------------------------------------------------------------------------

F32 = entry()
DAMAGED = {
    "nothing": b"",
    "a short length": b"\0\0",
    "no header": (0).to_bytes(8, "little"),
    "a length beyond the file": (50).to_bytes(8, "little") + b"{}",
    "a length beyond the limit": (2**63).to_bytes(8, "little") + b"{}",
    "no JSON": file(b"{oops}"),
    "a list": file(b"[]"),
    "not UTF-8": file(b'{"\xff": 1}'),
    "half a surrogate": file(b'{"__metadata__": {"a": "\\ud800"}}'),
    "nested without end": file(b'{"a":' * 5000 + b"1" + b"}" * 5000),
    "a key twice": file(b'{"a": %s, "a": %s}' % ((json.dumps(entry()).encode(),) * 2), bytes(8)),
    "an unknown dtype": file({"a": entry("F31")}, bytes(8)),
    "a complex dtype": file({"a": entry("C64", (1,))}, bytes(8)),
    "a negative length": file({"a": entry(shape=(-2,))}, bytes(8)),
    "a length that is a float": file({"a": entry(shape=(2.0,))}, bytes(8)),
    "a shape too large for 64 bits": file({"a": entry(shape=(2**62, 2**62))}, bytes(8)),
    "an empty array of impossible shape": file({"a": entry(shape=(0, 2**62, 2**62), offsets=(0, 0))}),
    "too many dimensions": file({"a": entry(shape=(1,) * 65, offsets=(0, 4))}, bytes(4)),
    "ends before it begins": file({"a": entry(offsets=(8, 0))}, bytes(8)),
    "fewer bytes than the shape": file({"a": entry(offsets=(0, 4))}, bytes(4)),
    "beyond the end": file({"a": entry(offsets=(0, 8))}, bytes(4)),
    "a hole": file({"a": F32, "b": entry(offsets=(12, 20))}, bytes(20)),
    "an overlap": file({"a": F32, "b": entry(offsets=(4, 12))}, bytes(12)),
    "the same place twice": file({"a": F32, "b": F32}, bytes(8)),
    "bytes after the end": file({"a": F32}, bytes(9)),
    "a field too many": file({"a": F32 | {"more": 1}}, bytes(8)),
    "a field too few": file({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "no entry": file({"a": 3}),
    "metadata that is no text": file({"__metadata__": {"a": 1}}),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_named(tmp_path, damage):
    (tmp_path / "a.safetensors").write_bytes(DAMAGED[damage])
    assert "is not a safetensors file, or is damaged" in refusal(CONTAINER, tmp_path / "a.safetensors")


def test_a_file_cut_short_after_it_was_opened_is_named(tmp_path):
    path = write(CONTAINER, tmp_path / "a.safetensors", {"a": np.ones(100, np.float32)})
    contents = CONTAINER.open(path)
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(InputError, match=r"a\.safetensors was cut short"):
        read(contents)


VALID = save({key: array for key, array in draw().items() if key in ("matrix/float32", "empty/int8", "scalar/bool")})


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, len(VALID) - 1), byte=st.integers(0, 255), length=st.integers(0, len(VALID)))
def test_any_damage_gives_arrays_or_the_one_error(tmp_path, place, byte, length):
    for number, data in enumerate([VALID[:place] + bytes([byte]) + VALID[place + 1 :], VALID[:length]]):
        (tmp_path / f"{number}.safetensors").write_bytes(data)
        survives(CONTAINER, tmp_path / f"{number}.safetensors")


# Recognising ----------------------------------------------------------------------------------------------------------


def test_files_indexes_and_folders_are_recognised(sharded, tmp_path):
    for path in (index(sharded), sharded / "model-00001-of-00003.safetensors"):
        assert CONTAINER.recognises(path, path.read_bytes()[:4096])
    assert CONTAINER.recognises(sharded, b"")


@pytest.mark.parametrize(
    "head", [b"", b"PK\3\4" + bytes(60), b"\x80\x02}q\x00.", b'{"a": 1}', b"\x93NUMPY\1\0" + bytes(60)]
)
def test_other_files_are_not(tmp_path, head):
    assert not CONTAINER.recognises(tmp_path / "a.json", head)
    assert not CONTAINER.recognises(tmp_path, b"")
