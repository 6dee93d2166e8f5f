"""Predict images with a trained model: what `python -m train.predict` does."""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from parity.checkpoints.metadata import shorten
from parity.checkpoints.preprocessing import center_crop
from parity.checkpoints.surgery import drop_head
from parity.terminal import print_error, print_lines, print_note
from train.data.batches import Batch
from train.inference.arguments import NUM_VIEWS
from train.inference.image_files import find_images, load_views
from train.inference.line_files import read_lines
from train.inference.model import (
    Predictor,
    TrainedModel,
    load_from_arguments,
    load_predictor,
    predict_batches,
    require_pooling,
)
from train.inference.prediction_files import check_output, names_file, open_features, open_rows
from train.inference.progress import progress_bar
from train.inference.scores import log_softmax, sigmoid, softmax
from train.loop.class_names import unique_names
from train.recipes import Task
from vit_spec import InputError, ViTConfig

BATCH_SIZE, LARGE_BATCH_SIZE = 8, 32  # attention weights of larger batches need much memory
NUM_PRINTED = 5  # classes of an image, without --top
MAX_NAMES_BYTES = 1 << 24  # of a file of class names: 21,843 names take 0.5 MB
MAX_NAME_LENGTH = 20  # characters of a name that fit above an image

Predictions = list[tuple[str, float]]  # names of classes, labels or values, each with its probability or value


def _load_model(args: argparse.Namespace) -> TrainedModel:
    """Load the model that the arguments name, without its head for features, and with the names of `--classes`.

    The names of its outputs all differ.

    Raises:
        InputError: the model cannot be used, or an option does not fit its outputs.
    """
    model = load_from_arguments(args)
    config = model.input_config
    require_pooling(model.checkpoint)
    if args.features is None and not config.num_classes:
        raise InputError(
            f"{args.weights} has no head: write its features with --features FILE, or evaluate them with python -m "
            "train.evaluate"
        )
    if args.features is not None and config.num_classes:
        model = replace(model, checkpoint=drop_head(model.checkpoint)[0])
    if args.top and model.task != "classes":
        raise InputError(f"--top is for classes, and the outputs of {args.weights} are {model.task}: leave --top out")
    if args.classes:
        model = replace(model, names=_read_class_names(Path(args.classes), config))
    if args.out and not args.out.lower().endswith(".jsonl") and model.task != "classes" and "image" in model.names:
        raise InputError(f"--out {args.out} would have two columns named image: give a name that ends in .jsonl")
    return replace(model, names=unique_names(model.names))


def predict(args: argparse.Namespace) -> bool:
    """Print the predictions of a trained model for images, or write them to a file; return whether all could be read.

    args: see `train.predict`.

    Raises:
        InputError: the model or an argument cannot be used, or a file cannot be written.
    """
    paths = find_images(args.images)
    outputs = _check_outputs(args, paths)
    model = _load_model(args)
    for line in _notes(model):
        print_note(line)
    predictor, errors = load_predictor(model.checkpoint, args.twin), dict[int, str]()
    maps = _Maps(predictor, model.input_config) if args.maps else None
    loader = load_views(paths, model, args.tta, BATCH_SIZE if args.maps else LARGE_BATCH_SIZE, errors)
    views, readable, titles = NUM_VIEWS[args.tta], list[int](), list[str]()
    is_printed = not (args.out or args.features)

    def predict_batch(batch: Batch) -> Any:
        if maps is not None:
            maps.append(batch)
        return predictor.predict(batch.images)

    with _writer(args) as write, progress_bar(len(paths), "images", args.json or is_printed) as advance:
        n = 0
        for of_views in predict_batches(loader, predict_batch):
            for output in mean_of_views(model.task if args.features is None else "values", of_views, views):
                if n in errors:
                    print_error(errors[n])
                else:
                    predictions = write(model, str(paths[n]), output)
                    if maps is not None:
                        readable.append(n)
                        titles.append(_title(model.task, predictions))
                n += 1
                advance(1)
    if maps is not None and readable:
        maps.draw(Path(args.maps), readable, titles, force=args.force)
    if not args.json and (maps is None or readable):
        print_lines(*(f"wrote {path}" for path in outputs))
    return not errors


def _check_outputs(args: argparse.Namespace, paths: Sequence[Path]) -> list[Path]:
    """Check the files to write before any image is decoded, and return them."""
    inputs = [*paths, Path(args.weights), *([Path(args.classes)] if args.classes else [])]
    inputs += [Path(each[1:]) for each in args.images if each.startswith("@")]
    if args.features:
        for option in ("out", "maps", "json", "top"):
            if getattr(args, option):
                raise InputError(f"--features writes no predictions: leave --{option} out")
    if args.maps and args.tta != "none":
        raise InputError("--maps shows one view of an image: leave --tta out")
    outputs = []
    for option, text, suffixes in (
        ("--maps", args.maps, (".png",)),
        ("--out", args.out, (".csv", ".jsonl", ".parquet")),
        ("--features", args.features, (".npy", ".parquet")),
    ):
        if text:
            outputs.append(Path(text))
            check_output(option, outputs[-1], suffixes, inputs, force=args.force)
            if outputs[-1].suffix.lower() == ".npy":
                check_output(option, names_file(outputs[-1]), (".txt",), inputs, force=args.force)
    return outputs


