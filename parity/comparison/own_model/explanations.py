"""Known causes for which a stage of the search differs: properties that neither `ViTConfig` nor a table can express."""

from collections.abc import Callable, Iterable
from itertools import islice, permutations

import numpy as np

from parity.comparison.own_model.candidate import Candidate
from parity.comparison.own_model.model import Array
from parity.comparison.own_model.options import Options
from parity.comparison.own_model.stages import ATTENTION, REMEDY, STEM, Stage
from parity.comparison.tolerances import FLOAT64_TOLERANCE

Change = Callable[[dict[str, Array]], dict[str, Array]]  # of the weights of a twin, by row

_MAX_REORDERED = 24  # layouts to try with queries, keys and values in another order


class Explanations:
    """The causes of a difference, each found by a change of the twin's weights with which the models agree."""

    def __init__(self, options: Options, difference: Callable[[Candidate, Stage, Change], float]) -> None:
        self._options, self._difference = options, difference

    def of(self, stage: Stage, candidate: Candidate, depends_on_order: bool) -> tuple[str, str]:
        """Return why a stage differs, "" if it is not known, and what to do.

        Args:
            stage: the stage.
            candidate: the candidate that agreed at the stage before.
            depends_on_order: whether attention depends on the order of the patches.
        """
        if stage is STEM:
            return self._of_stem(candidate)
        if stage is ATTENTION and depends_on_order:
            detail = (
                "it depends on the order of the patches, but not as rotary positions do, which are the only ones within "
                "attention that --like finds; is there another rotation, a bias of the scores, a mask or a window?"
            )
            return detail, REMEDY
        return self._of_attention(candidate) if stage is ATTENTION else ("", REMEDY)

    def _of_stem(self, candidate: Candidate) -> tuple[str, str]:
        leaves, count = candidate.roles.leaves, self._options.count_prefix(candidate)
        if "pos_embed" in leaves and candidate.roles.fields["positions.covers"] == "all" and count:

            def move(values: dict[str, Array]) -> dict[str, Array]:
                return {**values, "pos_embed": np.roll(values["pos_embed"], count, axis=0)}

            if self._agree(self._options.stem_and_head(candidate), STEM, move):
                key = leaves["pos_embed"].key
                return (
                    f"the class token comes after the patches, so that its row of {key} is the last one, not the first",
                    "in a copy of the class put it first, before registers, and in the checkpoint move its row too",
                )
        if "pre_logits.weight" in leaves:
            return f"ViTConfig has tanh after {leaves['pre_logits.weight'].key}: is there another activation?", REMEDY
        return "", REMEDY

    def _of_attention(self, candidate: Candidate) -> tuple[str, str]:
        leaf, names = candidate.roles.leaves["blocks.attn.qkv.weight"], ("queries", "keys", "values")
        for order in [] if "qkv" in leaf.axes else permutations(range(3)):

            def reorder(values: dict[str, Array], order: tuple[int, ...] = order) -> dict[str, Array]:
                return {n: v[:, order] if n.startswith("blocks.attn.qkv.") else v for n, v in values.items()}

            if self._agree(islice(self._options.attention(candidate, is_usual=True), _MAX_REORDERED), ATTENTION, reorder):
                shown = ", ".join(names[order.index(n)] for n in range(3))
                return (
                    f"{leaf.key} has {shown} in this order, not queries, keys, values",
                    "reorder its entries and those of its bias in the checkpoint and in a copy of the class",
                )
        return "", REMEDY

    def _agree(self, candidates: Iterable[Candidate], stage: Stage, change: Change) -> bool:
        """Return whether one of some candidates agrees after a change of its weights."""
        return any(self._difference(each, stage, change) <= FLOAT64_TOLERANCE for each in candidates)
