"""Write docs/reference/formats.md from the formats themselves and from the differences that the proofs measured.

    PARITY_PROOFS=DIR python -m pytest tests -k "peers or format"    # in an environment with the peers
    python -m tests.peers.table DIR                                  # reads the figures in DIR and writes the page

The figures are stored in proofs.json beside this file, so that the page can be written again without the peers.  Formats
without a figure in DIR keep theirs.
"""

import argparse
import json
import re
import textwrap
from pathlib import Path
from typing import Any

from parity.checkpoints import containers
from parity.checkpoints.formats import formats, get
from parity.checkpoints.wrapper_names import WRAPPERS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "formats.md"
PROOFS = Path(__file__).with_name("proofs.json")

Proofs = dict[str, dict[str, Any]]  # format -> {"peers": names and versions, "difference": the largest one in float64}


def collect_proofs(folder: Path) -> Proofs:
    """Return the figures that a run of the proofs recorded in a folder, one line for each proof."""
    found: Proofs = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in map(json.loads, path.read_text().splitlines()):
            proof = found.setdefault(line["format"], {"peers": [], "difference": 0.0})
            proof["peers"] = sorted({*proof["peers"], line["peer"]})
            proof["difference"] = max(proof["difference"], line["torch"], line["jax"])
    return found


def merge_proofs(recorded: Proofs, new: Proofs) -> Proofs:
    """Return the recorded proofs with those of some formats replaced, and without those of formats that are gone."""
    merged = {**recorded, **new}
    return {name: merged[name] for name in sorted(merged) if name in formats()}


def formats_page(proofs: Proofs) -> str:
    """Return the text of docs/reference/formats.md."""
    container_rows = "\n".join(
        f"| `{name}` | {containers.get(name).description} | {_suffixes(name)} |" for name in containers.names()
    )
    wrappers = textwrap.fill(", ".join(f"`{name}`" for name in WRAPPERS), 120)
    rows = "\n".join(_row(name, proofs.get(name)) for name in formats())
    return f"""# Formats

A *format* is a set of parameter names and layouts; a *container* is a kind of file. Any format can be read from and
written to any container, and converted to any other format that can express the same model. [Convert a
checkpoint](../guides/convert.md) shows how. Every key of a file is a parameter, or is ignored for a stated reason, or
is an error.

## How a file is interpreted

1. **By its own config.** A file that this project wrote contains its config and the name of its format. A `config.json`
   or image processor beside it that contradicts the config, the class names or the preprocessing stored in it is an
   error.
2. **By a `config.json` beside it.** The weights are read by a format of the library that it names, or refused. timm's
   `model_args` are followed through the constructor of the architecture's class. Every field of a transformers config
   is interpreted, or known not to change the function. An unknown architecture, class, argument, field or value is an
   error that names it. So is a class whose output the twins cannot compute. If a class of transformers returns no single
   vector (all tokens, feature maps, a reconstruction), or `architectures` names no class, the output is an assumption.
   A checkpoint of timm's train.py names its architecture too; if it has arguments that train.py lacks, a fork wrote it,
   and what the architecture implies is an assumption.
   If the keys show a module around the model (`backbone.`, `model.`), `config.json` does not describe that module. It is
   then an assumption that the module adds nothing, and so is what step 3 assumes and no field of the config states.
3. **By its tensors,** if there is nothing else. Everything that changes the function without changing a tensor is an
   *assumption*: LayerNorm's epsilon, the activation, pooling, the number of heads, the score scale, masks and biases of
   attention, the order of patches and pixels, rotary positions, whether a position table is used, the order of norms in
   a block and how its halves are added, what follows the classifier, pixel statistics, resampling. Two more are
   assumptions: which of several models in a file is meant, and that layers beside it (`head.mlp`, `scaler`,
   `vit.pooler` of a classifier) are not part of it.

The commands print each assumption. `vit_torch.load` and `vit_jax.load` emit one `parity.AssumptionWarning` that names
all of them. Confirm or correct an assumption by `--set norms.eps=1e-5`, in Python by `given={{"norms.eps": 1e-5}}`:

```python
model = vit_torch.load("vit.pth", format="timm", given={{"norms.eps": 1e-5, "num_heads": 6}})
```

A table of constants in a file (fixed sinusoids, rotary periods, the index of relative positions, `position_ids`, the zeros
of a classifier without a bias) must equal the table that this project computes. A table of sinusoids or periods may have a
lower precision than the weights, which is reported as an assumption. An index or `position_ids` may be rounded to its
dtype, as in a state dict in half precision. Any other table is refused. The index of relative positions also shows the
image size, which the number of its offsets may leave open.

## Wrappers

A wrapper is a dictionary around the weights, or a word in front of every key. These are removed, also within each other,
and the first that a file has is preferred:

{wrappers}

The modules of torch.compile, FSDP and activation checkpointing (`_orig_mod` and the two after it) are also removed within
keys, as in `blocks.0._orig_mod.norm1.weight`.

`--strip PREFIX` adds one. A wrapper that is not the dictionary of a training loop is a module around the model, and what
its code does is an assumption. A key beside the weights is:

- **Not read**: optimizer state, schedulers, counters (`n_averaged`, `epoch`), counts of torchmetrics (`train_acc.tp`,
  `val.confmat`).
- **Not read, and an assumption**: other weights; layers such as `predictor`, `decoder` and `scaler`; buffers of a loss or
  a metric (`criterion.weight` in one dimension, `loss_fn.pos_weight`, `val_loss.mean_value`); a key that
  `--ignore REGEX` matches and that is not a parameter.
- **Read as the classifier, and an assumption**: one matrix, with or without a bias, named `head`, `classifier` or `fc`,
  beside a module that has no classifier.
- **An error**: any other.

## All formats

- **reads**: the variants of the format; select one by `--from FORMAT:VARIANT`.
- **writes**: the first variant, unless the config needs another one or `--to FORMAT:VARIANT` selects it. "folder" means
  that a folder with the library's own config files can be written.
- **config**: where it is read from besides the shapes, and what is assumed if there is no config file.
- **float64**: the largest relRMS between the outputs of the library and of either twin on the same weights, over all
  proofs.

| format | what it is | reads | writes | config | proven against | float64 |
| --- | --- | --- | --- | --- | --- | --- |
{rows}

## All containers

| container | what it is | selected by |
| --- | --- | --- |
{container_rows}
| `folder` | safetensors with the JSON files that the format's own library opens | `DST/` |

A written file contains its config: in the header of safetensors, among the arrays of npz. Containers without room for
it (.pth, .msgpack) get `NAME.parity.json` beside the file; a folder gets `parity.json`. Both have a fingerprint of the
weights: beside other weights they are not obeyed, and a line `not read: ...` says so.
"""


