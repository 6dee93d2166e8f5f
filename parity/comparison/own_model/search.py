"""Find the config and the layouts with which a twin computes the function of the user's model.

`parity.comparison.own_model.stages` has the stages of the search.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from parity.checkpoints.layout import Array
from parity.comparison.own_model.candidate import Candidate
from parity.comparison.own_model.explanations import Change, Explanations
from parity.comparison.own_model.model import FIXED_DTYPE, OwnModel
from parity.comparison.own_model.options import MAX_CANDIDATES, Options
from parity.comparison.own_model.pixels import Normalization
from parity.comparison.own_model.stages import (
    ALL,
    ATTENTION,
    GROUPED_REMEDY,
    HEADS_REMEDY,
    MLP,
    PARALLEL_REMEDY,
    SOFTMAX_REMEDY,
    STAGES,
    SUM,
    Failure,
    Stage,
)
from parity.comparison.own_model.twin import Twin
from parity.comparison.tolerances import FLOAT64_TOLERANCE, ErrorNorms
from vit_spec import InputError

_FLOAT32 = 1e-10, 1e-6  # differences between these may come from rounding to float32
_COMPILED = 16  # configs that JAX compiles as a whole; few models need more
_DOMINANT = 1e10  # a factor of the MLP with which the other terms of a sum are below `_FLOAT32`
_SMALL = 1e-3  # a difference below this may come from an epsilon


class TableSearch:
    """The search for one model, with random weights and images."""

    def __init__(
        self, model: OwnModel, options: Options, weights: dict[str, Array], images: Array, narrowed: str = ""
    ) -> None:
        """Begin a search.

        narrowed: as in `Trace`.
        """
        self._model, self._options, self._narrowed = model, options, narrowed
        self._weights, self._images = weights, images
        self._twin = Twin(model.twin)
        self._outputs: dict[Any, Array] = {}
        self._flat: dict[tuple[int, int], Array] = {}
        self._runs = 0
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
            if worst is None or result.progress > worst.progress:
                worst = result
        if worst is None:
            raise InputError(contradiction or "no hypothesis on its parameters was found")
        return worst

    def _complete(self, candidate: Candidate) -> Candidate | Failure:
        options = self._options
        steps: list[list[Callable[[Candidate], Iterable[Candidate]]]] = [
            [options.stem_and_head, options.epsilons],
            [options.mlp],
            [lambda found: [found], options.value_skip],
            [self._attention],
            [options.patches],
            [lambda found: [found]],
            [options.pooling],
        ]
        for number, generators in enumerate(steps):
            if STAGES[number] is SUM:
                if candidate.config.norms.order != "parallel" and not self._mlp_reads_attention(candidate):
                    detail = "its MLP does not read the output of attention, as in parallel blocks"
                    return Failure(number, np.inf, 0, detail, PARALLEL_REMEDY)
                if "blocks.attn.proj.bias" not in candidate.roles.leaves:
                    continue
            if STAGES[number] is ATTENTION and len(silent := self._silencing_layers(candidate)) > 1:
                if len(silent) == 3:
                    detail = f"if {silent[0]} is zero, its other layers have no effect: is there no softmax?"
                    return Failure(number, np.inf, 0, detail, SOFTMAX_REMEDY)
                detail = f"{silent[0]} is a layer of keys and values of fewer heads than queries have (grouped queries)"
                return Failure(number, np.inf, 0, detail, GROUPED_REMEDY)
            start, best, tried = candidate, (np.inf, candidate), 0
            for generate in generators:
                for each in generate(best[1] if generate == options.epsilons else start):
                    difference, tried = self.difference(each, STAGES[number]), tried + 1
                    best = min(best, (difference, each), key=lambda pair: pair[0])
                    if difference <= FLOAT64_TOLERANCE or (number and difference < _FLOAT32[1]):
                        break
                if best[0] <= FLOAT64_TOLERANCE:
                    break
            if best[0] > FLOAT64_TOLERANCE:
                return self._failure(number, start, float(best[0]), tried)
            candidate = best[1]
        return candidate

    def _attention(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield candidates that differ in attention, with rotary embeddings only if the order of the patches matters."""
        options, matters = self._options, self._depends_on_order(candidate)
        if not matters:
            yield from options.attention(candidate)
        if matters or candidate.config.positions.kind == "fixed":
            yield from options.rotary(candidate)
        if not matters:
            yield from options.value_skip(candidate)

    def _silencing_layers(self, candidate: Candidate) -> list[str]:
        """Return the keys of the layers without which the two others of attention have no effect, if it has three layers.

        This is the layer of values alone; without queries or keys, softmax returns the mean of the values.  A layer of
        keys and values of grouped queries may be as large as that of the queries, and be taken for one of keys beside one
        of values: then it is this layer and the output projection.
        """
        layouts = {name: each for name, each in candidate.column.items() if name.startswith("blocks.attn.qkv.")}
        if candidate.config.attention.proj or any("qkv" not in each.key_axes for each in layouts.values()):
            return []
        layers = [
            {
                name: [key for key, indices in each.indexed_keys(candidate.config.sizes, {}) if indices["qkv"] == n]
                for name, each in layouts.items()
            }
            for n in range(3)
        ]
        first, _ = self._muted(candidate, ATTENTION)
        images, silent = self._flat_images(candidate.config.patch_size), []
        for layer in layers:
            weights = {**first, **{key: np.zeros_like(first[key]) for keys in layer.values() for key in keys}}
            others = [key for each in layers if each is not layer for key in each["blocks.attn.qkv.weight"]]
            changed = {**weights, **{key: -2 * weights[key] for key in others}}
            outputs = [self._model.run(each, images) for each in (weights, changed)]
            if ErrorNorms.of(*outputs).relative_rms() <= FLOAT64_TOLERANCE:
                silent.append(layer["blocks.attn.qkv.weight"][0])
        return silent

    def _mlp_reads_attention(self, candidate: Candidate) -> bool:
        """Return whether the output of the MLP of the first block changes with that of attention.

        The MLP is so large that the sum has only its entries, so that the layout of attention need not be known.
        """
        images, outputs = self._flat_images(candidate.config.patch_size), []
        for stage in (ATTENTION, MLP):
            weights, _ = self._muted(candidate, stage)
            weights |= {key: _DOMINANT * weights[key] for key in candidate.keys_of("blocks.mlp.fc2.weight")}
            outputs.append(self._model.run(weights, images))
        return ErrorNorms.of(*outputs).relative_rms() > _FLOAT32[1]

    def _depends_on_order(self, candidate: Candidate) -> bool:
        """Return whether the output of the first block changes with the order of the patches, without learned positions.

        A fixed table of positions cannot be switched off: then the answer is no, although it is not known.
        """
        if candidate.config.positions.kind == "fixed":
            return False
        weights, _ = self._muted(candidate, ATTENTION.without("pos_embed"))
        ph, pw = candidate.config.patch_size
        images = self._flat_images((ph, pw))
        b, h, w, c = images.shape
        patches = images.reshape(b, h // ph, ph, w // pw, pw, c).swapaxes(2, 3).reshape(b, -1, ph, pw, c)
        order = np.random.default_rng(0).permutation(patches.shape[1])
        shuffled = patches[:, order].reshape(b, h // ph, w // pw, ph, pw, c).swapaxes(2, 3).reshape(images.shape)
        outputs = [self._model.run(weights, each) for each in (images, shuffled)]
        first, second = (each.mean(1) if candidate.config.head.pool == "none" else each for each in outputs)
        return ErrorNorms.of(first, second).relative_rms() > _FLOAT32[1]

    def _failure(self, number: int, start: Candidate, difference: float, tried: int) -> Failure:
        """Return the failure of a stage, with what is known about its cause.

        start: the candidate that agreed at the stage before.
        """
        found = Failure(number, difference, tried)
        if difference == np.inf:
            return replace(found, detail=self._contradiction)
        is_rounding = _FLOAT32[0] < difference < _FLOAT32[1]
        if is_rounding and self._narrowed:
            return replace(found, detail=f"its forward pass computes an array {self._narrowed}", remedy=FIXED_DTYPE)
        if difference < _SMALL and (detail := self._options.several_eps()):
            return replace(found, detail=detail)
        if is_rounding:
            detail = "the difference is as large as rounding to float32, as of a table that the class makes in that dtype"
            return replace(found, detail=detail, remedy=FIXED_DTYPE)
        is_attention = STAGES[number] is ATTENTION
        depends = is_attention and self._depends_on_order(start)
        explanations = Explanations(self._options, self.difference, self._run, self._model.run(self._weights, self._images))
        detail, remedy = explanations.of(STAGES[number], start, depends)
        is_incomplete = is_attention and tried >= MAX_CANDIDATES and "num_heads" not in self._options.given
        if is_incomplete and not detail:
            detail, remedy = "not every number of heads was tried with every layout", HEADS_REMEDY
        return replace(found, detail=detail, remedy=remedy)

    def difference(
        self, candidate: Candidate, stage: Stage, change: Change = dict, undone: Normalization | None = None
    ) -> float:
        """Return the relRMS between the outputs of both models; infinity if the hypothesis contradicts itself.

        change: a change of the weights of the twin, by row.
        undone: a normalization to undo before the user's model.
        """
        try:
            config = candidate.config
            weights, zeros = self._muted(candidate, stage)
            values = change(candidate.to_rows(weights))
            is_first_alone = stage.off_in_others == ALL and config.norms.order != "post"
            if is_first_alone and config.depth > 1:  # the others return their input
                values = {name: array[:1] if name.startswith("blocks.") else array for name, array in values.items()}
                config = replace(config, depth=1)
            images = self._flat_images(config.patch_size) if stage.flat else self._images
            self._runs += 1
            output = self._twin.run(config, values, images, is_compiled=self._runs <= _COMPILED)
        except InputError as error:
            self._contradiction = str(error)
            return np.inf
        key = (config.patch_size if stage.flat else None, zeros, undone)
        if key not in self._outputs:
            images = images if undone is None else images * np.array(undone.std) + np.array(undone.mean)
            self._outputs[key] = self._model.run(weights, images)
        return float(ErrorNorms.of(output, self._outputs[key]).relative_rms())

    def _run(self, candidate: Candidate, stage: Stage) -> Array:
        """Return the output of the user's model at a stage."""
        weights, _ = self._muted(candidate, stage)
        return self._model.run(weights, self._flat_images(candidate.config.patch_size) if stage.flat else self._images)

    def _flat_images(self, patch: tuple[int, int]) -> Array:
        """Return images in which all pixels and channels of a patch have one random value."""
        if patch not in self._flat:
            values = self._images[:, :: patch[0], :: patch[1], :1]
            large = values.repeat(patch[0], 1).repeat(patch[1], 2)
            self._flat[patch] = np.broadcast_to(large, self._images.shape).copy()
        return self._flat[patch]

    def _muted(self, candidate: Candidate, stage: Stage) -> tuple[dict[str, Array], frozenset[Any]]:
        """Return the weights with those that are off in a stage set to zero, and a key for which entries these are."""
        weights, sizes, zeros = dict(self._weights), candidate.config.sizes, set[Any]()
        for name, layout in candidate.column.items():
            off = name.startswith(stage.off_in_first), name.startswith(stage.off_in_others)
            if not any(off):
                continue
            for key, indices in layout.indexed_keys(sizes, {}):
                axes = sorted(set(layout.parameter_axes) - set(indices), key=lambda axis: axis != "block")
                weights[key] = np.array(weights[key])
                view = layout.view(weights[key], sizes, indices, axes)
                # The entries of a whole array are the same in every layout; those of a part of it depend on the layout.
                part = str(layout) if view.size < weights[key].size else view.strides[0] if axes[:1] == ["block"] else None
                zeros.add((key, off, indices.get("block", 0) > 0, part))
                if axes[:1] == ["block"]:
                    view[:1] *= not off[0]
                    view[1:] *= not off[1]
                elif off[indices.get("block", 0) > 0]:
                    view[...] = 0
        return weights, frozenset(zeros)
