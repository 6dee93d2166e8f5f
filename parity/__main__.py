"""The command line: python -m parity convert | inspect | check | diagnose | golden | formats | models.

Exit codes: 0 the claim holds, 1 it does not, 2 bad input.
"""

import argparse
import re
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from parity.commands import checks, files
from parity.terminal import complain
from vit_spec import InputError, nearest

# What PyTorch and JAX say, with errors of no type that both have.
_NO_ROOM = re.compile("allocate memory|out of memory|RESOURCE_EXHAUSTED")


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are bad input as any other: one line, with the nearest option where one is unknown."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")

    def parse_known_args(self, *arguments: Any, **options: Any) -> Any:
        given, unknown = super().parse_known_args(*arguments, **options)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{nearest(unknown[0], self._option_string_actions)}")
        return given, unknown


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
            hint = nearest(arguments[0], COMMANDS) or f": give one of {', '.join(COMMANDS)}"
            raise InputError(f"unknown command {arguments[0]!r}{hint}")
        given = _parser().parse_args(arguments)
        return COMMANDS[given.command](given)
    except (InputError, OSError) as error:
        complain(error)
        return 2
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _NO_ROOM.search(str(error)):
            raise
        complain("this takes more memory than there is: give a smaller file, or use a machine with more")
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> Parser:
    parser = Parser(prog="python -m parity", description="Move ViT weights between formats, and compare the twins on them.")
    parsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)

    def command(name: str) -> argparse.ArgumentParser:
        text = COMMANDS[name].__doc__
        one: argparse.ArgumentParser = parsers.add_parser(name, help=text, description=text, allow_abbrev=False)
        one.add_argument("--json", action="store_true", help="print one JSON object, for machines")
        return one

    def source(one: argparse.ArgumentParser) -> None:
        one.add_argument("source", metavar="SRC", help="a file or folder of weights, a run folder, or hf://owner/name")
        one.add_argument("--from", dest="format", metavar="FORMAT", help="what SRC is; by default it is recognised")
        text = "set a field of the config that SRC does not tell, e.g. norms.eps=1e-5; again for others"
        one.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help=text)

    one = command("convert")
    source(one)
    one.add_argument("target", metavar="DST", help="the file to write, or with a slash at its end the folder")
    one.add_argument("--to", required=True, metavar="FORMAT", help="what to write; `formats` lists them")
    one.add_argument(
        "--container", metavar="KIND", help="safetensors, pth, npz, msgpack, orbax or dcp; by default as DST ends"
    )
    one.add_argument(
        "--dtype", metavar="TYPE", help="round to float16, bfloat16, float32 or float64; by default no bit changes"
    )
    one.add_argument("--shard", metavar="SIZE", default="5GB", help="largest file of a folder; by default 5GB")
    one.add_argument("--force", action="store_true", help="replace DST if it exists")
    _surgery(one.add_argument_group("surgery", "changes to the model; each is reported"))

    one = command("inspect")
    source(one)
    examine = one.add_mutually_exclusive_group()
    text = "look for NaN, infinite, denormal and all-zero weights; without either flag in files up to 512 MiB"
    examine.add_argument("--values", dest="values", action="store_true", default=None, help=text)
    examine.add_argument("--no-values", dest="values", action="store_false", help="read headers alone")

    one = command("check")
    source(one)
    one.add_argument("--against", metavar="OTHER", help="weights that must be the same function as SRC, in any format")
    _gates(one)

    one = command("diagnose")
    source(one)
    right = one.add_mutually_exclusive_group(required=True)
    right.add_argument("--logits", metavar="FILE", help="an .npz of images and of the logits that are right for them")
    right.add_argument("--against", metavar="OTHER", help="weights that are right, in any format")
    one.add_argument("--pairs", type=int, metavar="N", help="pairs of causes to try; by default as many as are cheap")
    one.add_argument("--seed", type=_seed, metavar="N", default=0, help="of the images for --against")

    _golden(command("golden"))
    command("formats")
    command("models")
    return parser


