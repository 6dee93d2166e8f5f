"""A run folder has one trainer at a time, however the last one ended."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import vit_spec
from tests import ROOT
from train.loop.lock import Lock, create_run_folder
from train.loop.run_folder import RunFolder
from train.recipes import Recipe
from vit_spec import InputError

TAKE_LOCK = "import sys, time; from train.loop.lock import Lock, Path; lock = Lock(Path(sys.argv[1])); print(1, flush=True)"
CONFIG = vit_spec.get("vit_ti16")


@contextmanager
def locked_by_another_process(folder: Path, then: str = "time.sleep(600)") -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that takes the lock of a folder and then runs a statement; kill it at the end."""
    command = [sys.executable, "-c", f"{TAKE_LOCK}; {then}", str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"1\n"
        try:
            yield process
        finally:
            process.kill()


def run_folder(path: Path) -> RunFolder:
    return RunFolder(path, Recipe(), CONFIG, {})


def test_a_second_trainer_is_refused_with_the_process_that_uses_the_folder(tmp_path: Path) -> None:
    with locked_by_another_process(tmp_path) as process:
        start = (
            rf"{tmp_path} is in use by another trainer, process {process.pid} on \S+: wait until that ends, or stop it, "
        )
        with pytest.raises(InputError, match=f"{start}then give the same --run to resume; or give --run another folder$"):
            Lock(tmp_path)
        with pytest.raises(InputError, match="is in use"):
            run_folder(tmp_path)
        assert not (tmp_path / "config.json").exists()


def test_the_lock_of_a_killed_trainer_does_not_block_the_next(tmp_path: Path) -> None:
    with locked_by_another_process(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (tmp_path / ".lock").exists()
        Lock(tmp_path).release()
        assert not (tmp_path / ".lock").exists()


def test_a_child_process_does_not_inherit_the_lock(tmp_path: Path) -> None:
    spawn = "import subprocess; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], stdout=-3)"
    with locked_by_another_process(tmp_path, f"{spawn}.pid; time.sleep(600)") as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        if not children.exists():
            pytest.skip("the system does not list the children of a process")
        while not (child := children.read_text().split()):
            assert process.poll() is None
        command = Path(f"/proc/{child[0]}/cmdline")
        while not command.read_bytes().endswith(b"-c\0import time; time.sleep(600)\0"):  # before exec it has all open files
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        Lock(tmp_path).release()
        os.kill(int(child[0]), signal.SIGKILL)


def test_a_run_releases_the_lock_when_it_ends_and_when_it_is_refused(tmp_path: Path) -> None:
    with run_folder(tmp_path / "run"):
        with pytest.raises(InputError, match=r"is in use by another trainer, process \d+"):
            run_folder(tmp_path / "run")
        assert (tmp_path / "run" / ".lock").exists()
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"config.json"}
    for _ in range(2):  # the first refusal does not lock out the second
        with pytest.raises(InputError, match=r"holds another run: its recipe\.seed is 0"):
            RunFolder(tmp_path / "run", Recipe(seed=1), CONFIG, {})
    with run_folder(tmp_path / "run"):
        pass


def test_a_run_releases_the_lock_when_it_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), run_folder(tmp_path):
        raise RuntimeError
    run_folder(tmp_path).__exit__()


def test_a_folder_that_a_file_replaces_does_not_mask_the_error_of_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(InputError, match="the first error"), run_folder(run):
        run.rename(tmp_path / "moved")
        run.touch()
        raise InputError("the first error")


@pytest.mark.parametrize("name", [".lock", ".config.json.new"])
def test_the_target_of_a_link_in_the_folder_is_not_overwritten(name: str, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to("../precious")
    with suppress(InputError), run_folder(tmp_path / "run"):
        pass
    assert (tmp_path / "precious").read_text() == "kept"


def test_a_folder_without_a_run_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").touch()
    with pytest.raises(InputError, match="holds no run"):
        run_folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["photo.jpg"]


def test_only_the_main_process_takes_the_lock(tmp_path: Path) -> None:
    with RunFolder(tmp_path, Recipe(), CONFIG, {}, is_main=False):
        assert not (tmp_path / ".lock").exists()
        with run_folder(tmp_path), RunFolder(tmp_path, Recipe(), CONFIG, {}, is_main=False):
            assert (tmp_path / ".lock").exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_gives_a_warning(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(file: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with run_folder(tmp_path) as one:
        assert one.warnings == [f"{tmp_path} is on a file system without locks: make sure that no other trainer uses it"]


def test_a_lock_file_that_is_removed_between_opening_and_locking_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, flock = Lock(tmp_path), fcntl.flock

    def release_and_lock(file: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        first.release()  # after the second process has opened the file, before it locks it
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", release_and_lock)
    second = Lock(tmp_path)
    with pytest.raises(InputError, match="is in use"):
        Lock(tmp_path)
    second.release()


def test_runs_of_the_same_second_have_different_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made: list[Any] = []
    with (
        create_run_folder("runs/x-1") as one,
        create_run_folder("runs/x-1") as other,
        create_run_folder("runs/x-1") as third,
    ):
        made += [one, other, third]
        (other / "config.json").touch()
    assert list(map(str, made)) == ["runs/x-1", "runs/x-1-2", "runs/x-1-3"]
    assert [str(path) for path in Path("runs").iterdir()] == ["runs/x-1-2"]  # the others stayed empty
    with pytest.raises(InputError), create_run_folder("more/x-1"):
        raise InputError("bad")
    assert not Path("more").exists()


def test_a_link_to_nothing_above_a_run_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to("gone")
    with pytest.raises(InputError, match="runs is a link to gone, which does not exist: give another with --run"):
        create_run_folder(f"{tmp_path}/runs/x").__enter__()


def test_a_run_folder_that_cannot_be_made_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot make the folder .*x \(Not a directory\): give another"):
        create_run_folder(f"{tmp_path}/file/x").__enter__()
