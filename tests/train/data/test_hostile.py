"""Hostile data sets and run folders: whatever asks for much memory or time is refused in one line."""

import gzip
import io
import os
import pickle
import struct
import tarfile
import tracemalloc
import zipfile
import zlib
from contextlib import contextmanager

import numpy as np
import pytest
from PIL import Image

import vit_spec
from parity.comparison.golden.subject import read_subject
from train.data import fingerprint
from train.data.sources import open_source, read_image
from train.loop.run_folder import STATES, Run, network_of
from train.recipes import Recipe
from vit_spec import InputError

CONFIG = vit_spec.get("vit_ti16")


@contextmanager
def refused():
    """Hold what happens to one line of refusal, in less than 300 MB."""
    tracemalloc.start()
    try:
        with pytest.raises(InputError) as error:
            yield error
        assert tracemalloc.get_traced_memory()[1] < 3e8
    finally:
        tracemalloc.stop()
    assert "\n" not in str(error.value) and str(error.value).isprintable()


def refusal(spec):
    """Return the one line with which a data set is refused."""
    with refused() as error:
        source = open_source(spec, None)
        for i in range(2):
            source.train.read(i)
    return str(error.value)


@pytest.mark.parametrize(
    "label", [b"[" * 100_000, b'{"label": ' * 1000, b'{"label": ' + b"9" * 100_000 + b"}", b"1" * 2**21]
)
def test_a_label_in_a_tar_file_that_is_deep_or_long_is_refused(tmp_path, label):
    with tarfile.open(tmp_path / "a.tar", "w") as file:
        for name, content in (("0.png", b"png"), ("0.json", label)):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    assert "a.tar" in refusal(f"tar:{tmp_path / 'a.tar'}")


def test_headers_about_headers_in_a_tar_file_are_refused(tmp_path):
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 0
    (tmp_path / "a.tar").write_bytes(info.tobuf() * 5000)
    assert "a.tar" in refusal(f"tar:{tmp_path / 'a.tar'}")


def test_images_of_idx_that_decompress_without_end_are_refused(tmp_path):
    with gzip.open(tmp_path / "train-images-idx3-ubyte.gz", "wb", 9) as file:
        file.write(struct.pack(">IIII", 0x803, 2**15, 28 * 28, 28))
        for _ in range(40):
            file.write(bytes(2**24))
    with gzip.open(tmp_path / "train-labels-idx1-ubyte.gz", "wb") as file:
        file.write(struct.pack(">II", 0x801, 2**15) + bytes(2**15))
    assert "no images do" in refusal(f"idx:{tmp_path}")


HEADERS = {
    "left open": b"{'descr': '|u1', 'fortran_order': False, 'shape': (",
    "of brackets": b"(" * 9000,
    "of 2**40 entries": b"{'descr': '|u1', 'fortran_order': False, 'shape': (%d, 1048576, 8), }" % 2**20,
}


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_in_an_npz_file_that_asks_for_much_is_refused(tmp_path, header):
    npy = b"\x93NUMPY\1\0" + struct.pack("<H", len(HEADERS[header]) + 1) + HEADERS[header] + b"\n"
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("train_images.npy", npy)
        file.writestr("train_labels.npy", npy)
    assert "a.npz" in refusal(f"npz:{tmp_path / 'a.npz'}")


def test_an_array_in_an_npz_file_that_decompresses_without_end_is_refused(tmp_path):
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": (2**10, 2**10, 2**9)})
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED) as file:
        with file.open("train_images.npy", "w") as member:
            member.write(head.getvalue())
            for _ in range(2**5):
                member.write(bytes(2**24))
        labels = io.BytesIO()
        np.save(labels, np.arange(2**10) % 2)
        file.writestr("train_labels.npy", labels.getvalue())
    assert "no images" in refusal(f"npz:{tmp_path / 'a.npz'}")


def test_an_npz_file_of_more_labels_than_bytes_is_refused(tmp_path):
    labels, images = io.BytesIO(), io.BytesIO()
    np.save(labels, np.zeros(2**24, np.uint8))
    np.lib.format.write_array_header_1_0(images, {"descr": "|u1", "fortran_order": False, "shape": (2**24, 1, 1)})
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        file.writestr("train_images.npy", images.getvalue())
        file.writestr("train_labels.npy", labels.getvalue())
    assert "16,777,216 train_labels in" in refusal(f"npz:{tmp_path / 'a.npz'}")


