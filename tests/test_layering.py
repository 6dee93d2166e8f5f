"""Modules import only lower layers: between packages and within them, at the top of a module and inside functions."""

import ast
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import parity
from tests import ROOT

PACKAGES = ("vit_spec", "vit_jax", "vit_torch", "parity", "train")
# From the lowest layer to the highest.  A module belongs to the longest prefix of its name in this table.  It may import
# modules of its own group and of lower layers; groups of one layer do not import each other.
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
    ("train.optimizer_state",),
    ("train.checkpoints",),
    ("train.step_cost",),
    ("train.loop",),
    ("train.jax", "train.torch"),
    ("train.inference",),
    ("train.plan", "train.data_check"),
    ("train.cli",),
    ("train.predict", "train.evaluate", "train.jax.__main__", "train.torch.__main__"),
    ("train",),
)
LEVELS = {prefix: level for level, prefixes in enumerate(LAYERS) for prefix in prefixes}
# The exception: `load` of a twin imports parity, which reads checkpoints.
UPWARD = {("vit_jax.api", "parity"), ("vit_jax.api", "parity.checkpoints.loading")} | {
    ("vit_torch.api", "parity"),
    ("vit_torch.api", "parity.checkpoints.loading"),
}
FRAMEWORKS = {"jax", "jaxlib", "flax", "optax", "chex", "orbax", "torch", "grain"}
OF_JAX, OF_TORCH = {"jax", "flax", "optax", "chex", "orbax"}, {"torch"}
STATEMENTS = (ast.stmt, ast.excepthandler, ast.match_case)  # nodes that can contain imports; expressions cannot
ALLOWED = {"vit_jax": OF_JAX, "vit_torch": OF_TORCH, "train.jax": OF_JAX, "train.torch": OF_TORCH}  # at the top of a module


def modules() -> dict[str, Path]:
    """Return the files of all modules of the packages, by module name."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


MODULES = modules()


@cache
def imports_of(module: str, *, at_top: bool = False) -> tuple[str, ...]:
    """Return the modules that a module imports; with `at_top`, without imports inside functions and under TYPE_CHECKING."""
    found: list[str] = []
    pending: list[ast.AST] = [ast.parse(MODULES[module].read_text())]
    while pending:
        node = pending.pop()
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if at_top and (is_function or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")):
            continue
        if isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            within = [f"{node.module}.{alias.name}" for alias in node.names]
            found.extend(name if name in MODULES else node.module for name in within)
        pending.extend(child for child in ast.iter_child_nodes(node) if isinstance(child, STATEMENTS))
    return tuple(found)


def group(module: str) -> str:
    """Return the group of a module: the longest prefix of its name in `LAYERS`."""
    while module not in LEVELS:
        module = module.rpartition(".")[0]
    return module


def is_upward(module: str, other: str) -> bool:
    """Return whether an import of `other` by `module` goes to the same layer or a higher one, outside its own group."""
    importer, target = group(module), group(other)
    return importer != target and LEVELS[target] >= LEVELS[importer]


def test_modules_import_only_lower_layers() -> None:
    found = {(module, other) for module in MODULES for other in imports_of(module) if other.split(".")[0] in PACKAGES}
    upward = {(module, other) for module, other in found if is_upward(module, other)}
    assert upward <= UPWARD, "\n".join(f"{module} imports {other}" for module, other in sorted(upward - UPWARD))


def test_there_are_no_circular_imports() -> None:
    unresolved = {name: {other for other in imports_of(name) if other in MODULES and other != name} for name in MODULES}
    unresolved = {name: {other for other in others if (name, other) not in UPWARD} for name, others in unresolved.items()}
    while resolved := {name for name, others in unresolved.items() if not others & unresolved.keys()}:
        unresolved = {name: others for name, others in unresolved.items() if name not in resolved}
    assert not unresolved, f"a circular import among {', '.join(sorted(unresolved))}"


def test_only_the_packages_of_a_framework_import_it() -> None:
    found = {(module, other.split(".")[0]) for module in MODULES for other in imports_of(module, at_top=True)}
    wrong = sorted(each for each in found if each[1] in FRAMEWORKS - ALLOWED.get(group(each[0]), set()))
    assert not wrong, "\n".join(f"{module} imports {framework}" for module, framework in wrong)


def run(code: str) -> str:
    """Run Python code in a new process, assert that it succeeds, and return its output."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "WARNING:absl" not in done.stderr  # grain misses jax, where it is not installed
    return done.stdout


