"""Train the functional twin: `python -m train.jax --config vit_s16`; `--help` explains every field."""

import os
import sys

from train.cli import BAD_INPUT, INTERRUPTED, main
from train.loop import interruption
from train.loop.request import Request


def fit(request: Request) -> int:
    """Train as asked; return the exit status."""
    from train.jax import runtime
    from train.jax.engine import JaxEngine  # loads jax, which takes seconds: not before the arguments are understood
    from train.jax.sharding import join_cluster
    from train.loop.session import train

    runtime.keep_freed_memory()
    runtime.keep_compiled_programs()
    join_cluster()
    with runtime.memory_told():
        return train(request, JaxEngine)


def leave(status: int) -> None:
    """End the process; at bad input or a second Ctrl-C at once, though others share the run.

    jax would wait for them, and they for this one; they end when they miss it.
    """
    if status in (BAD_INPUT, INTERRUPTED) and "jax" in sys.modules and sys.modules["jax"].distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def command() -> None:
    """Run the command line of this process, and end it."""
    interruption.leave_at_once()
    leave(main("train.jax", fit, sys.argv[1:]))


if __name__ == "__main__":
    command()
