"""PyTorch files: read without torch, bit for bit and lazily, without running any code in them."""

import argparse
import collections
import contextlib
import datetime
import decimal
import io
import os
import pickle
import struct
import subprocess
import sys
import tarfile
import tracemalloc
import warnings
import zipfile
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parity.checkpoints.containers import pickles
from parity.checkpoints.containers.budget import Budget
from parity.checkpoints.containers.checksum import Checksum, combine_crc32
from parity.checkpoints.containers.container import ArraySpec, File, FileSlice
from parity.checkpoints.containers.pth import CONTAINER
from parity.checkpoints.containers.torch_zip import StridedArray
from tests import ROOT
from tests.container_cases import find_wrong_refusals
from vit_spec import InputError

torch = pytest.importorskip("torch")

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int8, np.uint8, np.int16, np.int32, np.int64, np.bool_]

FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu]


def random_bits(dtype, shape=(3, 4), seed=0):
    """Return an array of random bits, or of random booleans."""
    dtype = np.dtype(dtype)
    raw = np.random.default_rng(seed).integers(0, 2 if dtype.kind == "b" else 256, (*shape, dtype.itemsize), np.uint8)
    return raw.view(dtype)[..., 0]


def tensor(array):
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def to_bytes(value):
    """Return the bytes of a tensor, an array or a stored array."""
    if isinstance(value, torch.Tensor):
        return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return np.asarray(value).tobytes()


def save_and_open(path, value, **options):
    """Write a file with torch, and return its contents as the container under test reads them."""
    torch.save(value, path, **options)
    return CONTAINER.open(path)


def error_message(path):
    """Return the error for a file that is refused: one line that has its path."""
    with pytest.raises(InputError) as error:
        contents = CONTAINER.open(path)
        for array in contents.arrays.values():
            np.asarray(array)
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    return str(error.value)


# Reading --------------------------------------------------------------------------------------------------------------


def test_files_of_torch_are_read_bit_for_bit(tmp_path):
    shapes = [(3, 4), (), (0, 3), (5,)]
    arrays = {f"{np.dtype(dtype)} {shape}": random_bits(dtype, shape) for dtype in DTYPES for shape in shapes}
    stored = save_and_open(tmp_path / "a.pth", {key: tensor(array) for key, array in arrays.items()}).arrays
    assert {key: (array.shape, array.dtype, to_bytes(array)) for (key,), array in stored.items()} == {
        key: (array.shape, array.dtype, array.tobytes()) for key, array in arrays.items()
    }


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_pickle_protocol_is_read(tmp_path, protocol):
    contents = save_and_open(
        tmp_path / "a.pth", collections.OrderedDict(w=torch.ones(2), s={1, 2}), pickle_protocol=protocol
    )
    assert to_bytes(contents.arrays["w",]) == np.ones(2, np.float32).tobytes()


@pytest.mark.parametrize("dtype", [torch.uint16, torch.complex64, *FLOAT8])
def test_unusual_dtypes_are_read_bit_for_bit(tmp_path, dtype):
    value = torch.arange(1, 5).to(dtype)
    stored = save_and_open(tmp_path / "a.pth", {"w": value}).arrays["w",]
    assert str(stored.dtype) == str(dtype).removeprefix("torch.")
    assert to_bytes(stored) == to_bytes(value)


VIEWS = {
    "transposed": lambda t: t.permute(2, 0, 1),
    "a part": lambda t: t[1:, :, 1:3],
    "every other": lambda t: t[:, ::2],
    "one row": lambda t: t[2],
    "with dimensions of one": lambda t: t[:, None, 1:2],
    "a column": lambda t: t[:, 1, 2],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128])
def test_any_range_of_a_saved_view_is_read_in_c_order(tmp_path, view, dtype):
    value = VIEWS[view](torch.arange(60.0).reshape(3, 4, 5).to(dtype))
    stored = save_and_open(tmp_path / "a.pth", {"w": value}).arrays["w",]
    assert stored.shape == tuple(value.shape)
    whole = to_bytes(value)
    for first in range(value.numel()):
        for last in range(first, value.numel() + 1, 7):
            size = value.element_size()
            assert stored.read(first, last).tobytes() == whole[first * size : last * size]


def test_a_view_reads_only_the_span_of_the_requested_rows(tmp_path, monkeypatch):
    stored = save_and_open(tmp_path / "a.pth", {"w": torch.arange(4000.0).reshape(100, 40)[:, :20]}).arrays["w",]
    sizes, read_into = [], File.read_into
    monkeypatch.setattr(File, "read_into", lambda self, out, at: (sizes.append(out.size), read_into(self, out, at))[1])
    assert isinstance(stored, StridedArray)
    assert stored.read(1000, 1020).tolist() == np.arange(2000.0, 2020.0).tolist()
    assert sizes == [20]


