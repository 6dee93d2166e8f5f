"""Known causes for which a stage of the search differs: properties that neither `ViTConfig` nor a table can express."""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, islice, permutations

import numpy as np

from parity.checkpoints.layout import Array
from parity.comparison.diagnosis.hypothesis import Edit
from parity.comparison.diagnosis.weight_hypotheses import rotary_orders
from parity.comparison.own_model.candidate import Candidate
from parity.comparison.own_model.options import Options
from parity.comparison.own_model.pixels import NORMALIZATIONS
from parity.comparison.own_model.stages import ATTENTION, REMEDY, STEM, SUM, Stage
from parity.comparison.tolerances import FLOAT64_TOLERANCE, ErrorNorms

_MAX_TRIED = 20  # hypotheses on attention for each normalization, and for each order of tokens
_MAX_ROTATIONS = 40  # hypotheses on rotary embeddings for each order of pairs
# The tokens ahead of the patches, in the order of `ViTConfig`, by their fields.
_PREFIX = {"class_token": "class token", "distillation": "distillation token", "registers": "registers"}
# The order in which a class may take patches -> a function of the grid of their numbers that gives their rows of positions.
_PATCH_ORDERS: dict[str, Callable[[Array], Array]] = {
    "mirrored left to right": np.fliplr,
    "upside down": np.flipud,
    "in reverse": lambda numbers: numbers[::-1, ::-1],
    "column by column": lambda numbers: numbers.reshape(numbers.shape[::-1]).T,
}
Change = Callable[[dict[str, Array]], dict[str, Array]]  # of the weights of a twin, by row


