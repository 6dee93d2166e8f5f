"""The msgpack container: exchange with Flax, lazy reading, split arrays, shards, and refusal of damaged files."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parity.checkpoints import containers
from parity.checkpoints.containers import msgpack, shards
from parity.checkpoints.containers import msgpack_tokens as tokens
from parity.checkpoints.containers.container import ArraySpec
from parity.checkpoints.containers.msgpack import CONTAINER
from tests.container_cases import (
    CountReadBytes,
    assert_read_or_refused,
    error_message,
    find_wrong_refusals,
    have_same_bits,
    random_arrays,
    read_all,
    write_arrays,
    write_sparse_file,
)
from vit_spec import InputError


def import_flax_serialization():
    return pytest.importorskip("flax.serialization")


def nest(arrays):
    """Return nested dictionaries of arrays, whose keys are split at slashes."""
    tree = {}
    for key, array in sorted(arrays.items()):  # flax sorts keys
        *parents, leaf = key.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = array
    return tree


def flatten(tree, path=()):
    """Return the arrays of nested dictionaries by their keys, joined by slashes."""
    if not isinstance(tree, dict):
        return {"/".join(path): tree}
    return {key: leaf for name, value in tree.items() for key, leaf in flatten(value, (*path, name)).items()}


def encode_array(array, code=1, *, shape=None, dtype=None, data=None):
    """Encode an array as an extension of msgpack.

    Args:
        array: the array.
        code: the type of the extension.
        shape: encoded dimensions, instead of the array's.
        dtype: name of a dtype, instead of the array's.
        data: bytes of the elements, instead of the array's.
    """
    shape = tokens.array_header(array.ndim) + b"".join(map(tokens.encode_integer, array.shape)) if shape is None else shape
    data = array.tobytes() if data is None else data
    text = (
        tokens.array_header(3)
        + shape
        + tokens.encode_text(dtype or array.dtype.name)
        + tokens.bytes_header(len(data))
        + data
    )
    return tokens.extension_header(code, len(text)) + text


def encode_map(**values):
    """Encode a map whose values are encoded already."""
    return tokens.map_header(len(values)) + b"".join(tokens.encode_text(key) + value for key, value in values.items())


# Round trips ----------------------------------------------------------------------------------------------------------


def test_flax_reads_written_arrays(tmp_path):
    arrays = random_arrays()
    data = write_arrays(CONTAINER, tmp_path / "a.msgpack", arrays, {"config": "{}"}).read_bytes()
    assert have_same_bits(flatten(import_flax_serialization().msgpack_restore(data)), arrays)


def test_files_of_flax_are_read(tmp_path):
    arrays = random_arrays()
    (tmp_path / "a.msgpack").write_bytes(import_flax_serialization().msgpack_serialize(nest(arrays)))
    assert have_same_bits(read_all(CONTAINER.open(tmp_path / "a.msgpack")), arrays)


def test_the_written_bytes_equal_those_of_flax(tmp_path):
    arrays = {key: random_arrays()[key] for key in sorted(random_arrays())} | {
        "x" * n: np.ones(n, np.int8) for n in (31, 70, 300, 70_000)
    }
    arrays |= {f"y/{n:02}": np.ones((1, 200), np.float16) for n in range(20)}
    data = write_arrays(CONTAINER, tmp_path / "a.msgpack", arrays).read_bytes()
    assert data == import_flax_serialization().msgpack_serialize(nest(arrays))


def test_flax_restores_a_target_from_a_written_file(tmp_path):
    arrays = random_arrays()
    data = write_arrays(CONTAINER, tmp_path / "a.msgpack", arrays, {"config": "{}"}).read_bytes()
    assert have_same_bits(flatten(import_flax_serialization().from_bytes(nest(arrays), data)), arrays)


def test_key_paths_are_split_at_slashes(tmp_path):
    contents = CONTAINER.open(write_arrays(CONTAINER, tmp_path / "a.msgpack", {"a/b/c": np.ones(1), "d": np.ones(1)}))
    assert list(contents.arrays) == [("a", "b", "c"), ("d",)]


def test_numbers_and_text_become_metadata(tmp_path):
    metadata = {"step": 2**40, "minus": -3, "rate": 0.5, "name": "ViT-Ω", "on": True, "nothing": None, "root": 1 + 2j}
    tree = {"a": np.ones(2), "state": {**metadata, "half": np.float16(0.5), "brain": ml_dtypes.bfloat16(1.5)}, "empty": {}}
    (tmp_path / "a.msgpack").write_bytes(import_flax_serialization().msgpack_serialize(tree))
    contents = CONTAINER.open(tmp_path / "a.msgpack")
    assert list(contents.arrays) == [("a",)]
    assert contents.metadata == {f"state/{key}": value for key, value in metadata.items()} | {
        "state/half": 0.5,
        "state/brain": 1.5,
    }


@pytest.fixture
def small_chunks(monkeypatch):
    """Split arrays of more than 64 bytes, both in this package and in flax."""
    monkeypatch.setattr(import_flax_serialization(), "MAX_CHUNK_SIZE", 64)
    monkeypatch.setattr(msgpack, "_MAX_CHUNK_BYTES", 64)


def test_large_arrays_are_split_as_flax_splits_them(tmp_path, small_chunks):
    arrays = {"a/b": np.arange(200.0).reshape(10, 20), "a/c": np.arange(8.0), "d": np.arange(33, dtype=np.int16)}
    data = write_arrays(CONTAINER, tmp_path / "a.msgpack", arrays).read_bytes()
    assert data == import_flax_serialization().msgpack_serialize(nest(arrays))
    assert have_same_bits(flatten(import_flax_serialization().msgpack_restore(data)), arrays)
    assert have_same_bits(read_all(CONTAINER.open(tmp_path / "a.msgpack")), arrays)


def test_a_split_array_is_read_in_pieces(tmp_path, small_chunks):
    array = np.arange(200.0)
    stored = CONTAINER.open(write_arrays(CONTAINER, tmp_path / "a.msgpack", {"a": array})).arrays[("a",)]
    for first, last in [(0, 8), (7, 9), (8, 16), (3, 197), (200, 200)]:
        assert (stored.read(first, last) == array[first:last]).all()


def test_arrays_above_one_gibibyte_are_split():
    layout = msgpack._Layout()
    specs = {"whole": ArraySpec((2**28,), np.dtype("f4")), "cut": ArraySpec((2**15, 2**13 + 1), np.dtype("f4"))}
    layout.add_map({key: (key, spec) for key, spec in specs.items()})
    assert len(layout.placements["whole"].offsets) == 1
    assert len(layout.placements["cut"].offsets) == 2 and layout.placements["cut"].chunk_size == 2**28


@pytest.mark.parametrize("keys", [("a", "a/b"), ("a/b", "a"), ("a/b", "a/b/c")])
def test_a_key_that_is_both_an_array_and_a_map_is_refused(tmp_path, keys):
    with pytest.raises(InputError, match="is both an array and a map of arrays"):
        write_arrays(CONTAINER, tmp_path / "a.msgpack", {key: np.ones(1) for key in keys})


@pytest.mark.parametrize("dtype", [np.complex64, ml_dtypes.float8_e5m2, ">f4"])
def test_a_dtype_that_flax_does_not_read_is_refused(tmp_path, dtype):
    with pytest.raises(InputError, match="which flax does not read"):
        write_arrays(CONTAINER, tmp_path / "a.msgpack", {"a": np.ones(2).astype(dtype)})


# Lazy reading ---------------------------------------------------------------------------------------------------------


def test_opening_reads_headers_only(tmp_path):
    part = 3 * 2**30
    header = (
        tokens.array_header(3)
        + b"\x91"
        + tokens.encode_integer(part)
        + tokens.encode_text("uint8")
        + tokens.bytes_header(part)
    )
    extension = tokens.extension_header(1, len(header) + part) + header
    path = tmp_path / "a.msgpack"
    with open(path, "wb") as file:
        file.write(tokens.map_header(30))
        for number in range(30):
            file.write(tokens.encode_text(str(number)) + extension)
            file.seek(part, os.SEEK_CUR)
        file.truncate()
    with CountReadBytes() as reads:
        array = CONTAINER.open(path).arrays[("29",)]
        assert array.read(part - 2, part).tolist() == [0, 0]
    assert path.stat().st_size > 88 * 2**30 and reads.bytes < 100_000


# Shards ---------------------------------------------------------------------------------------------------------------


def write_shards(folder, separator="/", nest=nest):
    """Write two shards and their index as transformers 4 does; return their arrays."""
    arrays = {"vit/a/kernel": np.ones((2, 3), np.float32), "vit/b/bias": np.zeros(2, np.float16)}
    places = {}
    for number, (key, array) in enumerate(arrays.items(), 1):
        name = f"flax_model-0000{number}-of-00002.msgpack"
        (folder / name).write_bytes(import_flax_serialization().to_bytes(nest({key: array})))
        places[key.replace("/", separator)] = name
    (folder / f"flax_model.msgpack{shards.INDEX}").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return arrays


@pytest.mark.parametrize("separator", ["/", "."])
def test_shards_are_read_from_their_folder_and_from_their_index(tmp_path, separator):
    arrays = write_shards(tmp_path, separator)
    for path in (tmp_path, tmp_path / "flax_model.msgpack.index.json"):
        contents = containers.open(path)
        assert have_same_bits(read_all(contents), arrays) and ("vit", "a", "kernel") in contents.arrays


def test_shards_with_joined_keys_give_the_same_key_paths(tmp_path):
    arrays = write_shards(tmp_path, nest=dict)
    assert have_same_bits(read_all(containers.open(tmp_path)), arrays)
    assert ("vit", "a", "kernel") in containers.open(tmp_path).arrays


@pytest.mark.parametrize("name", ["../a.msgpack", "/etc/a.msgpack", "a.bin"])
def test_an_index_that_names_a_shard_in_another_folder_is_refused(tmp_path, name):
    (tmp_path / "a.msgpack.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert "a shard is a *.msgpack file in the folder of its index" in error_message(containers, tmp_path)


def test_a_shard_with_an_array_twice_is_refused(tmp_path):
    write_shards(tmp_path, nest=lambda arrays: {**arrays, **nest(arrays)})
    assert "has an array twice" in error_message(containers, tmp_path)


def test_an_array_missing_from_its_shard_is_named_in_the_error(tmp_path):
    write_shards(tmp_path)
    (tmp_path / "flax_model-00002-of-00002.msgpack").write_bytes(import_flax_serialization().to_bytes({}))
    assert "holds 'vit/b/bias', which it does not" in error_message(containers, tmp_path)


# Errors ---------------------------------------------------------------------------------------------------------------

ARRAY = np.ones(2, np.float32)
ENCODED = encode_array(ARRAY)
CHUNKED_KEY = "__msgpack_chunked_array__"


def encode_split_array(flag=b"\xc3", shape=None, chunks=None):
    """Encode a file with one array in chunks; it is valid by default."""
    shape, chunks = shape or {"0": b"\2"}, {"0": ENCODED} if chunks is None else chunks
    return encode_map(a=encode_map(**{CHUNKED_KEY: flag, "shape": encode_map(**shape), "chunks": encode_map(**chunks)}))


DAMAGED = {
    "an empty file": b"",
    "an array without a name": ENCODED,
    "a number": b"\x01",
    "a byte that begins no token": encode_map(a=b"\xc1"),
    "bytes after the end": encode_map(a=ENCODED) + b"\0",
    "a key twice": tokens.map_header(2) + 2 * (tokens.encode_text("a") + ENCODED),
    "a key that is a number": tokens.map_header(1) + b"\x01" + ENCODED,
    "a key that is not UTF-8": tokens.map_header(1) + b"\xa1\xff" + ENCODED,
    "a key that is too long": encode_map(**{"a" * 5000: ENCODED}),
    "more entries than bytes": b"\xdf\xff\xff\xff\xff" + bytes(100),
    "more text than bytes": encode_map(a=b"\xdb\xff\xff\xff\xff"),
    "a larger array than bytes": encode_map(a=b"\xc9\xff\xff\xff\xff\x01\x93"),
    "too many nested maps": (tokens.map_header(1) + tokens.encode_text("a")) * 5000 + ENCODED,
    "a list": encode_map(a=b"\x91\x01"),
    "bytes": encode_map(a=b"\xc4\x01x"),
    "an unknown extension": encode_map(a=encode_array(ARRAY, code=9)),
    "a scalar of several elements": encode_map(a=encode_array(ARRAY, code=3)),
    "a complex number of one number": encode_map(a=b"\xd7\x02\x91" + bytes(7)),
    "an extension of one byte": encode_map(a=b"\xd4\x01\x93"),
    "an unknown dtype": encode_map(a=encode_array(ARRAY, dtype="float31")),
    "an object dtype": encode_map(a=encode_array(ARRAY, dtype="object")),
    "fewer bytes than the shape": encode_map(a=encode_array(ARRAY, data=bytes(7))),
    "more bytes than the shape": encode_map(a=encode_array(ARRAY, data=bytes(9))),
    "a negative length": encode_map(a=encode_array(ARRAY, shape=b"\x91\xff")),
    "a length that is text": encode_map(a=encode_array(ARRAY, shape=b"\x91\xa1x")),
    "a length that is a boolean": encode_map(a=encode_array(ARRAY[:1], shape=b"\x91\xc3")),
    "a shape too large for 64 bits": encode_map(a=encode_array(ARRAY, shape=b"\x92" + 2 * tokens.encode_integer(2**62))),
    "an empty array of impossible shape": encode_map(
        a=encode_array(ARRAY, shape=b"\x93\0" + 2 * tokens.encode_integer(2**62), data=b"")
    ),
    "too many dimensions": encode_map(a=encode_array(ARRAY, shape=tokens.array_header(65) + b"\1" * 65, data=bytes(4))),
    "an array longer than its extension": encode_map(a=b"\xd6" + ENCODED[1:], b=ENCODED),
    "a key path twice": tokens.map_header(2)
    + tokens.encode_text("a/b")
    + b"\x01"
    + tokens.encode_text("a")
    + encode_map(b=b"\x01"),
    "a split array without chunks": encode_split_array(shape={"0": b"\0"}, chunks={}),
    "a split array that is not marked as split": encode_split_array(flag=b"\xc2"),
    "a split array of another shape": encode_split_array(shape={"0": b"\x03"}),
    "a split array with other chunk numbers": encode_split_array(chunks={"1": ENCODED}),
    "a split array of two dtypes": encode_split_array(
        shape={"0": b"\4"}, chunks={"0": ENCODED, "1": encode_array(ARRAY.view(np.int32))}
    ),
    "a split array with a map as a chunk": encode_split_array(chunks={"0": encode_map()}),
    "a split array with another key": encode_map(a=encode_map(b=ENCODED, **{CHUNKED_KEY: b"\xc3"})),
}


def test_the_split_array_of_these_tests_is_valid_without_damage(tmp_path):
    (tmp_path / "a.msgpack").write_bytes(encode_split_array())
    assert have_same_bits(read_all(CONTAINER.open(tmp_path / "a.msgpack")), {"a": ARRAY})


def test_damaged_files_are_refused(tmp_path):
    message = "is not a Flax msgpack file, or is damaged"
    assert not find_wrong_refusals(CONTAINER, tmp_path / "a.msgpack", DAMAGED, message)


def test_a_map_of_too_many_entries_is_refused_before_it_is_read(tmp_path):
    path = write_sparse_file(tmp_path / "a.msgpack", b"\xdf" + (2**30).to_bytes(4, "big") + b"\xa1a\x01", 2**33)
    with CountReadBytes() as reads:
        error_message(CONTAINER, path)
    assert reads.bytes < 10_000


VALID = encode_map(
    a=ENCODED,
    b=encode_map(c=encode_array(np.arange(5)), d=b"\x05", e=encode_array(np.ones((), np.float16), code=3)),
    f=encode_map(
        **{
            CHUNKED_KEY: b"\xc3",
            "shape": encode_map(**{"0": b"\x04"}),
            "chunks": encode_map(**{"0": ENCODED, "1": ENCODED}),
        }
    ),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, len(VALID) - 1), byte=st.integers(0, 255), length=st.integers(0, len(VALID)))
def test_a_file_with_changed_bytes_is_refused_or_read_with_its_shapes(tmp_path, place, byte, length):
    for number, data in enumerate([VALID[:place] + bytes([byte]) + VALID[place + 1 :], VALID[:length]]):
        (tmp_path / f"{number}.msgpack").write_bytes(data)
        assert_read_or_refused(CONTAINER, tmp_path / f"{number}.msgpack")


# Recognition ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 15, 16, 70_000])
def test_maps_with_string_keys_are_recognised(tmp_path, count):
    assert CONTAINER.recognises(tmp_path / "a", tokens.map_header(count) + tokens.encode_text("a"))


def test_indexes_are_recognised(tmp_path):
    write_shards(tmp_path)
    index = tmp_path / "flax_model.msgpack.index.json"
    assert CONTAINER.recognises(index, index.read_bytes())


@pytest.mark.parametrize("head", [b"", b"PK\3\4", b"\x80\x02}q\x00.", b"\x89HDF", b"\x93NUMPY", b"\x81"])
def test_other_files_are_not_recognised(tmp_path, head):
    assert not CONTAINER.recognises(tmp_path / "a", head)
    assert not CONTAINER.recognises(tmp_path, b"")
