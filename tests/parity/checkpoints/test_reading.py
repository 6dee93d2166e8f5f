"""Checkpoints on disk: bitwise round trips, atomic writes, and errors that name the file."""

import json
import os
import pickle

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import parity
from parity.checkpoints import conversion
from parity.checkpoints.containers.container import File
from parity.checkpoints.conversion import converted_arrays
from parity.checkpoints.formats import get
from parity.checkpoints.weights import flatten
from vit_spec import InputError, ViTConfig

TINY = ViTConfig(image_size=(4, 6), patch_size=2, width=8, depth=2, num_heads=2, mlp_dim=6, num_classes=3)
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}


def random_arrays(format="torch", dtype="float32", seed=0):
    """Return arrays of random bits, with NaNs and infinities, for every key of a format."""
    rng, dtype = np.random.default_rng(seed), np.dtype(DTYPES[dtype])
    return {
        key: rng.integers(0, 256, (*layout.shape(TINY.sizes), dtype.itemsize), np.uint8).view(dtype)[..., 0]
        for layout in get(format).layouts(TINY).values()
        for key in layout.keys(TINY.sizes)
    }


def same_bits(a, b):
    """Return whether two dictionaries of arrays have the same keys, shapes, dtypes and bits."""
    a, b = ({key: np.asarray(array) for key, array in arrays.items()} for arrays in (a, b))
    return a.keys() == b.keys() and all(
        a[key].dtype == b[key].dtype and a[key].shape == b[key].shape and a[key].tobytes() == b[key].tobytes() for key in a
    )


@pytest.fixture
def saved(tmp_path):
    """Save a file in the torch format, and return its path."""
    path = tmp_path / "vit.safetensors"
    parity.save(path, random_arrays(), TINY, "torch")
    return path


def test_a_leading_tilde_is_the_home_folder(tmp_path, monkeypatch, saved):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    parity.save("~/a.safetensors", random_arrays(), TINY, "torch")
    parity.convert("~/vit.safetensors", "~/timm/", "timm")
    assert parity.load("~/a.safetensors").arrays.keys() == parity.load(saved).arrays.keys()
    assert (tmp_path / "timm" / "config.json").is_file() and not (tmp_path / "~").exists()


def header(path):
    """Return the parsed header of a safetensors file."""
    data = path.read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


# Round trips ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["jax", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_saved_arrays_are_loaded_bit_for_bit(tmp_path, format, dtype):
    path, arrays = tmp_path / "a.safetensors", random_arrays(format, dtype)
    parity.save(path, arrays, TINY, format)
    checkpoint = parity.load(path)
    assert (checkpoint.config, checkpoint.format) == (TINY, format)
    assert same_bits(checkpoint.arrays, arrays)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_conversion_and_back_gives_the_same_bytes(tmp_path, dtype):
    a, b, c = (tmp_path / f"{name}.safetensors" for name in "abc")
    parity.save(a, random_arrays("torch", dtype), TINY, "torch")
    parity.convert(a, b, "jax")
    parity.convert(b, c, to="torch")
    assert parity.load(b).format == "jax"
    assert a.read_bytes() == c.read_bytes()


def test_a_converted_file_has_the_arrays_of_to_jax(tmp_path, saved):
    parity.convert(saved, tmp_path / "b.safetensors", "jax")
    params = parity.to_jax(random_arrays(), TINY)
    assert same_bits(parity.load(tmp_path / "b.safetensors").arrays, flatten(params, get("jax")))


def test_nested_and_flat_parameters_are_saved_alike(tmp_path, saved):
    parity.save(tmp_path / "b.safetensors", parity.to_jax(random_arrays(), TINY), TINY, "jax")
    parity.convert(saved, tmp_path / "c.safetensors", "jax")
    assert (tmp_path / "b.safetensors").read_bytes() == (tmp_path / "c.safetensors").read_bytes()


def test_the_safetensors_library_reads_the_file(tmp_path):
    arrays = random_arrays("torch", "bfloat16") | {"head.bias": np.ones(3, np.float64), "norm.bias": np.ones(8, np.float16)}
    parity.save(tmp_path / "a.safetensors", arrays, TINY, "torch")
    with safe_open(tmp_path / "a.safetensors", "numpy") as file:
        assert same_bits({key: file.get_tensor(key) for key in file.keys()}, arrays)