class Explanations:
    """The causes of a difference: most are found by a change of the twin's weights with which the models agree.

    difference: `TableSearch.difference`.
    run: returns the output of the user's model for a candidate and a stage.
    output: the output of the user's model, with nothing switched off.
    """

    def __init__(
        self,
        options: Options,
        difference: Callable[..., float],
        run: Callable[[Candidate, Stage], Array],
        output: Array,
    ) -> None:
        self._options, self._difference, self._run, self._output = options, difference, run, output

    def of(self, stage: Stage, candidate: Candidate, depends_on_order: bool) -> tuple[str, str]:
        """Return why a stage differs, "" if it is not known, and what to do.

        Args:
            stage: the stage.
            candidate: the candidate that agreed at the stage before.
            depends_on_order: whether attention depends on the order of the patches.
        """
        if stage is STEM:
            return self._of_stem(candidate)
        if stage is SUM:
            return self._of_sum(candidate)
        if stage is ATTENTION and depends_on_order:
            return self._of_rotation(candidate)
        if stage is ATTENTION:  # a class token sees the patches through attention alone
            tried = list(islice(self._options.attention(candidate), _MAX_TRIED))
            found = self._of_prefix(candidate, tried, ATTENTION)
            found = found if found[0] else self._of_images(candidate, tried)
            return found if found[0] else self._of_patch_order(candidate)
        return "", REMEDY

    def _of_sum(self, candidate: Candidate) -> tuple[str, str]:
        """Return the factor by which the class multiplies the output of attention, if it is a constant."""
        key = candidate.keys_of("blocks.attn.proj.weight")[0]
        for factor in self._options.factors():
            if self._agree([candidate], SUM, _multiply("blocks.attn.proj.bias", factor)):
                return (
                    f"the output of attention is multiplied by {factor!r} before it is added",
                    f"in a copy of the class leave the factor out, and in the checkpoint multiply {key}, its bias, and "
                    "those of the other blocks by it",
                )
        return (
            "is the output of attention scaled or changed before it is added?",
            f"ViTConfig adds it as it is: a factor can be multiplied into {key} and its bias, in a copy of the class and "
            "in the checkpoint, and a model with any other change cannot be converted",
        )

    def _of_rotation(self, candidate: Candidate) -> tuple[str, str]:
        """Return whether the class rotates other pairs of the entries of a head than ViTConfig does."""
        for each in islice(self._options.rotary(candidate), _MAX_ROTATIONS):
            for cause in rotary_orders(each.config):

                def reorder(values: dict[str, Array], edits: tuple[Edit, ...] = cause.edits) -> dict[str, Array]:
                    return {**values, **{edit.parameter: edit.evaluate(values) for edit in edits}}

                if self._difference(each, ATTENTION, reorder) <= FLOAT64_TOLERANCE:
                    kind = each.config.positions.rotary
                    return (
                        f"{cause.name}, if its positions.rotary is {kind}, and no table can state this order",
                        "in a copy of the class bring queries and keys from the order of ViTConfig into this one right "
                        f"before they are rotated, and convert with --like for the copy and --mend '{cause.name}'",
                    )
        detail = (
            "it depends on the order of the patches, but not as rotary positions do, which are the only ones within "
            "attention that --like finds; is there another rotation, a bias of the scores, a mask or a window?"
        )
        return detail, REMEDY

    def _of_prefix(self, candidate: Candidate, tried: Iterable[Candidate], stage: Stage) -> tuple[str, str]:
        """Return whether the tokens ahead of the patches have another order: that of their rows of positions shows it.

        tried: the hypotheses to try at the stage with each order.
        """
        fields, leaves = candidate.roles.fields, candidate.roles.leaves
        lengths = {name: int(fields[f"tokens.{field}"]) for field, name in _PREFIX.items() if fields[f"tokens.{field}"]}
        if "pos_embed" not in leaves or fields["positions.covers"] != "all":
            return "", REMEDY
        for order in list(permutations(lengths))[1:]:
            starts = dict(zip(order, accumulate((lengths[name] for name in order), initial=0), strict=False))
            rows = [starts[name] + n for name in lengths for n in range(lengths[name])]

            def reorder(values: dict[str, Array], rows: Sequence[int] = rows) -> dict[str, Array]:
                table = values["pos_embed"]
                return {**values, "pos_embed": np.concatenate([table[rows], table[len(rows) :]])}

            if self._agree(tried, stage, reorder):
                theirs, ours = ", ".join(order), ", ".join(lengths)
                return (
                    f"the tokens ahead of the patches have the order {theirs}, and in ViTConfig {ours}",
                    "in a copy of the class bring them into the order of ViTConfig, and in the checkpoint their rows of "
                    f"{leaves['pos_embed'].key} too",
                )
        return "", REMEDY

    def _of_images(self, candidate: Candidate, tried: Iterable[Candidate]) -> tuple[str, str]:
        """Return whether the class normalizes its images: it has the output of a twin if this is undone before it."""
        for undone in NORMALIZATIONS:
            if len(undone.mean) not in (1, candidate.config.in_channels):
                continue
            if any(self._difference(each, ATTENTION, undone=undone) <= FLOAT64_TOLERANCE for each in tried):
                detail = f"the class normalizes its images by {undone}"
                return detail, (
                    f"ViTConfig has no such step: leave it out in a copy of the class, and give {undone.options}"
                )
        return "", REMEDY

    def _of_patch_order(self, candidate: Candidate) -> tuple[str, str]:
        """Return whether patches get the positions of other patches: without positions, attention then agrees."""
        if "pos_embed" not in candidate.roles.leaves:
            return "", REMEDY
        found = self._first_that_agrees(self._options.attention(candidate), ATTENTION.without("pos_embed"))
        if found is None:
            return "", REMEDY
        count = self._options.count_prefix(found) if found.roles.fields["positions.covers"] == "all" else 0
        numbers = np.arange(found.config.grid[0] * found.config.grid[1]).reshape(found.config.grid)
        order = "in another order than row by row from the top left"
        key = found.roles.leaves["pos_embed"].key
        for what, rearrange in _PATCH_ORDERS.items():

            def reorder(values: dict[str, Array], rearrange: Callable[[Array], Array] = rearrange) -> dict[str, Array]:
                prefix, patches = np.split(values["pos_embed"], [count])
                return {**values, "pos_embed": np.concatenate([prefix, patches[rearrange(numbers).ravel()]])}

            if self._difference(found, ATTENTION, reorder) <= FLOAT64_TOLERANCE:
                order = what
        return (
            f"attention agrees without positions, so that the class takes the patches {order}",
            f"in a copy of the class take them row by row from the top left, and in the checkpoint bring the rows of {key} "
            "into this order too; if the class mirrors images, mirror them before it",
        )

    def _of_stem(self, candidate: Candidate) -> tuple[str, str]:
        for what, probabilities in (("probabilities", self._output), ("log-probabilities", np.exp(self._output))):
            if probabilities.shape[-1] > 1 and np.allclose(probabilities.sum(-1), 1, rtol=0, atol=1e-9):
                return (
                    f"its output is {what}, and that of ViTConfig logits",
                    "let a subclass return what goes into the softmax: its keys stay the same",
                )
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
        found = self._of_prefix(candidate, list(self._options.stem_and_head(candidate)), STEM)
        if found[0]:
            return found
        if "pre_logits.weight" in leaves:
            return f"ViTConfig has tanh after {leaves['pre_logits.weight'].key}: is there another activation?", REMEDY
        # A hypothesis that contradicts itself has an infinite difference.
        tried = [each for each in self._options.stem_and_head(candidate) if self._difference(each, STEM) < np.inf]
        for find in (self._of_logits, self._of_residuals, self._of_positions) if tried else ():
            if (found := find(tried))[0]:
                return found
        return "", REMEDY

    def _of_logits(self, tried: Sequence[Candidate]) -> tuple[str, str]:
        """Return whether the class changes its logits: without the weights of the classifier they are its bias."""
        leaves, stage = tried[0].roles.leaves, STEM.without("head.weight")
        if "head.bias" not in leaves or self._agree(tried[:1], stage):
            return "", REMEDY
        weight, bias = leaves["head.weight"].key, leaves["head.bias"].key
        for factor in self._options.factors():
            if self._agree(tried[:1], stage, _multiply("head.bias", factor)):
                return (
                    f"the logits are multiplied by {factor!r}",
                    "in a copy of the class leave the factor out, and in the checkpoint multiply "
                    f"{weight} and {bias} by it",
                )
        return (
            f"if {weight} is zero, the output is not {bias}: are the logits capped or changed in another way?",
            "let a subclass return the logits as the classifier gives them: its keys stay the same",
        )

    def _of_residuals(self, tried: Sequence[Candidate]) -> tuple[str, str]:
        """Return whether a residual is the output of a norm: without attention and MLP, the norms still have an effect."""
        norms = tuple(name for name in tried[0].column if name.startswith("blocks.norm"))
        if tried[0].config.norms.order == "post":
            return "", REMEDY
        outputs = [self._run(tried[0], stage) for stage in (STEM, STEM.without(*norms))]
        if ErrorNorms.of(*outputs).relative_rms() <= FLOAT64_TOLERANCE:
            return "", REMEDY
        return (
            "if attention and MLP of all blocks add nothing, the output still depends on the norms of the blocks: "
            "is attention or the MLP added to the output of a norm?",
            "ViTConfig adds it to the input of the norm, and a model with another sum cannot be converted",
        )

    def _of_positions(self, tried: Sequence[Candidate]) -> tuple[str, str]:
        """Return whether the class changes positions before it adds them: without positions, the models then agree."""
        leaves = tried[0].roles.leaves
        found = self._first_that_agrees(tried, STEM.without("pos_embed")) if "pos_embed" in leaves else None
        if found is None:
            return "", REMEDY
        key = leaves["pos_embed"].key
        for factor in self._options.factors():
            if self._agree([found], STEM, _multiply("pos_embed", factor)):
                return (
                    f"positions are multiplied by {factor!r} before they are added",
                    f"in a copy of the class leave the factor out, and in the checkpoint multiply {key} by it",
                )
        return (
            f"the models agree if {key} is zero: is it scaled or changed before it is added?",
            f"in a copy of the class add {key} as it is, and store the changed array in the checkpoint",
        )

    def _agree(self, candidates: Iterable[Candidate], stage: Stage, change: Change = dict) -> bool:
        """Return whether one of some candidates agrees after a change of its weights."""
        return any(self._difference(each, stage, change) <= FLOAT64_TOLERANCE for each in candidates)

    def _first_that_agrees(self, candidates: Iterable[Candidate], stage: Stage) -> Candidate | None:
        return next((each for each in candidates if self._agree([each], stage)), None)


def _multiply(name: str, factor: float) -> Change:
    """Return the change that multiplies a row by a factor."""
    return lambda values: {**values, name: factor * values[name]}
