"""JAX's coordination service in a process of its own: it outlives process 0 of a run, and ends with the last process."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

jax = pytest.importorskip("jax")

from tests import ROOT
from train.jax import coordinator
from train.jax.coordinator import CoordinationService
from vit_spec import InputError

OPTIONS = {"heartbeat_timeout": 100, "shutdown_timeout": 300}
START = f"""
import sys
from train.jax import coordinator
coordinator.heartbeat.PATIENCE = float(sys.argv[2])
service = coordinator.CoordinationService(sys.argv[1], 1, **{OPTIONS})
print(service._process.pid, flush=True)
sys.stdin.read()
"""
CONNECT = """
import itertools
import sys
from jaxlib import _jax
client = _jax.get_distributed_runtime_client(sys.argv[1], 0, init_timeout=60)
client.connect()
for line in itertools.chain(["connected"], sys.stdin):
    client.key_value_set("line", line, allow_overwrite=True)
    print(client.key_value_try_get("line").strip(), flush=True)
"""


@contextmanager
def program(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start a program, and kill it at the end."""
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=ROOT, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def wait_until_gone(pid: int, seconds: float) -> None:
    """Wait for the end of a process that another one has started."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} is still there")


def test_the_service_outlives_the_process_that_started_it_until_no_process_is_connected() -> None:
    address = free_address()
    with program(START, address, "1000") as starter, program(CONNECT, address) as client:
        service = int(read_line(starter))
        assert read_line(client) == "connected"
        starter.kill()
        starter.wait()
        time.sleep(0.5)
        assert client.stdin
        print("it answers", file=client.stdin, flush=True)
        assert read_line(client) == "it answers"
        client.kill()
        wait_until_gone(service, 60)


def test_the_service_ends_although_a_process_that_hangs_is_connected() -> None:
    address = free_address()
    with program(START, address, "0.5") as starter, program(CONNECT, address) as client:
        service = int(read_line(starter))
        assert read_line(client) == "connected"
        starter.kill()
        wait_until_gone(service, 60)


def test_the_process_of_a_service_ends_with_its_shutdown() -> None:
    service = CoordinationService(free_address(), 1, **OPTIONS)
    assert service._process.poll() is None
    service.shutdown()
    assert service._process.returncode == 0


@pytest.mark.parametrize(
    ("address", "message"),
    [
        (
            "[::]:{port}",
            r"\[::\]:{port}: the port is in use; give another one in JAX_COORDINATOR_ADDRESS, or wait a minute",
        ),
        ("192.0.2.1:{port}", "192.0.2.1:{port}: give an address of this machine in JAX_COORDINATOR_ADDRESS$"),
    ],
    ids=["port in use", "address of another machine"],
)
def test_an_address_that_cannot_be_used_is_refused(address: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC lets several services listen at one port, each of which gets some of the connections."""
    monkeypatch.setattr(coordinator, "_SECONDS_TO_FREE_PORT", 0.2)
    port = free_address().rpartition(":")[2]
    other = CoordinationService(f"[::]:{port}", 1, **OPTIONS)
    try:
        with pytest.raises(InputError, match=f"cannot listen at {message.format(port=port)}"):
            CoordinationService(address.format(port=port), 1, **OPTIONS)
    finally:
        other.shutdown()


def test_jax_starts_our_service_during_its_initialization_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxlib import _jax

    factory, found = _jax.get_distributed_runtime_service, []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_: found.append(_jax.get_distributed_runtime_service))
    coordinator.initialize("localhost:1", 1, 0)
    assert found == [CoordinationService] and _jax.get_distributed_runtime_service is factory
    monkeypatch.setattr(coordinator, "_FACTORY", "a name that this version of JAX does not have")
    coordinator.initialize("localhost:1", 1, 0)
    assert found == [CoordinationService, factory]


def test_options_of_the_service_are_those_of_jax() -> None:
    """What `jax.distributed.initialize` passes can be sent to the process of the service as JSON."""
    started = []

    class Recorder:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            started.append(json.loads(json.dumps([arguments, options])))
            raise InputError("recorded")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(InputError, match="recorded"):
        patch.setattr(coordinator, "CoordinationService", Recorder)
        patch.setattr("jax._src.xla_bridge.backends_are_initialized", lambda: False)  # other tests may have done it
        coordinator.initialize("localhost:1234", 2, 0)
    assert started[0][0] == ["[::]:1234", 2] and {"heartbeat_timeout", "shutdown_timeout"} <= started[0][1].keys()
    assert not jax.distributed.is_initialized()