def test_files_are_exchanged_with_safetensors_torch(tmp_path):
    library = pytest.importorskip("safetensors.torch")
    parity.save(tmp_path / "a.safetensors", random_arrays("torch", "bfloat16"), TINY, "torch")
    tensors = library.load_file(tmp_path / "a.safetensors")
    library.save_file(tensors, tmp_path / "b.safetensors", {"config": TINY.to_json(), "format": "torch"})
    assert same_bits(parity.load(tmp_path / "b.safetensors").arrays, random_arrays("torch", "bfloat16"))


def test_every_array_is_aligned_whatever_the_dtypes(tmp_path):
    config = TINY.replace(depth=1)
    arrays = {key: array for key, array in random_arrays("torch", "float64").items() if not key.startswith("blocks.1.")}
    arrays["blocks.0.mlp.fc1.bias"] = np.ones(6, ml_dtypes.bfloat16)  # 12 bytes, in the middle
    parity.save(tmp_path / "a.safetensors", arrays, config, "torch")
    read = parity.load(tmp_path / "a.safetensors").arrays
    assert all(array.offset % array.dtype.itemsize == 0 for array in read.values())


def test_the_header_has_config_format_and_version(saved):
    metadata = header(saved)["__metadata__"]
    assert ViTConfig.from_json(metadata["config"]) == TINY
    assert metadata["format"] == "torch" and metadata["version"]


def test_a_run_folder_loads_as_its_weights(tmp_path):
    (tmp_path / "run").mkdir()
    parity.save(tmp_path / "run" / "weights.safetensors", random_arrays(), TINY, "torch")
    assert same_bits(parity.load(tmp_path / "run").arrays, random_arrays())
    assert same_bits(parity.load(str(tmp_path / "run")).arrays, random_arrays())


def test_load_reads_headers_only_and_an_array_is_read_when_it_is_used(saved, monkeypatch):
    read, read_into = [], File.read_into
    monkeypatch.setattr(
        File, "read_into", lambda self, out, offset: (read.append(out.nbytes), read_into(self, out, offset))
    )
    checkpoint = parity.load(saved)
    assert not read
    np.testing.assert_array_equal(checkpoint.arrays["norm.bias"][2:4], np.asarray(checkpoint.arrays["norm.bias"])[2:4])
    assert read == [32, 32]


def test_a_file_that_is_truncated_after_load_is_reported(saved):
    array = parity.load(saved).arrays["head.bias"]
    os.truncate(saved, saved.stat().st_size // 2)
    with pytest.raises(InputError, match=r"vit\.safetensors was truncated while it was read"):
        np.asarray(array)


def test_a_file_that_is_modified_after_load_is_reported(saved):
    array = parity.load(saved).arrays["head.bias"]
    with saved.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"1234")
    os.utime(saved, ns=(0, 0))  # clocks of file systems may be coarse
    with pytest.raises(InputError, match=r"vit\.safetensors was written to while it was read"):
        np.asarray(array)


# Atomic writes --------------------------------------------------------------------------------------------------------


def test_an_existing_file_is_not_replaced(saved):
    before = saved.read_bytes()
    with pytest.raises(InputError, match=r"vit\.safetensors exists: give another name, or --force"):
        parity.save(saved, random_arrays(seed=1), TINY, "torch")
    assert saved.read_bytes() == before


def test_force_replaces_an_existing_file(saved):
    parity.save(saved, random_arrays(seed=1), TINY, "torch", force=True)
    assert same_bits(parity.load(saved).arrays, random_arrays(seed=1))


def test_a_file_can_be_converted_onto_itself(saved):
    checkpoint = parity.load(saved)
    parity.convert(saved, saved, "jax", force=True)
    assert parity.load(saved).format == "jax"
    assert same_bits(checkpoint.arrays, random_arrays())  # the loaded checkpoint still reads the old file


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file_and_nothing_else(saved, monkeypatch, failure):
    before, calls = saved.read_bytes(), []

    def failing(value):
        calls.append(value)
        if len(calls) == 10:
            raise failure
        return np.asarray(value)

    monkeypatch.setattr(conversion, "as_array", failing)
    with pytest.raises((InputError, KeyboardInterrupt), match=r"make room|^$"):
        parity.save(saved, random_arrays(seed=1), TINY, "torch", force=True)
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == [saved.name]


