"""A run's folder: its config, metrics, curves, weights and checkpoints."""

import dataclasses
import errno
import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from train.events import Events
from train.recipes import Recipe
from vit_spec import InputError, ViTConfig

Record = dict[str, Any]

STATES = "checkpoints"  # the folder in a run's own from which it goes on

# What may be another when a run goes on: it decides how, where and how often, and not what is learnt.
FREE = (
    *("run", "workers", "mesh", "remat", "log_every", "save_every", "keep", "tensorboard", "wandb", "profile"),
    *("non_finite", "corrupt"),  # what is done about a step or an image that stopped the run
)


class Run:
    """The folder of one run.

    config.json             the recipe, the model's config, and what was trained on
    metrics.jsonl           a line a record: set ("train" or "held_out"), step, epoch, metrics, seconds
    events.out.tfevents.*   the same for TensorBoard
    weights.safetensors     the newest weights; with --ema their running mean
    best.safetensors        the best weights by the held-out images; with --ema the best running mean
    weights_raw.safetensors, best_raw.safetensors    with --ema: the newest and the best weights themselves
    checkpoints/            the states from which the run can go on
    curves.png              the metrics as a picture

    The folder is made, or one is taken up again that the same recipe made for the same model and data.  Where several
    processes share a run, the first alone writes.

    Raises:
        InputError: the folder holds another run, or something else; or it cannot be made; by each method, a file cannot be
            written.
    """

    def __init__(self, path: Path, recipe: Recipe, config: ViTConfig, data: dict[str, Any], *, writes: bool = True) -> None:
        self.path, self.weights, self.best = path, path / "weights.safetensors", path / "best.safetensors"
        self.weights_raw, self.best_raw = path / "weights_raw.safetensors", path / "best_raw.safetensors"
        self.records: list[Record] = []
        self._writes, self._began = writes, time.monotonic()
        self._tensorboard, self._project = recipe.tensorboard, recipe.wandb
        self._events: Events | None = None
        self._wandb: Any = None
        text = {"recipe": dataclasses.asdict(recipe), "model": dataclasses.asdict(config), "data": data}
        self._config = json.loads(json.dumps(text))
        if not writes:
            return  # the folder is the first process's to make and to judge
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            self._same(path)
        except OSError as error:
            raise InputError(f"cannot make the folder {path} ({error.strerror}): give another with --run") from None
        _write(path / "config.json", json.dumps(self._config, indent=1) + "\n")

    def _same(self, path: Path) -> None:
        """Refuse a folder whose run is another."""
        try:
            there = json.loads((path / "config.json").read_text())
        except FileNotFoundError:
            if not {entry.name for entry in path.iterdir()} <= {_beside(path / "config.json").name}:
                raise InputError(f"{path} exists already and holds no run: give --run a new folder, or remove it") from None
            return  # empty, or left so by a run that ended before it began
        except (OSError, ValueError) as error:
            raise InputError(f"{path / 'config.json'} cannot be read ({error}): give --run a new folder") from None
        mine, theirs = _flat(self._config), _flat(there)
        free = {f"recipe.{name}" for name in FREE}
        names = [name for name in (*mine, *sorted(theirs.keys() - mine.keys())) if name not in free]
        if differ := [name for name in names if mine.get(name, "not there") != theirs.get(name, "not there")]:
            name, *others = differ
            was, now = (shorten(str(each.get(name, "not there")), 80) for each in (theirs, mine))
            too = f", and {', '.join(others[:5])}{', ...' * (len(others) > 5)} too" if others else ""
            raise InputError(
                f"{path} holds another run: its {name} is {was}, and here it is {now}{too}; give the same to go on, or "
                "give --run a new folder"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._wandb is not None:
            self._wandb.finish()
        if self._events is not None:
            with writing(self.path):
                self._events.close()

    @property
    def seconds(self) -> float:
        """Time since the run began, without the time in which it lay still."""
        return time.monotonic() - self._began

    def go_on(self, step: int, seconds: float) -> None:
        """Take the records up at `step`, `seconds` after the beginning: what was recorded later is recorded anew."""
        self._began = time.monotonic() - seconds
        metrics = self.path / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        self.records = [record for record in map(_parsed, lines) if record is not None and record["step"] <= step]
        if not self._writes:
            return
        _write(metrics, "".join(_line(record) for record in self.records))
        if self._tensorboard:
            with writing(self.path):
                self._events = Events(self.path, after=step)
        if self._project:
            import wandb

            name = self.path.name  # a run that goes on is the same there too
            self._wandb = wandb.init(project=self._project, id=name, name=name, resume="allow", config=self._config)

    def log(self, set_name: str, step: int, epoch: float, metrics: dict[str, float]) -> None:
        """Record metrics after `step` updates."""
        record = {"set": set_name, "step": step, "epoch": round(epoch, 4), **metrics, "seconds": round(self.seconds, 2)}
        self.records.append(record)
        if not self._writes:
            return
        file = self.path / "metrics.jsonl"
        with writing(file), file.open("a") as lines:
            lines.write(_line(record))
        named = {f"{set_name}/{name}": value for name, value in metrics.items()}
        if self._events is not None:
            with writing(self.path):
                self._events.numbers(step, named)
        if self._wandb is not None:
            self._wandb.log(named, step=step)

    @property
    def shows(self) -> bool:
        """Whether there is a place for pictures."""
        return self._events is not None

    def picture(self, name: str, step: int, pixels: NDArray[np.uint8]) -> None:
        """Show a picture, (H, W, 3) uint8, in TensorBoard."""
        assert self._events is not None
        with writing(self.path):
            self._events.picture(step, name, pixels)


def network_of(path: Path) -> ViTConfig | None:
    """The network of the run in a folder from whose states it can go on; None where there are none, or it is not told.

    Raises:
        OSError: nobody may look whether there are some.
    """
    states = path / STATES
    if not states.exists() or not any(state.name.isdigit() for state in states.iterdir()):
        return None
    try:
        return ViTConfig.from_json(json.dumps(json.loads((path / "config.json").read_text())["model"]))
    except (OSError, ValueError, LookupError, TypeError):
        return None  # `Run` says what is wrong with the folder


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Tell in a line of a file, or one in this folder, that cannot be written."""
    try:
        yield
    except OSError as error:
        remedy = "make room there" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "see to that"
        why = error.strerror or error
        raise InputError(f"cannot write {path} ({why}): {remedy}, then give the same --run to go on") from None


def _write(path: Path, text: str) -> None:
    """Write a file in one go: what is there is the old text or the new one."""
    beside = _beside(path)
    with writing(path):
        beside.write_text(text)
        os.replace(beside, path)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


def _line(record: Record) -> str:
    """A record as JSON, which knows no NaN: what is not defined is null."""
    undefined = {name: None for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)}
    return json.dumps(record | undefined) + "\n"


def _parsed(line: str) -> Record | None:
    """A record, or None where the line was cut off."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def _flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of nested dictionaries by their dotted names."""
    if not isinstance(node, dict):
        return {prefix: node}
    return {
        name: value for key, child in node.items() for name, value in _flat(child, f"{prefix}.{key}".lstrip(".")).items()
    }
