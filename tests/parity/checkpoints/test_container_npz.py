"""The npz container: exchange with NumPy, lazy reading even of compressed files, refusal of pickles and damaged files."""

import io
import os
import struct
import zipfile

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parity.checkpoints.containers.container import ArraySpec, ContiguousArray
from parity.checkpoints.containers.npz import CONTAINER
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
)
from vit_spec import InputError

SAVERS = {"stored": np.savez, "compressed": np.savez_compressed}
with_both_savers = pytest.mark.parametrize("save", SAVERS.values(), ids=SAVERS)


def encode_npy(descr="'<f4'", fortran="False", shape="(2,)", data=bytes(8), version=1):
    """Return the bytes of a .npy file with the given fields of the header, valid or not."""
    text = f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}".encode() + b"\n"
    return b"\x93NUMPY" + bytes([version, 0]) + len(text).to_bytes(2 if version == 1 else 4, "little") + text + data


def write_zip(path, members, method=zipfile.ZIP_STORED):
    """Write a zip to a path or an open file, and return the path or the file."""
    with zipfile.ZipFile(path, "w", method) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return path


# Round trips ----------------------------------------------------------------------------------------------------------


def test_numpy_reads_written_arrays_of_every_dtype_without_pickles(tmp_path):
    arrays = random_arrays()
    with np.load(write_arrays(CONTAINER, tmp_path / "a.npz", arrays), allow_pickle=False) as file:
        found = {key: file[key] for key in file}
    for key in found:
        if key.endswith("/bfloat16"):  # NumPy does not know the dtype; big_vision too stores it as two untyped bytes
            assert found[key].dtype.str == "|V2"
            found[key] = found[key].view(ml_dtypes.bfloat16)
    assert found.keys() == arrays.keys()
    assert not [key for key in arrays if not have_same_bits({key: found[key]}, {key: arrays[key]})]


@with_both_savers
def test_files_of_numpy_are_read(tmp_path, save):
    arrays = random_arrays()
    save(tmp_path / "a.npz", **arrays)
    assert have_same_bits(read_all(CONTAINER.open(tmp_path / "a.npz")), arrays)


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_complex_numbers_are_read(tmp_path, dtype):
    arrays = {"a": np.array([[1 + 2j, 3 - 4j]], dtype)}
    np.savez(tmp_path / "a.npz", **arrays)
    assert have_same_bits(read_all(CONTAINER.open(tmp_path / "a.npz")), arrays)


