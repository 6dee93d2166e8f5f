"""Orbax checkpoints: every layout that Orbax writes is read, without jax, and Orbax reads what is written."""

import json
import os
import shutil
import subprocess
import sys
import warnings

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parity.checkpoints.containers.container import Slot
from parity.checkpoints.containers.orbax import CONTAINER
from tests import ROOT
from tests.hostile_files import orbax
from vit_spec import InputError

v0 = pytest.importorskip("orbax.checkpoint")

from orbax.checkpoint import v1 as ocp

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int8, np.uint8, np.int32, np.int64, np.bool_]


def bits(dtype, shape=(3, 4), seed=0):
    """An array of random bits; of booleans, of random booleans."""
    dtype = np.dtype(dtype)
    raw = np.random.default_rng(seed).integers(0, 2 if dtype.kind == "b" else 256, (*shape, dtype.itemsize), np.uint8)
    return raw.view(dtype)[..., 0]


TREE = {
    "a": {np.dtype(dtype).name: bits(dtype) for dtype in DTYPES},
    "scalar": bits(np.float32, ()),
    "list": [bits(np.float32, (5,)), bits(np.int32, (2,))],
}
ARRAYS = {("a", name): array for name, array in TREE["a"].items()} | {
    ("scalar",): TREE["scalar"],
    ("list", "0"): TREE["list"][0],
    ("list", "1"): TREE["list"][1],
}


