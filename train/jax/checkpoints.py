"""Checkpoints of a run, written by Orbax while training goes on.  Each is a folder, which is complete or absent."""

import logging
import math
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from orbax.checkpoint import v1 as ocp

from parity.checkpoints.containers import zarr
from train.checkpoints.orbax_files import MIXED_CHECKSUMS, VERSION, check_tree, find_damage, mix
from train.jax.parameter_tree import Tree
from train.jax.runtime import is_of_lost_process
from train.loop.checkpoint_folder import CheckpointFolder, JSONCheck
from train.loop.process import lost_process_error
from vit_spec import InputError


class CheckpointStore:
    """Orbax checkpoints of the training state and of the loop's state, as a JSON object, in a folder.

    The training state is a pytree whose attribute `step` is the number of steps done.

    keep: number of the newest checkpoints to keep; the best one is kept too.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        # Orbax logs every save in ten lines and every failure in a hundred, although it raises an exception too.
        for name in ("absl", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        policies = ocp.training.preservation_policies
        processes = {"process": jax.process_index(), "num_processes": jax.process_count()}
        self._folder = CheckpointFolder(folder, "train.jax", **processes)
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
        zarr.check_path(folder)
        try:
            self._folder.settle_replaced()
        except OSError as error:
            raise self._write_error(error) from error
        self._open()

    def _open(self) -> None:
        """Open the folder with Orbax, which reads the metadata of all checkpoints at once and fails if one is damaged."""
        self._move_unreadable_aside()
        self._checkpointer = ocp.training.Checkpointer(
            self._folder.path,
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
        damages = {step: find_damage(self._folder.path / str(step)) for step in self._folder.steps()}
        damaged = {step: damage for step, damage in damages.items() if damage}
        if damaged and len(damaged) == len(damages):
            raise self._folder.none_readable_error(damaged)
        if damaged:
            self._folder.move_aside(damaged)

    def save(self, step: int, state: Tree, loop_state: dict[str, Any], *, rank: float | None) -> None:
        """Start to write a checkpoint.  The previous one is complete when this one begins.

        An old checkpoint of the same step stays, under another name, until the new one is complete: Orbax's own `overwrite`
        deletes it first.

        rank: the number that is largest for the best checkpoint; None if its weights were not evaluated.

        Raises:
            InputError: this or the previous checkpoint cannot be written, for example because the disk is full.
        """
        metadata = {"version": VERSION, "note": loop_state, "digest": _checksums(state, VERSION)}
        try:
            metrics = None if rank is None else {"rank": rank, "step": step}
            self._checkpointer.wait()
            self._settle_replaced_once()
            if step in self._steps():
                self._folder.set_aside_for_replacement(step)
                self._checkpointer.reload()
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

    def _settle_replaced_once(self) -> None:
        """Settle replaced checkpoints in the main process, where Orbax renames: others may see the folder too late."""
        if not jax.process_index():
            self._folder.settle_replaced()

    def restore_newest(self, target: Tree, check: JSONCheck | None = None) -> tuple[int, Tree, dict[str, Any], int] | None:
        """Return step, training state, loop state and version of the newest checkpoint that can be read, or None.

        Damaged checkpoints are moved to the folder `checkpoints-damaged` once an older one has been read.

        target: the shapes, dtypes and shardings of the state.  A state that was saved on another mesh is resharded.
        check: called with the step and the loop state of a checkpoint before its arrays are read.

        Raises:
            InputError: the newest checkpoint is of a newer version of this package, or cannot be read for a reason other
                than its content; or all are damaged, so that the run would overwrite them; or one is damaged and the run
                has several processes, which all have to restart because the others may have read it; or `check` raises
                it.
        """
        newest = self._folder.read_newest(self._steps(), lambda step: self._read(step, target, check))
        if newest is None:
            return None
        step, restored, damaged = newest
        if damaged:
            self._checkpointer.close()
            self._folder.move_aside(damaged)
            self._open()
        return step, *restored

    def restore(
        self, step: int, target: Tree, check: JSONCheck | None = None
    ) -> tuple[int, Tree, dict[str, Any], int] | None:
        """Return what `restore_newest` returns, of the checkpoint of a step; None if it is missing or damaged.

        target, check: see `restore_newest`.

        Raises:
            InputError: it is of a newer version of this package, or cannot be read for a reason other than its content; or
                `check` raises it.
        """
        if step not in self._steps():
            return None
        restored, _ = self._read(step, target, check)
        return None if restored is None else (step, *restored)

    def _read(
        self, step: int, target: Tree, check: JSONCheck | None
    ) -> tuple[tuple[Tree, dict[str, Any], int] | None, str]:
        """Return training state, loop state and version of a checkpoint; or None, and why it is damaged."""
        try:
            check_tree(self._folder.path / str(step))
            metadata = self._checkpointer.metadata(step).custom_metadata
            if not isinstance(metadata, dict) or not {"version", "note", "digest"} <= metadata.keys():
                raise ValueError("its metadata is not that of a run")
            self._folder.check_version(step, version := metadata["version"], VERSION)
            if check is not None:
                check(step, metadata["note"])
            state = self._checkpointer.load(step, target)
            if changed := [name for name, sum in _checksums(state, version).items() if metadata["digest"].get(name) != sum]:
                raise ValueError(f"the checksum of {changed[0]} is wrong")
            if (found := int(state.step)) != step:  # a copy under another name
                raise ValueError(f"its content is that of step {found}")
            return (state, metadata["note"], version), ""
        except Exception as error:  # damaged files raise too many kinds of exceptions to list
            return None, self._folder.damage_of(step, error)

    def _write_error(self, error: Exception) -> InputError:
        return lost_process_error() if is_of_lost_process(error) else self._folder.write_error(error)


def _checksums(state: Tree, version: int) -> dict[str, int]:
    """Return a checksum of each array by its path; Orbax and its files have none.

    It is the same on any mesh, and any single changed word changes it.

    version: version of the checkpoint.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    sums = jax.device_get(_sums([array for _, array in leaves], is_mixed=version >= MIXED_CHECKSUMS))
    return {jax.tree_util.keystr(path): int(each) for (path, _), each in zip(leaves, sums, strict=True)}


@partial(jax.jit, static_argnames="is_mixed")
def _sums(arrays: list[Array], *, is_mixed: bool) -> list[Array]:
    """Return the sum modulo 2^32 of all words of each array, each mixed with its index, or multiplied by 2 index + 1."""

    def total(x: Array) -> Array:
        bits = x.astype(jnp.uint8) if x.dtype == bool else x
        word = {1: jnp.uint8, 2: jnp.uint16}.get(bits.dtype.itemsize, jnp.uint32)
        words = jax.lax.bitcast_convert_type(bits, word).astype(jnp.uint32)
        index = _indices(words.shape)
        return (mix(words ^ mix(index)) if is_mixed else words * (2 * index + 1)).sum(dtype=jnp.uint32)

    return [total(x) for x in arrays]


def _indices(shape: tuple[int, ...]) -> Array:
    """Return the index of each entry of a flattened array, modulo 2^32, in the shape of the array."""
    strides = [math.prod(shape[axis + 1 :]) % 2**32 for axis in range(len(shape))]
    iotas = [jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(s) for axis, s in enumerate(strides)]
    return sum(iotas, start=jnp.zeros((), jnp.uint32))