def test_an_npz_file_that_is_compressed_in_another_way_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w", zipfile.ZIP_BZIP2) as file:  # of which 4 kB can become gigabytes
        for name, array in {"train_images": np.zeros((2, 4, 4), np.uint8), "train_labels": np.arange(2)}.items():
            with file.open(f"{name}.npy", "w") as member:
                np.save(member, array)
    assert "in a way that numpy does not write" in refusal(f"npz:{tmp_path / 'a.npz'}")


@pytest.mark.parametrize("shape", [(1,) * 65, (0, 2**32 - 1, 2**32 - 1)])
def test_images_of_idx_in_a_shape_that_no_array_has_are_refused(tmp_path, shape):
    head = b"\0\0\x08" + bytes([len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(head + bytes(shape[0]))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, 2) + b"\0\1")
    assert "is no idx file" in refusal(f"idx:{tmp_path}")


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_pipe_for_images_of_idx_is_not_waited_for(tmp_path, suffix):
    os.mkfifo(tmp_path / f"train-images-idx3-ubyte{suffix}")
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, 2) + b"\0\1")
    assert f"ubyte{suffix} is no file" in refusal(f"idx:{tmp_path}")


def test_folders_in_folders_without_end_are_refused(tmp_path):
    os.makedirs(tmp_path / "a" / "/".join(["b"] * 110))
    for kind in ("folder", "tar", "parquet"):
        assert "100 folders deep" in refusal(f"{kind}:{tmp_path}")


def test_links_to_folders_of_links_are_not_gone_in_all_ways(tmp_path):
    for i in range(30):
        (tmp_path / "others" / str(i)).mkdir(parents=True)
        for name in "ab":
            (tmp_path / "others" / str(i) / name).symlink_to(f"../{i + 1}")
    (tmp_path / "others" / "30").mkdir()
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "class").symlink_to("../others/0")
    assert "as another link does" in refusal(f"folder:{tmp_path / 'set'}")


def test_a_pipe_among_images_is_not_waited_for(tmp_path):
    for name in "ab":
        (tmp_path / "train" / name).mkdir(parents=True)
        os.mkfifo(tmp_path / "train" / name / "0.png")
    assert refusal(str(tmp_path))


def member(name, data, kind=tarfile.REGTYPE):
    """Return a file of a tar file, its header and its blocks."""
    info = tarfile.TarInfo(name)
    info.size, info.type = len(data), kind
    return info.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % tarfile.BLOCKSIZE)


def field(key):
    """Return a field of a header about another, without a value: its length, with the digits that say it, and its name."""
    return b"%d %s=\n" % (len(key) + 5, key)


@pytest.mark.parametrize("fields", [40_000, 4_000, 300])
def test_a_header_about_all_files_of_a_tar_file_is_not_copied_to_each(tmp_path, fields):
    about = b"".join(field(b"%05d" % number) for number in range(fields))
    files = b"".join(member(f"{number}.png", b"") for number in range(3000))
    (tmp_path / "a.tar").write_bytes(member("about", about, tarfile.XGLTYPE) + files + bytes(1024))
    assert "a.tar cannot be read" in refusal(f"tar:{tmp_path / 'a.tar'}")


def test_a_name_of_gigabytes_in_a_tar_file_is_refused(tmp_path):
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.GNUTYPE_LONGNAME, 2**36
    with (tmp_path / "a.tar").open("wb") as file:
        file.write(info.tobuf(tarfile.GNU_FORMAT))
        file.truncate(2**37)
    assert "a header of 68,719,476,736 bytes" in refusal(f"tar:{tmp_path / 'a.tar'}")


