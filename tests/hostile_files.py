"""Small files that ask for much memory, much time, or something that no file may ask for.

Each function writes one hostile file or folder into an empty folder and returns its path.
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


def hostile(name):
    """Register a function that writes a hostile file."""

    def add(function):
        assert name not in FILES
        FILES[name] = function
        return function

    return add


# Pickles --------------------------------------------------------------------------------------------------------------

PRIME = 2**61 - 1  # hash(k * PRIME) == 0 for every integer k
TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"
LEGACY = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2)
LEGACY += pickle.dumps(
    {"protocol_version": 1001, "little_endian": True, "type_sizes": {"short": 2, "int": 4, "long": 4}}, 2
)


def archive(path, data, storages=(bytes(16),)):
    """Write a zip archive as torch.save does, around any pickle."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", data)
        file.writestr("archive/byteorder", b"little")
        for key, storage in storages.items() if isinstance(storages, dict) else enumerate(storages):
            file.writestr(f"archive/data/{key}", storage)
    return path


def dumped(value):
    """Return the instructions that push a value, without the frame of a pickle."""
    return pickle.dumps(value, 2)[2:-1]


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value


def storage(count=4, key="0", kind="FloatStorage"):
    """Return the instructions that push a storage of an archive."""
    return b"(X\7\0\0\0storagectorch\n" + kind.encode() + b"\n" + dumped(key) + dumped("cpu") + dumped(count) + b"tQ"


def tensor(offset=0, shape=(2, 2), stride=(2, 1), count=4, key="0", kind="FloatStorage", metadata=None):
    """Return the instructions that push a tensor, with the numbers given."""
    end = b"ccollections\nOrderedDict\n)R" + (b"" if metadata is None else dumped(metadata))
    return (
        TENSOR + b"(" + storage(count, key, kind) + dumped(offset) + dumped(shape) + dumped(stride) + b"\x89" + end + b"tR"
    )


def calls(function, first, arguments, times):
    """Return a pickle that calls a function on its own result again and again, through the memo."""
    head = b"\x80\x02" + first + b"q\0" + b"c" + function.replace(b".", b"\n", 1) + b"\nq\1"
    return head + b"".join(b"h\1" + arguments + b"Rq\0" for _ in range(times)) + b"."