WITHOUT = """
import importlib, sys
tried = set()
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            tried.add(name)
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Blocked())
for module in {modules}:
    importlib.import_module(module)
print(*({frameworks} & set(sys.modules)))
"""


@pytest.mark.parametrize("blocked", [OF_JAX | {"jaxlib", "vit_jax"}, OF_TORCH | {"vit_torch"}], ids=["jax", "torch"])
def test_modules_outside_the_packages_of_a_framework_import_without_it(blocked: set[str]) -> None:
    pytest.importorskip("PIL")
    commands = ["train.jax.__main__", "train.torch.__main__"]
    independent = [name for name in MODULES if group(name) not in ALLOWED and name not in commands]
    independent += [
        "train.jax.memory_estimate",
        "train.torch.memory_estimate",
        "train.torch.tensor_groups",
        "train.torch.tensor_support",
        "train.jax.optimizer_state",
        *commands,
    ]
    assert run(WITHOUT.format(blocked=blocked, modules=independent, frameworks=FRAMEWORKS)).split() == []


RUN_WITHOUT = """
import sys
from train.cli import main
from train.{name}.__main__ import fit
small = ["--model.image-size", "None", "--model.changes", "patch_size=4", "width=16", "depth=1", "num_heads=2", "mlp_dim=8"]
print(main("train.{name}", fit, ["--config", "tiny", *small, "--dry-run", "--no-tensorboard"]))
print(*tried)
"""


@pytest.mark.parametrize(("name", "blocked"), [("jax", OF_TORCH), ("torch", OF_JAX | {"jaxlib"})], ids=["jax", "torch"])
def test_a_trainer_runs_without_the_other_framework(name: str, blocked: set[str]) -> None:
    for package in (name, "grain", "sklearn", "PIL"):
        pytest.importorskip(package)
    printed = run(WITHOUT.format(blocked=blocked, modules=[], frameworks=FRAMEWORKS) + RUN_WITHOUT.format(name=name))
    # Where jax is installed, grain would import it in a process that trains with PyTorch, which takes seconds.
    *lines, status, tried = printed.split("\n")[:-1]
    assert any("one step and an evaluation of" in line for line in lines) and (status, tried) == ("0", "")


@pytest.mark.parametrize(
    ("package", "without"),
    [
        ("vit_spec", ["jax", "torch", "vit_jax", "vit_torch", "parity"]),
        ("parity", ["jax", "torch", "vit_jax", "vit_torch", "numpy", "parity.checkpoints", "parity.comparison"]),
        ("vit_jax", ["torch", "vit_torch", "parity"]),
        ("vit_torch", ["jax", "flax", "vit_jax", "parity", "torch._dynamo"]),  # the last is the compiler
    ],
)
def test_a_package_does_not_import_packages_that_it_does_not_need(package: str, without: list[str]) -> None:
    for framework in {"vit_jax": ["jax"], "vit_torch": ["torch"]}.get(package, []):
        pytest.importorskip(framework)
    assert run(f"import {package}, sys; print(*(set({without}) & set(sys.modules)))").split() == []


def test_reading_a_checkpoint_does_not_import_the_comparison_of_models() -> None:
    assert run("import parity, sys; parity.load, parity.surgery; print('parity.comparison' in sys.modules)") == "False\n"


def test_dir_of_parity_lists_its_public_names() -> None:
    assert "compare" in dir(parity) and all(getattr(parity, name) is not None for name in parity.__all__)
    assert set(parity._MODULES) == set(parity.__all__)
    with pytest.raises(AttributeError, match="module 'parity' has no attribute 'laod'"):
        parity.__getattr__("laod")


def test_a_forbidden_import_is_detected() -> None:
    assert is_upward("vit_spec.params", "parity.checkpoints.layout") and is_upward(
        "train.jax.engine", "train.torch.inference"
    )
    assert is_upward("parity.checkpoints.weights", "parity.comparison.twins")
    assert not is_upward("train.loop.session", "train.data.batches")
