"""The proof that a twin computes the function of the user's model: outputs and all gradients agree in float64."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np

from parity.checkpoints.columns import pieces_of
from parity.checkpoints.layout import Array
from parity.comparison.localisation import module_scales
from parity.comparison.own_model.candidate import Candidate
from parity.comparison.own_model.model import OwnModel
from parity.comparison.own_model.twin import Twin
from parity.comparison.tolerances import FLOAT64_TOLERANCE, MAX_TOLERANCE, ErrorNorms
from vit_spec import InputError

OUTPUT = "output"
# Weights of a checkpoint may amplify rounding errors, for instance where a softmax is saturated.  Then two models may
# differ by so many times the measured rounding errors of the class.  The perturbations that measure them are of
# `PERTURBATION_ROUNDOFFS` = 16 unit roundoffs, and an operation rounds by one, so right tables should differ by less than
# these errors.  The factor is a margin, stricter than `AMPLIFIED_ERROR_FACTOR` = 12.
_AMPLIFIED_FACTOR = 3
_PERTURBED_PASSES = 2
# Large weights and pixels amplify rounding errors.  Two models may differ by so many times what a change of all weights by
# one unit in the last place makes.
_ROUNDING_FACTOR = 10
_LARGE = (20.0, 500.0, 1e6)  # factors of the weights of norms and of biases, at which bounded operations saturate


@dataclass(frozen=True)
class Proof:
    """The differences between a twin and the user's model.

    Attributes:
        differences: weights ("own" or "random") -> "output" or the name of a row for its gradient -> relRMS in float64.
        rounding: "output" or the name of a row -> the measured rounding errors of the class with the weights of the
            checkpoint, where the difference is more than the tolerance.
    """

    differences: Mapping[str, Mapping[str, float]]
    rounding: Mapping[str, float] = field(default_factory=dict)

    @property
    def largest(self) -> float:
        """The largest difference."""
        return max(value for each in self.differences.values() for value in each.values())

    def __str__(self) -> str:
        output = max(each[OUTPUT] for each in self.differences.values())
        amplified = ""
        if self.rounding:
            name = max(self.rounding, key=lambda name: self.differences["own"][name])
            what = "the output" if name == OUTPUT else f"the gradient of {name}"
            amplified = (
                f"; the weights of the checkpoint amplify rounding errors, which are {self.rounding[name]:.1e} in {what}; "
                f"with random weights all agree to {max(self.differences['random'].values()):.1e}"
            )
        return (
            f"the outputs agree to {output:.1e} and all gradients to {self.largest:.1e} (relRMS in float64), with the "
            f"weights of the checkpoint and with random weights{amplified}"
        )


def prove(model: OwnModel, candidate: Candidate, own: Mapping[str, Array], images: Array, seed: int) -> Proof:
    """Compare the outputs and the gradients of both models, with random weights and with those of the checkpoint.

    With random weights they must agree to the tolerance.  With the weights of the checkpoint, a tensor beyond it must agree
    to a few times the rounding errors of the class, which passes with perturbed operations measure.

    Raises:
        InputError: a tensor differs, a parameter of the user's model is not a row, or the rounding errors with the weights
            of the checkpoint are so large that they would hide a wrong table.
    """
    if wrong := [key for key, array in own.items() if not np.isfinite(array).all()]:
        raise InputError(f"{wrong[0]} of the checkpoint has values that are not finite: give a checkpoint without them")
    covered = {key for name in candidate.column for key in candidate.keys_of(name)}
    if rest := sorted(set(own) - covered):
        raise InputError(f"{rest[0]} is a parameter of {model.name} that no row of the config has")
    twin = Twin(model.twin)
    found: dict[str, dict[str, float]] = {}
    rounding: dict[str, float] = {}
    for kind, weights in {"random": random_weights(own, seed), "own": own}.items():
        values = candidate.to_rows(weights)
        target = np.random.default_rng(seed + 1).standard_normal(model.run(weights, images).shape)
        output, gradients = model.gradients(weights, images, target)
        if unused := sorted(set(own) - set(gradients)):
            raise InputError(f"the output of {model.name} does not depend on {unused[0]}, which ViTConfig cannot express")
        expected_output, expected = twin.gradients(candidate.config, values, images, target)
        rows, scales = candidate.to_rows(gradients), module_scales(expected)
        found[kind] = _differences(expected_output, expected, output, rows, scales)
        beyond = [name for name, difference in found[kind].items() if not difference <= FLOAT64_TOLERANCE]
        if beyond and kind == "own":
            passes = [model.perturbed_gradients(weights, images, target, seed + n) for n in range(_PERTURBED_PASSES)]
            errors = [_differences(output, rows, each, candidate.to_rows(gradients), scales) for each, gradients in passes]
            rounding = {name: max(each[name] for each in errors) for name in beyond}
        for name in beyond:
            keys = [candidate.column[piece].key for piece in pieces_of(candidate.column, name)]
            what = "the output" if name == OUTPUT else f"the gradient of {' and '.join(keys)}"
            weights_text = "the weights of the checkpoint" if kind == "own" else "random weights"
            tolerance = _AMPLIFIED_FACTOR * rounding.get(name, 0)
            if not found[kind][name] <= tolerance:
                raise InputError(f"{what} differs by {found[kind][name]:.1e} (relRMS in float64) with {weights_text}")
            if tolerance > MAX_TOLERANCE["float64"]:
                raise InputError(
                    "random weights agree, but the weights of the checkpoint cannot show whether the models are the same: "
                    f"with them, rounding errors in {what} are {rounding[name]:.1e} (relRMS in float64); give --like a "
                    "checkpoint of the class with other weights, such as those of a newly built model, and read this one "
                    "with its table: --format-file TABLE"
                )
    return Proof(found, rounding)


def _differences(
    output: Array, gradients: Mapping[str, Array], other: Array, others: Mapping[str, Array], scales: Mapping[str, float]
) -> dict[str, float]:
    """Return the relRMS between two outputs, and between the gradients of each row.

    scales: `module_scales` of the gradients.
    """
    found = {name: ErrorNorms.of(others[name], each).relative_rms(scales[name]) for name, each in gradients.items()}
    return {OUTPUT: float(ErrorNorms.of(other, output).relative_rms()), **{name: float(v) for name, v in found.items()}}


def check_other_inputs(model: OwnModel, candidate: Candidate, own: Mapping[str, Array], seed: int) -> None:
    """Compare the outputs for other numbers of images, other pixels and larger weights, without gradients.

    Raises:
        InputError: they differ; the message says for which inputs.
    """
    rng, twin, config = np.random.default_rng(seed), Twin(model.twin), candidate.config
    size = (*config.image_size, config.in_channels)
    trial = random_weights(own, seed)
    cases = [
        ("one image with pixels from 0 to 1", own, rng.uniform(0, 1, (1, *size))),
        ("three images with pixels from 0 to 255", own, rng.uniform(0, 255, (3, *size))),
    ]
    for factor in _LARGE:
        large = {key: array * factor if _is_vector(array) else array for key, array in trial.items()}
        cases.append((f"norms and biases {factor:g} times as large", large, rng.standard_normal((2, *size))))
    for what, weights, images in cases:
        output = model.run(weights, images, inference=True)
        expected = twin.run(config, candidate.to_rows(weights), images, is_compiled=True)
        if output.shape != expected.shape:
            raise InputError(f"with {what}, its output has the shape {output.shape}, expected {expected.shape}")
        signs = {key: rng.choice((-1, 1), array.shape) for key, array in weights.items()}
        disturbed = {key: array * (1 + np.finfo(np.float64).eps * signs[key]) for key, array in weights.items()}
        disturbed_output = twin.run(config, candidate.to_rows(disturbed), images, is_compiled=True)
        noise = ErrorNorms.of(disturbed_output, expected).relative_rms()
        difference = float(ErrorNorms.of(output, expected).relative_rms())
        if not difference <= max(FLOAT64_TOLERANCE, _ROUNDING_FACTOR * noise) or not np.isfinite(output).all():
            raise InputError(
                f"no config of ViTConfig computes the same function: with {what}, the output differs by {difference:.1e} "
                f"(relRMS in float64), although it agrees for other inputs; is there a bound or a condition in its code?"
            )


def _is_vector(array: Array) -> bool:
    return bool(sum(length > 1 for length in array.shape) < 2)


def random_weights(weights: Mapping[str, Array], seed: int) -> dict[str, Array]:
    """Return random weights without zeros, ones or symmetries, of a size at which activations neither grow nor vanish."""
    rng, found = np.random.default_rng(seed), {}
    for key, array in weights.items():
        lengths = [length for length in array.shape if length > 1]
        if _is_vector(array):
            found[key] = 0.4 + 0.5 * rng.standard_normal(array.shape)
        else:
            found[key] = rng.standard_normal(array.shape) * prod(lengths) ** -0.25
    return found
