"""npz: as numpy reads and writes it, lazily whether compressed or not, without pickles, and damaged files are named."""

import io
import os
import struct
import zipfile

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parity.checkpoints.containers.container import Slot, Span
from parity.checkpoints.containers.npz import CONTAINER
from tests.container_cases import DTYPES, CountedReads, draw, read, refusal, same_bits, slots, survives, write
from vit_spec import InputError

SAVERS = {"stored": np.savez, "compressed": np.savez_compressed}
savers = pytest.mark.parametrize("save", SAVERS.values(), ids=SAVERS)


def npy(descr="'<f4'", fortran="False", shape="(2,)", data=bytes(8), version=1):
    """The bytes of a .npy file."""
    text = f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}".encode() + b"\n"
    return b"\x93NUMPY" + bytes([version, 0]) + len(text).to_bytes(2 if version == 1 else 4, "little") + text + data


def archive(path, members, method=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", method) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return path


# There and back -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_written_numpy_reads_without_pickles(tmp_path, dtype):
    arrays = {key: array for key, array in draw().items() if key.endswith(f"/{dtype}")}
    with np.load(write(CONTAINER, tmp_path / "a.npz", arrays), allow_pickle=False) as file:
        found = {key: file[key] for key in file}
    if dtype == "bfloat16":  # numpy knows none: two bytes of anything, as big_vision writes it
        assert all(array.dtype.str == "|V2" for array in found.values())
        found = {key: array.view(ml_dtypes.bfloat16) for key, array in found.items()}
    assert same_bits(found, arrays)


@savers
def test_what_numpy_writes_is_read(tmp_path, save):
    arrays = draw()
    save(tmp_path / "a.npz", **arrays)
    assert same_bits(read(CONTAINER.open(tmp_path / "a.npz")), arrays)


@savers
@pytest.mark.parametrize("dtype", [">f4", ">i8", ">u2", ">f8"])
def test_big_endian_arrays_are_turned(tmp_path, save, dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    save(tmp_path / "a.npz", a=array)
    found = read(CONTAINER.open(tmp_path / "a.npz"))["a"]
    assert found.dtype.str == dtype.replace(">", "<") and (found == array).all()


@savers
def test_arrays_in_fortran_order_are_turned(tmp_path, save):
    array = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    save(tmp_path / "a.npz", a=np.asfortranarray(array), b=array.T, c=np.asfortranarray(array[:1, :1]))
    assert same_bits(read(CONTAINER.open(tmp_path / "a.npz")), {"a": array, "b": array.T, "c": array[:1, :1]})


@savers
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_is_read_in_pieces_in_any_order(tmp_path, save, order):
    array = np.random.default_rng(0).standard_normal((1000, 30))
    save(tmp_path / "a.npz", a=array.copy(order))
    stored = CONTAINER.open(tmp_path / "a.npz").arrays[("a",)]
    for first, last in [(0, 7), (7, 20_000), (29_990, 30_000), (5, 6), (5, 5), (0, 30_000)]:
        assert (stored.read(first, last) == array.reshape(-1)[first:last]).all()


def test_keys_keep_their_slashes(tmp_path):
    contents = CONTAINER.open(write(CONTAINER, tmp_path / "a.npz", {"a/b/c": np.ones(1)}))
    assert list(contents.arrays) == [("a/b/c",)]


def test_notes_are_plain_text_to_numpy_and_come_back(tmp_path):
    notes = {"config": '{"größe": 1}', "format": "", "steps/taken": "3"}
    path = write(CONTAINER, tmp_path / "a.npz", {"a": np.ones(2)}, notes)
    with np.load(path, allow_pickle=False) as file:
        assert str(file["__metadata__/config"]) == notes["config"]
    assert CONTAINER.open(path).notes == notes


@savers
def test_numbers_are_arrays_and_text_is_a_note(tmp_path, save):
    save(tmp_path / "a.npz", t=np.float64(0.5), step=np.int64(3), name=np.array("ViT-Ω"), raw=np.array(b"ViT"))
    contents = CONTAINER.open(tmp_path / "a.npz")
    assert same_bits(read(contents), {"t": np.array(0.5), "step": np.array(3)})
    assert contents.notes == {"name": "ViT-Ω", "raw": "ViT"}


def test_the_same_arrays_give_the_same_file(tmp_path):
    a, b = (write(CONTAINER, tmp_path / name, draw()).read_bytes() for name in ("a.npz", "b.npz"))
    assert a == b


def test_headers_are_padded_as_numpy_pads_them(tmp_path):
    path = write(CONTAINER, tmp_path / "a.npz", draw())
    with zipfile.ZipFile(path) as file:
        assert all((info.file_size - draw()[info.filename[:-4]].nbytes) % 64 == 0 for info in file.infolist())


def test_arrays_are_put_in_their_order(tmp_path):
    arrays = {"a": np.ones(2), "b": np.ones(2)}
    with pytest.raises(ValueError, match="0 of the 16 bytes of a were put"):
        with CONTAINER.create(tmp_path / "a.npz", slots(arrays), {}) as sink:
            sink.put("b", 0, arrays["b"])


def test_a_failure_while_writing_is_the_one_that_is_seen(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        with CONTAINER.create(tmp_path / "a.npz", {"a": Slot((2,), np.dtype("f4"))}, {}) as sink:
            sink.put("a", 0, np.ones(1, np.float32))
            raise KeyboardInterrupt


@pytest.mark.parametrize("dtype", [np.complex64, ml_dtypes.float8_e5m2, ">f4"])
def test_a_dtype_that_would_not_come_back_is_refused(tmp_path, dtype):
    with pytest.raises(InputError, match="which npz has no word for"):
        write(CONTAINER, tmp_path / "a.npz", {"a": np.ones(2).astype(dtype)})


def test_a_key_that_is_a_note_is_refused(tmp_path):
    with pytest.raises(InputError, match="'__metadata__/a' is no key for an array"):
        write(CONTAINER, tmp_path / "a.npz", {"__metadata__/a": np.ones(2)})


# Lazily ---------------------------------------------------------------------------------------------------------------


def test_headers_alone_are_read(tmp_path):
    array = np.random.default_rng(0).integers(0, 256, 2**22, np.uint8)  # which does not compress
    np.savez(tmp_path / "stored.npz", a=array, b=array)
    np.savez_compressed(tmp_path / "compressed.npz", a=array, b=array)
    with CountedReads() as reads:
        for name in ("stored", "compressed"):
            assert CONTAINER.open(tmp_path / f"{name}.npz").arrays[("b",)].shape == (2**22,)
    assert reads.bytes < 200_000


def test_a_file_of_many_gigabytes_opens(tmp_path):
    path = huge(tmp_path / "a.npz", 88 * 2**30)
    with CountedReads() as reads:
        array = CONTAINER.open(path).arrays[("a",)]
        assert isinstance(array, Span) and array.read(array.size - 2, array.size).tolist() == [0, 0]
    assert reads.bytes < 200_000


def huge(path, nbytes):
    """A zip of one array that is a hole."""
    data, name = npy(shape=f"({nbytes // 4},)", data=b""), b"a.npy"
    sizes = struct.pack("<HHQQ", 1, 16, len(data) + nbytes, len(data) + nbytes)
    common = struct.pack("<HHHHHIII", 45, 0, 0, 0, 33, 0, 2**32 - 1, 2**32 - 1)
    local = b"PK\3\4" + common + struct.pack("<HH", len(name), len(sizes)) + name + sizes
    central = b"PK\1\2" + struct.pack("<H", 45) + common + struct.pack("<HHHHHII", len(name), len(sizes), 0, 0, 0, 0, 0)
    central += name + sizes
    end = len(local) + len(data) + nbytes
    tail = b"PK\6\6" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, 1, 1, len(central), end)
    tail += b"PK\6\7" + struct.pack("<IQI", 0, end + len(central), 1)
    tail += b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 1, 1, len(central), 2**32 - 1, 0)
    with open(path, "wb") as file:
        file.write(local + data)
        file.seek(end)
        file.write(central + tail)
    return path


# What is refused ------------------------------------------------------------------------------------------------------

GOOD = npy()
MEMBERS = {
    "a pickle": npy("'|O'", data=b"\x80\x04."),
    "several fields": npy("[('a', '<f4'), ('b', '<f4')]"),
    "bytes of anything": npy("'|V4'"),
    "complex numbers": npy("'<c8'", shape="(1,)"),
    "dates": npy("'<M8[s]'", shape="(1,)"),
    "several texts": npy("'<U1'"),
    "text that is not Unicode": npy("'<U2'", shape="()", data=b"\xff" * 8),
    "a dtype that is none": npy("'<f5'"),
    "more bytes than the shape": npy(data=bytes(9)),
    "fewer bytes than the shape": npy(data=bytes(7)),
    "a shape larger than the file": npy(shape="(1000000000000,)"),
    "a shape too large for 64 bits": npy(shape="(4611686018427387904, 4611686018427387904)"),
    "an empty array of impossible shape": npy(shape="(0, 4611686018427387904, 4611686018427387904)", data=b""),
    "a negative length": npy(shape="(-2,)"),
    "a length that is none": npy(shape="(2, 1 1)"),
    "too many dimensions": npy(shape=f"({'1, ' * 65})", data=bytes(4)),
    "a shape that is a number": npy(shape="2"),
    "an order that is none": npy(fortran="None"),
    "a field twice": npy(shape="(2,), 'shape': (2,)"),
    "an expression": npy(shape="(2,) * 1"),
    "an unknown version": npy(version=9),
    "no header": b"\x93NUMPY",
    "no .npy": b"hello, world",
    "nothing": b"",
    "a header without end": npy(shape=f"({' ' * 20_000})", data=b""),
}


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=SAVERS)
@pytest.mark.parametrize("member", MEMBERS)
def test_a_member_that_is_no_array_is_named(tmp_path, member, method):
    path = archive(tmp_path / "a.npz", {"good.npy": GOOD, "bad.npy": MEMBERS[member]}, method)
    assert "'bad': " in refusal(CONTAINER, path)


