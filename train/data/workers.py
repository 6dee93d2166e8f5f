"""Processes that prepare batches: how many, and what makes grain's workers start quietly and end with the trainer."""

import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

from train.data.sources import Dataset

# When a run ends, prefetched batches are still in shared memory; Python's tracker frees them and warns of each.
TRACKER_WARNING = "ignore:resource_tracker:UserWarning"


def default_workers(source: Dataset) -> int:
    """Return the number of worker processes for a recipe that gives none.

    It is 0 for images that need no decoding, and on machines with few cores: threads suffice there, because Pillow releases
    Python's global lock.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 0 if source.size is not None or cores < 4 else cores - 1


@contextmanager
def quiet_absl() -> Iterator[None]:
    """Show only errors that absl logs."""
    from absl import logging as absl_logging

    logger = absl_logging.get_absl_logger()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def block_signals() -> Iterator[None]:
    """Block SIGINT and SIGTERM in processes started here: a terminal sends them to all, but the trainer ends them."""
    if TRACKER_WARNING not in sys.warnoptions:
        sys.warnoptions.append(TRACKER_WARNING)
    resource_tracker.ensure_running()  # its start unblocks both signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def exit_with_trainer(worker: int, workers: int) -> None:
    """Exit this worker process when the trainer is killed, instead of waiting for ever for its batches to be taken."""

    def wait() -> None:
        trainer = multiprocessing.parent_process()
        assert trainer is not None
        trainer.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def parse_flags() -> None:
    """Mark absl's flags as parsed: grain's workers read them, and nothing here parses them (google/grain#1355)."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
