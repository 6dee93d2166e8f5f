"""The twins' models correspond line by line: the same classes, methods, attributes and statements in the same order.

Each method also reads the same options of the config and decides by the same conditions.
"""

import ast
from collections.abc import Iterator

import pytest

from tests import ROOT

METHOD_NAMES = {"setup": "__init__", "__call__": "forward"}  # linen's name: PyTorch's

# Statements that only one framework needs.
ONLY_JAX = [
    "config, execution =",  # linen modules have fields, not arguments of __init__
    "x, _ = self.blocks",  # the blocks are one scanned module
]
ONLY_TORCH = [
    "super",  # __init__ calls that of nn.Module
    "execution =",  # linen has the default in a field
    "self.reset_parameters",  # linen initializes parameters where they are declared
    "last, dtype =",  # linen scans over the rates in the noise
    "rates =",
    "for block, rate, own: self.blocks",  # the blocks are a list
    "x = run_block",  # applies one of the blocks
]

METHODS_OF_ONLY_TORCH = ["reset_parameters"]

# Options and conditions of a method that only one framework needs.
OPTIONS_OF_ONLY_JAX = {
    ("ViT", "noise"): ["not train or not any(vars(self.config.regularisation).values())", "key is None"],  # no train()
    ("ViT", "embed"): ["rates.patch_drop and noise is not None", "noise is not None"],  # as above
    ("ViT", "positions"): ["config.width"],  # torch merges axes without their sizes
}
OPTIONS_OF_ONLY_TORCH = {
    ("ViT", "__init__"): ["execution or Execution()", "config.depth"],  # no field has the default; the blocks are a list
    ("ViT", "noise"): [
        "key is None or not self.training or (not any(vars(self.config.regularisation).values()))",
        "key is None",
        "config.depth",
    ],
    ("ViT", "embed"): ["rates.patch_drop and self.training"],
    ("ViT", "encode"): ["config.regularisation.drop_path", "config.depth"],  # linen scans over the rates in the noise
}


def skeleton(source: str) -> dict[str, dict[str, list[str]]]:
    """Return the statements of each method of each class, in order: the assigned names and the attributes of self."""
    return {
        cls.name: {
            METHOD_NAMES.get(method.name, method.name): list(statements(method.body))
            for method in cls.body
            if isinstance(method, ast.FunctionDef)
        }
        for cls in ast.parse(source).body
        if isinstance(cls, ast.ClassDef)
    }


def statements(body: list[ast.stmt]) -> Iterator[str]:
    """Yield a line for each statement, which leaves out expressions that only one framework needs."""
    for node in body:
        match node:
            case ast.Assign(targets=[target], value=value):
                called = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
                right = self_attributes(value) or ("run_block" if called == "run_block" else "")
                yield f"{ast.unparse(target).strip('()')} = {right}".strip()
            case ast.If(test=test, body=inner, orelse=other):
                yield f"if {self_attributes(test)}"
                yield from statements(inner)
                yield from statements(other)
            case ast.For(target=target, iter=source, body=inner):
                yield f"for {ast.unparse(target).strip('()')}: {self_attributes(source)}"
                yield from statements(inner)
            case ast.Return(value=value):
                yield f"return {self_attributes(value)}"
            case ast.Expr(value=ast.Call(func=called)):
                yield ast.unparse(called).split("(")[0]


def self_attributes(node: ast.AST | None) -> str:
    """Return the attributes of self and the names of intermediates in an expression, in the order of the source."""
    framework = {"config", "execution", "declare", "training", "constants", "intermediate", "make_rng", "has_variable"}
    found = [
        (n.lineno, n.col_offset, n.attr)
        for n in ast.walk(node or ast.Constant(None))
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "self"
    ]
    found += [
        (n.lineno, n.col_offset, f"intermediate({ast.unparse(n.args[0])})")
        for n in ast.walk(node or ast.Constant(None))
        if isinstance(n, ast.Call) and ast.unparse(n.func) == "self.intermediate"
    ]
    return " ".join(f"self.{name}" for *_, name in sorted(found) if name not in framework)


def options(source: str) -> dict[tuple[str, str], list[str]]:
    """Return the options that each method of each class reads and the conditions that it tests, in order."""
    return {
        (cls.name, METHOD_NAMES.get(method.name, method.name)): options_of_method(method)
        for cls in ast.parse(source).body
        if isinstance(cls, ast.ClassDef)
        for method in cls.body
        if isinstance(method, ast.FunctionDef)
    }