@pytest.mark.parametrize(
    ("content", "what"),
    [(npy("'|O'", shape="()", data=b"\x80\x04."), "or a pickle"), (GOOD, "is one array without a name")],
    ids=["pickle", "array"],
)
def test_a_plain_npy_file_says_what_to_do(tmp_path, content, what):
    (tmp_path / "a.npy").write_bytes(content)
    assert what in refusal(CONTAINER, tmp_path / "a.npy")


@pytest.mark.parametrize("names", [["a.txt"], ["a.npy", "a.npy"], ["a/"], ["a\0.npy"], ["version"]], ids=str)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_zip_that_holds_something_else_is_refused(tmp_path, names):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name in names:
            file.writestr(name.replace("\0", "%"), GOOD)
    (tmp_path / "a.npz").write_bytes(buffer.getvalue().replace(b"a%", b"a\0"))
    refusal(CONTAINER, tmp_path / "a.npz")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_what_numpy_does_not_compress_with_is_refused(tmp_path, method):
    assert "compressed in a way" in refusal(CONTAINER, archive(tmp_path / "a.npz", {"a.npy": GOOD}, method))


def central(data, offset, form, value):
    """Change a field in the only entry of a zip's directory."""
    changed = bytearray(data)
    struct.pack_into(form, changed, data.index(b"PK\1\2") + offset, value)
    return bytes(changed)