def sized(info, size):
    """Return a header that says a size as GNU's tar does of large ones, in which it can be negative."""
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\xff" + (size % 256**11).to_bytes(11, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def test_a_size_in_a_tar_file_that_leads_back_is_refused(tmp_path):
    (tmp_path / "a.tar").write_bytes(member("0.png", b"") + sized(tarfile.TarInfo("x"), -512) + bytes(1024))
    assert "a file of -512 bytes" in refusal(f"tar:{tmp_path / 'a.tar'}")
    about = tarfile.TarInfo("x")
    about.pax_headers = {"size": "-1536"}
    (tmp_path / "a.tar").write_bytes(about.tobuf(tarfile.PAX_FORMAT) + bytes(1024))
    assert "a file of -1,536 bytes" in refusal(f"tar:{tmp_path / 'a.tar'}")


def test_files_with_holes_in_a_tar_file_are_refused(tmp_path):
    info = tarfile.TarInfo("0.png")
    info.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(sized(info, 512))
    header[482] = 1  # the map goes on in further blocks, each of which says that
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    (tmp_path / "a.tar").write_bytes(bytes(header) + (bytes(504) + b"\1" + bytes(7)) * 100)
    assert "holes" in refusal(f"tar:{tmp_path / 'a.tar'}")
    info = tarfile.TarInfo("0.png")
    info.size, info.pax_headers = 10, {"GNU.sparse.map": "0,10", "GNU.sparse.size": "10"}
    (tmp_path / "a.tar").write_bytes(info.tobuf(tarfile.PAX_FORMAT) + bytes(2048))
    assert "holes" in refusal(f"tar:{tmp_path / 'a.tar'}")


@pytest.mark.parametrize("pattern", ["{0..99999999}.tar", "{0..1048575}{0..1048575}.tar"])
def test_a_pattern_of_very_many_shards_is_refused(tmp_path, pattern):
    refusal(f"tar:{tmp_path}/{pattern}")


def pickled(text):
    """Return the instructions that push a text and keep it as number 0."""
    return b"X" + struct.pack("<I", len(text)) + text + b"q\0"


def integer(value):
    return pickle.dumps(value, 2)[2:-1]


def test_labels_of_cifar_of_more_than_64_bits_are_refused(tmp_path):
    array = RECONSTRUCT + b")R(K\1" + integer((1, 3072)) + b"cnumpy\ndtype\nX\2\0\0\0u1K\0K\1\x87R\x89"
    data = b"X\4\0\0\0data" + array + b"B" + struct.pack("<I", 3072) + bytes(3072) + b"tb"
    labels = b"X\x0b\0\0\0fine_labels]" + integer(2**70) + b"a"
    for file in ("train", "test"):
        (tmp_path / file).write_bytes(b"\x80\3}(" + data + labels + b"u.")
    assert "no whole numbers" in refusal(f"cifar:{tmp_path}")


RECONSTRUCT = b"cnumpy.core.multiarray\n_reconstruct\n"
PICKLES = {
    "a text encoded again and again": pickled(b"x" * 2**20) + b"c_codecs\nencode\nq\1(" + b"h\1h\0\x85R" * 8000 + b"l",
    "a nested tuple as a key": b")q\0" + b"h\0h\0\x86q\0" * 60 + b"0}h\0Ns",
    "integer keys that collide": b"}(" + b"".join(integer(k * (2**61 - 1)) + b"N" for k in range(1, 40_000)) + b"u",
    "a bytearray": b"\x96" + struct.pack("<Q", 2**40),
    "marks": b"(" * 2**22,
    "dictionaries": b"(" + b"}" * 2**23 + b"l",
    "the state of a function": b"c_codecs\nencode\n(NX\1\0\0\0a}tb",
    "a state of something else": b"}X\4\0\0\0data" + RECONSTRUCT + b")RNbs",
    "a shape of something else": b"}X\4\0\0\0data" + RECONSTRUCT + b")R(K\1]K\1\x89Ntbs",
}


@pytest.mark.parametrize("name", PICKLES)
def test_a_hostile_pickle_of_cifar_is_refused(tmp_path, name):
    for file in ("train", "test"):
        (tmp_path / file).write_bytes(b"\x80\x02" + PICKLES[name] + b".")
    assert f"{tmp_path / 'train'}" in refusal(f"cifar:{tmp_path}")


@pytest.mark.parametrize("name", ["train", "train.bin"])
def test_a_file_of_cifar_larger_than_memory_is_refused(tmp_path, name):
    for each in ("train", "test") if name == "train" else ("train.bin", "test.bin"):
        with (tmp_path / each).open("wb") as file:
            file.truncate(3074 * 2**26)
    assert f"{tmp_path / name}" in refusal(f"cifar:{tmp_path}")


