"""Plant one fault in the code of a model, or in an attribute of one of its modules, and take it back.

A fault in code replaces one node of the syntax tree of a file (`operators`).  The whole file is compiled again under its
own name, and the code objects of the live functions are exchanged, so that file names and line numbers in tracebacks stay
right, and decorators, closures and references to the functions keep working.  Only lines that a forward pass executes are
candidates.
"""

import ast
import gc
import importlib.util
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

from benchmarks.ports.operators import mutations

# Their lines are executed, but they define no operation of a model.
NOT_MODELS = (
    "configuration_",
    "/utils/",
    "tokenization",
    "/generation/",
    "/integrations/hub",
    "/_registry",
    "image_processing",
)


@dataclass
class Executed:
    """The lines that a forward pass executes.

    Attributes:
        lines: for each file its lines, with the paths of the modules in whose call they were executed ("" is the model).
    """

    lines: dict[str, dict[int, set[str]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(set)))


@dataclass(frozen=True)
class Fault:
    """A planted fault.

    Attributes:
        kind: kind of the mistake.
        file, line, end_line, function: the statement that is mutated; for an attribute, the file is "" and the lines are 0.
        before, after: source text of the mutated node.
        modules: paths of the modules in whose call the statement is executed, innermost module for each call; also those
            that a statement of `setup` makes.
        attribute: name of the mutated attribute; "" for a fault in code.
    """

    kind: str
    file: str
    line: int
    end_line: int
    function: str
    before: str
    after: str
    modules: tuple[str, ...] = ()
    attribute: str = ""


@dataclass(frozen=True)
class Candidate:
    """A possible fault in code: the n-th mutation of the m-th node of a file (in the order of `ast.walk`)."""

    kind: str
    file: str
    node: int
    variant: int


def code_folders(names: Iterable[str]) -> tuple[str, ...]:
    """Return the folders of packages, and the files of modules, with these names."""
    out = []
    for name in names:
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ModuleNotFoundError(name)
        out += [f"{folder}/" for folder in spec.submodule_search_locations or ()] or [str(spec.origin)]
    return tuple(out)