def test_a_new_file_is_flushed_before_it_replaces_the_old_one(saved, monkeypatch):
    order, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda number: (order.append("fsync"), fsync(number)))
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append("replace"), replace(a, b)))
    parity.convert(saved, saved, "jax", force=True)
    assert order == ["fsync", "replace"]


def test_data_that_is_not_read_back_as_written_is_reported(saved, monkeypatch):
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda number, data, offset: write(number, bytes(len(data)), offset))
    with pytest.raises(OSError, match="read back"):
        parity.convert(saved, saved.with_name("b.safetensors"), "jax")
    assert os.listdir(saved.parent) == [saved.name]


def test_a_link_is_replaced_and_not_its_target(saved, tmp_path):
    before, link = saved.read_bytes(), tmp_path / "link.safetensors"
    link.symlink_to(saved)
    with pytest.raises(InputError, match="exists"):
        parity.convert(saved, link, "jax")
    parity.convert(saved, link, "jax", force=True)
    assert saved.read_bytes() == before and not link.is_symlink()


def test_wrong_weights_are_refused_before_a_file_is_created(tmp_path):
    arrays = random_arrays()
    del arrays["cls_token"]
    with pytest.raises(InputError, match="1 missing: cls_token"):
        parity.save(tmp_path / "a.safetensors", arrays, TINY, "torch")
    assert not os.listdir(tmp_path)


# Refused input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("a.npy", r"a\.npy does not select a container; did you mean '\.npz'\?: give a name that ends in .safetensors"),
        ("a", "a does not select a container: give a name that ends in .safetensors, .pth"),
        ("folder.safetensors", "is a folder: give the name of a file in it"),
        ("nowhere/a.safetensors", "nowhere: create it first"),
    ],
)
def test_a_path_that_cannot_be_written_to_is_refused(tmp_path, name, what):
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(InputError, match=what):
        parity.save(tmp_path / name, random_arrays(), TINY, "torch", force=True)


