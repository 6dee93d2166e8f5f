"""Writing to a path: full disks, links, permissions, devices, and staging folders of processes that were killed."""

import errno
import logging
import os
import re
import shutil
import stat
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest

import parity
from parity.__main__ import main
from parity.checkpoints.atomic_write import atomic_replace, remove_abandoned
from tests import ROOT
from tests.container_cases import save_random_weights
from vit_spec import ViTConfig

CONFIG = ViTConfig(image_size=16, patch_size=8, width=64, depth=3, num_heads=2, mlp_dim=256, num_classes=7)
# Name of a case -> name of the file or folder to write, its format, and further options of the command `convert`.
TARGETS = {
    "safetensors": ("a.safetensors", "torch", ()),
    "npz": ("a.npz", "torch", ()),
    "msgpack": ("a.msgpack", "jax", ()),
    "pth": ("a.pth", "torch", ()),
    "dcp": ("a", "torch", ("--container", "dcp")),
    "orbax": ("a", "jax", ("--container", "orbax")),
    "folder": ("a/", "hf-vit", ()),
}
STAGING = f".parity-{'0' * 32}.partial"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Write a file in the torch format, and return its path."""
    path = tmp_path_factory.mktemp("source") / "source.safetensors"
    save_random_weights(path, CONFIG)
    return path


def test_standard_output_is_no_destination(source, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["convert", str(source), "-", "--to", "hf-vit"]) == 2
    assert "- would be standard output, to which no weights are written: give a file" in capsys.readouterr().err
    assert os.listdir() == []


@pytest.mark.parametrize("name", [".", "./", "..", "../work"])
def test_the_working_folder_is_not_replaced(name, source, tmp_path, monkeypatch, capsys):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert main(["convert", str(source), name, "--to", "hf-vit", "--force"]) == 2
    assert "is the working folder or a folder above it, and is not replaced: give another name" in capsys.readouterr().err
    assert [each.name for each in tmp_path.rglob("*")] == ["work"]


@pytest.mark.parametrize("name", TARGETS)
def test_an_entry_beyond_the_range_of_the_dtype_is_refused_and_nothing_is_written(name, source, tmp_path, capsys):
    target, to, options = TARGETS[name]
    arrays = {key: np.array(array) for key, array in parity.load(source).arrays.items()}
    arrays["blocks.1.mlp.fc1.weight"][2, 3] = -70_000
    parity.save(tmp_path / "large.safetensors", arrays, CONFIG, "torch")
    (tmp_path / "out").mkdir()
    line = ["convert", str(tmp_path / "large.safetensors"), f"{tmp_path}/out/{target}", "--to", to, *options]
    assert main([*line, "--dtype", "float16"]) == 2
    words = r"(fc1|intermediate)\S+ has the entry -70000, which is infinite in float16: give bfloat16, or leave --dtype"
    assert re.search(words, capsys.readouterr().err)
    assert not list((tmp_path / "out").iterdir())


@contextmanager
def mount_tmpfs(disk, options):
    """Mount a file system at a new folder for the duration of the `with` block."""
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", disk]
    done = shutil.which("mount") and subprocess.run(command, capture_output=True)
    if not done or done.returncode:
        pytest.skip("this user may not mount a small file system")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.fixture(params=TARGETS)
def target(request):
    """Return a file name, a format and options of `convert`; skip a container whose library is not installed."""
    if needed := {"pth": "torch", "dcp": "torch", "orbax": "orbax.checkpoint"}.get(request.param):
        pytest.importorskip(needed)
    return TARGETS[request.param]


@pytest.fixture
def small_disk(tmp_path, source):
    """Mount a file system that is a little smaller than the source, and return its folder."""
    with mount_tmpfs(tmp_path / "disk", f"size={source.stat().st_size * 9 // 10}") as disk:
        yield disk


def test_a_full_disk_is_reported_in_one_line_and_nothing_is_left(source, small_disk, target, capfd):
    name, to, more = target
    assert main(["convert", str(source), f"{small_disk}/{name}", "--to", to, *more]) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and "make room" in error and ".partial" not in error
    assert os.listdir(small_disk) == []


def test_a_disk_without_free_inodes_is_reported_in_one_line_and_nothing_is_left(source, tmp_path, target, capfd):
    name, to, more = target
    failures = 0
    for inodes in (1, 2, 3, 8, 40):  # the folder itself takes one
        with mount_tmpfs(tmp_path / f"{inodes}", f"size=1g,nr_inodes={inodes}") as disk:
            status = main(["convert", str(source), f"{disk}/{name}", "--to", to, *more])
            error = capfd.readouterr().err
            assert status == 0 or (error.count("\n") == 1 and "files" in error and os.listdir(disk) == []), (inodes, error)
            failures += status == 2
    assert failures


@pytest.mark.parametrize(("container", "package"), [("pth", "torch"), ("dcp", "torch"), ("orbax", "orbax.checkpoint")])
def test_a_library_that_is_not_installed_is_named_in_one_line_and_nothing_is_left(
    source, tmp_path, monkeypatch, capfd, container, package
):
    monkeypatch.setitem(sys.modules, package, None)
    name, to, more = TARGETS[container]
    assert main(["convert", str(source), str(tmp_path / name), "--to", to, *more]) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and package.partition(".")[0] in error and "pip install " in error
    assert os.listdir(tmp_path) == []


def test_log_lines_of_orbax_about_a_failure_are_not_shown(source, tmp_path, monkeypatch, capfd):
    ocp = pytest.importorskip("orbax.checkpoint").v1

    def failing(*_, **__):
        for name in ("absl", "asyncio"):
            logging.getLogger(name).error("hundreds of lines")
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(ocp, "save", failing)
    assert main(["convert", str(source), str(tmp_path / "a"), "--to", "jax", "--container", "orbax"]) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and "Input/output error" in error and os.listdir(tmp_path) == []


def test_permissions_of_a_replaced_file_are_kept(source, tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"old")
    path.chmod(0o600)
    parity.convert(source, path, "jax", force=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_permissions_of_a_replaced_folder_are_kept(source, tmp_path):
    parity.convert(source, f"{tmp_path / 'a'}/", "hf-vit")
    (tmp_path / "a").chmod(0o700)
    for file in (tmp_path / "a").iterdir():
        file.chmod(0o640)
    parity.convert(source, f"{tmp_path / 'a'}/", "timm", force=True)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "a").iterdir()} == {0o640}


def test_a_new_file_has_the_default_permissions(source, tmp_path):
    parity.convert(source, tmp_path / "a.safetensors", "jax")
    (tmp_path / "usual").touch()
    assert (tmp_path / "a.safetensors").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_link_to_a_folder_is_replaced_and_not_its_target(source, tmp_path):
    parity.convert(source, f"{tmp_path / 'there'}/", "timm")
    before = {file.name: file.read_bytes() for file in (tmp_path / "there").iterdir()}
    (tmp_path / "link").symlink_to(tmp_path / "there")
    parity.convert(source, f"{tmp_path / 'link'}/", "hf-vit", force=True)
    assert {file.name: file.read_bytes() for file in (tmp_path / "there").iterdir()} == before
    assert not (tmp_path / "link").is_symlink() and parity.load(tmp_path / "link").config == CONFIG
    assert sorted(os.listdir(tmp_path)) == ["link", "there"]


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_device_is_never_replaced(source, tmp_path, kind, capfd):
    path = tmp_path / "a.safetensors"
    if kind == "pipe":
        os.mkfifo(path)
    elif os.getuid():
        pytest.skip("only root makes a device")
    else:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    before = path.lstat()
    assert main(["convert", str(source), str(path), "--to", "jax", "--force"]) == 2
    assert "a device, a pipe or a socket, and is not replaced" in capfd.readouterr().err
    assert path.lstat() == before and os.listdir(tmp_path) == [path.name]


def test_the_staging_folder_of_a_killed_process_is_removed_by_the_next_write(tmp_path):
    script = (
        "import os, signal, sys; from pathlib import Path; from parity.checkpoints.atomic_write import atomic_replace\n"
        "with atomic_replace(Path(sys.argv[1])) as new:\n"
        "    new.mkdir(); (new / 'half').write_text('written'); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path / "a"], cwd=ROOT)
    [left] = os.listdir(tmp_path)
    assert left.endswith(".partial")
    with atomic_replace(tmp_path / "b") as new:
        new.write_text("whole")
    assert os.listdir(tmp_path) == ["b"]


def test_the_staging_folder_of_a_living_process_is_not_removed(tmp_path):
    with atomic_replace(tmp_path / "a") as first:
        first.write_text("first")
        with atomic_replace(tmp_path / "b") as second:
            second.write_text("second")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "first", "b": "second"}


@pytest.mark.parametrize("kind", ["a folder of the same name with files", "a file", "a link", "a folder of another name"])
def test_files_and_folders_other_than_staging_folders_are_not_removed(tmp_path, kind):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / ".unfinished").touch()
    (elsewhere / "precious").write_text("kept")
    if kind == "a file":
        (tmp_path / STAGING).write_text("kept")
    elif kind == "a link":
        (tmp_path / STAGING).symlink_to(elsewhere)
    elif kind == "a folder of another name":
        shutil.copytree(elsewhere, tmp_path / ".parity-old.partial")
    else:
        (tmp_path / STAGING).mkdir()
        (tmp_path / STAGING / "precious").write_text("kept")
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    remove_abandoned(tmp_path)
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
