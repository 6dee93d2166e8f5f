"""The twins read line for line: the same classes, methods, attributes and statements in the same order."""

import ast
from collections.abc import Iterator

import pytest

from tests import ROOT

FACES = {"setup": "__init__", "__call__": "forward"}  # linen's name: PyTorch's

# Where a framework wants it, and nowhere else.
ONLY_JAX = [
    "config, execution =",  # linen's fields stand for __init__'s arguments
    "x, _ = self.blocks",  # the blocks are one scanned module,
]
ONLY_TORCH = [
    "super",  # modules are initialised by hand
    "execution =",  # linen has the default among its fields
    "initialise",  # linen draws parameters where they are declared
    "for block, rate: self.blocks",  # the blocks are a list,
    "x = run",  # and this applies one of them
]


def skeleton(source: str) -> dict[str, dict[str, list[str]]]:
    """Class -> method -> statements: what is assigned, and which of the module's own attributes are used, in order."""
    return {
        cls.name: {
            FACES.get(method.name, method.name): list(statements(method.body))
            for method in cls.body
            if isinstance(method, ast.FunctionDef)
        }
        for cls in ast.parse(source).body
        if isinstance(cls, ast.ClassDef)
    }


def statements(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        match node:
            case ast.Assign(targets=[target], value=value):
                called = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
                right = own(value) or ("run" if called == "run" else "")
                yield f"{ast.unparse(target).strip('()')} = {right}".strip()
            case ast.If(test=test, body=inner, orelse=other):
                yield f"if {own(test)}"
                yield from statements(inner)
                yield from statements(other)
            case ast.For(target=target, iter=source, body=inner):
                yield f"for {ast.unparse(target).strip('()')}: {own(source)}"
                yield from statements(inner)
            case ast.Return(value=value):
                yield f"return {own(value)}"
            case ast.Expr(value=ast.Call(func=called)):
                yield ast.unparse(called).split("(")[0]


def own(node: ast.AST | None) -> str:
    """The module's own attributes in an expression, and the names it keeps values under, in the order of the text."""
    framework = {"config", "execution", "declare", "training", "constants", "keep"}
    found = [
        (n.lineno, n.col_offset, n.attr)
        for n in ast.walk(node or ast.Constant(None))
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "self"
    ]
    found += [
        (n.lineno, n.col_offset, f"keep({ast.unparse(n.args[0])})")
        for n in ast.walk(node or ast.Constant(None))
        if isinstance(n, ast.Call) and ast.unparse(n.func) == "self.keep"
    ]
    return " ".join(f"self.{name}" for *_, name in sorted(found) if name not in framework)


def without(lines: list[str], prefixes: list[str]) -> list[str]:
    return [line for line in lines if not any(line.startswith(prefix) for prefix in prefixes)]


def read(twin: str) -> dict[str, dict[str, list[str]]]:
    return skeleton((ROOT / twin / "model.py").read_text())


def test_the_twins_have_the_same_classes_in_the_same_order() -> None:
    assert list(read("vit_jax")) == list(read("vit_torch"))


@pytest.mark.parametrize("cls", read("vit_jax"))
def test_a_class_has_the_same_methods_in_the_same_order(cls: str) -> None:
    assert list(read("vit_jax")[cls]) == list(read("vit_torch")[cls])


METHODS = [(cls, method) for cls, methods in read("vit_jax").items() for method in methods]


@pytest.mark.parametrize(("cls", "method"), METHODS)
def test_a_method_has_the_same_statements_in_the_same_order(cls: str, method: str) -> None:
    in_jax, in_torch = read("vit_jax")[cls][method], read("vit_torch")[cls][method]
    assert without(in_jax, ONLY_JAX) == without(in_torch, ONLY_TORCH)


def test_a_renamed_attribute_is_noticed() -> None:
    source = (ROOT / "vit_torch" / "model.py").read_text()
    assert skeleton(source.replace("self.fc2", "self.fc3")) != skeleton(source)


def test_two_swapped_lines_are_noticed() -> None:
    source = (ROOT / "vit_torch" / "model.py").read_text()
    sum, mlp = 'x = self.keep("sum", x + y)\n', "y = self.mlp(norm2(x))\n"
    first, second = f"{sum}        {mlp}", f"{mlp}        {sum}"
    swapped = source.replace(first, second)
    assert skeleton(swapped) != skeleton(source)


def test_a_renamed_intermediate_is_noticed() -> None:
    source = (ROOT / "vit_torch" / "model.py").read_text()
    assert skeleton(source.replace('self.keep("heads"', 'self.keep("head"')) != skeleton(source)
