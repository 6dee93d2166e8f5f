"""Checkpoints of a run, written by torch.distributed.checkpoint while training goes on.

Each is a folder, which is complete or absent:

    shard-*.safetensors    the tensors of the training state, in shards; each file says where its parts belong
    checkpoint.json        version, step, what each tensor is, checksums of the parts, and the state of the loop

No file is a pickle, so reading a checkpoint runs no code.
"""

import json
import os
import warnings
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from parity.checkpoints.containers import safetensors
from train.checkpoints.shard_files import JSON_FILE, VERSION, check_files, json_checksum, read_json
from train.loop.checkpoint_folder import CheckpointFolder, JSONCheck, remove_checkpoint
from train.loop.process import lost_process_error
from train.torch.runtime import is_of_lost_process
from train.torch.sharding import local
from vit_spec import InputError

PARTIAL = ".partial"  # ends the name of the folder of a checkpoint that is being written or removed

Tensors = Mapping[str, Tensor]


class Snapshot(NamedTuple):
    """The part of a checkpoint that is the engine's.

    tensors: by name, on the CPU.
    numbers: whole numbers and flags by name.
    """

    tensors: Tensors
    numbers: dict[str, int]


class CheckpointStore:
    """The checkpoints in a folder.

    keep: number of the newest checkpoints to keep; the best one is kept too.
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        is_distributed = dist.is_initialized()
        self._process, self._count = (dist.get_rank(), dist.get_world_size()) if is_distributed else (0, 1)
        # A group for the thread that writes, whose collectives come at any time between those of the training steps.
        self._group: Any = dist.new_group(backend="gloo") if is_distributed else None
        # In a run of one process; and by torch 2.9 itself, about a function of its own.
        for message in ("torch.distributed is disabled", "TypedStorage is deprecated"):
            warnings.filterwarnings("ignore", message=message)
        self._folder = CheckpointFolder(folder, "train.torch")
        self._keep = keep
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        if self._process == 0:
            try:
                self._folder.settle_replaced()
                for unfinished in folder.glob(f"*{PARTIAL}"):
                    remove_checkpoint(unfinished)
            except OSError as error:
                raise self._folder.write_error(error) from error
        self._gather(None)  # no process lists the checkpoints before

    def save(
        self, step: int, take_snapshot: Callable[[], Snapshot], loop_state: dict[str, Any], *, rank: float | None
    ) -> None:
        """Start to write a checkpoint.  The previous one is complete when this one begins.

        An old checkpoint of the same step stays until the new one is complete.

        take_snapshot: called when the previous checkpoint is complete; nothing may change later what it returns.
        loop_state: a JSON object.
        rank: the number that is largest for the best checkpoint; None if its weights were not evaluated.

        Raises:
            InputError: the previous checkpoint cannot be written, for example because the disk is full.
        """
        self._wait()
        self._pending = self._executor.submit(self._write, step, take_snapshot(), loop_state, rank)

    def close(self) -> None:
        """Wait until all checkpoints are written.

        Raises:
            InputError: one of them cannot be written.
        """
        self._wait()
        self._executor.shutdown()

    def _wait(self) -> None:
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                pending.result()
        except (Exception, CheckpointException) as error:
            cause = _cause(error)
            raise lost_process_error() if is_of_lost_process(cause) else self._folder.write_error(cause) from error

    def _write(self, step: int, snapshot: Snapshot, loop_state: dict[str, Any], rank: float | None) -> None:
        """Write a checkpoint under another name, give it its own name when it is complete, and remove old ones."""
        final = self._folder.path / str(step)
        partial = final.with_name(f"{step}{PARTIAL}")
        if self._process == 0:
            remove_checkpoint(partial, ignore_errors=True)
        self._gather(None)  # no process makes the folder before
        writer = HuggingFaceStorageWriter(str(partial), save_distributed=True)
        save(dict(snapshot.tensors), storage_writer=writer, process_group=self._group)
        own = f"shard-{self._process + 1:05d}-*{safetensors.SUFFIX}"
        sums = {path.name: _checksums(path, snapshot.tensors) for path in partial.glob(own)}
        checksums = {file: each for of_process in self._gather(sums) for file, each in of_process.items()}
        if self._process == 0:
            content = {
                "version": VERSION,
                "step": step,
                "rank": rank,
                "numbers": snapshot.numbers,
                "tensors": {name: _kind(tensor) for name, tensor in snapshot.tensors.items()},
                "checksums": checksums,
                "loop": loop_state,
            }
            _write_json(partial / JSON_FILE, content)
            if final.exists():
                self._folder.set_aside_for_replacement(step)
            partial.rename(final)
            _sync(self._folder.path)
            self._folder.settle_replaced()
            self._remove_old()

    def _gather(self, value: Any) -> list[Any]:
        """Return the values of all processes."""
        values = [value] * self._count
        if self._count > 1:
            dist.all_gather_object(values, value, group=self._group)
        return values

    def _common_steps(self) -> list[int]:
        """Return the steps of the checkpoints, the newest first, that the main process finds.

        A network file system may show the others an older state of the folder, from which they would read another step.
        """
        steps: list[int] = self._gather(self._folder.steps())[0]
        return steps

    def _remove_old(self) -> None:
        """Remove all checkpoints but the newest and the best."""
        steps = self._folder.steps()
        ranks = {step: self._read_rank(step) for step in steps}
        ranked = [(rank, -step) for step, rank in ranks.items() if rank is not None]  # of equal ranks the earliest is best
        kept = {*steps[: self._keep], -max(ranked)[1] if ranked else steps[0]}
        for step in steps:
            if step not in kept:
                removed = self._folder.path / f"{step}{PARTIAL}"
                (self._folder.path / str(step)).rename(removed)
                remove_checkpoint(removed)

    def _read_rank(self, step: int) -> float | None:
        try:
            rank = read_json(self._folder.path / str(step))["rank"]
        except (InputError, OSError, ValueError):  # reported when the checkpoint is read
            return None
        return rank if isinstance(rank, float | int) else None

    def restore_newest(
        self, target: Snapshot, check: JSONCheck | None = None
    ) -> tuple[int, Snapshot, dict[str, Any]] | None:
        """Return step, snapshot and loop state of the newest checkpoint that can be read, or None.

        Damaged checkpoints are moved to the folder `checkpoints-damaged` once an older one has been read.

        target: a snapshot of the engine, into whose tensors the checkpoint is read; the checkpoint has tensors of the same
            names, dtypes and shapes.
        check: called with the step and the loop state of a checkpoint before its tensors are read.

        Raises:
            InputError: the newest checkpoint is of a newer version of this package, or cannot be read for a reason other
                than its content; or all are damaged, so that the run would overwrite them; or `check` raises it.
        """
        newest = self._folder.read_newest(self._common_steps(), lambda step: self._read(step, target, check))
        if newest is None:
            return None
        step, restored, damaged = newest
        if damaged and self._process == 0:
            self._folder.move_aside(damaged)
        return step, *restored

    def restore(
        self, step: int, target: Snapshot, check: JSONCheck | None = None
    ) -> tuple[int, Snapshot, dict[str, Any]] | None:
        """Return what `restore_newest` returns, of the checkpoint of a step; None if it is missing or damaged.

        Raises:
            InputError: it is of a newer version of this package, or cannot be read for a reason other than its content; or
                `check` raises it.
        """
        self._wait()
        if step not in self._common_steps():
            return None
        restored, _ = self._read(step, target, check)
        return None if restored is None else (step, *restored)

    def _read(
        self, step: int, target: Snapshot, check: JSONCheck | None
    ) -> tuple[tuple[Snapshot, dict[str, Any]] | None, str]:
        """Return snapshot and loop state of a checkpoint; or None, and why it is damaged."""
        path = self._folder.path / str(step)
        try:
            content = read_json(path)
            self._folder.check_version(step, content["version"], VERSION)
            if content["step"] != step:  # a copy under another name
                raise ValueError(f"its content is that of step {content['step']}")
            if check is not None:
                check(step, content["loop"])
            _check_content(content, target)
            check_files(path, content["checksums"], self._process, self._count)
            reason = ""
        except Exception as error:  # damaged files raise too many kinds of exceptions to list
            reason = self._folder.damage_of(step, error)
        if reasons := [each for each in self._gather(reason) if each]:
            return None, reasons[0]
        try:
            load(dict(target.tensors), storage_reader=HuggingFaceStorageReader(str(path)), process_group=self._group)
        except (Exception, CheckpointException) as error:
            return None, self._folder.damage_of(step, _cause(error))
        return (Snapshot(target.tensors, content["numbers"]), content["loop"]), ""


def _cause(error: BaseException) -> Exception:
    """Return the first exception of a process; torch.distributed.checkpoint collects those of all processes in one."""
    if isinstance(error, CheckpointException):
        first = next(iter(error.failures.values()))[0]
        return first if isinstance(first, Exception) else RuntimeError(str(first))
    return error if isinstance(error, Exception) else RuntimeError(str(error))


def _kind(tensor: Tensor) -> list[Any]:
    """Return dtype and shape of a tensor in all processes, as JSON has them."""
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def _checksums(path: Path, tensors: Tensors) -> dict[str, Any]:
    """Return the checksums of the header of a shard, and of the tensors in it as they are in memory."""
    contents = safetensors.CONTAINER.open(path)
    header = json_checksum(contents.metadata)
    return {"header": header, "tensors": {key: _checksum(local(tensors[key])) for (key,) in contents.arrays}}


def _checksum(tensor: Tensor) -> int:
    """Return the CRC-32 of the bytes of a tensor on the CPU."""
    return zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def _check_content(content: dict[str, Any], target: Snapshot) -> None:
    """Raise ValueError if a checkpoint has not what the run needs: the same numbers and tensors, dtypes and shapes."""
    numbers, found = content["numbers"], content["tensors"]
    if numbers.keys() != target.numbers.keys() or not all(isinstance(each, int) for each in numbers.values()):
        raise ValueError("its metadata is not that of a run")
    expected = {name: _kind(tensor) for name, tensor in target.tensors.items()}
    if others := sorted(expected.keys() ^ found.keys()):
        raise ValueError(f"it {'lacks' if others[0] in expected else 'has another tensor,'} {others[0]}")
    for name, kind in expected.items():
        if found[name] != kind:
            raise ValueError(f"{name} is {' '.join(map(str, found[name]))}, expected {' '.join(map(str, kind))}")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object with its checksum, and wait until it is on the disk."""
    with path.open("x") as file:
        json.dump({"checksum": json_checksum(content), "content": content}, file)
        file.flush()
        os.fsync(file.fileno())
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
