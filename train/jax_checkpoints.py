"""The states of a run, each in a folder of its own: written while training goes on, and all there or not at all."""

import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from orbax.checkpoint import v1 as ocp

from vit_spec import InputError

Tree = Any
Note = dict[str, Any]


class Checkpoints:
    """Orbax checkpoints of a state and a note, a JSON object, under a folder.

    keep: how many of the newest stay; the best stays besides.
    rank: what the best has most of, read off a note; None where a note says nothing of it.
    """

    def __init__(self, folder: Path, *, keep: int, rank: Callable[[Note], float | None]) -> None:
        logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax tells every save in ten lines
        policies = ocp.training.preservation_policies
        self._folder = folder
        self._kept = policies.AnyPreservationPolicy(
            [
                policies.LatestN(keep),
                policies.BestN(get_metric_fn=lambda metrics: metrics["rank"], n=1, keep_checkpoints_without_metrics=False),
            ]
        )
        self._rank = rank
        self._open()

    def _open(self) -> None:
        self._checkpointer = ocp.training.Checkpointer(
            self._folder,
            preservation_policy=self._kept,
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
            cleanup_tmp_directories=True,
        )

    def save(self, step: int, state: Tree, note: Note) -> None:
        """Begin to write; what an earlier call wrote is complete when this one begins.

        Raises:
            InputError: what was written before could not be: a full disk, say.
        """
        rank = self._rank(note)
        noted = {"note": note, "digest": _digest(state)}
        try:
            self._checkpointer.save_async(
                step, state, metrics=None if rank is None else {"rank": rank}, custom_metadata=noted, overwrite=True
            )
        except OSError as error:
            raise self._unwritten(error) from None

    def close(self) -> None:
        """Wait until all is written.

        Raises:
            InputError: it could not be.
        """
        try:
            self._checkpointer.close()
        except OSError as error:
            raise self._unwritten(error) from None

    def newest(self, like: Tree) -> tuple[int, Tree, Note] | None:
        """Return the newest state that can be read, its step and note; None where there is none.

        like: shapes, types and shardings: a state that lay on another mesh comes onto this one.  What cannot be read is
        put aside, under a name that says so, and the state before it is taken.

        Raises:
            InputError: there are states, and none can be read: what the run left would be overwritten from the beginning.
        """
        found = bool(self._checkpointer.checkpoints)
        while (latest := self._checkpointer.latest) is not None:
            try:
                noted = self._checkpointer.metadata(latest).custom_metadata
                state = self._checkpointer.load(latest, like)
                if changed := [name for name, digest in _digest(state).items() if noted["digest"].get(name) != digest]:
                    raise ValueError(f"the bits of {', '.join(changed)} have changed")
                return latest.step, state, noted["note"]
            except Exception as error:  # a damaged file shows itself in more ways than can be listed
                self._put_aside(latest.step, error)
        if found:
            raise InputError(f"none of the checkpoints of {self._folder.parent} can be read: give --run a new folder")
        return None

    def _put_aside(self, step: int, error: Exception) -> None:
        self._checkpointer.close()
        damaged, aside = self._folder / str(step), self._folder.with_name(f"{self._folder.name}-damaged") / str(step)
        if jax.process_index() == 0:
            aside.parent.mkdir(exist_ok=True)
            shutil.rmtree(aside, ignore_errors=True)
            damaged.rename(aside)
        if jax.process_count() > 1:
            ocp.multihost.sync_global_processes(f"put aside {step}")
        reason = " ".join(str(error).split())[:120]
        said = f"the checkpoint of step {step} is damaged ({reason}); it is now in {aside}"
        print(said, file=sys.stderr)
        self._open()

    def _unwritten(self, error: OSError) -> InputError:
        why = error.strerror or " ".join(str(error).split())[:120]
        return InputError(f"cannot write a checkpoint to {self._folder} ({why}): make room there, then give the same --run")


def _digest(state: Tree) -> dict[str, int]:
    """Return a number for each array, by its path, that any changed bit changes: neither files nor Orbax tell one.

    It is the sum modulo 2^32 of all 32-bit words, each times an odd number of its own: the same on any mesh.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    found = jax.device_get(_sums([array for _, array in leaves]))
    return {jax.tree_util.keystr(path): int(each) for (path, _), each in zip(leaves, found, strict=True)}


@jax.jit
def _sums(arrays: list[Array]) -> list[Array]:
    def total(x: Array) -> Array:
        bits = x.astype(jnp.uint8) if x.dtype == bool else x
        word = {1: jnp.uint8, 2: jnp.uint16}.get(bits.dtype.itemsize, jnp.uint32)
        words = jax.lax.bitcast_convert_type(bits, word).astype(jnp.uint32)
        odd = 2 * jax.lax.iota(jnp.uint32, words.size).reshape(words.shape) + 1
        return (words * odd).sum(dtype=jnp.uint32)

    return [total(x) for x in arrays]