def test_tensors_that_share_a_storage_are_both_read(tmp_path):
    whole = torch.arange(6.0)
    arrays = save_and_open(tmp_path / "a.pth", {"a": whole, "b": whole[2:], "c": whole.view(2, 3)}).arrays
    assert [np.asarray(arrays[name,]).tolist() for name in "abc"] == [
        [0, 1, 2, 3, 4, 5],
        [2, 3, 4, 5],
        [[0, 1, 2], [3, 4, 5]],
    ]


def test_a_training_checkpoint_gives_arrays_and_metadata_by_key_path(tmp_path):
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    args = argparse.Namespace(lr=1e-3, output_dir=Path("/a/b"), device=torch.device("cuda:0"), betas=[0.9, 0.95])
    value = {
        "model": model.state_dict(),
        "args": args,
        "epoch": 3,
        "optimizer": optimizer.state_dict(),
        "best": np.float64(1.5),
    }
    contents = save_and_open(tmp_path / "a.pth", value)
    assert to_bytes(contents.arrays["model", "weight"]) == to_bytes(model.weight)
    assert to_bytes(contents.arrays["optimizer", "state", "0", "exp_avg"]) == to_bytes(
        optimizer.state_dict()["state"][0]["exp_avg"]
    )
    metadata = {key: note for key, note in contents.metadata.items() if not key.startswith("optimizer/")}
    assert metadata == {
        "args/lr": 1e-3,
        "args/output_dir": "/a/b",
        "args/device": "cuda:0",
        "args/betas/0": 0.9,
        "args/betas/1": 0.95,
        "epoch": 3,
        "best": 1.5,
    }


def test_parameters_are_read_as_tensors(tmp_path):
    contents = save_and_open(tmp_path / "a.pth", {"w": torch.nn.Parameter(torch.ones(2)), "l": [torch.zeros(1)]})
    assert list(contents.arrays) == [("w",), ("l", "0")]


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_arrays_of_numpy_are_read_bit_for_bit(tmp_path, protocol):
    arrays = {np.dtype(kind).name: random_bits(kind) for kind in DTYPES if kind is not ml_dtypes.bfloat16}
    arrays |= {
        "fortran": np.asfortranarray(random_bits("<f4", (2, 3, 4))),
        "permuted": random_bits("<f4", (2, 3, 4)).transpose(1, 0, 2),
        "scalar": np.array(3),
        "empty": np.zeros((0, 2)),
    }
    contents = save_and_open(tmp_path / "a.pth", arrays, pickle_protocol=protocol)
    for name, array in arrays.items():
        found = contents.arrays[name,]
        assert (found.shape, found.dtype, to_bytes(found)) == (array.shape, array.dtype, to_bytes(array))
    assert contents.arrays["fortran",].read(5, 9).tolist() == arrays["fortran"].reshape(-1)[5:9].tolist()


def test_the_state_of_random_number_generators_and_of_schedulers_is_read(tmp_path):
    scheduler = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), [3, 3, 5])
    value = {"scheduler": scheduler.state_dict(), "rng": np.random.RandomState(0).get_state(), "w": torch.ones(1)}
    contents = save_and_open(tmp_path / "a.pth", value)
    assert [contents.metadata[f"scheduler/milestones/{epoch}"] for epoch in (3, 5)] == [2, 1]
    assert to_bytes(contents.arrays["rng", "1"]) == to_bytes(value["rng"][1])


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_values_that_are_no_weights_are_read_past(tmp_path, protocol):
    """The classes that torch.load(weights_only=True) reads, and those of the standard library that scripts save."""
    zone = datetime.timezone(datetime.timedelta(hours=1), "CET")
    others = [
        bytearray(b"ab"),
        1j,
        range(3),
        slice(1, 2),
        datetime.datetime(2026, 1, 2, tzinfo=zone),
        decimal.Decimal("0.1"),
    ]
    value = {"others": others, "sets": [{"a"}, frozenset({"b"}), collections.deque(["c"], maxlen=2)], "w": torch.ones(1)}
    contents = save_and_open(tmp_path / "a.pth", value, pickle_protocol=protocol)
    assert list(contents.arrays) == [("w",)]
    assert contents.metadata == {"sets/0/0": "a", "sets/1/0": "b", "sets/2/0": "c"}


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (np.str_("vit"), "numpy's dtype 'U3'"),
        (np.array([{}], object), "numpy's dtype 'O8'"),
        (np.ones(2, ">f4"), "numpy in big-endian order"),
    ],
)
def test_entries_of_numpy_that_are_not_read_are_named(tmp_path, value, what):
    torch.save({"w": torch.ones(1), "more": value}, tmp_path / "a.pth")
    assert what in error_message(tmp_path / "a.pth")


