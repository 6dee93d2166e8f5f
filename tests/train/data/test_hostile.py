"""Hostile data sets and run folders: files that would cost much memory or time are refused in one line."""

import gzip
import io
import os
import pickle
import struct
import subprocess
import sys
import tarfile
import tracemalloc
import zipfile
import zlib
from contextlib import contextmanager

import numpy as np
import pytest
from PIL import Image

import vit_spec
from parity.comparison.golden.inputs import read_model
from tests import ROOT
from train.data import fingerprint
from train.data.sources import open_dataset, read_image, stratified_split
from train.data.sources.files import read_range
from train.data.sources.parquet_chunks import ChunkValues, ColumnChunk, UnreadableChunk
from train.loop.run_folder import RunFolder
from train.loop.saved_run import CHECKPOINTS, saved_model_config
from train.recipes import Recipe
from vit_spec import InputError

CONFIG = vit_spec.get("vit_ti16")


@contextmanager
def assert_refused():
    """Check that the block raises a one-line InputError and uses less than 300 MB."""
    tracemalloc.start()
    try:
        with pytest.raises(InputError) as error:
            yield error
        assert tracemalloc.get_traced_memory()[1] < 3e8
    finally:
        tracemalloc.stop()
    assert "\n" not in str(error.value) and str(error.value).isprintable()


@contextmanager
def assert_refused_chunk(message):
    """Check that the block raises UnreadableChunk and uses less than 300 MB."""
    tracemalloc.start()
    try:
        with pytest.raises(UnreadableChunk, match=message):
            yield
        assert tracemalloc.get_traced_memory()[1] < 3e8
    finally:
        tracemalloc.stop()


def refusal_message(spec):
    """Return the message with which a data set is refused, one line."""
    with assert_refused() as error:
        source = open_dataset(spec, None)
        for i in range(2):
            source.train.read(i)
    return str(error.value)


@pytest.mark.parametrize(
    "label", [b"[" * 100_000, b'{"label": ' * 1000, b'{"label": ' + b"9" * 100_000 + b"}", b"1" * 2**21]
)
def test_a_deep_or_long_label_in_a_tar_file_is_refused(tmp_path, label):
    with tarfile.open(tmp_path / "a.tar", "w") as file:
        for name, content in (("0.png", b"png"), ("0.json", label)):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    assert "a.tar" in refusal_message(f"tar:{tmp_path / 'a.tar'}")


def test_nested_extension_headers_in_a_tar_file_are_refused(tmp_path):
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 0
    (tmp_path / "a.tar").write_bytes(info.tobuf() * 5000)
    assert "a.tar" in refusal_message(f"tar:{tmp_path / 'a.tar'}")


def test_a_decompression_bomb_in_an_idx_file_is_refused(tmp_path):
    with gzip.open(tmp_path / "train-images-idx3-ubyte.gz", "wb", 9) as file:
        file.write(struct.pack(">IIII", 0x803, 2**14, 28 * 28, 28))
        for _ in range(20):
            file.write(bytes(2**24))
    with gzip.open(tmp_path / "train-labels-idx1-ubyte.gz", "wb") as file:
        file.write(struct.pack(">II", 0x801, 2**14) + bytes(2**14))
    assert "no images do" in refusal_message(f"idx:{tmp_path}")


