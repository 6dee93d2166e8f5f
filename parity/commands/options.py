"""The options of each command of `python -m parity`."""

import argparse
import os
from collections.abc import Callable, Mapping

from parity.checkpoints import containers
from parity.commands.parser import Parser, add_format_file_option, add_key_options, integer, parse_seed


def build_parser(commands: Mapping[str, Callable[[argparse.Namespace], int]]) -> Parser:
    """Return the parser of the command line.

    Args:
        commands: the functions that run the commands, by name; their docstrings are the help of the commands.
    """
    parser = Parser(
        prog="python -m parity", description="Convert, inspect, check and diagnose ViT checkpoints, and compare models."
    )
    parsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for name, function in commands.items():
        text = function.__doc__
        sub = parsers.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.add_argument("--json", action="store_true", help="print one JSON object instead of text")
        if name in _OPTIONS:
            _OPTIONS[name](sub)
    return parser


def _add_source_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "source", metavar="SRC", help="a checkpoint file or folder, a run folder (its best weights), or hf://owner/name"
    )
    add_format_file_option(sub)
    _add_reading_options(sub, "SRC")


def _add_reading_options(sub: argparse.ArgumentParser, source: str) -> None:
    """Add the options that say how a checkpoint is read: --from, --set, --strip and --ignore.

    source: what the help calls the checkpoint, such as "SRC".
    """
    sub.add_argument("--from", dest="format", metavar="FORMAT", help=f"the format of {source}; by default it is detected")
    text = f"override config fields of {source}, such as norms.eps=1e-5 num_heads=6; repeatable"
    sub.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help=text)
    add_key_options(sub, source)


def _add_convert_options(sub: argparse.ArgumentParser) -> None:
    _add_source_options(sub)
    sub.add_argument(
        "target",
        type=os.path.expanduser,
        metavar="DST",
        help="the file to write, or the folder if DST ends with a slash or has no suffix",
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
    sub.add_argument("--table", type=os.path.expanduser, metavar="FILE", help=text)
    _add_surgery_options(sub.add_argument_group("surgery", "changes of the model; each one is printed"))


def _add_surgery_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--image-size", metavar="HxW", help="resample positions to another image size")
    group.add_argument("--patch-size", metavar="HxW", help="resize the patch projection with the pseudoinverse (FlexiViT)")
    group.add_argument(
        "--resampling", metavar="MODE", help="how positions are resampled; by default as in the model's family"
    )
    group.add_argument(
        "--in-channels", type=integer(1, "a number of channels"), metavar="N", help="change the number of input channels"
    )
    head = group.add_mutually_exclusive_group()
    head.add_argument("--drop-head", action="store_true", help="remove the classifier: the model returns features")
    head.add_argument(
        "--num-classes",
        type=integer(1, "a number of classes"),
        metavar="N",
        help="replace the classifier by a new one, initialized with seed 0",
    )
    group.add_argument("--learn-positions", action="store_true", help="write a fixed position table as a learned one")
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


def _add_inspect_options(sub: argparse.ArgumentParser) -> None:
    _add_source_options(sub)
    examine = sub.add_mutually_exclusive_group()
    text = "check for NaN, infinite, denormal and all-zero weights; default for checkpoints up to 512 MiB"
    examine.add_argument("--values", dest="values", action="store_true", default=None, help=text)
    examine.add_argument("--no-values", dest="values", action="store_false", help="read only headers")


def _add_check_options(sub: argparse.ArgumentParser) -> None:
    _add_source_options(sub)
    sub.add_argument(
        "--against", metavar="OTHER", help="a checkpoint in any format that must compute the same function as SRC"
    )
    text = "test instead whether the outputs of each twin depend on the batch, threads and devices; with --dtype and --seed"
    sub.add_argument("--invariance", action="store_true", help=text)
    text = "function: compare in float64; precision: also the rounding errors in --dtype; train: also training steps"
    sub.add_argument("--level", choices=("function", "precision", "train"), help=f"{text}; by default precision")
    text = "the lower precision; by default float32"
    sub.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help=text)
    sub.add_argument(
        "--steps",
        type=integer(1, "a number of optimizer steps"),
        metavar="N",
        help="number of optimizer steps for --level train; by default 50",
    )
    sub.add_argument("--no-gradients", action="store_true", help="compare only the forward pass")
    sub.add_argument(
        "--seed", type=parse_seed, metavar="N", default=0, help="seed of the images and the targets of the loss"
    )
    sub.add_argument("--as-is", action="store_true", help="keep the numerical settings of both frameworks, such as TF32")
    sub.add_argument(
        "--html",
        type=os.path.expanduser,
        metavar="FILE",
        help="write an HTML report with plots, attention maps and the environment, and its main plot as a PNG file",
    )


