"""Command that is `python -m train.jax` with a heartbeat of seconds, so that tests need not wait for a minute."""

import gc

from train.jax.__main__ import command
from train.loop import heartbeat

if __name__ == "__main__":
    gc.set_threshold(100_000, 50, 100)  # as in tests/conftest.py
    heartbeat.INTERVAL, heartbeat.PATIENCE = 0.5, 12.0
    command()
