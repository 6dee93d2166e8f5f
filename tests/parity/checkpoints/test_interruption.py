"""An interrupted conversion leaves the old file or the new file, never an incomplete one."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import parity
from parity.checkpoints import containers
from tests.container_cases import save_random_weights
from vit_spec import ViTConfig

CONFIG = ViTConfig(image_size=(32, 48), patch_size=8, width=64, depth=3, num_heads=4, mlp_dim=96, num_classes=7)
SUFFIXES = ["safetensors", "npz", "msgpack", "pth"]

# A script that converts a checkpoint, counts the calls that change a file, and kills its own process at the call of a given
# number.  If the number is 0, the process is not killed, and prints how many calls there are.
CHILD = """
import builtins, os, signal, sys
import parity.checkpoints.writing
source, target, moment = sys.argv[1], sys.argv[2], int(sys.argv[3])
calls = 0

def count_calls(function):
    def call(*arguments, **named):
        global calls
        calls += 1
        if calls == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **named)
    return call

for name in ("pwrite", "replace", "fsync", "unlink", "rmdir", "posix_fallocate"):
    setattr(os, name, count_calls(getattr(os, name)))
checksum = parity.checkpoints.writing._checksum
parity.checkpoints.writing._checksum = count_calls(checksum)
parity.checkpoints.writing.convert(source, target, sys.argv[4], force=True)
print(calls)
"""


@pytest.fixture
def saved(tmp_path):
    """Write a file in the torch format, and return its path."""
    save_random_weights(tmp_path / "source.safetensors", CONFIG)
    return tmp_path / "source.safetensors"


def run_conversion(source, target, moment, to="jax"):
    """Run `CHILD`, which kills itself at the call number `moment`."""
    command = [sys.executable, "-c", textwrap.dedent(CHILD), source, target, str(moment), to]
    return subprocess.run(command, capture_output=True, text=True)


def values(path):
    """Return the bytes of all weights of a file, in the torch format."""
    return {
        name: np.asarray(leaf).tobytes()
        for name, leaf in parity.checkpoints.weights.converted_arrays(parity.load(path), "torch")
    }


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_process_killed_at_any_moment_leaves_the_old_file_or_the_new(saved, tmp_path, suffix):
    if suffix == "pth":
        pytest.importorskip("torch")
    target = tmp_path / f"target.{suffix}"
    parity.convert(saved, target, "torch")
    old, new = target.read_bytes(), values(saved)
    uninterrupted = run_conversion(saved, target, 0)
    assert uninterrupted.returncode == 0, uninterrupted.stderr
    calls = int(uninterrupted.stdout)
    finished = target.read_bytes()
    assert calls > 50 and values(target) == new
    for moment in sorted({1, 2, calls // 3, calls // 2, calls - 2, calls - 1, calls}):
        target.write_bytes(old)
        assert run_conversion(saved, target, moment).returncode == -signal.SIGKILL
        assert target.read_bytes() in (old, finished)
        assert values(target) == new


def test_a_process_killed_at_any_moment_leaves_the_old_folder_or_the_new(saved, tmp_path):
    target, old = f"{tmp_path / 'target'}/", tmp_path / "old"
    parity.convert(saved, target, "timm")
    os.rename(target, old)  # the old folder has another format, so that a mixture of old and new files is detected
    shutil.copytree(old, target)
    uninterrupted = run_conversion(saved, target, 0, "hf-vit")
    assert uninterrupted.returncode == 0, uninterrupted.stderr
    calls, new, finished = int(uninterrupted.stdout), values(saved), files(target)
    for moment in sorted({1, calls // 2, *range(calls - 6, calls + 1)}):
        shutil.rmtree(target)
        shutil.copytree(old, target)
        assert run_conversion(saved, target, moment, "hf-vit").returncode == -signal.SIGKILL
        assert files(target) in (files(old), finished)
        assert values(target) == new


def files(folder):
    """Return the content of each file in a folder."""
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_a_terminated_process_removes_its_unfinished_file(saved, tmp_path):
    script = (
        "import signal, sys, time, parity.checkpoints.writing as w, parity.__main__ as m\n"
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