def pickles():
    """Yield hostile pickles by name."""
    big = text(b"x" * 1000)
    double = b"h\0h\0\x86"
    yield "path joined with itself", calls(b"pathlib.PosixPath", text(b"s" * 20), double, 32)
    yield "path of many parts", calls(b"pathlib.PosixPath", big + b"q\2" + b"0(" + b"h\2" * 50 + b"t", b"h\0", 3)
    many = b"\x80\x02" + text(b"x" * 2**20) + b"q\0(" + b"h\0" * 4000 + b"tq\1cpathlib\nPosixPath\nh\1R."
    yield "path of one part 4000 times", many
    sizes = b"\x80\x02](" + b"K\1" * 60_000 + b"eq\0ctorch\nSize\nq\1]q\2" + b"h\2h\1h\0\x85Ra0" * 40_000 + b"."
    yield "torch.Size of one list, repeated", sizes
    coded = b"\x80\x02" + text(b"x" * 2**20) + b"q\0c_codecs\nencode\nq\1X\6\0\0\0latin1q\2("
    yield "one text encoded again and again", coded + b"h\1h\0h\2\x86R" * 8000 + b"l."
    nested = b"\x80\x02)q\0" + b"h\0h\0\x86q\0" * 60
    yield "device with a nested tuple", nested + b"ctorch\ndevice\nX\4\0\0\0cudah\0\x86R."
    yield "dtype with a nested tuple", nested + b"cnumpy\ndtype\nh\0K\0K\1\x87R."
    yield "path with a nested tuple", nested + b"cpathlib\nPosixPath\nh\0\x85R."
    pairs = b"".join(dumped(k * PRIME) + b"N" for k in range(1, 40_000))
    yield "integer keys that collide", b"\x80\x02}(" + pairs + b"u."
    yield "memo places that collide", b"N" + b"".join(b"p%d\n" % (k * PRIME) for k in range(1, 40_000)) + b"."
    yield (
        "float keys that collide",
        b"\x80\x02}(" + b"".join(b"G" + struct.pack(">d", 2.0**k) + b"N" for k in range(1000)) + b"u.",
    )
    yield (
        "a storage's key, repeated",
        (
            b"\x80\x02"
            + text(b"k" * 2**22)
            + b"q\0X\7\0\0\0storageq\1ctorch\nFloatStorage\nq\2("
            + b"(h\1h\2h\0h\1K\1tQ" * 10**5
            + b"l."
        ),
    )
    yield (
        "a class whose name is long, repeated",
        (b"\x80\x04\x8c\x09__torch__\x94" + text(b"k" * 2**21) + b"\x94(" + b"h\0h\1\x93" * 10**5 + b"l."),
    )
    yield "dictionaries, one an instruction", b"\x80\x02(" + b"}" * (2**24 - 10) + b"l."
    yield "marks, one an instruction", b"\x80\x02" + b"(" * (2**24 - 10) + b"."
    yield "instructions without an effect", b"\x80\x02" + b"N0" * (2**23 - 10) + b"N."
    yield "records, one in three instructions", b"\x80\x02cargparse\nNamespace\nq\0(" + b"h\0)\x81" * 5_000_000 + b"l."
    deep = b"\x80\x02N" + b"\x85" * (2**24 - 10) + b"."
    yield "a tuple a tuple deep, 16 million times", deep
    yield "records in records", b"\x80\x02Nq\0cargparse\nNamespace\nq\1" + b"0h\1)\x81h\0bq\0" * 10**6 + b"h\0."
    twice = b"}(K\1" + tensor() + text(b"1") + tensor() + b"u"
    yield "two tensors of one long key", b"\x80\2}" + text(b"k" * 2**22) + twice + b"s."
    yield "lists of lists", b"\x80\x02]q\0" + b"](h\0h\0h\0eq\0" * 60 + b"."
    yield "dictionaries of dictionaries", b"\x80\x02}q\0" + b"}(K\0h\0K\1h\0uq\0" * 60 + b"."
    yield (
        "one long key above many entries",
        (
            b"\x80\x02}q\0("
            + b"".join(b"M" + struct.pack("<H", i) + b"N" for i in range(60_000))
            + b"u0}"
            + text(b"k" * 2**23)
            + b"h\0s."
        ),
    )
    yield (
        "notes under long keys",
        (
            b"\x80\x02}q\0("
            + b"".join(b"M" + struct.pack("<H", i) + b"K\1" for i in range(60_000))
            + b"u0}"
            + text(b"k" * 2**23)
            + b"h\0s."
        ),
    )
    yield "a long integer", b"\x80\x02\x8b" + struct.pack("<i", 2**24 - 100) + b"\x7f" * (2**24 - 100) + b"."
    yield "a long integer as a key", b"\x80\x02}\x8b" + struct.pack("<i", 2**23) + b"\x7f" * 2**23 + b"Ns."
    yield "long integers in decimal", b"I" + b"9" * 4_000_000 + b"\n."
    yield (
        "a long integer as a count",
        b"\x80\x02"
        + TENSOR
        + b"("
        + storage().replace(dumped(4), b"\x8b" + struct.pack("<i", 10**6) + b"\x7f" * 10**6)
        + b".",
    )
    yield "a text that says it is endless", b"\x80\x04\x8d" + struct.pack("<Q", 2**62) + b"ab."
    yield "a frame that says it is endless", b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N."
    yield "a far place in the memo", b"Nr\xff\xff\xff\xff."
    yield "a bytearray", b"cbuiltins\nbytearray\nJ" + struct.pack("<i", 2**31 - 1) + b"\x85R."
    yield (
        "a conjugate",
        b"\x80\x02" + tensor(kind="ComplexFloatStorage", shape=(2,), stride=(1,), count=2, metadata={"conj": True}) + b".",
    )
    yield "a negative", b"\x80\x02" + tensor(shape=(2,), stride=(1,), metadata={"neg": True}) + b"."
    for name, numbers in TENSORS.items():
        yield name, b"\x80\x02" + tensor(**numbers) + b"."
    for builder in (
        "_rebuild_sparse_tensor",
        "_rebuild_qtensor",
        "_rebuild_meta_tensor_no_storage",
        "_rebuild_nested_tensor",
    ):
        yield builder, b"\x80\x02ctorch._utils\n" + builder.encode() + b"\n" + tensor() + b"\x85R."


