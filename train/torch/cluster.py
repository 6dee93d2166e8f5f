"""The processes of a PyTorch run: how they find each other."""

import os
import re
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from train.loop import heartbeat
from train.loop.process import is_started_by_srun
from vit_spec import InputError

# Of a collective.  Evaluation and checkpoints of the main process may keep the others waiting; the end of a process is
# noticed earlier, by its connections or by `train.loop.heartbeat`.
TIMEOUT = timedelta(minutes=30)


def join_cluster() -> None:
    """Initialize `torch.distributed` if the environment says that the run has several processes.

    `torchrun` sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.  Slurm has variables of its own.

    Raises:
        InputError: WORLD_SIZE is set and one of the others is missing or not a number; there are fewer GPUs than processes
            on this machine; or as `train.loop.process.is_started_by_srun`.
    """
    env = os.environ
    if "WORLD_SIZE" not in env and is_started_by_srun():
        env |= {"WORLD_SIZE": env["SLURM_NTASKS"], "RANK": env["SLURM_PROCID"], "LOCAL_RANK": env["SLURM_LOCALID"]}
        env.setdefault("MASTER_ADDR", _first_host(env["SLURM_STEP_NODELIST"]))
        env.setdefault("MASTER_PORT", str(20_000 + int(env["SLURM_JOB_ID"]) % 20_000))
    if env.get("WORLD_SIZE", "") in ("", "1"):
        return
    names = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if not env.get(name)]:
        raise InputError(f"WORLD_SIZE is set and {', '.join(missing)} is not: start the processes with torchrun or Slurm")
    if wrong := [name for name in (*names, "WORLD_SIZE") if name != "MASTER_ADDR" and not env[name].isdecimal()]:
        raise InputError(f"{wrong[0]} is {env[wrong[0]]!r}: set it to an integer, as torchrun and Slurm do")
    if torch.cuda.is_available():
        torch.cuda.set_device(_cuda_device(int(env["LOCAL_RANK"]), torch.cuda.device_count()))
    store, rank, count = next(rendezvous("env://", timeout=TIMEOUT))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=TIMEOUT)
    own = store.clone()  # a connection for the thread
    own.set_timeout(timedelta(seconds=heartbeat.INTERVAL))

    def last_text(process: int) -> str:
        key = f"heartbeat/{process}"
        if not own.check([key]):  # `get` would wait for it
            raise LookupError(key)
        return own.get(key).decode()

    heartbeat.start(lambda process, text: own.set(f"heartbeat/{process}", text), last_text, rank, count)


def _cuda_device(local_rank: int, count: int) -> int:
    """Return the number of the GPU of a process, which sees `count` of them.

    Raises:
        InputError: there is none for it.
    """
    if count == 1:  # Slurm may show each process its own GPU alone, as with `srun --gpus-per-task=1`
        return 0
    if local_rank >= count:
        raise InputError(f"LOCAL_RANK is {local_rank} and this machine has {count} GPUs: start one process for each GPU")
    return local_rank


def _first_host(nodes: str) -> str:
    """Return the first host of a list as Slurm writes it, such as "node[003-007,9],other"."""
    match = re.match(r"([^,\[]+)(?:\[(\w+))?", nodes)
    return f"{match[1]}{match[2] or ''}" if match else nodes
