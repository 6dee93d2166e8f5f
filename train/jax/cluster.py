"""The processes of a JAX run: how they find each other."""

import os
import zlib

import jax
import numpy as np
from jax._src import distributed
from jax.experimental import multihost_utils

from train.jax import coordinator
from train.jax.parameter_tree import Tree
from train.loop import heartbeat
from train.loop.process import is_started_by_srun
from vit_spec import InputError


def join_cluster() -> None:
    """Initialize `jax.distributed` if the environment says that the run has several processes.

    JAX detects Slurm, Open MPI and TPU pods itself.  Elsewhere, set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID.

    Raises:
        InputError: JAX_COORDINATOR_ADDRESS is set, and has no port, or one of the other two is missing or out of range; or
            as `train.loop.process.is_started_by_srun` and `train.jax.coordinator.initialize`.
    """
    env = os.environ
    if "JAX_COORDINATOR_ADDRESS" in env:
        try:
            count, index = (int(env[name]) for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"))
        except (KeyError, ValueError):
            raise InputError(
                "JAX_COORDINATOR_ADDRESS is set: set JAX_NUM_PROCESSES and JAX_PROCESS_ID too, to integers"
            ) from None
        if not 0 <= index < count:
            last = max(count, 1) - 1
            raise InputError(
                f"JAX_PROCESS_ID is {index} and JAX_NUM_PROCESSES {count}: number the processes from 0 to {last}"
            )
        address = env["JAX_COORDINATOR_ADDRESS"]
        host, _, port = address.rpartition(":")
        # gRPC would subtract 65536 from a larger number.
        if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise InputError(
                f"JAX_COORDINATOR_ADDRESS is {address!r}: give HOST:PORT of process 0, with a port from 1 to 65535"
            )
        coordinator.initialize(address, count, index)
    elif (
        is_started_by_srun()
        or int(env.get("OMPI_COMM_WORLD_SIZE", "1") or 1) > 1
        or "," in env.get("TPU_WORKER_HOSTNAMES", "")
        or "MEGASCALE_COORDINATOR_ADDRESS" in env
    ):
        coordinator.initialize()
    if jax.distributed.is_initialized():
        # JAX notices the end of a process after 100 s, and ends the others with a stack of C++.
        client = distributed.global_state.client
        assert client is not None
        heartbeat.start(
            lambda process, text: client.key_value_set(f"heartbeat/{process}", text, allow_overwrite=True),
            lambda process: client.key_value_try_get(f"heartbeat/{process}"),
            jax.process_index(),
            jax.process_count(),
        )


def check_same_on_all_processes(values: Tree, what: str) -> None:
    """Compare the checksums of host arrays that all processes must have.

    what: what these are, in plural, in the message.

    Raises:
        InputError: they differ.
    """
    if jax.process_count() == 1:
        return
    checksum = 0
    for leaf in jax.tree.leaves(values):
        checksum = zlib.crc32(np.ascontiguousarray(leaf).data, checksum)
    if np.ptp(multihost_utils.process_allgather(np.uint32(checksum))):
        raise InputError(f"{what} differ between the processes of the run: let all of them read the same file")
