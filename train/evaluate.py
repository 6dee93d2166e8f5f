"""Evaluate a model: `python -m train.evaluate RUN_OR_FILE --data SPEC`; `--help` explains the options.

The imports here are fast; the work is imported after the arguments are parsed.
"""

import os
import sys
from typing import NoReturn

from parity.commands.parser import Parser, integer, parse_seed
from parity.commands.run_command import run_command
from train.inference.arguments import add_arguments
from train.inference.scores import RESAMPLES
from train.inference.twins import check_packages
from train.loop.process import keep_freed_memory

METHODS = ("head", "knn", "linear", "few-shot")


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 for bad input."""

    def run() -> int:
        args = _parser().parse_args(arguments)
        check_packages(args.twin)
        from train.inference.evaluation import evaluate

        evaluate(args)
        return 0

    return run_command(run)


def command() -> NoReturn:
    """Run the command line of this process, and exit with its status."""
    keep_freed_memory()
    sys.exit(main())


def _parser() -> Parser:
    text = "Evaluate a model's own head on the held-out images, or simple models of its features of the training images."
    parser = Parser(prog="python -m train.evaluate", description=text, allow_abbrev=False)
    add_arguments(parser)
    text = "the data set, as the trainer's --data; by default that of the run"
    parser.add_argument("--data", metavar="SPEC", help=text)
    text = "the split, or the share of the training images, to evaluate on, as the trainer's --held-out"
    parser.add_argument("--held-out", type=_parse_split_or_fraction, metavar="SPLIT|SHARE", help=text)
    text = "what to predict; by default the task of the data, or on a run's own data the task of the run"
    parser.add_argument("--task", choices=("classes", "labels", "values"), help=text)
    text = (
        "head: the model's own outputs; knn: nearest neighbours (DINO); linear: logistic regression, or ridge for values "
        "(CLIP's protocol); few-shot: least squares on few images (big_vision); by default the one that --k or --shots is "
        "for; else head, if it predicts what the data has; else knn, or linear if the task is not classes"
    )
    parser.add_argument("--method", choices=METHODS, nargs="+", metavar="METHOD", help=text)
    text = "numbers of neighbours for knn; by default those of 10 20 100 200 for which there are training images"
    parser.add_argument("--k", type=integer(1, "a number of neighbours"), nargs="+", metavar="N", help=text)
    text = "training images per class for few-shot; by default 1 5 10 25"
    parser.add_argument("--shots", type=integer(1, "a number of images"), nargs="+", metavar="N", help=text)
    text = "resamples of the images from which intervals are computed; by default 1000; 0: no intervals"
    parser.add_argument("--resamples", type=integer(0, "a number of resamples"), default=RESAMPLES, metavar="N", help=text)
    text = "seed of the resamples, and of the three few-shot draws: N, N + 1, N + 2"
    parser.add_argument("--seed", type=parse_seed, default=0, metavar="N", help=text)
    text = "write scores, predictions, the confusion matrix and the worst mistakes of head into a folder"
    parser.add_argument("--out", type=os.path.expanduser, metavar="FOLDER", help=text)
    parser.add_argument("--force", action="store_true", help="replace the files of a report in FOLDER")
    return parser


def _parse_split_or_fraction(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


if __name__ == "__main__":
    command()
