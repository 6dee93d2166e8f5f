"""What a checkpoint shows about its model besides the values of its parameters: what a format reads fields from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parity.checkpoints.containers.container import StoredArray

Fields = Mapping[str, Any]  # field of `ViTConfig`, with dots as in "norms.eps" -> value


@dataclass(frozen=True)
class Evidence:
    """The facts that a checkpoint shows about its model, besides the values of its parameters.

    `format_matching.py` makes one `Evidence` for each variant of each format that the keys of the checkpoint may belong to.

    Attributes:
        notes: metadata that is stored with the arrays: parsed JSON files by their names ("config.json"), and entries of a
            training checkpoint that are not arrays by their paths ("epoch", "args/distillation_type").
        other_keys: keys that do not belong to the model: other towers, optimizer state, a second set of weights.
        ignored_arrays: arrays of the model that are not parameters, by key; their keys match `Format.ignored_keys`.
        axes: for each parameter that is present, the names of its axes, as in `vit_spec.rows`.
        sizes: axis -> its length, as far as the shapes determine it.  Three entries are lengths of merged axes: "inner"
            is the number of heads times their width, "pool_inner" the same of attention pooling, "patch" the number of
            values in a flattened patch.
        variant: the variant of the format that the keys belong to.
        module: the path of the model in a module that contains it, such as "backbone"; "" if the keys show no such module.
        classifier: the path of the layer beside the model that is read as its classifier, such as "head"; "" if there is
            none.
    """

    notes: Fields
    other_keys: frozenset[str]
    ignored_arrays: Mapping[str, StoredArray]
    axes: Mapping[str, frozenset[str]]
    sizes: Mapping[str, int]
    variant: str = ""
    module: str = ""
    classifier: str = ""