def _golden(one: argparse.ArgumentParser) -> None:
    actions = one.add_subparsers(dest="what", required=True, metavar="record | verify | table", parser_class=Parser)

    def action(name: str, text: str) -> argparse.ArgumentParser:
        found: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
        # Ahead of the action it counts as well: no default of its own.
        text = "print one JSON object, for machines"
        found.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=text)
        return found

    record = action("record", "write what both twins agree on")
    record.add_argument("subject", metavar="MODEL", help="a named model or a config in JSON, or a file of weights")
    record.add_argument("file", metavar="FILE", help="the golden file to write, an .npz")
    record.add_argument("--from", dest="format", metavar="FORMAT", help="what the weights are; by default recognised")
    record.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="set a field of their config")
    record.add_argument("--seed", type=_seed, metavar="N", default=0, help="of drawn weights, images and targets")
    record.add_argument("--force", action="store_true", help="replace FILE if it exists")
    verify = action("verify", "compute golden files again, and name what moved")
    verify.add_argument("files", metavar="FILE", nargs="+", help="golden files")
    verify.add_argument("--weights", metavar="SRC", help="the weights that the golden is of, where it does not draw them")
    verify.add_argument("--only", metavar="jax|torch", help="leave the other framework out")
    verify.add_argument("--append", action="store_true", help="keep what is found in the file, as one more record")
    table = action("table", "print the drift over versions")
    table.add_argument("files", metavar="FILE", nargs="+", help="golden files")


def _gates(one: argparse.ArgumentParser) -> None:
    text = "how much is asked: the same function in float64; equally near to it in a coarser type; the same training steps"
    one.add_argument("--level", choices=("function", "precision", "train"), help=f"{text}; by default precision")
    text = "the coarser type; by default float32"
    one.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help=text)
    one.add_argument("--steps", type=_positive, metavar="N", help="optimizer steps of --level train; by default 50")
    one.add_argument("--no-gradients", action="store_true", help="compare the forward pass alone")
    one.add_argument("--seed", type=_seed, metavar="N", default=0, help="of the images and of what the loss asks for")
    one.add_argument("--as-is", action="store_true", help="leave the settings of both frameworks as they are: TF32 and all")
    one.add_argument("--html", metavar="FILE", help="write a page with plots, attention maps and the environment")


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of steps: give at least 1")
    return int(text)


def _seed(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text):  # which numpy, PyTorch and JAX all take
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no seed: give a whole number from 0, of at most 18 digits")
    return int(text)


def _surgery(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--image-size", metavar="HxW", help="carry positions to another resolution")
    group.add_argument("--patch-size", metavar="HxW", help="resize the patch projection, by the pseudo-inverse (FlexiViT)")
    group.add_argument(
        "--resampling", metavar="MODE", help="how positions are carried; by default as the model's family does"
    )
    group.add_argument("--in-channels", type=int, metavar="N", help="another number of input channels")
    head = group.add_mutually_exclusive_group()
    head.add_argument("--drop-head", action="store_true", help="leave the classifier out: features")
    head.add_argument("--num-classes", type=int, metavar="N", help="a new classifier, drawn from seed 0")
    fold = group.add_mutually_exclusive_group()
    fold.add_argument("--fold-class-position", action="store_true", help="add the position of the class token to the token")
    fold.add_argument("--unfold-class-position", action="store_true", help="give the class token a position, of zeros")
    bias = group.add_mutually_exclusive_group()
    bias.add_argument("--add-key-bias", action="store_true", help="add a bias of keys, of zeros")
    bias.add_argument("--drop-key-bias", action="store_true", help="leave the bias of keys out, which no softmax sees")
    text = "change the weights as this cause of `diagnose` says, as it names it; again for others, ahead of the rest"
    group.add_argument("--mend", action="append", default=[], metavar="CAUSE", help=text)


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "convert": files.convert,
    "inspect": files.inspect,
    "check": checks.check,
    "diagnose": checks.diagnose,
    "golden": checks.golden,
    "formats": files.formats,
    "models": files.models,
}


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    """Leave as after an exception, so that what is half written is taken away."""
    raise SystemExit(128 + number)


def command() -> NoReturn:
    """Run the command line of this process, and end it."""
    signal.signal(signal.SIGTERM, _terminated)
    sys.exit(main())


if __name__ == "__main__":
    command()
