"""Command that writes the golden files again.  The tests only read them.

    python -m tests.goldens.make --clones DIR            # all, from the root of the repository
    python -m tests.goldens.make --clones DIR timm_plain # some

transformers has no Flax models since version 5.  Their golden files need an environment of their own:

    pip install numpy torch "transformers==4.57.6" jax flax safetensors
    python -m tests.goldens.make hf_flax_vit             # and the others of from_transformers_flax.py

All others need an environment with the peers.  The provenance in each file has the versions with which it was written:

    pip install numpy torch torchvision timm transformers vit-pytorch safetensors jax flax absl-py Pillow

They also need clones of the repositories that are not packages in DIR, at the commits in `peers.COMMITS`.

Each peer is built tiny, filled with noise from a seeded generator and run in float64 throughout: see `peers.Float64`.
"""

import argparse
import contextlib
import dataclasses
import datetime
import importlib
from pathlib import Path

from tests.goldens.golden import write
from tests.goldens.peers import CASES, CLONES

for peers in ("timm", "timm_blocks", "transformers", "transformers_flax", "packages", "clones", "google", "articles"):
    with contextlib.suppress(ImportError):  # no environment has all peers
        importlib.import_module(f"tests.goldens.from_{peers}")  # registers its cases


def main() -> None:
    """Write the golden files named on the command line, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(CASES)}")
    parser.add_argument("--clones", type=Path, help="the folder that contains the clones")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    if arguments.clones:
        CLONES.append(arguments.clones.resolve())

    for name in arguments.names or CASES:
        golden = CASES[name]()
        description = (CASES[name].__doc__ or "").strip()
        provenance = {**golden.provenance, "date": datetime.date.today().isoformat(), "anchors": description}
        path = write(name, dataclasses.replace(golden, provenance=provenance))
        print(f"{name:32} {path.stat().st_size / 1024:6.1f} kB  {golden.provenance['peer']}")


if __name__ == "__main__":
    main()
