"""Hostile files: small files that would take much memory or time to read, or that make a reader do what no file may do.

Each function in `FILES` writes one hostile file or folder into an empty folder and returns its path.
"""

import gzip
import io
import json
import os
import pickle
import socket
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np

FILES = {}  # name -> function from an empty folder to the path of a hostile file in it


def register(name):
    """Return a decorator that registers a function that writes a hostile file."""

    def add(function):
        assert name not in FILES
        FILES[name] = function
        return function

    return add


# Pickles --------------------------------------------------------------------------------------------------------------

PRIME = 2**61 - 1  # hash(k * PRIME) == 0 for every integer k
TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"
LEGACY_HEADER = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2)
LEGACY_HEADER += pickle.dumps(
    {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}, 2
)


def write_archive(path, data, storages=(bytes(16),)):
    """Write a zip archive as torch.save does, around any pickle."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", data)
        file.writestr("archive/byteorder", b"little")
        for key, storage in storages.items() if isinstance(storages, dict) else enumerate(storages):
            file.writestr(f"archive/data/{key}", storage)
    return path


def push(value):
    """Return the instructions that push a value, without the beginning and the end of a pickle."""
    return pickle.dumps(value, 2)[2:-1]


def push_text(value):
    """Return the instruction that pushes a text, given as UTF-8 bytes."""
    return b"X" + struct.pack("<I", len(value)) + value


def storage(count=4, key="0", kind="FloatStorage"):
    """Return the instructions that push a storage of an archive."""
    return b"(X\7\0\0\0storagectorch\n" + kind.encode() + b"\n" + push(key) + push("cpu") + push(count) + b"tQ"


def tensor(offset=0, shape=(2, 2), stride=(2, 1), count=4, key="0", kind="FloatStorage", metadata=None):
    """Return the instructions that push a tensor with the given arguments, valid or not."""
    end = b"ccollections\nOrderedDict\n)R" + (b"" if metadata is None else push(metadata))
    return TENSOR + b"(" + storage(count, key, kind) + push(offset) + push(shape) + push(stride) + b"\x89" + end + b"tR"


def call_repeatedly(function, first, arguments, times):
    """Return a pickle that calls a function `times` times, each time on the result of the last call, through the memo."""
    head = b"\x80\x02" + first + b"q\0" + b"c" + function.replace(b".", b"\n", 1) + b"\nq\1"
    return head + b"".join(b"h\1" + arguments + b"Rq\0" for _ in range(times)) + b"."


def pickle_attacks():
    """Yield hostile pickles with their names."""
    big = push_text(b"x" * 1000)
    double = b"h\0h\0\x86"
    yield "a path joined with itself", call_repeatedly(b"pathlib.PosixPath", push_text(b"s" * 20), double, 32)
    yield (
        "a path of many parts",
        call_repeatedly(b"pathlib.PosixPath", big + b"q\2" + b"0(" + b"h\2" * 50 + b"t", b"h\0", 3),
    )
    many = b"\x80\x02" + push_text(b"x" * 2**20) + b"q\0(" + b"h\0" * 4000 + b"tq\1cpathlib\nPosixPath\nh\1R."
    yield "a path of one part, 4000 times", many
    lengths = b"\x80\x02](" + b"K\1" * 60_000 + b"eq\0ctorch\nSize\nq\1]q\2" + b"h\2h\1h\0\x85Ra0" * 40_000 + b"."
    yield "torch.Size of one list, repeated", lengths
    coded = b"\x80\x02" + push_text(b"x" * 2**20) + b"q\0c_codecs\nencode\nq\1X\6\0\0\0latin1q\2("
    yield "one text encoded again and again", coded + b"h\1h\0h\2\x86R" * 8000 + b"l."
    nested = b"\x80\x02)q\0" + b"h\0h\0\x86q\0" * 60
    yield "a device with a nested tuple", nested + b"ctorch\ndevice\nX\4\0\0\0cudah\0\x86R."
    yield "a dtype with a nested tuple", nested + b"cnumpy\ndtype\nh\0K\0K\1\x87R."
    yield "a path with a nested tuple", nested + b"cpathlib\nPosixPath\nh\0\x85R."
    pairs = b"".join(push(k * PRIME) + b"N" for k in range(1, 40_000))
    yield "integer keys with equal hashes", b"\x80\x02}(" + pairs + b"u."
    yield "memo indices with equal hashes", b"N" + b"".join(b"p%d\n" % (k * PRIME) for k in range(1, 40_000)) + b"."
    yield (
        "float keys with equal hashes",
        b"\x80\x02}(" + b"".join(b"G" + struct.pack(">d", 2.0**k) + b"N" for k in range(1000)) + b"u.",
    )
    yield (
        "a storage's key, repeated",
        (
            b"\x80\x02"
            + push_text(b"k" * 2**22)
            + b"q\0X\7\0\0\0storageq\1ctorch\nFloatStorage\nq\2("
            + b"(h\1h\2h\0h\1K\1tQ" * 10**5
            + b"l."
        ),
    )
    yield (
        "a class whose name is long, repeated",
        (b"\x80\x04\x8c\x09__torch__\x94" + push_text(b"k" * 2**21) + b"\x94(" + b"h\0h\1\x93" * 10**5 + b"l."),
    )
    yield "one dictionary per instruction", b"\x80\x02(" + b"}" * (2**24 - 10) + b"l."
    yield "one mark per instruction", b"\x80\x02" + b"(" * (2**24 - 10) + b"."
    yield "instructions without an effect", b"\x80\x02" + b"N0" * (2**23 - 10) + b"N."
    yield "one object in three instructions", b"\x80\x02cargparse\nNamespace\nq\0(" + b"h\0)\x81" * 5_000_000 + b"l."
    deep = b"\x80\x02N" + b"\x85" * (2**24 - 10) + b"."
    yield "16 million nested tuples", deep
    yield "nested objects", b"\x80\x02Nq\0cargparse\nNamespace\nq\1" + b"0h\1)\x81h\0bq\0" * 10**6 + b"h\0."
    twice = b"}(K\1" + tensor() + push_text(b"1") + tensor() + b"u"
    yield "two tensors with one long key", b"\x80\2}" + push_text(b"k" * 2**22) + twice + b"s."
    yield "lists of lists", b"\x80\x02]q\0" + b"](h\0h\0h\0eq\0" * 60 + b"."
    yield "dictionaries of dictionaries", b"\x80\x02}q\0" + b"}(K\0h\0K\1h\0uq\0" * 60 + b"."
    yield (
        "one long key above many entries",
        (
            b"\x80\x02}q\0("
            + b"".join(b"M" + struct.pack("<H", i) + b"N" for i in range(60_000))
            + b"u0}"
            + push_text(b"k" * 2**23)
            + b"h\0s."
        ),
    )
    yield (
        "metadata with long keys",
        (
            b"\x80\x02}q\0("
            + b"".join(b"M" + struct.pack("<H", i) + b"K\1" for i in range(60_000))
            + b"u0}"
            + push_text(b"k" * 2**23)
            + b"h\0s."
        ),
    )
    yield "a long integer", b"\x80\x02\x8b" + struct.pack("<i", 2**24 - 100) + b"\x7f" * (2**24 - 100) + b"."
    yield "a long integer as a key", b"\x80\x02}\x8b" + struct.pack("<i", 2**23) + b"\x7f" * 2**23 + b"Ns."
    yield "long integers in decimal", b"I" + b"9" * 4_000_000 + b"\n."
    yield (
        "a long integer as a number of elements",
        b"\x80\x02"
        + TENSOR
        + b"("
        + storage().replace(push(4), b"\x8b" + struct.pack("<i", 10**6) + b"\x7f" * 10**6)
        + b".",
    )
    yield "a text of 2**62 bytes", b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"ab."
    yield "a frame of 2**62 bytes", b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N."
    yield "a large memo index", b"Nr\xff\xff\xff\xff."
    yield "a bytearray", b"cbuiltins\nbytearray\nJ" + struct.pack("<i", 2**31 - 1) + b"\x85R."
    yield (
        "a conjugate view",
        b"\x80\x02" + tensor(kind="ComplexFloatStorage", shape=(2,), stride=(1,), count=2, metadata={"conj": True}) + b".",
    )
    yield "a negative view", b"\x80\x02" + tensor(shape=(2,), stride=(1,), metadata={"neg": True}) + b"."
    for name, numbers in TENSOR_ARGUMENTS.items():
        yield name, b"\x80\x02" + tensor(**numbers) + b"."
    for builder in (
        "_rebuild_sparse_tensor",
        "_rebuild_qtensor",
        "_rebuild_meta_tensor_no_storage",
        "_rebuild_nested_tensor",
    ):
        yield builder, b"\x80\x02ctorch._utils\n" + builder.encode() + b"\n" + tensor() + b"\x85R."


TENSOR_ARGUMENTS = {
    "a tensor that repeats an element": dict(shape=(30_000, 30_000), stride=(0, 0)),
    "a tensor that overlaps itself": dict(shape=(2, 3), stride=(1, 1)),
    "negative lengths": dict(shape=(-2, -2)),
    "negative strides": dict(stride=(-2, -1), offset=3),
    "an offset beyond the storage": dict(offset=2**62),
    "lengths that overflow": dict(shape=(2**32, 2**32)),
    "a shape of NaN": dict(shape=(float("nan"), 2)),
    "a shape of booleans": dict(shape=(True, True)),
}


def _pickle_writer(data, legacy):
    def write(folder):
        if legacy:
            (folder / "a.pth").write_bytes(LEGACY_HEADER + data + pickle.dumps(["0"], 2) + struct.pack("<q", 4) + bytes(16))
            return folder / "a.pth"
        return write_archive(folder / "a.pth", data)

    return write


for _name, _data in pickle_attacks():
    FILES[f"pth: {_name}"] = _pickle_writer(_data, False)
    if len(_data) < 10**5:
        _old = _data.replace(push("cpu") + push(4) + b"tQ", push("cpu") + push(4) + b"NtQ")
        FILES[f"legacy pth: {_name}"] = _pickle_writer(_old, True)


@register("legacy pth: a storage larger than the file")
def legacy_storage(folder):
    old = tensor(shape=(2**38,), stride=(1,), count=2**38).replace(b"tQ", b"NtQ")
    data = LEGACY_HEADER + b"\x80\x02" + old + b"." + pickle.dumps(["0"], 2) + struct.pack("<q", 2**38) + bytes(16)
    (folder / "a.pth").write_bytes(data)
    return folder / "a.pth"


def pickle_with_shared_storage(rest=b"tQ"):
    """Return a pickle of 4000 tensors in one storage of 4 MiB.

    rest: the instructions after the number of elements of a storage, which differ in a legacy file.
    """
    one = tensor(shape=(SHARED_SIZE,), stride=(1,), count=SHARED_SIZE).replace(b"tQ", rest)
    return b"\x80\x02}(" + b"".join(push(f"w{number}") + one for number in range(4000)) + b"u."


SHARED_SIZE = 1 << 20


@register("pth: one storage for all tensors of a large model")
def shared_storage(folder):
    return write_archive(folder / "a.pth", pickle_with_shared_storage(), [bytes(4 * SHARED_SIZE)])


@register("legacy pth: one storage for all tensors of a large model")
def shared_legacy_storage(folder):
    end = pickle.dumps(["0"], 2) + struct.pack("<q", SHARED_SIZE) + bytes(4 * SHARED_SIZE)
    (folder / "a.pth").write_bytes(LEGACY_HEADER + pickle_with_shared_storage(b"NtQ") + end)
    return folder / "a.pth"


@register("legacy pth: a tensor of two elements 4 GB apart, in a hole")
def strided_hole(folder):
    count = 2**30 + 1
    old = tensor(shape=(2,), stride=(2**30,), count=count).replace(b"tQ", b"NtQ")
    data = LEGACY_HEADER + b"\x80\x02}" + push("w") + old + b"s." + pickle.dumps(["0"], 2) + struct.pack("<q", count)
    (folder / "a.pth").write_bytes(data)
    os.truncate(folder / "a.pth", len(data) + 4 * count)
    return folder / "a.pth"


# Folders of torch.distributed ------------------------------------------------------------------------------------------

PACKAGE = "torch.distributed.checkpoint"


def push_object(name, state):
    """Return the instructions that push an object with a state, which is given as instructions."""
    module, _, last = f"{PACKAGE}.{name}".rpartition(".")
    return f"c{module}\n{last}\n)\x81".encode("latin1") + state + b"b"


def push_dictionary(**items):
    return b"}(" + b"".join(push(key) + value for key, value in items.items()) + b"u"


def push_sizes(*numbers):
    return push(tuple(numbers))


def write_distributed(folder, planner=b"N", shape=(4,), chunks=(((0,), (4,)),), content=None):
    """Write a folder of torch.distributed with one tensor, whose `.metadata` is made of instructions.

    Args:
        folder: the folder to write into.
        planner: the instructions that push `planner_data`.
        shape: shape of the tensor.
        chunks: (offsets, sizes) of each chunk of the tensor.
        content: bytes of the file of all chunks; by default a valid archive.
    """
    props = push_object("metadata.TensorProperties", b"(ctorch\nfloat32\nN\x89N\x89t")
    parts = (
        b"]("
        + b"".join(
            push_object("metadata.ChunkStorageMetadata", push_dictionary(offsets=push_sizes(*o), sizes=push_sizes(*n)))
            for o, n in chunks
        )
        + b"e"
    )
    entry = push_object(
        "metadata.TensorStorageMetadata", push_dictionary(properties=props, size=push_sizes(*shape), chunks=parts)
    )
    content = (
        write_archive(folder / "part", b"\x80\x02" + tensor(shape=(4,), stride=(1,)) + b".").read_bytes()
        if content is None
        else content
    )
    (folder / "part").unlink(missing_ok=True)
    target = folder / "a"
    target.mkdir()
    (target / "__0_0.distcp").write_bytes(content)
    place = push_object(
        "filesystem._StorageInfo",
        push_dictionary(relative_path=push("__0_0.distcp"), offset=push(0), length=push(len(content))),
    )
    stored = (
        b"}("
        + b"".join(
            push_object("metadata.MetadataIndex", push_dictionary(fqn=push("w"), offset=push_sizes(*o), index=push(0)))
            + place
            for o, _ in chunks
        )
        + b"u"
    )
    state = b"}(" + push("state_dict_metadata") + b"}" + push("w") + entry + b"s" + push("storage_data") + stored
    state += push("planner_data") + planner + b"u"
    (target / ".metadata").write_bytes(b"\x80\x02" + push_object("metadata.Metadata", state) + b".")
    return target


@register("dcp: a nested tuple in planner_data")
def planner(folder):
    return write_distributed(folder, planner=b"}" + push("w") + b")q\0" + b"0h\0h\0\x86q\0" * 60 + b"s")


@register("dcp: many overlapping chunks")
def overlapping(folder):
    return write_distributed(folder, shape=(16_000,), chunks=[((0,), (1,))] * 16_000)


@register("dcp: offsets with equal hashes")
def colliding_offsets(folder):
    return write_distributed(folder, shape=(2**40,), chunks=[((k * PRIME,), (1,)) for k in range(2)] * 8000)


@register("dcp: chunks that share one byte range")
def shared_place(folder):
    data = b"\x80\x02" + tensor(shape=(SHARED_SIZE,), stride=(1,), count=SHARED_SIZE) + b"."
    content = write_archive(folder / "part", data, [bytes(4 * SHARED_SIZE)]).read_bytes()
    chunks = [((number * SHARED_SIZE,), (SHARED_SIZE,)) for number in range(4000)]
    return write_distributed(folder, shape=(4000 * SHARED_SIZE,), chunks=chunks, content=content)


@register("dcp: a shape of NaN")
def shape_of_nan(folder):
    return write_distributed(folder, shape=(float("nan"),))


@register("dcp: a pickle bomb in a chunk")
def bomb_in_part(folder):
    data = dict(pickle_attacks())["a path joined with itself"]
    return write_distributed(folder, content=write_archive(folder / "b", data).read_bytes())


def _long_path_writer(entry, pair=False):
    """Return a function that writes a folder of 3000 entries with long key paths.

    Args:
        entry: the instructions that push an entry.
        pair: whether a key path is a text of 4 MiB and the name of the entry, instead of the same text twice.
    """

    def write(folder):
        path = write_distributed(folder)
        names = [b"X\4\0\0\0%04d" % number for number in range(3000)]
        entries = b"}(" + b"".join(name + b"h\2" for name in names) + b"u"
        paths = b"}(" + b"".join(name + b"h\1" + (name if pair else b"h\1") + b"\x86" for name in names) + b"u"
        state = b"}(" + push("state_dict_metadata") + entries + push("storage_data") + b"}" + push("planner_data")
        prefix = push_text(b"k" * 2**22) + b"q\0010" + entry + b"q\0020"
        (path / ".metadata").write_bytes(b"\x80\2" + prefix + push_object("metadata.Metadata", state + paths + b"u") + b".")
        return path

    return write


FILES["dcp: metadata with long key paths"] = _long_path_writer(push_object("metadata.BytesStorageMetadata", b"N"))
FILES["dcp: tensors with long key paths"] = _long_path_writer(
    push_object(
        "metadata.TensorStorageMetadata",
        push_dictionary(
            properties=push_object("metadata.TensorProperties", b"(ctorch\nfloat32\nN\x89N\x89t"),
            size=push_sizes(0),
            chunks=b"]",
        ),
    ),
    pair=True,
)


# Zip archives ----------------------------------------------------------------------------------------------------------


@register("pth: a zip directory of many members")
def many_members(folder):
    return _directory(folder / "a.pth", b"archive/data.pkl", 600_000)


@register("npz: a zip directory of many members")
def many_arrays(folder):
    return _directory(folder / "a.npz", b"a.npy", 600_000)


def _directory(path, name, count):
    """Write a zip whose directory has `count` entries, all for one member."""
    local = struct.pack("<4sHHHHHIIIHH", b"PK\3\4", 20, 0, 0, 0, 0, 0, 4, 4, len(name), 0) + name + b"abcd"
    entry = struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\1\2", 20, 20, 0, 0, 0, 0, 0, 4, 4, len(name), 0, 0, 0, 0, 0, 0) + name
    size, start = count * len(entry), len(local)
    zip64 = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, start)
    zip64 += struct.pack("<4sIQI", b"PK\6\7", 0, start + size, 1)
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    path.write_bytes(local + entry * count + zip64 + end)
    return path


@register("pth: a zip directory larger than the file")
def endless_directory(folder):
    path = _directory(folder / "a.pth", b"archive/data.pkl", 10)
    data = bytearray(path.read_bytes())
    offset = data.rfind(b"PK\6\6") + 40
    data[offset : offset + 8] = struct.pack("<Q", 2**63)
    path.write_bytes(data)
    return path


@register("pth: a member whose name is long")
def long_member(folder):
    return write_archive(folder / "a.pth", b"\x80\2" + tensor(key="k" * 60_000) + b".", {"k" * 60_000: bytes(3)})


@register("npz: a compressed array in Fortran order")
def fortran(folder):
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": True, "shape": (2**14, 2**14)})
    with (
        zipfile.ZipFile(folder / "a.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file,
        file.open("a.npy", "w") as member,
    ):
        member.write(head.getvalue())
        for _ in range(2**6):
            member.write(bytes(2**24))
    return folder / "a.npz"


@register("npz: many compressed arrays of zeros")
def many_zeros(folder):
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": (2**26 - 32,)})
    with zipfile.ZipFile(folder / "a.npz", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a.npy", head.getvalue() + bytes(2**28 - 128))
        info = file.getinfo("a.npy")
    data = (folder / "a.npz").read_bytes()
    begin = data.index(b"PK\1\2")
    member, entry = data[:begin], data[begin : data.index(b"PK\5\6")]
    members, entries = bytearray(), bytearray()
    for number in range(40):
        name = bytes([ord("0") + number]) + b".npy"
        offset = struct.pack("<I", len(members))
        members += member.replace(b"a.npy", name, 1)
        entries += (entry[:42] + offset + entry[46:]).replace(b"a.npy", name, 1)
    assert info.compress_size < 2**19
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 40, 40, len(entries), len(members), 0)
    (folder / "a.npz").write_bytes(bytes(members + entries) + end)
    return folder / "a.npz"


@register("npz: a header of 2**40 entries")
def endless_array(folder):
    return _npz(folder, b"{'descr': '<f4', 'fortran_order': False, 'shape': (%d,), }" % 2**40)


@register("npz: a text of 4 GB")
def endless_text(folder):
    return _npz(folder, b"{'descr': '<U999999999', 'fortran_order': False, 'shape': (), }")


@register("npz: an unterminated header")
def open_header(folder):
    return _npz(folder, b"{'descr': '<f4', 'fortran_order': False, 'shape': (")


@register("npz: a header of brackets")
def brackets(folder):
    return _npz(folder, b"(" * 9000)


@register("npz: a header of spaces")
def spaces(folder):
    return _npz(folder, b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b" " * 9800 + b"x")


@register("npz: a header of 4 GiB")
def long_header(folder):
    with zipfile.ZipFile(folder / "a.npz", "w") as file:
        file.writestr("a.npy", b"\x93NUMPY\2\0" + struct.pack("<I", 2**32 - 1) + b"{" * 1000)
    return folder / "a.npz"


def _npz(folder, header):
    with zipfile.ZipFile(folder / "a.npz", "w") as file:
        file.writestr("a.npy", b"\x93NUMPY\1\0" + struct.pack("<H", len(header) + 1) + header + b"\n")
    return folder / "a.npz"


# JSON ------------------------------------------------------------------------------------------------------------------

JSON_TEXTS = {
    "deep": b"[" * 200_000 + b"]" * 200_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "less deep": b'{"a":' * 400 + b"1" + b"}" * 400,
    "many lists": b"[" + b"[]," * 300_000 + b"[]]",
    "a long number": b"[" + b"9" * 900_000 + b"]",
    "not a number": b'{"config": NaN}',
    "a list": b"[1]",
    "a lone surrogate": b'{"config": "\\ud800"}',
}


def write_safetensors(path, header, data=b""):
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def _config_writer(value):
    def write(folder):
        header = {"__metadata__": {"config": value.decode(), "format": "torch"}}
        header["w"] = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
        return write_safetensors(folder / "a.safetensors", json.dumps(header).encode(), bytes(4))

    return write


def _write_valid(folder):
    header = {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    return write_safetensors(folder / "a.safetensors", json.dumps(header).encode(), bytes(4))


def _sidecar_writer(name, value):
    def write(folder):
        path = _write_valid(folder)
        (folder / name).write_bytes(value)
        return path

    return write


def _index_writer(value):
    def write(folder):
        (folder / "a.safetensors.index.json").write_bytes(
            b'{"weight_map": {"a": "a.safetensors"}, "metadata": ' + value + b"}"
        )
        return folder / "a.safetensors.index.json"

    return write


for _name, _data in JSON_TEXTS.items():
    FILES[f"safetensors: {_name} as config"] = _config_writer(_data)
    FILES[f"config.json: {_name}"] = _sidecar_writer("config.json", _data)
    FILES[f"parity.json: {_name}"] = _sidecar_writer("a.safetensors.parity.json", _data)
    FILES[f"index: {_name}"] = _index_writer(_data)
    FILES[f"safetensors header: {_name}"] = lambda folder, data=_data: write_safetensors(folder / "a.safetensors", data)


@register("parity.json: a number instead of an object")
def beside_number(folder):
    from parity.checkpoints.sidecar import fingerprint

    path = folder / "a.msgpack"
    path.write_bytes(b"\x81\xa1a\xc0")
    (folder / "a.msgpack.parity.json").write_text(json.dumps({fingerprint(path): 1}))
    return path


@register("safetensors: arrays in a hole")
def hole(folder):
    size = 2**30
    header = json.dumps({"w": {"dtype": "F32", "shape": [size], "data_offsets": [0, 4 * size]}}).encode()
    path = write_safetensors(folder / "a.safetensors", header)
    os.truncate(path, 8 + len(header) + 4 * size)
    return path


@register("safetensors: a long shape")
def long_shape(folder):
    shape = b"1," * 8_000_000 + b"1"
    header = b'{"w":{"dtype":"F32","shape":[' + shape + b'],"data_offsets":[0,4]}}'
    return write_safetensors(folder / "a.safetensors", header, bytes(4))


@register("config.json: larger than memory")
def huge_json(folder):
    path = _write_valid(folder)
    with (folder / "config.json").open("wb") as file:
        file.write(b'{"model_type": "')
        file.truncate(2**36)
    return path


# Orbax -----------------------------------------------------------------------------------------------------------------


def write_orbax(folder, kind="np.ndarray", shape=(2,), chunks=(2,), zarray=None, chunk=None, custom=None, compressor=None):
    """Write a small Orbax folder of one array, without the library.

    Args:
        folder: the folder to write into.
        kind: the type of the array in the tree metadata.
        shape, chunks, compressor: fields of the `.zarray`.
        zarray: the content of the `.zarray`; by default valid JSON with these fields.
        chunk: the content of the chunk; by default zeros.
        custom: the custom metadata.
    """
    root = folder / "a"
    place = root / "params" / "w"
    place.mkdir(parents=True)
    tree = {
        "tree_metadata": {
            "('w',)": {
                "key_metadata": [{"key": "w", "key_type": 2}],
                "value_metadata": {"value_type": kind, "skip_deserialize": False},
            }
        },
        "use_ocdbt": False,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
    }
    (root / "params" / "_METADATA").write_text(json.dumps(tree))
    (root / "_CHECKPOINT_METADATA").write_text(json.dumps({"item_handlers": {}, "custom_metadata": custom or {}}))
    described = {"chunks": chunks, "compressor": compressor, "dimension_separator": ".", "dtype": "<f4", "fill_value": None}
    described |= {"filters": None, "order": "C", "shape": shape, "zarr_format": 2}
    (place / ".zarray").write_bytes(json.dumps(described).encode() if zarray is None else zarray)
    (place / "0").write_bytes(bytes(8) if chunk is None else chunk)
    return root


@register("orbax: a scalar of 3 GiB")
def large_scalar(folder):
    return write_orbax(folder, "scalar", (805306368,), (1024,))


@register("orbax: a scalar of 2**40 entries")
def endless_scalar(folder):
    return write_orbax(folder, "scalar", (2**40,), (2**40,))


@register("orbax: custom_metadata that is text")
def custom_text(folder):
    return write_orbax(folder, custom="abc")


@register("orbax: one chunk of 2**40 entries")
def endless_chunk(folder):
    return write_orbax(folder, shape=(2**40,), chunks=(2**40,))


@register("orbax: a chunk that decompresses to 1 GiB")
def gz_chunk(folder):
    packer = zlib.compressobj(1)
    packed = b"".join(packer.compress(bytes(2**24)) for _ in range(2**6)) + packer.flush()
    return write_orbax(folder, compressor={"id": "zlib", "level": 1}, chunk=packed)


@register("orbax: a chunk of zstd blocks that repeat a byte")
def zstd_chunk(folder):
    frame = struct.pack("<I", 0xFD2FB528) + bytes([0x00, 0x58])  # window of 2 MiB, size unknown
    block = ((131072 << 3) | (1 << 1)).to_bytes(3, "little") + b"\0"
    last = ((131072 << 3) | (1 << 1) | 1).to_bytes(3, "little") + b"\0"
    return write_orbax(folder, compressor={"id": "zstd", "level": 1}, chunk=frame + block * 32767 + last)


@register("orbax: deep .zarray")
def deep_zarray(folder):
    return write_orbax(folder, zarray=b'{"zarr_format": 2, "attributes": ' + b"[" * 10**6 + b"]" * 10**6 + b"}")


@register("orbax: deep tree")
def deep_tree(folder):
    path = write_orbax(folder)
    (path / "params" / "_METADATA").write_bytes(b'{"tree_metadata": ' + b"[" * 10**6 + b"]" * 10**6 + b"}")
    return path


@register("orbax: keys that are lists")
def list_keys(folder):
    path = write_orbax(folder)
    tree = json.loads((path / "params" / "_METADATA").read_text())
    nested = []
    for _ in range(500):
        nested = [nested, 1]
    tree["tree_metadata"]["('w',)"]["key_metadata"] = [{"key": nested}]
    (path / "params" / "_METADATA").write_text(json.dumps(tree))
    return path


def _orbax_without_chunks(folder, shape, chunks):
    """Write an Orbax folder whose chunks are missing, so that they are read as zeros."""
    path = write_orbax(folder, shape=shape, chunks=chunks)
    tree = json.loads((path / "params" / "_METADATA").read_text())
    (path / "params" / "_METADATA").write_text(json.dumps(tree | {"store_array_data_equal_to_fill_value": False}))
    (path / "params" / "w" / "0").unlink()
    return path


@register("orbax: 2**24 missing chunks")
def missing_chunks(folder):
    return _orbax_without_chunks(folder, (2**24,), (1,))


@register("orbax: 2**40 elements in missing chunks")
def missing_zeros(folder):
    return _orbax_without_chunks(folder, (2**40,), (2**24,))


@register("orbax: a shard of 2**30 chunks")
def zarr_shard(folder):
    path = write_orbax(folder)
    tree = json.loads((path / "params" / "_METADATA").read_text())
    (path / "params" / "_METADATA").write_text(json.dumps(tree | {"use_zarr3": True}))
    (path / "params" / "w" / ".zarray").unlink()
    plain = [{"name": "bytes", "configuration": {"endian": "little"}}]
    sharding = {"chunk_shape": [1], "codecs": plain, "index_codecs": plain, "index_location": "start"}
    described = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [2**30],
        "data_type": "float32",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2**30]}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": 0,
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }
    (path / "params" / "w" / "zarr.json").write_text(json.dumps(described))
    (path / "params" / "w" / "c").mkdir()
    (path / "params" / "w" / "c" / "0").write_bytes(bytes(100))
    return path


def _damaged_orbax_writer(damage, name):
    def write(folder):
        path = write_orbax(folder)
        damage(path / "params" / "w" / name)
        return path

    return write


def _replace_with_fifo(file):
    file.unlink()
    os.mkfifo(file)


def _extend_with_hole(file):
    os.truncate(file, 2**40)


FILES["orbax: a FIFO for a chunk"] = _damaged_orbax_writer(_replace_with_fifo, "0")
FILES["orbax: a FIFO for .zarray"] = _damaged_orbax_writer(_replace_with_fifo, ".zarray")
FILES["orbax: a chunk of holes"] = _damaged_orbax_writer(_extend_with_hole, "0")
FILES["orbax: a .zarray of holes"] = _damaged_orbax_writer(_extend_with_hole, ".zarray")


@register("orbax: a folder in itself")
def loop(folder):
    path = write_orbax(folder)
    (path / "params" / "loop").symlink_to(path)
    return path


@register("orbax: a FIFO behind a link to a folder")
def linked_fifo(folder):
    path = FILES["orbax: a FIFO for .zarray"](folder)
    (path / "params" / "w").rename(path / "elsewhere")
    (path / "params" / "w").symlink_to("../elsewhere")
    return path


@register("orbax: a .zarray of 8 MiB")
def long_zarray(folder):
    return write_orbax(folder, zarray=b" " * 2**23)


@register("orbax: a blosc chunk with a header of 2 GiB")
def blosc_chunk(folder):
    packer = {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0}
    chunk = bytes([2, 1, 0x21, 4]) + struct.pack("<III", 2**31 - 17, 2**20, 80) + bytes(64)
    return write_orbax(folder, compressor=packer, chunk=chunk)


@register("orbax: elements of 1 GB")
def large_entries(folder):
    described = {"chunks": [2], "compressor": None, "dtype": "|S1000000000", "fill_value": None, "filters": None}
    return write_orbax(folder, zarray=json.dumps({**described, "order": "C", "shape": [2], "zarr_format": 2}).encode())


# The B+trees of OCDBT stores: https://google.github.io/tensorstore/kvstore/ocdbt/index.html#storage-format

OCDBT_CONFIG = bytes(16) + b"\0\x64" + b"\x80\xc2\xd7\x2f" + b"\4\0"  # inline values of 100 bytes, nodes of 100,000,000


def varint(value):
    """Return an unsigned integer in groups of seven bits, the lowest first."""
    groups = [value >> shift & 127 for shift in range(0, max(value.bit_length(), 1), 7)]
    return bytes([*(group | 128 for group in groups[:-1]), groups[-1]])


def crc32c(data):
    """Return the CRC-32C of bytes."""
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    crc = 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def zstd_with_zeros(data, count):
    """Return a zstd frame of `data` and then about `count` zeros, in blocks that repeat a byte."""
    size = 1 << 17
    blocks = ((size << 3 | 2).to_bytes(3, "little") + b"\0") * (count // size)
    return struct.pack("<I", 0xFD2FB528) + b"\0\x58" + (len(data) << 3).to_bytes(3, "little") + data + blocks + b"\3\0\0\0"


def ocdbt_node(magic, body, compressed=False):
    """Return a manifest or a node of a tree, with its header and its checksum."""
    body = b"\0" + bytes([compressed]) + body
    data = struct.pack(">I", magic) + struct.pack("<Q", 12 + len(body) + 4) + body
    return data + struct.pack("<I", crc32c(data))


def write_ocdbt(folder, manifest, node=b""):
    """Write an Orbax folder whose array is in an OCDBT store with this manifest, and a file `node` beside it."""
    path = write_orbax(folder)
    tree = json.loads((path / "params" / "_METADATA").read_text())
    (path / "params" / "_METADATA").write_text(json.dumps(tree | {"use_ocdbt": True}))
    (path / "params" / "manifest.ocdbt").write_bytes(manifest)
    (path / "params" / "node").write_bytes(node)
    return path


def manifest_of_tree(length, height):
    """Return a manifest of one version, whose tree has its root in the file `node`."""
    files = varint(1) + varint(4) + varint(0) + b"node"  # number; lengths of the name and of its folder
    root = varint(0) + varint(0) + varint(length) + varint(1) + varint(1) + varint(0)  # file, range, statistics
    version = varint(1) + varint(1) + bytes([height]) + root + bytes(8)
    return ocdbt_node(0x0CDB3A2A, OCDBT_CONFIG + files + version + varint(0))


@register("orbax: a compressed OCDBT manifest of 2**28 files")
def ocdbt_files(folder):
    body = zstd_with_zeros(OCDBT_CONFIG + varint(2**28), 3 * 2**28)
    return write_ocdbt(folder, ocdbt_node(0x0CDB3A2A, body, compressed=True))


@register("orbax: a compressed OCDBT node of 2**28 files")
def ocdbt_node_files(folder):
    node = ocdbt_node(0x0CDB20DE, zstd_with_zeros(b"\0" + varint(2**28), 3 * 2**28), compressed=True)
    return write_ocdbt(folder, manifest_of_tree(len(node), 0), node)


@register("orbax: OCDBT keys of 60,000 bytes, stored as differences")
def ocdbt_keys(folder):
    length, count = 60_000, 2**15
    prefixes = varint(length) * (count - 1) + varint(0)  # of all keys but the first
    suffixes = varint(length) + varint(3) * (count - 1) + varint(1)
    keys = bytes(length) + b"".join(i.to_bytes(3, "big") for i in range(1, count)) + b"\1"
    values = bytes(2 * (count + 1))  # lengths and kinds
    node = ocdbt_node(0x0CDB20DE, b"\0\0" + varint(count + 1) + prefixes + suffixes + keys + values)
    return write_ocdbt(folder, manifest_of_tree(len(node), 0), node)


@register("orbax: an OCDBT tree of 2**60 keys")
def ocdbt_tree(folder):
    def reference(offset, length):
        """Return the entries "a" and "b" of a node, both with the same child, whose keys are relative to theirs."""
        return varint(0) * 2 + varint(offset) * 2 + varint(length) * 2 + varint(1) * 4 + varint(0) * 2

    files = varint(1) + varint(4) + varint(0) + b"node"
    data = leaf = ocdbt_node(0x0CDB20DE, b"\0\0" + varint(1) + varint(1) + b"a" + bytes(2))
    offset, length = 0, len(leaf)
    for height in range(1, 60):
        keys = varint(2) + varint(0) + varint(1) * 2 + varint(1) * 2 + b"ab"  # number, prefix, suffixes, common prefixes
        node = ocdbt_node(0x0CDB20DE, bytes([height]) + files + keys + reference(offset, length))
        offset, length, data = len(data), len(node), data + node
    root = varint(0) + varint(offset) + varint(length) + varint(1) + varint(1) + varint(0)
    version = varint(1) + varint(1) + bytes([59]) + root + bytes(8)
    return write_ocdbt(folder, ocdbt_node(0x0CDB3A2A, OCDBT_CONFIG + files + version + varint(0)), data)


# msgpack ---------------------------------------------------------------------------------------------------------------


@register("msgpack: deep maps")
def deep_maps(folder):
    (folder / "a.msgpack").write_bytes(b"\x81\xa1a" * 10**6 + b"\xc0")
    return folder / "a.msgpack"


@register("msgpack: a map of 2**32 entries")
def endless_map(folder):
    (folder / "a.msgpack").write_bytes(b"\xdf\xff\xff\xff\xff\xa1a\xc0")
    return folder / "a.msgpack"


@register("msgpack: long keys in long keys")
def long_names(folder):
    name = b"\xda" + struct.pack(">H", 4096) + b"k" * 4096
    leaves = b"".join(b"\xa5%05d\xc0" % i for i in range(60_000))
    (folder / "a.msgpack").write_bytes((b"\x81" + name) * 60 + b"\xde" + struct.pack(">H", 60_000) + leaves)
    return folder / "a.msgpack"


@register("msgpack: chunks without elements")
def empty_parts(folder):
    array = b"\x93\x91\0\xa7float32\xc4\0"  # (shape (0,), dtype, no bytes)
    part = b"\xc7" + bytes([len(array), 1]) + array
    count = 100_000
    keys = (b"%d" % i for i in range(count))
    parts = b"".join(bytes([0xA0 + len(key)]) + key + part for key in keys)
    body = b"\x83\xb9__msgpack_chunked_array__\xc3\xa5shape\x81\xa10\0\xa6chunks\xdf" + struct.pack(">I", count) + parts
    (folder / "a.msgpack").write_bytes(b"\x81\xa1w" + body)
    return folder / "a.msgpack"


# Special files and unknown formats ------------------------------------------------------------------------------------


@register("a FIFO")
def fifo(folder):
    os.mkfifo(folder / "a.pth")
    return folder / "a.pth"


@register("a socket")
def a_socket(folder):
    previous = os.getcwd()  # the path of a socket has at most 108 bytes, so it is relative
    os.chdir(folder)
    try:
        socket.socket(socket.AF_UNIX).bind("a.pth")
    finally:
        os.chdir(previous)
    return folder / "a.pth"


@register("a device")
def device(folder):
    return Path("/dev/zero")


@register("a link to itself")
def self_link(folder):
    (folder / "a.pth").symlink_to("a.pth")
    return folder / "a.pth"


@register("a FIFO for config.json")
def fifo_config(folder):
    path = _write_valid(folder)
    os.mkfifo(folder / "config.json")
    return path


@register("a FIFO for a shard")
def fifo_shard(folder):
    os.mkfifo(folder / "b.safetensors")
    (folder / "a.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}')
    return folder


@register("a folder of a FIFO")
def folder_of_fifo(folder):
    (folder / "a").mkdir()
    os.mkfifo(folder / "a" / "model.safetensors")
    return folder / "a"


@register("a gzip file of zeros")
def gzip_file(folder):
    with gzip.open(folder / "a.pth", "wb") as file:
        file.write(bytes(2**20))
    return folder / "a.pth"