@pytest.fixture(autouse=True)
def old_ways():
    """Orbax warns of its own older interfaces, which wrote the files of today."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def pytree(path, tree, **options):
    with v0.Checkpointer(v0.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(path, tree)


def standard(path, tree):
    with v0.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


WRITERS = {
    "v1": lambda path, tree: ocp.save(path, tree),
    "standard": standard,
    "zarr": lambda path, tree: pytree(path, tree, use_ocdbt=False, use_zarr3=False),
    "zarr3": lambda path, tree: pytree(path, tree, use_ocdbt=False, use_zarr3=True),
    "ocdbt": lambda path, tree: pytree(path, tree, use_ocdbt=True, use_zarr3=False),
    "ocdbt with zarr3": lambda path, tree: pytree(path, tree, use_ocdbt=True, use_zarr3=True),
}


@pytest.fixture(scope="module", params=WRITERS)
def written(request, tmp_path_factory):
    """A checkpoint in each layout."""
    path = tmp_path_factory.mktemp("written") / "c"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        WRITERS[request.param](path, TREE)
    return path


def contents_of(path):
    return {words: np.asarray(array).tobytes() for words, array in CONTAINER.open(path).arrays.items()}


def refusal(path, folder=None):
    with pytest.raises(InputError) as error:
        contents_of(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    return str(error.value)


# What Orbax wrote -----------------------------------------------------------------------------------------------------


def test_every_layout_is_read_bit_for_bit(written):
    arrays = CONTAINER.open(written).arrays
    assert {path: (stored.shape, stored.dtype) for path, stored in arrays.items()} == {
        path: (array.shape, array.dtype) for path, array in ARRAYS.items()
    }
    assert contents_of(written) == {path: array.tobytes() for path, array in ARRAYS.items()}


def test_any_piece_of_an_array_is_read(written):
    stored, whole = CONTAINER.open(written).arrays["a", "int32"], TREE["a"]["int32"].reshape(-1)
    for first in range(13):
        for last in range(first, 13):
            assert stored.read(first, last).tolist() == whole[first:last].tolist()


def test_a_folder_whose_name_is_another_in_a_url_is_read(written, tmp_path):
    path = shutil.copytree(written, tmp_path / "a%2fb |c?d")
    assert contents_of(path) == {path: array.tobytes() for path, array in ARRAYS.items()}


BLOSC = {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0}


def test_chunks_of_blosc_are_read(tmp_path):
    import tensorstore as ts

    path = orbax(tmp_path, compressor=BLOSC)
    place = {"driver": "file", "path": f"{path / 'params' / 'w'}/"}
    ts.open({"driver": "zarr", "kvstore": place}, open=True).result().write(np.array([1, 2], np.float32)).result()
    assert contents_of(path) == {("w",): np.array([1, 2], np.float32).tobytes()}


def test_a_chunk_that_is_longer_than_its_array_is_refused_before_it_is_read(tmp_path):
    assert "a chunk of more than 65,545 bytes, of 8 unpacked" in refusal(orbax(tmp_path, chunk=bytes(2**17)))


def test_every_layout_is_recognised(written):
    assert CONTAINER.recognises(written, b"")


def test_another_folder_is_not_recognised(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    assert not CONTAINER.recognises(tmp_path, b"") and not CONTAINER.recognises(tmp_path / "file", b"")


def test_scalars_text_and_custom_metadata_are_notes(tmp_path):
    ocp.save(tmp_path / "c", {"w": np.ones(2), "step": 3, "name": "vit"}, custom_metadata={"config": "{}"})
    contents = CONTAINER.open(tmp_path / "c")
    assert contents.notes == {"step": 3, "name": "vit", "config": "{}"}
    assert list(contents.arrays) == [("w",)]


def test_an_array_in_many_chunks_is_read(tmp_path):
    jax = pytest.importorskip("jax")
    whole = np.arange(60_000, dtype=np.float32).reshape(300, 200)
    save = ocp.options.ArrayOptions.Saving(
        storage_options=ocp.options.ArrayOptions.Saving.StorageOptions(chunk_byte_size=20_000)
    )
    with ocp.Context(array_options=ocp.options.ArrayOptions(saving=save)):
        ocp.save(tmp_path / "c", {"w": jax.numpy.asarray(whole)})
    stored = CONTAINER.open(tmp_path / "c").arrays["w",]
    assert stored.chunk <= 20_000
    assert stored.read(0, 60_000).tolist() == whole.reshape(-1).tolist()
    assert stored.read(12_345, 23_456).tolist() == whole.reshape(-1)[12_345:23_456].tolist()


def manager(path, steps):
    with v0.CheckpointManager(path) as checkpoints:
        for step in steps:
            checkpoints.save(step, args=v0.args.StandardSave({"w": np.full(2, step)}))
        checkpoints.wait_until_finished()


@pytest.mark.parametrize("inside", ["", "1000", "1000/default"])
def test_a_step_its_item_and_the_folder_of_the_only_step_are_read(tmp_path, inside):
    manager(tmp_path / "c", [1000])
    assert np.asarray(CONTAINER.open(tmp_path / "c" / inside).arrays["w",]).tolist() == [1000, 1000]


def test_several_steps_are_named(tmp_path):
    manager(tmp_path / "c", [1, 2])
    assert CONTAINER.recognises(tmp_path / "c", b"")
    assert "(1, 2): give one of them" in refusal(tmp_path / "c")


def test_several_items_are_named(tmp_path):
    ocp.save_checkpointables(tmp_path / "c", {"params": {"w": np.ones(1)}, "opt": {"w": np.zeros(1)}})
    assert "(opt, params): give one of them" in refusal(tmp_path / "c")
    assert np.asarray(CONTAINER.open(tmp_path / "c" / "params").arrays["w",]).tolist() == [1]


def test_a_checkpoint_is_read_without_jax_or_orbax(tmp_path):
    ocp.save(tmp_path / "c", {"w": np.ones(3, np.float32)})
    path = str(tmp_path / "c")
    code = "import sys; from pathlib import Path\n"
    code += "from parity.checkpoints.containers.orbax import CONTAINER as c; import numpy as np\n"
    code += f"w = np.asarray(c.open(Path({path!r})).arrays['w',])\nprint(w, *({{'jax', 'orbax'}} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout == "[1. 1. 1.]\n"


# What is written ------------------------------------------------------------------------------------------------------


def write(path, arrays, notes=None, piece=5):
    with CONTAINER.create(
        path, {key: Slot(array.shape, array.dtype) for key, array in arrays.items()}, notes or {}
    ) as sink:
        for key in reversed(arrays):
            flat = np.ascontiguousarray(arrays[key]).reshape(-1)
            for first in range(0, flat.size, piece):
                sink.put(key, first, flat[first : first + piece])


FLAT = {"/".join(path): array for path, array in ARRAYS.items()}


def test_orbax_loads_what_was_written_bit_for_bit(tmp_path):
    write(tmp_path / "c", FLAT, {"config": "{}"})
    loaded = ocp.load(tmp_path / "c")
    for path, array in ARRAYS.items():
        node = loaded
        for word in path:
            node = node[word]
        given = np.asarray(node)
        assert (given.shape, given.dtype, given.tobytes()) == (array.shape, array.dtype, array.tobytes())
    assert ocp.metadata(tmp_path / "c").custom_metadata == {"config": "{}"}


def test_what_was_written_is_read_bit_for_bit(tmp_path):
    write(tmp_path / "c", FLAT, {"config": "{}"})
    assert contents_of(tmp_path / "c") == {path: array.tobytes() for path, array in ARRAYS.items()}
    assert CONTAINER.open(tmp_path / "c").notes == {"config": "{}"}
    assert os.listdir(tmp_path) == ["c"]


def test_an_array_of_zeros_is_not_mistaken_for_a_missing_one(tmp_path):
    write(tmp_path / "c", {"w": np.zeros((3, 4), np.float32)})
    assert not np.asarray(CONTAINER.open(tmp_path / "c").arrays["w",]).any()


@pytest.mark.parametrize("keys", [["a", "a/b"], ["a/b", "a"], ["a/b/c", "a/b"]])
def test_an_array_that_would_be_a_group_too_is_refused(tmp_path, keys):
    with pytest.raises(InputError, match="would be both an array and a group"):
        write(tmp_path / "c", {key: np.ones(1) for key in keys})
    assert not os.listdir(tmp_path)


def test_an_array_without_entries_is_refused_before_work(tmp_path):
    with pytest.raises(InputError, match="Orbax keeps no array without entries: leave out b"):
        write(tmp_path / "c", {"a": np.ones(1), "b": np.ones((0, 3))})
    assert not os.listdir(tmp_path)


# What is refused ------------------------------------------------------------------------------------------------------


def tree_file(path):
    (file,) = path.rglob("_METADATA")
    return file


def test_a_checkpoint_that_lacks_its_tree_is_refused(written, tmp_path):
    shutil.copytree(written, tmp_path / "c")
    tree_file(tmp_path / "c").unlink()
    assert "has no _METADATA" in refusal(tmp_path / "c")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"tree_metadata": 3}', '{"tree_metadata": {"w": {}}}', "[" * 100_000])
def test_a_tree_that_is_nonsense_is_refused(written, tmp_path, text):
    shutil.copytree(written, tmp_path / "c")
    tree_file(tmp_path / "c").write_text(text)
    refusal(tmp_path / "c")


@pytest.mark.parametrize("key", ["../../outside", "..", "/etc"])
def test_an_array_outside_the_folder_is_refused(tmp_path, key):
    WRITERS["zarr"](tmp_path / "c", {"w": np.ones(2)})
    WRITERS["zarr"](tmp_path / "outside", {"w": np.ones(2)})
    file = tree_file(tmp_path / "c")
    file.write_text(file.read_text().replace('"key": "w"', f'"key": "{key}"'))
    assert "may lie outside" in refusal(tmp_path / "c")


def test_a_missing_piece_is_an_error_and_not_zeros(written, tmp_path):
    shutil.copytree(written, tmp_path / "c")
    data = [
        file for file in (tmp_path / "c").rglob("*") if file.is_file() and file.parent.name in ("d", "a.float32", "c", "0")
    ]
    for file in data:
        if file.name not in (".zarray", "zarr.json"):
            file.unlink()
    refusal(tmp_path / "c")


@pytest.mark.parametrize(
    ("field", "value"), [("shape", [1 << 40, 1 << 40]), ("chunks", [1 << 30, 1 << 30]), ("shape", [-1, 3])]
)
def test_an_array_of_impossible_size_is_refused(tmp_path, field, value):
    WRITERS["zarr"](tmp_path / "c", {"w": np.ones((3, 4))})
    file = tmp_path / "c" / "w" / ".zarray"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    with pytest.raises(InputError) as error:
        CONTAINER.open(tmp_path / "c")
    assert "\n" not in str(error.value) and str(tmp_path / "c") in str(error.value)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes_and_cut_files_are_refused_or_read_as_they_say(written, tmp_path, data):
    folder = tmp_path / "c"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(written, folder)
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.stat().st_size)
    file = data.draw(st.sampled_from(files))
    content = bytearray(file.read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content)
    try:
        for array in CONTAINER.open(folder).arrays.values():
            if array.nbytes < 1 << 20:
                assert np.asarray(array).shape == array.shape
    except InputError as error:
        assert str(folder) in str(error) and "\n" not in str(error)
