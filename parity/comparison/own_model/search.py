"""Find the config and the layouts with which a twin computes the function of the user's model.

A model is a function of its weights, so parts of it can be switched off: with weights of zero, attention and MLP add
nothing.  What is left is decided first, then one block, then all:

1. blocks off: pooling, norms, epsilon, positions, tokens, classifier
2. the MLP of the first block: activation, layouts
3. attention of the first block: heads, layouts of queries, keys and values, scale, rotary embeddings
4. the order of the entries of a patch
5. everything

All pixels of a patch are equal until the fourth stage, so that the order of its entries has no effect.  That stage needs
attention, because a class token sees the patches through it alone.

Every stage must agree in float64 on random weights before the next one begins.  In this way the number of hypotheses is
the sum over the stages, and not the product; and a failure says where the models part.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from parity.comparison.own_model.candidate import Candidate
from parity.comparison.own_model.model import FIXED_DTYPE, Array, OwnModel
from parity.comparison.own_model.options import Options
from parity.comparison.own_model.twin import Twin
from parity.comparison.tolerances import FLOAT64_TOLERANCE, ErrorNorms
from vit_spec import InputError

_FLOAT32 = 1e-10, 1e-6  # differences between these may come from rounding to float32
_SMALL = 1e-3  # a difference below this may come from an epsilon
_ATTENTION = ("blocks.attn.qkv.", "blocks.attn.proj.", "blocks.attn.q_bias", "blocks.attn.v_bias")
_MLP = ("blocks.mlp.fc",)
_NORM_BIASES = ("blocks.norm1.bias", "blocks.norm2.bias", "blocks.attn.norm.bias", "blocks.mlp.norm.bias")


@dataclass(frozen=True)
class Stage:
    """A state of the model in which some rows of the first block and of the other blocks are zero.

    what: the part that it adds to the stage before, for messages.
    flat: whether all pixels of a patch are equal.
    """

    what: str
    off_in_first: tuple[str, ...]
    off_in_others: tuple[str, ...]
    flat: bool = True


_ALL = (*_ATTENTION, *_MLP, *_NORM_BIASES)
STEM = Stage("tokens, positions, norms, pooling and classifier", _ALL, _ALL)
MLP = Stage("the MLP of the first block", (*_ATTENTION, "blocks.attn.norm.bias"), _ALL)
ATTENTION = Stage("attention of the first block", (), _ALL)
PATCHES = Stage("the projection of patches", (), _ALL, flat=False)
EVERYTHING = Stage("the blocks together", (), (), flat=False)
STAGES = (STEM, MLP, ATTENTION, PATCHES, EVERYTHING)


@dataclass(frozen=True)
class Failure:
    """The nearest hypothesis that did not agree.

    Attributes:
        stage: the number of the stage at which it failed.
        difference: the relRMS of the outputs; infinity if every hypothesis contradicts itself.
        tried: the number of hypotheses tried at this stage.
        detail: further facts for the message.
    """

    stage: int
    difference: float
    tried: int
    detail: str = ""

    def __str__(self) -> str:
        agree = [each.what for each in STAGES[: self.stage]]
        before = f"{', '.join(agree)} agree, but " if agree else ""
        what = STAGES[self.stage].what
        if self.difference == np.inf:
            return f"{before}{what} cannot be expressed: {self.detail}"
        differ = "differ" if what.endswith(("classifier", "together")) else "differs"
        noun = "hypothesis" if self.tried == 1 else "hypotheses"
        return f"{before}{what} {differ} by {self.difference:.1e} (relRMS in float64, {self.tried} {noun} tried)" + (
            f": {self.detail}" if self.detail else ""
        )


class Search:
    """The search for one model, with random weights and images."""

    def __init__(self, model: OwnModel, options: Options, weights: dict[str, Array], images: Array) -> None:
        self._model, self._options = model, options
        self._weights, self._images = weights, images
        self._twin = Twin(model.twin)
        self._outputs: dict[Any, Array] = {}
        self._contradiction = ""  # of the latest hypothesis that contradicts itself

    def find(self, candidates: Iterable[Candidate]) -> Candidate | Failure:
        """Return the first candidate that agrees in all stages, completed; or the failure of the one that came furthest.

        Raises:
            InputError: no candidate agrees with the values that the user stated.
        """
        worst: Failure | None = None
        contradiction = ""
        for candidate in candidates:
            if found := self._options.contradiction(candidate):
                contradiction = contradiction or found
                continue
            result = self._complete(self._options.initial(candidate))
            if isinstance(result, Candidate):
                return result
            if worst is None or (result.stage, -result.difference) > (worst.stage, -worst.difference):
                worst = result
        if worst is None:
            raise InputError(contradiction or "no hypothesis on its parameters was found")
        return worst

    def _complete(self, candidate: Candidate) -> Candidate | Failure:
        options = self._options
        steps: list[list[Callable[[Candidate], Iterable[Candidate]]]] = [
            [options.stem_and_head, options.epsilons],
            [options.mlp],
            [options.attention, options.rotary],
            [options.patches],
            [lambda found: [found]],
        ]
        for number, generators in enumerate(steps):
            best, tried = (np.inf, candidate), 0
            for generate in generators:
                for each in generate(best[1] if generate == options.epsilons else candidate):
                    difference, tried = self.difference(each, STAGES[number]), tried + 1
                    best = min(best, (difference, each), key=lambda pair: pair[0])
                    if difference <= FLOAT64_TOLERANCE:
                        break
                if best[0] <= FLOAT64_TOLERANCE:
                    break
            if best[0] > FLOAT64_TOLERANCE:
                detail = options.several_eps() if best[0] < _SMALL else ""
                detail = self._contradiction if best[0] == np.inf else detail
                if not detail and _FLOAT32[0] < best[0] < _FLOAT32[1]:
                    detail = f"the difference is as large as rounding to float32; {FIXED_DTYPE}"
                return Failure(number, float(best[0]), tried, detail)
            candidate = best[1]
        return candidate

    def difference(self, candidate: Candidate, stage: Stage) -> float:
        """Return the relRMS between the outputs of both models; infinity if the hypothesis contradicts itself."""
        try:
            config = candidate.config
            weights = self._muted(candidate, stage)
            values = candidate.to_rows(weights)
            is_first_alone = stage.off_in_others == _ALL and config.norms.order != "post"
            if is_first_alone and config.depth > 1:  # the others return their input
                values = {name: array[:1] if name.startswith("blocks.") else array for name, array in values.items()}
                config = replace(config, depth=1)
            images = self._flat_images(config.patch_size) if stage.flat else self._images
            output = self._twin.run(config, values, images)
        except InputError as error:
            self._contradiction = str(error)
            return np.inf
        key = (
            stage,
            config.patch_size,
            *sorted({candidate.column[name].key for name in candidate.column if _is_off(name, stage)}),
        )
        if key not in self._outputs:
            self._outputs[key] = self._model.run(weights, images)
        return float(ErrorNorms.of(output, self._outputs[key]).relative_rms())

    def _flat_images(self, patch: tuple[int, int]) -> Array:
        """Return images in which all pixels and channels of a patch have one random value."""
        values = self._images[:, :: patch[0], :: patch[1], :1]
        return np.broadcast_to(values.repeat(patch[0], 1).repeat(patch[1], 2), self._images.shape).copy()

    def _muted(self, candidate: Candidate, stage: Stage) -> dict[str, Array]:
        """Return the weights with those that are off in a stage set to zero."""
        weights = dict(self._weights)
        stacked = {leaf.key for leaf in candidate.roles.leaves.values() if leaf.stacked}
        for name, layout in candidate.column.items():
            off = name.startswith(stage.off_in_first), name.startswith(stage.off_in_others)
            if not any(off):
                continue
            for key, indices in layout.indexed_keys(candidate.config.sizes, {}):
                if layout.key in stacked:
                    weights[key] = np.array(weights[key])
                    weights[key][:1] *= not off[0]
                    weights[key][1:] *= not off[1]
                elif off[indices.get("block", 0) > 0]:
                    weights[key] = np.zeros_like(weights[key])
        return weights


def _is_off(name: str, stage: Stage) -> bool:
    return name.startswith((*stage.off_in_first, *stage.off_in_others))
