"""The command line of a trainer: a named recipe with overrides, and errors in one line.

The imports here are fast; a framework is imported when a run starts.
"""

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parity.commands.parser import Parser
from parity.commands.run_command import run_command
from train.loop.request import Request
from train.recipes import RECIPES, REQUIRE_INIT, DataInfo, Recipe
from train.recipes.fields import FieldError
from train.recipes.flags import HelpFormatter, add_flags, apply_flags
from vit_spec import InputError, nearest
from vit_spec.config import FIELDS

if TYPE_CHECKING:
    from train.data.sources import Dataset

FAILED = 1  # the exit status of Python for an exception that nothing catches
DEFAULT_RECIPE = "vit_s16"
# The names that other trainers give to flags that have no similar name here -> what to give instead.
_OF_OTHER_TRAINERS = {
    **dict.fromkeys(("steps", "max-steps", "num-steps", "total-steps", "duration"), "--epochs, as in --epochs 1000steps"),
    **dict.fromkeys(("output", "output-dir", "out-dir", "logdir", "workdir", "checkpoint-dir"), "--run FOLDER"),
    **dict.fromkeys(("bs", "per-device-train-batch-size"), "--batch-size, the images of all devices"),
    **dict.fromkeys(("learning-rate", "base-lr"), "--optimizer.lr"),
    "opt": "--optimizer.name",
    "wd": "--optimizer.weight-decay",
    **dict.fromkeys(("amp", "bf16", "fp16", "precision", "mixed-precision"), "--dtype bfloat16"),
    **dict.fromkeys(("grad-checkpointing", "gradient-checkpointing"), "--remat full"),
    **dict.fromkeys(("gpus", "devices"), "--mesh, as in --mesh data=2"),
    **dict.fromkeys(("pretrained", "weights", "checkpoint", "load"), "--init WEIGHTS, or --resume RUN"),
    "num-classes": "--data, whose classes the model gets",
}
DIGITS = DataInfo(images=1438, channels=1, size=(8, 8))  # the default data set


def main(module: str, fit: Callable[[Request], int], arguments: Sequence[str]) -> int:
    """Run `python -m MODULE ARGUMENTS` and return its exit status: that of `fit`, which trains, or 2 for bad input."""
    arguments = [_hyphenated(argument) for argument in arguments]

    def run() -> int:
        if "--list" in arguments:
            if others := [argument for argument in arguments if argument != "--list"]:
                raise InputError(f"--list lists the recipes and does nothing else: leave {' '.join(others)} out")
            print(list_recipes())
            return 0
        devices, others = _take_flag("--plan", arguments)
        if devices is not None:
            _check_alone("--plan", others)
            from train import plan

            return plan.print_plan(module, parse_request(module, others, plan.open_or_assume_imagenet), devices)
        table, others = _take_flag("--check-data", arguments)
        if table is not None:
            _check_alone("--check-data", others)
            from train.data_check import check_data

            request = parse_request(module, others)
            return check_data(request.source, request.recipe, Path(os.path.expanduser(table)), module.rpartition(".")[2])
        request = parse_request(module, [argument for argument in arguments if argument != "--dry-run"])
        return fit(request._replace(dry_run="--dry-run" in arguments))

    def run_and_name_flags() -> int:
        try:
            return run()
        except FieldError as error:
            raise error.of_flag() from None

    reads_only = {"--list", "--plan", "--check-data"} & {argument.partition("=")[0] for argument in arguments}
    return run_command(run_and_name_flags, framework=None if reads_only else module.rpartition(".")[2])


def _check_alone(flag: str, others: Sequence[str]) -> None:
    """Raise InputError if another argument asks for something else in the place of training, as `flag` does."""
    for other in ("--check-data", "--dry-run"):
        if other in (argument.partition("=")[0] for argument in others):
            raise InputError(f"{flag} and {other} exclude each other: leave out one of them")


def run_trainer(module: str, fit: Callable[[Request], int]) -> int:
    """Run the command line of this process and return its exit status: as `main`, and FAILED for an unexpected error.

    The error is printed with its traceback here, and not when the interpreter exits: in a run of several processes, the
    framework's cleanup would come first, and wait for the other processes.
    """
    try:
        return main(module, fit, sys.argv[1:])
    except Exception:
        sys.excepthook(*sys.exc_info())
        return FAILED