def trace(run: Callable[[], Any], folders: tuple[str, ...], path_of: Callable[[FrameType], str | None]) -> Executed:
    """Run a forward pass, and return its executed lines in files that begin with one of `folders`.

    path_of: returns the path of the module whose method a frame is, or None.
    """
    executed = Executed()

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(folders) or any(part in file for part in NOT_MODELS):
            return None
        path = None
        outer: FrameType | None = frame
        for _ in range(40):
            if outer is None or path is not None:
                break
            path, outer = path_of(outer), outer.f_back
        lines = executed.lines[file]

        def on_line(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "line":
                lines[frame.f_lineno].add(path or "")
            return on_line

        return on_line

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        run()
    finally:
        sys.settrace(before)
    return executed


class Source:
    """The syntax tree of a file, and for each node its statement and its function."""

    def __init__(self, file: str) -> None:
        self.file, self.tree = file, ast.parse(Path(file).read_text())
        self.nodes = list(ast.walk(self.tree))
        self.owner: dict[int, tuple[ast.stmt | None, str, int]] = {}
        self._visit(self.tree, None, (), 0)

    def _visit(self, node: ast.AST, statement: ast.stmt | None, names: tuple[str, ...], depth: int) -> None:
        """Note the innermost simple statement, the function, and the depth in functions of a node and of all inside it."""
        if isinstance(node, ast.stmt):
            statement = None if hasattr(node, "body") else node
        self.owner[id(node)] = (statement, ".".join(names), depth)
        inner = names
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            inner, depth = (*names, node.name), depth + (not isinstance(node, ast.ClassDef))
        for name, value in ast.iter_fields(node):
            # Decorators, defaults and annotations are executed at import, and asserts and errors compute nothing.
            if name in ("decorator_list", "args", "returns", "annotation") and isinstance(
                node, (ast.FunctionDef, ast.ClassDef, ast.AnnAssign)
            ):
                continue
            if isinstance(node, (ast.Assert, ast.Raise)):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    self._visit(child, statement, inner, depth)

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return the first and last line of the statement of a node; of the node itself inside a compound statement."""
        statement = self.owner[id(node)][0] or node
        return statement.lineno, statement.end_lineno or statement.lineno  # type: ignore[attr-defined]

    def candidates(self, lines: set[int]) -> Iterator[Candidate]:
        """Yield the candidates whose statement has an executed line."""
        for n, node in enumerate(self.nodes):
            if id(node) in self.owner and self.owner[id(node)][2] and getattr(node, "lineno", None):
                first, last = self.span(node)
                if lines.intersection(range(first, last + 1)):
                    for variant, (kind, _) in enumerate(mutations(node)):
                        yield Candidate(kind, self.file, n, variant)


def draw(executed: Executed, rng: random.Random) -> Iterator[Candidate]:
    """Yield all candidates in random order; a kind is drawn first each time, so that all kinds are equally frequent."""
    by_kind: dict[str, list[Candidate]] = defaultdict(list)
    for file in sorted(executed.lines):
        for candidate in Source(file).candidates(set(executed.lines[file])):
            by_kind[candidate.kind].append(candidate)
    for kind in sorted(by_kind):
        rng.shuffle(by_kind[kind])
    while kinds := sorted(kind for kind in by_kind if by_kind[kind]):
        yield by_kind[rng.choice(kinds)].pop()


@contextmanager
def planted(candidate: Candidate, executed: Executed) -> Iterator[Fault]:
    """Plant a fault while the context is open.

    Raises:
        SyntaxError, ValueError: the mutated code cannot replace the function.
    """
    source = Source(candidate.file)
    node = source.nodes[candidate.node]
    _, replacement = list(mutations(node))[candidate.variant]
    (first, last), function = source.span(node), source.owner[id(node)][1]
    before, after = ast.unparse(node), ast.unparse(ast.fix_missing_locations(replacement))
    seen = executed.lines[candidate.file]
    modules = {path for line in range(first, last + 1) for path in seen.get(line, ())}
    if function.rpartition(".")[2] == "setup":
        modules |= {f"{path}/{name}" for path in modules for name in _attributes_assigned(source.tree, node)}
    fault = Fault(candidate.kind, candidate.file, first, last, function, before[:200], after[:200], tuple(sorted(modules)))
    tree = ast.fix_missing_locations(_Replace(node, replacement).visit(source.tree))
    new = _code_objects(compile(tree, candidate.file, "exec", dont_inherit=True))
    changed: list[tuple[FunctionType, CodeType]] = []
    try:
        for live in live_functions(candidate.file):
            if code := _counterpart(live.__code__, new, first):
                changed.append((live, live.__code__))
                live.__code__ = code
        if not changed:
            raise ValueError("no live function contains the line")
        yield fault
    finally:
        for live, code in changed:
            live.__code__ = code


def _attributes_assigned(tree: ast.AST, node: ast.AST) -> Iterator[str]:
    """Yield the names of the attributes of `self` to which the statement assigns that contains a node."""
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Assign) and any(each is node for each in ast.walk(statement)):
            for target in statement.targets:
                if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                    yield target.attr


class _Replace(ast.NodeTransformer):
    def __init__(self, node: ast.AST, replacement: ast.AST) -> None:
        self.node, self.replacement = node, replacement

    def visit(self, node: ast.AST) -> Any:
        if node is self.node:
            return self.replacement
        return self.generic_visit(node)


def live_functions(file: str) -> list[FunctionType]:
    """Return the functions whose code is in a file."""
    objects = gc.get_objects()
    return [each for each in objects if type(each) is FunctionType and each.__code__.co_filename == file]


def _code_objects(code: CodeType) -> list[CodeType]:
    """Return all code objects inside a code object."""
    out = []
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            out += [constant, *_code_objects(constant)]
    return out


def _last_line(code: CodeType) -> int:
    own = [line for _, _, line in code.co_lines() if line]
    return max([code.co_firstlineno, *own, *(_last_line(inner) for inner in code.co_consts if isinstance(inner, CodeType))])


def _counterpart(code: CodeType, new: list[CodeType], line: int) -> CodeType | None:
    """Return the new code of a function, if the function contains the mutated line."""
    if not code.co_firstlineno <= line <= _last_line(code):
        return None
    same = [each for each in new if (each.co_qualname, each.co_firstlineno) == (code.co_qualname, code.co_firstlineno)]
    return same[0] if len(same) == 1 else None


# Attributes ---------------------------------------------------------------------------------------------------------

FLOATS = ("eps", "epsilon", "scale", "negative_slope", "sm_scale", "scaling", "softmax_scale", "variance_epsilon")


def attribute_mutations(module: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield (kind, attribute, new value) for the faults that can be planted in the attributes of one module."""
    for name in FLOATS:
        value = getattr(module, name, None)
        if isinstance(value, float) and value:
            yield ("epsilon", name, value * 10) if "eps" in name else ("constant", name, value * 1.25)
    kind = type(module).__name__
    if kind == "GELU" and isinstance(getattr(module, "approximate", None), str):
        yield "function", "approximate", "tanh" if module.approximate == "none" else "none"
    if kind == "GroupNorm" and isinstance(getattr(module, "num_groups", None), int):
        yield "stride or groups", "num_groups", 2 if module.num_groups != 2 else 1
    if kind == "Conv2d" and getattr(module, "padding_mode", "") == "zeros" and any(getattr(module, "padding", ())):
        yield "padding", "padding_mode", "replicate"


@contextmanager
def changed_attribute(module: Any, path: str, mutation: tuple[str, str, Any]) -> Iterator[Fault]:
    """Change an attribute of a module while the context is open."""
    kind, name, value = mutation
    old = getattr(module, name)
    fault = Fault(kind, "", 0, 0, type(module).__name__, f"{name}={old!r}", f"{name}={value!r}", (path,), name)
    object.__setattr__(module, name, value)
    try:
        yield fault
    finally:
        object.__setattr__(module, name, old)