@pytest.mark.parametrize("bomb", ["endless", "a pipe"])
def test_a_table_larger_than_memory_or_a_pipe_is_refused(tmp_path, bomb):
    BOMBS[bomb](tmp_path / "a.csv")
    assert "a.csv" in refusal(f"csv:{tmp_path / 'a.csv'}")


def parquet(path, label, image):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"label": label(pa), "image": image(pa)}
    pq.write_table(pa.table(columns), path, compression="zstd", use_dictionary=["label"])


def test_a_parquet_file_of_more_rows_than_bytes_is_refused(tmp_path):
    rows = 2**24
    parquet(tmp_path / "a.parquet", lambda pa: np.zeros(rows, np.int64), lambda pa: pa.nulls(rows, pa.binary()))
    assert "rows in" in refusal(f"parquet:{tmp_path}")


def test_a_long_text_that_parquet_says_very_often_is_refused(tmp_path):
    texts, rng = ["x" * 500_000], np.random.default_rng(0)
    one = lambda pa: pa.DictionaryArray.from_arrays(pa.array(np.zeros(2000, np.int32)), pa.array(texts))  # noqa: E731
    parquet(tmp_path / "a.parquet", one, lambda pa: pa.array([rng.bytes(9) for _ in range(2000)]))
    assert "1,000,000,000 bytes of text" in refusal(f"parquet:{tmp_path}")


def test_images_in_parquet_that_decompress_without_end_are_refused(tmp_path):
    parquet(tmp_path / "a.parquet", lambda pa: pa.array([0, 0, 1, 1]), lambda pa: pa.array([bytes(2**27)] * 4))
    assert "which no images do" in refusal(f"parquet:{tmp_path}")


def test_a_jpeg_of_very_many_scans_is_refused(tmp_path):
    file = io.BytesIO()
    Image.new("L", (64, 64)).save(file, "JPEG", progressive=True)
    start, *scans = file.getvalue().split(b"\xff\xda")
    repeated = [*scans[:1], *scans[1:2] * 200, *scans[1:]]
    (tmp_path / "a.jpg").write_bytes(b"\xff\xda".join([start, *repeated]))
    (tmp_path / "video.jpg").write_bytes(file.getvalue() + b"\xff\xda" * 200)  # as phones append one
    with refused() as error:
        read_image(tmp_path / "a.jpg")
    assert "100 scans" in str(error.value) and read_image(tmp_path / "video.jpg").size == (64, 64)


def tiff(tags, order="<", big=False):
    """Return a TIFF without anything but tags, each (number, type, count, value)."""
    head = {"<": b"II", ">": b"MM"}[order] + struct.pack(
        f"{order}HHHQ" if big else f"{order}HI", *((43, 8, 0, 16) if big else (42, 8))
    )
    entry, count = (f"{order}HHQQ", f"{order}Q") if big else (f"{order}HHII", f"{order}H")
    return head + struct.pack(count, len(tags)) + b"".join(struct.pack(entry, *tag) for tag in tags) + bytes(8)


@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("tag", [273, 324])
def test_a_tiff_of_very_many_strips_or_tiles_is_refused(tmp_path, tag, order, big):
    size = [(256, 4, 1, 1), (257, 4, 1, 10**6), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1)]
    (tmp_path / "a.tif").write_bytes(tiff([*size, (tag, 4, 10**6, 0)], order, big) + bytes(4 * 10**6))
    with refused() as error:
        read_image(tmp_path / "a.tif")
    assert "65,536 strips" in str(error.value)


def test_a_small_tiff_in_a_large_tile_is_refused(tmp_path):
    size = [(256, 4, 1, 16), (257, 4, 1, 16), (258, 3, 1, 8), (259, 3, 1, 8), (262, 3, 1, 1), (277, 3, 1, 1)]
    packed = zlib.compress(bytes(10_000 * 10_000))
    tile = [(322, 4, 1, 10_000), (323, 4, 1, 10_000), (324, 4, 1, 200), (325, 4, 1, len(packed))]
    (tmp_path / "a.tif").write_bytes(tiff([*size, *tile]).ljust(200, b"\0") + packed)
    with refused() as error:
        read_image(tmp_path / "a.tif")
    assert "pixels" in str(error.value)


