"""Train a Vision Transformer in PyTorch: `python -m train.torch --config vit_s16`; `--help` explains every option."""

import sys

from train.cli import main
from train.loop import interruption, process
from train.loop.request import Request


def fit(request: Request) -> int:
    """Train as requested; return the exit code."""
    process.keep_freed_memory()
    from train.loop.session import train
    from train.torch import runtime
    from train.torch.engine import (
        TorchEngine,
    )  # imported after the arguments are parsed, since torch takes seconds to import

    with runtime.memory_errors():
        return train(request, TorchEngine)


def command() -> None:
    """Run the command line of this process, and exit."""
    interruption.exit_on_ctrl_c()
    sys.exit(main("train.torch", fit, sys.argv[1:]))


if __name__ == "__main__":
    command()
