"""The command line of both trainers: a named recipe, any of its fields changed, and errors in one line.

What is imported here loads quickly; the frameworks follow when a run starts.
"""

import contextlib
import io
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import cleandoc
from itertools import dropwhile, takewhile
from typing import TYPE_CHECKING

from parity.terminal import complain
from train.loop.request import Request
from train.recipes import FROM_WEIGHTS, RECIPES, Known, Recipe
from vit_spec import InputError, nearest

if TYPE_CHECKING:
    from train.data.sources import Source

# The extra of this distribution that brings a package; others are brought by "train".
EXTRAS = {"jax": "jax", "jaxlib": "jax", "flax": "jax", "optax": "jax", "chex": "jax", "torch": "torch"} | {
    "huggingface_hub": "hub",
    "pyarrow": "parquet",
}
BAD_INPUT = 2
INTERRUPTED = 130  # what a shell calls a program that Ctrl-C ended
OURS = ("--config", "--list", "--plan", "--dry-run", "--help")  # what tyro knows nothing of
DIGITS = Known(images=1438, channels=1, size=(8, 8))  # the default data


def main(module: str, fit: Callable[[Request], int], arguments: Sequence[str]) -> int:
    """Run `python -m MODULE ARGUMENTS` and return the exit status: `fit`'s, or 2 for bad input."""

    def run() -> int:
        if "--list" in arguments:
            print(listing())
            return 0
        devices, others = _taken("--plan", arguments)
        if devices is not None:
            if "--dry-run" in others:
                raise InputError("--plan does no step: leave out either it or --dry-run")
            from train import plan

            return plan.plan(parse(module, others, plan.opened), devices)
        dry = [argument for argument in arguments if argument == "--dry-run"]
        return fit(parse(module, [argument for argument in arguments if argument not in dry])._replace(dry=bool(dry)))

    return told(run)


def told(run: Callable[[], int]) -> int:
    """Return the exit status of a command; 2 for bad input, which is told in one line."""
    try:
        try:
            return run()
        finally:
            sys.stdout.flush()  # Python's own, at the end, would not be told in a line
    except InputError as error:
        complain(error)
        return BAD_INPUT
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(str(error.name).partition(".")[0], "train")
        complain(f"the package {error.name} is not installed: pip install 'twin-vision-transformers[{extra}]'")
        return BAD_INPUT
    except BrokenPipeError:  # who was to read it has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        remedy = "let this user at it" if isinstance(error, PermissionError) else "make room"
        why = error.strerror or error
        complain(f"{error.filename or 'a file'}: {why}; {remedy} or change the path")
        return BAD_INPUT
    except MemoryError:
        complain("this takes more memory than there is: give less, or use a machine with more")
        return BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted; what was saved before stays", file=sys.stderr)
        return INTERRUPTED


def listing() -> str:
    """Name every recipe with the first line of its docstring, and what judges features without training."""
    width = max(map(len, RECIPES))
    rows = [f"{name:{width}}  {_doc(name).splitlines()[0]}" for name in RECIPES]
    return "\n".join(
        [*rows, "", "Nearest neighbours, linear and few-shot classifiers on features: python -m train.evaluate --help"]
    )


def parse(module: str, arguments: Sequence[str], opened: Callable[..., "Source"] | None = None) -> Request:
    """Return what the arguments ask for: the recipe that `--config` names, for the data that is asked for, with changes.

    A recipe depends on the data, which depends on the arguments; so they are read twice.

    opened: what opens the data, given `data` and `held_out`; None: `train.data.sources.open_source`.

    Raises:
        InputError: an unknown recipe or field (the nearest is named), a value that a field cannot take, or no such data.
        SystemExit: after `--help` is printed.
    """
    from train.data.sources import open_source

    config, rest = _taken("--config", arguments)
    name = "vit_s16" if config is None else config
    if name not in RECIPES:
        hint = nearest(name, RECIPES)
        raise InputError(f"unknown recipe {name!r}{hint}; --list names all of them")
    first = _changed(module, name, RECIPES[name](DIGITS), rest)
    if name in FROM_WEIGHTS and first.init is None:
        raise InputError(f"--config {name} is for weights that are there: give --init FILE, hf://OWNER/NAME or timm:NAME")
    source = (opened or open_source)(first.data, first.held_out)
    known = Known(len(source.train), source.channels, source.size)
    recipe = _changed(module, name, RECIPES[name](known), rest)
    return Request(name, recipe, source, f"python -m {module} {shlex.join(_taken('--run', arguments)[1])}".strip())


