"""Checkpoints of a run, written by Orbax while training goes on.  Each is a folder, which is complete or absent."""

import logging
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from orbax.checkpoint import v1 as ocp

from parity.checkpoints.containers import ocdbt, zarr
from parity.checkpoints.containers.budget import Budget
from parity.terminal import print_note
from train.loop.engine import replaced_folder
from vit_spec import InputError, bounded_json

Tree = Any
LoopState = dict[str, Any]  # see `train.loop.engine`

MAX_JSON_BYTES = 1 << 26  # of a metadata file of Orbax, for any number of devices
VERSION = 2  # of the content of a checkpoint; increase it when the structure of the training state changes
WARMED_UP_EMA = 2  # the version from which the EMA is warmed up and contains no initial weights


class CheckpointStore:
    """Orbax checkpoints of the training state and of the loop's state, a JSON object, in a folder.

    The training state is a pytree whose attribute `step` is the number of steps done.

    keep: number of the newest checkpoints to keep; the best one is kept too.
    rank: returns the number that is largest for the best checkpoint, given the loop's state; None if it has none.
    """

    def __init__(self, folder: Path, *, keep: int, rank: Callable[[LoopState], float | None]) -> None:
        # Orbax logs every save in ten lines and every failure in a hundred, although it raises an exception too.
        for name in ("absl", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        policies = ocp.training.preservation_policies
        self._folder = folder
        self._preservation_policy = policies.AnyPreservationPolicy(
            [
                policies.LatestN(keep),
                # Of equal ranks the earliest is best, as in the loop.  Checkpoints of older versions lack "step".
                policies.BestN(
                    get_metric_fn=lambda metrics: (metrics["rank"], -metrics.get("step", 0)),
                    n=1,
                    keep_checkpoints_without_metrics=False,
                ),
            ]
        )
        self._rank = rank
        zarr.check_path(folder)
        try:
            self._settle_replaced()
        except OSError as error:
            raise self._write_error(error) from error
        self._open()

    def _open(self) -> None:
        """Open the folder with Orbax, which reads the metadata of all checkpoints at once and fails if one is damaged."""
        self._move_unreadable_aside()
        self._checkpointer = ocp.training.Checkpointer(
            self._folder,
            preservation_policy=self._preservation_policy,
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
            cleanup_tmp_directories=True,
        )

    def _move_unreadable_aside(self) -> None:
        """Move checkpoints with unreadable metadata aside, such as files that a power failure left empty.

        Orbax parses these JSON files without limits on their length or depth.  It also opens pipes, and waits for a writer.

        Raises:
            InputError: all checkpoints are unreadable.
        """
        damages = {int(path.name): _find_damage(path) for path in self._folder.glob("*") if path.name.isdecimal()}
        damaged = {step: damage for step, damage in damages.items() if damage}
        if damaged and len(damaged) == len(damages):
            raise self._none_readable_error(damaged)
        if damaged:
            self._move_aside(damaged)

    def save(self, step: int, state: Tree, loop_state: LoopState) -> None:
        """Start to write a checkpoint.  The previous one is complete when this one begins.

        An old checkpoint of the same step stays, under another name, until the new one is complete: Orbax's own `overwrite`
        deletes it first.

        Raises:
            InputError: this or the previous checkpoint cannot be written, for example because the disk is full.
        """
        rank = self._rank(loop_state)
        metadata = {"version": VERSION, "note": loop_state, "digest": _checksums(state)}
        try:
            metrics = None if rank is None else {"rank": rank, "step": step}
            self._checkpointer.wait()
            self._settle_replaced_once()
            if step in self._steps():
                self._set_aside_for_replacement(step)
            self._checkpointer.save_async(step, state, metrics=metrics, custom_metadata=metadata)
        except Exception as error:  # an OSError, or whatever the libraries below convert it to
            raise self._write_error(error) from error

    def close(self) -> None:
        """Wait until all checkpoints are written.

        Raises:
            InputError: one of them cannot be written.
        """
        try:
            self._checkpointer.close()
            self._settle_replaced_once()
        except Exception as error:
            raise self._write_error(error) from error

    def _steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, the newest first."""
        return [each.step for each in reversed(self._checkpointer.checkpoints)]

    def _set_aside_for_replacement(self, step: int) -> None:
        """Rename the checkpoint of a step, so that a new one can get its name; see `_settle_replaced`."""
        replaced_folder(self._folder).mkdir(exist_ok=True)
        with suppress(FileNotFoundError):  # another process has moved it already
            (self._folder / str(step)).rename(replaced_folder(self._folder) / str(step))
        self._checkpointer.reload()

    def _settle_replaced(self) -> None:
        """Remove each replaced checkpoint whose replacement is complete, and give each other one its name back.

        Orbax gives a checkpoint its name when it is complete.  Several processes may do this at once.
        """
        aside = [path for path in replaced_folder(self._folder).glob("*") if path.name.isdecimal()]
        for old in aside:
            if (self._folder / old.name).exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                self._folder.mkdir(exist_ok=True)
                with suppress(FileNotFoundError):  # another process has moved it already
                    old.rename(self._folder / old.name)
        if aside:  # an empty folder may be one that another process has just made
            with suppress(OSError):
                replaced_folder(self._folder).rmdir()

    def _settle_replaced_once(self) -> None:
        """Call `_settle_replaced` in the main process, where Orbax renames: others may see the folder too late."""
        if not jax.process_index():
            self._settle_replaced()

    def restore_newest(self, target: Tree) -> tuple[int, Tree, LoopState, int] | None:
        """Return step, training state, loop state and version of the newest checkpoint that can be read, or None.

        Damaged checkpoints are moved to the folder `checkpoints-damaged` once an older one has been read.

        target: the shapes, dtypes and shardings of the state.  A state that was saved on another mesh is resharded.

        Raises:
            InputError: the newest checkpoint is of a newer version of this package, or cannot be read for a reason other
                than its content; or all are damaged, so that the run would overwrite them; or one is damaged and the run
                has several processes, which all have to restart because the others may have read it.
        """
        damaged: dict[int, str] = {}
        steps = self._steps()
        for step in steps:
            restored, reason = self._read(step, target)
            if restored is not None:
                if damaged:
                    self._checkpointer.close()
                    self._move_aside(damaged)
                    self._open()
                return step, *restored
            damaged[step] = reason
            if jax.process_count() > 1 and step != steps[-1]:
                self._move_aside(damaged)
                raise InputError("start all processes again: the run resumes from the checkpoint before the damaged one")
        if damaged:
            raise self._none_readable_error(damaged)
        return None

    def restore(self, step: int, target: Tree) -> tuple[int, Tree, LoopState, int] | None:
        """Return what `restore_newest` returns, of the checkpoint of a step; None if it is missing or damaged.

        target: see `restore_newest`.

        Raises:
            InputError: it is of a newer version of this package, or cannot be read for a reason other than its content.
        """
        if step not in self._steps():
            return None
        restored, _ = self._read(step, target)
        return None if restored is None else (step, *restored)

    def _read(self, step: int, target: Tree) -> tuple[tuple[Tree, LoopState, int] | None, str]:
        """Return training state, loop state and version of a checkpoint; or None, and why it is damaged."""
        try:
            _check_tree(self._folder / str(step))
            metadata = self._checkpointer.metadata(step).custom_metadata
            if not isinstance(metadata, dict) or not {"version", "note", "digest"} <= metadata.keys():
                raise ValueError("its metadata is not that of a run")
            if (version := metadata["version"]) > VERSION:
                raise InputError(
                    f"the checkpoint of step {step} in {self._folder} has version {version}, and this package "
                    f"reads versions up to {VERSION}: update it, or give --run a new folder"
                )
            state = self._checkpointer.load(step, target)
            if changed := [name for name, sum in _checksums(state).items() if metadata["digest"].get(name) != sum]:
                raise ValueError(f"the checksum of {', '.join(changed)} is wrong")
            if (found := int(state.step)) != step:  # a copy under another name
                raise ValueError(f"its content is that of step {found}")
            return (state, metadata["note"], version), ""
        except InputError:
            raise
        except Exception as error:  # damaged files raise too many kinds of exceptions to list
            reason = " ".join(str(error).split())[:120] or type(error).__name__
            if _is_environment_error(error):
                what = f"the checkpoint of step {step} in {self._folder} cannot be read, but may be intact ({reason})"
                raise InputError(f"{what}: remove the cause, then give the same --run") from None
            return None, reason

    def _move_aside(self, damaged: dict[int, str]) -> None:
        aside = self._folder.with_name(f"{self._folder.name}-damaged")
        aside.mkdir(exist_ok=True)
        for step, reason in damaged.items():
            target, temporary = aside / str(step), aside / f"{step}-{jax.process_index()}"
            with suppress(FileNotFoundError):  # another process has moved it already
                (self._folder / str(step)).rename(temporary)
                shutil.rmtree(target, ignore_errors=True)
                temporary.rename(target)
            print_note(f"the checkpoint of step {step} is damaged ({reason}); it was moved to {target}")

    def _none_readable_error(self, damaged: dict[int, str]) -> InputError:
        why = "; ".join(f"step {step}: {reason}" for step, reason in damaged.items())
        return InputError(f"no checkpoint in {self._folder} can be read ({why}): give --run a new folder")

    def _write_error(self, error: Exception) -> InputError:
        if jax.process_count() > 1 and "Gloo" in str(error):  # Gloo connects processes on CPUs
            return InputError("another process of the run has ended: start all processes again with the same --run")
        cause = " ".join(str(error).split()).rpartition('": ')[2]  # after the names of the files
        reason = getattr(error, "strerror", None) or cause[:120]
        return InputError(
            f"cannot write a checkpoint to {self._folder} ({reason}): make room there, then give the same --run"
        )


def _find_damage(path: Path) -> str:
    """Return why a checkpoint must not be opened: damaged JSON files, pipes, devices or holes; "" if there is no reason."""
    state = path / "state"
    files = (path / "_CHECKPOINT_METADATA", path / "metrics" / "metrics", state / "_METADATA", state / "_sharding")
    for file in (*files, *(state / "array_metadatas").glob("process_*")):
        try:
            bounded_json.read_object(file, max_bytes=MAX_JSON_BYTES, allow_nan=True)
        except OSError:  # missing, or no permission: reported when the state is read
            continue
        except InputError:
            return "its metadata cannot be read"
    try:
        zarr.scan_files(path, Budget())
    except OSError:  # as above
        pass
    except InputError as error:
        return _shorten(error, path)
    return ""


def _check_tree(path: Path) -> None:
    """Raise ValueError if the arrays of a checkpoint are damaged, or their description takes too much memory or time."""
    try:
        ocdbt.check_tree(path / "state")
    except InputError as error:
        raise ValueError(_shorten(error, path)) from None


def _shorten(error: InputError, path: Path) -> str:
    """Return the message of an error without its remedy and with paths below that of the checkpoint."""
    return str(error).rpartition(": ")[0].replace(f"{path}/", "")


def _is_environment_error(error: BaseException | None) -> bool:
    """Whether a file could not be read for a reason other than its content: permission, disk, memory."""
    while error is not None:
        if isinstance(error, OSError | MemoryError) and not isinstance(error, FileNotFoundError):
            return True
        if any(word in str(error) for word in ("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAVAILABLE")):
            return True
        error = error.__cause__ or error.__context__
    return False


def _checksums(state: Tree) -> dict[str, int]:
    """Return a checksum of each array by its path; Orbax and its files have none.

    The checksum is the sum modulo 2^32 of all words, each multiplied by an odd number of its own.  Any single changed word
    changes it, and it is the same on any mesh.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    sums = jax.device_get(_weighted_sums([array for _, array in leaves]))
    return {jax.tree_util.keystr(path): int(each) for (path, _), each in zip(leaves, sums, strict=True)}


@jax.jit
def _weighted_sums(arrays: list[Array]) -> list[Array]:
    def total(x: Array) -> Array:
        bits = x.astype(jnp.uint8) if x.dtype == bool else x
        word = {1: jnp.uint8, 2: jnp.uint16}.get(bits.dtype.itemsize, jnp.uint32)
        words = jax.lax.bitcast_convert_type(bits, word).astype(jnp.uint32)
        odd = 2 * jax.lax.iota(jnp.uint32, words.size).reshape(words.shape) + 1
        return (words * odd).sum(dtype=jnp.uint32)

    return [total(x) for x in arrays]
