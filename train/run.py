"""A run's folder: its config, metrics, curves and weights."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any, Self

from train.recipes import Recipe
from vit_spec import InputError, ViTConfig

Record = dict[str, Any]


class Run:
    """The folder of one run.

    config.json             the recipe and the model's config
    metrics.jsonl           a line a record: set ("train" or "held_out"), step, epoch, metrics, seconds
    events.out.tfevents.*   the same for TensorBoard
    weights.safetensors     the newest weights
    best.safetensors        the best weights by the held-out images
    curves.png              the metrics as a picture

    Raises:
        InputError: the folder exists already, or cannot be made.
    """

    def __init__(self, path: Path, recipe: Recipe, config: ViTConfig) -> None:
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            raise InputError(f"{path} exists already: give --run a new folder, or remove it") from None
        except OSError as error:
            raise InputError(f"cannot make the folder {path} ({error.strerror}): give another with --run") from None
        self.path, self.weights, self.best = path, path / "weights.safetensors", path / "best.safetensors"
        self.records: list[Record] = []
        self._began = time.monotonic()
        text = {"recipe": dataclasses.asdict(recipe), "model": dataclasses.asdict(config)}
        (path / "config.json").write_text(json.dumps(text, indent=1) + "\n")
        self._metrics = (path / "metrics.jsonl").open("w")
        self._events = None
        if recipe.tensorboard:
            from tensorboardX import SummaryWriter

            self._events = SummaryWriter(str(path))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.close()
        if self._events is not None:
            self._events.close()

    @property
    def seconds(self) -> float:
        """Time since the folder was made."""
        return time.monotonic() - self._began

    def log(self, set_name: str, step: int, epoch: float, metrics: dict[str, float]) -> None:
        """Record metrics after `step` updates."""
        record = {"set": set_name, "step": step, "epoch": round(epoch, 4), **metrics, "seconds": round(self.seconds, 2)}
        self.records.append(record)
        self._metrics.write(json.dumps(record) + "\n")
        self._metrics.flush()
        if self._events is not None:
            for name, value in metrics.items():
                self._events.add_scalar(f"{set_name}/{name}", value, step)
