"""Command that is `python -m train.jax` with a heartbeat of seconds, so that tests need not wait for a minute."""

from train.jax.__main__ import command
from train.loop import heartbeat

if __name__ == "__main__":
    heartbeat.INTERVAL, heartbeat.PATIENCE = 0.5, 20.0
    command()