def write_idx_pair(folder, images, labels, suffix="", padding=0):
    """Write two idx files, each from (shape, bytes), and append zeros to them."""
    for name, (shape, data) in {"images-idx3": images, "labels-idx1": labels}.items():
        content = b"\0\0\x08" + bytes([len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + data
        content = gzip.compress(content, 1) if suffix else content
        (folder / f"train-{name}-ubyte{suffix}").write_bytes(content + bytes(padding))


@pytest.mark.parametrize("padding", [0, 2**20])
def test_zeros_behind_an_idx_file_do_not_raise_its_limit(tmp_path, padding):
    labels, count = b"\0\1" * 20_000_000, 40_000_000
    write_idx_pair(tmp_path, ((count, 1, 1), bytes(count)), ((count,), labels), ".gz", padding)
    assert "train-labels-idx1-ubyte.gz becomes more than" in refusal_message(f"idx:{tmp_path}")


def test_an_idx_file_with_more_images_than_bytes_is_refused(tmp_path):
    count = 10_000_000
    write_idx_pair(tmp_path, ((count, 1, 1), bytes(count)), ((count,), bytes(count)), ".gz")
    assert "has 10,000,000 images in" in refusal_message(f"idx:{tmp_path}")


@pytest.mark.parametrize("shape", [(20, 0, 0), (20, 0, 2**31), (20, 8, 0)])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_an_idx_file_of_empty_images_is_refused(tmp_path, shape, suffix):
    write_idx_pair(tmp_path, (shape, b""), ((20,), b"\0\1" * 10), suffix)
    assert f"{shape[1]}x{shape[2]} pixels, which are empty" in refusal_message(f"idx:{tmp_path}")


def test_an_idx_file_of_huge_images_is_refused(tmp_path):
    write_idx_pair(tmp_path, ((2, 10_000, 10_000), b""), ((2,), b"\0\1"))
    os.truncate(tmp_path / "train-images-idx3-ubyte", 16 + 2 * 10**8)
    assert "pixels: make them smaller" in refusal_message(f"idx:{tmp_path}")


def test_an_idx_file_of_very_many_gzip_members_is_refused(tmp_path):
    write_idx_pair(tmp_path, ((2, 1, 1), b"ab"), ((2,), b"\0\1"), ".gz")
    with (tmp_path / "train-labels-idx1-ubyte.gz").open("ab") as file:
        file.write(gzip.compress(b"") * 2**16)
    assert "65,537 gzip members" in refusal_message(f"idx:{tmp_path}")


def test_an_idx_file_of_several_gzip_members_with_zeros_behind_is_read(tmp_path):
    write_idx_pair(tmp_path, ((20, 1, 1), bytes(range(20))), ((20,), b"\0\1" * 10), ".gz", 10**6)
    labels = struct.pack(">II", 0x801, 20) + b"\0\1" * 10
    parts = [gzip.compress(labels[:9]), bytes(10**5), gzip.compress(b""), gzip.compress(labels[9:])]
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(b"".join(parts))
    source = open_dataset(f"idx:{tmp_path}", None)
    assert sorted([*source.train.targets, *source.held_out.targets]) == [0] * 10 + [1] * 10


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:-4], lambda data: data + b"x", lambda data: b""],
    ids=["cut short", "with more behind it", "empty"],
)
def test_a_damaged_gzip_file_is_refused(tmp_path, damage):
    write_idx_pair(tmp_path, ((2, 1, 1), b"ab"), ((2,), b"\0\1"), ".gz")
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    assert "idx3-ubyte.gz cannot be read" in refusal_message(f"idx:{tmp_path}")


HEADERS = {
    "left open": b"{'descr': '|u1', 'fortran_order': False, 'shape': (",
    "of brackets": b"(" * 9000,
    "of 2**40 entries": b"{'descr': '|u1', 'fortran_order': False, 'shape': (%d, 1048576, 8), }" % 2**20,
}


@pytest.mark.parametrize("header", HEADERS)
def test_an_expensive_header_in_an_npz_file_is_refused(tmp_path, header):
    npy = b"\x93NUMPY\1\0" + struct.pack("<H", len(HEADERS[header]) + 1) + HEADERS[header] + b"\n"
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("train_images.npy", npy)
        file.writestr("train_labels.npy", npy)
    assert "a.npz" in refusal_message(f"npz:{tmp_path / 'a.npz'}")


def test_a_decompression_bomb_in_an_npz_file_is_refused(tmp_path):
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": (2**10, 2**10, 320)})
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as file:
        with file.open("train_images.npy", "w") as member:
            member.write(head.getvalue())
            for _ in range(20):
                member.write(bytes(2**24))
        labels = io.BytesIO()
        np.save(labels, np.arange(2**10) % 2)
        file.writestr("train_labels.npy", labels.getvalue())
    assert "no images" in refusal_message(f"npz:{tmp_path / 'a.npz'}")


def test_an_npz_file_with_more_labels_than_bytes_is_refused(tmp_path):
    labels, images = io.BytesIO(), io.BytesIO()
    np.save(labels, np.zeros(2**24, np.uint8))
    np.lib.format.write_array_header_1_0(images, {"descr": "|u1", "fortran_order": False, "shape": (2**24, 1, 1)})
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        file.writestr("train_images.npy", images.getvalue())
        file.writestr("train_labels.npy", labels.getvalue())
    assert "16,777,216 train_labels in" in refusal_message(f"npz:{tmp_path / 'a.npz'}")


def test_an_npz_file_with_another_compression_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_BZIP2) as file:  # 4 kB of bzip2 can become gigabytes
        for name, array in {"train_images": np.zeros((2, 4, 4), np.uint8), "train_labels": np.arange(2)}.items():
            with file.open(f"{name}.npy", "w") as member:
                np.save(member, array)
    assert "in a way that numpy does not write" in refusal_message(f"npz:{tmp_path / 'a.npz'}")


def npy_bytes(shape, data):
    """Return an .npy file of uint8 whose header has any text for the shape."""
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\1\0" + struct.pack("<H", len(header)) + header + data


def write_images_npz(path, shape, data, compression, others=()):
    """Write an npz file of 20 images in two classes, and of other members."""
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("train_images.npy", npy_bytes(shape, data))
        file.writestr("train_labels.npy", npy_bytes((20,), b"\0\1" * 10))
        for name, content in others:
            file.writestr(name, content)