@with_both_savers
@pytest.mark.parametrize("dtype", [">f4", ">i8", ">u2", ">f8", ">c8"])
def test_big_endian_arrays_are_converted(tmp_path, save, dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    save(tmp_path / "a.npz", a=array)
    found = read_all(CONTAINER.open(tmp_path / "a.npz"))["a"]
    assert found.dtype.str == dtype.replace(">", "<") and (found == array).all()


@with_both_savers
def test_arrays_in_fortran_order_are_converted(tmp_path, save):
    array = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    save(tmp_path / "a.npz", a=np.asfortranarray(array), b=array.T, c=np.asfortranarray(array[:1, :1]))
    assert have_same_bits(read_all(CONTAINER.open(tmp_path / "a.npz")), {"a": array, "b": array.T, "c": array[:1, :1]})


@with_both_savers
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_is_read_in_pieces_in_any_order(tmp_path, save, order):
    array = np.random.default_rng(0).standard_normal((1000, 30))
    save(tmp_path / "a.npz", a=array.copy(order))
    stored = CONTAINER.open(tmp_path / "a.npz").arrays[("a",)]
    for first, last in [(0, 7), (7, 20_000), (29_990, 30_000), (5, 6), (5, 5), (0, 30_000)]:
        assert (stored.read(first, last) == array.reshape(-1)[first:last]).all()


def test_keys_are_not_split_at_slashes(tmp_path):
    contents = CONTAINER.open(write_arrays(CONTAINER, tmp_path / "a.npz", {"a/b/c": np.ones(1)}))
    assert list(contents.arrays) == [("a/b/c",)]


def test_metadata_is_stored_as_strings_of_numpy_and_read_back(tmp_path):
    metadata = {"config": '{"größe": 1}', "format": "", "steps/taken": "3"}
    path = write_arrays(CONTAINER, tmp_path / "a.npz", {"a": np.ones(2)}, metadata)
    with np.load(path, allow_pickle=False) as file:
        assert str(file["__metadata__/config"]) == metadata["config"]
    assert CONTAINER.open(path).metadata == metadata


@with_both_savers
def test_numbers_are_arrays_and_text_is_metadata(tmp_path, save):
    save(tmp_path / "a.npz", t=np.float64(0.5), step=np.int64(3), name=np.array("ViT-Ω"), raw=np.array(b"ViT"))
    contents = CONTAINER.open(tmp_path / "a.npz")
    assert have_same_bits(read_all(contents), {"t": np.array(0.5), "step": np.array(3)})
    assert contents.metadata == {"name": "ViT-Ω", "raw": "ViT"}


def test_the_same_arrays_give_the_same_file(tmp_path):
    a, b = (write_arrays(CONTAINER, tmp_path / name, random_arrays()).read_bytes() for name in ("a.npz", "b.npz"))
    assert a == b


def test_headers_are_padded_as_numpy_pads_them(tmp_path):
    path = write_arrays(CONTAINER, tmp_path / "a.npz", random_arrays())
    with zipfile.ZipFile(path) as file:
        assert all((info.file_size - random_arrays()[info.filename[:-4]].nbytes) % 64 == 0 for info in file.infolist())


def test_writing_arrays_out_of_order_is_an_error(tmp_path):
    arrays = {"a": np.ones(2), "b": np.ones(2)}
    with pytest.raises(ValueError, match="0 of the 16 bytes of a were written"):
        with CONTAINER.create(tmp_path / "a.npz", specs_of(arrays), {}) as writer:
            writer.write("b", 0, arrays["b"])


def test_an_exception_while_writing_is_not_replaced_by_another(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        with CONTAINER.create(tmp_path / "a.npz", {"a": ArraySpec((2,), np.dtype("f4"))}, {}) as writer:
            writer.write("a", 0, np.ones(1, np.float32))
            raise KeyboardInterrupt


@pytest.mark.parametrize("dtype", [np.clongdouble, ml_dtypes.float8_e5m2, ">f4"])
def test_a_dtype_that_npz_cannot_store_is_refused(tmp_path, dtype):
    with pytest.raises(InputError, match="which npz cannot store"):
        write_arrays(CONTAINER, tmp_path / "a.npz", {"a": np.ones(2).astype(dtype)})


def test_a_key_with_the_prefix_of_metadata_is_refused(tmp_path):
    with pytest.raises(InputError, match="'__metadata__/a' is not a valid key"):
        write_arrays(CONTAINER, tmp_path / "a.npz", {"__metadata__/a": np.ones(2)})


# Lazy reading ---------------------------------------------------------------------------------------------------------


def test_opening_reads_headers_only(tmp_path):
    array = np.random.default_rng(0).integers(0, 256, 2**22, np.uint8)  # random bytes do not compress
    np.savez(tmp_path / "stored.npz", a=array, b=array)
    np.savez_compressed(tmp_path / "compressed.npz", a=array, b=array)
    with CountReadBytes() as reads:
        for name in ("stored", "compressed"):
            assert CONTAINER.open(tmp_path / f"{name}.npz").arrays[("b",)].shape == (2**22,)
    assert reads.bytes < 200_000


def test_an_array_of_many_gigabytes_is_read_in_part(tmp_path):
    path = write_sparse_npz(tmp_path / "a.npz", 88 * 2**30)
    with CountReadBytes() as reads:
        array = CONTAINER.open(path).arrays[("a",)]
        assert isinstance(array, ContiguousArray) and array.read(array.size - 2, array.size).tolist() == [0, 0]
    assert reads.bytes < 200_000


def write_sparse_npz(path, nbytes):
    """Write a zip with one array of `nbytes` zero bytes, which are a hole in the file."""
    data, name = encode_npy(shape=f"({nbytes // 4},)", data=b""), b"a.npy"
    sizes = struct.pack("<HHQQ", 1, 16, len(data) + nbytes, len(data) + nbytes)
    common = struct.pack("<HHHHHIII", 45, 0, 0, 0, 33, 0, 2**32 - 1, 2**32 - 1)
    local = b"PK\3\4" + common + struct.pack("<HH", len(name), len(sizes)) + name + sizes
    entry = b"PK\1\2" + struct.pack("<H", 45) + common + struct.pack("<HHHHHII", len(name), len(sizes), 0, 0, 0, 0, 0)
    entry += name + sizes
    end = len(local) + len(data) + nbytes
    tail = b"PK\6\6" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, 1, 1, len(entry), end)
    tail += b"PK\6\7" + struct.pack("<IQI", 0, end + len(entry), 1)
    tail += b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 1, 1, len(entry), 2**32 - 1, 0)
    with open(path, "wb") as file:
        file.write(local + data)
        file.seek(end)
        file.write(entry + tail)
    return path


