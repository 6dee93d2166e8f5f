"""The checkpoints of the PyTorch trainer: exact, complete or absent, and no damaged one is restored."""

import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors import safe_open
from safetensors.torch import save_file

from train.checkpoints import shard_files
from train.loop.checkpoint_folder import CheckpointFolder
from train.torch import checkpoints
from train.torch.checkpoints import CheckpointStore, Snapshot
from vit_spec import InputError

LOOP: dict[str, Any] = {"last": {}, "window": [0.1, float("nan")], "name": "ä"}


def snapshot(seed: int = 0) -> Snapshot:
    """Return a training state with tensors of several dtypes and shapes."""
    torch.manual_seed(seed)
    tensors = {"params.a": torch.randn(3, 4), "mean.a": torch.randn(3, 4, dtype=torch.float64), "params.t": torch.randn(())}
    return Snapshot({**tensors, "params.e": torch.zeros(0, 2)}, {"updates": seed, "sound": 1})


def saved(folder: Path, *steps: int) -> CheckpointStore:
    """Return a store with checkpoints of these steps, in which the step is the seed."""
    store = CheckpointStore(folder, keep=9)
    for step in steps:
        store.save(step, partial(snapshot, step), LOOP, rank=None)
    store._wait()
    return store


def restored_step(store: CheckpointStore) -> int:
    """Return the step of the newest checkpoint that can be read, whose content is that of its step, bit for bit."""
    restored = store.restore_newest(snapshot(99))
    assert restored is not None
    step, found, loop = restored
    expected = snapshot(step)
    assert found.numbers == expected.numbers and repr(loop) == repr(LOOP)
    for name, tensor in expected.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype and torch.equal(found.tensors[name], tensor)
    return step


def test_a_checkpoint_is_restored_bit_for_bit_and_has_no_pickle(tmp_path: Path) -> None:
    assert restored_step(saved(tmp_path / "c", 3, 12)) == 12
    assert {path.suffix for path in (tmp_path / "c").rglob("*") if path.is_file()} == {".safetensors", ".json"}
    assert CheckpointStore(tmp_path / "none", keep=9).restore_newest(snapshot()) is None
    assert saved(tmp_path / "c", 12).restore(5, snapshot()) is None


def test_all_processes_restore_a_checkpoint_that_the_main_one_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may show another process an older state of the folder: here with the step 12."""
    store = saved(tmp_path / "c", 3, 12)
    monkeypatch.setattr(store, "_gather", lambda value: [[3], value] if isinstance(value, list) else [value, value])
    assert restored_step(store) == 3
    assert store.restore(12, snapshot()) is None


def test_a_snapshot_is_taken_when_the_previous_checkpoint_is_complete(tmp_path: Path) -> None:
    """So the host has one copy of the training state at a time."""
    store, found = saved(tmp_path / "c"), []

    def take() -> Snapshot:
        found.append(store._folder.steps())
        return snapshot(12)

    for step in (3, 12):
        store.save(step, take, LOOP, rank=None)
    store.close()
    assert found == [[], [3]]


@pytest.mark.parametrize(
    ("ranks", "best"), [([1.0, 3.0, 3.0, 2.0], 2), ([None] * 4, 4), ([float("-inf"), None, -2.0, -3.0], 3)]
)
def test_the_newest_checkpoints_and_the_earliest_best_stay(ranks: Any, best: int, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "c", keep=1)
    for step, rank in enumerate(ranks, 1):
        store.save(step, partial(snapshot, step), LOOP, rank=rank)
    store.close()
    assert {path.name for path in (tmp_path / "c").iterdir()} == {str(best), "4"}


def test_checkpoints_that_are_links_are_removed_as_links(tmp_path: Path) -> None:
    """Old ones, a replaced one, and one whose removal a kill has cut short."""
    saved(tmp_path / "c", 1, 2, 3)
    (tmp_path / "disk").mkdir()
    (tmp_path / "c-replaced").mkdir()
    for name, link in {"1": "c/1", "2": "c/2.partial", "3": "c-replaced/3"}.items():
        shutil.copytree(tmp_path / "c" / name, tmp_path / "disk" / name)
        if name != "3":
            shutil.rmtree(tmp_path / "c" / name)
        (tmp_path / link).symlink_to(tmp_path / "disk" / name)
    store = CheckpointStore(tmp_path / "c", keep=1)
    store.save(4, partial(snapshot, 4), LOOP, rank=None)
    store.close()
    assert {path.name for path in tmp_path.iterdir()} == {"c", "disk"}
    assert {path.name for path in (tmp_path / "c").iterdir()} == {"4"}
    assert all((tmp_path / "disk" / name / "checkpoint.json").exists() for name in "123")


# Damage ---------------------------------------------------------------------------------------------------------------


def shard(path: Path) -> Path:
    return next(path.glob("*.safetensors"))


def rewrite(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the tensors of a shard, as somebody does who also corrects the checksums."""
    with safe_open(shard(path), "pt") as file:
        metadata, tensors = file.metadata(), {key: file.get_tensor(key) for key in file.keys()}
    change(tensors)
    save_file(tensors, shard(path), metadata)
    content = shard_files.read_json(path)
    sums = {"tensors": {name: checkpoints._checksum(each) for name, each in tensors.items()}}
    content["checksums"] = {shard(path).name: {"header": shard_files.json_checksum(metadata), **sums}}
    content["tensors"] = {name: checkpoints._kind(each) for name, each in tensors.items()}
    write_content(path, content)