@contextmanager
def _writer(args: argparse.Namespace) -> Iterator[Callable[[TrainedModel, str, Any], Predictions]]:
    """Yield a function that prints or writes the predictions of an image from its outputs, and returns them."""
    if args.features:
        with open_features(Path(args.features), force=args.force) as append:

            def write_features(model: TrainedModel, image: str, features: Any) -> Predictions:
                append(image, features)
                return []

            yield write_features
        return
    with open_rows(Path(args.out), force=args.force) if args.out else nullcontext() as write_row:

        def write(model: TrainedModel, image: str, output: Any) -> Predictions:
            predictions = named_predictions(model.task, model.names, output, args.top or NUM_PRINTED)
            if write_row is None:
                _print_predictions(image, model.task, predictions, args.json)
            elif Path(args.out).suffix.lower() == ".jsonl":
                write_row(_as_json(image, model.task, predictions))
            else:
                write_row(_as_row(image, model, output, predictions))
            return predictions

        yield write


class _Maps:
    """Collects the attention maps of images, and draws them."""

    def __init__(self, predictor: Predictor, config: ViTConfig) -> None:
        self._predictor, self._config = predictor, config
        self._images: list[Any] = []
        self._attention: list[Any] = []

    def append(self, batch: Batch) -> None:
        """Compute the maps of a batch."""
        from train.loop.attention_maps import patch_attention

        self._images.append(batch.images)
        self._attention.append(patch_attention(self._predictor.attention_maps(batch.images), self._config))

    def draw(self, path: Path, rows: list[int], titles: list[str], *, force: bool) -> None:
        """Write the picture of the images `rows`."""
        from train.loop.attention_maps import draw_attention_maps

        pixels, attention = np.concatenate(self._images)[rows], np.concatenate(self._attention)[rows]
        draw_attention_maps(path, pixels, attention, titles, force=force)


def mean_of_views(task: Task, outputs: Any, views: int) -> Any:
    """Return the outputs of images, (B, num_outputs), as the mean over their views of probabilities or values.

    classes: the logarithms of the mean probabilities.    labels: the logits of them.    values: the mean values.

    outputs: (B * views, num_outputs); the views of an image are consecutive.
    """
    if views == 1:
        return outputs
    x = np.asarray(outputs, np.float64).reshape(-1, views, *outputs.shape[1:])
    if task == "values":
        return x.mean(1).astype(np.float32)
    if task == "classes":  # log(mean(softmax))
        return np.logaddexp.reduce(log_softmax(x), axis=1) - np.log(views)
    yes, no = (np.logaddexp.reduce(-np.logaddexp(0, -sign * x), axis=1) for sign in (1, -1))
    return yes - no


def named_predictions(task: Task, names: tuple[str, ...], output: Any, top: int) -> Predictions:
    """Return the predictions of one image by name.

    classes: the `top` most probable, by softmax.    labels: those with a probability above 0.5, by sigmoid, whatever `top`
    is.    values: all.

    The order is that of the outputs, as in `train.evaluate`; of equal outputs, the first class precedes.

    names: names of the outputs.    output: (num_outputs,).
    """
    x = np.asarray(output, np.float64)
    if task == "values":
        return list(zip(names, x.tolist(), strict=True))
    order = np.argsort(-x, kind="stable")
    probabilities, chosen = (softmax(x), order[:top]) if task == "classes" else (sigmoid(x), order[x[order] > 0])
    return [(names[i], float(probabilities[i])) for i in chosen]


def _round_for_file(value: float) -> float:
    return float(f"{value:.7g}")  # float32 has no further digits


def _as_json(image: str, task: Task, predictions: Predictions) -> dict[str, Any]:
    number = "value" if task == "values" else "probability"
    return {"image": image, task: [{"name": name, number: _round_for_file(value)} for name, value in predictions]}


def _as_row(image: str, model: TrainedModel, output: Any, predictions: Predictions) -> dict[str, Any]:
    """Return the columns of a table: the most probable classes, or the probability or value of every label or value."""
    if model.task == "classes":
        columns: dict[str, str | float] = {}
        for i, (name, probability) in enumerate(predictions, 1):
            columns |= {f"class_{i}": name, f"probability_{i}": _round_for_file(probability)}
        return {"image": image, **columns}
    x = np.asarray(output, np.float64)
    numbers = map(_round_for_file, x if model.task == "values" else sigmoid(x))
    return {"image": image, **dict(zip(model.names, numbers, strict=True))}


def _print_predictions(image: str, task: Task, predictions: Predictions, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_as_json(image, task, predictions)))
        return
    shown = [(shorten(name), value) for name, value in predictions]
    width = max((len(name) for name, _ in shown), default=0)
    print_lines(image, *(f"  {name:{width}}  {_format_value(task, value)}" for name, value in shown))
    if not predictions:
        print_lines("  no label with a probability above 0.5")


def _notes(model: TrainedModel) -> Iterator[str]:
    """Yield a line for the assumptions, each override of what the file states, and weights that are not a run's best."""
    checkpoint = model.checkpoint
    if model.newest_note:
        yield f"note: {model.newest_note}"
    if checkpoint.assumed:
        fields = ", ".join(f"{each.field}={each.value!r}" for each in checkpoint.assumed)
        yield f"note: the file does not have these config fields, assumed: {fields}; --set FIELD=VALUE changes them"
    for override in checkpoint.overridden:
        yield f"note: {override.describe('--set')}"
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


def _read_class_names(path: Path, config: ViTConfig) -> tuple[str, ...]:
    """Read the names of the classes, one per line."""
    try:
        names = tuple(read_lines(path, max_bytes=MAX_NAMES_BYTES))
    except (OSError, ValueError) as error:  # ValueError: not UTF-8
        raise InputError(f"{path} cannot be read ({error}): give a text file with one class per line") from None
    if blank := [number for number, name in enumerate(names, 1) if not name]:
        raise InputError(f"{path}, line {blank[0]}, is blank: give the name of a class there, or delete the line")
    if len(names) != config.num_classes:
        raise InputError(
            f"{path} has {len(names)} lines, and the model has {config.num_classes} classes: give one line per class"
        )
    return names
