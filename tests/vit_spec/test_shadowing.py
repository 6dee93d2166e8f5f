"""A user package that hides a package of this project is named in an error."""

import os
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
    message = f"{tmp_path / name} is imported as 'parity' instead of the package of twin-vision-transformers: rename it"
    assert message in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("module", ["train.jax", "train.predict", "train.evaluate"])
def test_a_command_reports_it_in_one_line(tmp_path: Path, module: str) -> None:
    (tmp_path / "parity.py").touch()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        f"error: {tmp_path / 'parity.py'} is imported as 'parity' instead of the package of twin-vision-transformers: "
        "rename it, start Python in another folder, or use the commands vit-parity, vit-train-jax, vit-train-torch, "
        "vit-predict and vit-evaluate\n"
    )


def test_packages_of_this_project_pass() -> None:
    for package in ("vit_spec", "parity", "train"):
        check_not_shadowed(package)