def test_a_tiff_in_many_strips_is_read(tmp_path):
    Image.new("L", (4, 4000), 7).save(tmp_path / "a.tif", tiffinfo={278: 1})
    assert read_image(tmp_path / "a.tif").size == (4, 4000)


def test_a_jpeg_with_exif_in_very_many_parts_is_refused(tmp_path):
    file = io.BytesIO()
    Image.new("L", (8, 8)).save(file, "JPEG")
    part = b"\xff\xe1" + struct.pack(">H", 60_008) + b"Exif\0\0" + bytes(60_000)
    for count in (16, 17):
        (tmp_path / f"{count}.jpg").write_bytes(file.getvalue()[:2] + part * count + file.getvalue()[2:])
    with refused() as error:
        read_image(tmp_path / "17.jpg")
    assert "more than 16 parts" in str(error.value) and read_image(tmp_path / "16.jpg").size == (8, 8)


def test_a_pipe_for_an_image_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.png")
    with refused() as error:
        read_image(tmp_path / "a.png")
    assert "a.png cannot be read" in str(error.value)


# Run folders ----------------------------------------------------------------------------------------------------------


def deep(path):
    path.write_bytes(b'{"a":' * 10**5 + b"1" + b"}" * 10**5)


def endless(path):
    with path.open("wb") as file:
        file.write(b"{")
        file.truncate(2**37)


def of_many_values(path):
    path.write_bytes(b'{"a": [' + b"0," * 2**22 + b"0]}")


BOMBS = {"deep": deep, "endless": endless, "of many values": of_many_values, "a pipe": os.mkfifo}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_hostile_config_of_a_run_is_refused(tmp_path, bomb):
    BOMBS[bomb](tmp_path / "config.json")
    with refused() as error:
        Run(tmp_path, Recipe(), CONFIG, {})
    assert "config.json cannot be read" in str(error.value)
    (tmp_path / STATES / "1").mkdir(parents=True)
    assert network_of(tmp_path) is None


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_hostile_fingerprint_is_refused(tmp_path, bomb):
    BOMBS[bomb](tmp_path / "data.json")
    source = open_source("digits", None)
    with refused() as error:
        fingerprint.compare(tmp_path / "data.json", source, "sample")
    assert "data.json cannot be read" in str(error.value)


@pytest.mark.parametrize("bomb", ["endless", "a pipe", "of many lines"])
def test_hostile_metrics_are_refused(tmp_path, bomb):
    with Run(tmp_path, Recipe(), CONFIG, {}) as run:
        file = tmp_path / "metrics.jsonl"
        file.write_bytes(b"{}\n" * 2**21) if bomb == "of many lines" else BOMBS[bomb](file)
        with refused() as error:
            run.go_on(0, 0)
    assert "metrics.jsonl" in str(error.value)


def test_lines_of_metrics_that_hold_no_record_are_left_out(tmp_path):
    lines = [b"[" * 10**5, b"1", b"null", b'{"set": "train"}', b'{"step": "1"}', b'{"step": 1}', b'{"step": 1', b"\xff"]
    with Run(tmp_path, Recipe(), CONFIG, {}) as run:
        (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
        run.go_on(1, 0)
        assert run.records == [{"step": 1}]


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("name", ["_CHECKPOINT_METADATA", "metrics/metrics", "state/_METADATA", "state/_sharding"])
def test_a_hostile_note_beside_a_state_is_refused_before_orbax_parses_it(tmp_path, name, bomb):
    checkpoints = pytest.importorskip("train.jax.checkpoints")
    (tmp_path / "1" / name).parent.mkdir(parents=True)
    BOMBS[bomb](tmp_path / "1" / name)
    with refused() as error:
        checkpoints.Checkpoints(tmp_path, keep=1, rank=lambda note: None)
    assert "its notes cannot be read" in str(error.value)


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_hostile_config_for_a_golden_is_refused(tmp_path, bomb):
    BOMBS[bomb](tmp_path / "config.json")
    with refused():
        read_subject(str(tmp_path / "config.json"))
