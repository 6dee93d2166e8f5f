"""Program that runs JAX's coordination service; `coordinator.CoordinationService` starts it.

It writes a line when the service listens, and shuts the service down at a line on stdin.  If stdin ends without one, the
process that started it was killed: the service stays until no process is connected to it, at most for MAX_SECONDS.

    python -I coordinator_child.py OPTIONS_AS_JSON MAX_SECONDS [ENTRY_OF_SYS_PATH ...]
"""

import json
import os
import signal
import socket
import sys
import time
from typing import Any


def main(options: dict[str, Any], max_seconds: float) -> None:
    """Run the service until it is not needed any more."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # clusters send them to all processes of a job
        signal.signal(number, signal.SIG_IGN)
    from jaxlib import _jax  # without jax, which takes a second to import

    service = _jax.get_distributed_runtime_service(**options)
    sys.stdout.write("listening\n")
    sys.stdout.flush()
    if not sys.stdin.readline():
        deadline = time.monotonic() + max_seconds
        while _is_connected() and time.monotonic() < deadline:
            time.sleep(0.1)
    service.shutdown()


def _is_connected() -> bool:
    """Return whether this process has a connection to another one."""
    return any(_is_connection(int(name)) for name in os.listdir("/dev/fd"))


def _is_connection(file: int) -> bool:
    """Return whether a file descriptor is that of a connected socket of the Internet."""
    try:
        connection = socket.socket(fileno=file)
    except OSError:
        return False
    try:
        return bool(connection.getpeername())  # "" for sockets between processes of this machine
    except OSError:
        return False
    finally:
        connection.detach()  # without closing it


if __name__ == "__main__":
    sys.path[:] = sys.argv[3:]
    main(json.loads(sys.argv[1]), float(sys.argv[2]))
