"""Derive the table of a class of the user from the class and a checkpoint of it: `python -m parity convert --like`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from parity.checkpoints.assumptions import Assumption
from parity.checkpoints.containers.container import StoredArray
from parity.checkpoints.conversion import converted_arrays
from parity.checkpoints.format_file import parse_format
from parity.checkpoints.formats import Fields, registered
from parity.checkpoints.formats.definition import digest
from parity.checkpoints.layout import Array
from parity.checkpoints.reading import StrPath, load
from parity.checkpoints.weights import Checkpoint
from parity.comparison.own_model.candidate import Candidate
from parity.comparison.own_model.construct import Built, build, few_threads, working_directory_on_path
from parity.comparison.own_model.images import image_shapes
from parity.comparison.own_model.model import ImageShape, OwnModel, Trace, as_float64
from parity.comparison.own_model.options import Options
from parity.comparison.own_model.pixels import check_pixels
from parity.comparison.own_model.proof import Proof, check_other_inputs, prove, random_weights
from parity.comparison.own_model.search import TableSearch
from parity.comparison.own_model.stages import Failure
from parity.comparison.own_model.structures import find_candidates
from parity.comparison.own_model.table import table_text
from parity.comparison.own_model.twin import Twin
from parity.comparison.own_model.weights import (
    OtherShapes,
    OwnWeights,
    changed_constants,
    missing_constants,
    open_arrays,
    read_weights,
)
from vit_spec import InputError, ViTConfig
from vit_spec.config import coerce_field
from vit_spec.errors import first_line

_SEED = 0
_MAX_REFUSED = 3  # sizes of images
_MAX_SHAPES = 40  # of images that give the parameters of a linen module other shapes than the checkpoint has


@dataclass(frozen=True)
class DerivedTable:
    """The table of a class of the user, with its proof.

    Attributes:
        text: the content of the format file.
        config: the config of the model.
        proof: the measured differences.
        checkpoint: the checkpoint, as it is read with the table.
    """

    text: str
    config: ViTConfig
    proof: Proof
    checkpoint: Checkpoint = field(repr=False)


@dataclass(frozen=True)
class _Derived:
    """A table before it is used to read the checkpoint.

    own: the weights of the checkpoint by the keys of the class, in float64.
    assumed: what the proof takes from the class because the checkpoint lacks it.
    """

    text: str
    candidate: Candidate
    proof: Proof
    own: Mapping[str, Array]
    assumed: tuple[Assumption, ...]


def derive_table(
    like: Any,
    source: StrPath,
    *,
    given: Fields | None = None,
    strip: str | None = None,
    ignore: Sequence[str] = (),
) -> DerivedTable:
    """Find which parameter of a PyTorch or Flax class is which of ours, and the config; prove it; return it as a table.

    The class and its forward pass are executed.  Both models run in float64 on CPU, the class in inference mode:
    outputs and gradients of all parameters must agree to 1e-12, with the weights of the checkpoint and with random ones.
    If the weights of the checkpoint amplify rounding errors, the tolerance with them is a few times the measured errors.

    Args:
        like: "package.module:Class", with arguments if it needs some: "my_models.vit:ViT(image_size=32, depth=6)"; the
            arguments are literals.  A model, or a class or function without arguments that returns one, can be given too.
        source: a checkpoint that the class wrote.
        given: config fields that are known, by dotted name, such as {"norms.eps": 1e-5}; no other value is tried.
        strip: the beginning of the keys of the model, if it is not a known wrapper; see `parity.load`.
        ignore: regular expressions for whole keys that the model does not use; see `parity.load`.

    Raises:
        InputError: the class cannot be imported or called, the checkpoint does not fit it, or no config and layouts were
            found with which the models agree.  The message says where they part.
    """
    fields = {name: coerce_field(name, value) for name, value in (given or {}).items()}
    with working_directory_on_path():
        built = build(like)
        model = _make_model(built)
        stored = open_arrays(source, model.separator)
        try:
            with few_threads(sum(array.size for array in stored.values())):
                derived = _derive(model, stored, fields, strip, ignore)
                checkpoint = _read_with(derived, model, source, given=fields, strip=strip, ignore=ignore)
        except InputError as error:
            raise InputError(f"--like {built.name}: {error}") from None
    return DerivedTable(derived.text, checkpoint.config, derived.proof, checkpoint)


def _make_model(built: Built) -> OwnModel:
    try:
        if built.framework == "torch":
            from parity.comparison.own_model.torch_model import TorchModel

            return TorchModel(built)
        from parity.comparison.own_model.flax_model import LinenModel, NnxModel

        return (LinenModel if built.framework == "linen" else NnxModel)(built)
    except InputError:
        raise
    except (
        Exception,
        SystemExit,
        GeneratorExit,
    ) as error:  # of the user's code, or of a module whose parameters have no values yet
        raise InputError(f"--like {built.name}: a copy in float64 on CPU raised {first_line(error)}") from None


def _derive(
    model: OwnModel, stored: Mapping[str, StoredArray], given: Fields, strip: str | None, ignore: Sequence[str]
) -> _Derived:
    reasons: list[str] = []
    errors: list[InputError] = []
    shapes = {key: array.shape for key, array in (model.weights or stored).items()}
    has_shapes = bool(model.weights)  # else the shapes of its parameters may follow from the images
    channels_last = model.twin == "jax"
    settings = list(model.settings)
    for images in image_shapes(settings, shapes, given, channels_last):
        if reason := model.fit(images):
            reasons.append(f"images of {images.height}x{images.width}x{images.channels}: {reason}")
            continue
        try:
            weights = read_weights(stored, model, strip, ignore)
            model.check_loading(weights.arrays)
            return _derive_for(model, weights, images, given)
        except OtherShapes as error:
            size = "" if has_shapes else f"for images of {images.height}x{images.width}, "
            errors.append(OtherShapes(f"{size}{error}", error.count))
            if len(errors) > (_MAX_REFUSED if has_shapes else _MAX_SHAPES):
                break
        except _NoStructure as error:  # perhaps another size of images
            errors.append(error)
            if len(errors) > _MAX_REFUSED:
                break
    if errors:
        raise min(errors, key=lambda each: each.count if isinstance(each, OtherShapes) else 0)
    # A reason that is not an exception of the forward pass is one for images of the right size.
    reason = next((each for each in reasons if "forward pass raised" not in each), reasons[0])
    if "forward pass returns" in reason:
        raise InputError(f"with {reason}")
    raise InputError(
        f"its forward pass takes no batch of images alone: {reason}; name a function that returns a module which does, "
        "or give --set image_size=HxW --set in_channels=N"
    )


class _NoStructure(InputError):
    """The parameters have no roles in a ViT for this size of images."""


def _derive_for(model: OwnModel, weights: OwnWeights, images: ImageShape, given: Fields) -> _Derived:
    rng = np.random.default_rng(_SEED)
    pixels = rng.standard_normal((2, images.height, images.width, images.channels))
    original = dict(model.weights), dict(model.constants)
    failures: list[Failure | InputError] = []
    for promoted in _promotions(model, weights, pixels, given):
        model.weights = {**original[0], **{key: as_float64(original[1][key]) for key in promoted}}
        model.constants = {key: value for key, value in original[1].items() if key not in promoted}
        if changed := changed_constants(model, weights.arrays):
            failures.append(
                InputError(
                    f"{changed[0]} of the checkpoint is not a parameter, and its values are not those of a newly built "
                    "model: ViTConfig has no such state, such as the statistics of a batch norm"
                )
            )
            continue
        trial = random_weights(model.weights, _SEED + 1)
        first, second = model.run(trial, pixels), model.run(trial, pixels)
        if not np.array_equal(first, second):
            raise InputError(
                "two forward passes with the same weights and images return different outputs: let dropout depend on the "
                "training mode, and switch it off for inference"
            )
        check_pixels(model, trial, pixels, first)
        trace = model.trace(trial, pixels)
        unused = [key for key in model.weights if key not in trace.order]
        if wrong := [key for key in unused if key not in weights.ignored]:
            pattern = re.escape(wrong[0])
            raise InputError(f"its forward pass does not use {wrong[0]}: if it is for training, give --ignore '{pattern}'")
        for key in unused:
            model.constants[key] = model.weights.pop(key)
        try:
            found = _search(model, images, pixels, trace, given, trial, first.shape)
        except InputError as error:
            failures.append(error)
            continue
        if isinstance(found, Failure):
            failures.append(found)
            continue
        _check_epsilon(found, given)
        return _finish(model, weights, found, pixels, given)
    further = [each for each in failures if isinstance(each, Failure)]
    if further:
        worst = max(further, key=lambda each: each.progress)
        size = "" if "image_size" in given else f" for images of {images.height}x{images.width}"
        raise InputError(f"no config of ViTConfig computes the same function{size}: {worst}")
    raise _NoStructure(str(failures[0]))


def _promotions(model: OwnModel, weights: OwnWeights, images: Array, given: Fields) -> Iterator[tuple[str, ...]]:
    """Yield the constants to read as parameters: tables that the forward pass uses, such as stored positions; then none."""
    tables = [
        key
        for key, value in model.constants.items()
        if key in weights.arrays and value.dtype.kind == "f" and sum(length > 1 for length in value.shape) >= 2
    ]
    if tables and given.get("positions.kind") != "fixed" and model.twin == "torch":
        order = model.trace({key: as_float64(model.constants[key]) for key in tables}, images).order
        if used := tuple(key for key in tables if key in order):
            yield used
    yield ()


def _search(
    model: OwnModel,
    images: ImageShape,
    pixels: Array,
    trace: Trace,
    given: Fields,
    trial: dict[str, Array],
    output: tuple[int, ...],
) -> Candidate | Failure:
    shapes = {key: array.shape for key, array in model.weights.items()}
    options = Options(model.settings, trace, dict(given))
    search = TableSearch(model, options, trial, pixels, trace.narrowed)
    candidates = find_candidates(shapes, trace.order, images, output)
    return search.find(each.with_fields(output_axes=len(output)) for each in candidates)


def _check_epsilon(found: Candidate, given: Fields) -> None:
    """Raise InputError if the epsilon is that of float64: it probably follows the dtype, which the proof cannot show."""
    eps = float(np.finfo(np.float64).eps)
    if found.config.norms.eps == eps and "norms.eps" not in given:
        raise InputError(
            f"its norms have the epsilon of float64, {eps!r}, as with eps=None or finfo(x.dtype).eps, which is another one "
            f"in float32: in a copy of the class give that of float32, {float(np.finfo(np.float32).eps)!r}; or --set "
            f"norms.eps={eps!r} if the class has this number in every dtype"
        )


def _finish(model: OwnModel, weights: OwnWeights, found: Candidate, pixels: Array, given: Fields) -> _Derived:
    """Prove a candidate, and return its table."""
    arrays = {key: weights.arrays[key] for key in model.weights}
    own = {key: as_float64(array) for key, array in arrays.items()}
    images = np.random.default_rng(_SEED + 2).standard_normal(pixels.shape)  # others than those of the search
    proof = prove(model, found, own, images, _SEED + 3)
    check_other_inputs(model, found, own, _SEED + 4)
    reasons = {key: "the state of a random number generator" for key in sorted(weights.generators)}
    reasons |= {key: "not used by the forward pass of the class" for key in model.constants if key in weights.ignored}
    constants = {
        key: digest(weights.arrays[key]) for key in model.constants if key in weights.arrays and key not in reasons
    }
    text = table_text(
        found,
        like=model.name,
        largest=proof.largest,
        strip=weights.strip,
        ignored={_any_numbers(key): why for key, why in reasons.items()},
        constants=_joined_constants(constants),
        given=list(given),
    )
    return _Derived(text, found, proof, own, missing_constants(weights))


def _any_numbers(key: str) -> str:
    """Return a regular expression for a key with any numbers in place of its own: those of other blocks."""
    return re.sub(r"(?<![A-Za-z0-9])\d+(?![A-Za-z0-9])", r"\\d+", re.escape(key))


def _joined_constants(digests: Mapping[str, str]) -> dict[str, str]:
    """Return regular expressions for the keys of constants, each with its digest; one for those of all blocks, if equal."""
    by_pattern: dict[str, set[str]] = {}
    for key, value in digests.items():
        by_pattern.setdefault(_any_numbers(key), set()).add(value)
    equal = {pattern: values.pop() for pattern, values in by_pattern.items() if len(values) == 1}
    return equal | {re.escape(key): value for key, value in digests.items() if _any_numbers(key) not in equal}


def _read_with(derived: _Derived, model: OwnModel, source: StrPath, **options: Any) -> Checkpoint:
    """Return the checkpoint as it is read with the table, after a check that it is the model that was proven.

    Raises:
        InputError: it is another model.
    """
    format = parse_format(derived.text, "its table")
    with registered(format):
        checkpoint = load(source, format=format.name, **options)
    twin, expected = Twin(model.twin), derived.candidate.config
    values = derived.candidate.to_rows(derived.own)
    read = {key: as_float64(array) for key, array in converted_arrays(checkpoint, model.twin)}
    images = np.random.default_rng(_SEED).standard_normal((2, *expected.image_size, expected.in_channels))
    same = read.keys() == (arrays := twin.arrays(expected, values)).keys()
    same = same and all(np.array_equal(read[key], array) for key, array in arrays.items())
    outputs = (
        [twin.run(config, values, images, is_compiled=True) for config in (expected, checkpoint.config)] if same else []
    )
    if not same or not np.array_equal(outputs[0], outputs[1]):
        raise InputError("its table reads another model than the one that was proven: report this as a bug")
    return replace(checkpoint, assumed=(*derived.assumed, *checkpoint.assumed))
