"""Settings of a JAX training process."""

import sys
import warnings
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
    """Reads of Orbax that have not begun, are destroyed or end late; coroutines and finalizers of others."""
    reported: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: reported.append(str(error.exc_value)))

    def abandon_read(file: Path, *, has_begun: bool = True) -> None:
        names: dict[str, Any] = {}
        exec(compile(COROUTINE, file, "exec"), names)
        coroutine = names["read"]()
        if has_begun:
            coroutine.send(None)
        del coroutine

    class Broken:
        def __init__(self, message: str) -> None:
            self.message = message

        def __del__(self) -> None:
            raise RuntimeError(self.message)

    of_orbax = Path(ocp.__file__).parent / "serialization.py"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        runtime.ignore_abandoned_reads()
        abandon_read(of_orbax, has_begun=False)
    assert not warned
    abandon_read(of_orbax)
    Broken("Event loop is closed")  # raised in a callback of the loop, whose object is not Orbax's
    assert reported == []
    abandon_read(Path(__file__))
    Broken("in a finalizer")
    assert reported == ["while reading", "in a finalizer"]
