"""The folder of a run's checkpoints: what both trainers do with damaged and replaced ones, and the errors about them.

Each checkpoint is a folder whose name is the number of steps done.  How it is written and read is the trainer's own.
"""

import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

from parity.checkpoints.write_target import is_disk_full
from parity.terminal import print_note
from train.checkpoints.trainers import trainer_of
from train.loop.engine import CheckpointCheck
from train.loop.loop_state import LoopState
from train.loop.metrics import PRIMARY_METRIC
from train.loop.write_files import folder_gone_error
from train.recipes import Task
from vit_spec import InputError

Restored = TypeVar("Restored")
# Takes the step and the JSON of the loop's state of a checkpoint, and raises InputError if it must not be restored.
JSONCheck = Callable[[int, Any], None]
_MAX_REASON = 300  # characters; tensorstore adds the lines of its own source


class CheckpointFolder:
    """The checkpoints of a run by their steps.

    path: the folder; it may not exist yet.
    trainer: the module that writes them.
    process, num_processes: the number of this process of the run, and how many there are.

    Raises:
        InputError: the checkpoints are another trainer's.
    """

    def __init__(self, path: Path, trainer: str, *, process: int = 0, num_processes: int = 1) -> None:
        self.path, self._process, self._num_processes = path, process, num_processes
        for folder in (path, replaced_folder(path)):
            if (other := trainer_of(folder)) not in (None, trainer):
                raise InputError(
                    f"the checkpoints in {path} are those of {other}: resume with python -m {other}, or continue the run "
                    f"here with --resume {path.parent} in place of --run"
                )

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints, the newest first."""
        return sorted((int(path.name) for path in self.path.glob("*") if path.name.isdecimal()), reverse=True)

    def set_aside_for_replacement(self, step: int) -> None:
        """Rename the checkpoint of a step, so that a new one can get its name; see `settle_replaced`."""
        replaced_folder(self.path).mkdir(exist_ok=True)
        with suppress(FileNotFoundError):  # another process has moved it already
            (self.path / str(step)).rename(replaced_folder(self.path) / str(step))

    def settle_replaced(self) -> None:
        """Remove each replaced checkpoint whose replacement is complete, and give each other one its name back.

        A checkpoint gets its name when it is complete.  Several processes may do this at once.
        """
        aside = [path for path in replaced_folder(self.path).glob("*") if path.name.isdecimal()]
        for old in aside:
            if (self.path / old.name).exists():
                remove_checkpoint(old, ignore_errors=True)
            else:
                self.path.mkdir(exist_ok=True)
                with suppress(FileNotFoundError):  # another process has moved it already
                    old.rename(self.path / old.name)
        if aside:  # an empty folder may be one that another process has just made
            with suppress(OSError):
                replaced_folder(self.path).rmdir()

    def read_newest(
        self, steps: Sequence[int], read: Callable[[int], tuple[Restored | None, str]]
    ) -> tuple[int, Restored, dict[int, str]] | None:
        """Return the step and the content of the newest checkpoint that can be read, or None if there are none.

        Args:
            steps: the steps of the checkpoints, the newest first.
            read: returns the content of the checkpoint of a step; or None, and why it is damaged.

        Returns:
            Step, content, and the damaged checkpoints that are newer, with the reasons: to be moved aside.

        Raises:
            InputError: all are damaged, so that the run would overwrite them; or one is damaged and the run has several
                processes, which all have to restart because the others may have read it.
        """
        damaged: dict[int, str] = {}
        for step in steps:
            restored, reason = read(step)
            if restored is not None:
                return step, restored, damaged
            damaged[step] = reason
            if self._num_processes > 1 and step != steps[-1]:
                self.move_aside(damaged)
                raise InputError("start all processes again: the run resumes from the checkpoint before the damaged one")
        if damaged:
            raise self.none_readable_error(damaged)
        return None

    def move_aside(self, damaged: dict[int, str]) -> None:
        """Move checkpoints to the folder `checkpoints-damaged`, and print the reason of each."""
        aside = self.path.with_name(f"{self.path.name}-damaged")
        aside.mkdir(exist_ok=True)
        for step, reason in damaged.items():
            target, temporary = aside / str(step), aside / f"{step}-{self._process}"
            with suppress(FileNotFoundError):  # another process has moved it already
                (self.path / str(step)).rename(temporary)
                remove_checkpoint(target, ignore_errors=True)
                temporary.rename(target)
            print_note(f"the checkpoint of step {step} is damaged ({reason}); it was moved to {target}")

    def damage_of(self, step: int, error: Exception) -> str:
        """Return why a checkpoint is damaged, from the exception that reading it has raised.

        Raises:
            InputError: it could not be read for a reason other than its content, or the exception is an InputError.
        """
        if isinstance(error, InputError):
            raise error
        reason = _shorten(str(_first_cause(error))) or type(error).__name__
        if _is_environment_error(error):
            what = f"the checkpoint of step {step} in {self.path} cannot be read, but may be intact ({reason})"
            raise InputError(f"{what}: remove the cause, then give the same --run or --resume") from None
        return reason

    def check_version(self, step: int, version: int, newest: int) -> None:
        """Raise InputError if a checkpoint has a newer version than this package reads."""
        if version > newest:
            raise InputError(
                f"the checkpoint of step {step} in {self.path} has version {version}, and this package "
                f"reads versions up to {newest}: update it, or give --run a new folder"
            )

    def none_readable_error(self, damaged: dict[int, str]) -> InputError:
        """Return the error for a folder of damaged checkpoints."""
        why = "; ".join(f"step {step}: {reason}" for step, reason in damaged.items())
        return InputError(f"no checkpoint in {self.path} can be read ({why}): give --run a new folder")

    def write_error(self, error: Exception) -> InputError:
        """Return the error for a checkpoint that cannot be written, from the exception that writing it has raised."""
        if gone := folder_gone_error(self.path.parent):
            return gone
        cause = " ".join(str(error).split()).rpartition('": ')[2]  # after the names of the files
        reason = getattr(error, "strerror", None) or _shorten(cause)
        remedy = "make room there" if is_disk_full(error) else "correct that"
        return InputError(
            f"cannot write a checkpoint to {self.path} ({reason}): {remedy}, then give the same --run or --resume"
        )


def remove_checkpoint(path: Path, *, ignore_errors: bool = False) -> None:
    """Remove the folder of a checkpoint; of a link to one, the link.

    Raises:
        OSError: it cannot be removed, and errors are not ignored.
    """
    if path.is_symlink():
        with suppress(OSError) if ignore_errors else nullcontext():
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=ignore_errors)


def replaced_folder(folder: Path) -> Path:
    """Return the folder, beside that of the checkpoints, for a checkpoint whose replacement is not complete yet."""
    return folder.with_name(f"{folder.name}-replaced")


def converted_folder(folder: Path) -> Path:
    """Return the folder beside that of the checkpoints in which `train.loop.hand_over` converts them."""
    return folder.with_name(f"{folder.name}-converted")


def settle_converted(folder: Path) -> None:
    """Finish or undo a conversion that was interrupted.  One process calls it, before others open the folder.

    Raises:
        OSError: a folder cannot be renamed or removed.
    """
    converted = converted_folder(folder)
    if converted.is_dir() and not folder.exists():  # interrupted when the old checkpoints had been renamed
        converted.rename(folder)
    elif converted.is_dir():
        shutil.rmtree(converted)


def checkpoint_rank(task: Task, loop_state: LoopState) -> float | None:
    """Return a number that is largest for the best checkpoint.

    None if its weights were not evaluated, or if their held-out loss is not finite or their primary metric is undefined.
    """
    metric = PRIMARY_METRIC[task]
    is_valid = loop_state.is_evaluated and math.isfinite(loop_state.scores.last["loss"])
    value = loop_state.scores.last[metric] if is_valid else math.nan
    return None if math.isnan(value) else -value if metric == "mae" else value


def parse_loop_state(task: Task, saved: Any) -> LoopState | None:
    """Return the state of the loop in a checkpoint, from its JSON; None if no run writes that."""
    return LoopState.from_json(saved, PRIMARY_METRIC[task])


def check_of_json(task: Task, check: CheckpointCheck | None) -> JSONCheck | None:
    """Return a check of the loop state of a checkpoint as a check of its JSON."""
    return None if check is None else lambda step, saved: check(step, parse_loop_state(task, saved))


def _first_cause(error: BaseException) -> BaseException:
    """Return the exception that others were raised from; Orbax's own say only that loading has failed."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _shorten(text: str) -> str:
    """Return a text as one line, cut between words if it is longer than any reason of this package."""
    line = " ".join(text.split())
    if len(line) <= _MAX_REASON:
        return line
    return f"{line[:_MAX_REASON].rpartition(' ')[0] or line[:_MAX_REASON]} …"


def _is_environment_error(error: BaseException | None) -> bool:
    """Whether a file could not be read for a reason other than its content: permission, disk, memory."""
    while error is not None:
        if isinstance(error, OSError | MemoryError) and not isinstance(error, FileNotFoundError | NotADirectoryError):
            return True
        if any(word in str(error) for word in ("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAVAILABLE")):
            return True
        error = error.__cause__ or error.__context__
    return False
