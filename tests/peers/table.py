"""The table of docs/formats.md, from the formats themselves and from what the proofs measured.

    PARITY_PROOFS=DIR python -m pytest tests -k "peers or format"    # in an environment with the peers
    python -m tests.peers.table DIR                                  # takes the figures over, and writes the page

The figures are kept in proofs.json beside this file, so that the page can be made again without the peers.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from parity.checkpoints import containers
from parity.checkpoints.formats import formats, get

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"
PROOFS = Path(__file__).with_name("proofs.json")

Proofs = dict[str, dict[str, Any]]  # format -> {"peers": names and versions, "difference": the largest, in float64}


def collected(folder: Path) -> Proofs:
    """Return what a run of the proofs recorded, one line a proof."""
    found: Proofs = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            proof = found.setdefault(line["format"], {"peers": [], "difference": 0.0})
            proof["peers"] = sorted({*proof["peers"], line["peer"]})
            proof["difference"] = max(proof["difference"], line["torch"], line["jax"])
    return {name: found[name] for name in sorted(found)}


def page(proofs: Proofs) -> str:
    """Return docs/formats.md."""
    kinds = "\n".join(f"| `{name}` | {containers.get(name).what} | {_suffixes(name)} |" for name in containers.containers())
    rows = "\n".join(_row(name, proofs.get(name)) for name in formats())
    return f"""# Formats

A format is the names and layouts that weights are kept in; a container is the kind of file. Any format is read from and
written to any container, and any format becomes any other that can say the same model:

```
python -m parity convert SRC DST --to FORMAT      # SRC: a file, a folder or hf://owner/name; what it is, is recognised
python -m parity inspect SRC                      # what is in it, and what of its config was assumed
python -m parity check SRC --against OTHER        # the same function? both through both twins, in float64
```

Every key is a parameter, or is ignored for a stated reason, or is an error.

## What decides how a file is read

1. **Its own config.** A file that this project wrote carries its config and its format. A `config.json` beside it that
   contradicts them is an error.
2. **A `config.json` beside it.** The weights are read by a format of the library that it names, or not at all. timm's
   `model_args` are followed through the constructor of the architecture's class; of transformers' config every field is
   read, or known not to change the function. An unknown architecture, class, argument, field or value is an error that
   names it.
3. **Its tensors,** where nothing else is there. Whatever changes the function and shows in no tensor is an *assumption*:
   LayerNorm's eps, the activation, pooling, the number of heads, what attention scores are multiplied by, which tokens
   attention reaches and by what scores, how patches are cut and in which order, rotary positions, whether a table of
   positions is used, the order of norms in a block and how its halves are added, what follows the classifier, pixel
   statistics, resampling. The commands print each one, `vit_torch.load` and `vit_jax.load` warn once
   (`parity.AssumptionWarning`) and name them all. Two more are assumptions: which of several models in a file is meant,
   and that layers beside it (`head.mlp`, `scaler`, `vit.pooler` of a classifier) have no part in it. An assumption is
   confirmed or corrected by `--set norms.eps=1e-5`, in Python by `given={{"norms.eps": 1e-5}}`.

```python
model = vit_torch.load("vit.pth", format="timm", given={{"norms.eps": 1e-5, "num_heads": 6}})
model = vit_torch.load("vit/", num_classes=10, image_size=384)  # parity.SurgeryWarning: a new head, resampled positions
```

A table of constants in a file (fixed sinusoids, rotary periods) must be the one that is computed here. A table of lower
precision than the weights is accepted and reported as an assumption; another table is refused.

## All formats

| format | what it is | reads | writes | its config | proven against | float64 |
| --- | --- | --- | --- | --- | --- | --- |
{rows}

*reads*: the key layouts it has, as `--from FORMAT:LAYOUT`; *writes*: the first of them, unless the config asks for another
or `--to FORMAT:LAYOUT` says so. *its config*: where it is read from beside the shapes, and what is assumed of a bare file.
*float64*: the largest relRMS between the outputs of the peer and of either twin on the same weights, over all proofs.

| container | what it is | named |
| --- | --- | --- |
{kinds}
| `folder` | safetensors with the JSON files that the format's own library opens | `DST/` |

What is written carries its config: in the header of safetensors, among the arrays of npz, and where a container has no room
for it (.pth, .msgpack) in `NAME.parity.json` beside the file, in `parity.json` within a folder.
"""


def _suffixes(name: str) -> str:
    suffixes = containers.get(name).suffixes
    return ", ".join(f"`{suffix}`" for suffix in suffixes) or f"`--container {name}`"


def _row(name: str, proof: dict[str, Any] | None) -> str:
    format = get(name)
    variants = ", ".join(f"`{variant}`" for variant in format.tables if variant) or "yes"
    told = "config.json" if format.says else "shapes"
    hidden = ("resampling", "pixels")
    usual = {field: value for field, value in format.assumed.items() if not field.startswith(hidden) and value is not None}
    assumed = ", ".join(f"{field}={value!r}" for field, value in usual.items())
    config = f"{told}; assumed {assumed}" if assumed else told
    writes = "yes, and the folder" if format.says else "yes"
    peers, difference = (", ".join(proof["peers"]), f"{proof['difference']:.1e}") if proof else ("the twins' own tests", "")
    peers = re.sub(r"\b([0-9a-f]{7})[0-9a-f]{33}\b", r"\1", peers)  # a commit
    return f"| `{name}` | {format.what} | {variants} | {writes} | {config} | {peers} | {difference} |"


def main() -> None:
    """Take over the figures of a run, where one is named, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="what PARITY_PROOFS named")
    given = parser.parse_args()
    if given.folder:
        PROOFS.write_text(json.dumps(collected(given.folder), indent=2) + "\n")
    PAGE.write_text(page(json.loads(PROOFS.read_text())))


if __name__ == "__main__":
    main()