class Call:
    """An object whose pickle is the call of a function with arguments."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


TWO_TENSORS = [["a", torch.ones(2)], ["b", torch.zeros(3)]]
CALLS = {
    "a list of pairs": (Call(collections.OrderedDict, TWO_TENSORS), "ab"),
    "a tuple of pairs": (Call(collections.OrderedDict, tuple(map(tuple, TWO_TENSORS))), "ab"),
    "a dictionary": (Call(collections.OrderedDict, dict(TWO_TENSORS)), "ab"),
    "a defaultdict": (Call(collections.defaultdict, None, dict(TWO_TENSORS)), "ab"),
    **{
        f"a defaultdict of {factory.__name__}": (collections.defaultdict(factory, TWO_TENSORS), "ab")
        for factory in (int, float, bool, str, complex)
    },
    "a deque": (Call(collections.deque, [tensor for _, tensor in TWO_TENSORS]), "01"),
}


@pytest.mark.parametrize("case", CALLS)
def test_entries_that_a_pickle_gives_as_arguments_are_read(tmp_path, case):
    value, keys = CALLS[case]
    arrays = save_and_open(tmp_path / "a.pth", {"w": value}).arrays
    assert {path: np.asarray(array).tolist() for path, array in arrays.items()} == {
        ("w", keys[0]): [1, 1],
        ("w", keys[1]): [0, 0, 0],
    }


@pytest.mark.parametrize(
    ("items", "what"),
    [
        ([["a"]], "damaged"),
        (["ab"], "damaged"),
        ("", "damaged"),
        ([[(1, 2), 3]], "tuple as a key"),
        ([[1 << 64, 3]], "64 bits"),
    ],
    ids=str,
)
def test_arguments_that_are_not_the_entries_of_a_dictionary_are_refused(tmp_path, items, what):
    torch.save({"w": Call(collections.OrderedDict, items)}, tmp_path / "a.pth")
    assert what in error_message(tmp_path / "a.pth")


@pytest.mark.parametrize("make", [lambda dtype: torch.empty(2, dtype=dtype), lambda dtype: dtype], ids=["tensor", "dtype"])
@pytest.mark.parametrize("name", ["bits8", "float4_e2m1fn_x2"])
def test_a_dtype_that_is_not_read_is_named_and_not_called_code(tmp_path, name, make):
    torch.save({"w": make(getattr(torch, name))}, tmp_path / "a.pth")
    assert f"names the dtype torch.{name}, which is not read: leave it and" in error_message(tmp_path / "a.pth")


ARRAY_STATES = {
    "too few bytes": b"(K\x01K\x03\x85%s\x89%st",
    "a negative length": b"(K\x01J\xff\xff\xff\xffJ\xfe\xff\xff\xff\x86%s\x89%st",
    "text as a shape": b"(K\x01X\x01\x00\x00\x002%s\x89%st",
    "too few fields": b"(K\x02\x85%s%st",
}


@pytest.mark.parametrize("case", ARRAY_STATES)
def test_an_array_of_numpy_with_an_impossible_state_is_refused(tmp_path, case):
    kind, data = b"cnumpy\ndtype\nX\x02\x00\x00\x00u4\x85R", b"C\x08" + bytes(8)
    head = b"\x80\x03cnumpy._core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
    valid = head + b"(K\x01K\x02\x85%s\x89%st" % (kind, data) + b"b."
    assert np.asarray(CONTAINER.open(write_archive(tmp_path / "valid.pth", valid)).arrays[()]).tolist() == [0, 0]
    assert "is damaged" in error_message(
        write_archive(tmp_path / "a.pth", head + ARRAY_STATES[case] % (kind, data) + b"b.")
    )


class Tiny(torch.nn.Module):
    """A module with a submodule, a sequence of modules and two attributes."""

    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(2, 3)
        self.seq = torch.nn.Sequential(torch.nn.Linear(3, 2).half())
        self.input_resolution = 224
        self.sizes = [1, 2]

    def forward(self, x):
        return self.fc(x)


def test_a_torchscript_archive_gives_the_attributes_of_its_modules(tmp_path):
    model = Tiny()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit, which wrote the files of OpenAI, is deprecated
        torch.jit.save(torch.jit.script(model), tmp_path / "a.pt")
    contents = CONTAINER.open(tmp_path / "a.pt")
    assert {".".join(path): to_bytes(array) for path, array in contents.arrays.items()} == {
        key: to_bytes(value) for key, value in model.state_dict().items()
    }
    assert contents.metadata["input_resolution"] == 224


@pytest.mark.parametrize("shared", [False, True])
def test_legacy_files_are_read(tmp_path, shared):
    value = {
        "model": {"w": torch.ones(3).bfloat16(), "t": torch.arange(6).reshape(2, 3).t()},
        "args": argparse.Namespace(lr=0.1),
    }
    contents = save_and_open(
        tmp_path / "a.pth", value | ({"again": value["model"]} if shared else {}), _use_new_zipfile_serialization=False
    )
    assert contents.metadata == {"args/lr": 0.1}
    for key, entry in value["model"].items():
        assert to_bytes(contents.arrays["model", key]) == to_bytes(entry)
        assert not shared or to_bytes(contents.arrays["again", key]) == to_bytes(entry)


def test_reading_headers_reads_no_storage(tmp_path, monkeypatch):
    torch.save({"w": torch.ones(1 << 20)}, tmp_path / "a.pth")
    counts, read = [], File.read
    monkeypatch.setattr(
        File, "read", lambda self, at, count: (lambda data: (counts.append(len(data)), data)[1])(read(self, at, count))
    )
    CONTAINER.open(tmp_path / "a.pth")
    assert sum(counts) < 1 << 19


def test_an_archive_is_read_without_torch(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "a.pth")
    code = "import sys; from pathlib import Path\n"
    code += "from parity.checkpoints.containers.pth import CONTAINER as c; import numpy as np\n"
    code += f"print(np.asarray(c.open(Path({str(tmp_path / 'a.pth')!r})).arrays['w',]), 'torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout == "[1. 1. 1.] False\n"


# Recognition ----------------------------------------------------------------------------------------------------------


def is_recognised(path):
    """Return whether the container recognises a file from its path and its first bytes."""
    return CONTAINER.recognises(path, path.read_bytes()[:4096])


@pytest.mark.parametrize("zipped", [True, False])
def test_files_of_torch_are_recognised_by_content(tmp_path, zipped):
    torch.save({"w": torch.ones(1)}, tmp_path / "a", _use_new_zipfile_serialization=zipped)
    assert is_recognised(tmp_path / "a")


def test_another_zip_or_pickle_is_not_recognised(tmp_path):
    np.savez(tmp_path / "a.npz", w=np.ones(1))
    (tmp_path / "b.pkl").write_bytes(pickle.dumps({}))
    (tmp_path / "c").mkdir()
    assert not any(
        (is_recognised(tmp_path / "a.npz"), is_recognised(tmp_path / "b.pkl"), CONTAINER.recognises(tmp_path / "c", b""))
    )


# Writing --------------------------------------------------------------------------------------------------------------


def write_arrays(path, arrays, piece=5):
    """Write arrays with the container under test, from the last element to the first, in pieces of `piece` elements."""
    with CONTAINER.create(path, {key: ArraySpec(array.shape, array.dtype) for key, array in arrays.items()}, {}) as writer:
        for key in reversed(arrays):
            flat = np.ascontiguousarray(arrays[key]).reshape(-1)
            for first in reversed(range(0, flat.size, piece)):
                writer.write(key, first, flat[first : first + piece])


ARRAYS = {np.dtype(dtype).name: random_bits(dtype) for dtype in DTYPES} | {
    "scalar": random_bits(np.float32, ()),
    "empty": random_bits(np.float32, (0, 3)),
}


def test_torch_loads_written_arrays_bit_for_bit(tmp_path):
    write_arrays(tmp_path / "a.pth", ARRAYS)
    loaded = torch.load(tmp_path / "a.pth", weights_only=True)
    assert list(loaded) == list(ARRAYS) and isinstance(loaded, collections.OrderedDict)
    for key, array in ARRAYS.items():
        assert (tuple(loaded[key].shape), to_bytes(loaded[key])) == (array.shape, array.tobytes())
        assert key in ("scalar", "empty") or str(loaded[key].dtype) == f"torch.{key}"


def test_written_arrays_are_read_bit_for_bit(tmp_path):
    write_arrays(tmp_path / "a.pth", ARRAYS)
    arrays = CONTAINER.open(tmp_path / "a.pth").arrays
    assert {path: to_bytes(array) for path, array in arrays.items()} == {
        (key,): array.tobytes() for key, array in ARRAYS.items()
    }


def test_the_same_arrays_give_the_same_bytes(tmp_path):
    write_arrays(tmp_path / "a.pth", ARRAYS)
    write_arrays(tmp_path / "b.pth", ARRAYS, piece=7)
    assert (tmp_path / "a.pth").read_bytes() == (tmp_path / "b.pth").read_bytes()


def test_a_failure_leaves_no_scratch_file(tmp_path):
    with pytest.raises(KeyboardInterrupt), CONTAINER.create(tmp_path / "a.pth", {"w": ArraySpec((2,), np.dtype("f4"))}, {}):
        raise KeyboardInterrupt
    assert not os.listdir(tmp_path)


def test_missing_elements_are_an_error(tmp_path):
    with pytest.raises(ValueError, match="8 bytes were never written"):
        with CONTAINER.create(tmp_path / "a.pth", {"w": ArraySpec((2,), np.dtype("f4"))}, {}):
            pass
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("entries", [np.zeros(3, "f4"), np.zeros(1, "f8")])
def test_elements_that_do_not_fit_their_array_are_an_error(tmp_path, entries):
    with pytest.raises(ValueError, match="do not fit w"):
        with CONTAINER.create(tmp_path / "a.pth", {"w": ArraySpec((2,), np.dtype("f4"))}, {}) as writer:
            writer.write("w", 0, entries)


def test_a_dtype_that_torch_does_not_have_is_refused(tmp_path):
    with pytest.raises(InputError, match="w is float8_e4m3b11fnuz, which torch does not have"):
        write_arrays(tmp_path / "a.pth", {"w": np.zeros(2, ml_dtypes.float8_e4m3b11fnuz)})


# Errors ---------------------------------------------------------------------------------------------------------------


def write_archive(path, data, storages=(b"\0" * 16,), compression=zipfile.ZIP_STORED, more=()):
    """Write a file as torch.save does, with any pickle, to a path or an open file; return the path or the file."""
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("archive/data.pkl", data)
        file.writestr("archive/byteorder", b"little")
        for number, storage in enumerate(storages):
            file.writestr(f"archive/data/{number}", storage)
        for name, content in more:
            file.writestr(name, content)
    return path


def pickled_tensor(offset=0, shape=(2, 2), stride=(2, 1), count=4, kind="FloatStorage", key="0"):
    """Return the pickle of a tensor with the given fields, valid or not."""

    def dump(value):
        return pickle.dumps(value, 2)[2:-1]

    pid = b"(" + dump("storage") + b"ctorch\n" + kind.encode() + b"\n" + dump(key) + dump("cpu") + dump(count) + b"tQ"
    arguments = pid + dump(offset) + dump(shape) + dump(stride) + dump(False) + b"ccollections\nOrderedDict\n)R"
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + arguments + b"tR."


def test_the_handmade_pickle_of_these_tests_is_valid(tmp_path):
    assert np.asarray(CONTAINER.open(write_archive(tmp_path / "a.pth", pickled_tensor())).arrays[()]).tolist() == [
        [0, 0],
        [0, 0],
    ]


PROGRAMS = {
    "REDUCE": lambda c: b"cposix\nsystem\n(" + c + b"tR.",
    "REDUCE of a builtin": lambda c: b"cbuiltins\neval\n(" + c + b"tR.",
    "INST": lambda c: b"(" + c + b"iposix\nsystem\n.",
    "OBJ": lambda c: b"(cposix\nsystem\n" + c + b"o.",
    "NEWOBJ": lambda c: b"\x80\x02csubprocess\nPopen\n(" + c + b"t\x81.",
    "NEWOBJ_EX": lambda c: b"\x80\x04csubprocess\nPopen\n(" + c + b"t}\x92.",
    "STACK_GLOBAL": lambda c: b"\x80\x04\x8c\x05posix\x8c\x06system\x93(" + c + b"tR.",
    "a dotted name": lambda c: b"\x80\x04\x8c\x05torch\x8c\x11hub.os.system.foo\x93(" + c + b"tR.",
    "EXT1": lambda c: b"\x80\x02\x82\x01(" + c + b"tR.",
    "BUILD": lambda c: b"cargparse\nNamespace\n)\x81}(X\x0c\x00\x00\x00__setstate__cposix\nsystem\nub" + c + b"b.",
    "NEWOBJ with arguments": lambda c: b"cargparse\nNamespace\n(" + c + b"t\x81.",
    "REDUCE of a class": lambda c: b"cargparse\nNamespace\n(" + c + b"tR.",
    "REDUCE of text": lambda c: c + b"(" + c + b"tR.",
    "BUILD of a list": lambda c: b"]" + c + b"b.",
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_pickle_that_calls_functions_is_refused_and_runs_none(tmp_path, program):
    witness = tmp_path / "ran"
    command = f"touch {witness}".encode()
    data = PROGRAMS[program](b"X" + struct.pack("<I", len(command)) + command)
    assert "asks " in error_message(write_archive(tmp_path / "a.pth", data))
    assert not witness.exists()


def test_the_error_names_the_function_that_a_pickle_calls(tmp_path):
    torch.save(torch.nn.Linear(1, 1), tmp_path / "a.pth")
    assert "asks to call torch.nn.modules.linear.Linear: weights never need code" in error_message(tmp_path / "a.pth")


@pytest.mark.parametrize("zipped", [True, False])
def test_an_object_with_reduce_runs_no_code(tmp_path, zipped):
    witness = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {witness}",)

    torch.save({"w": Evil()}, tmp_path / "a.pth", _use_new_zipfile_serialization=zipped)
    error_message(tmp_path / "a.pth")
    assert not witness.exists()


INVALID_TENSORS = {
    "an offset beyond the storage": dict(offset=1),
    "strides beyond the storage": dict(stride=(3, 1)),
    "negative offset": dict(offset=-1),
    "negative stride": dict(stride=(-2, 1)),
    "negative size": dict(shape=(-1, 2)),
    "a huge shape": dict(shape=(1 << 40, 1 << 40)),
    "a huge empty shape": dict(shape=(0, 1 << 61, 1 << 61), stride=(1, 1, 1)),
    "a length of 2**63": dict(shape=(1 << 63, 2), stride=(0, 0)),
    "a shape of floats": dict(shape=(2.0, 2.0)),
    "repeated elements": dict(shape=(1 << 40, 2), stride=(0, 1)),
    "too many dimensions": dict(shape=(1,) * 1000, stride=(1,) * 1000),
    "too few strides": dict(stride=(1,)),
    "another number of elements": dict(count=5),
    "a huge number of elements": dict(count=1 << 70),
    "no such storage": dict(key="7"),
    "a path as the storage": dict(key="../../../etc/passwd"),
    "not a storage type": dict(kind="Tensor"),
}


def test_tensors_that_do_not_match_their_storage_are_refused(tmp_path):
    files = {
        name: write_archive(io.BytesIO(), pickled_tensor(**fields)).getvalue() for name, fields in INVALID_TENSORS.items()
    }
    assert not find_wrong_refusals(CONTAINER, tmp_path / "a.pth", files)


BOMBS = {
    "lists of lists": b"]" + b"".join(b"q%c(h%ch%ch%ch%cl" % (i, i, i, i, i) for i in range(60)) + b".",
    "a list that contains itself": b"]q\x00h\x00a.",
    "tuples as keys": b"}" + b")" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(200)) + b"Ns.",
    "a long bytearray": b"\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00.",
    "a long text": b"\x80\x04\x8d\xff\xff\xff\xff\xff\x00\x00\x00ab.",
    "a huge key": b"}\x8b" + struct.pack("<I", 4000) + b"\x7f" * 4000 + b"Ns.",
    "many objects": b"(" + b"}" * (1 << 19) + b"l.",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_pickle_bombs_are_refused_in_bounded_memory(tmp_path, monkeypatch, bomb):
    monkeypatch.setattr(pickles, "_MAX_ENTRIES", 1 << 14)  # a smaller limit is reached sooner
    path = write_archive(tmp_path / "a.pth", BOMBS[bomb])
    tracemalloc.start()
    try:
        error_message(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 29
    finally:
        tracemalloc.stop()


def test_each_entry_of_a_dictionary_in_arguments_is_charged(tmp_path):
    pairs = b"(" + b"".join(b"M%sN\x86" % struct.pack("<H", key) for key in range(1 << 10)) + b"l"
    copies = b"(ccollections\nOrderedDict\nq\x00" + pairs + b"q\x01" + b"h\x00h\x01\x85R" * (1 << 8) + b"l."
    with pytest.raises(InputError, match="more objects than weights need"):
        CONTAINER.open(write_archive(tmp_path / "a.pth", copies), Budget(objects=1 << 17))


@pytest.mark.parametrize(
    "data", [b"}r\xff\xff\xff\x7fj\xff\xff\xff\x7f.", b"\x80\x04\x95\xff\xff\xff\xff\xff\x00\x00\x00}."]
)
def test_a_large_memo_index_or_frame_takes_no_memory(tmp_path, data):
    path = write_archive(tmp_path / "a.pth", data)
    tracemalloc.start()
    try:
        assert CONTAINER.open(path).arrays == {}
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_pickle_that_is_too_long_is_refused(tmp_path):
    data = b"X" + struct.pack("<I", 1 << 25) + bytes(1 << 25) + b"."
    assert "more than" in error_message(write_archive(tmp_path / "a.pth", data))


def test_a_compressed_archive_is_refused(tmp_path):
    path = write_archive(tmp_path / "a.pth", pickled_tensor(), [bytes(1 << 20)], zipfile.ZIP_DEFLATED)
    assert "compressed" in error_message(path)


def test_a_duplicate_member_is_refused(tmp_path):
    with pytest.warns(UserWarning, match="Duplicate name"):
        write_archive(tmp_path / "a.pth", pickled_tensor(), more=[("archive/data/0", b"\1" * 16)])
    assert "it has 'archive/data/0' twice" in error_message(tmp_path / "a.pth")


def test_two_pickles_are_refused(tmp_path):
    assert "has 2 data.pkl" in error_message(
        write_archive(tmp_path / "a.pth", pickled_tensor(), more=[("b/data.pkl", b"N.")])
    )


def test_overlapping_members_are_refused(tmp_path):
    path = write_archive(tmp_path / "a.pth", pickled_tensor(), [b"\0" * 16, b"\1" * 16])
    with zipfile.ZipFile(path) as file:
        first = file.getinfo("archive/data/0")
    data = bytearray(path.read_bytes())
    for place in (data.rfind(b"archive/data/0") - 46 + 20, data.rfind(b"archive/data/0") - 46 + 24):
        data[place : place + 4] = struct.pack("<I", first.file_size + 30)  # now it overlaps the next member
    path.write_bytes(data)
    assert "its members overlap" in error_message(path)


@pytest.mark.parametrize("shift", [-40, 1, 40, 1 << 20])
def test_a_zip_directory_with_a_wrong_offset_is_refused(tmp_path, shift):
    data = bytearray(write_archive(tmp_path / "a.pth", pickled_tensor()).read_bytes())
    place = data.rfind(b"PK\5\6") + 16
    data[place : place + 4] = struct.pack("<I", struct.unpack("<I", data[place : place + 4])[0] + shift)
    (tmp_path / "a.pth").write_bytes(data)
    assert "damaged" in error_message(tmp_path / "a.pth")


def test_a_big_endian_archive_is_refused(tmp_path):
    path = tmp_path / "a.pth"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", pickled_tensor())
        file.writestr("archive/byteorder", b"big")
        file.writestr("archive/data/0", bytes(16))
    assert "big-endian" in error_message(path)


def test_a_missing_storage_is_named_in_the_error(tmp_path):
    assert "lacks 'archive/data/0'" in error_message(write_archive(tmp_path / "a.pth", pickled_tensor(), []))


def test_two_arrays_with_one_key_path_are_refused(tmp_path):
    torch.save({0: torch.ones(1), "0": torch.ones(1)}, tmp_path / "a.pth")
    assert "has '0' twice" in error_message(tmp_path / "a.pth")


def test_files_older_than_torch_0_1_10_are_refused_with_a_remedy(tmp_path):
    with tarfile.open(tmp_path / "a.pth", "w") as file:
        info = tarfile.TarInfo("storages")
        info.size = 8
        file.addfile(info, io.BytesIO(bytes(8)))
    assert is_recognised(tmp_path / "a.pth")
    assert "load it in torch and save it again" in error_message(tmp_path / "a.pth")


# Damage ---------------------------------------------------------------------------------------------------------------


def valid_file(zipped):
    """Return the bytes of a file of torch, a zip or of the legacy format."""
    buffer = io.BytesIO()
    value = {"model": {"w": torch.ones(3, 4), "t": torch.ones(4, 3).t(), "b": torch.ones(3).bfloat16()}, "epoch": 3}
    torch.save(value, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


def assert_read_or_refused(path):
    """Assert that a file gives arrays of the declared shapes and dtypes, or an InputError of one line."""
    try:
        contents = CONTAINER.open(path)
        for array in contents.arrays.values():
            assert array.nbytes < 1 << 12
            whole = np.asarray(array)
            assert (whole.shape, whole.dtype) == (array.shape, array.dtype)
    except InputError as error:
        assert str(path) in str(error) and "\n" not in str(error)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_truncated_file_is_refused(tmp_path, zipped):
    data, path = valid_file(zipped), tmp_path / "a.pth"
    for length in range(4, len(data) - 1, 13):
        path.write_bytes(data[:length])
        error_message(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    flips=st.lists(st.tuples(st.integers(0, 1 << 12), st.integers(1, 255)), min_size=1, max_size=6), end=st.integers(0, 200)
)
def test_a_file_with_changed_bytes_is_refused_or_read_with_its_shapes(tmp_path, flips, end):
    data = bytearray(valid_file(True))
    data = data[: len(data) - (end if end > 150 else 0)]
    for place, change in flips:
        data[place % len(data)] ^= change
    path = tmp_path / "a.pth"
    path.write_bytes(data)
    if data[:4] == b"PK\3\4":
        assert_read_or_refused(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flips=st.lists(st.tuples(st.integers(0, 1 << 12), st.integers(1, 255)), min_size=1, max_size=4))
def test_a_pickle_with_changed_bytes_is_refused_or_read_with_its_shapes(tmp_path, flips):
    data = bytearray(pickled_tensor())
    for place, change in flips:
        data[place % len(data)] ^= change
    assert_read_or_refused(write_archive(tmp_path / "a.pth", bytes(data)))


# Checksums ------------------------------------------------------------------------------------------------------------


def test_the_crc32_of_two_pieces_follows_from_those_of_both():
    data = np.random.default_rng(0).integers(0, 256, 100_003, np.uint8).tobytes()
    for cut in (0, 1, 7, 4096, 65_537, len(data)):
        first, second = data[:cut], data[cut:]
        assert combine_crc32(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(data)


def test_a_checksum_is_verified_for_any_order_and_overlap_of_the_pieces(tmp_path):
    data = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)
    (tmp_path / "a").write_bytes(data.tobytes())
    file_slice = FileSlice.whole(File(tmp_path / "a"))
    rng = np.random.default_rng(1)
    for good in (True, False):
        with contextlib.nullcontext() if good else pytest.raises(InputError, match="a checksum is wrong"):
            checksum = Checksum(file_slice, zlib.crc32(data) ^ (not good))
            for _ in range(200):
                first, last = sorted(rng.integers(0, 1001, 2).tolist())
                checksum.add(first, data[first:last], (0, 1000))
            checksum.add(0, data, (0, 1000))


@pytest.mark.parametrize("view", ["whole", "a part", "transposed", "every other"])
def test_a_flipped_bit_anywhere_in_the_data_is_refused(tmp_path, view):
    value = (VIEWS | {"whole": lambda t: t})[view](torch.arange(60.0).reshape(3, 4, 5))
    torch.save({"w": value, "name": "text"}, tmp_path / "a.pth")
    whole = (tmp_path / "a.pth").read_bytes()
    with zipfile.ZipFile(tmp_path / "a.pth") as file:
        infos = {info.filename: info for info in file.infolist()}
    path = tmp_path / "b.pth"
    for name in ("data/0", "data.pkl", "byteorder"):
        [info] = [info for key, info in infos.items() if key.endswith(f"/{name}")]
        start = info.header_offset + 30 + sum(struct.unpack_from("<HH", whole, info.header_offset + 26))
        for place in range(start, start + info.file_size, 7):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << place % 8
            path.write_bytes(damaged)
            assert "damaged" in error_message(path) or name == "byteorder"


def test_an_archive_without_checksums_is_read(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.arange(6.0)}, tmp_path / "a.pth")
    finally:
        torch.serialization.set_crc32_options(True)
    assert np.asarray(CONTAINER.open(tmp_path / "a.pth").arrays["w",]).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("zipped", [True, False])
def test_conjugate_and_negative_views_are_refused(tmp_path, zipped):
    value = torch.tensor([1 + 2j, 3 - 4j])
    for view in (value.conj(), value.conj().imag):
        torch.save({"w": view}, tmp_path / "a.pth", _use_new_zipfile_serialization=zipped)
        assert "clone" in error_message(tmp_path / "a.pth")


def test_legacy_files_are_read_without_torch_and_on_demand(tmp_path):
    torch.save(
        {"w": torch.ones(1 << 20), "h": torch.ones(3).half()}, tmp_path / "a.pth", _use_new_zipfile_serialization=False
    )
    code = "import sys; from pathlib import Path; from parity.checkpoints.containers.pth import CONTAINER as c\n"
    code += "import numpy as np; arrays = c.open(Path(sys.argv[1])).arrays\n"
    code += "print(np.asarray(arrays['h',]), arrays['w',].shape, 'torch' in sys.modules)"
    command = [sys.executable, "-c", code, tmp_path / "a.pth"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout == "[1. 1. 1.] (1048576,) False\n"
