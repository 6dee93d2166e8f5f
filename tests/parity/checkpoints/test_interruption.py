"""An interrupted conversion leaves the old file or the new file, never an incomplete one."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import parity
from parity.checkpoints import containers
from parity.checkpoints.conversion import converted_arrays
from tests.container_cases import save_random_weights
from vit_spec import ViTConfig

CONFIG = ViTConfig(image_size=(32, 48), patch_size=8, width=64, depth=3, num_heads=4, mlp_dim=96, num_classes=7)
SUFFIXES = ["safetensors", "npz", "msgpack", "pth"]

# A script that reads numbers of calls from its input.  For each, it forks a process that converts a checkpoint, counts the
# calls that change a file, and kills itself at the call of this number.  If the number is 0, the process is not killed.
# The script prints the exit status of the process, and the count of the calls if it was not killed.
CHILD = """
import os, signal, sys
import parity.checkpoints.array_transfer
import parity.checkpoints.writing
source, target, to = sys.argv[1:]
if target.endswith(".pth"):
    import torch  # once, not in each forked process

def convert(moment):
    calls = 0
    def count_calls(function):
        def call(*arguments, **named):
            nonlocal calls
            calls += 1
            if calls == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **named)
        return call

    for name in ("pwrite", "replace", "fsync", "unlink", "rmdir", "posix_fallocate"):
        setattr(os, name, count_calls(getattr(os, name)))
    parity.checkpoints.array_transfer._checksum = count_calls(parity.checkpoints.array_transfer._checksum)
    parity.checkpoints.writing.convert(source, target, to, force=True)
    return calls

for line in sys.stdin:
    reader, writer = os.pipe()
    if not (child := os.fork()):
        os.write(writer, b"%d" % convert(int(line)))
        os._exit(0)
    os.close(writer)
    with open(reader) as file:
        calls = file.read()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), calls, flush=True)
"""


@pytest.fixture
def saved(tmp_path):
    """Write a file in the torch format, and return its path."""
    save_random_weights(tmp_path / "source.safetensors", CONFIG)
    return tmp_path / "source.safetensors"


@contextmanager
def conversions(source, target, to="jax"):
    """Start `CHILD`, and return a function of a moment that returns the exit status and the count of calls, as text."""
    command = [sys.executable, "-c", textwrap.dedent(CHILD), source, target, to]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def run_conversion(moment):
            process.stdin.write(f"{moment}\n")
            process.stdin.flush()
            status, _, calls = process.stdout.readline().rstrip("\n").partition(" ")
            return int(status), calls

        yield run_conversion


def values(path):
    """Return the bytes of all weights of a file, in the torch format."""
    return {name: np.asarray(leaf).tobytes() for name, leaf in converted_arrays(parity.load(path), "torch")}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_process_killed_at_any_moment_leaves_the_old_file_or_the_new(saved, tmp_path, suffix):
    if suffix == "pth":
        pytest.importorskip("torch")
    target = tmp_path / f"target.{suffix}"
    parity.convert(saved, target, "torch")
    old, new = target.read_bytes(), values(saved)
    with conversions(saved, target) as run_conversion:
        status, calls = run_conversion(0)
        finished, calls = target.read_bytes(), int(calls)
        assert status == 0 and calls > 50 and values(target) == new
        for moment in sorted({1, 2, calls // 3, calls // 2, calls - 2, calls - 1, calls}):
            target.write_bytes(old)
            assert run_conversion(moment) == (-signal.SIGKILL, "")
            assert target.read_bytes() in (old, finished)
            assert values(target) == new


def test_a_process_killed_at_any_moment_leaves_the_old_folder_or_the_new(saved, tmp_path):
    target, old = f"{tmp_path / 'target'}/", tmp_path / "old"
    parity.convert(saved, target, "timm")
    os.rename(target, old)  # the old folder has another format, so that a mixture of old and new files is detected
    shutil.copytree(old, target)
    with conversions(saved, target, "hf-vit") as run_conversion:
        status, calls = run_conversion(0)
        assert status == 0
        calls, new, finished = int(calls), values(saved), files(target)
        for moment in sorted({1, calls // 2, *range(calls - 6, calls + 1)}):
            shutil.rmtree(target)
            shutil.copytree(old, target)
            assert run_conversion(moment) == (-signal.SIGKILL, "")
            assert files(target) in (files(old), finished)
            assert values(target) == new


def files(folder):
    """Return the content of each file in a folder."""
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_a_terminated_process_removes_its_unfinished_file(saved, tmp_path):
    script = (
        "import signal, sys, time, parity.checkpoints.array_transfer as w, parity.__main__ as m\n"
        "checksum = w._checksum\n"
        "w._checksum = lambda entries: (print('writing', flush=True), time.sleep(60)) and checksum(entries)\n"
        "signal.signal(signal.SIGTERM, m._exit_on_signal)\n"
        "sys.exit(m.main(['convert', sys.argv[1], sys.argv[2], '--to', 'jax']))\n"
    )
    command = [sys.executable, "-c", script, saved, tmp_path / "target.npz"]  # npz is written by one thread
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
    assert os.listdir(tmp_path) == [saved.name]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_full_disk_leaves_the_old_file(saved, tmp_path, suffix):
    """A limit on the size of files stands for a full disk: the same calls fail."""
    if suffix == "pth":
        pytest.importorskip("torch")
    target = tmp_path / f"target.{suffix}"
    parity.convert(saved, target, "torch")
    before = target.read_bytes()
    script = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "from parity.__main__ import main\n"
        "sys.exit(main(['convert', sys.argv[1], sys.argv[2], '--to', 'jax', '--force']))\n"
    )
    done = subprocess.run([sys.executable, "-c", script, saved, target], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "room" in done.stderr, done.stderr
    assert str(target) in done.stderr and "partial" not in done.stderr
    assert target.read_bytes() == before
    assert sorted(entry for entry in os.listdir(tmp_path) if "parity.json" not in entry) == sorted(
        [saved.name, target.name]
    )


def test_every_container_of_one_file_is_tested_here():
    suffixes = {name: containers.get(name).suffixes for name in containers.names()}
    tested = {f".{suffix}" for suffix in SUFFIXES}
    assert not [name for name, its_own in suffixes.items() if its_own and tested.isdisjoint(its_own)]
