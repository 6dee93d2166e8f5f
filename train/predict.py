"""What a trained network says of images: `python -m train.predict RUN_OR_FILE IMAGE...`; `--help` explains every option.

What is imported here loads quickly; the framework follows when the arguments are understood.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from parity.__main__ import Parser
from parity.checkpoints.metadata import shortened
from parity.checkpoints.preprocessing import central
from parity.checkpoints.reading import existing
from parity.checkpoints.weights import Checkpoint
from parity.terminal import complain, note, say
from train.cli import BAD_INPUT, told
from train.data.batches import Batch, Feed
from train.data.sources import Examples, read_image
from train.inference.model import Frozen, add_arguments, gathered, named, network, pooled
from train.recipes import Task
from vit_spec import InputError, ViTConfig, bounded_json

TOGETHER = 8  # images shown at once: the attention weights of more would take much memory
_NAMES = 1 << 24  # bytes of a file of names; those of 21,843 classes take 0.5 MB
NAME = 20  # letters of a name that fit above an image

Said = list[tuple[str, float]]  # names of classes, labels or values, with their probability or the value


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 for bad input, be it one image of many."""
    return told(lambda: predict(_parser().parse_args(arguments)))


def predict(given: argparse.Namespace) -> int:
    """Show images to a trained network, and print what it takes them for; those that cannot be read are told of."""
    paths = [existing(image) for image in given.images]
    if given.maps:
        _writable(Path(given.maps))
    frozen = named(given)
    config = frozen.shown
    pooled(frozen.checkpoint)
    if not config.num_classes:
        raise InputError(f"{given.weights} has no head: python -m train.evaluate says what its features are worth")
    names = _names(Path(given.classes), config) if given.classes else frozen.names
    for line in _assumed(frozen.checkpoint):
        note(line)
    looked, seen, maps = network(frozen.checkpoint, given.twin), [], []

    def look(batch: Batch) -> Any:
        if given.maps:
            from train.loop.attention_maps import looked_at

            seen.append(batch.images)
            maps.append(looked_at(looked.attention(batch.images), config))
        return looked.outputs(batch.images)

    unread: dict[int, str] = {}
    outputs = gathered(_feed(paths, config, frozen, unread), look)
    said = {i: answers(frozen.task, names, outputs[i], given.top) for i in range(len(paths)) if i not in unread}
    for i, image in enumerate(given.images):
        if i in unread:
            complain(unread[i])
        else:
            _print(image, frozen.task, said[i], given.json)
    if given.maps and said:
        from train.loop.attention_maps import draw

        rows, titles = list(said), [_title(frozen.task, each) for each in said.values()]
        draw(Path(given.maps), np.concatenate(seen)[rows], np.concatenate(maps)[rows], titles)
        if not given.json:
            say(f"wrote {given.maps}")
    return BAD_INPUT if unread else 0


def _feed(paths: list[Path], config: ViTConfig, frozen: Frozen, unread: dict[int, str]) -> Feed:
    """Return the images, prepared as the model was trained to see them.

    unread: gets what is wrong with those that cannot be read, by number.
    """

    def read(i: int) -> Image.Image:
        try:
            return read_image(paths[i])
        except InputError as error:
            unread[i] = str(error)
            return Image.new("L", config.image_size[::-1])

    nothing = np.zeros(len(paths), np.int64)
    examples = Examples(read, nothing, [str(path) for path in paths])
    size, how = min(TOGETHER, len(paths)), frozen.preprocessing
    return Feed(examples, nothing.astype(np.int32), config, size, preprocessing=how)


def answers(task: Task, names: tuple[str, ...], output: Any, top: int) -> Said:
    """Return what an output says, (num_outputs,), each number as it is printed: either twin's to the last digit shown.

    classes: the `top` likeliest, by softmax.    labels: those more likely than not, by sigmoid.    values: all.
    """
    x = np.asarray(output, np.float64)
    if task == "values":
        return [(name, float(f"{value:.4g}")) for name, value in zip(names, x, strict=True)]
    if task == "classes":
        x = np.exp(x - x.max())
        chances = np.round(x / x.sum(), 4)
        chosen = np.argsort(-chances, kind="stable")[:top].tolist()
    else:
        chances = np.round(1 / (1 + np.exp(-np.clip(x, -500, 500))), 4)
        chosen = [i for i in np.argsort(-chances, kind="stable") if chances[i] > 0.5]
    return [(names[i], float(chances[i])) for i in chosen]


# What is printed ------------------------------------------------------------------------------------------------------


def _print(image: str, task: Task, said: Said, as_json: bool) -> None:
    if as_json:
        number = "value" if task == "values" else "probability"
        print(json.dumps({"image": image, task: [{"name": name, number: value} for name, value in said]}))
        return
    shown = [(shortened(name), value) for name, value in said]
    width = max((len(name) for name, _ in shown), default=0)
    say(image, *(f"  {name:{width}}  {_number(task, value)}" for name, value in shown))
    if not said:
        say("  no label above one half")


def _assumed(checkpoint: Checkpoint) -> Iterator[str]:
    """Say what changes the answers and was told by nothing."""
    if checkpoint.assumed:
        fields = ", ".join(f"{each.field}={each.value!r}" for each in checkpoint.assumed)
        yield f"note: the file does not tell {fields}: assumed; --set FIELD=VALUE says otherwise"
    if checkpoint.preprocessing is None:
        how = central(checkpoint.config.image_size)
        yield f"note: the file does not tell how images are prepared: assumed, {how}"


def _number(task: Task, value: float) -> str:
    return f"{value:.4g}" if task == "values" else f"{value:7.2%}"


def _title(task: Task, said: Said) -> str:
    """The first answer in a line that fits above an image."""
    if not said:
        return "no label"
    name, value = said[0]
    return f"{name if len(name) <= NAME else f'{name[: NAME - 1]}…'}  {_number(task, value).strip()}"


# What is asked --------------------------------------------------------------------------------------------------------


def _names(path: Path, config: ViTConfig) -> tuple[str, ...]:
    """Read the names of the classes, one a line."""
    try:
        names = tuple(bounded_json.read_bytes(path, longest=_NAMES).decode().splitlines())
    except (OSError, ValueError) as error:  # of bytes that are no text, too
        raise InputError(f"{path} cannot be read ({error}): give a text file with a class a line") from None
    if len(names) != config.num_classes:
        raise InputError(
            f"{path} has {len(names)} lines, and the network {config.num_classes} classes: give one line a class"
        )
    return names


def _writable(path: Path) -> None:
    if path.suffix.lower() != ".png":
        raise InputError(f"--maps {path} is a PNG: let its name end in .png")
    if not path.parent.is_dir():
        raise InputError(f"--maps {path} has no folder to lie in: make {path.parent} first")


def _parser() -> Parser:
    parser = Parser(prog="python -m train.predict", description=predict.__doc__, allow_abbrev=False)
    add_arguments(parser)
    parser.add_argument("images", metavar="IMAGE", nargs="+", help="an image file: JPEG, PNG, WebP, BMP, GIF or TIFF")
    parser.add_argument("--top", type=_positive, default=5, metavar="N", help="classes to name; by default 5")
    text = "names of the classes, one a line; by default those of the weights, or their numbers"
    parser.add_argument("--classes", metavar="FILE", help=text)
    text = "write a picture of the images, each beside the last block's attention"
    parser.add_argument("--maps", metavar="PATH.png", help=text)
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of classes: give at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
