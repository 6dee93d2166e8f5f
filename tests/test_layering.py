"""Imports point down: between packages, inside them, and whether they are at the top of a module or in a function."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import parity
from tests import ROOT

PACKAGES = ("vit_spec", "vit_jax", "vit_torch", "parity", "train")
# From the bottom to the top.  A module belongs to its longest prefix here, and imports its own line and those above it in
# this table; groups of one line do not import each other.
LAYERS = (
    ("vit_spec",),
    ("vit_jax", "vit_torch"),
    ("parity.terminal",),
    ("parity.checkpoints",),
    ("parity.comparison",),
    ("parity",),
    ("parity.commands",),
    ("parity.__main__",),
    ("train.recipes",),
    ("train.mesh", "train.data"),
    ("train.loop",),
    ("train.jax", "train.torch"),
    ("train.inference",),
    ("train.plan",),
    ("train.cli",),
    ("train.predict", "train.evaluate", "train.jax.__main__"),
    ("train",),
)
LEVELS = {prefix: level for level, prefixes in enumerate(LAYERS) for prefix in prefixes}
# Reading checkpoints is the work of parity: a twin asks for it when a file is to be loaded.
UPWARD = {("vit_jax.use", "parity"), ("vit_jax.use", "parity.checkpoints.loading")} | {
    ("vit_torch.use", "parity"),
    ("vit_torch.use", "parity.checkpoints.loading"),
}
FRAMEWORKS = {"jax", "jaxlib", "flax", "optax", "chex", "orbax", "torch", "grain"}
OF_JAX, OF_TORCH = {"jax", "flax", "optax", "chex", "orbax"}, {"torch"}
ALLOWED = {"vit_jax": OF_JAX, "vit_torch": OF_TORCH, "train.jax": OF_JAX, "train.torch": OF_TORCH}  # at the top of a module


def modules() -> dict[str, Path]:
    """Every module of the packages, by name."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


MODULES = modules()


def imported(module: str, *, at_top: bool = False) -> Iterator[str]:
    """Yield the modules that a module imports: anywhere, or only when it is itself imported."""
    tree = ast.parse(MODULES[module].read_text())
    later = [
        part
        for part in ast.walk(tree)
        if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef))
        or (isinstance(part, ast.If) and ast.unparse(part.test) == "TYPE_CHECKING")
    ]
    inside = {id(node) for part in later for node in ast.walk(part)}
    for node in ast.walk(tree):
        if at_top and id(node) in inside:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            within = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ((name if name in MODULES else node.module) for name in within)


def group(module: str) -> str:
    """The longest prefix of a module's name that `LAYERS` has."""
    while module not in LEVELS:
        module = module.rpartition(".")[0]
    return module


def is_upward(module: str, other: str) -> bool:
    here, there = group(module), group(other)
    return here != there and LEVELS[there] >= LEVELS[here]


def test_imports_point_down() -> None:
    found = {(module, other) for module in MODULES for other in imported(module) if other.split(".")[0] in PACKAGES}
    upward = {(module, other) for module, other in found if is_upward(module, other)}
    assert upward <= UPWARD, "\n".join(f"{module} imports {other}" for module, other in sorted(upward - UPWARD))


def test_no_modules_import_each_other_in_a_circle() -> None:
    waiting = {name: {other for other in imported(name) if other in MODULES and other != name} for name in MODULES}
    waiting = {name: {other for other in others if (name, other) not in UPWARD} for name, others in waiting.items()}
    while free := {name for name, others in waiting.items() if not others & waiting.keys()}:
        waiting = {name: others for name, others in waiting.items() if name not in free}
    assert not waiting, f"a circle among {', '.join(sorted(waiting))}"


def test_frameworks_are_imported_by_their_own_packages_alone() -> None:
    found = {(module, other.split(".")[0]) for module in MODULES for other in imported(module, at_top=True)}
    wrong = sorted(each for each in found if each[1] in FRAMEWORKS - ALLOWED.get(group(each[0]), set()))
    assert not wrong, "\n".join(f"{module} imports {framework}" for module, framework in wrong)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


WITHOUT = """
import importlib, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Blocked())
for module in {modules}:
    importlib.import_module(module)
print(*({frameworks} & set(sys.modules)))
"""


@pytest.mark.parametrize("blocked", [OF_JAX | {"jaxlib", "vit_jax"}, OF_TORCH | {"vit_torch"}], ids=["jax", "torch"])
def test_modules_outside_of_a_framework_s_packages_import_without_it(blocked: set[str]) -> None:
    pytest.importorskip("PIL")
    free = [name for name in MODULES if group(name) not in ALLOWED and name != "train.jax.__main__"]
    free += ["train.jax.memory_estimate", "train.jax.optimizer_state", "train.jax.__main__"]
    assert run(WITHOUT.format(blocked=blocked, modules=free, frameworks=FRAMEWORKS)).split() == []


@pytest.mark.parametrize(
    ("package", "without"),
    [
        ("vit_spec", ["jax", "torch", "vit_jax", "vit_torch", "parity"]),
        ("parity", ["jax", "torch", "vit_jax", "vit_torch", "numpy", "parity.checkpoints", "parity.comparison"]),
        ("vit_jax", ["torch", "vit_torch", "parity"]),
        ("vit_torch", ["jax", "flax", "vit_jax", "parity"]),
    ],
)
def test_a_package_does_not_load_what_it_does_without(package: str, without: list[str]) -> None:
    for framework in {"vit_jax": ["jax"], "vit_torch": ["torch"]}.get(package, []):
        pytest.importorskip(framework)
    assert run(f"import {package}, sys; print(*(set({without}) & set(sys.modules)))").split() == []


def test_reading_a_checkpoint_does_not_load_what_compares_models() -> None:
    assert run("import parity, sys; parity.load, parity.surgery; print('parity.comparison' in sys.modules)") == "False\n"


def test_parity_names_what_it_offers() -> None:
    assert "compare" in dir(parity) and all(getattr(parity, name) is not None for name in parity.__all__)
    assert set(parity._MODULES) == set(parity.__all__)
    with pytest.raises(AttributeError, match="module 'parity' has no attribute 'laod'"):
        parity.__getattr__("laod")


def test_a_forbidden_import_is_found() -> None:
    assert is_upward("vit_spec.params", "parity.checkpoints.layout") and is_upward(
        "train.jax.engine", "train.torch.inference"
    )
    assert is_upward("parity.checkpoints.weights", "parity.comparison.twins")
    assert not is_upward("train.loop.session", "train.data.batches")
