"""A run that changes its trainer goes on with the same training state, bit for bit."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
pytest.importorskip("grain")

import parity
from parity.checkpoints.containers import orbax
from parity.checkpoints.weights import as_checkpoint
from tests.train.torch.test_engine import CONFIG, DROPOUT, make, make_batch
from tests.twins import perturbed_params
from train.checkpoints import orbax_files, shard_files
from train.checkpoints.training_state import TrainingState, without_placeholders
from train.data.sources import open_dataset
from train.jax.engine import JaxEngine
from train.loop import hand_over
from train.loop.checkpoint_folder import converted_folder, replaced_folder, settle_converted
from train.loop.loop_state import LoopState, Scores
from train.loop.request import Request
from train.loop.saved_run import checkpoints_folder, has_checkpoints
from train.loop.session import train
from train.recipes import OPTIMIZERS, Model, Optimizer, Recipe
from train.recipes.param_groups import lr_multipliers
from train.torch.engine import TorchEngine
from vit_spec import InputError

ENGINES = {"jax": JaxEngine, "torch": TorchEngine}
OTHER = {"jax": "torch", "torch": "jax"}
FILES = {"jax": orbax_files, "torch": shard_files}
# Matrices of 32 or more rows and columns, which Adafactor factors; the first block is frozen.
WIDE = CONFIG.replace(width=48, mlp_dim=96, regularisation=DROPOUT)
START = as_checkpoint(jax.tree.map(lambda x: np.asarray(x, np.float64), perturbed_params(WIDE)), WIDE, "jax")


@pytest.fixture
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    jax.config.update("jax_enable_x64", True)  # also in the threads with which Orbax reads
    yield
    jax.config.update("jax_enable_x64", False)
    torch.set_default_dtype(torch.float32)


def engine(name: str, folder: Path, optimizer: str) -> Any:
    """Return the engine of a trainer, with a frozen block, and with checkpoints in a folder."""
    settings = Optimizer(name=optimizer, eps=1e-3, layer_decay=0.8, freeze=("patch_embed.*", "blocks.0.*"))
    made = make(ENGINES[name], start=START, optimizer=settings, rng="shared", ema=0.9, accumulate=2)
    made._folder = folder
    return made


def save(engine: Any, step: int, accuracy: float = 0.5) -> None:
    """Write a checkpoint, and wait until it is complete."""
    scores = Scores(last={"loss": 1.0, "accuracy": accuracy}, best={"loss": 1.0, "accuracy": accuracy})
    engine.save_checkpoint(step, LoopState(scores=scores, is_evaluated=True, run_id="r", skipped=step))
    engine.close()


def take_over(name: str, folder: Path, optimizer: str) -> Any:
    """Return the engine of a trainer after a hand-over of the checkpoints in a folder, and their restoration."""
    made, steps = engine(name, folder, optimizer), []
    handed_over = hand_over.hand_over(made, folder, "classes", lambda step, state: steps.append((step, state)))
    assert handed_over is not None and handed_over.folder.is_dir() and not converted_folder(folder).exists()
    restored = made.restore_checkpoint()
    assert restored is not None and (restored.step, restored.loop_state) == steps[0]
    return made


def arrays_in(state: TrainingState) -> dict[tuple[str, str], np.ndarray]:
    return {(part, key): np.asarray(array) for part, arrays in state.parts.items() for key, array in arrays.items()}


def fill(made: TorchEngine) -> None:
    """Give an engine random moments, and numbers of steps and of updates that differ."""
    rng = np.random.default_rng(0)
    for _, entries in made._tensors().values():
        if entries.ndim:
            entries.data.copy_(torch.tensor(rng.normal(size=entries.shape)))
    made._set_numbers(9, 7, 1)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_training_state_goes_to_the_other_trainer_and_back_bit_for_bit(optimizer: str, tmp_path: Path) -> None:
    first = engine("torch", tmp_path / "torch", optimizer)
    fill(first)
    save(first, 9)
    states = [shard_files.read_state(tmp_path / "torch" / "9", WIDE)]
    for turn, name in enumerate(("jax", "torch", "jax")):
        folder = tmp_path / f"{turn}"
        shutil.copytree(tmp_path / ("torch" if not turn else f"{turn - 1}"), folder)
        take_over(name, folder, optimizer).close()
        states.append(FILES[name].read_state(folder / "9", WIDE))
    # optax does not count updates that do not depend on their number, as those of SGD.
    moments = [array for path, array in orbax.open_(tmp_path / "0" / "9" / "state").arrays.items() if path[0] == "moments"]
    updates = 7 if any(array.dtype.kind == "i" for array in moments) else 9
    assert [(state.step, state.updates, state.sound) for state in states[1:]] == [(9, updates, True)] * 3
    for one, other in (states[::2], states[1::2]):
        found, expected = arrays_in(other), arrays_in(one)
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], array) for name, array in expected.items())
    kinds = {name.partition(".")[0] for name, (_, entries) in first._tensors().items() if entries.ndim}
    assert kinds == {part for part, arrays in states[0].parts.items() if arrays} == states[1].parts.keys()


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_a_run_that_changes_its_trainer_has_the_losses_of_one_that_does_not(optimizer: str, tmp_path: Path) -> None:
    """To rounding, with dropout, from either trainer to the other and back."""
    losses: dict[str, list[float]] = {}
    for name in ENGINES:
        made = engine(name, tmp_path / name, optimizer)
        losses[name] = [float(made.step(make_batch(n))["loss"]) for n in range(2)]
        save(made, 2)
        losses[f"{name}, all"] = losses[name] + [float(made.step(make_batch(n))["loss"]) for n in range(2, 6)]
    for name, folder in ((name, tmp_path / name) for name in ENGINES):
        for other, steps in ((OTHER[name], range(2, 4)), (name, range(4, 6))):
            made = take_over(other, folder, optimizer)
            losses[name] += [float(made.step(make_batch(n))["loss"]) for n in steps]
            save(made, steps.stop)
        # Adafactor's updates are like signs, which amplify rounding.
        assert losses[name] == pytest.approx(losses[f"{name}, all"], rel=1e-10 if optimizer == "adamw" else 1e-9)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ENGINES)
def test_the_best_and_the_newest_checkpoint_are_converted(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    made = engine(name, folder, "sgd")
    made._recipe = replace(made._recipe, keep=3)
    for step, accuracy in ((2, 0.7), (4, 0.9), (6, 0.8)):
        made.state = made.state._replace(step=step if name == "torch" else jax.numpy.full_like(made.state.step, step))
        made._checkpoints = None
        save(made, step, accuracy)
    assert {path.name for path in folder.iterdir()} == {"2", "4", "6"}
    (folder.with_name(f"checkpoints-of-train.{OTHER[name]}") / "1").mkdir(parents=True)  # of an earlier change
    other = take_over(OTHER[name], folder, "sgd")
    assert {path.name for path in folder.iterdir()} == {"4", "6"}
    assert {path.name for path in folder.with_name(f"checkpoints-of-train.{name}").iterdir()} == {"2", "4", "6"}
    assert not folder.with_name(f"checkpoints-of-train.{OTHER[name]}").exists()
    assert other.restore_checkpoint(4).loop_state.scores.last["accuracy"] == 0.9
    other.close()


def checkpoint_of(name: str, folder: Path) -> Path:
    """Write a checkpoint of a trainer, and return its folder."""
    made = engine(name, folder, "sgd")
    save(made, 0)
    return folder / "0"


def damage_array(path: Path) -> None:
    """Change a byte in the middle of the largest file of a checkpoint."""
    file = max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def set_version(path: Path, version: int) -> None:
    """Change the version in a checkpoint of `train.jax`."""
    file = path / "_CHECKPOINT_METADATA"
    content = json.loads(file.read_text())
    content["custom_metadata"]["version"] = version
    file.write_text(json.dumps(content))


FAULTS: dict[str, tuple[str, Any, str]] = {
    "an array of JAX": ("jax", damage_array, "is damaged .*, and there is no other: --init .* starts a new run"),
    "an array of PyTorch": ("torch", damage_array, "is damaged .*, and there is no other: --init .* starts a new run"),
    "no metadata of JAX": ("jax", lambda path: (path / "_CHECKPOINT_METADATA").write_text("{"), "is damaged"),
    "no metadata of PyTorch": ("torch", lambda path: (path / "checkpoint.json").write_text("{}"), "is damaged"),
    "an old version": ("jax", lambda path: set_version(path, 3), "those before 4 are not converted: resume once with"),
    "a new version": ("jax", lambda path: set_version(path, 99), "has version 99, and this package reads versions up to"),
    "another step": ("torch", lambda path: path.rename(path.with_name("5")), r"damaged \(its content is that of step 0\)"),
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_checkpoint_that_cannot_be_converted_is_named_and_stays(fault: str, tmp_path: Path) -> None:
    name, change, message = FAULTS[fault]
    change(checkpoint_of(name, tmp_path / "checkpoints"))
    before = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*"))
    with pytest.raises(InputError, match=message):
        take_over(OTHER[name], tmp_path / "checkpoints", "sgd")
    assert sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*")) == before


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ENGINES)
def test_a_mean_that_a_trained_parameter_lacks_is_no_mean_of_zeros(name: str, tmp_path: Path) -> None:
    path = checkpoint_of(OTHER[name], tmp_path / "checkpoints")
    state = FILES[OTHER[name]].read_state(path, WIDE)
    key = {"jax": "head.weight", "torch": "head/kernel"}[name]  # of the other trainer
    means = {each: array for each, array in state.parts["mean"].items() if each != key}
    changed = replace(state, parts={**state.parts, "mean": means})
    with pytest.raises(ValueError, match=f"it lacks the moments of {key}"):
        engine(name, tmp_path / "own", "sgd").adopt(changed, LoopState(), tmp_path / "converted")
    assert not (tmp_path / "converted").exists()


MISSHAPEN = {  # the parameter by the trainer of the state, and its shape; or that of Adafactor's moments of it
    "params": ({"jax": "head/kernel", "torch": "head.weight"}, {"jax": [48, 5], "torch": [5, 48]}),
    "ema": ({"jax": "head/bias", "torch": "head.bias"}, {"jax": [5], "torch": [5]}),
    "mean": ({"jax": "blocks/mlp/fc1/kernel", "torch": "blocks.1.mlp.fc1.weight"}, {"jax": [2, 48, 96], "torch": [96, 48]}),
    "square": ({"jax": "blocks/norm1/bias", "torch": "blocks.1.norm1.bias"}, {"jax": [2, 48], "torch": [48]}),
    "row": ({"jax": "blocks/mlp/fc1/kernel", "torch": "blocks.1.mlp.fc1.weight"}, {"jax": [2, 48], "torch": [48]}),
    "column": ({"jax": "blocks/mlp/fc1/kernel", "torch": "blocks.1.mlp.fc1.weight"}, {"jax": [2, 96], "torch": [96]}),
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ENGINES)
def test_an_array_of_another_shape_is_named_with_both_shapes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine(name, tmp_path / "checkpoints", "adafactor")
    save(made, 0)
    state = FILES[name].read_state(tmp_path / "checkpoints" / "0", WIDE)
    state.check_shapes()
    assert state.parts.keys() == MISSHAPEN.keys()
    for part, (keys, shapes) in MISSHAPEN.items():
        changed = replace(state, parts=state.parts | {part: state.parts[part] | {keys[name]: np.zeros((7, 3))}})
        monkeypatch.setattr(FILES[name], "read_state", lambda path, config, changed=changed: changed)
        message = f"damaged (the {part} of {keys[name]} is [7, 3], expected {shapes[name]}), and there is no other"
        with pytest.raises(InputError, match=re.escape(message)):
            take_over(OTHER[name], tmp_path / "checkpoints", "adafactor")


@pytest.mark.usefixtures("float64")
def test_a_square_of_another_shape_is_no_placeholder(tmp_path: Path) -> None:
    """Placeholders, of moments that a parameter does not have, have one entry, or one for each block."""
    path = checkpoint_of("torch", tmp_path / "checkpoints")
    weights = FILES["torch"].read_state(path, WIDE).parts["params"]
    squares = {key: np.zeros(3 if key == "head.weight" else ()) for key in weights}
    found = without_placeholders({"params": weights, "square": squares}, WIDE, "torch")["square"]
    assert found.keys() == {"head.weight"}


def test_a_state_without_means_is_converted() -> None:
    """As of an optimizer that has only a mean of squares."""
    squares = {key: tensor.numpy() for key, tensor in parity.to_torch(START).items()}
    state = TrainingState(WIDE, "torch", {"params": squares, "square": squares}, 1, 1, True)
    state.check_moments(lr_multipliers(WIDE))
    kernel = state.array("square", "blocks/mlp/fc1/kernel", "jax", "float64")
    assert np.array_equal(kernel, START.arrays["blocks/mlp/fc1/kernel"])
    part = {key: array for key, array in squares.items() if key != "head.weight"}
    with pytest.raises(ValueError, match=r"it lacks the moments of head\.weight"):
        replace(state, parts={"params": squares, "square": part}).check_moments(lr_multipliers(WIDE))


def two_checkpoints(name: str, folder: Path) -> None:
    """Write two checkpoints of a trainer, of which the older one, of step 2, is the best."""
    for step, accuracy in ((2, 0.9), (4, 0.8)):
        made = engine(name, folder, "sgd")
        made.state = made.state._replace(step=step if name == "torch" else jax.numpy.full_like(made.state.step, step))
        save(made, step, accuracy)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ENGINES)
def test_a_best_checkpoint_that_is_damaged_is_left_out(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    two_checkpoints(name, folder)
    damage_array(folder / "2")
    made = engine(OTHER[name], folder, "sgd")
    done = hand_over.hand_over(made, folder, "classes", lambda step, state: None)
    assert done is not None
    assert re.fullmatch(r"the best checkpoint, of step 2, is damaged \(.*\), and is not converted", done.note)
    assert done.describe(made.trainer)[1] == done.note and [path.name for path in folder.iterdir()] == ["4"]


@pytest.mark.usefixtures("float64")
def test_all_processes_convert_the_checkpoints_that_the_main_one_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may show another process an older state of the folder: here with the step 4."""
    folder = tmp_path / "checkpoints"
    two_checkpoints("torch", folder)
    made = engine("jax", folder, "sgd")
    monkeypatch.setattr(made, "from_main", lambda value: [2] if isinstance(value, list) else value)
    assert hand_over.hand_over(made, folder, "classes", lambda step, state: None) is not None
    assert [path.name for path in folder.iterdir()] == ["2"]