def leave(status: int, *, without_cleanup: bool) -> None:
    """Exit the process; without_cleanup: at once, without what libraries do at exit."""
    if without_cleanup:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def list_recipes() -> str:
    """Return a text with every recipe and the first line of its docstring, and the command that evaluates features."""
    width = max(map(len, RECIPES))
    rows = [f"{name:{width}}  {_docstring(name).splitlines()[0]}" for name in RECIPES]
    return "\n".join(
        [*rows, "", "Nearest neighbours, linear and few-shot classifiers on features: python -m train.evaluate --help"]
    )


def parse_request(module: str, arguments: Sequence[str], open_data: Callable[..., "Dataset"] | None = None) -> Request:
    """Parse the arguments: the recipe that `--config` names, for the data set of `--data`, with overrides.

    The arguments are parsed twice: the recipe's defaults depend on the data set, which the arguments name.  The recipe is
    that of a run with `--resume`, and with `--run` of its folder if there is no `--config`.

    open_data: a function that opens a data set from `data` and `held_out`; None: `train.data.sources.open_dataset`.

    Raises:
        InputError: an unknown recipe or field (the message names the nearest), an invalid value, missing data, or a folder
            of `--resume` that holds no run.
        SystemExit: after printing `--help`.
    """
    from train.loop.saved_run import is_run, read_run_recipe

    def open_source(recipe: Recipe) -> "Dataset":
        from train.data.sources import open_dataset  # its packages may be missing, and --help needs none

        return (open_data or open_dataset)(recipe.data, recipe.held_out)

    resumed, arguments = _take_flag("--resume", arguments)
    config, rest = _take_flag("--config", arguments)
    run = _take_flag("--run", rest)[0]
    folder = Path(os.path.expanduser(place)) if (place := resumed or run) else None
    if resumed is not None and (other := "--config" if config is not None else "--run" if run is not None else None):
        raise InputError(f"--resume {resumed} continues that run, with its recipe and folder: leave {other} out")
    if folder and (resumed is not None or (config is None and is_run(folder))):
        name, recipe = read_run_recipe(folder)
        recipe = _with_overrides(module, name, recipe, rest, is_of_run=True)
        source = open_source(recipe)
        command = f"python -m {module} {shlex.join(_take_flag('--run', arguments)[1])}".strip()
        return Request(name, recipe, source, command, may_change=resumed is not None)
    name, note = DEFAULT_RECIPE if config is None else config, ""
    if config is None and folder and not (folder / "config.json").exists():
        # As typed to resume: the run's folder may have been moved.
        note = (
            f"{run} holds no run (there is no config.json of one): this is a new run of {name}, the default recipe; "
            "--config NAME selects another"
        )
    if name not in RECIPES:
        hint = nearest(name, RECIPES)
        raise InputError(f"unknown recipe {name!r}{hint}; --list lists all of them")
    first = _with_overrides(module, name, RECIPES[name](DIGITS), rest)
    if name in REQUIRE_INIT and first.init is None:
        raise InputError(f"--config {name} needs initial weights: give --init FILE, hf://OWNER/NAME or timm:NAME")
    source = open_source(first)
    known = DataInfo(len(source.train), source.channels, source.size)
    recipe = _with_overrides(module, name, RECIPES[name](known), rest)
    command = f"python -m {module} {shlex.join(_take_flag('--run', arguments)[1])}".strip()
    return Request(name, recipe, source, command, note=note)


def _with_overrides(module: str, name: str, recipe: Recipe, arguments: list[str], *, is_of_run: bool = False) -> Recipe:
    """Return the recipe with the fields that the arguments override.

    Values of `--model.changes` are added to those of the recipe.

    is_of_run: whether the recipe is that of a run, which has its model; values of `--model.changes` may be given again.
    """
    given = vars(_make_parser(module, name, recipe).parse_args(arguments))
    changed = apply_flags(recipe, given)
    if changed.run is not None:
        changed = replace(changed, run=os.path.expanduser(changed.run))
    _check_combinations(given, changed, is_of_run=is_of_run)
    model, own_changes = changed.model, recipe.model.changes
    more_changes = model.changes if "model.changes" in given else ()
    if is_of_run:
        more_changes = tuple(change for change in more_changes if change not in own_changes)
    elif changed.init is not None:  # the model is that of the weights
        own_changes = tuple(change for change in own_changes if change.startswith("regularisation."))
        model = model if "model.image_size" in given else replace(model, image_size=None)
    return replace(changed, model=replace(model, changes=(*own_changes, *more_changes)))


