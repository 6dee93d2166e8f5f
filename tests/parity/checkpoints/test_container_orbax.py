"""Orbax checkpoints: every layout of Orbax is read, without jax, and Orbax reads the checkpoints that are written."""

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

from parity.checkpoints.containers.container import ArraySpec
from parity.checkpoints.containers.orbax import CONTAINER
from tests import ROOT
from tests.container_cases import find_wrong_refusals
from tests.hostile_files import write_orbax
from vit_spec import InputError

v0 = pytest.importorskip("orbax.checkpoint")

from orbax.checkpoint import v1 as ocp

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int8, np.uint8, np.int32, np.int64, np.bool_]


def random_bits(dtype, shape=(3, 4), seed=0):
    """Return an array of random bits, or of random booleans."""
    dtype = np.dtype(dtype)
    raw = np.random.default_rng(seed).integers(0, 2 if dtype.kind == "b" else 256, (*shape, dtype.itemsize), np.uint8)
    return raw.view(dtype)[..., 0]


TREE = {
    "a": {np.dtype(dtype).name: random_bits(dtype) for dtype in DTYPES},
    "scalar": random_bits(np.float32, ()),
    "list": [random_bits(np.float32, (5,)), random_bits(np.int32, (2,))],
}
ARRAYS = {("a", name): array for name, array in TREE["a"].items()} | {
    ("scalar",): TREE["scalar"],
    ("list", "0"): TREE["list"][0],
    ("list", "1"): TREE["list"][1],
}