TENSORS = {
    "a tensor that repeats an entry": dict(shape=(30_000, 30_000), stride=(0, 0)),
    "a tensor that overlaps itself": dict(shape=(2, 3), stride=(1, 1)),
    "negative lengths": dict(shape=(-2, -2)),
    "negative strides": dict(stride=(-2, -1), offset=3),
    "an offset beyond": dict(offset=2**62),
    "lengths that overflow": dict(shape=(2**32, 2**32)),
    "a shape of NaN": dict(shape=(float("nan"), 2)),
    "a shape of truths": dict(shape=(True, True)),
}


def _pickle(data, legacy):
    def write(folder):
        if legacy:
            (folder / "a.pth").write_bytes(LEGACY + data + pickle.dumps(["0"], 2) + struct.pack("<q", 4) + bytes(16))
            return folder / "a.pth"
        return archive(folder / "a.pth", data)

    return write


for _name, _data in pickles():
    FILES[f"pth: {_name}"] = _pickle(_data, False)
    if len(_data) < 10**5:
        _old = _data.replace(dumped("cpu") + dumped(4) + b"tQ", dumped("cpu") + dumped(4) + b"NtQ")
        FILES[f"legacy pth: {_name}"] = _pickle(_old, True)


@hostile("legacy pth: a storage larger than the file")
def legacy_storage(folder):
    old = tensor(shape=(2**38,), stride=(1,), count=2**38).replace(b"tQ", b"NtQ")
    data = LEGACY + b"\x80\x02" + old + b"." + pickle.dumps(["0"], 2) + struct.pack("<q", 2**38) + bytes(16)
    (folder / "a.pth").write_bytes(data)
    return folder / "a.pth"


def shared(rest=b"tQ"):
    """Return a pickle of 4000 tensors that look at one storage of 4 MiB."""
    one = tensor(shape=(SHARED,), stride=(1,), count=SHARED).replace(b"tQ", rest)
    return b"\x80\x02}(" + b"".join(dumped(f"w{number}") + one for number in range(4000)) + b"u."


SHARED = 1 << 20


@hostile("pth: a storage that is the tensors of a large model")
def shared_storage(folder):
    return archive(folder / "a.pth", shared(), [bytes(4 * SHARED)])


@hostile("legacy pth: a storage that is the tensors of a large model")
def shared_legacy_storage(folder):
    end = pickle.dumps(["0"], 2) + struct.pack("<q", SHARED) + bytes(4 * SHARED)
    (folder / "a.pth").write_bytes(LEGACY + shared(b"NtQ") + end)
    return folder / "a.pth"


# Folders of torch.distributed ------------------------------------------------------------------------------------------

HOME = "torch.distributed.checkpoint"


def record(name, state):
    """Return the instructions of an object with a state, which is given as instructions."""
    module, _, last = f"{HOME}.{name}".rpartition(".")
    return f"c{module}\n{last}\n)\x81".encode("latin1") + state + b"b"


def mapping(**items):
    return b"}(" + b"".join(dumped(key) + value for key, value in items.items()) + b"u"


def sizes(*numbers):
    return dumped(tuple(numbers))


def distributed(folder, planner=b"N", shape=(4,), chunks=(((0,), (4,)),), content=None):
    """Write a folder of torch.distributed with one tensor, from instructions."""
    props = record("metadata.TensorProperties", b"(ctorch\nfloat32\nN\x89N\x89t")
    parts = (
        b"]("
        + b"".join(record("metadata.ChunkStorageMetadata", mapping(offsets=sizes(*o), sizes=sizes(*n))) for o, n in chunks)
        + b"e"
    )
    entry = record("metadata.TensorStorageMetadata", mapping(properties=props, size=sizes(*shape), chunks=parts))
    content = (
        archive(folder / "part", b"\x80\x02" + tensor(shape=(4,), stride=(1,)) + b".").read_bytes()
        if content is None
        else content
    )
    (folder / "part").unlink(missing_ok=True)
    target = folder / "a"
    target.mkdir()
    (target / "__0_0.distcp").write_bytes(content)
    place = record(
        "filesystem._StorageInfo",
        mapping(relative_path=dumped("__0_0.distcp"), offset=dumped(0), length=dumped(len(content))),
    )
    stored = (
        b"}("
        + b"".join(
            record("metadata.MetadataIndex", mapping(fqn=dumped("w"), offset=sizes(*o), index=dumped(0))) + place
            for o, _ in chunks
        )
        + b"u"
    )
    state = b"}(" + dumped("state_dict_metadata") + b"}" + dumped("w") + entry + b"s" + dumped("storage_data") + stored
    state += dumped("planner_data") + planner + b"u"
    (target / ".metadata").write_bytes(b"\x80\x02" + record("metadata.Metadata", state) + b".")
    return target


