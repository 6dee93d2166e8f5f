"""The notes of a report: possible explanations of a failure, and properties that the inputs and weights cannot show."""

from collections.abc import Iterator, Mapping, Sequence

from parity.checkpoints.layout import Array
from parity.comparison.any_model.both_models import BothModels
from parity.comparison.any_model.hints import detached_inputs, other_momenta, swapped_outputs
from parity.comparison.any_model.parameters import BY_TRIAL, Axes
from parity.comparison.any_model.report import GRADIENT_OF, STATISTICS
from parity.comparison.tolerances import FLOAT32_TOLERANCE, PERTURBATION_ROUNDOFFS, ErrorNorms


def hints(models: BothModels, contradicting: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield sentences about what may explain a failure of two models that have run.

    contradicting: pairs of keys with which the models agree, and which their names contradict.
    """
    flax, torch = (models.runs[f"{side} float64"] for side in ("flax", "torch"))
    if models.is_only_loss_different:
        yield _hint_on_loss(models, flax, torch)
    if models.has_own_loss and [row.name for row in models.rows if not row.same_precision] == ["gradient"]:
        yield "the gradient starts at the functions of loss, and one may round more: compare the models without loss"
    swapped = list(swapped_outputs(flax, torch, models.names))
    yield from swapped
    yield from other_momenta(flax, torch, models.torch.weights, models.torch.batch_norms)
    if contradicting and not swapped:
        pairs = _listed([f"{a} <-> {b}" for a, b in contradicting])
        yield f"the models agree if names do not count: {pairs}; if this is right, say so in layouts"
    if not models.torch.is_detached:
        yield from detached_inputs(flax, torch)
    else:
        yield "the outputs of torch have no gradient: the model detaches them, or runs under torch.no_grad()"
    if models.masks is not None:
        yield from models.masks.hints()
    elif models.flax.training:
        names = _listed([*dict.fromkeys(models.flax.training)])
        yield f"{names} of flax ran in training mode: call model.eval() first, or give the nnx.Module itself as params"


def _hint_on_loss(models: BothModels, flax: Mapping[str, Array], torch: Mapping[str, Array]) -> str:
    """Return why the losses may differ of models whose outputs agree."""
    what = "the outputs agree and the losses do not"
    if models.has_own_loss:
        skipped = _listed([*models.skipped_outputs])
        also = f", and at what they read of {skipped}, which is not compared" if skipped else ""
        return f"{what}: look at the functions of loss{also}"
    for name in models.names:
        a, b = flax[name].dtype, torch[name].dtype
        if (a.kind == "f") != (b.kind == "f"):
            remedy = "the default loss counts floating-point outputs only: return the same type"
            return f"{name} is {a} in flax and {b} in torch, and {remedy}"
    return what


def notes(models: BothModels, misleading: Sequence[tuple[str, str]], of_classes: Mapping[str, Axes]) -> Iterator[str]:
    """Yield sentences about what a comparison cannot show, whether the models pass or not.

    misleading: pairs of keys that the order of use gives, whose names are less similar than those of other pairs.
    of_classes: the order of axes of PyTorch's matrices whose class fixes it, by key.
    """
    if alone := models.unpaired_outputs:
        be, them = ("are", "them") if len(alone) > 1 else ("is", "it")
        yield f"{_listed(alone)} {be} not compared: only one model returns {them}"
    yield from _notes_on_inputs(models)
    yield from _notes_on_mapping(models, misleading, of_classes)
    yield from _notes_on_tensors(models)
    if models.choices:
        several = (f"{each.changed:,} of {each.entries:,} choices of {side}" for side, each in models.choices.items())
        yield (
            f"rounding to float32 changes {' and '.join(several)}, such as those of ReLU or of a maximum: the gradients in "
            "float32, computed operation by operation, are compared with those in float64 that make the same choices"
        )
    if models.perturbed:
        worst = max(models.rows, key=lambda row: row.difference)
        yield (
            f"these models amplify rounding errors: weights and inputs that are perturbed by {PERTURBATION_ROUNDOFFS} unit "
            f"roundoffs change {worst.label} so far that its tolerance in float64 is {worst.float64_tolerance:.1e}"
        )
    yield from _notes_on_sums(models)
    if fixed := _unequal_fixed_keys(models):
        which = f"{_listed(fixed)} of torch, which no optimizer trains"
        yield f"the values of {which}, differ between the two models: both ran with those of {models.source}"
    if models.trained_by_flax:
        yield f"torch freezes {_listed(models.trained_by_flax)}, and flax has a gradient there, which is not compared"
    if models.torch.changed_inputs:
        inputs = _listed([f"input {n}" for n in models.torch.changed_inputs])
        yield f"torch changes {inputs} in place, and flax does not: code that uses it after the call gets other values"
    if models.torch.is_random:
        yield "torch draws random numbers in evaluation, as a dropout does that ignores eval(): the next run may differ"
    if models.unbiased:
        keys = _listed([*dict.fromkeys(models.unbiased)])
        yield f"PyTorch divides the running variance of {keys} by n - 1, and Flax by n; here both divide by n - 1"
    yield from _notes_on_training(models)


def _notes_on_sums(models: BothModels) -> Iterator[str]:
    """Yield which tensors pass G1 because the order in which a library adds explains their errors."""
    rounded = [(row.label, *row.rounded) for row in models.rows if row.rounded]
    if rounded:
        yield (
            f"sums of up to {models.flax.longest_sum:,} terms have other errors in another order: if each operation is "
            "computed in float64 and its result rounded to float32, flax and torch differ from float64 by "
            f"{_listed([f'{flax:.1e} and {torch:.1e} in {name}' for name, flax, torch in rounded])}"
        )


def _notes_on_inputs(models: BothModels) -> Iterator[str]:
    """Yield what constant inputs or weights cannot show."""
    for n, x in enumerate(models.inputs):
        if x.size > 1 and (x == x.flat[0]).all():
            yield f"all entries of input {n} are {x.flat[0]}: a model that ignores it would pass; use others"
    weights = models.torch.weights
    if constant := [key for key, array in weights.items() if array.size and array.min() == array.max() in (0.0, 1.0)]:
        yield f"all entries of {_listed(constant)} of torch are 0 or 1, which hides mistakes: perturb the weights first"


def _notes_on_mapping(
    models: BothModels, misleading: Sequence[tuple[str, str]], of_classes: Mapping[str, Axes]
) -> Iterator[str]:
    """Yield what only the agreement of the models shows of the mapping of the parameters; see `notes`."""
    if misleading:
        pairs = _listed([f"{a} <-> {b}" for a, b in misleading])
        yield f"the order of use overrides more similar names, {pairs}: if the names are right, layers are exchanged"
    if transposed := models.correspondence.transposed_namesakes(BY_TRIAL):
        use = f"{_listed(transposed)} {'are' if len(transposed) > 1 else 'is'} used transposed"
        yield f"{use}, which only a trial of both orders shows: if both models store the same matrix, one is wrong"
    if against_class := models.correspondence.kernels_against_class(BY_TRIAL, of_classes):
        order = f"the order of axes of {_listed(against_class)} is not that of the class"
        yield f"{order}, which only a trial of both orders shows: if a conversion follows the class, one model is wrong"


def _notes_on_tensors(models: BothModels) -> Iterator[str]:
    """Yield what the comparison cannot show, because outputs or gradients of PyTorch have one value."""
    computed = models.runs["torch float64"]
    if equal := [name for name in models.names if _is_constant(computed[name])]:
        yield f"all entries of {_listed(equal)} are 0 or equal, which hides mistakes: use other weights or inputs"
    if models.torch.is_detached:  # which is a hint
        return
    held = {key for zero in models.correspondence.zeros for key in zero.keys}
    keys = [key for key in models.torch.weights if key not in held and f"{GRADIENT_OF}{key}" in computed]
    if unused := [key for key in keys if not computed[f"{GRADIENT_OF}{key}"].any()]:
        yield f"all gradients of {_listed(unused)} are 0: the outputs do not show how the models use them"


def _notes_on_training(models: BothModels) -> Iterator[str]:
    """Yield what the comparison of a training step cannot show: random masks, and buffers that one model alone updates."""
    if models.masks is None:
        return
    from flax import nnx

    yield from models.masks.notes()
    keys = {b: a for a, b in models.correspondence.keys()}
    missing = sorted(models.torch.updated - {name.removeprefix(STATISTICS) for name in models.statistics()})
    if paired := [key for key in missing if key in keys]:
        what = f"{_listed(paired)} of torch, which are not compared"
        collections = [*dict.fromkeys(keys[key].partition("/")[0] for key in paired)]
        yield (
            f"flax does not update {what}: call model.train(), or give use_running_average=False"
            if isinstance(models.params, nnx.Module)
            else f"flax does not return {what}: use mutable={collections}"
        )
    if alone := [key for key in missing if key not in keys]:
        yield f"flax has no counterpart of {_listed(alone)}, which torch updates in training: the updates are not compared"
    compared = {a for b, a in keys.items() if f"{STATISTICS}{b}" in models.runs["torch float64"]}
    if alone := [key for key in models.flax.updated if key not in compared]:
        yield f"torch updates no counterpart of {_listed(alone)}, which flax updates: the updates are not compared"


def _unequal_fixed_keys(models: BothModels) -> list[str]:
    """Return the keys of PyTorch's fixed tensors, such as tables of positions, that differ from the values in Flax."""
    mapped = dict(models.correspondence.keys()).values()
    known = {key: models.torch_weights[key] for key in sorted(models.fixed.intersection(mapped))}
    own = models.correspondence.to_torch(models.flax_weights) if known else {}
    return [key for key, array in known.items() if ErrorNorms.of(own[key], array).relative_rms() > FLOAT32_TOLERANCE]


def _is_constant(array: Array) -> bool:
    """Return whether all entries of an array are equal; a single one says nothing unless it is 0."""
    return bool(array.size and (array == array.flat[0]).all() and (array.size > 1 or not array.any()))


def _listed(keys: Sequence[str]) -> str:
    return f"{', '.join(keys[:3])}{f' and {len(keys) - 3} more' if len(keys) > 3 else ''}"
