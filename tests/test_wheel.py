"""The wheel contains its data files, and works beside files of the user; the sdist contains the whole checkout."""

import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

import vit_spec
from parity.checkpoints.writing import write
from parity.comparison.reproducible_init import weights
from tests import ROOT

pytest.importorskip("setuptools", "77", reason="builds the wheel")


PACKAGES = ("vit_spec", "vit_jax", "vit_torch", "parity", "train")
FILES = ("MANIFEST.in", "pyproject.toml", "README.md", "LICENSE", "twin_vision_transformers_pytest.py")


def copy_sources(target: Path, folders: Iterable[str], files: Iterable[str]) -> None:
    target.mkdir(exist_ok=True)
    for name in files:
        shutil.copy(ROOT / name, target)
    for name in folders:
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder in which the wheel is installed."""
    folder = tmp_path_factory.mktemp("wheel")
    copy_sources(folder, PACKAGES, FILES)
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-build-isolation", "--no-compile", "--no-index"]
    subprocess.run([*pip, "--target", folder / "site", "."], cwd=folder, check=True, capture_output=True)
    return folder / "site"


def run_command(site: Path, cwd: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"PYTHONPATH": str(site)}
    program, *rest = arguments
    script = [sys.executable, site / "bin" / program, *rest]
    return subprocess.run(script, cwd=cwd, env=environment, capture_output=True, text=True)


def test_commands_do_not_import_from_the_working_directory(site: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('the train.py of the user')")
    (tmp_path / "parity").mkdir()
    (tmp_path / "parity" / "__init__.py").write_text("raise SystemExit('the parity of the user')")
    checkpoint = weights(vit_spec.get("vit_ti16", image_size=32, depth=1), 0)
    write(checkpoint, tmp_path / "a.safetensors", "jax")
    done = run_command(site, tmp_path, "vit-parity", "convert", "a.safetensors", "b.npz", "--to", "google")
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "b.npz") as written:
        assert np.array_equal(written["cls"], checkpoint.arrays["cls_token"])
    for program in ("vit-predict", "vit-evaluate"):
        assert run_command(site, tmp_path, program, "--help").stdout.startswith("usage: ")
    assert "vit_s16" in run_command(site, tmp_path, "vit-train-jax", "--list").stdout


def test_the_wheel_contains_the_data_files_of_its_packages(site: Path) -> None:
    for name in ("parity/checkpoints/formats/timm_architectures.json", "parity/py.typed", "vit_spec/py.typed"):
        assert (site / name).is_file()
    suffixes = {path.suffix for path in (site / "parity" / "comparison" / "html_report").iterdir()}
    assert {".jinja", ".css", ".js"} <= suffixes
    assert not (site / "tests").exists() and not (site / "benchmarks").exists()


def test_the_sdist_contains_the_tests_the_documentation_and_what_make_needs(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy_sources(copy, (*PACKAGES, "benchmarks", "docs", "tests"), (*FILES, "CHANGELOG.md", "Makefile", "constraints.txt"))
    expected = {path.relative_to(copy) for path in copy.rglob("*") if path.is_file()}
    build = "import setuptools.build_meta as backend, sys; backend.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, tmp_path], cwd=copy, check=True, capture_output=True)
    [archive] = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        packed = {Path(*Path(name).parts[1:]) for name in tar.getnames()}
    assert not expected - packed