# Errors ---------------------------------------------------------------------------------------------------------------

VALID_NPY = encode_npy()
INVALID_MEMBERS = {
    "a pickle": encode_npy("'|O'", data=b"\x80\x04."),
    "several fields": encode_npy("[('a', '<f4'), ('b', '<f4')]"),
    "untyped bytes": encode_npy("'|V4'"),
    "dates": encode_npy("'<M8[s]'", shape="(1,)"),
    "an array of strings": encode_npy("'<U1'"),
    "text that is not Unicode": encode_npy("'<U2'", shape="()", data=b"\xff" * 8),
    "an unknown dtype": encode_npy("'<f5'"),
    "more bytes than the shape": encode_npy(data=bytes(9)),
    "fewer bytes than the shape": encode_npy(data=bytes(7)),
    "a shape larger than the file": encode_npy(shape="(1000000000000,)"),
    "a shape too large for 64 bits": encode_npy(shape="(4611686018427387904, 4611686018427387904)"),
    "an empty array of impossible shape": encode_npy(shape="(0, 4611686018427387904, 4611686018427387904)", data=b""),
    "a negative length": encode_npy(shape="(-2,)"),
    "an invalid length": encode_npy(shape="(2, 1 1)"),
    "too many dimensions": encode_npy(shape=f"({'1, ' * 65})", data=bytes(4)),
    "a shape that is a number": encode_npy(shape="2"),
    "an invalid fortran_order": encode_npy(fortran="None"),
    "a field twice": encode_npy(shape="(2,), 'shape': (2,)"),
    "an expression": encode_npy(shape="(2,) * 1"),
    "an unknown version": encode_npy(version=9),
    "no header": b"\x93NUMPY",
    "no .npy magic": b"hello, world",
    "an empty member": b"",
    "a header that is too long": encode_npy(shape=f"({' ' * 20_000})", data=b""),
}


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=SAVERS)
def test_invalid_members_are_named_in_the_error(tmp_path, method):
    files = {
        name: write_zip(io.BytesIO(), {"good.npy": VALID_NPY, "bad.npy": member}, method).getvalue()
        for name, member in INVALID_MEMBERS.items()
    }
    assert not find_wrong_refusals(CONTAINER, tmp_path / "a.npz", files, "'bad': ")


@pytest.mark.parametrize(
    ("content", "what"),
    [(encode_npy("'|O'", shape="()", data=b"\x80\x04."), "or a pickle"), (VALID_NPY, "is one array without a name")],
    ids=["pickle", "array"],
)
def test_a_plain_npy_file_is_refused_with_a_remedy(tmp_path, content, what):
    (tmp_path / "a.npy").write_bytes(content)
    assert what in error_message(CONTAINER, tmp_path / "a.npy")


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (["a.txt"], "('a.txt': not a .npy file)"),
        (["a.npy", "a.npy"], "(it has 'a.npy' twice)"),
        (["a/"], "('a/': not a .npy file)"),
        (["a\0.npy"], "('a\\x00.npy' is not a valid name of a member)"),
        (["version"], "('version': not a .npy file)"),
    ],
    ids=lambda given: str(given) if isinstance(given, list) else "",
)
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_zip_with_other_members_is_refused(tmp_path, names, what):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name in names:
            file.writestr(name.replace("\0", "%"), VALID_NPY)
    (tmp_path / "a.npz").write_bytes(buffer.getvalue().replace(b"a%", b"a\0"))
    assert what in error_message(CONTAINER, tmp_path / "a.npz")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_compression_methods_that_numpy_does_not_use_are_refused(tmp_path, method):
    assert "compressed in a way" in error_message(CONTAINER, write_zip(tmp_path / "a.npz", {"a.npy": VALID_NPY}, method))


def change_directory_entry(data, offset, form, value):
    """Change a field of the first entry in the directory of a zip."""
    changed = bytearray(data)
    struct.pack_into(form, changed, data.index(b"PK\1\2") + offset, value)
    return bytes(changed)


