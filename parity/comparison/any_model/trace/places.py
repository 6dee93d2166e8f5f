"""Places in the source of a model: the module and the line that an operation comes from."""

import ast
import linecache
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

# Packages whose lines tell nothing about a model: the place of an operation in them is the line that calls them.
_LIBRARIES = (
    "jax",
    "jaxlib",
    "flax",
    "equinox",
    "keras",
    "torch",
    "numpy",
    "einops",
    "optax",
    "jaxtyping",
    "beartype",
    "parity",
)
_HERE = Path(__file__).parent
_CALLERS = frozenset(
    str(path)
    for path in (
        *(_HERE / "flax_graph.py", _HERE / "torch_graph.py"),
        *(_HERE.parent / "flax_runner.py", _HERE.parent / "torch_runner.py"),
    )
)


class SourceLine(NamedTuple):
    """A line of source that a call is at."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


Stack = tuple[SourceLine, ...]  # the innermost call first


@dataclass(frozen=True)
class Place:
    """Where a model computes something.

    Attributes:
        module: path of the module, such as "layers.0.norm1" or "layer_0/LayerNorm_0"; "" for the model itself.
        operation: name of the operation, such as "erf" or "layer_norm"; "" for a place between operations.
        file, line, function: the line of the model's source, outside of the frameworks; "", 0 and "" if it is unknown.
        lines: (file, line) from the last values on which the models agree to this operation.
        passed: paths of modules in between that return what they are given.
        caller: the line that calls the function; None if it is the first of the model, or unknown.
        after: path of the module that computes the last values on which the models agree; "" if it is this module, one
            inside it, or one around it.
    """

    module: str
    operation: str
    file: str = ""
    line: int = 0
    function: str = ""
    lines: tuple[tuple[str, int], ...] = ()
    passed: tuple[str, ...] = ()
    caller: SourceLine | None = None
    after: str = ""

    def __str__(self) -> str:
        where = self.module or "the model itself"
        caller = ""
        if self.caller:
            caller = f", called at {f'line {self.caller.line}' if self.caller.file == self.file else self.caller}"
        source = f" ({Path(self.file).name}:{self.line}, in {self.function}{caller})" if self.file else ""
        after = f" after {self.after}" if self.after else ""
        return f"{self.operation} in {where}{after}{source}" if self.operation else f"{where}{source}"


def lines_between(before: Stack, here: Stack, is_same_call: bool) -> Iterator[tuple[str, int]]:
    """Yield (file, line) of the lines that are executed from one call to a later one.

    These are the lines between both in the function that both are in, the rest of the functions that are left, and the
    beginning of those that are entered.

    here: the later call; empty for the end of the model.
    is_same_call: whether equal lines at the end of both stacks belong to one call of their function.
    """
    earlier, later = [*reversed(before)], [*reversed(here)]
    shared = 0
    while shared < min(len(earlier), len(later)) and earlier[shared] == later[shared]:
        shared += 1
    if not is_same_call and shared == len(earlier) and shared:
        shared -= 1
    left, entered = earlier[shared:], later[shared:] or later[-1:]
    if is_same_call and left and entered and left[0][::2] == entered[0][::2]:  # two lines of one function
        first, last = sorted((left[0].line, entered[0].line))
        yield from ((left[0].file, line) for line in range(first, last + 1))
        left, entered = left[1:], entered[1:]
    for each in left:
        yield from ((each.file, line) for line in range(each.line, _function_lines(each)[1] + 1))
    for each in entered:
        yield from ((each.file, line) for line in range(_function_lines(each)[0], each.line + 1))


@cache
def _function_lines(line: SourceLine) -> tuple[int, int]:
    """Return the first and the last line of the function that contains a line; the line itself if it is not found."""
    try:
        tree = ast.parse("".join(linecache.getlines(line.file)))
    except SyntaxError:
        return line.line, line.line
    found = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.lineno <= line.line <= (node.end_lineno or 0)
    ]
    return max(found, default=(line.line, line.line))


def user_stack(frames: Iterable[tuple[str, int, str]]) -> Stack:
    """Return the lines of a call stack that belong to the model, the innermost first.

    frames: file, line and function of each call, the innermost first.  The stack ends where the comparison calls the model.
    """
    out: list[SourceLine] = []
    leading = True  # frames of the recorder itself, which a model's operation has called
    for file, line, function in frames:
        if _calls_models(file):
            if leading:
                continue
            break
        leading = False
        if not _is_library(file):
            out.append(SourceLine(file, line, function.rpartition(".")[2]))
    return tuple(out)


def current_stack() -> Stack:
    """Return the lines of the model that are being executed."""
    frames = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        frames.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return user_stack(frames)


def _calls_models(file: str) -> bool:
    """Return whether a file is one of those that call the models and record their operations."""
    return file in _CALLERS


@cache
def _is_library(file: str) -> bool:
    """Return whether a file belongs to a framework or to Python."""
    if not Path(file).suffix or file.startswith("<"):
        return True
    return any(Path(file).is_relative_to(root) for root in _library_roots())


@cache
def _library_roots() -> tuple[Path, ...]:
    roots = []
    for name in _LIBRARIES:
        module = sys.modules.get(name)
        roots += [Path(path) for path in getattr(module, "__path__", ())]
    standard = Path(sysconfig.get_paths()["stdlib"])
    return (*roots, *(path for path in standard.iterdir() if path.name != "site-packages"))