SHAPES = {
    "cut short": ((20, 8, 8), bytes(10), "(20, 8, 8) of uint8 in"),
    "of negative lengths": ((20, -8, -8), bytes(20 * 64), "header is not one that numpy writes"),
    "of a length of 71 bits": ((20, 0, 2**70), b"", "shape is not made of whole numbers"),
    "of a length of 63 bits": ((20, 0, 2**62), b"", "its shape is too large"),
    "of too many bytes": ((20, 2**40, 8), b"", "of uint8 in"),
    "without rows": ((20, 0, 8), b"", "0x8 pixels, which are empty"),
    "without columns": ((20, 8, 0), b"", "8x0 pixels, which are empty"),
    "without rows, of long columns": ((20, 0, 2**40), b"", "pixels, which are empty"),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_npz_array_whose_shape_does_not_agree_with_its_bytes_is_refused(tmp_path, name, compression):
    shape, data, message = SHAPES[name]
    write_images_npz(tmp_path / "a.npz", shape, data, compression, [("other.npy", bytes(4000))])
    assert message in refusal_message(f"npz:{tmp_path / 'a.npz'}")


def test_an_npz_directory_with_false_sizes_is_refused(tmp_path):
    path, shape = tmp_path / "a.npz", (20, 1024, 2**14)
    write_images_npz(path, shape, bytes(20 * 2**24), zipfile.ZIP_DEFLATED)
    assert "no images compress" in refusal_message(f"npz:{path}")
    data = bytearray(path.read_bytes())
    start = data.index(b"PK\1\2")
    data[start + 20 : start + 24] = struct.pack("<I", 2**31 - 1)  # compressed size
    path.write_bytes(data)
    assert "is incomplete" in refusal_message(f"npz:{path}")


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_labels_of_an_npz_file_with_a_false_checksum_are_refused(tmp_path, compression):
    write_images_npz(tmp_path / "a.npz", (20, 1, 1), bytes(20), compression)
    data = bytearray((tmp_path / "a.npz").read_bytes())
    start = data.rindex(b"PK\1\2")
    data[start + 16] ^= 1
    (tmp_path / "a.npz").write_bytes(data)
    assert "train_labels" in refusal_message(f"npz:{tmp_path / 'a.npz'}")


def test_an_npz_file_of_a_member_without_a_suffix_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("train_images", npy_bytes((20, 1, 1), bytes(20)))
        file.writestr("train_labels.npy", npy_bytes((20,), b"\0\1" * 10))
    assert "has no train_images.npy" in refusal_message(f"npz:{tmp_path / 'a.npz'}")


def test_an_npz_file_of_very_many_members_is_refused(tmp_path):
    others = [(f"{number}.npy", b"") for number in range(5000)]
    write_images_npz(tmp_path / "a.npz", (20, 8, 8), bytes(20 * 64), zipfile.ZIP_STORED, others)
    assert "more arrays than a data set has" in refusal_message(f"npz:{tmp_path / 'a.npz'}")


@pytest.mark.parametrize("shape", [(1,) * 65, (0, 2**32 - 1, 2**32 - 1)])
def test_an_idx_file_with_an_impossible_shape_is_refused(tmp_path, shape):
    head = b"\0\0\x08" + bytes([len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(head + bytes(shape[0]))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, 2) + b"\0\1")
    assert "is not an idx file" in refusal_message(f"idx:{tmp_path}")


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_pipe_instead_of_an_idx_file_is_refused(tmp_path, suffix):
    os.mkfifo(tmp_path / f"train-images-idx3-ubyte{suffix}")
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, 2) + b"\0\1")
    assert f"ubyte{suffix} is not a file" in refusal_message(f"idx:{tmp_path}")


def test_very_deep_folders_are_refused(tmp_path):
    os.makedirs(tmp_path / "a" / "/".join(["b"] * 110))
    for kind in ("folder", "tar", "parquet"):
        assert "100 folders deep" in refusal_message(f"{kind}:{tmp_path}")


def test_links_to_folders_of_links_are_refused(tmp_path):
    for i in range(30):
        (tmp_path / "others" / str(i)).mkdir(parents=True)
        for name in "ab":
            (tmp_path / "others" / str(i) / name).symlink_to(f"../{i + 1}")
    (tmp_path / "others" / "30").mkdir()
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "class").symlink_to("../others/0")
    assert "which is read already" in refusal_message(f"folder:{tmp_path / 'set'}")


def test_a_pipe_among_images_is_refused(tmp_path):
    for name in "ab":
        (tmp_path / "train" / name).mkdir(parents=True)
        os.mkfifo(tmp_path / "train" / name / "0.png")
    assert refusal_message(str(tmp_path))


