"""Hostile files are refused in one line, in bounded memory and time: every attack of `hostile_files`."""

import json
import subprocess
import sys

import pytest

from tests import ROOT
from tests.hostile_files import FILES

pytest.importorskip("tensorstore")
if sys.platform != "linux":
    pytest.skip("only Linux limits the memory of a process", allow_module_level=True)

SECONDS = 15  # of processor time; the slowest takes three
MEBIBYTES = 512  # the largest takes 300
ARRAYS = 2**30  # bytes of arrays that are not refused


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """What came of each file, by name."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.hostile_runner", tmp_path_factory.mktemp("hostile")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return {found["name"]: found for found in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("name", FILES)
def test_a_hostile_file_is_refused_in_one_line_in_little_memory_and_time(outcomes, name):
    found = outcomes[name]
    assert "error" not in found, found
    assert found["refused"]
    for message in found["refused"]:
        assert message.isprintable() and "damaged (MemoryError" not in message and len(message) < 10_000
    assert found["seconds"] < SECONDS and found["mebibytes"] < MEBIBYTES and found["bytes"] < ARRAYS, found
