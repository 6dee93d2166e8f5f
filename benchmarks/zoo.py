"""Every ViT of timm: read as its own function, or refused?

    python -m benchmarks.zoo --only eva02
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.peers import zoo


def main() -> None:
    """Print a line for each file, and the totals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--max-width", type=int, default=1024)
    given = parser.parse_args()
    counts: Counter[str] = Counter()
    for name in zoo.specimens(given.only):
        start = time.time()
        with tempfile.TemporaryDirectory() as folder:
            for outcome in zoo.outcomes(name, Path(folder)):
                counts[outcome.verdict] += 1
                print(outcome, f"| {time.time() - start:.1f}s", flush=True)
    print(dict(counts))
    sys.exit(counts["WRONG"] > 0)


if __name__ == "__main__":
    main()