def _changed(module: str, name: str, recipe: Recipe, rest: list[str]) -> Recipe:
    """The recipe with the fields that the arguments change."""
    import tyro

    about = (
        f"Train a Vision Transformer. The recipe is {name}; --config NAME takes another, --list names all of them.\n"
        "Every field below can be changed; its default is the recipe's, for the data asked for where no --help is.\n"
        "--dry-run does one step on one batch and all that belongs to it, and keeps nothing.\n"
        "--plan 64x80GiB tells what the run needs on 64 devices of 80 GiB, none of them here, and whether it fits;\n"
        "--plan 64x80GiB@989TFLOPs,40%,450GB/s,data=50GB/s also how long it takes: rates of computing at best, the\n"
        "share of it that is reached, and of sending along the mesh's axes. The data need not be here.\n\n"
        # Commands one below the other would be filled into one paragraph.
        + _doc(name).replace("\npython -m", "\n\npython -m")
    )
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            prog = f"python -m {module} [--config NAME]"
            changed = tyro.cli(Recipe, prog=prog, args=rest, default=recipe, description=about)
    except SystemExit as leaving:
        if leaving.code:
            raise InputError(_one_line(said.getvalue())) from None
        raise
    given = {argument.partition("=")[0].replace("_", "-") for argument in rest if argument.startswith("--")}
    model, own = changed.model, recipe.model.changes
    if changed.init is not None:  # the network is that of the weights
        if "--model.name" in given:
            raise InputError(
                "--model.name has no say beside --init, whose weights bring their network: leave one of them out"
            )
        own = tuple(change for change in own if change.startswith("regularisation."))
        model = model if "--model.image-size" in given else replace(model, image_size=None)
    told = model.changes if "--model.changes" in given else ()
    return replace(changed, model=replace(model, changes=(*own, *told)))


def _taken(flag: str, arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Take `FLAG VALUE` or `FLAG=VALUE` out of the arguments: its last value or None, and what is left."""
    value, rest = None, []
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, given = argument.partition("=")
        if name == flag:
            value = given if equals else next(remaining, "")
        else:
            rest.append(argument)
    return value, rest


def _doc(name: str) -> str:
    return cleandoc(RECIPES[name].__doc__ or "")


def _one_line(text: str) -> str:
    """Return what tyro says between the first two rules of its box; then come help, or the nearest option."""
    lines = [line.strip("│ ") for line in text.strip("\n").splitlines()[1:-1]]  # the box, or its title, is left out
    inside = dropwhile(_is_rule, lines)
    said = " ".join(takewhile(lambda line: not _is_rule(line) and not line.startswith("Got errors"), inside))
    said = re.sub(r"^Error parsing [\w.]+: ", "", " ".join(said.split())).rstrip(".")
    near = re.search(r"Perhaps you meant:\s+(--[\w.-]+)", "\n".join(lines))
    unknown = re.match(r"Unrecognized options: (--[\w.-]+)", said)
    ours = nearest(unknown[1], OURS) if unknown else ""
    return f"{said}{f'; did you mean {near[1]!r}?' if near else ours}; --help explains every field"


def _is_rule(line: str) -> bool:
    """Whether a line is drawn rather than written: tyro draws with dashes where a terminal knows no others."""
    return bool(line) and set(line) <= {"-", "─"}
