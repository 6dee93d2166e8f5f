"""The command line: python -m parity convert | inspect | check | diagnose | assert | golden | formats | models.

Exit codes: 0 success, or the check passed; 1 the check failed; 2 invalid input; 130 interrupted; 143 ended by SIGTERM.
"""

import argparse
import re
import signal
import sys
from collections.abc import Callable
from itertools import takewhile
from types import FrameType
from typing import Any, NoReturn

from parity.checkpoints import containers
from parity.checkpoints.config_overrides import split_overrides
from parity.checkpoints.format_file import read_format
from parity.checkpoints.formats import registered
from parity.commands import checks, files
from parity.terminal import print_error
from vit_spec import InputError, nearest

# PyTorch and JAX raise different types of error, so out-of-memory errors are recognized by their message.
_OUT_OF_MEMORY = re.compile("allocate memory|out of memory|RESOURCE_EXHAUSTED")


class Parser(argparse.ArgumentParser):
    """An argument parser that raises InputError with a one-line message, which suggests a similar option."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        arguments, known = split_overrides(list(sys.argv[1:] if args is None else args)), self._option_string_actions
        try:
            args, unknown = super().parse_known_args(arguments, namespace)
        except InputError:
            if self._subparsers is not None:  # the error is that of a command
                raise
            # A required option that is misspelt is missing, which argparse says first.
            before = takewhile(lambda argument: argument != "--", arguments)
            flags = (argument.partition("=")[0] for argument in before if argument.startswith("--"))
            unknown = [flag for flag in flags if flag not in known and nearest(flag, known)]
            if not unknown:
                raise
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{nearest(unknown[0], known)}")
        # An empty path would mean the working folder; a shell gives one for a variable that is not set.
        for action in self._actions:
            value = getattr(args, action.dest, None)
            if value == "" or (isinstance(value, list) and "" in value):
                self.error(f"{' '.join(action.option_strings) or action.metavar} is empty: give a path or another value")
        return args, unknown


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        arguments: the command line without the program name; None means the arguments of this process.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
            hint = nearest(arguments[0], COMMANDS) or f": give one of {', '.join(COMMANDS)}"
            raise InputError(f"unknown command {arguments[0]!r}{hint}")
        args = _build_parser().parse_args(arguments)
        with registered(*map(read_format, getattr(args, "format_file", ()))):
            return COMMANDS[args.command](args)
    except (InputError, OSError) as error:
        print_error(error)
        return 2
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _OUT_OF_MEMORY.search(str(error)):
            raise
        print_error("not enough memory: give a smaller file, or use a machine with more memory")
        return 2
    except KeyboardInterrupt:
        return 130


def _build_parser() -> Parser:
    parser = Parser(
        prog="python -m parity", description="Convert, inspect, check and diagnose ViT checkpoints, and compare models."
    )
    parsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    def command(name: str) -> argparse.ArgumentParser:
        text = COMMANDS[name].__doc__
        sub: argparse.ArgumentParser = parsers.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.add_argument("--json", action="store_true", help="print one JSON object instead of text")
        return sub

    def source(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("source", metavar="SRC", help="a checkpoint file or folder, a run folder, or hf://owner/name")
        sub.add_argument("--from", dest="format", metavar="FORMAT", help="the format of SRC; by default it is detected")
        add_format_file_option(sub)
        text = "override config fields of SRC, such as norms.eps=1e-5 num_heads=6; repeatable"
        sub.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help=text)
        add_key_options(sub, "SRC")

    sub = command("convert")
    source(sub)
    sub.add_argument(
        "target", metavar="DST", help="the file to write, or the folder if DST ends with a slash or has no suffix"
    )
    sub.add_argument("--to", required=True, metavar="FORMAT", help="the format to write; `formats` lists all")
    *kinds, last = containers.names()
    text = f"{', '.join(kinds)} or {last}; by default, the suffix of DST decides"
    sub.add_argument("--container", metavar="KIND", help=text)
    sub.add_argument(
        "--dtype",
        metavar="TYPE",
        help="convert weights to float16, bfloat16, float32 or float64; by default they keep their dtype",
    )
    sub.add_argument(
        "--shard",
        metavar="SIZE",
        help="maximum size of each file in a folder, such as 500MB; by default 5GB, except for timm, which opens one file",
    )
    sub.add_argument("--force", action="store_true", help="replace DST if it exists")
    text = "the class that wrote SRC, in PyTorch or Flax: it is run to find and prove the meaning of its parameters"
    sub.add_argument("--like", metavar="MODULE:CLASS", help=f"{text}; with arguments, 'models:ViT(depth=6)'")
    text = "where --like writes the table of the class, which --format-file reads; by default beside DST, as NAME.table.txt"
    sub.add_argument("--table", metavar="FILE", help=text)
    _add_surgery_options(sub.add_argument_group("surgery", "changes of the model; each one is printed"))

    sub = command("inspect")
    source(sub)
    examine = sub.add_mutually_exclusive_group()
    text = "check for NaN, infinite, denormal and all-zero weights; default for checkpoints up to 512 MiB"
    examine.add_argument("--values", dest="values", action="store_true", default=None, help=text)
    examine.add_argument("--no-values", dest="values", action="store_false", help="read only headers")

    sub = command("check")
    source(sub)
    sub.add_argument(
        "--against", metavar="OTHER", help="a checkpoint in any format that must compute the same function as SRC"
    )
    text = "test instead whether the outputs of each twin depend on the batch, threads and devices; with --dtype and --seed"
    sub.add_argument("--invariance", action="store_true", help=text)
    _add_check_options(sub)

    sub = command("diagnose")
    source(sub)
    reference = sub.add_mutually_exclusive_group(required=True)
    reference.add_argument("--logits", metavar="FILE", help="an .npz file of images and their correct logits")
    reference.add_argument("--against", metavar="OTHER", help="a correct checkpoint, in any format")
    sub.add_argument(
        "--pairs", type=int, metavar="N", help="number of pairs of causes to test; by default as many as are fast to test"
    )
    sub.add_argument("--seed", type=_parse_seed, metavar="N", help="seed of the images for --against; by default 0")

    sub = command("assert")
    text = "a function without arguments that returns a dict with the arguments of parity.assert_parity"
    sub.add_argument("function", metavar="MODULE:FUNCTION", help=text)
    text = "function: compare in float64; precision: also the rounding errors in float32; by default as in the dict"
    sub.add_argument("--level", choices=("function", "precision"), help=text)

    sub = command("golden")
    add_format_file_option(sub)
    _add_golden_actions(sub)
    sub = command("formats")
    add_format_file_option(sub)
    text = (
        "print a format, such as timm or timm:eva, or that of a checkpoint, as a file that --format-file reads: a start "
        "for a format of your own"
    )
    sub.add_argument("--show", metavar="FORMAT", help=text)
    command("models")
    return parser


def add_format_file_option(parser: argparse.ArgumentParser) -> None:
    """Add the option --format-file."""
    text = "a file that defines a format of your own, whose name can then be used like any other; repeatable"
    parser.add_argument("--format-file", action="append", default=[], metavar="FILE", help=text)


def add_key_options(parser: argparse.ArgumentParser, source: str) -> None:
    """Add the options that say which keys of a checkpoint are its model's: --strip and --ignore.

    source: what the help calls the checkpoint, such as "SRC".
    """
    text = f"the beginning of the model's keys in {source}, such as net.vit., if it is not a known wrapper"
    parser.add_argument("--strip", metavar="PREFIX", help=text)
    text = f"ignore the keys of {source} that match this regular expression as a whole, and are not parameters; repeatable"
    parser.add_argument("--ignore", action="append", default=[], metavar="REGEX", help=text)


def _add_golden_actions(sub: argparse.ArgumentParser) -> None:
    actions = sub.add_subparsers(dest="what", required=True, metavar="record | verify | table", parser_class=Parser)

    def action(name: str, text: str) -> argparse.ArgumentParser:
        action_parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
        # A default here would overwrite a --json that is given before the action.
        text = "print one JSON object instead of text"
        action_parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=text)
        return action_parser

    record = action("record", "compute a model with both twins, and write the values on which they agree to a golden file")
    record.add_argument("subject", metavar="MODEL", help="a named model, a JSON config, or a checkpoint")
    record.add_argument("file", metavar="FILE", help="the golden file to write, an .npz")
    record.add_argument(
        "--from", dest="format", metavar="FORMAT", help="the format of the checkpoint; by default it is detected"
    )
    record.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="override config fields of the checkpoint; repeatable",
    )
    add_key_options(record, "the checkpoint")
    text = "a file that defines a format of your own; repeatable"
    record.add_argument("--format-file", action="append", default=argparse.SUPPRESS, metavar="FILE", help=text)
    record.add_argument(
        "--seed",
        type=_parse_seed,
        metavar="N",
        default=0,
        help="seed of the images, the targets and the weights of a named model",
    )
    record.add_argument("--force", action="store_true", help="replace FILE if it exists")
    verify = action("verify", "compute golden files again, and report the values that changed")
    verify.add_argument("files", metavar="FILE", nargs="+", help="golden files")
    verify.add_argument("--weights", metavar="SRC", help="the checkpoint of which the golden file was recorded")
    verify.add_argument("--only", metavar="jax|torch", help="verify only this framework")
    verify.add_argument("--append", action="store_true", help="append the results to the golden file")
    table = action("table", "print the differences over library versions")
    table.add_argument("files", metavar="FILE", nargs="+", help="golden files")


def _add_check_options(sub: argparse.ArgumentParser) -> None:
    text = "function: compare in float64; precision: also the rounding errors in --dtype; train: also training steps"
    sub.add_argument("--level", choices=("function", "precision", "train"), help=f"{text}; by default precision")
    text = "the lower precision; by default float32"
    sub.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help=text)
    sub.add_argument(
        "--steps", type=_parse_steps, metavar="N", help="number of optimizer steps for --level train; by default 50"
    )
    sub.add_argument("--no-gradients", action="store_true", help="compare only the forward pass")
    sub.add_argument(
        "--seed", type=_parse_seed, metavar="N", default=0, help="seed of the images and the targets of the loss"
    )
    sub.add_argument("--as-is", action="store_true", help="keep the numerical settings of both frameworks, such as TF32")
    sub.add_argument(
        "--html",
        metavar="FILE",
        help="write an HTML report with plots, attention maps and the environment, and its main plot as a PNG file",
    )


def _parse_steps(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a positive integer: give the number of optimizer steps, at least 1"
        )
    return int(text)


def _parse_seed(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text):  # numpy, PyTorch and JAX all accept these
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is not a valid seed: give an integer of at least 0, with at most 18 digits"
        )
    return int(text)


def _add_surgery_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--image-size", metavar="HxW", help="resample positions to another image size")
    group.add_argument("--patch-size", metavar="HxW", help="resize the patch projection with the pseudoinverse (FlexiViT)")
    group.add_argument(
        "--resampling", metavar="MODE", help="how positions are resampled; by default as in the model's family"
    )
    group.add_argument("--in-channels", type=int, metavar="N", help="change the number of input channels")
    head = group.add_mutually_exclusive_group()
    head.add_argument("--drop-head", action="store_true", help="remove the classifier: the model returns features")
    head.add_argument(
        "--num-classes", type=int, metavar="N", help="replace the classifier by a new one, initialized with seed 0"
    )
    fold = group.add_mutually_exclusive_group()
    fold.add_argument(
        "--fold-class-position", action="store_true", help="add the position of the class token to the token itself"
    )
    fold.add_argument("--unfold-class-position", action="store_true", help="give the class token a position of zeros")
    bias = group.add_mutually_exclusive_group()
    bias.add_argument("--add-key-bias", action="store_true", help="add a key bias of zeros")
    bias.add_argument("--drop-key-bias", action="store_true", help="remove the key bias, which does not change the softmax")
    text = "repair the weights for this cause that `diagnose` reported, before all other changes; repeatable"
    group.add_argument("--mend", action="append", default=[], metavar="CAUSE", help=text)


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "convert": files.convert,
    "inspect": files.inspect,
    "check": checks.check,
    "diagnose": checks.diagnose,
    "assert": checks.assert_pair,
    "golden": checks.golden,
    "formats": files.formats,
    "models": files.models,
}


def _exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    """Exit by an exception, so that partially written files are removed."""
    raise SystemExit(128 + number)


def command() -> NoReturn:
    """Run the command line of this process and exit with its exit code; the entry point of `vit-parity`."""
    signal.signal(signal.SIGTERM, _exit_on_signal)
    sys.exit(main())


if __name__ == "__main__":
    command()
