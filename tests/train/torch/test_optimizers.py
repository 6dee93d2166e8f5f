"""The optimizers of both trainers: from the same state and gradients, one step agrees in float64 to 1e-14 of the update."""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")

import optax

import parity
import vit_spec
from parity.checkpoints.weights import as_checkpoint
from tests import ROOT, torch_meshes
from train.jax import optimizers as jax_optimizers
from train.jax.optimizers import make_optimizer as make_jax
from train.jax.parameter_tree import tree
from train.mesh import Parameter, parameters
from train.optimizer_state import state_size
from train.recipes import OPTIMIZERS, Optimizer
from train.torch import optimizers as torch_optimizers
from train.torch.memory_estimate import _optimizer_size
from train.torch.optimizers import AdamW, make_optimizer, orthogonalize
from vit_spec import ViTConfig

SIZES: dict[str, Any] = {"image_size": (8, 8), "patch_size": 4, "width": 64, "depth": 3, "num_heads": 2, "mlp_dim": 96}
CONFIG = vit_spec.get("vit_ti16", num_classes=5, **SIZES)
RATE = 1e-2
STEPS = 4
OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.0, "clip": 1e9, "beta1": 0.0},
    {"clip": 1e-2, "beta1": 0.8, "beta2": 0.95, "eps": 1e-4, "layer_decay": 0.7},
    {"freeze": ("patch_embed.*", "blocks.[01].*", "*.bias")},
    {"freeze": ("*.weight", "cls_token", "pos_embed")},
]
# Each parameter is updated by itself, so a model has several kinds.
MODELS: dict[str, dict[str, Any]] = {
    "gates, pooling and an MLP of offsets in each block": {
        "attention": {"qk_norm": True, "qkv_bias": "qv"},
        "mlp": {"activation": "swiglu", "norm": True},
        "head": {"pool": "attention"},
        "positions": {"relative": "mlp", "relative_dim": 48},
    },
    "narrow inside, with a table of offsets in each block": {
        "mlp_dim": 32,
        "attention": {"out_norm": True},
        "norms": {"layer_scale": 0.1},
        "positions": {"kind": "none", "relative": "table"},
    },
    "no projection and a shared MLP of offsets": {
        "attention": {"proj": False},
        "norms": {"after_patches": True},
        "positions": {"relative": "mlp", "relative_dim": 48, "relative_shared": True},
    },
    "learned rotations": {"positions": {"rotary": "mixed"}, "norms": {"order": "parallel", "kind": "rms", "bias": False}},
}


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def random_tree(seed: int, config: ViTConfig = CONFIG, dtype: Any = np.float64) -> Any:
    """Return random arrays with the shapes of the JAX twin's parameters, whose values float32 has too."""
    rng = np.random.default_rng(seed)

    def draw(parameter: Parameter) -> np.ndarray:
        shape = [config.sizes.get(axis, 1) for axis in parameter.axes]
        return (0.1 * rng.standard_normal(shape)).astype(np.float32).astype(dtype)

    return tree(config, draw)


def to_torch(arrays: Any, config: ViTConfig = CONFIG) -> dict[str, Any]:
    """Return the same arrays by the names of the PyTorch twin."""
    return {name: tensor.clone() for name, tensor in parity.to_torch(as_checkpoint(arrays, config, "jax")).items()}


def run_torch(
    settings: Optimizer, steps: int = STEPS, config: ViTConfig = CONFIG, dtype: Any = np.float64
) -> Iterator[tuple[Any, Any]]:
    """Yield for each step of PyTorch the parameters after it and before it."""
    tensors = to_torch(random_tree(0, config, dtype), config)
    optimizer = make_optimizer(settings, config, tensors)
    for n in range(steps):
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        for name, grad in to_torch(random_tree(n + 1, config, dtype), config).items():
            tensors[name].grad = grad
        optimizer.step(RATE * (n + 1))
        yield tensors, before


def run_jax(
    settings: Optimizer, steps: int = STEPS, config: ViTConfig = CONFIG, dtype: Any = np.float64
) -> Iterator[tuple[Any, Any]]:
    """Yield for each step of JAX the parameters after it and before it, with PyTorch's names."""
    params = random_tree(0, config, dtype)
    transformation = make_jax(settings, config)
    state, update = transformation.init(params), jax.jit(transformation.update)
    after = to_torch(params, config)
    for n in range(steps):
        updates, state = update(random_tree(n + 1, config, dtype), state, params, rate=RATE * (n + 1))
        params = optax.apply_updates(params, updates)
        before, after = after, to_torch(params, config)
        yield after, before