def options_of_method(method: ast.FunctionDef) -> list[str]:
    """Return the attributes of the config and of the execution options that are read, and the conditions, in order."""
    nodes = list(ast.walk(method))
    assigned = [pair for node in nodes if isinstance(node, ast.Assign) for pair in assigned_pairs(node)]
    parts = {ast.unparse(name) for name, value in assigned if without_self(value).startswith("config.")}
    owners = {node.value for node in nodes if isinstance(node, ast.Attribute)}  # config.norms in config.norms.kind
    found = set()
    for node in nodes:
        if isinstance(node, ast.If | ast.IfExp):
            found.add((node.test.lineno, node.test.col_offset, ast.unparse(node.test)))
        if isinstance(node, ast.Compare | ast.BoolOp):
            found.add((node.lineno, node.col_offset, ast.unparse(node)))
        if isinstance(node, ast.Attribute) and node not in owners:
            part, dot, _ = without_self(node).partition(".")
            if dot and part in {"config", "execution", *parts}:
                found.add((node.lineno, node.col_offset, without_self(node)))
    return [text for *_, text in sorted(found)]


def without_self(node: ast.expr) -> str:
    return ast.unparse(node).removeprefix("self.")


def assigned_pairs(node: ast.Assign) -> list[tuple[ast.expr, ast.expr]]:
    """Return each target of an assignment with its value."""
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
            return list(zip(names, values, strict=True))
    return [(node.targets[0], node.value)]


def without_options(found: list[str], only: list[str]) -> list[str]:
    """Return `found` without the options of only one framework, each of which it must have."""
    rest = list(found)
    for name in only:
        rest.remove(name)
    return rest


def without_prefixes(lines: list[str], prefixes: list[str]) -> list[str]:
    return [line for line in lines if not any(line.startswith(prefix) for prefix in prefixes)]


def model_skeleton(twin: str) -> dict[str, dict[str, list[str]]]:
    return skeleton((ROOT / twin / "model.py").read_text())


def test_the_twins_have_the_same_classes_in_the_same_order() -> None:
    assert list(model_skeleton("vit_jax")) == list(model_skeleton("vit_torch"))


@pytest.mark.parametrize("cls", model_skeleton("vit_jax"))
def test_each_class_has_the_same_methods_in_the_same_order(cls: str) -> None:
    in_jax, in_torch = model_skeleton("vit_jax")[cls], model_skeleton("vit_torch")[cls]
    assert list(in_jax) == [name for name in in_torch if name not in METHODS_OF_ONLY_TORCH]


METHODS = [(cls, method) for cls, methods in model_skeleton("vit_jax").items() for method in methods]


@pytest.mark.parametrize(("cls", "method"), METHODS)
def test_each_method_has_the_same_statements_in_the_same_order(cls: str, method: str) -> None:
    in_jax, in_torch = model_skeleton("vit_jax")[cls][method], model_skeleton("vit_torch")[cls][method]
    assert without_prefixes(in_jax, ONLY_JAX) == without_prefixes(in_torch, ONLY_TORCH)


def test_a_renamed_attribute_is_detected() -> None:
    source = (ROOT / "vit_torch" / "model.py").read_text()
    assert skeleton(source.replace("self.fc2", "self.fc3")) != skeleton(source)


def test_two_swapped_lines_are_detected() -> None:
    source = (ROOT / "vit_torch" / "model.py").read_text()
    heads, norm = 'x = self.intermediate("heads", x)\n', "x = self.norm(x) if self.norm is not None else x\n"
    first, second = f"{heads}        {norm}", f"{norm}        {heads}"
    assert first in source
    swapped = source.replace(first, second)
    assert skeleton(swapped) != skeleton(source)


def test_a_renamed_intermediate_is_detected() -> None:
    source = (ROOT / "vit_torch" / "model.py").read_text()
    assert skeleton(source.replace('self.intermediate("heads"', 'self.intermediate("head"')) != skeleton(source)


def model_options(twin: str) -> dict[tuple[str, str], list[str]]:
    return options((ROOT / twin / "model.py").read_text())


@pytest.mark.parametrize(("cls", "method"), METHODS)
def test_each_method_reads_the_same_options_and_tests_the_same_conditions(cls: str, method: str) -> None:
    in_jax, in_torch = model_options("vit_jax")[cls, method], model_options("vit_torch")[cls, method]
    only_jax, only_torch = OPTIONS_OF_ONLY_JAX.get((cls, method), []), OPTIONS_OF_ONLY_TORCH.get((cls, method), [])
    assert without_options(in_jax, only_jax) == without_options(in_torch, only_torch)


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("return x + v.flatten(2) if config.attention.value_skip else x", "return x"),
        ("options.proj_bias", "options.qkv_bias"),
        ('y = norm2(y) if order == "res_post" else y', 'y = norm2(y) if order == "post" else y'),
        ("norms.has_second_scale", "norms.has_second"),
        ("(width,)) if norms.before_blocks else None", "(width,))"),
        ("0 if self.config.head.pool_prefix else self.config.num_prefix", "self.config.num_prefix"),
    ],
)
def test_an_option_that_one_twin_lacks_is_detected(line: str, changed: str) -> None:
    source = (ROOT / "vit_torch" / "model.py").read_text()
    assert source.count(line) == 1
    assert options(source.replace(line, changed)) != options(source)
