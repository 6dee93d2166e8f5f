"""Settings of a JAX training process."""

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jax")

from orbax.checkpoint import v1 as ocp

from train.jax import runtime

COROUTINE = """
import types

@types.coroutine
def wait():
    yield

async def read():
    try:
        await wait()
    except BaseException as error:
        raise Exception("while reading") from error
"""


def test_only_abandoned_reads_are_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of Orbax that fails while it is destroyed, a coroutine of others, and an error outside coroutines."""
    reported: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: reported.append(str(error.exc_value)))
    runtime.ignore_abandoned_reads()

    def abandon_read(file: Path) -> None:
        names: dict[str, Any] = {}
        exec(compile(COROUTINE, file, "exec"), names)
        coroutine = names["read"]()
        coroutine.send(None)
        del coroutine

    class Broken:
        def __del__(self) -> None:
            raise RuntimeError("in a finalizer")

    abandon_read(Path(ocp.__file__).parent / "serialization.py")
    assert reported == []
    abandon_read(Path(__file__))
    Broken()
    assert reported == ["while reading", "in a finalizer"]
