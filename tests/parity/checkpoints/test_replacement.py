"""What a conversion replaces: nothing without --force, and with it nothing but weights, whatever happens meanwhile."""

import ctypes
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import parity
from parity.__main__ import main
from parity.checkpoints import atomic_write, containers, sidecar, write_target, writing
from parity.checkpoints.atomic_write import atomic_replace
from tests import ROOT
from tests.container_cases import save_random_weights
from vit_spec import InputError, ViTConfig

CONFIG = ViTConfig(image_size=16, patch_size=8, width=32, depth=1, num_heads=2, mlp_dim=64, num_classes=3)
# Name of a case -> name of the file or folder to write, its format, and its container if the name does not select it.
TARGETS = {
    "file": ("a.safetensors", "torch", None),
    "msgpack": ("a.msgpack", "jax", None),
    "folder": ("a/", "hf-vit", None),
    "dcp": ("a", "torch", "dcp"),
    "orbax": ("a", "jax", "orbax"),
}
FOLDERS = [name for name, (target, _, _) in TARGETS.items() if "." not in target]
LIBRARIES = {"dcp": "torch", "orbax": "orbax.checkpoint"}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Write a file in the torch format, and return its path."""
    path = tmp_path_factory.mktemp("source") / "source.safetensors"
    save_random_weights(path, CONFIG)
    return path


@pytest.fixture(params=["renameat2", "without renameat2", "without renameat2 and hard links"])
def system(request, monkeypatch):
    """Run the test on systems that lack some calls."""
    if request.param != "renameat2":
        monkeypatch.setattr(atomic_write, "_renameat2", lambda *_: False)
    if "hard links" in request.param:

        def link(*_, **__):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(os, "link", link)


def convert(source, folder, case, force=False):
    """Convert the source to the target of a case in a folder; return the target."""
    if case in LIBRARIES:
        pytest.importorskip(LIBRARIES[case])
    name, to, container = TARGETS[case]
    parity.convert(source, f"{folder}/{name}", to, force=force, container=container)
    return Path(folder) / name


def run_before_the_end(monkeypatch, action):
    """Call a function when a conversion has written and verified everything, before the result gets its name."""
    verify = writing.verify

    def verify_and_act(*arguments):
        verify(*arguments)
        action()

    monkeypatch.setattr(writing, "verify", verify_and_act)


# Without --force ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["a file", "a folder with a file", "an empty folder", "a dangling link"])
@pytest.mark.parametrize("case", TARGETS)
def test_what_appears_during_a_conversion_stays(source, tmp_path, monkeypatch, system, case, kind):
    path = tmp_path / TARGETS[case][0]

    def appear():
        if kind == "a file":
            path.write_text("years of work")
        elif kind == "a dangling link":
            path.symlink_to("nowhere")
        else:
            path.mkdir()
        if kind == "a folder with a file":
            (path / "thesis.txt").write_text("years of work")

    run_before_the_end(monkeypatch, appear)
    with pytest.raises(
        InputError, match=r" exists: give another name, or --force \(force=True\)|msgpack is a folder: give"
    ):
        convert(source, tmp_path, case)
    assert os.listdir(tmp_path) == [path.name]
    assert path.is_symlink() or path.is_dir() or path.read_text() == "years of work"
    if kind == "a folder with a file":
        assert (path / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("case", TARGETS)
def test_of_two_conversions_at_once_the_second_is_refused(source, tmp_path, monkeypatch, system, case):
    verify, results = writing.verify, []

    def verify_and_convert(*arguments):
        verify(*arguments)
        if not results:
            results.append("begun")
            convert(source, tmp_path, case)
            results.append({path: path.stat().st_ino for path in tmp_path.rglob("*") if ".partial" not in str(path)})

    monkeypatch.setattr(writing, "verify", verify_and_convert)
    with pytest.raises(InputError, match="exists: give another name, or --force"):
        convert(source, tmp_path, case)
    assert {path: path.stat().st_ino for path in tmp_path.rglob("*")} == results[1]
    assert parity.load(tmp_path / TARGETS[case][0]).config == CONFIG


@pytest.mark.parametrize("is_folder", [False, True])
def test_the_last_step_does_not_replace(tmp_path, system, is_folder):
    path = tmp_path / "a"
    with (
        pytest.raises(InputError, match="a exists: give another name, or --force"),
        atomic_replace(path, replace=False) as new,
    ):
        new.mkdir() if is_folder else new.write_text("new")
        path.mkdir() if is_folder else path.write_text("old")
    assert os.listdir(tmp_path) == ["a"] and (list(path.iterdir()) == [] if is_folder else path.read_text() == "old")


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_new_name_is_given_on_every_system(tmp_path, system, is_folder):
    path = tmp_path / "a"
    with atomic_replace(path, replace=False) as new:
        if is_folder:
            new.mkdir()
            (new / "b").write_text("new")
        else:
            new.write_text("new")
    assert ((path / "b") if is_folder else path).read_text() == "new" and os.listdir(tmp_path) == ["a"]


# Sidecar files --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_with_the_name_of_a_sidecar_file_stays(source, tmp_path, capsys, force):
    folder = tmp_path / "a.msgpack.parity.json"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    options = ["--force"] if force else []
    assert main(["convert", str(source), str(tmp_path / "a.msgpack"), "--to", "jax", *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "a.msgpack.parity.json is not a file, but the metadata are written there" in error
    assert (folder / "thesis.txt").read_text() == "years of work" and os.listdir(tmp_path) == [folder.name]


@pytest.mark.parametrize(
    "content", ["mine", "{}", '{"mine": 1}', '{"12-01234567": {"mine": 1}}', '{"mine": {"config": "{}"}}', "[]", "\0\xff"]
)
def test_another_file_with_the_name_of_a_sidecar_file_is_replaced_only_with_force(source, tmp_path, content):
    path = tmp_path / "a.msgpack.parity.json"
    path.write_text(content)
    with pytest.raises(InputError, match=r"a\.msgpack\.parity\.json exists, but the metadata are written there"):
        convert(source, tmp_path, "msgpack")
    assert path.read_text() == content and os.listdir(tmp_path) == [path.name]
    target = convert(source, tmp_path, "msgpack", force=True)
    path.write_text(content)
    convert(source, tmp_path, "msgpack", force=True)
    assert parity.load(target).config == CONFIG and len(json.loads(path.read_text())) == 1


def test_a_link_with_the_name_of_a_sidecar_file_is_not_replaced(source, tmp_path):
    (tmp_path / "mine").write_text("years of work")
    path = tmp_path / "a.msgpack.parity.json"
    path.symlink_to("mine")
    with pytest.raises(InputError, match="exists, but the metadata are written there"):
        convert(source, tmp_path, "msgpack")
    assert path.is_symlink() and (tmp_path / "mine").read_text() == "years of work"


def test_the_sidecar_file_of_a_file_that_was_removed_is_replaced(source, tmp_path):
    target = convert(source, tmp_path, "msgpack")
    target.unlink()
    convert(source, tmp_path, "msgpack")
    assert parity.load(target).config == CONFIG


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_what_appears_with_the_name_of_a_sidecar_file_during_a_conversion_stays(source, tmp_path, monkeypatch, kind):
    path = tmp_path / "a.msgpack.parity.json"

    def appear():
        file = path
        if kind == "folder":
            path.mkdir()
            file = path / "thesis.txt"
        file.write_text("years of work")

    run_before_the_end(monkeypatch, appear)
    with pytest.raises(InputError, match="but the metadata are written there"):
        convert(source, tmp_path, "msgpack")
    assert (path / "thesis.txt" if kind == "folder" else path).read_text() == "years of work"
    assert os.listdir(tmp_path) == [path.name]


def test_what_appears_with_the_name_of_a_sidecar_file_after_the_last_check_stays(source, tmp_path):
    target = convert(source, tmp_path, "msgpack")
    (tmp_path / "a.msgpack.parity.json").write_text("years of work")
    with pytest.raises(InputError, match="exists, but the metadata are written there"):
        sidecar.write_sidecar(target, target, {"config": "{}"}, "msgpack", force=False)
    assert (tmp_path / "a.msgpack.parity.json").read_text() == "years of work"


def test_a_file_and_its_sidecar_file_are_written_under_one_lock(source, tmp_path, monkeypatch):
    """Otherwise, of two conversions at once, one could replace the sidecar file and the other the file."""
    move, locked = atomic_write._move_to_target, {}

    def is_locked():
        descriptor = os.open(tmp_path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def move_and_record(new, path, *arguments):
        move(new, path, *arguments)
        locked[path.name] = is_locked()

    monkeypatch.setattr(atomic_write, "_move_to_target", move_and_record)
    convert(source, tmp_path, "msgpack")
    assert locked == {"a.msgpack.parity.json": True, "a.msgpack": True} and not is_locked()


# Folders that are replaced --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("orbax", ["state/thesis.txt"]),
        ("orbax", ["state/chapters/one.txt"]),
        ("orbax", ["state/chapters/c/0/one.txt"]),
        ("orbax", ["state"]),
        ("orbax", ["orbax.checkpoint/thesis.txt"]),
        ("orbax", ["state/d/thesis.txt"]),
        ("folder", ["model.safetensors/thesis.txt"]),
        ("folder", ["config.json", "preprocessor_config.json/thesis.txt"]),
        ("dcp", [".metadata/thesis.txt"]),
        ("dcp", ["__0_0.distcp", "parity.json/thesis.txt"]),
    ],
)
def test_a_folder_with_other_files_under_the_names_of_entries_stays(source, tmp_path, case, names):
    for name in names:
        path = tmp_path / "a" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("years of work")
    with pytest.raises(InputError, match="a has other files than weights, and is not replaced"):
        convert(source, tmp_path, case, force=True)
    assert all((tmp_path / "a" / name).read_text() == "years of work" for name in names)
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("kind", ["a pipe", "a link to a folder"])
def test_a_folder_with_an_entry_that_is_not_a_file_stays(source, tmp_path, kind):
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / "model.safetensors"
    os.mkfifo(path) if kind == "a pipe" else path.symlink_to(tmp_path)
    with pytest.raises(InputError, match="has other files than weights, and is not replaced"):
        convert(source, tmp_path, "folder", force=True)
    assert os.path.lexists(path)


@pytest.mark.parametrize(("use_ocdbt", "use_zarr3"), [(False, False), (True, False), (True, True)])
def test_a_folder_that_orbax_wrote_is_replaced(source, tmp_path, use_ocdbt, use_zarr3):
    ocp = pytest.importorskip("orbax.checkpoint").v1
    context = ocp.Context()
    context.array.saving.use_ocdbt, context.array.saving.use_zarr3 = use_ocdbt, use_zarr3
    with context:
        ocp.save(tmp_path / "a", {"a": {"w": np.ones((2, 3))}, "s": np.array(1.5), "t": "text", "n": 3})
    assert write_target._has_only_weights(tmp_path / "a", containers.get("orbax"))
    convert(source, tmp_path, "orbax", force=True)
    assert parity.load(tmp_path / "a").config == CONFIG


@pytest.mark.parametrize("moment", ["before the last check", "after the last check"])
@pytest.mark.parametrize("case", FOLDERS)
def test_a_file_that_is_added_to_a_folder_during_its_replacement_stays(source, tmp_path, monkeypatch, system, case, moment):
    target = convert(source, tmp_path, case)
    before = {path: path.stat().st_ino for path in tmp_path.rglob("*")}

    def add():
        (target / "thesis.txt").write_text("years of work")

    if moment == "before the last check":
        run_before_the_end(monkeypatch, add)
    else:
        exchange = atomic_write._exchange
        monkeypatch.setattr(atomic_write, "_exchange", lambda *arguments: (add(), exchange(*arguments)))
    with pytest.raises(InputError) as caught:
        convert(source, tmp_path, case, force=True)
    assert str(caught.value).startswith(f"{target} has other files than weights, and is not replaced")
    assert (target / "thesis.txt").read_text() == "years of work"
    assert {path: path.stat().st_ino for path in tmp_path.rglob("*") if path.name != "thesis.txt"} == before


@pytest.mark.parametrize("case", ["file", "folder"])
def test_a_folder_that_appears_during_a_conversion_with_force_stays(source, tmp_path, monkeypatch, system, case):
    path = tmp_path / TARGETS[case][0]

    def appear():
        path.mkdir()
        (path / "thesis.txt").write_text("years of work")

    run_before_the_end(monkeypatch, appear)
    with pytest.raises(InputError, match=r"is a folder|has other files than weights"):
        convert(source, tmp_path, case, force=True)
    assert (path / "thesis.txt").read_text() == "years of work" and os.listdir(tmp_path) == [path.name]


def test_a_pipe_that_appears_during_a_conversion_with_force_stays(source, tmp_path, monkeypatch):
    run_before_the_end(monkeypatch, lambda: os.mkfifo(tmp_path / "a.safetensors"))
    # The permissions are copied and the file is flushed before the last check; neither waits for the pipe.
    with pytest.raises(InputError, match="is a device, a pipe or a socket, and is not replaced"):
        convert(source, tmp_path, "file", force=True)
    assert (tmp_path / "a.safetensors").is_fifo() and os.listdir(tmp_path) == ["a.safetensors"]


def test_a_folder_is_never_replaced_by_a_file(tmp_path):
    path = tmp_path / "a"
    with pytest.raises(InputError, match="a is a folder, and is not replaced by a file"), atomic_replace(path) as new:
        new.write_text("new")
        path.mkdir()
    assert os.listdir(tmp_path) == ["a"] and path.is_dir()


@pytest.mark.parametrize("case", TARGETS)
def test_force_replaces_weights_on_every_system(source, tmp_path, system, case):
    target = convert(source, tmp_path, case)
    before, inode = sorted(path.name for path in tmp_path.rglob("*")), target.stat().st_ino
    convert(source, tmp_path, case, force=True)
    assert parity.load(target).config == CONFIG and target.stat().st_ino != inode
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


# A script that replaces a folder on a system without renameat2, and kills its process before the rename of a given number.
CHILD = """
import os, signal, sys
from pathlib import Path
from parity.checkpoints import atomic_write
moment, rename = int(sys.argv[2]), os.rename

