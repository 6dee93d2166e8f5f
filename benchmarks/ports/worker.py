"""Judge one pair in a process of its own: `python -m benchmarks.ports.worker PAIR FAULTS SEED [PATH ...]`.

The paths are put first on sys.path.  Every result is printed as one line of JSON.
"""

import json
import sys
import traceback
import warnings


def main() -> None:
    """Print the results of the pair."""
    name, faults, seed, *paths = sys.argv[1:]
    sys.path[:0] = paths
    warnings.simplefilter("ignore")
    import torch

    import tests.goldens.peers  # noqa: F401  first: it makes torchvision importable
    from benchmarks.ports.pairs import find
    from benchmarks.ports.verdicts import judge

    torch.set_num_threads(1)
    try:
        for result in judge(find(name), int(faults), int(seed)):
            result.pop("report", None)
            print("RESULT " + json.dumps(result), flush=True)
    except Exception as error:  # a builder of any library can raise anything
        traceback.print_exc()
        print("RESULT " + json.dumps({"event": "error", "pair": name, "reason": f"{type(error).__name__}: {error}"[:1500]}))


if __name__ == "__main__":
    main()
