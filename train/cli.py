"""The command line of both trainers: a named recipe, any of its fields changed, and errors in one line.

What is imported here loads quickly; the frameworks follow when a run starts.
"""

import contextlib
import io
import re
import sys
from collections.abc import Callable, Sequence
from inspect import cleandoc
from itertools import dropwhile, takewhile

from train.recipes import RECIPES, Recipe
from vit_spec import InputError, nearest

INTERRUPTED = 130  # what a shell calls a program that Ctrl-C ended


def main(module: str, fit: Callable[[str, Recipe], int], arguments: Sequence[str]) -> int:
    """Run `python -m MODULE ARGUMENTS` and return the exit status: `fit`'s, or 2 for bad input.

    fit: called with the recipe's name and the recipe.
    """
    try:
        if "--list" in arguments:
            print(listing())
            return 0
        return fit(*parse(module, arguments))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"error: the package {error.name} is not installed: pip install -e '.[all]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what was saved before stays", file=sys.stderr)
        return INTERRUPTED


def listing() -> str:
    """Name every recipe with the first line of its docstring."""
    width = max(map(len, RECIPES))
    return "\n".join(f"{name:{width}}  {_doc(name).splitlines()[0]}" for name in RECIPES)


def parse(module: str, arguments: Sequence[str]) -> tuple[str, Recipe]:
    """Return the name of the recipe that `--config` asks for, and the recipe with the fields that the rest changes.

    Raises:
        InputError: an unknown recipe or field (the nearest is named), or a value that a field cannot take.
        SystemExit: after `--help` is printed.
    """
    import tyro

    name, rest = _config(arguments)
    if name not in RECIPES:
        hint = nearest(name, RECIPES)
        raise InputError(f"unknown recipe {name!r}{hint}; --list names all of them")
    about = (
        f"Train a Vision Transformer. The recipe is {name}; --config NAME takes another, --list names all of them.\n"
        f"Every field below can be changed; its default is the recipe's.\n\n{_doc(name)}"
    )
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            prog = f"python -m {module} [--config NAME]"
            recipe = tyro.cli(Recipe, prog=prog, args=rest, default=RECIPES[name](), description=about)
    except SystemExit as leaving:
        if leaving.code:
            raise InputError(_one_line(said.getvalue())) from None
        raise
    return name, recipe


def _config(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Take `--config NAME` or `--config=NAME` out of the arguments; without it the recipe is vit_s16."""
    name, rest = "vit_s16", []
    remaining = iter(arguments)
    for argument in remaining:
        flag, equals, value = argument.partition("=")
        if flag == "--config":
            name = value if equals else next(remaining, "")
        else:
            rest.append(argument)
    return name, rest


def _doc(name: str) -> str:
    return cleandoc(RECIPES[name].__doc__ or "")


def _one_line(text: str) -> str:
    """Return what tyro says between the first two rules of its box; then come help, or the nearest option."""
    lines = [line.strip("│ ") for line in text.strip("\n").splitlines()[1:-1]]  # the box, or its title, is left out
    inside = dropwhile(_is_rule, lines)
    said = " ".join(takewhile(lambda line: not _is_rule(line) and not line.startswith("Got errors"), inside))
    said = " ".join(said.split()).removeprefix("Error parsing Recipe: ").rstrip(".")
    near = re.search(r"Perhaps you meant:\s+(--[\w.-]+)", "\n".join(lines))
    unknown = re.match(r"Unrecognized options: (--[\w.-]+)", said)
    ours = nearest(unknown[1], ("--config", "--list", "--help")) if unknown else ""  # tyro knows nothing of these
    return f"{said}{f'; did you mean {near[1]!r}?' if near else ours}; --help explains every field"


def _is_rule(line: str) -> bool:
    """Whether a line is drawn rather than written: tyro draws with dashes where a terminal knows no others."""
    return bool(line) and set(line) <= {"-", "─"}