@hostile("dcp: a nested tuple in planner_data")
def planner(folder):
    return distributed(folder, planner=b"}" + dumped("w") + b")q\0" + b"0h\0h\0\x86q\0" * 60 + b"s")


@hostile("dcp: many chunks that lie on one another")
def overlapping(folder):
    return distributed(folder, shape=(16_000,), chunks=[((0,), (1,))] * 16_000)


@hostile("dcp: offsets that collide")
def colliding_offsets(folder):
    return distributed(folder, shape=(2**40,), chunks=[((k * PRIME,), (1,)) for k in range(2)] * 8000)


@hostile("dcp: parts that are one place of the file")
def shared_place(folder):
    data = b"\x80\x02" + tensor(shape=(SHARED,), stride=(1,), count=SHARED) + b"."
    content = archive(folder / "part", data, [bytes(4 * SHARED)]).read_bytes()
    chunks = [((number * SHARED,), (SHARED,)) for number in range(4000)]
    return distributed(folder, shape=(4000 * SHARED,), chunks=chunks, content=content)


@hostile("dcp: a shape of NaN")
def shape_of_nan(folder):
    return distributed(folder, shape=(float("nan"),))


@hostile("dcp: a part that is a bomb")
def bomb_in_part(folder):
    data = dict(pickles())["path joined with itself"]
    return distributed(folder, content=archive(folder / "b", data).read_bytes())


def _long_paths(entry, pair=False):
    """Return a writer of a folder of 3000 entries, each under a path of one text of 4 MiB twice, or once with its name."""

    def write(folder):
        path = distributed(folder)
        names = [b"X\4\0\0\0%04d" % number for number in range(3000)]
        entries = b"}(" + b"".join(name + b"h\2" for name in names) + b"u"
        paths = b"}(" + b"".join(name + b"h\1" + (name if pair else b"h\1") + b"\x86" for name in names) + b"u"
        state = b"}(" + dumped("state_dict_metadata") + entries + dumped("storage_data") + b"}" + dumped("planner_data")
        shared = text(b"k" * 2**22) + b"q\0010" + entry + b"q\0020"
        (path / ".metadata").write_bytes(b"\x80\2" + shared + record("metadata.Metadata", state + paths + b"u") + b".")
        return path

    return write


FILES["dcp: notes under long paths"] = _long_paths(record("metadata.BytesStorageMetadata", b"N"))
FILES["dcp: tensors under long paths"] = _long_paths(
    record(
        "metadata.TensorStorageMetadata",
        mapping(
            properties=record("metadata.TensorProperties", b"(ctorch\nfloat32\nN\x89N\x89t"), size=sizes(0), chunks=b"]"
        ),
    ),
    pair=True,
)


# Zip archives ----------------------------------------------------------------------------------------------------------


@hostile("pth: a zip directory of many members")
def many_members(folder):
    return _directory(folder / "a.pth", b"archive/data.pkl", 600_000)


@hostile("npz: a zip directory of many members")
def many_arrays(folder):
    return _directory(folder / "a.npz", b"a.npy", 600_000)


def _directory(path, name, count):
    """Write a zip whose directory has very many entries, all of one member."""
    local = struct.pack("<4sHHHHHIIIHH", b"PK\3\4", 20, 0, 0, 0, 0, 0, 4, 4, len(name), 0) + name + b"abcd"
    entry = struct.pack("<4sHHHHHHIIIHHHHHII", b"PK\1\2", 20, 20, 0, 0, 0, 0, 0, 4, 4, len(name), 0, 0, 0, 0, 0, 0) + name
    size, start = count * len(entry), len(local)
    zip64 = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, start)
    zip64 += struct.pack("<4sIQI", b"PK\6\7", 0, start + size, 1)
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    path.write_bytes(local + entry * count + zip64 + end)
    return path


@hostile("pth: a zip directory larger than the file")
def endless_directory(folder):
    path = _directory(folder / "a.pth", b"archive/data.pkl", 10)
    data = bytearray(path.read_bytes())
    at = data.rfind(b"PK\6\6") + 40
    data[at : at + 8] = struct.pack("<Q", 2**63)
    path.write_bytes(data)
    return path


