"""Train a Vision Transformer in JAX: `python -m train.jax --config vit_s16`; `--help` explains every option."""

import sys

from parity.commands.run_command import BAD_INPUT, INTERRUPTED
from train.cli import FAILED, leave, run_trainer
from train.loop import interruption
from train.loop.request import Request


def fit(request: Request) -> int:
    """Train as requested; return the exit code."""
    from train.jax import runtime
    from train.jax.cluster import join_cluster
    from train.jax.engine import JaxEngine  # imported after the arguments are parsed, since JAX takes seconds to import
    from train.loop.session import train

    runtime.keep_freed_memory()
    runtime.keep_compiled_programs()
    runtime.ignore_abandoned_reads()
    join_cluster()
    with runtime.one_line_errors():
        return train(request, JaxEngine)


def command() -> None:
    """Run the command line of this process, and exit."""
    interruption.exit_on_ctrl_c()
    status = run_trainer("train.jax", fit)
    # JAX's shutdown would wait for the other processes, and they for this one.  They exit when they notice that it is gone.
    is_distributed = "jax" in sys.modules and sys.modules["jax"].distributed.is_initialized()
    leave(status, without_cleanup=is_distributed and status in (FAILED, BAD_INPUT, INTERRUPTED))


if __name__ == "__main__":
    command()
