"""An import only ever points down: train -> parity, twins -> vit_spec -> numpy; and the twins never meet."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = {  # what a package may import of ours, and of the frameworks
    "vit_spec": set(),
    "vit_jax": {"vit_spec", "jax", "flax", "optax"},
    "vit_torch": {"vit_spec", "torch"},
    "parity": {"vit_spec"},
    "train": {"parity", "vit_jax", "vit_torch", "vit_spec", "jax", "flax", "optax", "torch", "grain", "orbax"},
}
GUARDED = set(FLOORS) | {"jax", "flax", "optax", "chex", "torch", "grain", "orbax"}


def imported(path: Path, late: bool) -> set[str]:
    """Top-level names that a file imports, with or without those that wait for a call or a type checker."""
    tree = ast.parse(path.read_text())
    later = [
        part
        for part in ast.walk(tree)
        if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef))
        or (isinstance(part, ast.If) and ast.unparse(part.test) == "TYPE_CHECKING")
    ]
    inside = {id(node) for part in later for node in ast.walk(part)}
    names: set[str] = set()
    for node in ast.walk(tree):
        if late or id(node) not in inside:
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            if isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.split(".")[0])
    return names & GUARDED


FILES = {str(path.relative_to(ROOT)): name for name in FLOORS for path in sorted((ROOT / name).rglob("*.py"))}


@pytest.mark.parametrize("path", FILES)
def test_a_file_imports_only_what_is_below(path: str) -> None:
    package = FILES[path]
    assert imported(ROOT / path, late=False) <= FLOORS[package] | {package}


def test_a_twin_points_up_only_when_it_is_asked_to_load_a_file() -> None:
    twins = {path: name for path, name in FILES.items() if name in ("vit_spec", "vit_jax", "vit_torch")}
    upward = {path for path, name in twins.items() if imported(ROOT / path, late=True) - FLOORS[name] - {name}}
    assert upward == {"vit_jax/use.py", "vit_torch/use.py"}


def loaded_by(statement: str) -> set[str]:
    """Which guarded modules a fresh interpreter holds after a statement."""
    code = f"{statement}\nimport sys\nprint(*(m for m in {sorted(GUARDED)} if m in sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(run.stdout.split())


@pytest.mark.parametrize("package", ["vit_spec", "parity"])
def test_a_floor_without_a_framework_loads_neither(package: str) -> None:
    assert loaded_by(f"import {package}") <= {"vit_spec", package}


def test_the_functional_twin_does_not_load_torch() -> None:
    pytest.importorskip("jax")
    assert not loaded_by("import vit_jax") & {"torch", "vit_torch", "parity"}


def test_the_object_twin_does_not_load_jax() -> None:
    pytest.importorskip("torch")
    assert not loaded_by("import vit_torch") & {"jax", "flax", "vit_jax", "parity"}


def test_a_forbidden_import_would_be_seen() -> None:
    pytest.importorskip("torch")
    assert "torch" in loaded_by("import vit_spec, torch")