@hostile("pth: a member whose name is long")
def long_member(folder):
    return archive(folder / "a.pth", b"\x80\2" + tensor(key="k" * 60_000) + b".", {"k" * 60_000: bytes(3)})


@hostile("npz: a compressed array in Fortran order")
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


@hostile("npz: many compressed arrays of zeros")
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
        place = struct.pack("<I", len(members))
        members += member.replace(b"a.npy", name, 1)
        entries += (entry[:42] + place + entry[46:]).replace(b"a.npy", name, 1)
    assert info.compress_size < 2**19
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 40, 40, len(entries), len(members), 0)
    (folder / "a.npz").write_bytes(bytes(members + entries) + end)
    return folder / "a.npz"


@hostile("npz: a header of 2**40 entries")
def endless_array(folder):
    return _npz(folder, b"{'descr': '<f4', 'fortran_order': False, 'shape': (%d,), }" % 2**40)


@hostile("npz: a text of 4 GB")
def endless_text(folder):
    return _npz(folder, b"{'descr': '<U999999999', 'fortran_order': False, 'shape': (), }")


@hostile("npz: a header that is left open")
def open_header(folder):
    return _npz(folder, b"{'descr': '<f4', 'fortran_order': False, 'shape': (")


@hostile("npz: a header of brackets")
def brackets(folder):
    return _npz(folder, b"(" * 9000)


@hostile("npz: a header of spaces")
def spaces(folder):
    return _npz(folder, b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b" " * 9800 + b"x")


@hostile("npz: a header of 4 GiB")
def long_header(folder):
    with zipfile.ZipFile(folder / "a.npz", "w") as file:
        file.writestr("a.npy", b"\x93NUMPY\2\0" + struct.pack("<I", 2**32 - 1) + b"{" * 1000)
    return folder / "a.npz"


def _npz(folder, header):
    with zipfile.ZipFile(folder / "a.npz", "w") as file:
        file.writestr("a.npy", b"\x93NUMPY\1\0" + struct.pack("<H", len(header) + 1) + header + b"\n")
    return folder / "a.npz"


# JSON ------------------------------------------------------------------------------------------------------------------

JSONS = {
    "deep": b"[" * 200_000 + b"]" * 200_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "less deep": b'{"a":' * 400 + b"1" + b"}" * 400,
    "many lists": b"[" + b"[]," * 300_000 + b"[]]",
    "a long number": b"[" + b"9" * 900_000 + b"]",
    "not a number": b'{"config": NaN}',
    "a list": b"[1]",
    "half a surrogate": b'{"config": "\\ud800"}',
}


def safetensors(path, header, data=b""):
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def _metadata(value):
    def write(folder):
        header = {"__metadata__": {"config": value.decode(), "format": "torch"}}
        header["w"] = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
        return safetensors(folder / "a.safetensors", json.dumps(header).encode(), bytes(4))

    return write


