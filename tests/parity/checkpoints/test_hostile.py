"""Hostile files are refused with an error of one line, in bounded memory and time; see `tests/hostile_files.py`."""

import json
import re
import subprocess
import sys

import pytest

from tests import ROOT
from tests.hostile_files import FILES

pytest.importorskip("tensorstore")
if sys.platform != "linux":
    pytest.skip("only Linux limits the memory of a process", allow_module_level=True)

MAX_SECONDS = 8  # of processor time; the slowest file takes three
MAX_MEBIBYTES = 512  # the largest file takes 300
MAX_ARRAY_BYTES = 2**30  # of arrays that are accepted

# Groups of files that take about the same time, so that the tests can run in parallel: name of a group -> regular
# expression for the names of its files.  A file belongs to the first group that matches.
GROUPS = {
    "pth, nested tuples": r"pth: .*nested tuple",
    "pth, nested objects, lists and dictionaries": r"pth: (nested objects|lists of lists|dictionaries of dictionaries)",
    "pth, many instructions": r"pth: .*(per instruction|in three instructions|without an effect)",
    "pth, repetition through the memo": r"pth: .*(itself|one part|many parts|repeated|again|long key|one storage for all)",
    "pth, other": r"pth: ",
    "legacy pth": r"legacy pth: ",
    "dcp, overlapping chunks": r"dcp: many overlapping chunks",
    "dcp, other": r"dcp: ",
    "npz": r"npz: ",
    "msgpack": r"msgpack: ",
    "orbax": r"orbax: ",
    "safetensors": r"safetensors( header)?: ",
    "JSON files beside a checkpoint": r"(config\.json|parity\.json|index): ",
    "special files and unknown formats": r"[^:]*$",
}


def group_of(name):
    """Return the group of a hostile file."""
    return next(group for group, pattern in GROUPS.items() if re.match(pattern, name))


def what_is_wrong(result):
    """Return what is wrong with the result of `hostile_runner`, or an empty string."""
    if "error" in result:
        return f"ended with {result['error']}"
    if not result["refused"]:
        return "was accepted"
    for message in result["refused"]:
        if not message.isprintable() or "damaged (MemoryError" in message or len(message) >= 10_000:
            return f"has the message {message[:200]!r}"
    if result["seconds"] >= MAX_SECONDS or result["mebibytes"] >= MAX_MEBIBYTES or result["bytes"] >= MAX_ARRAY_BYTES:
        return "took {seconds:.1f} s, {mebibytes} MiB and {bytes} bytes of arrays".format(**result)
    return ""


def test_every_hostile_file_is_in_a_group_and_no_group_is_empty():
    assert {group_of(name) for name in FILES} == GROUPS.keys()


@pytest.mark.parametrize("group", GROUPS)
def test_every_hostile_file_is_refused_with_one_line_in_bounded_memory_and_time(tmp_path, group):
    names = [name for name in FILES if group_of(name) == group]
    command = [sys.executable, "-W", "ignore", "-m", "tests.hostile_runner", tmp_path, *names]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert process.returncode == 0, process.stderr
    results = {result["name"]: result for result in map(json.loads, process.stdout.splitlines())}
    assert results.keys() == set(names)
    failures = [f"{name} {wrong}" for name, result in results.items() if (wrong := what_is_wrong(result))]
    assert not failures, "\n".join(failures)