@pytest.mark.usefixtures("float64")
def test_an_older_checkpoint_of_another_run_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    two_checkpoints("torch", folder)

    def check(step: int, state: LoopState | None) -> None:
        if step == 2:
            raise InputError("another run's")

    made = engine("jax", folder, "sgd")
    assert hand_over.hand_over(made, folder, "classes", check) is not None
    assert [path.name for path in folder.iterdir()] == ["4"]


@pytest.mark.usefixtures("float64")
def test_a_damaged_newest_checkpoint_is_named_with_the_command_that_goes_back(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    two_checkpoints("torch", folder)
    damage_array(folder / "4")
    command = f"resume once with python -m train.torch --run {tmp_path / 'run'}, which resumes from that of step 2"
    with pytest.raises(InputError, match=re.escape(command)):
        take_over("jax", folder, "sgd")


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ENGINES)
def test_a_new_run_is_the_remedy_where_all_checkpoints_are_damaged(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    two_checkpoints(name, folder)
    for step in (2, 4):
        damage_array(folder / str(step))
    remedy = f"and no other can be read: --init {tmp_path / 'run'} starts a new run from its weights"
    with pytest.raises(InputError, match=rf"the checkpoint of step 4 in .* is damaged \(.*\), {re.escape(remedy)}"):
        take_over(OTHER[name], folder, "sgd")


@pytest.mark.usefixtures("float64")
def test_a_link_in_the_place_of_kept_checkpoints_is_replaced_and_a_file_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    checkpoint_of("jax", folder)
    (tmp_path / "disk" / "1").mkdir(parents=True)
    folder.with_name("checkpoints-of-train.torch").symlink_to(tmp_path / "disk")
    file = folder.with_name("checkpoints-of-train.jax")
    file.write_text("")
    with pytest.raises(InputError, match=f"cannot replace {file} .*: correct that, then give the same command again"):
        take_over("torch", folder, "sgd")
    file.unlink()
    settle_converted(folder)  # as a run does at its start
    take_over("torch", folder, "sgd").close()
    assert (tmp_path / "disk" / "1").is_dir() and not folder.with_name("checkpoints-of-train.torch").is_symlink()


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("name", "unfinished"), [("jax", "2.partial"), ("torch", "2.orbax-checkpoint-tmp")])
def test_an_unfinished_first_checkpoint_is_none(name: str, unfinished: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    checkpoint_of(OTHER[name], tmp_path / "other").rename(folder / unfinished)
    made = engine(name, folder, "sgd")
    assert hand_over.hand_over(made, folder, "classes", lambda step, state: None) is None
    assert made.restore_checkpoint() is None
    save(made, 0)
    assert engine(name, folder, "sgd").restore_checkpoint().step == 0


@pytest.mark.usefixtures("float64")
def test_tensorstore_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint_of("jax", tmp_path / "checkpoints")
    monkeypatch.setattr(orbax_files.orbax, "find_spec", lambda name: None)
    with pytest.raises(InputError, match="is an Orbax checkpoint: to read it, pip install tensorstore"):
        take_over("torch", tmp_path / "checkpoints", "sgd")


@pytest.mark.usefixtures("float64")
def test_a_checkpoint_that_was_being_replaced_is_converted(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    path = checkpoint_of("jax", folder)
    replaced_folder(folder).mkdir()
    path.rename(replaced_folder(folder) / path.name)
    take_over("torch", folder, "sgd").close()
    assert not replaced_folder(folder).exists()


def test_an_interrupted_hand_over_is_finished_or_undone(tmp_path: Path) -> None:
    folder = checkpoints_folder(tmp_path)
    (converted_folder(folder) / "3").mkdir(parents=True)
    assert has_checkpoints(tmp_path)  # interrupted between its two renames
    settle_converted(folder)
    assert [path.name for path in folder.iterdir()] == ["3"]
    (converted_folder(folder) / "4.partial").mkdir(parents=True)
    settle_converted(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_a_run_changes_its_trainer_by_resume_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ("patch_size=4", "width=32", "depth=1", "num_heads=2", "mlp_dim=64")
    run = tmp_path / "run"
    recipe = Recipe(
        model=Model(name="vit_ti16", changes=small), batch_size=64, eval_every="2steps", run=str(run), tensorboard=False
    )

    def resume(name: str, epochs: str, *, may_change: bool = True) -> str:
        source = open_dataset("digits")
        request = Request("test", replace(recipe, epochs=epochs), source, f"python -m train.{name}", may_change=may_change)
        assert train(request, ENGINES[name]) == 0
        return " ".join(capsys.readouterr().out.split())

    resume("jax", "2steps", may_change=False)
    message = f"are those of train.jax: resume with python -m train.jax, or continue the run here with --resume {run}"
    with pytest.raises(InputError, match=re.escape(message)):
        resume("torch", "2steps", may_change=False)
    dry = replace(recipe, epochs="2steps")
    with pytest.raises(InputError, match=re.escape(message)):
        train(Request("test", dry, open_dataset("digits"), "python -m train.torch", dry_run=True), TorchEngine)
    printed = resume("torch", "4steps")
    assert "epochs from 2steps to 4steps at step 2; trainer from train.jax to train.torch at step 2" in printed
    kept = run / "checkpoints-of-train.jax"
    assert f"the run continues in PyTorch: the checkpoints of JAX are converted, and stay as they were in {kept}" in printed
    assert "resuming from step 4 of 4" in resume("torch", "4steps", may_change=False)
    assert "the run continues in JAX" in resume("jax", "6steps")
    config = json.loads((run / "config.json").read_text())
    assert config["trainer"] == "train.jax"
    changes = [each["changes"]["trainer"] for each in config["lineage"]]
    assert changes == [["train.jax", "train.torch"], ["train.torch", "train.jax"]]
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines() if "held_out" in line]
    assert steps == [2, 4, 6]
    assert not kept.exists() and (run / "checkpoints-of-train.torch" / "4").is_dir()