def tar_member(name, data, kind=tarfile.REGTYPE):
    """Return a member of a tar file: its header and its blocks."""
    info = tarfile.TarInfo(name)
    info.size, info.type = len(data), kind
    return info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % tarfile.BLOCKSIZE)


def pax_field(key):
    """Return a field of a pax header with an empty value: its length, including the digits of the length, and its key."""
    return b"%d %s=\n" % (len(key) + 5, key)


@pytest.mark.parametrize("fields", [40_000, 4_000, 300])
def test_a_large_global_header_of_a_tar_file_is_refused(tmp_path, fields):
    about = b"".join(pax_field(b"%05d" % number) for number in range(fields))
    files = b"".join(tar_member(f"{number}.png", b"") for number in range(3000))
    (tmp_path / "a.tar").write_bytes(tar_member("about", about, tarfile.XGLTYPE) + files + bytes(1024))
    assert "a.tar cannot be read" in refusal_message(f"tar:{tmp_path / 'a.tar'}")


def test_a_file_name_of_gigabytes_in_a_tar_file_is_refused(tmp_path):
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 2**36
    with (tmp_path / "a.tar").open("wb") as file:
        file.write(info.tobuf(tarfile.GNU_FORMAT))
        file.truncate(2**37)
    assert "an extension header of 68,719,476,736 bytes" in refusal_message(f"tar:{tmp_path / 'a.tar'}")


def header_with_size(info, size):
    """Return a header with a size in GNU tar's binary form for large sizes, which can be negative."""
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[124:136] = (b"\xff" if size < 0 else b"\x80") + (size % 256**11).to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def test_a_negative_size_in_a_tar_file_is_refused(tmp_path):
    (tmp_path / "a.tar").write_bytes(tar_member("0.png", b"") + header_with_size(tarfile.TarInfo("x"), -512) + bytes(1024))
    assert "a file of -512 bytes" in refusal_message(f"tar:{tmp_path / 'a.tar'}")
    about = tarfile.TarInfo("x")
    about.pax_headers = {"size": "-1536"}
    (tmp_path / "a.tar").write_bytes(about.tobuf(tarfile.PAX_FORMAT) + bytes(1024))
    assert "a file of -1,536 bytes" in refusal_message(f"tar:{tmp_path / 'a.tar'}")


def test_sparse_files_in_a_tar_file_are_refused(tmp_path):
    info = tarfile.TarInfo("0.png")
    info.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(header_with_size(info, 512))
    header[482] = 1  # the sparse map continues in further blocks, each of which sets the same flag
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    (tmp_path / "a.tar").write_bytes(bytes(header) + (bytes(504) + b"\1" + bytes(7)) * 100)
    assert "a sparse file" in refusal_message(f"tar:{tmp_path / 'a.tar'}")
    info = tarfile.TarInfo("0.png")
    info.size, info.pax_headers = 10, {"GNU.sparse.map": "0,10", "GNU.sparse.size": "10"}
    (tmp_path / "a.tar").write_bytes(info.tobuf(tarfile.PAX_FORMAT) + bytes(2048))
    assert "a sparse file" in refusal_message(f"tar:{tmp_path / 'a.tar'}")