def run_both(
    settings: Optimizer, steps: int = STEPS, config: ViTConfig = CONFIG, dtype: Any = np.float64
) -> Iterator[tuple[Any, Any, Any, Any]]:
    """Yield for each step the parameters after it and before it, of PyTorch and of JAX, with PyTorch's names."""
    runs = (run(settings, steps, config, dtype) for run in (run_torch, run_jax))
    for of_torch, of_jax in zip(*runs, strict=True):
        yield *of_torch, *of_jax


@pytest.mark.parametrize(
    "options", OPTIONS, ids=["defaults", "no-decay-no-momentum", "clipped-layer-decay", "frozen", "biases"]
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_agrees_with_that_of_jax_to_rounding(name: Any, options: dict[str, Any]) -> None:
    settings = Optimizer(name=name, **options)
    for after, before, of_jax, known in run_both(settings):
        for key, tensor in after.items():
            ours, theirs = tensor - before[key], of_jax[key] - known[key]
            # An update is known to the rounding of the weights that it is the difference of.
            limit = 1e-14 * theirs.norm() + 2e-16 * before[key].norm()
            assert (ours - theirs).norm() <= limit, (key, float((ours - theirs).norm() / theirs.norm()))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["lamb", "adafactor", "muon"])
def test_a_step_agrees_with_that_of_jax_for_every_kind_of_parameter(name: Any, model: str) -> None:
    """Of the optimizers whose update depends on the shape of a parameter."""
    for after, before, of_jax, known in run_both(Optimizer(name=name), 2, CONFIG.replace(**MODELS[model])):
        for key, tensor in after.items():
            ours, theirs = tensor - before[key], of_jax[key] - known[key]
            assert (ours - theirs).norm() <= 1e-14 * theirs.norm() + 2e-16 * before[key].norm(), key


def test_adafactor_factors_the_parameters_of_each_block_by_themselves() -> None:
    """40 blocks are more than the entries of a head, so that an array of all blocks would be factored along the blocks."""
    deep = CONFIG.replace(depth=40)
    for after, before, of_jax, known in run_both(Optimizer(name="adafactor"), 2, deep):
        for key, tensor in after.items():
            ours, theirs = tensor - before[key], of_jax[key] - known[key]
            assert (ours - theirs).norm() <= 1e-14 * theirs.norm() + 2e-16 * before[key].norm(), key


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_in_float32_neither_framework_rounds_twice_as_much_as_the_other(name: Any) -> None:
    """With matrices of a real size: errors of sums grow with it."""
    settings, config = Optimizer(name=name, lr=1.0), vit_spec.get("vit_ti16", num_classes=10, depth=1, image_size=(32, 32))
    exact = [{key: each.clone() for key, each in after.items()} for after, _ in run_torch(settings, 2, config)]
    with jax.enable_x64(False):
        for expected, (ours, _, theirs, _) in zip(exact, run_both(settings, 2, config, np.float32), strict=True):
            errors = []
            for found in (ours, theirs):
                assert all(tensor.dtype == torch.float32 for tensor in found.values())
                squares = [float((found[key].double() - tensor).square().sum()) for key, tensor in expected.items()]
                errors.append(sum(squares) ** 0.5)
            assert max(errors) <= 2 * min(errors), errors


def is_in_numerics(name: str) -> bool:
    return f"\n| {name} | " in (ROOT / "docs/reference/numerics.md").read_text().partition("## The optimizers")[2]


def is_in_train_guide(name: str) -> bool:
    [row] = re.findall(r"\| `--optimizer\.name NAME` \| (.*) \|", (ROOT / "docs/guides/train.md").read_text())
    return name in re.split(r", | or ", row)


