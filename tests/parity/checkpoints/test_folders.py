"""Folders: the file that its library reads is read, and a note of ours is obeyed only beside the weights it describes."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

import parity
from parity.__main__ import main
from parity.checkpoints import containers, hub
from parity.checkpoints.containers import dcp
from tests.parity.checkpoints.test_reading import TINY, random_arrays
from vit_spec import InputError

SQUARE = TINY.replace(image_size=4)


def make_files(folder, *names, config=None):
    """Make a folder of empty files, and a config.json unless `config` is None."""
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_bytes(b"")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def refusal(path):
    """Return the one-line error of a folder in which the weights cannot be found."""
    with pytest.raises(InputError) as error:
        containers.find(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    return str(error.value)


def square_arrays(seed=0):
    """Return arrays of SQUARE in the format torch."""
    return random_arrays(seed=seed) | {"pos_embed": np.full((1, 5, 8), seed, np.float32)}


# The file of a library ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "others", "chosen"),
    [
        ({"model_type": "vit"}, ["model.safetensors", "weights.safetensors"], "model.safetensors"),
        ({"model_type": "vit"}, ["pytorch_model.bin", "weights.safetensors"], "pytorch_model.bin"),
        ({"recipe": {}, "data": {}}, ["pytorch_model.bin", "weights.safetensors"], "weights.safetensors"),
        (None, ["ema.safetensors", "weights.safetensors"], "weights.safetensors"),
        ({"recipe": {}, "data": {}}, ["best.safetensors", "weights.safetensors", "model.safetensors"], "best.safetensors"),
        ({"recipe": {}, "data": {}}, ["best.safetensors", "best_raw.safetensors"], "best.safetensors"),
        ({"model_type": "vit"}, ["best.safetensors", "weights.safetensors", "model.safetensors"], "model.safetensors"),
        (None, ["best.safetensors", "best_raw.safetensors", "weights.safetensors"], "best.safetensors"),
        (None, ["model.safetensors", "open_clip_model.safetensors"], "model.safetensors"),
        (
            None,
            ["model.safetensors", "open_clip_model.safetensors", "open_clip_config.json"],
            "open_clip_model.safetensors",
        ),
        ({"model_type": "clip"}, ["model.safetensors", "open_clip_model.safetensors"], "model.safetensors"),
        (
            {"model_type": "vit", "transformers_weights": "b.safetensors"},
            ["model.safetensors", "b.safetensors"],
            "b.safetensors",
        ),
        ({"model_type": "vit"}, ["flax_model.msgpack", "ema.npz"], "flax_model.msgpack"),
    ],
)
def test_the_names_of_the_library_that_config_json_shows_come_first(tmp_path, config, others, chosen):
    assert containers.find(make_files(tmp_path / "a", *others, config=config)).name == chosen


def test_a_file_named_best_is_that_of_a_run_only_beside_the_newest_weights(tmp_path):
    folder = make_files(tmp_path / "a", "best.safetensors", "last.safetensors", config={"model_type": "vit"})
    assert "holds 2 candidates ('best.safetensors', 'last.safetensors')" in refusal(folder)


@pytest.fixture
def run_folder(tmp_path):
    """Write a run folder whose best weights are in another format, with another number of classes, than the newest."""
    folder = make_files(tmp_path / "run", config={"recipe": {}, "data": {}})
    newest, changed = parity.Checkpoint(SQUARE, "torch", square_arrays()), {"num_classes": 5}
    parity.write(newest, folder / "weights.safetensors", "torch")
    parity.write(parity.surgery.apply(newest, changed)[0], folder / "best.safetensors", "jax")
    return folder


def test_a_run_folder_means_its_best_weights_everywhere(run_folder, tmp_path, capsys):
    best = str(run_folder / "best.safetensors")
    found = parity.load(run_folder)
    assert (found.path, found.format, found.config.num_classes) == (best, "jax", 5)
    assert main(["convert", str(run_folder), str(tmp_path / "a.npz"), "--to", "torch"]) == 0
    assert parity.load(tmp_path / "a.npz").config.num_classes == 5
    assert capsys.readouterr().out.startswith("read: best.safetensors, format jax, container safetensors\n")
    assert main(["inspect", str(run_folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == best


def test_the_newest_weights_of_a_run_are_read_by_their_path_and_where_there_are_no_best_ones(run_folder):
    newest = run_folder / "weights.safetensors"
    assert parity.load(newest).config.num_classes == SQUARE.num_classes
    (run_folder / "best.safetensors").unlink()
    assert parity.load(run_folder).path == str(newest)


@pytest.mark.parametrize("content", [b"", b"damaged" * 9])
def test_damaged_best_weights_of_a_run_are_refused_and_not_replaced_by_the_newest(run_folder, content):
    best, newest = (run_folder / f"{name}.safetensors" for name in ("best", "weights"))
    best.write_bytes(content)
    for place in (run_folder, best):
        with pytest.raises(
            InputError, match=r"is damaged .*: fetch or write it again; resuming the run writes it"
        ) as error:
            parity.load(place)
        assert str(error.value).startswith(f"{best} is") and str(error.value).endswith(f"{newest} has the newest weights")


def test_a_weight_file_that_config_json_names_is_not_replaced_by_another(tmp_path):
    config = {"model_type": "vit", "transformers_weights": "b.safetensors"}
    assert "says transformers_weights='b.safetensors' in config.json, which is missing" in refusal(
        make_files(tmp_path / "a", "model.safetensors", config=config)
    )


def test_a_folder_that_is_a_checkpoint_itself_and_has_a_file_of_a_library_is_refused_without_config_json(tmp_path):
    folder = make_files(tmp_path / "a", ".metadata", "model.safetensors")
    assert "holds model.safetensors and is a checkpoint itself: give the path of the file" in refusal(folder)
    (folder / "config.json").write_text('{"model_type": "vit"}')
    assert containers.find(folder).name == "model.safetensors"


def test_an_index_left_over_from_shards_is_not_read_beside_a_single_file(tmp_path):
    arrays = square_arrays()
    parity.save(tmp_path / "vit.safetensors", arrays, SQUARE, "torch")
    parity.write(parity.load(tmp_path / "vit.safetensors"), f"{tmp_path / 'folder'}/", "hf-vit", shard=1500)
    parity.save(tmp_path / "other.safetensors", square_arrays(1), SQUARE, "torch")
    parity.write(parity.load(tmp_path / "other.safetensors"), f"{tmp_path / 'one'}/", "hf-vit")
    shutil.copy(tmp_path / "one" / "model.safetensors", tmp_path / "folder")
    read = parity.load(tmp_path / "folder").arrays["vit.embeddings.position_embeddings"]
    assert np.asarray(read).max() == 1
    for shard in (tmp_path / "folder").glob("model-*"):
        shard.unlink()
    assert np.asarray(parity.load(tmp_path / "folder").arrays["vit.embeddings.position_embeddings"]).max() == 1


# The only file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.safetensors", "a.bin", "a.pt", "a.pth", "a.ckpt", "a.npz", "a.msgpack", "a.pth.tar"])
def test_without_the_name_of_a_library_the_only_weight_file_is_read(tmp_path, name):
    folder = make_files(tmp_path / "a", name, "README.md", ".hidden.safetensors", config={"model_type": "vit"})
    assert containers.find(folder) == folder / name
    for other in ("b.safetensors", "b.pth", "b.npz", "last.pth.tar"):
        (folder / other).write_bytes(b"")
        assert f"holds 2 candidates ({name!r}, {other!r}): give the path of one" in refusal(folder)
        (folder / other).unlink()


def test_an_index_and_its_shards_are_one_candidate(tmp_path):
    folder = make_files(tmp_path / "a", "vit-1.safetensors", "vit-2.safetensors")
    index = folder / "vit.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "vit-1.safetensors", "b": "vit-2.safetensors"}}))
    assert containers.find(folder) == index
    (folder / "ema.npz").write_bytes(b"")
    assert "'ema.npz', 'vit.safetensors.index.json'" in refusal(folder)


def test_a_checkpoint_of_orbax_in_a_subfolder_is_a_candidate(tmp_path):
    folder = make_files(tmp_path / "a")
    make_files(folder / "step_1", "_METADATA")
    assert containers.find(folder) == folder
    (folder / "vit.npz").write_bytes(b"")
    assert "holds 2 candidates ('an Orbax checkpoint', 'vit.npz')" in refusal(folder)


# The hub --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        (["pytorch_model.bin", "ema.safetensors", "config.json"], ["pytorch_model.bin", "config.json"]),
        (["pytorch_model.bin", "flax_model.msgpack"], ["pytorch_model.bin"]),
        (["model.safetensors", "model.fp16.safetensors", "open_clip_model.safetensors"], ["model.safetensors"]),
        (["vit.npz"], ["vit.npz"]),
        (["weights.safetensors", "config.json", "best.safetensors"], ["best.safetensors", "config.json"]),
        (["v.bin.index.json", "v-00001-of-00001.bin"], ["v.bin.index.json", "v-00001-of-00001.bin"]),
        (
            ["flax_model.msgpack", "flax_model.msgpack.parity.json"],
            ["flax_model.msgpack", "flax_model.msgpack.parity.json"],
        ),
    ],
)
def test_of_a_repository_the_file_that_its_library_reads_is_downloaded(files, chosen):
    assert hub.choose_files(files, "") == chosen


def test_a_repository_with_several_weight_files_of_no_library_is_refused():
    with pytest.raises(InputError, match=r"holds 2 candidates \('a\.pth', 'b\.npz'\): give the path of one"):
        hub.choose_files(["a.pth", "b.npz"], "")


def test_the_working_directory_is_named_in_its_error(tmp_path, monkeypatch):
    for name in ("one.npz", "two.npz"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    assert refusal(tmp_path.relative_to(tmp_path)).startswith(". holds 2 candidates ('one.npz', 'two.npz')")


# Notes in folders -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["dcp", "orbax"])
def noted(request, tmp_path):
    """Write a folder with an activation that only our note in it states, and return its path."""
    pytest.importorskip({"orbax": "orbax.checkpoint", "dcp": "torch"}[request.param])
    parity.save(tmp_path / "vit.safetensors", square_arrays(), SQUARE.replace(mlp={"activation": "relu"}), "torch")
    parity.convert(tmp_path / "vit.safetensors", tmp_path / "noted", "torch", container=request.param)
    return tmp_path / "noted"


def test_the_note_of_a_folder_is_obeyed_beside_the_weights_that_it_describes(noted, tmp_path):
    shutil.copytree(noted, tmp_path / "moved")
    (tmp_path / "moved" / "README.md").write_text("moved")
    checkpoint = parity.load(tmp_path / "moved")
    assert checkpoint.config.mlp.activation == "relu" and not checkpoint.left and not checkpoint.assumed


def test_the_note_of_a_folder_of_an_older_version_is_obeyed(noted):
    notes = json.loads((noted / "parity.json").read_text())
    del notes["fingerprint"]
    (noted / "parity.json").write_text(json.dumps(notes))
    checkpoint = parity.load(noted)
    assert checkpoint.config.mlp.activation == "relu" and not checkpoint.left


def test_a_note_is_not_obeyed_beside_weights_that_another_program_saved_in_place(noted, tmp_path):
    parity.save(tmp_path / "new.safetensors", square_arrays(1), SQUARE, "torch")
    kind = "dcp" if dcp.recognises(noted, b"") else "orbax"
    parity.convert(tmp_path / "new.safetensors", tmp_path / "new", "torch", container=kind)
    shutil.copytree(tmp_path / "new", noted, dirs_exist_ok=True, ignore=lambda *_: ["parity.json"])
    checkpoint = parity.load(noted, given={"num_heads": 2})
    assert np.asarray(checkpoint.arrays["pos_embed"]).max() == 1 and checkpoint.config.mlp.activation == "gelu"
    assert checkpoint.left == ("parity.json, because its fingerprint is that of other weights: remove the file",)


def test_a_note_beside_a_file_that_describes_other_weights_is_reported(tmp_path):
    torch = pytest.importorskip("torch")
    path = tmp_path / "vit.pth"
    parity.save(path, square_arrays(), SQUARE.replace(mlp={"activation": "relu"}), "torch")
    assert parity.load(path).config.mlp.activation == "relu" and not parity.load(path).left
    torch.save({key: torch.from_numpy(np.asarray(array)) for key, array in square_arrays(1).items()}, path)
    checkpoint = parity.load(path, given={"num_heads": 2})
    assert checkpoint.config.mlp.activation == "gelu"
    assert checkpoint.left == ("vit.pth.parity.json, because its fingerprint is that of other weights: remove the file",)


@pytest.mark.parametrize("entry", [5, "x", [1], {"model_type": "vit", "hidden_act": "relu"}], ids=str)
def test_an_entry_of_a_note_is_not_mistaken_for_a_file_beside_the_weights(tmp_path, entry):
    pytest.importorskip("torch")
    path, note = tmp_path / "vit.pth", tmp_path / "vit.pth.parity.json"
    parity.save(path, square_arrays(), SQUARE, "torch")
    for kept in (True, False):  # without the config, the weights are those of another program
        notes = {
            key: (stored if kept else {}) | {"config.json": entry} for key, stored in json.loads(note.read_text()).items()
        }
        note.write_text(json.dumps(notes))
        assert parity.load(path, given=None if kept else {"num_heads": 2}).config.mlp.activation == "gelu"


def test_the_note_of_the_only_file_of_a_folder_is_obeyed(tmp_path):
    pytest.importorskip("torch")
    (tmp_path / "folder").mkdir()
    parity.save(tmp_path / "folder" / "vit.pth", square_arrays(), SQUARE.replace(mlp={"activation": "relu"}), "torch")
    assert parity.load(tmp_path / "folder").config.mlp.activation == "relu"


# Entries with the names of ours ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "entries",
    [
        {"config": "configs/vit.yaml", "format": "timm-finetune"},
        {"config": "vit.yaml", "layout": "NCHW"},
        {"config": "vit.yaml", "format": "timm"},
        {"config": '{"a": 1}', "format": "pytorch"},
        {"config": "[1]", "format": "NCHW"},
    ],
)
def test_entries_of_a_training_script_are_not_taken_for_ours(tmp_path, entries):
    save_file(square_arrays(), tmp_path / "a.safetensors", entries)
    given = {"num_heads": 2}
    found = parity.load(tmp_path / "a.safetensors", given=given)
    save_file(square_arrays(), tmp_path / "b.safetensors")
    expected = parity.load(tmp_path / "b.safetensors", given=given)
    assert (found.config, found.format, found.assumed) == (expected.config, expected.format, expected.assumed)


@pytest.mark.parametrize(
    ("name", "format", "changes", "words"),
    [
        ("model.safetensors", "timm", {}, r"its config.json is not one of format 'timm:vit', the format of model.safeten"),
        ("model.safetensors", "hf-vit", {"num_heads": 4}, "its config.json says num_heads=2, but the config stored with"),
        ("new.npz", "hf-vit", {"num_heads": 4}, "its config.json says num_heads=2, but the config stored with"),
    ],
)
def test_a_file_that_the_config_json_in_its_folder_contradicts_is_not_written(tmp_path, name, format, changes, words):
    """It could not be read, and would replace the weights of a folder that can."""
    folder, source = tmp_path / "a", tmp_path / "b.safetensors"
    parity.save(source, square_arrays(), SQUARE.replace(**changes), "torch")
    parity.save(tmp_path / "c.safetensors", square_arrays(1), SQUARE, "torch")
    parity.convert(tmp_path / "c.safetensors", f"{folder}/", "hf-vit")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(InputError, match=f"{name} could not be read beside the files in its folder: {words}") as caught:
        parity.convert(source, folder / name, format, force=True)
    assert "\n" not in str(caught.value) and {path.name: path.read_bytes() for path in folder.iterdir()} == before
    parity.convert(source, tmp_path / name, format)
    parity.load(tmp_path / name)


@pytest.mark.parametrize(("name", "format"), [("new.safetensors", "timm"), ("model.safetensors", "hf-vit")])
def test_a_file_that_the_config_json_in_its_folder_does_not_contradict_is_written(tmp_path, name, format):
    parity.save(tmp_path / "b.safetensors", square_arrays(), SQUARE, "torch")
    parity.convert(tmp_path / "b.safetensors", f"{tmp_path / 'a'}/", "hf-vit")
    parity.convert(tmp_path / "b.safetensors", tmp_path / "a" / name, format, force=True)
    assert parity.load(tmp_path / "a" / name).format.startswith(format)
