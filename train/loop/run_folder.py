"""A run's folder: its config, metrics, curves, weights and checkpoints."""

import dataclasses
import errno
import json
import os
import time
import uuid
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from train.data import fingerprint
from train.data.sources import Dataset
from train.loop.checkpoint_folder import CheckpointFolder, settle_converted
from train.loop.lineage import RESUMABLE, TRAINER, describe_changes, flatten, lineage_from
from train.loop.lock import LOCK_FILE, Lock, folder_error
from train.loop.metrics_file import Record, json_line, read_records, records_until
from train.loop.saved_run import (
    ADDED,
    CHECKPOINTS,
    DATA_FILE,
    UNFINISHED_FILE,
    WEIGHTS,
    checkpoints_folder,
    extended_lineage,
    has_checkpoints,
    read_config,
    read_run_config,
)
from train.loop.settings import NOT_COMPARED, Settings, describe_differences, differing
from train.loop.tensorboard import EventWriter
from train.loop.write_files import atomic_write, convert_write_errors, temporary_path
from train.recipes import Recipe, recipe_to_json
from train.recipes.fields import describe_difference
from vit_spec import InputError, ViTConfig
from vit_spec.printable import is_utf8


class RunFolder:
    """The folder of one run.

    config.json             the run's id, the recipe, the model's config, what was trained on, the trainer, the teacher's
                            checksum, and the changes of `--resume`
    data.json               what identifies the data, see `train.data.fingerprint`
    metrics.jsonl           a record per line: set ("train", "held_out" or "held_out_raw"), step, epoch, metrics, seconds
    events.out.tfevents.*   the same for TensorBoard
    weights.safetensors     the newest weights; with --ema their moving average
    best.safetensors        the weights with the best held-out metric; with --ema the best moving average
    weights_raw.safetensors, best_raw.safetensors    with --ema: the newest and the best weights themselves
    checkpoints/            the checkpoints from which the run can resume
    checkpoints-replaced/   only while one of them is being replaced: the old one
    checkpoints-converted/  only while those of another trainer are being converted, see `train.loop.hand_over`
    checkpoints-of-train.jax/, checkpoints-of-train.torch/   after a change of the trainer: the checkpoints of the other one
    best-unverified.safetensors    only if a resume found other weights in place of the best ones, see `move_aside`
    curves.png              the metrics as a picture
    .first-checkpoint-unfinished    only while there are weights and perhaps no complete checkpoint

    The folder is new, or has a run with the same recipe, model and data, which resumes.  It is locked until the context is
    left.  If a run has several processes, only the main one locks and writes.

    Args:
        path: the folder.
        recipe, config, data: contents of config.json.
        name: name of the recipe.
        trainer: the module that trains, for config.json; None: do not record it.
        source: the data set, to identify it by its contents; None: do not identify it.
        teacher_checksum: checksum of the weights of the teacher; None without one.
        may_change: whether the recipe may differ from that of a run that resumes in the fields `RESUMABLE`, and the
            checkpoints may be another trainer's.
        is_main: whether this is the main process of the run.

    Attributes:
        weights, best, weights_raw, best_raw: the paths of these files.
        records: the records of metrics.jsonl.
        warnings: lines about the folder and the data for the table at the start.
        changes: lines about the changes of `--resume`, the first one first.

    Raises:
        InputError: the folder has another run or other files, another trainer uses it, or it cannot be made; by each
            method, a file cannot be written.
    """

    def __init__(
        self,
        path: Path,
        recipe: Recipe,
        config: ViTConfig,
        data: dict[str, Any],
        *,
        name: str = "",
        trainer: str | None = None,
        may_change: bool = False,
        source: Dataset | None = None,
        teacher_checksum: str | None = None,
        is_main: bool = True,
    ) -> None:
        self.path = path
        self.weights, self.best, self.weights_raw, self.best_raw = (path / name for name in WEIGHTS)
        self.records: list[Record] = []
        self.warnings: list[str] = []
        self.changes: list[str] = []
        self.may_change, self._is_main, self._began = may_change, is_main, time.monotonic()
        self._tensorboard, self._project = recipe.tensorboard, recipe.wandb
        self._events: EventWriter | None = None
        self._wandb: Any = None
        self._identity: fingerprint.Fingerprint | None = None  # of the data, if data.json is to be written
        text = {"name": name, "recipe": recipe_to_json(recipe), "model": dataclasses.asdict(config), "data": data}
        if trainer is not None:
            text[TRAINER] = trainer
        if teacher_checksum is not None:
            text["teacher"] = {"checksum": teacher_checksum}
        self._config = json.loads(json.dumps(text))
        if not is_main:  # the main process makes and checks the folder
            self._record_changes(path, recipe)
            return
        new = not path.exists()
        _make_folder(path)
        self._lock = Lock(path)
        try:
            _refuse_other_than_files(path)
            with convert_write_errors(path, path):
                settle_converted(checkpoints_folder(path))
            if not self._lock.is_supported:
                self.warnings.append(f"{path} is on a file system without locks: make sure that no other trainer uses it")
            self._write_description(path, source, recipe)
        except BaseException:
            self._lock.release()
            if new:
                with suppress(OSError):  # it is not empty
                    path.rmdir()
            raise

    def check(self, recipe: Recipe) -> None:
        """Check that the run can have its folder, and write nothing; the contents of its data are not compared.

        Raises:
            InputError: the folder cannot be made or written, or has another run or other files.
        """
        _refuse_unwritable(self.path)
        _refuse_other_than_files(self.path)
        self._refuse_other_run(self.path, None, recipe)
        if not self.may_change:
            CheckpointFolder(checkpoints_folder(self.path), str(self._config.get(TRAINER)))

    def _write_description(self, path: Path, source: Dataset | None, recipe: Recipe) -> None:
        """Refuse a folder with another run; write config.json and data.json of a new one."""
        if self._refuse_other_run(path, source, recipe) is None:
            self._write_files()  # else `resume_at` does, when the checkpoint has been restored

    def _refuse_other_run(self, path: Path, source: Dataset | None, recipe: Recipe) -> dict[str, Any] | None:
        """Refuse a folder with another run; return the config.json of the run in it, None if there is none."""
        _refuse_other_than_utf8(self._config)
        saved = read_config(path)
        self._config["id"] = (saved or {}).get("id", uuid.uuid4().hex)  # older versions recorded none
        if saved is not None:
            self._refuse_other_teacher(saved, recipe)
            self._refuse_other_config(saved, "recipe.")
            _refuse_missing_checkpoints(path)
            self._record_changes(path, recipe)
        identity = self._identify_data(path / DATA_FILE, source, recipe, saved) if source is not None else None
        if saved is not None:
            self._refuse_other_config(saved, "")
        self._identity = identity
        return saved

    def _write_files(self) -> None:
        if self._identity is not None:
            _write_text(self.path / DATA_FILE, self._identity.to_json())
        _write_text(self.path / "config.json", json.dumps(self._config, indent=1) + "\n")

    def _identify_data(
        self, file: Path, source: Dataset, recipe: Recipe, saved: dict[str, Any] | None
    ) -> fingerprint.Fingerprint | None:
        """Refuse data other than those of the run; return the fingerprint to write to data.json, or None to keep it."""
        if saved is None:
            return fingerprint.Fingerprint.compute(source, every_byte=recipe.compare_data == "all")
        if not file.exists():  # older versions recorded only the path of the data
            was = str(flatten(saved).get("recipe.data", recipe.data))
            if fingerprint.resolve_spec(was) != fingerprint.resolve_spec(recipe.data) and recipe.compare_data != "none":
                raise self._other_run_error(describe_difference("recipe.data", was, recipe.data))
            self.warnings.append("an older version started the run: the fingerprint of its data is recorded from now on")
        try:
            identity, warnings = fingerprint.compare_with_recorded(file, source, recipe.compare_data)
        except fingerprint.DataChangedError as error:
            has_same_counts = saved["data"] == self._config["data"]  # `--compare-data none` compares them too
            hint = (
                "; --compare-data none accepts a change made on purpose"
                if has_same_counts
                else f"; --init {self.path} starts a new run from its weights"
            )
            raise self._other_run_error(f"its data differ: {error}", hint) from None
        self.warnings += warnings
        return identity

    def _refuse_other_config(self, saved: dict[str, Any], prefix: str) -> None:
        """Refuse a saved config that differs from this run's in a field with the prefix, except those in `CHANGEABLE`."""
        flat = (ADDED | flatten(each) for each in (self._config, saved))
        mine, theirs = ({name: value for name, value in each.items() if name.startswith(prefix)} for each in flat)
        resumable = {f"recipe.{name}" for name in RESUMABLE}
        if names := differing(theirs, mine, NOT_COMPARED | (resumable if self.may_change else set())):
            hint = f"; --resume {self.path} accepts this change" if resumable.issuperset(names) else ""
            if self.may_change:
                hint = f"; --init {self.path} starts a new run from its weights"
            raise self._other_run_error(describe_differences(names, theirs, mine), hint)

    def _refuse_other_teacher(self, saved: dict[str, Any], recipe: Recipe) -> None:
        """Refuse a teacher with other weights than the run's, or one where the run has none, or none where it has one."""
        mine, theirs = (each.get("teacher") for each in (self._config, saved))
        was = str(flatten(saved).get("recipe.teacher"))
        if mine == theirs:
            return
        if mine is None:
            raise self._other_run_error(f"it has the teacher {was}, and --teacher is not given")
        if theirs is None:
            raise self._other_run_error(f"it has no teacher, and --teacher is {recipe.teacher}")
        raise self._other_run_error(f"its teacher is {was}, and --teacher {recipe.teacher} has other weights")

    def _record_changes(self, path: Path, recipe: Recipe) -> None:
        """Add the fields of the recipe that `--resume` changes to the lineage in config.json."""
        lineage = extended_lineage(path, recipe, self._config.get(TRAINER))
        if lineage:
            self._config["lineage"] = lineage
        self.changes = describe_changes(lineage)

    def _other_run_error(self, difference: str, more: str = "") -> InputError:
        return InputError(
            f"{self.path} holds another run: {difference}; give the same to resume, or give --run a new folder{more}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._wandb is not None:
                self._wandb.finish()
            if self._events is not None:
                with convert_write_errors(self.path, self.path):
                    self._events.close()
        finally:
            if self._is_main:
                self._lock.release()

    @property
    def id(self) -> str:
        """The identifier of this run, in config.json and in its checkpoints.

        In a process that is not the main one it is "" until the main process has written config.json.
        """
        config = self._config if self._is_main else read_run_config(self.path) or {}
        return str(config.get("id", ""))

    @property
    def settings(self) -> Settings:
        """Recipe, model and lineage of the run, as in config.json: a checkpoint has those with which it was saved."""
        return {
            "recipe": self._config["recipe"],
            "model": self._config["model"],
            "lineage": self._config.get("lineage", []),
        }

    @property
    def seconds(self) -> float:
        """Time that the run has taken so far, without the time between its processes."""
        return time.monotonic() - self._began

    def mark_first_checkpoint_unfinished(self) -> None:
        """Mark the folder before weights are written to a run that has no complete checkpoint.

        Starting again replaces the weights.  Therefore a run with weights and without checkpoints starts again only if it
        is marked.

        Raises:
            InputError: the mark cannot be written.
        """
        if self._is_main:
            with convert_write_errors(self.path / UNFINISHED_FILE, self.path):
                (self.path / UNFINISHED_FILE).touch()

    def mark_first_checkpoint_finished(self) -> None:
        """Remove the mark of `mark_first_checkpoint_unfinished` if it exists.

        Raises:
            InputError: the mark cannot be removed.
        """
        if self._is_main:
            with convert_write_errors(self.path / UNFINISHED_FILE, self.path):
                (self.path / UNFINISHED_FILE).unlink(missing_ok=True)

    def resume_at(self, step: int, seconds: float, *, is_evaluated: bool) -> None:
        """Continue the records after `step` steps and `seconds`, and drop those of later steps; (0, 0) starts a run.

        config.json and data.json get what has changed.

        is_evaluated: whether the evaluation after `step` steps is complete.  If not, its records are dropped too, because
            it is repeated.
        """
        self._began = time.monotonic() - seconds
        metrics = self.path / "metrics.jsonl"
        self.records = records_until(read_records(metrics), step, is_evaluated=is_evaluated)
        if "lineage" in self._config:
            self._config["lineage"] = lineage_from(self._config["lineage"], step)
        if not self._is_main:
            return
        self._write_files()
        _write_text(metrics, "".join(json_line(record) for record in self.records))
        if self._tensorboard:
            with convert_write_errors(self.path, self.path):
                self._events = EventWriter(self.path, after=step)
        if self._project:
            import wandb

            # A run that resumes keeps its id, and runs in folders of the same name are different runs.
            self._wandb = wandb.init(
                project=self._project, id=self.id, name=self.path.name, resume="allow", config=self._config
            )

    def count_records(self, step: int, *, is_evaluated: bool) -> int:
        """Return the number of records that `resume_at` keeps; see there."""
        return len(records_until(self.records, step, is_evaluated=is_evaluated))

    def move_aside(self, path: Path) -> Path | None:
        """Rename a file of the run that has other content than the run's; return its new path, None if there is no file.

        Raises:
            InputError: it cannot be renamed.
        """
        if not os.path.lexists(path):
            return None
        numbers = chain([""], (f"-{i}" for i in count(2)))
        names = (path.with_name(f"{path.stem}-unverified{number}{path.suffix}") for number in numbers)
        new = next(name for name in names if not os.path.lexists(name))
        if self._is_main:
            with convert_write_errors(path, self.path):
                path.rename(new)
        return new

    def log(self, set_name: str, step: int, epoch: float, metrics: dict[str, float]) -> None:
        """Append a record to metrics.jsonl, and to TensorBoard and Weights & Biases if they are used.

        set_name: "train", "held_out" or "held_out_raw".
        step: number of steps done.
        """
        record = {"set": set_name, "step": step, "epoch": round(epoch, 4), **metrics, "seconds": round(self.seconds, 2)}
        self.records.append(record)
        if not self._is_main:
            return
        file = self.path / "metrics.jsonl"
        with convert_write_errors(file, self.path), file.open("a") as lines:
            lines.write(json_line(record))
        scalars = {f"{set_name}/{name}": value for name, value in metrics.items()}
        if self._events is not None:
            with convert_write_errors(self.path, self.path):
                self._events.add_scalars(step, scalars)
        if self._wandb is not None:
            self._wandb.log(scalars, step=step)

    @property
    def has_tensorboard(self) -> bool:
        """Whether `log_image` can be called: in the main process, with `recipe.tensorboard`, after `resume_at`."""
        return self._events is not None

    def log_image(self, name: str, step: int, pixels: NDArray[np.uint8]) -> None:
        """Write a picture, (H, W, 3) uint8, to TensorBoard."""
        assert self._events is not None
        with convert_write_errors(self.path, self.path):
            self._events.add_image(step, name, pixels)


def _refuse_unwritable(path: Path) -> None:
    """Raise InputError if the folder of a run cannot be made or written, or has files other than those of a run."""
    nearest = next(each for each in (path, *path.parents) if os.path.lexists(each))
    if not nearest.is_dir():
        number = errno.EEXIST if nearest == path else errno.ENOTDIR
        raise folder_error(path, OSError(number, os.strerror(number)))
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise InputError(f"cannot write {nearest} ({os.strerror(errno.EACCES)}): give --run another folder")
    if nearest == path:
        _refuse_foreign_folder(path)


def _make_folder(path: Path) -> None:
    """Make the folder of a run if it does not exist.

    Raises:
        InputError: the folder cannot be made, or has files other than those of a run.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        _refuse_foreign_folder(path)
    except OSError as error:
        raise folder_error(path, error) from None


def _refuse_foreign_folder(path: Path) -> None:
    """Refuse a folder with files other than those of a run, or of a run that ended before it wrote its config."""
    files = (path / "config.json", path / DATA_FILE)
    if not files[0].exists():
        allowed = {LOCK_FILE, DATA_FILE, *(temporary_path(file).name for file in files)}
        if not {entry.name for entry in path.iterdir()} <= allowed:
            raise InputError(f"{path} exists already and holds no run: give --run a new folder, or remove it")


def _write_text(path: Path, text: str) -> None:
    atomic_write(path, text.encode())


def _refuse_missing_checkpoints(path: Path) -> None:
    """Refuse a run whose checkpoints are missing: it would start again, and replace its weights and metrics.

    Raises:
        InputError: the checkpoints are not a folder, or there are weights and no checkpoint.
        OSError: the folder of checkpoints cannot be listed.
    """
    checkpoints = path / CHECKPOINTS
    if os.path.lexists(checkpoints) and not checkpoints.is_dir():
        raise InputError(f"{checkpoints} is not a folder: put the run's checkpoints back, or give --run a new folder")
    weights = [name for name in WEIGHTS if (path / name).exists()]
    if weights and not (path / UNFINISHED_FILE).exists() and not has_checkpoints(path):
        raise InputError(
            f"{path} has trained weights ({', '.join(weights)}) and no checkpoints to resume from: put {checkpoints} back, "
            "or give --run a new folder"
        )


def _refuse_other_than_files(path: Path) -> None:
    """Raise InputError if a weight file of a run has the name of a folder or a device, which no file replaces."""
    for name in WEIGHTS:
        if (path / name).exists() and not (path / name).is_file():
            raise InputError(f"{path / name} is not a file: move it out of the run's folder, then give the same --run")


def _refuse_other_than_utf8(config: Record) -> None:
    """Raise InputError for text that config.json cannot hold: names of classes and paths come from the file system."""
    for field, value in flatten(config).items():
        for text in value if isinstance(value, list | tuple) else [value]:
            if isinstance(text, str) and not is_utf8(text):
                raise InputError(f"{field} has {text!r}, which is not UTF-8: rename that file or folder")
