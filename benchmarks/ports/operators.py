"""Mutation operators: the ways in which one node of a syntax tree is replaced by a typical mistake of a port.

`mutations` yields for a node the kind of the mistake and the replacement.
"""

import ast
import copy
from collections.abc import Iterator

Mutation = tuple[str, ast.AST]

# Each function of a row is replaced by each of the others.
FUNCTIONS = (
    ("gelu", "relu", "silu", "tanh"),
    ("sigmoid", "tanh"),
    ("swish", "relu"),
    ("softmax", "sigmoid"),
    ("log_softmax", "softmax"),
    ("mean", "sum"),
    ("max", "mean"),
    ("rsqrt", "sqrt"),
    ("sin", "cos"),
    ("square", "abs"),
    ("max_pool", "avg_pool"),
    ("max_pool2d", "avg_pool2d"),
)
WITH_AXES = ("softmax", "mean", "sum", "max", "cat", "concatenate", "stack", "split", "chunk", "unbind", "flip", "roll")
PERMUTING = ("transpose", "permute", "swapaxes", "moveaxis")
WITH_LISTS = ("cat", "concatenate", "stack", "hstack")
OF_TWO = ("matmul", "subtract", "dot", "divide", "bmm")
NORMS = {"LayerNorm": "epsilon", "GroupNorm": "epsilon", "BatchNorm": "epsilon", "RMSNorm": "epsilon"}
EPSILON = 1e-3  # constants up to this are tolerances of a norm, or initial values

ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult}
COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}


def called_name(node: ast.AST) -> str:
    """Return the last part of the name that a call calls, "" if it has none."""
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def mutations(node: ast.AST) -> Iterator[Mutation]:
    """Yield (kind, replacement) for every mistake that can be planted in a node."""
    for of_type, function in BY_TYPE:
        if isinstance(node, of_type):
            for kind, replacement in function(node):
                yield kind, ast.copy_location(replacement, node)


def _of_binary(node: ast.BinOp) -> Iterator[Mutation]:
    if other := ARITHMETIC.get(type(node.op)):
        yield "arithmetic", ast.BinOp(node.left, other(), node.right)
    if isinstance(node.op, (ast.Sub, ast.Div, ast.MatMult, ast.Pow)):
        yield "order of operands", ast.BinOp(node.right, node.op, node.left)
    if isinstance(node.op, ast.Add):
        yield "dropped term", copy.copy(node.left)
        yield "dropped term", copy.copy(node.right)
    if isinstance(node.op, (ast.Mult, ast.Div)) and not isinstance(node.left, ast.Constant):
        yield "dropped factor", copy.copy(node.left)


def _of_augmented(node: ast.AugAssign) -> Iterator[Mutation]:
    if other := ARITHMETIC.get(type(node.op)):
        yield "arithmetic", ast.AugAssign(node.target, other(), node.value)
    if isinstance(node.op, ast.Add):
        yield "dropped term", ast.Assign([node.target], node.value)


def _of_comparison(node: ast.Compare) -> Iterator[Mutation]:
    if len(node.ops) == 1 and (other := COMPARISONS.get(type(node.ops[0]))):
        yield "comparison", ast.Compare(node.left, [other()], node.comparators)


def _of_constant(node: ast.Constant) -> Iterator[Mutation]:
    if isinstance(node.value, float) and node.value:
        yield (
            ("epsilon", ast.Constant(node.value * 10))
            if abs(node.value) <= EPSILON
            else (
                "constant",
                ast.Constant(node.value * 1.25),
            )
        )


def _of_subscript(node: ast.Subscript) -> Iterator[Mutation]:
    indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    for n, index in enumerate(indices):
        if isinstance(index, ast.Constant) and type(index.value) is int:
            changed = list(indices)
            changed[n] = ast.Constant(index.value + 1)
            slice_ = ast.Tuple(changed, ast.Load()) if isinstance(node.slice, ast.Tuple) else changed[0]
            yield "index", ast.Subscript(node.value, slice_, node.ctx)


def _of_assignment(node: ast.Assign) -> Iterator[Mutation]:
    for target in node.targets:
        if isinstance(target, ast.Tuple) and not isinstance(node.value, ast.Attribute):
            for n in range(len(target.elts) - 1):
                swapped = list(target.elts)
                swapped[n], swapped[n + 1] = swapped[n + 1], swapped[n]
                yield "order of results", ast.Assign([ast.Tuple(swapped, ast.Store())], node.value)