def _suffixes(name: str) -> str:
    suffixes = containers.get(name).suffixes
    return ", ".join(f"`{suffix}`" for suffix in suffixes) or f"`--container {name}`"


def _row(name: str, proof: dict[str, Any] | None) -> str:
    format = get(name)
    variants = ", ".join(f"`{variant}`" for variant in format.tables if variant) or "yes"
    has_files = format.library.has_files
    source = "config.json" if has_files else "shapes"
    hidden = ("resampling", "pixels")
    usual = {field: value for field, value in format.assumed.items() if not field.startswith(hidden) and value is not None}
    assumed = ", ".join(f"{field}={value!r}" for field, value in usual.items())
    config = f"{source}; assumed {assumed}" if assumed else source
    writes = "yes, folder" if has_files else "yes"
    peers, difference = (", ".join(proof["peers"]), f"{proof['difference']:.1e}") if proof else ("the twins' own tests", "")
    peers = re.sub(r"\b([0-9a-f]{7})[0-9a-f]{33}\b", r"\1", peers)  # a commit
    return f"| `{name}` | {format.description} | {variants} | {writes} | {config} | {peers} | {difference} |"


def main() -> None:
    """Write the page, after recording the figures in a folder if one is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="the folder in PARITY_PROOFS")
    given = parser.parse_args()
    if given.folder:
        found = collect_proofs(given.folder)
        if not found:
            raise SystemExit(f"{given.folder} has no recorded proofs: give the folder in PARITY_PROOFS of a run")
        proofs = merge_proofs(json.loads(PROOFS.read_text()), found)
        PROOFS.write_text(json.dumps(proofs, indent=2) + "\n")
    PAGE.write_text(formats_page(json.loads(PROOFS.read_text())))


if __name__ == "__main__":
    main()