def write_tar_with_hole(path, size):
    """Write a tar file of 20 small images and one of `size` bytes, which are a hole."""
    image = io.BytesIO()
    Image.new("L", (8, 8)).save(image, "PNG")
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as file:
        for i in range(21):
            for name, content in ((f"{i:02}.cls", b"%d" % (i % 2)), (f"{i:02}.png", image.getvalue())):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                file.addfile(info, io.BytesIO(content))
        end = file.offset
    info.size = size
    with path.open("r+b") as raw:  # since Python 3.13 `addfile` refuses a size without data
        header = info.tobuf(tarfile.GNU_FORMAT)
        raw.seek(end - len(header) - 512)  # the header of the last image, whose data fill a block
        raw.write(header)
        raw.truncate()
        end = raw.tell()
    os.truncate(path, end + -(-size // 512) * 512 + 1024)


def test_a_tar_file_of_holes_is_refused(tmp_path):
    write_tar_with_hole(tmp_path / "a.tar", 6 << 30)
    assert "are on disk: fetch or write" in refusal_message(f"tar:{tmp_path / 'a.tar'}")


def test_an_image_of_gigabytes_in_a_tar_file_is_damaged(tmp_path, monkeypatch):
    monkeypatch.setattr("train.data.sources.tar.refuse_holes", lambda path: None)  # as for a file of real bytes
    write_tar_with_hole(tmp_path / "a.tar", 6 << 30)
    source = open_dataset(f"tar:{tmp_path / 'a.tar'}", 0.1)
    damaged = next(i for i, name in enumerate(source.train.names) if name == "a.tar 20.png")
    with assert_refused() as error:
        source.train.read(damaged)
    assert "a.tar 20.png cannot be read (it has 6,442,450,944 bytes, and at most" in str(error.value)


def test_ranges_longer_than_one_call_reads_are_read(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(bytes(range(100)))
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, offset: pread(file, min(size, 7), offset))  # Linux: 2 GiB
    assert read_range(str(tmp_path / "a"), 10, 80) == bytes(range(10, 90))


def test_idx_files_of_holes_are_refused(tmp_path):
    count = 2**32 - 1
    write_idx_pair(tmp_path, ((count, 1, 1), b""), ((count,), b""))
    os.truncate(tmp_path / "train-images-idx3-ubyte", 16 + count)
    os.truncate(tmp_path / "train-labels-idx1-ubyte", 8 + count)
    assert "are on disk: fetch or write" in refusal_message(f"idx:{tmp_path}")


def test_an_npz_file_of_holes_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", train_images=np.zeros((20, 8, 8), np.uint8), train_labels=np.arange(20) % 2)
    os.truncate(tmp_path / "a.npz", 2**36)
    assert "are on disk: fetch or write" in refusal_message(f"npz:{tmp_path / 'a.npz'}")


def test_a_column_of_holes_in_parquet_is_refused_without_reading_it(tmp_path):
    path = tmp_path / "a"
    with path.open("wb") as file:
        file.truncate(6 << 30)
    with assert_refused_chunk("page headers are damaged"):
        ChunkValues(ColumnChunk(str(path), 0, 6 << 30, 6 << 30, 2, "UNCOMPRESSED", 0))


def test_a_page_header_with_an_endless_number_is_refused(tmp_path):
    (tmp_path / "a").write_bytes(b"\x15" + b"\xff" * 10**6)
    with assert_refused_chunk("a number of more than 64 bits"):
        ChunkValues(ColumnChunk(str(tmp_path / "a"), 0, 10**6, 10**6, 2, "UNCOMPRESSED", 0))


@pytest.mark.parametrize("pattern", ["{0..99999999}.tar", "{0..1048575}{0..1048575}.tar"])
def test_a_pattern_of_very_many_shards_is_refused(tmp_path, pattern):
    refusal_message(f"tar:{tmp_path}/{pattern}")


def pickle_text(text):
    """Return the pickle instructions that push a text and store it as memo 0."""
    return b"X" + struct.pack("<I", len(text)) + text + b"q\0"


def pickle_integer(value):
    return pickle.dumps(value, 2)[2:-1]


def test_cifar_labels_of_more_than_64_bits_are_refused(tmp_path):
    array = RECONSTRUCT + b")R(K\1" + pickle_integer((1, 3072)) + b"cnumpy\ndtype\nX\2\0\0\0u1K\0K\1\x87R\x89"
    data = b"X\4\0\0\0data" + array + b"B" + struct.pack("<I", 3072) + bytes(3072) + b"tb"
    labels = b"X\x0b\0\0\0fine_labels]" + pickle_integer(2**70) + b"a"
    for file in ("train", "test"):
        (tmp_path / file).write_bytes(b"\x80\3}(" + data + labels + b"u.")
    assert "not integers" in refusal_message(f"cifar:{tmp_path}")


RECONSTRUCT = b"cnumpy.core.multiarray\n_reconstruct\n"
PICKLES = {
    "a text encoded again and again": pickle_text(b"x" * 2**20) + b"c_codecs\nencode\nq\1(" + b"h\1h\0\x85R" * 8000 + b"l",
    "a nested tuple as a key": b")q\0" + b"h\0h\0\x86q\0" * 60 + b"0}h\0Ns",
    "integer keys that collide": b"}(" + b"".join(pickle_integer(k * (2**61 - 1)) + b"N" for k in range(1, 40_000)) + b"u",
    "a bytearray": b"\x96" + struct.pack("<Q", 2**40),
    "marks": b"(" * 2**22,
    "dictionaries": b"(" + b"}" * 2**23 + b"l",
    "the state of a function": b"c_codecs\nencode\n(NX\1\0\0\0a}tb",
    "a state of something else": b"}X\4\0\0\0data" + RECONSTRUCT + b")RNbs",
    "a shape of something else": b"}X\4\0\0\0data" + RECONSTRUCT + b")R(K\1]K\1\x89Ntbs",
}


@pytest.mark.parametrize("name", PICKLES)
def test_a_hostile_cifar_pickle_is_refused(tmp_path, name):
    for file in ("train", "test"):
        (tmp_path / file).write_bytes(b"\x80\x02" + PICKLES[name] + b".")
    assert f"{tmp_path / 'train'}" in refusal_message(f"cifar:{tmp_path}")


@pytest.mark.parametrize("name", ["train", "train.bin"])
def test_a_cifar_file_larger_than_memory_is_refused(tmp_path, name):
    for each in ("train", "test") if name == "train" else ("train.bin", "test.bin"):
        with (tmp_path / each).open("wb") as file:
            file.truncate(3074 * 2**26)
    assert f"{tmp_path / name}" in refusal_message(f"cifar:{tmp_path}")


@pytest.mark.parametrize("bomb", ["endless", "a pipe"])
def test_a_table_larger_than_memory_or_a_pipe_is_refused(tmp_path, bomb):
    BOMBS[bomb](tmp_path / "a.csv")
    assert "a.csv" in refusal_message(f"csv:{tmp_path / 'a.csv'}")


def test_a_table_of_very_many_labels_is_refused(tmp_path):
    rows = "".join(f"{number}.png,a{number}|b{number}\n" for number in range(9000))
    (tmp_path / "a.csv").write_text("image,Finding Labels\n" + rows)
    assert "18,000 labels in 'Finding Labels' for 9,000 images" in refusal_message(f"csv:{tmp_path / 'a.csv'}")


def test_very_many_classes_are_split_in_the_time_of_a_sort():
    train, held_out = stratified_split(np.arange(2**19), 0.2)
    assert (len(train), len(held_out)) == (2**19, 0)


def write_parquet(path, label, image):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"label": label(pa), "image": image(pa)}
    pq.write_table(pa.table(columns), path, compression="zstd", use_dictionary=["label"])


def test_a_parquet_file_with_more_rows_than_bytes_is_refused(tmp_path):
    rows = 2**24
    write_parquet(tmp_path / "a.parquet", lambda pa: np.zeros(rows, np.int64), lambda pa: pa.nulls(rows, pa.binary()))
    assert "rows in" in refusal_message(f"parquet:{tmp_path}")


def test_a_long_text_repeated_very_often_in_parquet_is_refused(tmp_path):
    texts, rng = ["x" * 500_000], np.random.default_rng(0)
    one = lambda pa: pa.DictionaryArray.from_arrays(pa.array(np.zeros(2000, np.int32)), pa.array(texts))  # noqa: E731
    write_parquet(tmp_path / "a.parquet", one, lambda pa: pa.array([rng.bytes(9) for _ in range(2000)]))
    assert "1,000,000,000 bytes of text" in refusal_message(f"parquet:{tmp_path}")


def test_a_decompression_bomb_in_parquet_is_refused(tmp_path):
    write_parquet(tmp_path / "a.parquet", lambda pa: pa.array([0, 0, 1, 1]), lambda pa: pa.array([bytes(5 * 2**24)] * 4))
    assert "which no images do" in refusal_message(f"parquet:{tmp_path}")


def varint(value):
    """Return an i64 of Thrift's compact protocol with its type, as in Parquet's metadata."""
    value, data = 2 * value, b""
    while value > 127:
        value, data = value >> 7, data + bytes([value & 127 | 128])
    return b"\x16" + data + bytes([value])


@pytest.mark.parametrize("changed", [(0,), (0, 3), (0, 1), (3,)])  # rows of the file; labels, images, rows of the group
def test_a_parquet_file_whose_counts_of_rows_differ_is_refused(tmp_path, changed):
    rng, path = np.random.default_rng(0), tmp_path / "a.parquet"
    write_parquet(path, lambda pa: np.arange(9001) % 2, lambda pa: pa.array([rng.bytes(9) for _ in range(9001)]))
    data, start = path.read_bytes(), 0
    for place in range(4):
        start = data.index(varint(9001), start + 1 if start else len(data) - 8 - struct.unpack("<I", data[-8:-4])[0])
        if place in changed:
            data = data[:start] + varint(8999) + data[start + len(varint(8999)) :]
    path.write_bytes(data)
    assert "rows, but" in refusal_message(f"parquet:{tmp_path}")


@pytest.mark.parametrize(("name", "damaged"), [(b"other", b"oth\xff\xff"), (b"abcd", b"ab\xff\xff")])
def test_a_parquet_file_with_text_that_is_not_unicode_is_refused(tmp_path, name, damaged):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pa.table({"image": [b"0", b"1"], "label": ["abcd", "efgh"], "other": [0, 1]})
    pq.write_table(table, tmp_path / "a.parquet", store_schema=False)
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes().replace(name, damaged))
    assert "a.parquet cannot be read as Parquet" in refusal_message(f"parquet:{tmp_path}")


