"""Packages of the user's own in place of this project's are named."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from vit_spec.shadowing import require_own


@pytest.mark.parametrize("name", ["parity.py", "parity/__init__.py"])
def test_another_package_of_the_same_name_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    code = "import sys; from vit_spec.shadowing import require_own; sys.path.insert(0, sys.argv[1]); require_own('parity')"
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, capture_output=True, text=True)
    said = f"{tmp_path / name} is imported as 'parity', in place of the package of twin-vision-transformers: rename it, or"
    assert said in done.stderr.splitlines()[-1]


def test_our_own_packages_pass() -> None:
    for package in ("vit_spec", "parity", "train"):
        require_own(package)
