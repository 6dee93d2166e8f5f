"""A run that changes its trainer: the checkpoints of the other trainer become checkpoints of this one.

The newest checkpoint is converted, and the best one if it is another: bit for bit, since both trainers store the same
numbers (`train.checkpoints.training_state`).  The new checkpoints are written beside the old ones, and get their place when
all are complete; the old ones stay in a folder of their own.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
    remove_checkpoint,
    replaced_folder,
)
from train.loop.engine import CheckpointCheck, Engine
from train.loop.loop_state import LoopState
from train.recipes import Task
from vit_spec import InputError, ViTConfig

FILES = {"train.jax": orbax_files, "train.torch": shard_files}


class HandedOver(NamedTuple):
    """What `hand_over` has done.

    trainer: the other trainer.
    folder: the folder in which its checkpoints are now.
    note: a line about what is not converted; "" for none.
    """

    trainer: str
    folder: Path
    note: str

    def describe(self, trainer: str) -> list[str]:
        """Return lines about a hand-over to a trainer."""
        now, was = FRAMEWORKS[trainer], FRAMEWORKS[self.trainer]
        line = f"the run continues in {now}: the checkpoints of {was} are converted, and stay as they were in {self.folder}"
        return [line, *filter(None, [self.note])]


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
    trainer = engine.from_main(trainer_of(folder) or trainer_of(replaced_folder(folder)))
    if trainer is None or trainer == engine.trainer:
        return None
    others = CheckpointFolder(folder, trainer)
    if engine.is_main:
        with _convert_errors(folder):
            others.settle_replaced()
    newest, *older = engine.from_main(others.steps())
    try:
        loop_states = {newest: _read_loop_state(others, trainer, newest, task, check)}
    except Exception as error:  # damaged files raise too many kinds of exceptions to list
        raise _damage_error(others, trainer, newest, others.damage_of(newest, error), engine.config) from None
    for step in older:
        with suppress(Exception):  # only the newest has to be one of this run, and readable
            loop_states[step] = _read_loop_state(others, trainer, step, task, check)
    note, best = "", _best_step(loop_states, task)
    if best != newest and (damage := _convert(engine, others, trainer, best, loop_states[best])):
        note = f"the best checkpoint, of step {best}, is damaged ({damage}), and is not converted"
    if damage := _convert(engine, others, trainer, newest, loop_states[newest]):
        raise _damage_error(others, trainer, newest, damage, engine.config)
    kept, stale = (folder.with_name(f"{folder.name}-of-{name}") for name in (trainer, engine.trainer))
    if engine.is_main:
        for path in (kept, stale):  # of an earlier change of the trainer
            with _convert_errors(path):
                if os.path.lexists(path):
                    remove_checkpoint(path)
        with _convert_errors(folder):
            folder.rename(kept)
            converted_folder(folder).rename(folder)
    engine.synchronize()  # no process opens the folder before
    return HandedOver(trainer, kept, note)


def _convert(engine: Engine, others: CheckpointFolder, trainer: str, step: int, loop_state: LoopState) -> str:
    """Convert a checkpoint of another trainer, and return ""; or why it is damaged.

    Raises:
        InputError: it cannot be read for a reason other than its content, or the new one cannot be written.
    """
    try:
        state = _read_state(others, trainer, step, engine.config)
    except Exception as error:  # damaged files raise too many kinds of exceptions to list
        return others.damage_of(step, error)
    try:
        engine.adopt(state, loop_state, converted_folder(others.path))
    except ValueError as error:
        return others.damage_of(step, error)
    return ""


def _read_state(others: CheckpointFolder, trainer: str, step: int, config: ViTConfig) -> TrainingState:
    """Return the training state in a checkpoint of another trainer.

    Raises:
        OSError, ValueError: it is damaged, or cannot be read.
    """
    state = FILES[trainer].read_state(others.path / str(step), config)
    if state.step != step:  # a copy under another name
        raise ValueError(f"its content is that of step {state.step}")
    state.check_shapes()
    return state


@contextmanager
def _convert_errors(path: Path) -> Iterator[None]:
    """Convert an error from changing a folder into an InputError of one line."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"cannot replace {path} ({reason}): correct that, then give the same command again") from None


def _best_step(loop_states: dict[int, LoopState], task: Task) -> int:
    """Return the step of the best checkpoint, or of the newest if none was evaluated."""
    ranks = {step: checkpoint_rank(task, state) for step, state in loop_states.items()}
    ranked = [(rank, -step) for step, rank in ranks.items() if rank is not None]  # of equal ranks the earliest is best
    return -max(ranked)[1] if ranked else max(loop_states)


def _read_loop_state(others: CheckpointFolder, trainer: str, step: int, task: Task, check: CheckpointCheck) -> LoopState:
    """Return the state of the loop in a checkpoint of another trainer.

    Raises:
        InputError: the checkpoint has a version that is not converted, or `check` raises it.
        Exception: any other says that the checkpoint is damaged, or cannot be read.
    """
    files = FILES[trainer]
    version, saved = files.read_loop(others.path / str(step))
    others.check_version(step, version, files.VERSION)
    if version < files.OLDEST_READ:
        raise InputError(
            f"the checkpoint of step {step} in {others.path} has version {version}, and those before "
            f"{files.OLDEST_READ} are not converted: {_resume_once(others, trainer)}, which writes a new one"
        )
    state = parse_loop_state(task, saved)
    check(step, state)
    assert state is not None  # `check` refuses such a checkpoint
    return state


def _damage_error(others: CheckpointFolder, trainer: str, step: int, damage: str, config: ViTConfig) -> InputError:
    """Return the error for a damaged newest checkpoint, with a remedy that works."""
    what, older = f"the checkpoint of step {step} in {others.path} is damaged ({damage})", others.steps()[1:]
    readable = next((each for each in older if _is_readable(others, trainer, each, config)), None)
    if readable is not None:
        return InputError(f"{what}: {_resume_once(others, trainer)}, which resumes from that of step {readable}")
    why = "no other can be read" if older else "there is no other"
    return InputError(f"{what}, and {why}: --init {others.path.parent} starts a new run from its weights")


def _is_readable(others: CheckpointFolder, trainer: str, step: int, config: ViTConfig) -> bool:
    """Return whether the other trainer can resume from a checkpoint, as far as can be told without it."""
    with suppress(Exception):  # damaged files raise too many kinds of exceptions to list
        version, _ = FILES[trainer].read_loop(others.path / str(step))
        if version >= FILES[trainer].OLDEST_READ:
            _read_state(others, trainer, step, config)
        return True
    return False


def _resume_once(others: CheckpointFolder, trainer: str) -> str:
    return f"resume once with python -m {trainer} --run {others.path.parent}"
