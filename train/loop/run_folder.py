"""A run's folder: its config, metrics, curves, weights and checkpoints."""

import dataclasses
import errno
import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import shorten
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from train.data import fingerprint
from train.data.sources import Source
from train.loop.lock import NAME as LOCK
from train.loop.lock import Lock
from train.loop.tensorboard import Events
from train.recipes import Recipe
from vit_spec import InputError, ViTConfig, bounded_json

Record = dict[str, Any]

STATES = "checkpoints"  # the folder in a run's own from which it goes on
DATA = "data.json"
BEST = "best.safetensors"  # the weights that did best on the held-out images
_CONFIG = 1 << 24  # bytes of config.json: the names of 21,843 classes take 3 MB
_METRICS, _RECORDS = 1 << 27, 1 << 20  # bytes and lines of metrics.jsonl: more than any run has

# What may be another when a run goes on: it decides how, where and how often, and not what is learnt.
FREE = (
    *("run", "workers", "mesh", "remat", "log_every", "save_every", "keep", "tensorboard", "wandb", "profile"),
    *("non_finite", "corrupt"),  # what is done about a step or an image that stopped the run
    *("data", "compare_data"),  # where the data lie: what they are is told by their fingerprint
)


class Run:
    """The folder of one run.

    config.json             the recipe, the model's config, and what was trained on
    data.json               what identifies the data, see `train.data.fingerprint`
    metrics.jsonl           a line a record: set ("train" or "held_out"), step, epoch, metrics, seconds
    events.out.tfevents.*   the same for TensorBoard
    weights.safetensors     the newest weights; with --ema their running mean
    best.safetensors        the best weights by the held-out images; with --ema the best running mean
    weights_raw.safetensors, best_raw.safetensors    with --ema: the newest and the best weights themselves
    checkpoints/            the states from which the run can go on
    curves.png              the metrics as a picture

    The folder is made, or one is taken up again that the same recipe made for the same model and data.  It is locked until
    the run is left.  Where several processes share a run, the first alone locks and writes.

    source: the data that `data` tells of; None: they are not identified by their contents.
    said: what is to be told of the folder and the data.

    Raises:
        InputError: the folder holds another run, or something else, or another trainer uses it; or it cannot be made; by
            each method, a file cannot be written.
    """

    def __init__(
        self,
        path: Path,
        recipe: Recipe,
        config: ViTConfig,
        data: dict[str, Any],
        *,
        source: Source | None = None,
        writes: bool = True,
    ) -> None:
        self.path, self.weights, self.best = path, path / "weights.safetensors", path / "best.safetensors"
        self.weights_raw, self.best_raw = path / "weights_raw.safetensors", path / "best_raw.safetensors"
        self.records: list[Record] = []
        self.said: list[str] = []
        self._writes, self._began = writes, time.monotonic()
        self._tensorboard, self._project = recipe.tensorboard, recipe.wandb
        self._events: Events | None = None
        self._wandb: Any = None
        text = {"recipe": dataclasses.asdict(recipe), "model": dataclasses.asdict(config), "data": data}
        self._config = json.loads(json.dumps(text))
        if not writes:
            return  # the folder is the first process's to make and to judge
        new = not path.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._refuse_others(path)
        except OSError as error:
            raise InputError(f"cannot make the folder {path} ({error.strerror}): give another with --run") from None
        self._lock = Lock(path)
        try:
            if not self._lock.works:
                self.said.append(f"{path} is on a file system without locks: see to it that no other trainer uses it")
            self._begin(path, source, recipe)
        except BaseException:
            self._lock.release()
            if new:
                with suppress(OSError):  # there is something in it
                    path.rmdir()
            raise

    def _refuse_others(self, path: Path) -> None:
        """Refuse a folder that neither holds a run nor was left by one that ended before it began."""
        files = (path / "config.json", path / DATA)
        if not files[0].exists():
            left = {LOCK, DATA, *(_beside(file).name for file in files)}
            if not {entry.name for entry in path.iterdir()} <= left:
                raise InputError(f"{path} exists already and holds no run: give --run a new folder, or remove it")

    def _begin(self, path: Path, source: Source | None, recipe: Recipe) -> None:
        """Write what the run is; refuse a folder whose run is another."""
        there = self._there(path)
        if there is not None:
            self._same(there, "recipe.")
        found = self._identified(path / DATA, source, recipe, there) if source is not None else None
        if there is not None:
            self._same(there, "")
        if found is not None:
            _write(path / DATA, found.to_json())
        _write(path / "config.json", json.dumps(self._config, indent=1) + "\n")

    def _there(self, path: Path) -> dict[str, Any] | None:
        """Return the config of the run in the folder; None where there is none yet."""
        try:
            return bounded_json.read_object(path / "config.json", longest=_CONFIG)
        except FileNotFoundError:
            return None
        except (OSError, InputError) as error:
            raise InputError(f"{path / 'config.json'} cannot be read ({error}): give --run a new folder") from None

    def _identified(
        self, file: Path, source: Source, recipe: Recipe, there: dict[str, Any] | None
    ) -> fingerprint.Fingerprint | None:
        """Refuse other data than those of the run; return what identifies them, where it is to be written."""
        if there is None:
            return fingerprint.Fingerprint.of(source, every_byte=recipe.compare_data == "all")
        if not file.exists():  # the place is all that is known of the data
            was = str(_flat(there).get("recipe.data", recipe.data))
            if fingerprint.place(was) != fingerprint.place(recipe.data) and recipe.compare_data != "none":
                raise self._other(f"its recipe.data is {shorten(was, 80)}, and here it is {shorten(recipe.data, 80)}")
            self.said.append("an older version began the run: what identifies its data is recorded from now on")
        try:
            found, said = fingerprint.compare(file, source, recipe.compare_data)
        except fingerprint.OtherData as error:
            raise self._other(
                f"its data differ: {error}", "; --compare-data none accepts a change made on purpose"
            ) from None
        self.said += said
        return found

    def _same(self, there: dict[str, Any], part: str) -> None:
        """Refuse a run of which a part of the config is another."""
        flat = map(_flat, (self._config, there))
        mine, theirs = ({name: value for name, value in each.items() if name.startswith(part)} for each in flat)
        free = {f"recipe.{name}" for name in FREE}
        names = [name for name in (*mine, *sorted(theirs.keys() - mine.keys())) if name not in free]
        if differ := [name for name in names if mine.get(name, "not there") != theirs.get(name, "not there")]:
            name, *others = differ
            was, now = (shorten(str(each.get(name, "not there")), 80) for each in (theirs, mine))
            too = f", and {', '.join(others[:5])}{', ...' * (len(others) > 5)} too" if others else ""
            raise self._other(f"its {name} is {was}, and here it is {now}{too}")

    def _other(self, what: str, more: str = "") -> InputError:
        return InputError(
            f"{self.path} holds another run: {what}; give the same to resume, or give --run a new folder{more}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._wandb is not None:
                self._wandb.finish()
            if self._events is not None:
                with writing(self.path):
                    self._events.close()
        finally:
            if self._writes:
                self._lock.release()

    @property
    def seconds(self) -> float:
        """Time since the run began, without the time in which it lay still."""
        return time.monotonic() - self._began

    def go_on(self, step: int, seconds: float) -> None:
        """Take the records up at `step`, `seconds` after the beginning: what was recorded later is recorded anew."""
        self._began = time.monotonic() - seconds
        metrics = self.path / "metrics.jsonl"
        self.records = [record for record in _recorded(metrics) if record["step"] <= step]
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
        said = bounded_json.read_object(path / "config.json", longest=_CONFIG)
        return ViTConfig.from_json(json.dumps(said["model"]))
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


def put(path: Path, content: bytes) -> None:
    """Write a file in one go: what is there is the old content or the new one.  A link is replaced, not its target."""
    beside = _beside(path)
    with writing(path):
        beside.unlink(missing_ok=True)
        with beside.open("xb") as file:
            file.write(content)
        os.replace(beside, path)


def _write(path: Path, text: str) -> None:
    put(path, text.encode())


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


def _line(record: Record) -> str:
    """A record as JSON, which knows no NaN: what is not defined is null."""
    undefined = {name: None for name, value in record.items() if isinstance(value, float) and not math.isfinite(value)}
    return json.dumps(record | undefined) + "\n"


def _recorded(metrics: Path) -> Iterator[Record]:
    """Yield the records of a file; a line that holds none, such as one that was cut off, is left out.

    Raises:
        InputError: it is no file, or longer than the metrics of any run.
    """
    try:
        data = bounded_json.read_bytes(metrics, longest=_METRICS)
        if (count := data.count(b"\n")) > _RECORDS:
            raise InputError(f"it has {count:,} lines")
    except FileNotFoundError:
        return
    except (OSError, InputError) as error:
        raise InputError(f"{metrics} cannot be read ({error}): take it out of the folder to resume without it") from None
    for line in data.splitlines():
        try:
            record = bounded_json.parse_object(line)
        except InputError:
            continue
        if isinstance(record.get("step"), int):
            yield record


def _flat(node: Any, prefix: str = "") -> dict[str, Any]:
    """The leaves of nested dictionaries by their dotted names."""
    if not isinstance(node, dict):
        return {prefix: node}
    return {
        name: value for key, child in node.items() for name, value in _flat(child, f"{prefix}.{key}".lstrip(".")).items()
    }


def best(place: str) -> str:
    """The best weights of a run, where `place` is the folder of one that has some; else the place itself."""
    path = Path(place) / BEST
    return str(path) if path.is_file() else place
