"""The place of a recorded operation, with the lines between it and the operations before it."""

from collections.abc import Sequence

from parity.comparison.any_model.trace.graph import IDENTITY, Graph, Operation
from parity.comparison.any_model.trace.places import Place, SourceLine, lines_between


def operation_place(graph: Graph, operation: int) -> Place:
    """Return the place of an operation of a graph."""
    here = graph.operations[operation]
    return make_place(here, here.module, [], graph.separator)


def make_place(
    operation: Operation,
    module: str,
    before: Sequence[Operation],
    separator: str,
    *,
    after: Operation | None = None,
    unknown: Sequence[Operation] = (),
) -> Place:
    """Return the place of an operation, with the lines from those before it to it.

    after: the last of those before it.
    unknown: operations whose lines count too.
    """
    line = operation.stack[0] if operation.stack else SourceLine("", 0, "")
    lines = {(each.file, each.line) for each in operation.stack[:1]}
    lines |= {(each.file, each.line) for one in unknown for each in one.stack if each not in operation.stack}
    for each in before:
        outer = calling_module(operation.module, separator)
        is_same_call = operation.module == each.module or contains_module(outer, each.module, separator)
        lines |= {*lines_between(each.stack, operation.stack, is_same_call)}
    passed = tuple(sorted({each.module for each in before if each.name == IDENTITY}))
    caller = operation.stack[1] if len(operation.stack) > 1 else None
    modules = (module, after.module) if after else (module, module)
    is_apart = modules[0] != modules[1] and not any(contains_module(*each, separator) for each in (modules, modules[::-1]))
    left = modules[1] if is_apart else ""
    return Place(module, operation.name, *line, tuple(sorted(lines)), passed, caller, left)


def contains_module(module: str, other: str, separator: str) -> bool:
    """Return whether another module is inside a module."""
    return other != module and (not module or other.startswith(f"{module}{separator}"))


def calling_module(module: str, separator: str) -> str:
    """Return the path of the module that calls another one, without the list that may contain it."""
    names = module.split(separator)[:-1] if module else []
    return separator.join(names[:-1] if module.split(separator)[-1].isdigit() else names)
