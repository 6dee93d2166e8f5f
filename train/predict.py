"""Classify images with a trained model: `python -m train.predict RUN_OR_FILE IMAGE...`; `--help` explains the options.

The imports here are fast; a framework is imported after the arguments are checked.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from parity.__main__ import Parser
from parity.checkpoints.atomic_write import check_replaceable
from parity.checkpoints.metadata import shorten
from parity.checkpoints.preprocessing import center_crop
from parity.checkpoints.reading import resolve_path
from parity.terminal import print_error, print_lines, print_note
from train.cli import BAD_INPUT, run_command
from train.data.batches import Batch, DataLoader
from train.data.sources import Examples, read_image
from train.inference.model import (
    TrainedModel,
    add_arguments,
    load_from_arguments,
    load_predictor,
    predict_all,
    require_pooling,
)
from train.recipes import Task
from vit_spec import InputError, ViTConfig, bounded_json

BATCH_SIZE = 8  # attention weights of larger batches need much memory
MAX_NAMES_BYTES = 1 << 24  # of a file of class names: 21,843 names take 0.5 MB
MAX_NAME_LENGTH = 20  # characters of a name that fit above an image

Predictions = list[tuple[str, float]]  # names of classes, labels or values, each with its probability or value


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status: 0; 2 for bad input, also if one image of many cannot be read."""
    return run_command(lambda: predict(_parser().parse_args(arguments)))


def predict(args: argparse.Namespace) -> int:
    """Print the predictions of a trained model for images.  Report images that cannot be read, and predict the others."""
    paths = [resolve_path(image) for image in args.images]
    if args.maps:
        inputs = [*paths, Path(args.weights), *([Path(args.classes)] if args.classes else [])]
        _check_maps_path(Path(args.maps), inputs, force=args.force)
    model = load_from_arguments(args)
    config = model.input_config
    require_pooling(model.checkpoint)
    if not config.num_classes:
        raise InputError(f"{args.weights} has no head: evaluate its features with python -m train.evaluate")
    names = _read_class_names(Path(args.classes), config) if args.classes else model.names
    for line in _notes(model):
        print_note(line)
    predictor, shown_images, maps = load_predictor(model.checkpoint, args.twin), [], []

    def predict_batch(batch: Batch) -> Any:
        if args.maps:
            from train.loop.attention_maps import patch_attention

            shown_images.append(batch.images)
            maps.append(patch_attention(predictor.attention_maps(batch.images), config))
        return predictor.predict(batch.images)

    errors: dict[int, str] = {}
    outputs = predict_all(_data_loader(paths, config, model, errors), predict_batch)
    predictions = {
        i: named_predictions(model.task, names, outputs[i], args.top) for i in range(len(paths)) if i not in errors
    }
    for i, image in enumerate(args.images):
        if i in errors:
            print_error(errors[i])
        else:
            _print_predictions(image, model.task, predictions[i], args.json)
    if args.maps and predictions:
        from train.loop.attention_maps import draw_attention_maps

        rows, titles = list(predictions), [_title(model.task, each) for each in predictions.values()]
        pixels, attention = np.concatenate(shown_images)[rows], np.concatenate(maps)[rows]
        draw_attention_maps(Path(args.maps), pixels, attention, titles, force=args.force)
        if not args.json:
            print_lines(f"wrote {args.maps}")
    return BAD_INPUT if errors else 0


def _data_loader(paths: list[Path], config: ViTConfig, model: TrainedModel, errors: dict[int, str]) -> DataLoader:
    """Return a loader of the images with the model's preprocessing.

    errors: the messages about images that cannot be read are written here, by the index of the image.
    """

    def read(i: int) -> Image.Image:
        try:
            return read_image(paths[i])
        except InputError as error:
            errors[i] = str(error)
            return Image.new("L", config.image_size[::-1])

    no_targets = np.zeros(len(paths), np.int64)
    examples = Examples(read, no_targets, [str(path) for path in paths])
    size, preprocessing = min(BATCH_SIZE, len(paths)), model.preprocessing
    return DataLoader(examples, no_targets.astype(np.int32), config, size, preprocessing=preprocessing)


def named_predictions(task: Task, names: tuple[str, ...], output: Any, top: int) -> Predictions:
    """Return the predictions of one image by name, rounded as they are printed, so that both twins print the same.

    classes: the `top` most probable, by softmax.    labels: those with a probability above 0.5, by sigmoid, whatever `top`
    is.    values: all.

    names: of the outputs.    output: (num_outputs,).
    """
    x = np.asarray(output, np.float64)
    if task == "values":
        return [(name, float(f"{value:.4g}")) for name, value in zip(names, x, strict=True)]
    if task == "classes":
        x = np.exp(x - x.max())
        probabilities = np.round(x / x.sum(), 4)
        chosen = np.argsort(-probabilities, kind="stable")[:top].tolist()
    else:
        probabilities = np.round(1 / (1 + np.exp(-np.clip(x, -500, 500))), 4)
        chosen = [i for i in np.argsort(-probabilities, kind="stable") if probabilities[i] > 0.5]
    return [(names[i], float(probabilities[i])) for i in chosen]