ONE = archive(io.BytesIO(), {"a.npy": GOOD}).getvalue()
TWO = archive(io.BytesIO(), {"a.npy": GOOD, "b.npy": GOOD}).getvalue()
PACKED = archive(io.BytesIO(), {"a.npy": npy(shape="(1000,)", data=bytes(4000))}, zipfile.ZIP_DEFLATED).getvalue()
DAMAGED = {
    "encrypted": central(ONE, 8, "<H", 1),
    "two sizes": central(ONE, 20, "<I", 5),
    "over the next": central(central(TWO, 20, "<I", len(GOOD) + 1), 24, "<I", len(GOOD) + 1),
    "not where it should be": central(ONE, 42, "<I", 1),
    "beyond the end": central(ONE, 42, "<I", 10**6),
    "a wrong checksum": central(ONE, 16, "<I", 1),
    "a wrong checksum of compressed bytes": central(PACKED, 16, "<I", 1),
    "fewer bytes than are compressed": central(PACKED, 24, "<I", 4000),
    "more bytes than are compressed": central(PACKED, 24, "<I", 5000),
    "more bytes than can be compressed": central(PACKED, 24, "<I", 2**31),
    "compressed bytes cut short": central(PACKED, 20, "<I", 40),
    "another name": ONE.replace(b"a.npy", b"b.npy", 1),
    "no directory": ONE[:-30],
    "nothing but an end": b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 1, 1, 2**31, 0, 0),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_zip_is_named(tmp_path, damage):
    (tmp_path / "a.npz").write_bytes(DAMAGED[damage])
    refusal(CONTAINER, tmp_path / "a.npz")


