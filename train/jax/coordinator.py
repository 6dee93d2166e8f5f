"""JAX's coordination service in a process of its own, which outlives process 0 of a run.

JAX hosts the service in process 0.  If that process is killed, the other processes lose their connection to the service,
and JAX aborts them with a stack of C++.  A service that outlives process 0 leaves `train.loop.heartbeat` the time to end
them in one line.
"""

import errno
import json
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
from jax._src import distributed

from train.loop import heartbeat
from vit_spec import InputError

_CHILD = Path(__file__).with_name("coordinator_child.py")
_FACTORY = "get_distributed_runtime_service"  # the function of jaxlib that starts the service
_SECONDS_TO_FREE_PORT = 5.0  # the service of a run that was killed ends shortly after the last process of the run


def initialize(*arguments: Any) -> None:
    """Call `jax.distributed.initialize`, with the service in a process of its own if this version of JAX allows it.

    Raises:
        InputError: as `CoordinationService`.
    """
    jaxlib = getattr(distributed, "_jax", None)
    factory = getattr(jaxlib, _FACTORY, None)
    if factory is None:
        jax.distributed.initialize(*arguments)
        return
    setattr(jaxlib, _FACTORY, CoordinationService)
    try:
        jax.distributed.initialize(*arguments)
    finally:
        setattr(jaxlib, _FACTORY, factory)


class CoordinationService:
    """A coordination service in a process of its own, with the interface of `jaxlib._jax.DistributedRuntimeService`.

    Its process ends with `shutdown`.  If process 0 ends without a call of it, the service stays until the other processes
    have ended, at most for twice the time in which they notice that process 0 is gone.

    Args:
        address: the address and the port to listen at.
        num_processes: the number of processes of the run.
        options: further options of the service, numbers.

    Raises:
        InputError: the service cannot listen at the address.
    """

    def __init__(self, address: str, num_processes: int, **options: Any) -> None:
        deadline = time.monotonic() + _SECONDS_TO_FREE_PORT
        while (in_use := _is_in_use(address)) and time.monotonic() < deadline:
            time.sleep(0.1)
        settings = {"address": address, "num_nodes": num_processes, **options}
        # As in `parity.checkpoints.containers.ocdbt`, the child gets `sys.path`, to import the same jaxlib.
        command = [sys.executable, "-I", str(_CHILD), json.dumps(settings), str(2 * heartbeat.PATIENCE), *sys.path]
        if not in_use:
            # In a session of its own it gets no signal that is sent to the process group of this process.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
            )
            assert self._process.stdout
            if self._process.stdout.readline():
                return
            self._process.communicate()
        remedy = "give another one in JAX_COORDINATOR_ADDRESS, or wait a minute for the end of a run that was killed"
        raise InputError(
            f"JAX's coordination service cannot listen at {address}: "
            + (f"the port is in use; {remedy}" if in_use else "give an address of this machine in JAX_COORDINATOR_ADDRESS")
        )

    def shutdown(self) -> None:
        """Shut down the service, and wait until its process has ended."""
        self._process.communicate(b"shutdown\n")


def _is_in_use(address: str) -> bool:
    """Return whether another program listens at an address.  gRPC does not tell, and shares the port with its own kind."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with suppress(ValueError, OverflowError):
        try:
            socket.create_server((host.strip("[]"), int(port)), family=family).close()
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False
