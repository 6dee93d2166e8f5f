"""Arguments of the commands that apply a trained model.

The imports here are fast, and need no package of an extra.
"""

import argparse
from typing import Literal

from parity.commands.parser import add_format_file_option, add_key_options

TWINS = ("jax", "torch")  # by default the first one that is installed

Views = Literal["none", "flip", "five-crop"]
NUM_VIEWS: dict[Views, int] = {"none": 1, "flip": 2, "five-crop": 5}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `load_from_arguments` and `load_predictor` need."""
    text = "a run's folder (its best weights), a file or folder of weights, or hf://owner/name"
    parser.add_argument("weights", metavar="RUN_OR_FILE", help=text)
    parser.add_argument("--from", dest="format", metavar="FORMAT", help="format of RUN_OR_FILE; by default it is detected")
    add_format_file_option(parser)
    text = "override config fields of RUN_OR_FILE, such as norms.eps=1e-5 num_heads=6; repeatable"
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help=text)
    add_key_options(parser, "RUN_OR_FILE")
    parser.add_argument("--twin", choices=TWINS, help="the framework; by default the one that is installed, jax first")
    parser.add_argument("--json", action="store_true", help="print a JSON object per line")