@pytest.fixture(autouse=True)
def ignore_deprecations():
    """Ignore warnings about older interfaces of Orbax, which wrote many existing files."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def save_pytree(path, tree, **options):
    with v0.Checkpointer(v0.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(path, tree)


def save_standard(path, tree):
    with v0.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


WRITERS = {
    "v1": lambda path, tree: ocp.save(path, tree),
    "standard": save_standard,
    "zarr": lambda path, tree: save_pytree(path, tree, use_ocdbt=False, use_zarr3=False),
    "zarr3": lambda path, tree: save_pytree(path, tree, use_ocdbt=False, use_zarr3=True),
    "ocdbt": lambda path, tree: save_pytree(path, tree, use_ocdbt=True, use_zarr3=False),
    "ocdbt with zarr3": lambda path, tree: save_pytree(path, tree, use_ocdbt=True, use_zarr3=True),
}


@pytest.fixture(scope="module", params=WRITERS)
def written_checkpoint(request, tmp_path_factory):
    """Write a checkpoint with Orbax in one of the layouts, and return its path."""
    path = tmp_path_factory.mktemp("written") / "c"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        WRITERS[request.param](path, TREE)
    return path


def read_arrays_as_bytes(path):
    """Return the bytes of each array of a checkpoint by its key path."""
    return {words: np.asarray(array).tobytes() for words, array in CONTAINER.open(path).arrays.items()}


def error_message(path):
    """Return the error for a folder that is refused: one line that has its path."""
    with pytest.raises(InputError) as error:
        read_arrays_as_bytes(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    return str(error.value)


# Reading --------------------------------------------------------------------------------------------------------------


def test_every_layout_is_read_bit_for_bit(written_checkpoint):
    arrays = CONTAINER.open(written_checkpoint).arrays
    assert {path: (stored.shape, stored.dtype) for path, stored in arrays.items()} == {
        path: (array.shape, array.dtype) for path, array in ARRAYS.items()
    }
    assert read_arrays_as_bytes(written_checkpoint) == {path: array.tobytes() for path, array in ARRAYS.items()}


def test_a_path_with_parent_folders_is_read_and_written(written_checkpoint, tmp_path):
    path = written_checkpoint.parent / ".." / written_checkpoint.parent.name / written_checkpoint.name
    assert read_arrays_as_bytes(path) == {path: array.tobytes() for path, array in ARRAYS.items()}
    written = tmp_path / ".." / tmp_path.name / "copy"
    write_arrays(written, FLAT, {})
    assert read_arrays_as_bytes(written) == {path: array.tobytes() for path, array in ARRAYS.items()}


def test_any_range_of_an_array_is_read(written_checkpoint):
    stored, whole = CONTAINER.open(written_checkpoint).arrays["a", "int32"], TREE["a"]["int32"].reshape(-1)
    for first in range(13):
        for last in range(first, 13):
            assert stored.read(first, last).tolist() == whole[first:last].tolist()


def test_a_folder_with_url_syntax_in_its_name_is_read(written_checkpoint, tmp_path):
    path = shutil.copytree(written_checkpoint, tmp_path / "a%2fb |c?d")
    assert read_arrays_as_bytes(path) == {path: array.tobytes() for path, array in ARRAYS.items()}


BLOSC = {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0}


def test_chunks_compressed_with_blosc_are_read(tmp_path):
    import tensorstore as ts

    path = write_orbax(tmp_path, compressor=BLOSC)
    place = {"driver": "file", "path": f"{path / 'params' / 'w'}/"}
    ts.open({"driver": "zarr", "kvstore": place}, open=True).result().write(np.array([1, 2], np.float32)).result()
    assert read_arrays_as_bytes(path) == {("w",): np.array([1, 2], np.float32).tobytes()}


def test_a_chunk_larger_than_its_array_is_refused_before_it_is_read(tmp_path):
    assert "a chunk of more than 65,545 bytes, of 8 decompressed" in error_message(
        write_orbax(tmp_path, chunk=bytes(2**17))
    )


def test_every_layout_is_recognised(written_checkpoint):
    assert CONTAINER.recognises(written_checkpoint, b"")


def test_another_folder_is_not_recognised(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    assert not CONTAINER.recognises(tmp_path, b"") and not CONTAINER.recognises(tmp_path / "file", b"")


def test_scalars_text_and_custom_metadata_become_metadata(tmp_path):
    ocp.save(tmp_path / "c", {"w": np.ones(2), "step": 3, "name": "vit"}, custom_metadata={"config": "{}"})
    contents = CONTAINER.open(tmp_path / "c")
    assert contents.metadata == {"step": 3, "name": "vit", "config": "{}"}
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
    assert stored.chunk_bytes <= 20_000
    assert stored.read(0, 60_000).tolist() == whole.reshape(-1).tolist()
    assert stored.read(12_345, 23_456).tolist() == whole.reshape(-1)[12_345:23_456].tolist()


def save_steps(path, steps):
    """Save a checkpoint for each step with the CheckpointManager of Orbax."""
    with v0.CheckpointManager(path) as checkpoints:
        for step in steps:
            checkpoints.save(step, args=v0.args.StandardSave({"w": np.full(2, step)}))
        checkpoints.wait_until_finished()


@pytest.mark.parametrize("subfolder", ["", "1000", "1000/default"])
def test_the_folder_of_one_step_the_step_and_its_item_are_read(tmp_path, subfolder):
    save_steps(tmp_path / "c", [1000])
    assert np.asarray(CONTAINER.open(tmp_path / "c" / subfolder).arrays["w",]).tolist() == [1000, 1000]


def test_several_steps_are_refused_and_listed(tmp_path):
    save_steps(tmp_path / "c", [1, 2])
    assert CONTAINER.recognises(tmp_path / "c", b"")
    assert "(1, 2): give one of them" in error_message(tmp_path / "c")


def test_several_items_are_refused_and_listed(tmp_path):
    ocp.save_checkpointables(tmp_path / "c", {"params": {"w": np.ones(1)}, "opt": {"w": np.zeros(1)}})
    assert "(opt, params): give one of them" in error_message(tmp_path / "c")
    assert np.asarray(CONTAINER.open(tmp_path / "c" / "params").arrays["w",]).tolist() == [1]


def test_a_checkpoint_is_read_without_jax_or_orbax(tmp_path):
    ocp.save(tmp_path / "c", {"w": np.ones(3, np.float32)})
    path = str(tmp_path / "c")
    code = "import sys; from pathlib import Path\n"
    code += "from parity.checkpoints.containers.orbax import CONTAINER as c; import numpy as np\n"
    code += f"w = np.asarray(c.open(Path({path!r})).arrays['w',])\nprint(w, *({{'jax', 'orbax'}} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout == "[1. 1. 1.]\n"


# Writing --------------------------------------------------------------------------------------------------------------


def write_arrays(path, arrays, metadata=None, piece=5):
    """Write arrays with the container under test, in reverse order and in pieces of `piece` elements."""
    with CONTAINER.create(
        path, {key: ArraySpec(array.shape, array.dtype) for key, array in arrays.items()}, metadata or {}
    ) as writer:
        for key in reversed(arrays):
            flat = np.ascontiguousarray(arrays[key]).reshape(-1)
            for first in range(0, flat.size, piece):
                writer.write(key, first, flat[first : first + piece])


FLAT = {"/".join(path): array for path, array in ARRAYS.items()}


def test_orbax_loads_written_arrays_bit_for_bit(tmp_path):
    write_arrays(tmp_path / "c", FLAT, {"config": "{}"})
    loaded = ocp.load(tmp_path / "c")
    for path, array in ARRAYS.items():
        node = loaded
        for word in path:
            node = node[word]
        given = np.asarray(node)
        assert (given.shape, given.dtype, given.tobytes()) == (array.shape, array.dtype, array.tobytes())
    assert ocp.metadata(tmp_path / "c").custom_metadata == {"config": "{}"}


def test_written_arrays_are_read_bit_for_bit(tmp_path):
    write_arrays(tmp_path / "c", FLAT, {"config": "{}"})
    assert read_arrays_as_bytes(tmp_path / "c") == {path: array.tobytes() for path, array in ARRAYS.items()}
    assert CONTAINER.open(tmp_path / "c").metadata == {"config": "{}"}
    assert os.listdir(tmp_path) == ["c"]


def test_an_array_of_zeros_is_stored(tmp_path):
    write_arrays(tmp_path / "c", {"w": np.zeros((3, 4), np.float32)})
    assert not np.asarray(CONTAINER.open(tmp_path / "c").arrays["w",]).any()


@pytest.mark.parametrize("keys", [["a", "a/b"], ["a/b", "a"], ["a/b/c", "a/b"]])
def test_a_key_that_is_both_an_array_and_a_group_is_refused(tmp_path, keys):
    with pytest.raises(InputError, match="would be both an array and a group"):
        write_arrays(tmp_path / "c", {key: np.ones(1) for key in keys})
    assert not os.listdir(tmp_path)


def test_an_array_without_elements_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(InputError, match="Orbax does not store arrays without elements: leave out b"):
        write_arrays(tmp_path / "c", {"a": np.ones(1), "b": np.ones((0, 3))})
    assert not os.listdir(tmp_path)


# Errors ---------------------------------------------------------------------------------------------------------------


def find_tree_file(path):
    """Return the file of a checkpoint that describes the tree of arrays."""
    (file,) = path.rglob("_METADATA")
    return file


def test_a_checkpoint_without_its_tree_is_refused(written_checkpoint, tmp_path):
    shutil.copytree(written_checkpoint, tmp_path / "c")
    find_tree_file(tmp_path / "c").unlink()
    assert "has no _METADATA" in error_message(tmp_path / "c")


def test_invalid_trees_are_refused(written_checkpoint, tmp_path):
    folder = shutil.copytree(written_checkpoint, tmp_path / "c")
    texts = ["", "[]", "{}", '{"tree_metadata": 3}', '{"tree_metadata": {"w": {}}}', "[" * 100_000]
    files = {f"{text[:40]!r}": text.encode() for text in texts}
    assert not find_wrong_refusals(CONTAINER, folder, files, written_to=find_tree_file(folder))


@pytest.mark.parametrize("key", ["../../outside", "..", "/etc"])
def test_an_array_outside_the_folder_is_refused(tmp_path, key):
    WRITERS["zarr"](tmp_path / "c", {"w": np.ones(2)})
    WRITERS["zarr"](tmp_path / "outside", {"w": np.ones(2)})
    file = find_tree_file(tmp_path / "c")
    file.write_text(file.read_text().replace('"key": "w"', f'"key": "{key}"'))
    assert "may be outside" in error_message(tmp_path / "c")


def test_a_missing_chunk_is_an_error_and_not_zeros(written_checkpoint, tmp_path):
    shutil.copytree(written_checkpoint, tmp_path / "c")
    chunks = [
        file for file in (tmp_path / "c").rglob("*") if file.is_file() and file.parent.name in ("d", "a.float32", "c", "0")
    ]
    for file in chunks:
        if file.name not in (".zarray", "zarr.json"):
            file.unlink()
    error_message(tmp_path / "c")


@pytest.mark.parametrize(
    ("written_checkpoint", "said", "what"),
    [
        ("zarr", {}, "a/float32 has no .zarray in its folder"),
        ("zarr", {"use_zarr3": True}, "has no zarr.json in its folder"),
        ("zarr", {"use_ocdbt": True}, "has no .zarray in the OCDBT store"),
        ("ocdbt", {"use_ocdbt": False}, "has no .zarray in its folder"),
    ],
    indirect=["written_checkpoint"],
)
def test_an_array_without_its_description_is_named(written_checkpoint, said, what, tmp_path):
    path = shutil.copytree(written_checkpoint, tmp_path / "c")
    file = find_tree_file(path)
    file.write_text(json.dumps(json.loads(file.read_text()) | said))
    if not said:
        (path / "a.float32" / ".zarray").unlink()
    assert what in error_message(path)


def say_nothing_about_zeros(path):
    """Remove the statement of a checkpoint that it stores chunks of zeros, as older versions of Orbax make none."""
    file = find_tree_file(path)
    tree = json.loads(file.read_text())
    del tree["store_array_data_equal_to_fill_value"]
    file.write_text(json.dumps(tree))


def delete_chunks(array):
    """Delete the chunks of an array of a checkpoint."""
    import tensorstore as ts

    store = ts.KvStore.open(array.ts_spec["kvstore"]).result()
    for key in store.list().result():
        if not key.endswith((b".zarray", b"zarr.json")):
            store.write(key, None).result()


@pytest.mark.parametrize("written_checkpoint", ["zarr", "zarr3", "ocdbt"], indirect=True)  # the others are alike
def test_without_a_statement_about_zeros_an_array_without_chunks_is_assumed_to_be_zero(written_checkpoint, tmp_path):
    path = shutil.copytree(written_checkpoint, tmp_path / "c")
    say_nothing_about_zeros(path)
    whole = CONTAINER.open(path).arrays
    delete_chunks(whole["a", "float32"])
    arrays = CONTAINER.open(path).arrays
    assert [words for words, array in arrays.items() if array.is_assumed_zero] == [("a", "float32")]
    assert not any(array.is_assumed_zero for array in whole.values())
    assert np.asarray(arrays["a", "float32"]).tolist() == np.zeros((3, 4)).tolist()
    assert np.asarray(arrays["a", "int32"]).tolist() == ARRAYS["a", "int32"].tolist()


@pytest.mark.parametrize("written_checkpoint", ["zarr", "ocdbt"], indirect=True)
@pytest.mark.parametrize("least_axes", [0, 2])
def test_a_checkpoint_whose_arrays_or_matrices_all_lack_their_chunks_is_refused(written_checkpoint, least_axes, tmp_path):
    path = shutil.copytree(written_checkpoint, tmp_path / "c")
    say_nothing_about_zeros(path)
    for array in CONTAINER.open(path).arrays.values():
        if len(array.shape) >= least_axes:
            delete_chunks(array)
    assert "has no data of any array of two or more axes: they are all zero" in error_message(path)


def test_without_a_statement_about_zeros_an_array_that_lacks_some_chunks_is_refused(tmp_path):
    path = write_orbax(tmp_path, shape=(4,))
    say_nothing_about_zeros(path)
    assert "chunk {1} stored at" in error_message(path)


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


@pytest.mark.parametrize("written_checkpoint", ["v1", "standard", "zarr", "zarr3"], indirect=True)  # the others are alike
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_or_truncated_files_are_refused_or_read_with_their_shapes(written_checkpoint, tmp_path, data):
    folder = tmp_path / "c"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(written_checkpoint, folder)
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


@pytest.mark.parametrize(
    ("name", "what"), [("a\\b", "a backslash"), (os.fsdecode(b"a\xe9"), "characters that are not UTF-8")]
)
def test_a_path_that_tensorstore_takes_for_another_is_refused(name, what, tmp_path):
    """tensorstore reads a backslash as a slash, so it would read and write another folder."""
    for folder in (tmp_path / "a/b", tmp_path / "source"):
        ocp.save(folder, {"w": np.float32([len(str(folder))])})
    shutil.copytree(tmp_path / "source", tmp_path / name)
    with pytest.raises(InputError, match=f"{what}, and tensorstore cannot open such a path"):
        CONTAINER.open(tmp_path / name)
    with (
        pytest.raises(InputError, match=what),
        CONTAINER.create(tmp_path / name / "new", {"w": ArraySpec(np.dtype(np.float32), (2,))}, {}),
    ):
        raise AssertionError("nothing may be written")
    assert not (tmp_path / name / "new").exists()