# Place -> a function that returns whether an optimizer is there
PLACES: dict[str, Callable[[str], bool]] = {
    "train/jax/optimizers.py: _BY_NAME": lambda name: name in ("adamw", *jax_optimizers._BY_NAME),
    "train/torch/optimizers.py: _BY_NAME": lambda name: name in torch_optimizers._BY_NAME,
    "train/optimizer_state.py: state_size": lambda name: f'"{name}"' in inspect.getsource(state_size),
    "train/torch/memory_estimate.py: _optimizer_size": lambda name: f'"{name}"' in inspect.getsource(_optimizer_size),
    "tests/torch_meshes.py: OPTIMIZERS": lambda name: name in torch_meshes.OPTIMIZERS,
    "docs/reference/numerics.md: The optimizers": is_in_numerics,
    "docs/guides/train.md: --optimizer.name": is_in_train_guide,
}


def places_without(name: str) -> list[str]:
    """Return the places that lack an optimizer; see "An optimizer" of the guide."""
    return [place for place, has in PLACES.items() if not has(name)]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_place_has_the_optimizer(name: str) -> None:
    missing = places_without(name)
    assert not missing, "\n".join([f"{name} is not in", *missing])


def test_an_optimizer_that_is_new_lacks_every_place() -> None:
    assert places_without("a new one") == list(PLACES)


def test_no_place_has_an_optimizer_that_recipes_lack() -> None:
    assert not {*torch_optimizers._BY_NAME, *jax_optimizers._BY_NAME, *torch_meshes.OPTIMIZERS} - set(OPTIMIZERS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_an_optimizer_has_the_estimated_size(name: Any) -> None:
    settings, params = Optimizer(name=name), random_tree(0)
    moments = make_optimizer(settings, CONFIG, to_torch(params)).moments
    in_torch = sum(entries.numel() for each in moments.values() for entries in each if entries.ndim)
    # optax also counts steps, and has one entry per block for a moment that a parameter lacks; parameters are larger.
    in_jax = sum(leaf.size for leaf in jax.tree.leaves(make_jax(settings, CONFIG).init(params)) if leaf.size > CONFIG.depth)
    each = parameters(CONFIG, "jax").values()
    estimated = sum(state_size(name, parameter, parameter.row.size, CONFIG) for parameter in each)
    assert in_torch == in_jax == estimated


def test_an_unsound_step_changes_nothing() -> None:
    tensors = to_torch(random_tree(0))
    for name in ("adamw", "muon", "adafactor"):
        optimizer = make_optimizer(Optimizer(name=name), CONFIG, tensors)
        before = {key: tensor.clone() for key, tensor in tensors.items()}
        for tensor in tensors.values():
            tensor.grad = torch.full_like(tensor, float("nan"))
        norm, sound = optimizer.step(RATE)
        assert not norm.isfinite() and not sound
        optimizer.step(RATE, torch.tensor(False))
        assert int(optimizer.updates) == 0 and not any(each.any() for part in optimizer.moments.values() for each in part)
        assert all(torch.equal(tensor, before[key]) for key, tensor in tensors.items())


def test_the_update_for_gpus_is_the_same_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs here on the CPU, whose kernel rounds the decay.  Its bias corrections lose three digits."""
    settings = Optimizer(layer_decay=0.7, clip=0.5)
    expected = [{key: each.clone() for key, each in after.items()} for after, _ in run_torch(settings)]
    monkeypatch.setattr(AdamW, "_runs_ahead", True)
    for known, (after, before) in zip(expected, run_torch(settings), strict=True):
        for key, tensor in after.items():
            assert (tensor - known[key]).norm() <= 1e-11 * (known[key] - before[key]).norm() + 1e-15 * known[key].norm(), (
                key
            )
    test_an_unsound_step_changes_nothing()


def test_frozen_parameters_have_no_moments() -> None:
    optimizer = make_optimizer(Optimizer(freeze=("blocks.[01].*", "head.*")), CONFIG, to_torch(random_tree(0)))
    assert not any(name.startswith(("blocks.0", "blocks.1", "head")) for name in optimizer.names)
    assert len(optimizer.moments["mean"]) == len(optimizer.names)


def test_orthogonalized_matrices_have_singular_values_near_one() -> None:
    matrices = torch.tensor(np.random.default_rng(0).standard_normal((3, 40, 16)))
    values = torch.linalg.svdvals(orthogonalize(matrices))
    assert values.min() > 0.5 and values.max() < 1.3
    assert torch.allclose(orthogonalize(matrices.mT), orthogonalize(matrices).mT, atol=1e-12)
