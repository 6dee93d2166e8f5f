"""The states of a run, each in a folder of its own: written while training goes on, and all there or not at all."""

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

from parity.terminal import note
from vit_spec import InputError, bounded_json

Tree = Any
Note = dict[str, Any]

_JSON = 1 << 26  # bytes of a file that Orbax keeps beside arrays, whatever its number of devices
VERSION = 2  # of what a checkpoint holds; another where a state is made up in another way
WARMED_UP = 2  # the version from which the running mean of weights is warmed up, and holds no initial weights


class Checkpoints:
    """Orbax checkpoints of a state and a note, a JSON object, under a folder.

    keep: how many of the newest stay; the best stays besides.
    rank: what the best has most of, read off a note; None where a note says nothing of it.
    """

    def __init__(self, folder: Path, *, keep: int, rank: Callable[[Note], float | None]) -> None:
        # Orbax tells every save in ten lines, and in a hundred every failure, which it raises besides.
        for name in ("absl", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
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
        """Let Orbax look at the folder: at once it reads the notes of all states, and one that is damaged ends it."""
        self._unnoted()
        self._checkpointer = ocp.training.Checkpointer(
            self._folder,
            preservation_policy=self._kept,
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
            cleanup_tmp_directories=True,
        )

    def _unnoted(self) -> None:
        """Put aside states whose notes are no JSON objects, such as files that a power cut left empty, but for the last.

        Orbax parses them without limits on their length or depth.
        """
        notes = {int(path.name): _notes(path) for path in self._folder.glob("*") if path.name.isdecimal()}
        damaged = {step: "its notes cannot be read" for step, sound in notes.items() if not sound}
        if damaged and len(damaged) == len(notes):
            raise self._lost(damaged)
        if damaged:
            self._put_aside(damaged)

    def save(self, step: int, state: Tree, note: Note) -> None:
        """Begin to write; what an earlier call wrote is complete when this one begins.

        Raises:
            InputError: what was written before could not be: a full disk, say.
        """
        rank = self._rank(note)
        noted = {"version": VERSION, "note": note, "digest": _digest(state)}
        try:
            self._checkpointer.save_async(
                step, state, metrics=None if rank is None else {"rank": rank}, custom_metadata=noted, overwrite=True
            )
        except Exception as error:  # of the system, or what the libraries below make of it
            raise self._unwritten(error) from error

    def close(self) -> None:
        """Wait until all is written.

        Raises:
            InputError: it could not be.
        """
        try:
            self._checkpointer.close()
        except Exception as error:
            raise self._unwritten(error) from error

    def newest(self, like: Tree) -> tuple[int, Tree, Note, int] | None:
        """Return the newest state that can be read: its step, itself, its note and its version; None where there is none.

        like: shapes, types and shardings: a state that lay on another mesh comes onto this one.  What is damaged is put
        aside, under a name that says so, once an older state has been read.

        Raises:
            InputError: the newest is of a newer version of this package, or may not be read; or none is sound: what the run
                left would be overwritten from the beginning; or this is one of several processes, of which the others may
                read on: the damaged state is put aside, and all have to be started again.
        """
        damaged: dict[int, str] = {}
        steps = [each.step for each in reversed(self._checkpointer.checkpoints)]
        for step in steps:
            found, reason = self._read(step, like)
            if found is not None:
                if damaged:
                    self._checkpointer.close()
                    self._put_aside(damaged)
                    self._open()
                return step, *found
            damaged[step] = reason
            if jax.process_count() > 1 and step != steps[-1]:
                self._put_aside(damaged)
                raise InputError("start all processes again: the run goes on from the state before the damaged one")
        if damaged:
            raise self._lost(damaged)
        return None

    def _read(self, step: int, like: Tree) -> tuple[tuple[Tree, Note, int] | None, str]:
        """Read a state, its note and its version, or say why it is damaged."""
        try:
            noted = self._checkpointer.metadata(step).custom_metadata
            if not isinstance(noted, dict) or not {"version", "note", "digest"} <= noted.keys():
                raise ValueError("its notes are not those of a run")
            if (version := noted["version"]) > VERSION:
                raise InputError(
                    f"the checkpoint of step {step} in {self._folder} is of version {version}, and {VERSION} is the newest "
                    "known here: update this package, or give --run a new folder"
                )
            state = self._checkpointer.load(step, like)
            if changed := [name for name, digest in _digest(state).items() if noted["digest"].get(name) != digest]:
                raise ValueError(f"the bits of {', '.join(changed)} have changed")
            return (state, noted["note"], version), ""
        except InputError:
            raise
        except Exception as error:  # a damaged file shows itself in more ways than can be listed
            reason = " ".join(str(error).split())[:120] or type(error).__name__
            if _refused(error):
                what = f"the checkpoint of step {step} in {self._folder} cannot be read, and may be sound ({reason})"
                raise InputError(f"{what}: see to that, then give the same --run") from None
            return None, reason

    def _put_aside(self, damaged: dict[int, str]) -> None:
        aside = self._folder.with_name(f"{self._folder.name}-damaged")
        aside.mkdir(exist_ok=True)
        for step, reason in damaged.items():
            place, taken = aside / str(step), aside / f"{step}-{jax.process_index()}"
            with suppress(FileNotFoundError):  # another process was faster, and what it put aside is to stay
                (self._folder / str(step)).rename(taken)
                shutil.rmtree(place, ignore_errors=True)
                taken.rename(place)
            note(f"the checkpoint of step {step} is damaged ({reason}); it is now in {place}")

    def _lost(self, damaged: dict[int, str]) -> InputError:
        why = "; ".join(f"step {step}: {reason}" for step, reason in damaged.items())
        return InputError(f"no checkpoint in {self._folder} can be read ({why}): give --run a new folder")

    def _unwritten(self, error: Exception) -> InputError:
        if jax.process_count() > 1 and "Gloo" in str(error):  # by which processes on CPUs reach each other
            return InputError("another process of the run has ended: start all of them again, with the same --run")
        cause = " ".join(str(error).split()).rpartition('": ')[2]  # behind the files that it concerns
        why = getattr(error, "strerror", None) or cause[:120]
        return InputError(f"cannot write a checkpoint to {self._folder} ({why}): make room there, then give the same --run")


def _notes(path: Path) -> bool:
    """Whether what is noted beside a state can be read."""
    state = path / "state"
    files = (path / "_CHECKPOINT_METADATA", path / "metrics" / "metrics", state / "_METADATA", state / "_sharding")
    for file in (*files, *(state / "array_metadatas").glob("process_*")):
        try:
            bounded_json.read_object(file, longest=_JSON, undefined=True)
        except OSError:  # not there, or not to be read by this user: that shows where the state is read
            continue
        except InputError:
            return False
    return True


def _refused(error: BaseException | None) -> bool:
    """Whether a file was not read for a reason that lies outside of it: its owner, the disk, too little memory."""
    while error is not None:
        if isinstance(error, OSError | MemoryError) and not isinstance(error, FileNotFoundError):
            return True
        if any(word in str(error) for word in ("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "UNAVAILABLE")):
            return True
        error = error.__cause__ or error.__context__
    return False


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