def rename_or_die(*arguments):
    global moment
    moment -= 1
    if moment == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    rename(*arguments)

atomic_write._renameat2, os.rename = lambda *_: False, rename_or_die
with atomic_write.atomic_replace(Path(sys.argv[1])) as new:
    new.mkdir()
    (new / "weights").write_text("new")
"""


@pytest.mark.parametrize("moment", [1, 2, 3])
def test_a_folder_is_not_lost_if_the_process_is_killed_between_two_renames(tmp_path, moment):
    path = tmp_path / "a"
    path.mkdir()
    (path / "weights").write_text("old")
    command = [sys.executable, "-c", textwrap.dedent(CHILD), path, str(moment)]
    assert subprocess.run(command, cwd=ROOT).returncode == -signal.SIGKILL
    assert path.exists() == (moment != 2)
    with atomic_replace(tmp_path / "b") as new:
        new.write_text("next")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    assert (path / "weights").read_text() == ("new" if moment == 3 else "old")


def test_an_old_folder_whose_name_is_taken_is_kept(tmp_path):
    path = tmp_path / "a"
    path.mkdir()
    (path / "weights").write_text("old")
    subprocess.run([sys.executable, "-c", textwrap.dedent(CHILD), path, "2"], cwd=ROOT)
    path.write_text("of another program")
    with atomic_replace(tmp_path / "b") as new:
        new.write_text("next")
    [kept] = tmp_path.glob(".parity-*.old/a/weights")
    assert kept.read_text() == "old" and path.read_text() == "of another program"


def test_the_system_of_this_test_has_renameat2():
    """Otherwise, the tests above run the fallback only."""
    if sys.platform == "linux":
        assert hasattr(ctypes.CDLL(None), "renameat2")