ONE_MEMBER = write_zip(io.BytesIO(), {"a.npy": VALID_NPY}).getvalue()
TWO_MEMBERS = write_zip(io.BytesIO(), {"a.npy": VALID_NPY, "b.npy": VALID_NPY}).getvalue()
COMPRESSED = write_zip(
    io.BytesIO(), {"a.npy": encode_npy(shape="(1000,)", data=bytes(4000))}, zipfile.ZIP_DEFLATED
).getvalue()
DAMAGED = {
    "encrypted": change_directory_entry(ONE_MEMBER, 8, "<H", 1),
    "two different sizes": change_directory_entry(ONE_MEMBER, 20, "<I", 5),
    "overlapping the next": change_directory_entry(
        change_directory_entry(TWO_MEMBERS, 20, "<I", len(VALID_NPY) + 1), 24, "<I", len(VALID_NPY) + 1
    ),
    "at a wrong offset": change_directory_entry(ONE_MEMBER, 42, "<I", 1),
    "beyond the end": change_directory_entry(ONE_MEMBER, 42, "<I", 10**6),
    "a wrong checksum": change_directory_entry(ONE_MEMBER, 16, "<I", 1),
    "a wrong checksum of compressed bytes": change_directory_entry(COMPRESSED, 16, "<I", 1),
    "a smaller size than decompressed": change_directory_entry(COMPRESSED, 24, "<I", 4000),
    "a larger size than decompressed": change_directory_entry(COMPRESSED, 24, "<I", 5000),
    "a size that cannot be compressed so much": change_directory_entry(COMPRESSED, 24, "<I", 2**31),
    "truncated compressed bytes": change_directory_entry(COMPRESSED, 20, "<I", 40),
    "another name": ONE_MEMBER.replace(b"a.npy", b"b.npy", 1),
    "no directory": ONE_MEMBER[:-30],
    "an end record only": b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 1, 1, 2**31, 0, 0),
}


def test_damaged_zips_are_refused(tmp_path):
    assert not find_wrong_refusals(CONTAINER, tmp_path / "a.npz", DAMAGED)


def test_a_member_that_decompresses_to_more_than_declared_is_refused(tmp_path):
    # 16 MiB of zeros, of which the header of the array and the directory of the zip declare 4000 bytes.
    bomb = encode_npy(shape="(1000,)", data=bytes(2**24))
    declared_size = len(encode_npy(shape="(1000,)", data=bytes(4000)))
    path = write_zip(tmp_path / "a.npz", {"a.npy": bomb}, zipfile.ZIP_DEFLATED)
    path.write_bytes(change_directory_entry(path.read_bytes(), 24, "<I", declared_size))
    assert "its checksum or its length is wrong" in error_message(CONTAINER, path)


def test_a_flipped_bit_is_detected_when_the_array_is_read_in_pieces(tmp_path):
    path = write_arrays(CONTAINER, tmp_path / "a.npz", {"a": np.zeros(1000, np.uint8)})
    place = CONTAINER.open(path).arrays[("a",)].offset + 10
    with open(path, "r+b") as file:
        os.pwrite(file.fileno(), b"\1", place)
    array = CONTAINER.open(path).arrays[("a",)]
    array.read(0, 500)
    with pytest.raises(InputError, match=r"a\.npz is damaged \(a checksum is wrong\)"):
        array.read(500, 1000)


VALID_FILES = {}
for name, save in SAVERS.items():
    save(buffer := io.BytesIO(), a=np.arange(300.0), b=np.array("note"), c=np.asfortranarray(np.ones((3, 4), ">f4")))
    VALID_FILES[name] = buffer.getvalue()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(list(VALID_FILES)), place=st.floats(0, 0.999), byte=st.integers(0, 255), length=st.floats(0, 1))
def test_a_file_with_changed_bytes_is_refused_or_read_with_its_shapes(tmp_path, name, place, byte, length):
    data = VALID_FILES[name]
    at = int(place * len(data))
    for number, damaged in enumerate([data[:at] + bytes([byte]) + data[at + 1 :], data[: int(length * len(data))]]):
        (tmp_path / f"{number}.npz").write_bytes(damaged)
        assert_read_or_refused(CONTAINER, tmp_path / f"{number}.npz")


# Recognition ----------------------------------------------------------------------------------------------------------


def test_npz_and_npy_files_are_recognised(tmp_path):
    for data in (ONE_MEMBER, VALID_NPY):
        assert CONTAINER.recognises(tmp_path / "a", data[:4096])


TORCH_ZIP = write_zip(io.BytesIO(), {"model/data.pkl": b""}).getvalue()


@pytest.mark.parametrize("head", [b"", TORCH_ZIP, b"\x80\x02}q\x00."], ids=["empty", "torch", "pickle"])
def test_other_files_are_not_recognised(tmp_path, head):
    assert not CONTAINER.recognises(tmp_path / "a", head)