# Output ---------------------------------------------------------------------------------------------------------------


def _print_predictions(image: str, task: Task, predictions: Predictions, as_json: bool) -> None:
    if as_json:
        number = "value" if task == "values" else "probability"
        print(json.dumps({"image": image, task: [{"name": name, number: value} for name, value in predictions]}))
        return
    shown = [(shorten(name), value) for name, value in predictions]
    width = max((len(name) for name, _ in shown), default=0)
    print_lines(image, *(f"  {name:{width}}  {_format_value(task, value)}" for name, value in shown))
    if not predictions:
        print_lines("  no label with a probability above 0.5")


def _notes(model: TrainedModel) -> Iterator[str]:
    """Yield a line for each assumption that changes the predictions, and for weights that are not a run's best."""
    checkpoint = model.checkpoint
    if model.newest_note:
        yield f"note: {model.newest_note}"
    if checkpoint.assumed:
        fields = ", ".join(f"{each.field}={each.value!r}" for each in checkpoint.assumed)
        yield f"note: the file does not have these config fields, assumed: {fields}; --set FIELD=VALUE changes them"
    if checkpoint.preprocessing is None:
        preprocessing = center_crop(checkpoint.config.image_size)
        yield f"note: the file does not have the preprocessing of images, assumed: {preprocessing}"


def _format_value(task: Task, value: float) -> str:
    return f"{value:.4g}" if task == "values" else f"{value:7.2%}"


def _title(task: Task, predictions: Predictions) -> str:
    """Return the first prediction as a text that fits above an image."""
    if not predictions:
        return "no label"
    name, value = predictions[0]
    short = name if len(name) <= MAX_NAME_LENGTH else f"{name[: MAX_NAME_LENGTH - 1]}…"
    return f"{short}  {_format_value(task, value).strip()}"


# Arguments ------------------------------------------------------------------------------------------------------------


def _read_class_names(path: Path, config: ViTConfig) -> tuple[str, ...]:
    """Read the names of the classes, one per line."""
    try:
        names = tuple(bounded_json.read_bytes(path, max_bytes=MAX_NAMES_BYTES).decode().splitlines())
    except (OSError, ValueError) as error:  # ValueError: not UTF-8
        raise InputError(f"{path} cannot be read ({error}): give a text file with one class per line") from None
    if len(names) != config.num_classes:
        raise InputError(
            f"{path} has {len(names)} lines, and the model has {config.num_classes} classes: give one line per class"
        )
    return names


def _check_maps_path(path: Path, inputs: list[Path], *, force: bool) -> None:
    """Raise InputError if a path cannot be written to, is one of the inputs, or exists and `force` is False."""
    if path.suffix.lower() != ".png":
        raise InputError(f"--maps {path}: the picture is a PNG; give a name that ends in .png")
    if not path.parent.is_dir():
        raise InputError(f"--maps {path}: there is no folder {path.parent}; make it first")
    check_replaceable(path)
    if path.is_dir():
        raise InputError(f"--maps {path} is a folder: give the name of a file")
    if path.exists() and any(each.exists() and path.samefile(each) for each in inputs):
        raise InputError(f"--maps {path} is one of the files to read, and is not replaced: give another name")
    if os.path.lexists(path) and not force:
        raise InputError(f"--maps {path} exists: give another name, or --force to replace it")


def _parser() -> Parser:
    parser = Parser(prog="python -m train.predict", description=predict.__doc__, allow_abbrev=False)
    add_arguments(parser)
    parser.add_argument("images", metavar="IMAGE", nargs="+", help="an image file: JPEG, PNG, WebP, BMP, GIF or TIFF")
    text = "number of classes to print; by default 5"
    parser.add_argument("--top", type=_parse_positive_int, default=5, metavar="N", help=text)
    text = "names of the classes, one per line; by default those in RUN_OR_FILE, or numbers"
    parser.add_argument("--classes", metavar="FILE", help=text)
    text = "write a picture of the images, each beside the attention map of the last block"
    parser.add_argument("--maps", metavar="PATH.png", help=text)
    parser.add_argument("--force", action="store_true", help="replace PATH.png if it exists")
    return parser


def _parse_positive_int(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of classes: give 1 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