def test_labels_of_a_parquet_file_that_decompress_to_much_more_are_refused(tmp_path, monkeypatch):
    pa, pq, rng = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet"), np.random.default_rng(0)
    monkeypatch.setattr("train.data.sources.parquet_chunks._CACHE_BYTES", 1 << 12)
    table = pa.table({"label": np.zeros(9000, np.int64), "image": [rng.bytes(9) for _ in range(9000)]})
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd", use_dictionary=False)
    assert "has labels that cannot be read" in refusal_message(f"parquet:{tmp_path}")


def test_a_jpeg_with_very_many_scans_is_refused(tmp_path):
    file = io.BytesIO()
    Image.new("L", (64, 64)).save(file, "JPEG", progressive=True)
    start, *scans = file.getvalue().split(b"\xff\xda")
    repeated = [*scans[:1], *scans[1:2] * 200, *scans[1:]]
    (tmp_path / "a.jpg").write_bytes(b"\xff\xda".join([start, *repeated]))
    (tmp_path / "video.jpg").write_bytes(file.getvalue() + b"\xff\xda" * 200)  # phones append a video
    with assert_refused() as error:
        read_image(tmp_path / "a.jpg")
    assert "100 scans" in str(error.value) and read_image(tmp_path / "video.jpg").size == (64, 64)


