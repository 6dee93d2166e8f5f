"""Short versions of the other measurements, one line each: `python -m benchmarks.lines NAME`."""

LINES: tuple[str, ...] = ()


def measure(name, folder, say): ...
