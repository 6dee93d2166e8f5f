"""Recording what both twins agree on, and computing it again with whatever is installed.

Every framework is held to the reference in float64, and in float32 to its own float64.  So a change of what is computed
shows in the first, a change of how well in the second, and neither framework has to be there for the other.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np

from parity.checkpoints.reading import Source
from parity.checkpoints.weights import Checkpoint
from parity.comparison import framework_settings, reproducible_init
from parity.comparison.forward_backward import JaxTwin, Run, Subject, TorchTwin
from parity.comparison.golden.drift import Verification, moved
from parity.comparison.golden.file import FRAMEWORKS, Array, Golden, Record, Tensor, writable
from parity.comparison.golden.sketch import root_mean_square, sketch
from parity.comparison.golden.subject import checksums, restored, shown
from parity.comparison.localisation import GRADIENT, module_scales
from parity.comparison.tolerances import FUNCTION
from vit_spec import InputError, ViTConfig, nearest

Progress = Callable[[str], None]


def record(
    model: ViTConfig | Checkpoint,
    path: Source,
    *,
    seed: int = 0,
    force: bool = False,
    progress: Progress = lambda what: None,
) -> Golden:
    """Run both twins on a model, and write what they agree on to a golden file.

    Args:
        model: a config, whose weights are drawn from the seed, or weights; as `read_subject` returns them.
        path: the file, which ends in .npz.
        seed: of the images, of the target of the loss, and of drawn weights.
        force: replace a file that is there.
        progress: called with what is being done.

    Raises:
        InputError: a path that cannot be written to, a framework that is missing, a model that computes NaN, or twins that
            do not compute the same.
    """
    _, absent = installed()
    if absent:
        raise InputError(
            f"a golden is what both twins agree on, and {', '.join(absent.values())} is not installed: install it"
        )
    writable(path, force)
    checkpoint = model if isinstance(model, Checkpoint) else reproducible_init.weights(model, seed)
    subject = shown(checkpoint, seed)
    progress("PyTorch in float64, attention written out")
    tensors = tuple(_tensors(TorchTwin(subject, "explicit").run()))
    golden = Golden(checkpoint.config, seed, checkpoint is not model, checksums(subject), tensors)
    found = _measured(golden, subject, FRAMEWORKS, progress)
    worst, name = max((float(np.nanmax(distances)), name) for name, distances in found.function.items())
    if not worst <= FUNCTION:
        raise InputError(
            f"a golden is what both twins agree on, and in float64 {name} is {worst:.1e} from PyTorch with its attention "
            f"written out (bar {FUNCTION:.0e}): find the part with `python -m parity check`"
        )
    golden = replace(golden, records=(found,))
    golden.write(path)
    return golden


def verify(
    path: Source,
    *,
    weights: Checkpoint | None = None,
    only: str | None = None,
    append: bool = False,
    progress: Progress = lambda what: None,
) -> Verification:
    """Compute a golden again in whichever frameworks are installed, and hold it to what was recorded.

    Args:
        weights: of a golden of weights: the same ones, in any format.
        only: "jax" or "torch": leave the other out.
        append: keep what was found in the file, as one more record.
        progress: called with what is being done.

    Raises:
        InputError: no golden file, weights that are missing or are others, or no framework to run.
    """
    golden = Golden.read(path)
    frameworks, absent = installed()
    if only is not None:
        if only not in FRAMEWORKS:
            raise InputError(f"only is {only!r}: give jax or torch{nearest(only, FRAMEWORKS)}")
        if only in absent:
            raise InputError(f"{only} alone was asked for, and {absent[only]} is not installed: install it")
        frameworks, absent = (only,), {}
    if not frameworks:
        raise InputError(
            f"neither framework can run ({', '.join(absent.values())} not installed): install jax and flax, or torch"
        )
    subject = restored(golden, weights, str(path))
    now = _measured(golden, subject, frameworks, progress)
    if append:
        replace(golden, records=(*golden.records, now)).write(path)
    return Verification(str(path), golden, now, moved(golden, now), absent)


def installed() -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the frameworks whose twin can run, and of each other one the package that it lacks."""
    absent = {}
    for framework in FRAMEWORKS:
        try:
            import_module(f"vit_{framework}")
        except ModuleNotFoundError as error:
            absent[framework] = error.name or framework
    return tuple(name for name in FRAMEWORKS if name not in absent), absent


# What is measured --------------------------------------------------------------------------------------------------


def _tensors(run: Run) -> Iterable[Tensor]:
    """Yield what is kept of the reference.

    Raises:
        InputError: NaN or infinities in it.
    """
    scales = module_scales(run.gradients)
    forward = [(name, value, 0.0) for name, value in run.values.items()]
    backward = [(f"{GRADIENT}{name}", value, scales[name]) for name, value in run.gradients.items()]
    for name, value, scale in (*forward, *backward):
        if not np.isfinite(value).all():
            raise InputError(
                f"the model computes NaN or infinities, first at {name}: look at its weights with "
                "`python -m parity inspect SRC --values`"
            )
        yield Tensor(name, value.shape, max(root_mean_square(value), scale), sketch(value))


def _measured(golden: Golden, subject: Subject, frameworks: Iterable[str], progress: Progress) -> Record:
    """Run each framework in float64 and in float32, and measure."""
    function, precision = {}, {}
    for name in frameworks:
        twin: Any = JaxTwin(subject) if name == "jax" else TorchTwin(subject)
        progress(f"{name} in float64")
        exact = twin.run()
        progress(f"{name} in float32")
        coarse = twin.run("float32")
        values = [(tensor, _value(exact, tensor), _value(coarse, tensor)) for tensor in golden.tensors]
        function[name] = np.array([_from_reference(tensor, value) for tensor, value, _ in values])
        precision[name] = np.array([_from_exact(*each) for each in values])
    with framework_settings.strict():
        card = framework_settings.environment(framework_settings.compiler_options())
    return Record(card, function, precision)


def _value(run: Run, tensor: Tensor) -> Array | None:
    return run.gradients.get(tensor.name.removeprefix(GRADIENT)) if tensor.is_gradient else run.values.get(tensor.name)


def _from_reference(tensor: Tensor, value: Array | None) -> float:
    """Return the relRMS of what a framework computed in float64 from the reference; NaN where it shows no such tensor."""
    if value is None:
        return math.nan
    if value.shape != tensor.shape or not np.isfinite(value).all():
        return math.inf
    distance = float(np.linalg.norm(sketch(value) - tensor.kept))
    return _relative(distance, tensor.size * math.sqrt(tensor.entries))


def _from_exact(tensor: Tensor, exact: Array | None, coarse: Array | None) -> float:
    if exact is None or coarse is None:
        return math.nan
    if exact.shape != coarse.shape or not np.isfinite(exact).all() or not np.isfinite(coarse).all():
        return math.inf
    return _relative(root_mean_square(coarse - exact), tensor.size)


def _relative(distance: float, size: float) -> float:
    if not distance:
        return 0.0
    return distance / size if size else math.inf
