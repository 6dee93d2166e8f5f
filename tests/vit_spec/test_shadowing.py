"""A user package that hides a package of this project is named in an error."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from vit_spec.shadowing import check_not_shadowed


@pytest.mark.parametrize("name", ["parity.py", "parity/__init__.py"])
def test_a_user_package_of_the_same_name_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    code = (
        "import sys; from vit_spec.shadowing import check_not_shadowed as check; "
        "sys.path.insert(0, sys.argv[1]); check('parity')"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, capture_output=True, text=True)
    message = f"{tmp_path / name} is imported as 'parity' instead of the package of twin-vision-transformers: rename it, or"
    assert message in done.stderr.splitlines()[-1]


def test_packages_of_this_project_pass() -> None:
    for package in ("vit_spec", "parity", "train"):
        check_not_shadowed(package)