def write_content(path: Path, content: dict[str, Any]) -> None:
    (path / "checkpoint.json").unlink()
    checkpoints._write_json(path / "checkpoint.json", content)


def change_text(path: Path, old: str, new: str) -> None:
    text = (path / "checkpoint.json").read_text()
    assert old in text
    (path / "checkpoint.json").write_text(text.replace(old, new, 1))


def flip_bit(path: Path) -> None:
    bits = bytearray(shard(path).read_bytes())
    bits[-3] ^= 16
    shard(path).write_bytes(bits)


def move_part(path: Path) -> None:
    """Say in the header that a part of a tensor belongs elsewhere."""
    content = shard(path).read_bytes()
    assert content.count(rb'"saved_offsets\": [0, 0]') == 3
    shard(path).write_bytes(content.replace(rb'"saved_offsets\": [0, 0]', rb'"saved_offsets\": [0, 1]', 1))


def put_pipe(path: Path) -> None:
    name = shard(path)
    name.unlink()
    os.mkfifo(name)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a bit of a tensor": (flip_bit, "the checksum of "),
    "a shard cut short": (lambda path: os.truncate(shard(path), shard(path).stat().st_size - 5), "it has 48 bytes, not"),
    "an empty shard": (lambda path: shard(path).write_bytes(b""), "is not a safetensors file"),
    "a header of 2**60 bytes": (lambda path: shard(path).write_bytes(b"\xff" * 64), "its header would have"),
    "the place of a part": (move_part, "the checksum of the header of "),
    "a shard that is missing": (lambda path: shard(path).unlink(), "files are missing, or there are others"),
    "a shard more": (lambda path: save_file({"x": torch.ones(1)}, path / "x.safetensors"), "or there are others"),
    "a pipe": (put_pipe, "neither a file nor a folder"),
    "a hole": (lambda path: os.truncate(shard(path), 2**36), "bytes, of which only"),
    "metadata that are empty": (lambda path: (path / "checkpoint.json").write_text(""), "its metadata cannot be read"),
    "no metadata": (lambda path: (path / "checkpoint.json").unlink(), "No such file"),
    "a digit of the loop's state": (lambda path: change_text(path, "0.1", "0.2"), "its metadata cannot be read"),
    "deep metadata": (lambda path: (path / "checkpoint.json").write_text("[" * 10**6), "its metadata cannot be read"),
    "a moment of another shape": (
        lambda path: rewrite(path, lambda each: each.update({"mean.a": torch.ones(4, 4, dtype=torch.float64)})),
        "mean.a is float64 [4, 4], expected float64 [3, 4]",
    ),
    "a moment of another dtype": (
        lambda path: rewrite(path, lambda each: each.update({"mean.a": torch.ones(3, 4)})),
        "mean.a is float32 [3, 4], expected float64 [3, 4]",
    ),
    "a tensor less": (lambda path: rewrite(path, lambda each: each.pop("mean.a")), "it lacks mean.a"),
    "a tensor more": (
        lambda path: rewrite(path, lambda each: each.update({"x": torch.ones(1)})),
        "it has another tensor, x",
    ),
    "a number that is a list": (
        lambda path: write_content(path, {**shard_files.read_json(path), "numbers": {"updates": [], "sound": 1}}),
        "its metadata is not that of a run",
    ),
    "the content of another step": (
        lambda path: write_content(path, {**shard_files.read_json(path), "step": 3}),
        "its content is that of step 3",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_moved_aside_and_the_one_before_is_restored(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, message = DAMAGES[name]
    saved(tmp_path / "c", 3, 12)
    damage(tmp_path / "c" / "12")
    assert restored_step(CheckpointStore(tmp_path / "c", keep=9)) == 3
    printed = capsys.readouterr().err
    assert "the checkpoint of step 12 is damaged (" in printed and message in printed and printed.count("\n") == 1, printed
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["3"]
    assert (tmp_path / "c-damaged" / "12").is_dir()


def test_checkpoints_that_are_all_damaged_are_refused_and_stay(tmp_path: Path) -> None:
    saved(tmp_path / "c", 3, 12)
    for step in ("3", "12"):
        flip_bit(tmp_path / "c" / step)
    with pytest.raises(InputError, match=r"no checkpoint in .* can be read \(step 12: .*; step 3: .*\): give --run a new"):
        CheckpointStore(tmp_path / "c", keep=9).restore_newest(snapshot())
    assert {path.name for path in (tmp_path / "c").iterdir()} == {"3", "12"}


def test_a_newer_version_is_refused_and_not_moved(tmp_path: Path) -> None:
    saved(tmp_path / "c", 3, 12)
    path = tmp_path / "c" / "12"
    write_content(path, {**shard_files.read_json(path), "version": 7})
    with pytest.raises(InputError, match=r"of step 12 .* has version 7, and this package reads versions up to 1: update"):
        CheckpointStore(tmp_path / "c", keep=9).restore_newest(snapshot())
    assert path.is_dir()


def test_a_checkpoint_without_permission_is_refused_and_not_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "c", 3, 12)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(checkpoints, "load", refuse)
    with pytest.raises(InputError, match=r"of step 12 .* may be intact \(.*Permission denied\): remove the cause"):
        CheckpointStore(tmp_path / "c", keep=9).restore_newest(snapshot())
    assert (tmp_path / "c" / "12").is_dir()


@pytest.mark.parametrize("place", ["checkpoints", "checkpoints-replaced"])
@pytest.mark.parametrize(("trainer", "other"), [("train.jax", "train.torch"), ("train.torch", "train.jax")])
def test_checkpoints_of_the_other_trainer_are_refused(trainer: str, other: str, place: str, tmp_path: Path) -> None:
    folder, checkpoint = tmp_path / "run" / "checkpoints", tmp_path / "run" / place / "12"
    checkpoint.mkdir(parents=True)
    marker = {"train.jax": "_CHECKPOINT_METADATA", "train.torch": "checkpoint.json"}[other]
    (checkpoint / marker).write_text("{}")
    with pytest.raises(
        InputError, match=rf"are those of {other}: resume with python -m {other}, or continue the run here with --resume"
    ):
        CheckpointFolder(folder, trainer)
    assert checkpoint.is_dir()


def test_a_reason_is_one_line_and_a_long_one_is_cut_between_words(tmp_path: Path) -> None:
    folder, own = CheckpointFolder(tmp_path, "train.torch"), f"{'shard ' * 30}is damaged ('mean': it has 16384 bytes)"
    assert folder.damage_of(1, ValueError(own)) == own
    assert folder.damage_of(1, ValueError("word\n" * 100)) == f"{'word ' * 60}…"
    assert folder.damage_of(1, ValueError("x" * 1000)) == f"{'x' * 300} …"


# Kills and full disks -------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Ends a write without any cleanup."""


@pytest.mark.parametrize("moment", ["save", "_write_json", "set_aside_for_replacement", "rename", "settle_replaced"])
def test_a_checkpoint_is_replaced_without_a_moment_at_which_there_is_none(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write ends before one of its steps; seed 12 is of the old checkpoint of step 12, and seed 13 of the new one."""
    store = saved(tmp_path / "c", 12)

    def kill(*arguments: Any, **options: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        if moment == "rename":
            rename, left = Path.rename, iter([True, False])
            patch.setattr(Path, "rename", lambda path, target: rename(path, target) if next(left) else kill())
        else:
            patch.setattr(checkpoints if hasattr(checkpoints, moment) else CheckpointFolder, moment, kill)
        store.save(12, partial(snapshot, 13), LOOP, rank=None)
        with pytest.raises(Killed):
            store._wait()
    restored = CheckpointStore(tmp_path / "c", keep=9).restore_newest(snapshot())
    assert restored is not None and restored[0] == 12
    expected = snapshot(13 if moment == "settle_replaced" else 12)
    assert torch.equal(restored[1].tensors["params.a"], expected.tensors["params.a"])
    assert {path.name for path in tmp_path.iterdir()} == {"c"} and [path.name for path in (tmp_path / "c").iterdir()] == [
        "12"
    ]


def test_a_failed_write_is_reported_by_the_next_call_and_keeps_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").touch()
    store = saved(tmp_path / "c", 3)

    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.os, "fsync", fail)
        store.save(12, partial(snapshot, 12), LOOP, rank=None)
        with pytest.raises(
            InputError, match=r"cannot write a checkpoint to .* \(No space left on device\): make room there"
        ):
            store.close()
    assert restored_step(CheckpointStore(tmp_path / "c", keep=9)) == 3
    assert json.loads((tmp_path / "c" / "3" / "checkpoint.json").read_text())["content"]["step"] == 3