class _TrainerParser(Parser):
    """A parser that also suggests what fields of the model, and flags of other trainers, are called here."""

    def hint(self, flag: str) -> str:
        word = flag.removeprefix("--").partition("=")[0]
        if found := _OF_OTHER_TRAINERS.get(word):
            return f"; give {found}"
        field = word.removeprefix("model.").replace("-", "_")
        of_model = next((name for name in FIELDS if field in (name, name.rpartition(".")[2])), None)
        is_flag = word in {option.rpartition(".")[2].removeprefix("--") for option in self._option_string_actions}
        return super().hint(flag) if is_flag or of_model is None else f"; give --model.changes {of_model}=VALUE"


def _make_parser(module: str, name: str, recipe: Recipe) -> Parser:
    """Return the parser of a trainer's flags, with a recipe's values as defaults."""
    parser = _TrainerParser(
        prog=f"python -m {module}",
        usage="%(prog)s [--config NAME] [OPTIONS]",
        description=_docstring(name).replace("python -m train.jax ", f"python -m {module} "),
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    command = parser.add_argument_group(
        "command", "Defaults of the options below depend on the data; those shown are for the digits."
    )
    # `main` and `parse_request` have removed these flags; here they are for the help, and for suggestions of similar flags.
    command.add_argument("--config", metavar="NAME", help=f"the recipe; here {name}")
    text = "resume the run in FOLDER, also one of the other trainer, with its recipe; --epochs, --patience and rates may "
    text += "change, see docs/guides/resume.md"
    command.add_argument("--resume", metavar="FOLDER", help=text)
    command.add_argument("--list", action="store_true", help="list all recipes")
    command.add_argument(
        "--dry-run", action="store_true", help="run one step, one evaluation on one batch and one save, and keep nothing"
    )
    text = "read all images, and write those that are unreadable, odd, the same or similar to a table; nothing is trained"
    command.add_argument("--check-data", metavar="FILE.csv", help=text)
    command.add_argument(
        "--plan",
        metavar="DEVICES",
        help="estimate what the run needs, and whether it fits, on devices such as 64x80GiB; "
        "64x80GiB@989TFLOPs,40%%,450GB/s,data=50GB/s also estimates the time, from the peak FLOP/s of a device, the "
        "fraction of it that is reached, and the bandwidth along mesh axes; neither devices nor data need exist",
    )
    add_flags(parser, recipe)
    return parser


def _check_combinations(given: dict[str, Any], changed: Recipe, *, is_of_run: bool) -> None:
    """Raise InputError for flags that need or exclude each other.

    given: the values of the flags that were typed, by field.
    changed: the recipe with these values.
    is_of_run: see `_with_overrides`.
    """
    if given.get("model.changes") == []:
        raise InputError("--model.changes has no values: give FIELD=VALUE, such as regularisation.drop_path=0.1")
    if changed.init_set and changed.init is None:
        raise InputError("--init-set needs --init, whose file it describes: give both, or leave it out")
    of_teacher = [name for name in given if name == "teacher_set" or name.startswith("distillation")]
    if of_teacher and changed.teacher is None:
        raise InputError(f"--{of_teacher[0].replace('_', '-')} needs --teacher WEIGHTS: give both, or leave it out")
    if "distillation_temperature" in given and changed.distillation == "hard":
        raise InputError("--distillation-temperature is for --distillation soft: give both, or leave it out")
    if changed.init is not None and not is_of_run and "model.name" in given:
        raise InputError("--model.name cannot be used with --init, whose weights have their own model: leave out one")


def _take_flag(flag: str, arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """Remove `FLAG VALUE` or `FLAG=VALUE` from the arguments; return its last value or None, and the other arguments.

    Raises:
        InputError: the flag has no value.
    """
    value, rest = None, []
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, text = argument.partition("=")
        if name == flag:
            value = text if equals else next(remaining, "")
            if not value or value.startswith("--"):
                raise InputError(f"{flag} needs a value; --help explains it")
        else:
            rest.append(argument)
    return value, rest


def _hyphenated(argument: str) -> str:
    """Return a flag with hyphens for underscores, so that --batch_size is --batch-size; any other argument unchanged."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument


def _docstring(name: str) -> str:
    return cleandoc(RECIPES[name].__doc__ or "") if name in RECIPES else "Resume a run."