def _add_diagnose_options(sub: argparse.ArgumentParser) -> None:
    _add_source_options(sub)
    reference = sub.add_mutually_exclusive_group(required=True)
    reference.add_argument(
        "--logits", type=os.path.expanduser, metavar="FILE", help="an .npz file of images and their correct logits"
    )
    reference.add_argument("--against", metavar="OTHER", help="a correct checkpoint, in any format")
    sub.add_argument(
        "--pairs",
        type=integer(0, "a number of pairs"),
        metavar="N",
        help="number of pairs of causes to test; by default as many as are fast to test",
    )
    sub.add_argument("--seed", type=parse_seed, metavar="N", help="seed of the images for --against; by default 0")


def _add_assert_options(sub: argparse.ArgumentParser) -> None:
    text = "a function without arguments that returns a dict with the arguments of parity.assert_parity"
    sub.add_argument("function", metavar="MODULE:FUNCTION", help=text)
    text = "function: compare in float64; precision: also the rounding errors in float32; by default as in the dict"
    sub.add_argument("--level", choices=("function", "precision"), help=text)


def _add_golden_options(sub: argparse.ArgumentParser) -> None:
    add_format_file_option(sub)
    actions = sub.add_subparsers(dest="what", required=True, metavar="record | verify | table", parser_class=Parser)

    def action(name: str, text: str) -> argparse.ArgumentParser:
        action_parser: argparse.ArgumentParser = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
        # A default here would overwrite a --json that is given before the action.
        text = "print one JSON object instead of text"
        action_parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=text)
        return action_parser

    def add_reading_options(action_parser: argparse.ArgumentParser, source: str) -> None:
        _add_reading_options(action_parser, source)
        text = "a file that defines a format of your own; repeatable"
        action_parser.add_argument(
            "--format-file", action="append", default=argparse.SUPPRESS, type=os.path.expanduser, metavar="FILE", help=text
        )

    record = action("record", "compute a model with both twins, and write the values on which they agree to a golden file")
    record.add_argument("subject", metavar="MODEL", help="a named model, a JSON config, or a checkpoint")
    record.add_argument("file", type=os.path.expanduser, metavar="FILE", help="the golden file to write, an .npz")
    add_reading_options(record, "the checkpoint")
    record.add_argument(
        "--seed",
        type=parse_seed,
        metavar="N",
        default=0,
        help="seed of the images, the targets and the weights of a named model",
    )
    record.add_argument("--force", action="store_true", help="replace FILE if it is a golden file")
    verify = action("verify", "compute golden files again, and report the values that changed")
    verify.add_argument("files", type=os.path.expanduser, metavar="FILE", nargs="+", help="golden files")
    verify.add_argument("--weights", metavar="SRC", help="the checkpoint of which the golden file was recorded")
    add_reading_options(verify, "the checkpoint of --weights")
    verify.add_argument("--only", metavar="jax|torch", help="verify only this framework")
    verify.add_argument("--append", action="store_true", help="append the results to the golden file")
    table = action("table", "print the differences over library versions")
    table.add_argument("files", type=os.path.expanduser, metavar="FILE", nargs="+", help="golden files")


def _add_formats_options(sub: argparse.ArgumentParser) -> None:
    add_format_file_option(sub)
    text = (
        "print a format, such as timm or timm:eva, or that of a checkpoint, as a file that --format-file reads: a start "
        "for a format of your own"
    )
    sub.add_argument("--show", metavar="FORMAT", help=text)


_OPTIONS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    "convert": _add_convert_options,
    "inspect": _add_inspect_options,
    "check": _add_check_options,
    "diagnose": _add_diagnose_options,
    "assert": _add_assert_options,
    "golden": _add_golden_options,
    "formats": _add_formats_options,
}
