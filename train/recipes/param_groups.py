"""Which parameters learn, and how fast: layer-wise decay of the learning rate, and freezing, read off `vit_spec.rows`."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from vit_spec import InputError, ViTConfig, nearest, rows


def multipliers(
    config: ViTConfig, *, layer_decay: float = 1.0, freeze: Sequence[str] = ()
) -> dict[str, NDArray[np.float64]]:
    """Return what multiplies the learning rate of every parameter, by the name of its row; 0 where it is frozen.

    Parameters of blocks have one number a block, (depth,); the others one number, ().

    layer_decay: what a layer has of the rate of the layer after it.  The head, and all else behind the blocks, has the
        full rate, the last block `layer_decay` of it, and the embedding layer_decay ** (depth + 1) (BEiT,
        `optim_factory.get_num_layer_for_vit`; ELECTRA, arXiv 2003.10555).
    freeze: patterns of names as the PyTorch twin has them: "patch_embed.*", "blocks.[0-5].*", "*.bias".

    Raises:
        InputError: a pattern that no parameter has, or patterns that leave nothing to learn.
    """
    found: dict[str, NDArray[np.float64]] = {}
    names: list[str] = []
    used: set[str] = set()
    behind = False  # once the blocks have begun, what is not in them comes after them
    for name, row in rows(config).items():
        stacked = row.axes[0] == "block"
        behind |= stacked
        layers = np.arange(1, config.depth + 1) if stacked else np.asarray((config.depth + 1) * behind)
        rates = np.asarray(layer_decay ** (config.depth + 1.0 - layers))
        for place in np.ndindex(rates.shape):
            spelled = name.replace("blocks", f"blocks.{place[0]}", 1) if stacked else name
            frozen = [pattern for pattern in freeze if fnmatchcase(spelled, pattern)]
            names.append(spelled)
            used.update(frozen)
            rates[place] = 0.0 if frozen else rates[place]
        found[name] = rates
    for wrong in sorted(set(freeze) - used)[:1]:
        raise InputError(
            f"freeze has {wrong!r}, a name that no parameter has{nearest(wrong, names)}; * stands for anything"
        )
    if not any(rates.any() for rates in found.values()):
        raise InputError(f"freeze {' '.join(freeze)} holds every weight, and nothing is left to learn: leave some out")
    return found
