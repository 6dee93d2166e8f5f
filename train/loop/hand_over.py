"""A run that changes its trainer: the checkpoints of the other trainer become checkpoints of this one.

The newest checkpoint is converted, and the best one if it is another: bit for bit, since both trainers store the same
numbers (`train.checkpoints.training_state`).  The new checkpoints are written beside the old ones, and get their place when
all are complete; the old ones stay in a folder of their own.
"""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from train.checkpoints import orbax_files, shard_files
from train.checkpoints.trainers import FRAMEWORKS, trainer_of
from train.checkpoints.training_state import TrainingState
from train.loop.checkpoint_folder import (
    CheckpointFolder,
    checkpoint_rank,
    converted_folder,
    parse_loop_state,
    replaced_folder,
)
from train.loop.engine import CheckpointCheck, Engine
from train.loop.loop_state import LoopState
from train.loop.write_files import convert_write_errors
from train.recipes import Task
from vit_spec import InputError, ViTConfig

FILES = {"train.jax": orbax_files, "train.torch": shard_files}


class HandedOver(NamedTuple):
    """What `hand_over` has done: the other trainer, and the folder in which its checkpoints are now."""

    trainer: str
    folder: Path

    def describe(self, trainer: str) -> str:
        """Return a line about a hand-over to a trainer."""
        now, was = FRAMEWORKS[trainer], FRAMEWORKS[self.trainer]
        return f"the run continues in {now}: the checkpoints of {was} are converted, and stay as they were in {self.folder}"


def hand_over(engine: Engine, folder: Path, task: Task, check: CheckpointCheck) -> HandedOver | None:
    """Convert the checkpoints of a run if they are another trainer's than the engine's; every process calls it.

    Args:
        engine: the engine; it has the training state of the newest checkpoint afterwards.
        folder: the folder of the checkpoints.
        task: what is learnt.
        check: see `Engine.restore_checkpoint`.

    Returns:
        None if there are no checkpoints of another trainer.

    Raises:
        InputError: the newest checkpoint is damaged, or cannot be read, or is of a version that is not converted; or
            `check` raises it; or a checkpoint cannot be written.
    """
    trainer = trainer_of(folder) or trainer_of(replaced_folder(folder))
    if trainer is None or trainer == engine.trainer:
        return None
    others, converted = CheckpointFolder(folder, trainer), converted_folder(folder)
    if engine.is_main:
        with convert_write_errors(folder, folder.parent):
            others.settle_replaced()
    engine.synchronize()
    newest, *older = others.steps()
    loop_states = {newest: _read_loop_state(others, trainer, newest, task)}
    check(newest, loop_states[newest])
    for step in older:
        with suppress(InputError):  # only the newest has to be readable
            loop_states[step] = _read_loop_state(others, trainer, step, task)
    for step, loop_state in sorted(_best_and_newest(loop_states, task).items()):
        state = _read_state(others, trainer, step, engine.config)
        try:
            engine.adopt(state, loop_state, converted)
        except ValueError as error:  # an InputError, or the checkpoint is not one of this run
            raise _unreadable_error(others, trainer, step, error) from None
    kept = folder.with_name(f"{folder.name}-of-{trainer}")
    if engine.is_main:
        with convert_write_errors(folder, folder.parent):
            for stale in (kept, folder.with_name(f"{folder.name}-of-{engine.trainer}")):
                if stale.exists():  # of an earlier change of the trainer
                    shutil.rmtree(stale)
            folder.rename(kept)
            converted.rename(folder)
    engine.synchronize()  # no process opens the folder before
    return HandedOver(trainer, kept)


def _best_and_newest(loop_states: dict[int, LoopState | None], task: Task) -> dict[int, LoopState]:
    """Return the states of the best and of the newest checkpoint, by step."""
    known = {step: state for step, state in loop_states.items() if state is not None}
    ranks = {step: checkpoint_rank(task, state) for step, state in known.items()}
    ranked = [(rank, -step) for step, rank in ranks.items() if rank is not None]  # of equal ranks the earliest is best
    steps = {max(known), *([-max(ranked)[1]] if ranked else [])}
    return {step: known[step] for step in steps}


def _read_loop_state(others: CheckpointFolder, trainer: str, step: int, task: Task) -> LoopState | None:
    """Return the state of the loop in a checkpoint of another trainer; None if it is none that a run writes.

    Raises:
        InputError: the checkpoint is damaged, cannot be read, or has a version that is not converted.
    """
    files = FILES[trainer]
    try:
        version, saved = files.read_loop(others.path / str(step))
        others.check_version(step, version, files.VERSION)
        if version < files.OLDEST_READ:
            raise InputError(
                f"the checkpoint of step {step} in {others.path} has version {version}, and those before "
                f"{files.OLDEST_READ} are not converted: resume once with python -m {trainer}, which writes a new one"
            )
        return parse_loop_state(task, saved)
    except Exception as error:  # damaged files raise too many kinds of exceptions to list
        raise _unreadable_error(others, trainer, step, error) from None


def _read_state(others: CheckpointFolder, trainer: str, step: int, config: ViTConfig) -> TrainingState:
    """Return the training state in a checkpoint of another trainer.

    Raises:
        InputError: the checkpoint is damaged, or cannot be read.
    """
    try:
        state = FILES[trainer].read_state(others.path / str(step), config)
        if state.step != step:  # a copy under another name
            raise ValueError(f"its content is that of step {state.step}")
        return state
    except Exception as error:  # as above
        raise _unreadable_error(others, trainer, step, error) from None


def _unreadable_error(others: CheckpointFolder, trainer: str, step: int, error: Exception) -> InputError:
    """Return the error for a checkpoint that cannot be read, from the exception that reading it has raised."""
    reason = others.damage_of(step, error)
    return InputError(
        f"the checkpoint of step {step} in {others.path} is damaged ({reason}): resume once with python -m {trainer}, "
        "which resumes from the one before"
    )
