"""Learning-rate multipliers of parameters: layer-wise learning-rate decay and freezing, from `vit_spec.rows`."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

import numpy as np
from numpy.typing import NDArray

from train.recipes.fields import FieldError
from vit_spec import ViTConfig, nearest, rows


def lr_multipliers(
    config: ViTConfig, *, layer_decay: float = 1.0, freeze: Sequence[str] = ()
) -> dict[str, NDArray[np.float64]]:
    """Return the multiplier of the learning rate of every parameter, by the name of its row; 0 where it is frozen.

    Parameters of the blocks have one multiplier per block, (depth,); the others have one, ().

    layer_decay: each layer's learning rate divided by that of the next layer.  The multiplier is 1 for the head and
        everything else after the blocks, `layer_decay` for the last block, and layer_decay ** (depth + 1) for the embedding
        (BEiT, `optim_factory.get_num_layer_for_vit`; ELECTRA, arXiv 2003.10555).  A shared table of relative positions
        counts as part of the embedding, as in timm (`group_matcher` of `beit`); BEiT's own code gives it the multiplier 1.
    freeze: patterns of the PyTorch twin's parameter names: "patch_embed.*", "blocks.[0-5].*", "*.bias".

    Raises:
        FieldError: a pattern that matches no parameter, or patterns that freeze all of them.
    """
    found: dict[str, NDArray[np.float64]] = {}
    names: list[str] = []
    used: set[str] = set()
    after_blocks = False  # rows are in the order of the model
    for name, row in rows(config).items():
        stacked = row.axes[0] == "block"
        after_blocks |= stacked
        layers = np.arange(1, config.depth + 1) if stacked else np.asarray((config.depth + 1) * after_blocks)
        multipliers = np.asarray(layer_decay ** (config.depth + 1.0 - layers))
        for index in np.ndindex(multipliers.shape):
            torch_name = name.replace("blocks", f"blocks.{index[0]}", 1) if stacked else name
            matching = [pattern for pattern in freeze if fnmatchcase(torch_name, pattern)]
            names.append(torch_name)
            used.update(matching)
            multipliers[index] = 0.0 if matching else multipliers[index]
        found[name] = multipliers
    for unused in sorted(set(freeze) - used)[:1]:
        raise FieldError(
            "optimizer.freeze", f" has {unused!r}, which matches no parameter{nearest(unused, names)}; * matches any text"
        )
    if not any(multipliers.any() for multipliers in found.values()):
        raise FieldError("optimizer.freeze", f" {' '.join(freeze)} freezes every parameter: leave some out")
    return found