def make_tiff(tags, order="<", big=False):
    """Return a TIFF of tags only, each (number, type, count, value)."""
    head = {"<": b"II", ">": b"MM"}[order] + struct.pack(
        f"{order}HHHQ" if big else f"{order}HI", *((43, 8, 0, 16) if big else (42, 8))
    )
    entry, count = (f"{order}HHQQ", f"{order}Q") if big else (f"{order}HHII", f"{order}H")
    return head + struct.pack(count, len(tags)) + b"".join(struct.pack(entry, *tag) for tag in tags) + bytes(8)


@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("tag", [273, 324])
def test_a_tiff_with_very_many_strips_or_tiles_is_refused(tmp_path, tag, order, big):
    size = [(256, 4, 1, 1), (257, 4, 1, 10**6), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1)]
    (tmp_path / "a.tif").write_bytes(make_tiff([*size, (tag, 4, 10**6, 0)], order, big) + bytes(4 * 10**6))
    with assert_refused() as error:
        read_image(tmp_path / "a.tif")
    assert "65,536 strips" in str(error.value)


def test_a_small_tiff_with_a_large_tile_is_refused(tmp_path):
    size = [(256, 4, 1, 16), (257, 4, 1, 16), (258, 3, 1, 8), (259, 3, 1, 8), (262, 3, 1, 1), (277, 3, 1, 1)]
    packed = zlib.compress(bytes(10_000 * 10_000))
    tile = [(322, 4, 1, 10_000), (323, 4, 1, 10_000), (324, 4, 1, 200), (325, 4, 1, len(packed))]
    (tmp_path / "a.tif").write_bytes(make_tiff([*size, *tile]).ljust(200, b"\0") + packed)
    with assert_refused() as error:
        read_image(tmp_path / "a.tif")
    assert "pixels" in str(error.value)


def test_a_tiff_with_many_strips_is_read(tmp_path):
    Image.new("L", (4, 4000), 7).save(tmp_path / "a.tif", tiffinfo={278: 1})
    assert read_image(tmp_path / "a.tif").size == (4, 4000)


def test_a_jpeg_with_very_many_exif_segments_is_refused(tmp_path):
    file = io.BytesIO()
    Image.new("L", (8, 8)).save(file, "JPEG")
    part = b"\xff\xe1" + struct.pack(">H", 60_008) + b"Exif\0\0" + bytes(60_000)
    for count in (16, 17):
        (tmp_path / f"{count}.jpg").write_bytes(file.getvalue()[:2] + part * count + file.getvalue()[2:])
    with assert_refused() as error:
        read_image(tmp_path / "17.jpg")
    assert "more than 16 parts" in str(error.value) and read_image(tmp_path / "16.jpg").size == (8, 8)


@pytest.mark.filterwarnings("ignore:Tag data larger than file:UserWarning")  # errors in these tests
@pytest.mark.parametrize("suffix", ["png", "webp", "tif"])
def test_tags_that_share_their_value_do_not_take_gigabytes(tmp_path, suffix):
    shared = [(tag, 7, 10**6, 8) for tag in range(40_000, 42_000)]
    size = [(256, 4, 1, 8), (257, 4, 1, 8), (258, 3, 1, 8), (262, 3, 1, 1), (273, 4, 1, 8), (279, 4, 1, 64)]
    tags, path = make_tiff([*size, *shared]) + bytes(10**6), tmp_path / f"a.{suffix}"
    if suffix == "tif":
        path.write_bytes(tags)
    else:
        Image.new("RGB", (8, 8)).save(path, exif=tags)
    tracemalloc.start()
    try:
        assert read_image(path).size == (8, 8)
        assert tracemalloc.get_traced_memory()[1] < 1e8
    finally:
        tracemalloc.stop()