def _of_call(node: ast.Call) -> Iterator[Mutation]:
    name = called_name(node)
    yield from _other_functions(node, name)
    yield from _other_arguments(node, name)
    if name in NORMS and not any(keyword.arg in ("epsilon", "eps") for keyword in node.keywords):
        yield "epsilon", ast.Call(node.func, node.args, [*node.keywords, ast.keyword(NORMS[name], ast.Constant(1e-4))])
    if name in WITH_LISTS and node.args and isinstance(node.args[0], (ast.List, ast.Tuple)) and len(node.args[0].elts) > 1:
        elements = list(node.args[0].elts)
        elements[:2] = elements[1::-1]
        swapped = type(node.args[0])(elements, ast.Load())
        yield "order of arguments", ast.Call(node.func, [swapped, *node.args[1:]], node.keywords)
    if name in OF_TWO and len(node.args) == 2:
        yield "order of arguments", ast.Call(node.func, node.args[::-1], node.keywords)
    if len(node.args) == 1 and not node.keywords and isinstance(node.args[0], ast.Name):
        yield "skipped call", copy.copy(node.args[0])


def _other_functions(node: ast.Call, name: str) -> Iterator[Mutation]:
    for row in FUNCTIONS:
        for other in row if name in row else ():
            if other != name:
                func = copy.copy(node.func)
                setattr(func, "attr" if isinstance(func, ast.Attribute) else "id", other)
                yield "function", ast.Call(func, node.args, node.keywords)


def _other_arguments(node: ast.Call, name: str) -> Iterator[Mutation]:
    for n, keyword in enumerate(node.keywords):
        for kind, value in _other_values(keyword.arg or "", keyword.value):
            changed = list(node.keywords)
            changed[n] = ast.keyword(keyword.arg, value)
            yield kind, ast.Call(node.func, node.args, changed)
    axes = [n for n, argument in enumerate(node.args) if _as_int(argument) is not None]
    if name in PERMUTING and len(axes) > 1:
        changed = list(node.args)
        changed[axes[0]], changed[axes[1]] = changed[axes[1]], changed[axes[0]]
        yield "transposed axes", ast.Call(node.func, changed, node.keywords)
        changed = list(node.args)
        changed[axes[-1]], changed[axes[-2]] = changed[axes[-2]], changed[axes[-1]]
        yield "transposed axes", ast.Call(node.func, changed, node.keywords)
    for n, argument in enumerate(node.args):
        if name in PERMUTING and isinstance(argument, (ast.Tuple, ast.List)) and len(argument.elts) > 1:
            elements = list(argument.elts)
            elements[-2:] = elements[:-3:-1]
            changed = list(node.args)
            changed[n] = type(argument)(elements, ast.Load())
            yield "transposed axes", ast.Call(node.func, changed, node.keywords)
    if name in WITH_AXES and axes:
        changed, axis = list(node.args), _as_int(node.args[axes[-1]])
        changed[axes[-1]] = _other_axis(axis)
        yield "axis", ast.Call(node.func, changed, node.keywords)


def _other_values(name: str, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield other values of a keyword argument."""
    if name in ("axis", "dim", "start_dim") and _as_int(value) is not None:
        yield "axis", _other_axis(_as_int(value))
    elif isinstance(value, ast.Constant) and isinstance(value.value, bool):
        yield "flag", ast.Constant(not value.value)
    elif isinstance(value, ast.Constant) and value.value in ("SAME", "VALID"):
        yield "padding", ast.Constant("VALID" if value.value == "SAME" else "SAME")
    elif name in ("strides", "stride", "padding", "dilation", "groups", "num_groups") and _as_int(value) is not None:
        yield "padding" if name == "padding" else "stride or groups", ast.Constant(_as_int(value) + 1)


def _as_int(node: ast.expr) -> int | None:
    """Return the value of an integer constant, which may be negative; None if it is none."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _as_int(node.operand)
        return None if inner is None else -inner
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def _other_axis(axis: int | None) -> ast.expr:
    return ast.Constant({-1: -2, -2: -1, 0: 1, 1: 2, 2: 1, -3: -2, 3: 2}.get(axis or 0, 1))


BY_TYPE = (
    (ast.BinOp, _of_binary),
    (ast.AugAssign, _of_augmented),
    (ast.Compare, _of_comparison),
    (ast.Constant, _of_constant),
    (ast.Subscript, _of_subscript),
    (ast.Assign, _of_assignment),
    (ast.Call, _of_call),
)