def test_a_bomb_is_not_decompressed_further_than_its_header_says(tmp_path):
    bomb = npy(shape="(1000,)", data=bytes(2**24))  # 16 MiB of zeros, said to be 4000 bytes in both places
    said = len(npy(shape="(1000,)", data=bytes(4000)))
    path = archive(tmp_path / "a.npz", {"a.npy": bomb}, zipfile.ZIP_DEFLATED)
    path.write_bytes(central(path.read_bytes(), 24, "<I", said))
    assert "its checksum or its length is wrong" in refusal(CONTAINER, path)


def test_a_flipped_bit_is_found_when_the_array_is_read_in_pieces(tmp_path):
    path = write(CONTAINER, tmp_path / "a.npz", {"a": np.zeros(1000, np.uint8)})
    place = CONTAINER.open(path).arrays[("a",)].offset + 10
    with open(path, "r+b") as file:
        os.pwrite(file.fileno(), b"\1", place)
    array = CONTAINER.open(path).arrays[("a",)]
    array.read(0, 500)
    with pytest.raises(InputError, match=r"a\.npz is damaged \(a checksum is wrong\)"):
        array.read(500, 1000)


VALID = {}
for name, save in SAVERS.items():
    save(buffer := io.BytesIO(), a=np.arange(300.0), b=np.array("note"), c=np.asfortranarray(np.ones((3, 4), ">f4")))
    VALID[name] = buffer.getvalue()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(list(VALID)), place=st.floats(0, 0.999), byte=st.integers(0, 255), length=st.floats(0, 1))
def test_any_damage_gives_arrays_or_the_one_error(tmp_path, name, place, byte, length):
    data = VALID[name]
    at = int(place * len(data))
    for number, damaged in enumerate([data[:at] + bytes([byte]) + data[at + 1 :], data[: int(length * len(data))]]):
        (tmp_path / f"{number}.npz").write_bytes(damaged)
        survives(CONTAINER, tmp_path / f"{number}.npz")


# Recognising ----------------------------------------------------------------------------------------------------------


def test_zips_of_arrays_and_plain_arrays_are_recognised(tmp_path):
    for data in (ONE, GOOD):
        assert CONTAINER.recognises(tmp_path / "a", data[:4096])


TORCH = archive(io.BytesIO(), {"model/data.pkl": b""}).getvalue()


@pytest.mark.parametrize("head", [b"", TORCH, b"\x80\x02}q\x00."], ids=["nothing", "torch", "pickle"])
def test_other_files_are_not(tmp_path, head):
    assert not CONTAINER.recognises(tmp_path / "a", head)