def refusal(path):
    """Load a checkpoint, which must fail with an InputError, and return the message."""
    with pytest.raises(InputError) as error:
        parity.load(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    return str(error.value)


def test_a_link_to_a_missing_file_is_named(saved):
    link = saved.with_name("link.safetensors")
    link.symlink_to("old.safetensors")
    assert refusal(link).endswith("link.safetensors is a link to old.safetensors, which does not exist: correct the link")
    link.unlink()
    link.symlink_to(saved.name)
    assert parity.load(link).config == parity.load(saved).config


def test_a_missing_file_suggests_the_nearest_name(saved):
    assert refusal(saved.with_name("vitt.safetensors")).endswith("did you mean 'vit.safetensors'?")
    assert refusal("timm:vit").endswith("of the trainers read timm:NAME, give hf://timm/NAME")


def test_a_missing_folder_is_named(tmp_path):
    assert f"there is no folder {tmp_path / 'nowhere'}" in refusal(tmp_path / "nowhere" / "a.safetensors")


def test_a_folder_without_weights_is_refused(tmp_path):
    assert "is not a folder of a known container" in refusal(tmp_path)


@pytest.mark.parametrize("length", [0, 7, 8, 20, 600, -1])
def test_a_truncated_file_is_refused(saved, length):
    saved.write_bytes(saved.read_bytes()[:length])
    refusal(saved)


def test_an_hdf5_file_is_named(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    assert "model.bin is an HDF5 file, which is not a known container" in refusal(tmp_path / "model.bin")


@pytest.mark.parametrize("name", ["model.pth", "model.bin", "model.pkl"])
def test_a_plain_pickle_is_named(tmp_path, name):
    for protocol in (2, pickle.DEFAULT_PROTOCOL):
        (tmp_path / name).write_bytes(pickle.dumps({"weight": np.zeros(3, np.float32)}, protocol))
        assert f"{name} is a plain pickle, as of pickle.dump, and no file of torch.save: load it" in refusal(
            tmp_path / name
        )


@pytest.mark.parametrize("content", [b"PK\3\4" + bytes(100), b"\x80\x02}q\x00.", b"hello world, here is some text"])
def test_a_file_of_another_kind_is_refused(tmp_path, content):
    (tmp_path / "a.safetensors").write_bytes(content)
    refusal(tmp_path / "a.safetensors")


def test_a_pipe_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "a.safetensors")
    assert "is neither a file nor a folder" in refusal(tmp_path / "a.safetensors")


GOOD = {"config": TINY.to_json(), "format": "torch"}


@pytest.mark.parametrize(
    ("metadata", "what"),
    [
        (None, "give it with --set num_heads=N"),
        ({"format": "pt"}, "give it with --set num_heads=N"),
        (GOOD | {"format": "trch"}, "unknown format 'trch'; did you mean 'torch'?"),
        (GOOD | {"config": "{"}, "the config cannot be read"),
        (GOOD | {"config": '{"widht": 3}'}, "unknown config field widht; did you mean 'width'?"),
        (GOOD | {"config": TINY.replace(depth=1).to_json()}, "12 unexpected: 'blocks.1.attn.proj.bias'"),
    ],
)
def test_a_file_without_a_usable_config_is_refused(tmp_path, metadata, what):
    path = tmp_path / "a.safetensors"
    save_file(random_arrays(), path, metadata)
    with pytest.raises(InputError, match=what):
        parity.load(path)


def test_an_array_of_integers_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file(random_arrays() | {"step": np.ones(1, np.int64)}, path, GOOD)
    assert "1 unexpected: 'step' (1,)" in refusal(path)


def test_an_unknown_format_is_reported_before_files_are_opened(tmp_path):
    with pytest.raises(InputError, match="unknown format 'jux'; did you mean 'jax'"):
        parity.convert(tmp_path / "nothing", tmp_path / "b.safetensors", to="jux")


# Folders --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["orbax", "dcp", None])
def test_a_folder_is_replaced_only_if_it_contains_only_weights(saved, tmp_path, kind):
    pytest.importorskip({"orbax": "orbax.checkpoint", "dcp": "torch", None: "numpy"}[kind])
    target, to = f"{tmp_path / 'folder'}/", "torch" if kind else "hf-vit"
    source = tmp_path / "square.safetensors"
    config = TINY.replace(image_size=4)
    arrays = random_arrays() | {"pos_embed": np.ones((1, 5, 8), np.float32)}
    parity.save(source, arrays, config, "torch")
    parity.convert(source, target, to, container=kind)
    with pytest.raises(InputError, match="exists: give another name, or --force"):
        parity.convert(source, target, to, container=kind)
    parity.convert(source, target, to, container=kind, force=True)
    assert parity.load(target).config == config
    (tmp_path / "folder" / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="has other files than weights, and is not replaced"):
        parity.convert(source, target, to, container=kind, force=True)
    assert (tmp_path / "folder" / "thesis.tex").read_text() == "years of work"
    assert not [entry for entry in os.listdir(tmp_path) if "partial" in entry or entry.endswith(".old")]


def test_shards_are_not_larger_than_the_limit(tmp_path):
    arrays = random_arrays() | {"pos_embed": np.ones((1, 5, 8), "f4")}
    parity.save(tmp_path / "square.safetensors", arrays, TINY.replace(image_size=4), "torch")
    parity.write(parity.load(tmp_path / "square.safetensors"), f"{tmp_path / 'folder'}/", "hf-vit", shard=1500)
    shards = list((tmp_path / "folder").glob("model-*.safetensors"))
    assert len(shards) > 2 and (tmp_path / "folder" / "model.safetensors.index.json").is_file()
    for path in shards:
        entries = [entry for key, entry in header(path).items() if key != "__metadata__"]
        assert max(entry["data_offsets"][1] for entry in entries) <= 1500
    assert same_bits(dict(converted_arrays(parity.load(tmp_path / "folder"), "torch")), arrays)