def _valid(folder):
    header = {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
    return safetensors(folder / "a.safetensors", json.dumps(header).encode(), bytes(4))


def _beside(name, value):
    def write(folder):
        path = _valid(folder)
        (folder / name).write_bytes(value)
        return path

    return write


def _index(value):
    def write(folder):
        (folder / "a.safetensors.index.json").write_bytes(
            b'{"weight_map": {"a": "a.safetensors"}, "metadata": ' + value + b"}"
        )
        return folder / "a.safetensors.index.json"

    return write


for _name, _data in JSONS.items():
    FILES[f"safetensors: {_name} as config"] = _metadata(_data)
    FILES[f"config.json: {_name}"] = _beside("config.json", _data)
    FILES[f"parity.json: {_name}"] = _beside("a.safetensors.parity.json", _data)
    FILES[f"index: {_name}"] = _index(_data)
    FILES[f"safetensors header: {_name}"] = lambda folder, data=_data: safetensors(folder / "a.safetensors", data)


@hostile("parity.json: a number for what it says of the file")
def beside_number(folder):
    from parity.checkpoints.reading import fingerprint

    path = folder / "a.msgpack"
    path.write_bytes(b"\x81\xa1a\xc0")
    (folder / "a.msgpack.parity.json").write_text(json.dumps({fingerprint(path): 1}))
    return path


@hostile("safetensors: a long shape")
def long_shape(folder):
    shape = b"1," * 8_000_000 + b"1"
    header = b'{"w":{"dtype":"F32","shape":[' + shape + b'],"data_offsets":[0,4]}}'
    return safetensors(folder / "a.safetensors", header, bytes(4))


@hostile("config.json: larger than memory")
def huge_json(folder):
    path = _valid(folder)
    with (folder / "config.json").open("wb") as file:
        file.write(b'{"model_type": "')
        file.truncate(2**36)
    return path


# Orbax -----------------------------------------------------------------------------------------------------------------


def orbax(folder, kind="np.ndarray", shape=(2,), chunks=(2,), zarray=None, chunk=None, custom=None, compressor=None):
    """Write a small Orbax folder of one array, from JSON alone."""
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


@hostile("orbax: a scalar of 3 GiB")
def large_scalar(folder):
    path = orbax(folder, "scalar", (805306368,), (1024,))
    return path


@hostile("orbax: a scalar of 2**40 entries")
def endless_scalar(folder):
    return orbax(folder, "scalar", (2**40,), (2**40,))


@hostile("orbax: custom_metadata that is text")
def custom_text(folder):
    return orbax(folder, custom="abc")


@hostile("orbax: one chunk of 2**40 entries")
def endless_chunk(folder):
    return orbax(folder, shape=(2**40,), chunks=(2**40,))


@hostile("orbax: a chunk that decompresses to 1 GiB")
def gz_chunk(folder):
    packer = zlib.compressobj(1)
    packed = b"".join(packer.compress(bytes(2**24)) for _ in range(2**6)) + packer.flush()
    return orbax(folder, compressor={"id": "zlib", "level": 1}, chunk=packed)


@hostile("orbax: a chunk of zstd blocks that repeat a byte")
def zstd_chunk(folder):
    frame = struct.pack("<I", 0xFD2FB528) + bytes([0x00, 0x58])  # window of 2 MiB, size unknown
    block = ((131072 << 3) | (1 << 1)).to_bytes(3, "little") + b"\0"
    last = ((131072 << 3) | (1 << 1) | 1).to_bytes(3, "little") + b"\0"
    return orbax(folder, compressor={"id": "zstd", "level": 1}, chunk=frame + block * 32767 + last)


@hostile("orbax: deep .zarray")
def deep_zarray(folder):
    return orbax(folder, zarray=b'{"zarr_format": 2, "attributes": ' + b"[" * 10**6 + b"]" * 10**6 + b"}")


@hostile("orbax: deep tree")
def deep_tree(folder):
    path = orbax(folder)
    (path / "params" / "_METADATA").write_bytes(b'{"tree_metadata": ' + b"[" * 10**6 + b"]" * 10**6 + b"}")
    return path


@hostile("orbax: keys that are lists")
def list_keys(folder):
    path = orbax(folder)
    tree = json.loads((path / "params" / "_METADATA").read_text())
    nested = []
    for _ in range(500):
        nested = [nested, 1]
    tree["tree_metadata"]["('w',)"]["key_metadata"] = [{"key": nested}]
    (path / "params" / "_METADATA").write_text(json.dumps(tree))
    return path


def _of_zeros(folder, shape, chunks):
    """Write an Orbax folder without any chunk, for which zeros stand."""
    path = orbax(folder, shape=shape, chunks=chunks)
    tree = json.loads((path / "params" / "_METADATA").read_text())
    (path / "params" / "_METADATA").write_text(json.dumps(tree | {"store_array_data_equal_to_fill_value": False}))
    (path / "params" / "w" / "0").unlink()
    return path


@hostile("orbax: 2**24 chunks that are not there")
def missing_chunks(folder):
    return _of_zeros(folder, (2**24,), (1,))


@hostile("orbax: 2**40 zeros that are not there")
def missing_zeros(folder):
    return _of_zeros(folder, (2**40,), (2**24,))


@hostile("orbax: a shard of 2**30 chunks")
def zarr_shard(folder):
    path = orbax(folder)
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


def _orbax_in_which(harm, name):
    def write(folder):
        path = orbax(folder)
        harm(path / "params" / "w" / name)
        return path

    return write


def _become_a_fifo(file):
    file.unlink()
    os.mkfifo(file)


def _become_a_hole(file):
    os.truncate(file, 2**40)


FILES["orbax: a FIFO for a chunk"] = _orbax_in_which(_become_a_fifo, "0")
FILES["orbax: a FIFO for .zarray"] = _orbax_in_which(_become_a_fifo, ".zarray")
FILES["orbax: a chunk of holes"] = _orbax_in_which(_become_a_hole, "0")
FILES["orbax: a .zarray of holes"] = _orbax_in_which(_become_a_hole, ".zarray")


@hostile("orbax: a folder in itself")
def loop(folder):
    path = orbax(folder)
    (path / "params" / "loop").symlink_to(path)
    return path


@hostile("orbax: a FIFO behind a link to a folder")
def linked_fifo(folder):
    path = FILES["orbax: a FIFO for .zarray"](folder)
    (path / "params" / "w").rename(path / "elsewhere")
    (path / "params" / "w").symlink_to("../elsewhere")
    return path


@hostile("orbax: a .zarray of 8 MiB")
def long_zarray(folder):
    return orbax(folder, zarray=b" " * 2**23)


@hostile("orbax: a chunk of blosc that says it is 2 GiB")
def blosc_chunk(folder):
    packer = {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0}
    chunk = bytes([2, 1, 0x21, 4]) + struct.pack("<III", 2**31 - 17, 2**20, 80) + bytes(64)
    return orbax(folder, compressor=packer, chunk=chunk)


@hostile("orbax: entries of 1 GB")
def large_entries(folder):
    described = {"chunks": [2], "compressor": None, "dtype": "|S1000000000", "fill_value": None, "filters": None}
    return orbax(folder, zarray=json.dumps({**described, "order": "C", "shape": [2], "zarr_format": 2}).encode())


# msgpack ---------------------------------------------------------------------------------------------------------------


@hostile("msgpack: deep maps")
def deep_maps(folder):
    (folder / "a.msgpack").write_bytes(b"\x81\xa1a" * 10**6 + b"\xc0")
    return folder / "a.msgpack"


@hostile("msgpack: a map of 2**32 entries")
def endless_map(folder):
    (folder / "a.msgpack").write_bytes(b"\xdf\xff\xff\xff\xff\xa1a\xc0")
    return folder / "a.msgpack"


@hostile("msgpack: long names in long names")
def long_names(folder):
    name = b"\xda" + struct.pack(">H", 4096) + b"k" * 4096
    leaves = b"".join(b"\xa5%05d\xc0" % i for i in range(60_000))
    (folder / "a.msgpack").write_bytes((b"\x81" + name) * 60 + b"\xde" + struct.pack(">H", 60_000) + leaves)
    return folder / "a.msgpack"


@hostile("msgpack: parts without entries")
def empty_parts(folder):
    part = b"\xc7" + bytes([18, 1]) + b"\x93\x91\0\xa7float32\xc4\0"
    part = b"\xc7" + bytes([len(part) - 3, 1]) + part[3:]
    count = 100_000
    parts = b"".join(b"\xa6%06d" % i + part for i in range(count)).replace(b"\xa6", b"\xa6")
    body = b"\x83\xb9__msgpack_chunked_array__\xc3\xa5shape\x81\xa10\0\xa6chunks\xdf" + struct.pack(">I", count) + parts
    (folder / "a.msgpack").write_bytes(b"\x81\xa1w" + body)
    return folder / "a.msgpack"


# Things that are no files ----------------------------------------------------------------------------------------------


@hostile("a FIFO")
def fifo(folder):
    os.mkfifo(folder / "a.pth")
    return folder / "a.pth"


@hostile("a socket")
def a_socket(folder):
    here = os.getcwd()
    os.chdir(folder)
    try:
        socket.socket(socket.AF_UNIX).bind("a.pth")
    finally:
        os.chdir(here)
    return folder / "a.pth"


@hostile("a device")
def device(folder):
    return Path("/dev/zero")


@hostile("a link to itself")
def self_link(folder):
    (folder / "a.pth").symlink_to("a.pth")
    return folder / "a.pth"


@hostile("a FIFO for config.json")
def fifo_config(folder):
    path = _valid(folder)
    os.mkfifo(folder / "config.json")
    return path


@hostile("a FIFO for a shard")
def fifo_shard(folder):
    os.mkfifo(folder / "b.safetensors")
    (folder / "a.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}')
    return folder


@hostile("a folder of a FIFO")
def folder_of_fifo(folder):
    (folder / "a").mkdir()
    os.mkfifo(folder / "a" / "model.safetensors")
    return folder / "a"


@hostile("a gzip bomb")
def gzip_bomb(folder):
    with gzip.open(folder / "a.pth", "wb") as file:
        file.write(bytes(2**20))
    return folder / "a.pth"
