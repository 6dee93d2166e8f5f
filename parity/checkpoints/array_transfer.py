"""Write arrays in chunks on a few threads, and verify them by reading them back."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from threading import Lock

import numpy as np

from parity.checkpoints.containers import ArraySpec, Container, Writer
from parity.checkpoints.containers.container import ContiguousArray
from parity.checkpoints.conversion import ArrayConversion
from parity.checkpoints.layout import Array
from vit_spec import InputError

MAX_THREADS = 2  # at most this many arrays of the source are in memory at a time

ByteProgress = Callable[[int, int], None]  # (bytes done, bytes in total)
Checksums = dict[str, list[tuple[int, int, int]]]  # key -> (first entry, number of entries, checksum) of each chunk


class ByteCounter:
    """A count of the bytes that several threads have processed, which reports the progress."""

    def __init__(self, total: int, progress: ByteProgress | None, done: int = 0) -> None:
        self.total, self.progress, self.done, self.lock = total, progress, done, Lock()

    def add(self, count: int) -> None:
        """Count bytes that a thread has processed."""
        with self.lock:
            self.done += count
            if self.progress:
                self.progress(self.done, self.total)


def write_arrays(
    writer: Writer, conversions: Sequence[ArrayConversion], any_order: bool, counter: ByteCounter
) -> Checksums:
    """Write every array, and return the checksums of all chunks."""
    checksums: Checksums = {conversion.key: [] for conversion in conversions}

    def write(conversion: ArrayConversion, start: int, run: Callable[[], Iterator[tuple[int, Array]]]) -> None:
        for first, entries in run():
            writer.write(conversion.key, start + first, entries)
            checksums[conversion.key].append((start + first, len(entries), _checksum(entries)))
            counter.add(entries.nbytes)

    largest_first = sorted(conversions, key=lambda conversion: -conversion.nbytes) if any_order else conversions
    jobs = (partial(write, conversion, start, run) for conversion in largest_first for start, run in conversion.runs)
    _run_jobs(jobs, MAX_THREADS if any_order else 1)
    return checksums


def verify(
    container: Container, path: Path, specs: Mapping[str, ArraySpec], checksums: Checksums, counter: ByteCounter
) -> None:
    """Open the written file as any reader would, and compare the checksum of every chunk with that of the data written.

    Raises:
        OSError: the file cannot be opened, or an array or a checksum differs.
    """
    try:
        found = {"/".join(path_words): array for path_words, array in container.open(path).arrays.items()}
    except InputError as error:
        raise OSError(f"what was written cannot be read back ({error}): check the disk") from None
    wrong = [
        key
        for key, spec in specs.items()
        if key not in found or (found[key].shape, found[key].dtype) != spec.shape_and_dtype
    ]

    def check(key: str) -> None:
        array = found[key]
        # Mapping is safe here: no other process writes to a file that has no name yet.
        mapped = array.memmap() if type(array) is ContiguousArray and array.size else None
        for first, count, checksum in checksums[key]:
            entries = array.read(first, first + count) if mapped is None else mapped[first : first + count]
            if _checksum(entries) != checksum:
                wrong.append(key)
            counter.add(count * specs[key].dtype.itemsize)

    if not wrong:
        _run_jobs((partial(check, key) for key in specs), MAX_THREADS)
    if wrong or len(found) != len(specs):
        raise OSError(f"what was read back is not what was written ({', '.join(wrong[:5])}): check the disk")


def _run_jobs(jobs: Iterator[Callable[[], None]], threads: int) -> None:
    """Run jobs on a number of threads; stop at the first exception, and raise it."""
    if threads == 1:
        for job in jobs:
            job()
        return
    with ThreadPoolExecutor(threads) as pool:
        running: set[Future[None]] = set()
        try:
            for job in jobs:
                running.add(pool.submit(job))
                if len(running) > threads:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    for each in done:
                        each.result()
            for each in running:
                each.result()
        finally:
            for each in running:
                each.cancel()


def _checksum(entries: Array) -> int:
    """Return the sum of the bytes as 64-bit words.

    The sum is as fast as memory, and detects lost, zeroed and misplaced chunks.
    """
    data = entries.view(np.uint8)
    end = len(data) // 8 * 8
    return (int(np.add.reduce(data[:end].view(np.uint64))) + int.from_bytes(data[end:].tobytes(), "little")) % 2**64