def test_damaged_tags_of_an_image_print_no_warnings(tmp_path):
    tags = make_tiff([(tag, 7, 10_000, 8) for tag in range(40_000, 40_100)]) + bytes(10_000)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png", exif=tags)
    code = "import sys; from train.data.sources import read_image; print(read_image(sys.argv[1]).size)"
    command = [sys.executable, "-W", "default", "-c", code, str(tmp_path / "a.png")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("(8, 8)\n", "")


def test_a_pipe_instead_of_an_image_is_refused(tmp_path):
    os.mkfifo(tmp_path / "a.png")
    with assert_refused() as error:
        read_image(tmp_path / "a.png")
    assert "a.png cannot be read" in str(error.value)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")], ids=["pipe", "endless"])
def test_a_pipe_or_a_device_among_images_has_no_fingerprint(tmp_path, make):
    for name in "ab":
        (tmp_path / name).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / name / "0.png")
    make(tmp_path / "b/1.png")
    dataset = open_dataset(f"folder:{tmp_path}", 0.5)
    with pytest.raises(InputError, match=r"b/1\.png is not a regular file: move it out of the data"):
        fingerprint.Fingerprint.compute(dataset)


# Run folders ----------------------------------------------------------------------------------------------------------


def write_deep_json(path):
    path.write_bytes(b'{"a":' * 10**5 + b"1" + b"}" * 10**5)


def write_huge_file(path):
    with path.open("wb") as file:
        file.write(b"{")
        file.truncate(2**37)


def write_many_values(path):
    path.write_bytes(b'{"a": [' + b"0," * 2**22 + b"0]}")


BOMBS = {"deep": write_deep_json, "endless": write_huge_file, "of many values": write_many_values, "a pipe": os.mkfifo}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_hostile_run_config_is_refused(tmp_path, bomb):
    BOMBS[bomb](tmp_path / "config.json")
    with assert_refused() as error:
        RunFolder(tmp_path, Recipe(), CONFIG, {})
    assert "config.json cannot be read" in str(error.value)
    (tmp_path / CHECKPOINTS / "1").mkdir(parents=True)
    assert saved_model_config(tmp_path) is None


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_hostile_fingerprint_is_refused(tmp_path, bomb):
    BOMBS[bomb](tmp_path / "data.json")
    source = open_dataset("digits", None)
    with assert_refused() as error:
        fingerprint.compare_with_recorded(tmp_path / "data.json", source, "sample")
    assert "data.json cannot be read" in str(error.value)


@pytest.mark.parametrize("bomb", ["endless", "a pipe", "of many lines"])
def test_hostile_metrics_are_refused(tmp_path, bomb):
    with RunFolder(tmp_path, Recipe(), CONFIG, {}) as run:
        file = tmp_path / "metrics.jsonl"
        file.write_bytes(b"{}\n" * 2**21) if bomb == "of many lines" else BOMBS[bomb](file)
        with assert_refused() as error:
            run.resume_at(0, 0, is_evaluated=False)
    assert "metrics.jsonl" in str(error.value)


def test_lines_of_metrics_without_a_record_are_ignored(tmp_path):
    lines = [b"[" * 10**5, b"1", b"null", b'{"set": "train"}', b'{"step": "1"}', b'{"step": 1}', b'{"step": 1', b"\xff"]
    with RunFolder(tmp_path, Recipe(), CONFIG, {}) as run:
        (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
        run.resume_at(1, 0, is_evaluated=True)
        assert run.records == [{"step": 1}]


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("name", ["_CHECKPOINT_METADATA", "metrics/metrics", "state/_METADATA", "state/_sharding"])
def test_hostile_metadata_of_a_checkpoint_is_refused_before_orbax_parses_it(tmp_path, name, bomb):
    checkpoints = pytest.importorskip("train.jax.checkpoints")
    (tmp_path / "1" / name).parent.mkdir(parents=True)
    BOMBS[bomb](tmp_path / "1" / name)
    with assert_refused() as error:
        checkpoints.CheckpointStore(tmp_path, keep=1)
    assert "its metadata cannot be read" in str(error.value)


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_hostile_config_for_a_golden_file_is_refused(tmp_path, bomb):
    BOMBS[bomb](tmp_path / "config.json")
    with assert_refused():
        read_model(str(tmp_path / "config.json"))


def test_a_class_whose_name_is_not_utf8_is_refused_before_anything_is_written(tmp_path):
    """Nothing could read config.json afterwards."""
    data = {"classes": ["cat", os.fsdecode(b"d\xe9g")]}
    with pytest.raises(InputError, match=r"data\.classes has 'd.*g', which is not UTF-8: rename that file or folder"):
        RunFolder(tmp_path / "run", Recipe(), CONFIG, data)
    assert not (tmp_path / "run/config.json").exists()
