"""Train a Vision Transformer in PyTorch: `python -m train.torch --config vit_s16`; `--help` explains every option."""

import sys

from train.cli import leave, run_trainer
from train.loop import interruption, process
from train.loop.request import Request


def fit(request: Request) -> int:
    """Train as requested; return the exit code."""
    process.keep_freed_memory()
    from train.loop.session import train
    from train.torch import runtime
    from train.torch.cluster import join_cluster
    from train.torch.engine import TorchEngine  # after the arguments are parsed, since torch takes seconds to import

    join_cluster()
    with runtime.one_line_errors():
        return train(request, TorchEngine)


def command() -> None:
    """Run the command line of this process, and exit."""
    interruption.exit_on_ctrl_c()
    status = run_trainer("train.torch", fit)
    # PyTorch's shutdown may wait for processes that have ended.
    leave(status, without_cleanup="torch" in sys.modules and sys.modules["torch"].distributed.is_initialized())


if __name__ == "__main__":
    command()
