"""Classify images with a trained model: `python -m train.predict RUN_OR_FILE IMAGE...`; `--help` explains the options.

The imports here are fast; the work is imported after the arguments are parsed.
"""

import os
import sys
from typing import NoReturn

from parity.commands.parser import Parser, integer
from parity.commands.run_command import BAD_INPUT, run_command
from train.inference.arguments import NUM_VIEWS, add_arguments
from train.inference.twins import check_packages
from train.loop.process import keep_freed_memory


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status: 0; 2 for bad input, also if one image of many cannot be read."""

    def run() -> int:
        args = _parser().parse_args(arguments)
        check_packages(args.twin)
        from train.inference.prediction import predict

        return 0 if predict(args) else BAD_INPUT

    return run_command(run)


def command() -> NoReturn:
    """Run the command line of this process, and exit with its status."""
    keep_freed_memory()
    sys.exit(main())


def _parser() -> Parser:
    text = (
        "Print the predictions of a trained model for images, or write them to a file. Images that cannot be read are "
        "reported, and the others are predicted."
    )
    parser = Parser(prog="python -m train.predict", description=text, allow_abbrev=False)
    add_arguments(parser)
    text = "an image (JPEG, PNG, WebP, BMP, GIF or TIFF), a folder, a pattern such as 'photos/**/*.jpg', or @FILE, a list"
    parser.add_argument("images", metavar="IMAGE", nargs="+", help=text)
    text = "number of classes to print or write; by default 5"
    parser.add_argument("--top", type=integer(1, "a number of classes"), metavar="N", help=text)
    text = "names of the classes, one per line; by default those in RUN_OR_FILE, or numbers"
    parser.add_argument("--classes", type=os.path.expanduser, metavar="FILE", help=text)
    text = "write the predictions to a file instead of printing them: a .csv, .jsonl or .parquet file"
    parser.add_argument("--out", type=os.path.expanduser, metavar="FILE", help=text)
    text = "write the features that the head would get instead of predictions: an .npy or .parquet file"
    parser.add_argument("--features", type=os.path.expanduser, metavar="FILE", help=text)
    text = "average the predictions for several views: flip, the image and its mirror image; five-crop, centre and corners"
    parser.add_argument("--tta", choices=list(NUM_VIEWS), default="none", help=text)
    text = "write a picture of the images, each beside the attention map of the last block"
    parser.add_argument("--maps", type=os.path.expanduser, metavar="PATH.png", help=text)
    parser.add_argument("--force", action="store_true", help="replace the files to write if they exist")
    return parser


if __name__ == "__main__":
    command()
