"""msgpack: as Flax reads and writes it, lazily, cut or in shards, and damaged files are named."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parity.checkpoints.containers import msgpack, shards
from parity.checkpoints.containers import msgpack_tokens as tokens
from parity.checkpoints.containers.container import Slot
from parity.checkpoints.containers.msgpack import CONTAINER
from tests.container_cases import CountedReads, draw, read, refusal, same_bits, sparse, survives, write
from vit_spec import InputError


def serialization():
    return pytest.importorskip("flax.serialization")


def nested(arrays):
    tree = {}
    for key, array in sorted(arrays.items()):  # as flax sorts them
        *parents, leaf = key.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = array
    return tree


def flat(tree, path=()):
    if not isinstance(tree, dict):
        return {"/".join(path): tree}
    return {key: leaf for name, value in tree.items() for key, leaf in flat(value, (*path, name)).items()}


def encoded(array, code=1, *, shape=None, dtype=None, data=None):
    """An array in an extension."""
    shape = tokens.array_of(array.ndim) + b"".join(map(tokens.integer, array.shape)) if shape is None else shape
    data = array.tobytes() if data is None else data
    text = tokens.array_of(3) + shape + tokens.text(dtype or array.dtype.name) + tokens.bytes_of(len(data)) + data
    return tokens.extension_of(code, len(text)) + text


def named(**values):
    return tokens.map_of(len(values)) + b"".join(tokens.text(key) + value for key, value in values.items())


# There and back -------------------------------------------------------------------------------------------------------


def test_what_is_written_flax_reads(tmp_path):
    arrays = draw()
    data = write(CONTAINER, tmp_path / "a.msgpack", arrays, {"config": "{}"}).read_bytes()
    assert same_bits(flat(serialization().msgpack_restore(data)), arrays)


def test_what_flax_writes_is_read(tmp_path):
    arrays = draw()
    (tmp_path / "a.msgpack").write_bytes(serialization().msgpack_serialize(nested(arrays)))
    assert same_bits(read(CONTAINER.open(tmp_path / "a.msgpack")), arrays)


def test_the_bytes_are_those_of_flax(tmp_path):
    arrays = {key: draw()[key] for key in sorted(draw())} | {"x" * n: np.ones(n, np.int8) for n in (31, 70, 300, 70_000)}
    arrays |= {f"y/{n:02}": np.ones((1, 200), np.float16) for n in range(20)}
    data = write(CONTAINER, tmp_path / "a.msgpack", arrays).read_bytes()
    assert data == serialization().msgpack_serialize(nested(arrays))


def test_a_flax_target_is_restored(tmp_path):
    arrays = draw()
    data = write(CONTAINER, tmp_path / "a.msgpack", arrays, {"config": "{}"}).read_bytes()
    assert same_bits(flat(serialization().from_bytes(nested(arrays), data)), arrays)


def test_paths_are_words(tmp_path):
    contents = CONTAINER.open(write(CONTAINER, tmp_path / "a.msgpack", {"a/b/c": np.ones(1), "d": np.ones(1)}))
    assert list(contents.arrays) == [("a", "b", "c"), ("d",)]


def test_numbers_and_text_are_notes(tmp_path):
    notes = {"step": 2**40, "minus": -3, "rate": 0.5, "name": "ViT-Ω", "on": True, "nothing": None, "root": 1 + 2j}
    tree = {"a": np.ones(2), "state": {**notes, "half": np.float16(0.5), "brain": ml_dtypes.bfloat16(1.5)}, "empty": {}}
    (tmp_path / "a.msgpack").write_bytes(serialization().msgpack_serialize(tree))
    contents = CONTAINER.open(tmp_path / "a.msgpack")
    assert list(contents.arrays) == [("a",)]
    assert contents.notes == {f"state/{key}": value for key, value in notes.items()} | {
        "state/half": 0.5,
        "state/brain": 1.5,
    }


@pytest.fixture
def small_parts(monkeypatch):
    """Arrays of more than 64 bytes are cut, here and in flax."""
    monkeypatch.setattr(serialization(), "MAX_CHUNK_SIZE", 64)
    monkeypatch.setattr(msgpack, "_PART", 64)


def test_large_arrays_are_cut_as_flax_cuts_them(tmp_path, small_parts):
    arrays = {"a/b": np.arange(200.0).reshape(10, 20), "a/c": np.arange(8.0), "d": np.arange(33, dtype=np.int16)}
    data = write(CONTAINER, tmp_path / "a.msgpack", arrays).read_bytes()
    assert data == serialization().msgpack_serialize(nested(arrays))
    assert same_bits(flat(serialization().msgpack_restore(data)), arrays)
    assert same_bits(read(CONTAINER.open(tmp_path / "a.msgpack")), arrays)


def test_a_cut_array_is_read_in_pieces(tmp_path, small_parts):
    array = np.arange(200.0)
    stored = CONTAINER.open(write(CONTAINER, tmp_path / "a.msgpack", {"a": array})).arrays[("a",)]
    for first, last in [(0, 8), (7, 9), (8, 16), (3, 197), (200, 200)]:
        assert (stored.read(first, last) == array[first:last]).all()


def test_an_array_is_cut_above_a_gibibyte():
    layout = msgpack._Layout()
    slots = {"whole": Slot((2**28,), np.dtype("f4")), "cut": Slot((2**15, 2**13 + 1), np.dtype("f4"))}
    layout.map({key: (key, slot) for key, slot in slots.items()})
    assert len(layout.places["whole"].offsets) == 1
    assert len(layout.places["cut"].offsets) == 2 and layout.places["cut"].entries == 2**28


@pytest.mark.parametrize("keys", [("a", "a/b"), ("a/b", "a"), ("a/b", "a/b/c")])
def test_a_key_that_is_both_array_and_map_is_refused(tmp_path, keys):
    with pytest.raises(InputError, match="is both an array and a map of arrays"):
        write(CONTAINER, tmp_path / "a.msgpack", {key: np.ones(1) for key in keys})


@pytest.mark.parametrize("dtype", [np.complex64, ml_dtypes.float8_e5m2, ">f4"])
def test_a_dtype_that_flax_does_not_read_is_refused(tmp_path, dtype):
    with pytest.raises(InputError, match="which flax does not read"):
        write(CONTAINER, tmp_path / "a.msgpack", {"a": np.ones(2).astype(dtype)})


# Lazily ---------------------------------------------------------------------------------------------------------------


def test_headers_alone_are_read(tmp_path):
    part = 3 * 2**30
    header = tokens.array_of(3) + b"\x91" + tokens.integer(part) + tokens.text("uint8") + tokens.bytes_of(part)
    extension = tokens.extension_of(1, len(header) + part) + header
    path = tmp_path / "a.msgpack"
    with open(path, "wb") as file:
        file.write(tokens.map_of(30))
        for number in range(30):
            file.write(tokens.text(str(number)) + extension)
            file.seek(part, os.SEEK_CUR)
        file.truncate()
    with CountedReads() as reads:
        array = CONTAINER.open(path).arrays[("29",)]
        assert array.read(part - 2, part).tolist() == [0, 0]
    assert path.stat().st_size > 88 * 2**30 and reads.bytes < 100_000


# Shards ---------------------------------------------------------------------------------------------------------------


def shard(folder, joint="/", nest=nested):
    """Two shards as transformers 4 writes them, and their arrays."""
    arrays = {"vit/a/kernel": np.ones((2, 3), np.float32), "vit/b/bias": np.zeros(2, np.float16)}
    places = {}
    for number, (key, array) in enumerate(arrays.items(), 1):
        name = f"flax_model-0000{number}-of-00002.msgpack"
        (folder / name).write_bytes(serialization().to_bytes(nest({key: array})))
        places[key.replace("/", joint)] = name
    (folder / f"flax_model.msgpack{shards.INDEX}").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return arrays


@pytest.mark.parametrize("joint", ["/", "."])
def test_shards_are_read_by_folder_and_by_index(tmp_path, joint):
    arrays = shard(tmp_path, joint)
    for path in (tmp_path, tmp_path / "flax_model.msgpack.index.json"):
        contents = CONTAINER.open(path)
        assert same_bits(read(contents), arrays) and ("vit", "a", "kernel") in contents.arrays


def test_shards_whose_keys_are_joined_are_read_alike(tmp_path):
    arrays = shard(tmp_path, nest=dict)
    assert same_bits(read(CONTAINER.open(tmp_path)), arrays)
    assert ("vit", "a", "kernel") in CONTAINER.open(tmp_path).arrays


@pytest.mark.parametrize("name", ["../a.msgpack", "/etc/a.msgpack", "a.bin"])
def test_a_shard_elsewhere_is_refused(tmp_path, name):
    (tmp_path / "a.msgpack.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert "a shard is a *.msgpack file beside its index" in refusal(CONTAINER, tmp_path)


def test_a_shard_that_holds_an_array_twice_is_refused(tmp_path):
    shard(tmp_path, nest=lambda arrays: {**arrays, **nested(arrays)})
    assert "holds an array twice" in refusal(CONTAINER, tmp_path)


def test_an_array_that_is_not_in_its_shard_is_named(tmp_path):
    shard(tmp_path)
    (tmp_path / "flax_model-00002-of-00002.msgpack").write_bytes(serialization().to_bytes({}))
    assert "holds 'vit/b/bias', which it does not" in refusal(CONTAINER, tmp_path)


# What is refused ------------------------------------------------------------------------------------------------------

ONE = np.ones(2, np.float32)
GOOD = encoded(ONE)
CUT = "__msgpack_chunked_array__"


def cut(flag=b"\xc3", shape=None, chunks=None):
    """A file of one array in parts, by default a whole one."""
    shape, chunks = shape or {"0": b"\2"}, {"0": GOOD} if chunks is None else chunks
    return named(a=named(**{CUT: flag, "shape": named(**shape), "chunks": named(**chunks)}))


DAMAGED = {
    "nothing": b"",
    "an array without a name": GOOD,
    "a number": b"\x01",
    "a byte that begins no word": named(a=b"\xc1"),
    "bytes after the end": named(a=GOOD) + b"\0",
    "a key twice": tokens.map_of(2) + 2 * (tokens.text("a") + GOOD),
    "a key that is a number": tokens.map_of(1) + b"\x01" + GOOD,
    "a key that is not UTF-8": tokens.map_of(1) + b"\xa1\xff" + GOOD,
    "a key that is too long": named(**{"a" * 5000: GOOD}),
    "more entries than bytes": b"\xdf\xff\xff\xff\xff" + bytes(100),
    "more text than bytes": named(a=b"\xdb\xff\xff\xff\xff"),
    "more array than bytes": named(a=b"\xc9\xff\xff\xff\xff\x01\x93"),
    "maps without end": (tokens.map_of(1) + tokens.text("a")) * 5000 + GOOD,
    "a list": named(a=b"\x91\x01"),
    "bytes": named(a=b"\xc4\x01x"),
    "an unknown extension": named(a=encoded(ONE, code=9)),
    "a scalar of several entries": named(a=encoded(ONE, code=3)),
    "a complex number of one": named(a=b"\xd7\x02\x91" + bytes(7)),
    "no bytes": named(a=b"\xd4\x01\x93"),
    "an unknown dtype": named(a=encoded(ONE, dtype="float31")),
    "an object dtype": named(a=encoded(ONE, dtype="object")),
    "fewer bytes than the shape": named(a=encoded(ONE, data=bytes(7))),
    "more bytes than the shape": named(a=encoded(ONE, data=bytes(9))),
    "a negative length": named(a=encoded(ONE, shape=b"\x91\xff")),
    "a length that is text": named(a=encoded(ONE, shape=b"\x91\xa1x")),
    "a length that is true": named(a=encoded(ONE[:1], shape=b"\x91\xc3")),
    "a shape too large for 64 bits": named(a=encoded(ONE, shape=b"\x92" + 2 * tokens.integer(2**62))),
    "an empty array of impossible shape": named(a=encoded(ONE, shape=b"\x93\0" + 2 * tokens.integer(2**62), data=b"")),
    "too many dimensions": named(a=encoded(ONE, shape=tokens.array_of(65) + b"\1" * 65, data=bytes(4))),
    "an array longer than its extension": named(a=b"\xd6" + GOOD[1:], b=GOOD),
    "a path twice": tokens.map_of(2) + tokens.text("a/b") + b"\x01" + tokens.text("a") + named(b=b"\x01"),
    "a cut array of no parts": cut(shape={"0": b"\0"}, chunks={}),
    "a cut array that is not": cut(flag=b"\xc2"),
    "a cut array of another shape": cut(shape={"0": b"\x03"}),
    "a cut array of other numbers": cut(chunks={"1": GOOD}),
    "a cut array of two dtypes": cut(shape={"0": b"\4"}, chunks={"0": GOOD, "1": encoded(ONE.view(np.int32))}),
    "a cut array of a map": cut(chunks={"0": named()}),
    "a cut array of something more": named(a=named(b=GOOD, **{CUT: b"\xc3"})),
}


def test_the_cut_array_that_the_damaged_ones_vary_is_read(tmp_path):
    (tmp_path / "a.msgpack").write_bytes(cut())
    assert same_bits(read(CONTAINER.open(tmp_path / "a.msgpack")), {"a": ONE})


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_named(tmp_path, damage):
    (tmp_path / "a.msgpack").write_bytes(DAMAGED[damage])
    assert "is not a Flax msgpack file, or is damaged" in refusal(CONTAINER, tmp_path / "a.msgpack")


def test_a_file_of_very_many_entries_is_refused_early(tmp_path):
    path = sparse(tmp_path / "a.msgpack", b"\xdf" + (2**30).to_bytes(4, "big") + b"\xa1a\x01", 2**33)
    with CountedReads() as reads:
        refusal(CONTAINER, path)
    assert reads.bytes < 10_000


VALID = named(
    a=GOOD,
    b=named(c=encoded(np.arange(5)), d=b"\x05", e=encoded(np.ones((), np.float16), code=3)),
    f=named(**{CUT: b"\xc3", "shape": named(**{"0": b"\x04"}), "chunks": named(**{"0": GOOD, "1": GOOD})}),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, len(VALID) - 1), byte=st.integers(0, 255), length=st.integers(0, len(VALID)))
def test_any_damage_gives_arrays_or_the_one_error(tmp_path, place, byte, length):
    for number, data in enumerate([VALID[:place] + bytes([byte]) + VALID[place + 1 :], VALID[:length]]):
        (tmp_path / f"{number}.msgpack").write_bytes(data)
        survives(CONTAINER, tmp_path / f"{number}.msgpack")


# Recognising ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 15, 16, 70_000])
def test_maps_by_name_are_recognised(tmp_path, count):
    assert CONTAINER.recognises(tmp_path / "a", tokens.map_of(count) + tokens.text("a"))


def test_indexes_and_folders_are_recognised(tmp_path):
    shard(tmp_path)
    index = tmp_path / "flax_model.msgpack.index.json"
    assert CONTAINER.recognises(index, index.read_bytes()) and CONTAINER.recognises(tmp_path, b"")


@pytest.mark.parametrize("head", [b"", b"PK\3\4", b"\x80\x02}q\x00.", b"\x89HDF", b"\x93NUMPY", b"\x81"])
def test_other_files_are_not(tmp_path, head):
    assert not CONTAINER.recognises(tmp_path / "a", head)
    assert not CONTAINER.recognises(tmp_path, b"")
