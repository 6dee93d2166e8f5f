"""AdamW, clipping and decay masks of the twins, compared with the formula in float64, optax, big_vision and each other."""

import math

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
torch = pytest.importorskip("torch")

import jax.numpy as jnp

import vit_jax
import vit_jax.optimizer
import vit_spec
import vit_torch
import vit_torch.optimizer
from parity.checkpoints.conversion import converted_arrays
from parity.checkpoints.weights import Checkpoint
from tests.twins import small_config

B1, B2, EPS, LR, DECAY, CLIP = 0.9, 0.999, 1e-8, 1e-3, 0.1, 100.0
OPTIONS = {"b1": B1, "b2": B2, "eps": EPS, "weight_decay": DECAY}
STEPS = 300
MODELS = ["vit_s16", "deit3_s16", "siglip_b16", "dinov2_g14"]


def gradients(steps: int = STEPS) -> np.ndarray:
    """Return gradients of two parameters, (steps, 2, 500), float32, of magnitudes from 1e-4 to 1e1; half the steps clip."""
    rng = np.random.default_rng(0)
    return (rng.normal(size=(steps, 2, 500)) * 10 ** rng.uniform(-4, 1, (2, 500))).astype(np.float32)


def rate(step):
    """Return a learning rate that differs in every step."""
    return LR * (1 - 0.5**step / 2)


def reference(grads: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Return the parameters after AdamW in float64, as its docstring defines it; the second parameter has no decay."""
    p, m, v = start.astype(np.float64), np.zeros_like(start, np.float64), np.zeros_like(start, np.float64)
    decay = np.array([[DECAY], [0.0]])
    for t, g in enumerate(grads.astype(np.float64), start=1):
        g = g * min(1.0, CLIP / np.linalg.norm(g))
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g * g
        p = p - rate(t - 1) * (m / (1 - B1**t) / (np.sqrt(v / (1 - B2**t)) + EPS) + decay * p)
    return p


def run_jax(grads: np.ndarray, start: np.ndarray, optimizer: optax.GradientTransformation | None = None) -> np.ndarray:
    optimizer = optimizer or vit_jax.optimizer.adamw(rate, clip=CLIP, **OPTIONS, decays=[True, False])

    @jax.jit
    def run(params, grads):
        def step(carry, g):
            params, state = carry
            updates, state = optimizer.update([g[0], g[1]], state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), grads)[0][0]

    with jax.enable_x64(start.dtype == np.float64):
        return np.stack([np.asarray(p) for p in run([jnp.asarray(p) for p in start], jnp.asarray(grads))])


def run_torch(grads: np.ndarray, start: np.ndarray) -> np.ndarray:
    params = {name: torch.nn.Parameter(torch.tensor(p)) for name, p in zip("ab", start, strict=True)}
    optimizer = vit_torch.optimizer.AdamW(params, rate, clip=CLIP, **OPTIONS, decays={"a": True, "b": False})
    for g in grads:
        params["a"].grad, params["b"].grad = torch.tensor(g[0]), torch.tensor(g[1])
        optimizer.step()
    return np.stack([p.detach().numpy() for p in params.values()])


TWINS = {"jax": run_jax, "torch": run_torch}


def relative_error(a: np.ndarray, b: np.ndarray) -> float:
    """Return the root mean square of a - b, relative to that of b."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("twin", TWINS)
def test_float64_updates_match_the_formula(twin: str) -> None:
    # Each of the 300 steps adds a few rounding errors of 1e-16.
    grads, start = gradients().astype(np.float64), np.zeros((2, 500))
    assert relative_error(TWINS[twin](grads, start), reference(grads, start)) < 1e-13


def test_float64_updates_and_clipping_match_optax() -> None:
    # As above: a few rounding errors of 1e-16 per step.
    grads, start = gradients().astype(np.float64), np.random.default_rng(1).standard_normal((2, 500))
    theirs = optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(rate, **OPTIONS, mask=[True, False]))
    assert relative_error(run_jax(grads, start) - start, run_jax(grads, start, theirs) - start) < 1e-13


@pytest.mark.parametrize(("steps", "tolerance"), [(1, 1e-12), (50, 1e-10)])
def test_float64_updates_of_the_twins_match(steps: int, tolerance: float) -> None:
    grads, start = gradients(steps).astype(np.float64), np.random.default_rng(1).standard_normal((2, 500))
    assert relative_error(run_jax(grads, start) - start, run_torch(grads, start) - start) < tolerance


def test_a_float32_update_is_within_float32_rounding_of_the_formula() -> None:
    # The error of optax's own adamw is 7e-6 here: it computes the bias correction in float32.
    grads, start = gradients(10), np.zeros((2, 500), np.float32)
    assert relative_error(run_jax(grads, start), reference(grads, start)) < 1e-6


def test_the_float32_errors_of_the_twins_differ_by_less_than_a_factor_of_two() -> None:
    # The error of torch's own AdamW is seven times larger: it rounds 1 - lr weight_decay, the same for all entries.
    grads, start = gradients(), np.random.default_rng(1).standard_normal((2, 500)).astype(np.float32)
    exact = reference(grads, start) - start
    near, far = sorted(relative_error(twin(grads, start) - start, exact) for twin in TWINS.values())
    assert far < 2 * near


def test_the_first_update_in_jax_uses_the_learning_rate_of_step_0() -> None:
    options = {**OPTIONS, "eps": 0.0, "weight_decay": 0.0}
    optimizer = vit_jax.optimizer.adamw(lambda step: step + 1.0, clip=math.inf, **options, decays=False)
    param = jnp.zeros(())
    update, _ = optimizer.update(jnp.asarray(3.0), optimizer.init(param), param)
    assert float(update) == pytest.approx(-1.0, rel=1e-6)  # the first update of Adam has the size of the learning rate


def adamw_of_one(param, learning_rate):
    options = {**OPTIONS, "eps": 0.0, "weight_decay": 0.0}
    return vit_torch.optimizer.AdamW({"p": param}, learning_rate, clip=math.inf, **options, decays={"p": True})


def test_the_first_update_in_torch_uses_the_learning_rate_of_step_0() -> None:
    param = torch.nn.Parameter(torch.zeros(()))
    param.grad = torch.tensor(3.0)
    adamw_of_one(param, lambda step: step + 1.0).step()
    assert float(param.detach()) == pytest.approx(-1.0, rel=1e-6)


def test_a_resumed_torch_optimizer_continues_the_step_count() -> None:
    steps = []
    param = torch.nn.Parameter(torch.zeros(3))
    param.grad = torch.ones(3)
    first = adamw_of_one(param, lambda step: 1.0)
    first.step()
    second = adamw_of_one(param, lambda step: steps.append(step) or 1.0)
    second.load_state_dict(first.state_dict())
    second.step()
    assert steps == [1]


def clip_in_jax(grads: list[np.ndarray], limit: float) -> list[np.ndarray]:
    return [np.asarray(g) for g in vit_jax.optimizer.clip_by_global_norm([jnp.asarray(g) for g in grads], limit)]


def clip_in_torch(grads: list[np.ndarray], limit: float) -> list[np.ndarray]:
    tensors = [torch.tensor(g) for g in grads]
    vit_torch.optimizer.clip_by_global_norm(tensors, limit)
    return [tensor.numpy() for tensor in tensors]


CLIPS = pytest.mark.parametrize("clip_gradients", [clip_in_jax, clip_in_torch])


@CLIPS
@pytest.mark.parametrize(("norm", "factor"), [(10.0, 0.1), (1.0, 1.0), (0.5, 1.0), (0.0, 1.0)])
def test_gradients_are_scaled_down_to_the_limit_but_never_up(norm: float, factor: float, clip_gradients) -> None:
    grads = [np.asarray([0.6 * norm], np.float32), np.asarray([[0.0, 0.8 * norm]], np.float32)]
    for got, given in zip(clip_gradients(grads, 1.0), grads, strict=True):
        np.testing.assert_allclose(got, factor * given, rtol=1e-6)


@CLIPS
def test_a_gradient_that_is_not_finite_stays_visible_after_clipping(clip_gradients) -> None:
    assert np.isnan(clip_gradients([np.asarray([1.0, math.nan], np.float32)], 1.0)).all()


@pytest.mark.parametrize("name", MODELS)
def test_the_decay_mask_of_jax_follows_the_rows(name: str) -> None:
    config = vit_spec.get(name)
    params = jax.eval_shape(lambda: vit_jax.init(config))
    mask = vit_jax.optimizer.decay_mask(config, params)
    sizes = jax.tree.map(lambda p, decays: p.size if decays else 0, params, mask)
    assert sum(jax.tree.leaves(sizes)) == sum(row.size for row in vit_spec.rows(config).values() if row.decays)
    assert mask["blocks"]["attn"]["qkv"]["kernel"] and not mask["blocks"]["norm1"]["scale"]


@pytest.mark.parametrize("name", MODELS)
def test_the_decay_mask_of_torch_follows_the_rows(name: str) -> None:
    config = vit_spec.get(name)
    with torch.device("meta"):
        params = dict(vit_torch.ViT(config).named_parameters())
    mask = vit_torch.optimizer.decay_mask(config, params)
    decaying = sum(param.numel() for name, param in params.items() if mask[name])
    assert decaying == sum(row.size for row in vit_spec.rows(config).values() if row.decays)
    assert mask["blocks.0.attn.qkv.weight"] and not mask["blocks.0.norm1.weight"]


@pytest.mark.parametrize("name", ["vit_s16_plain", "siglip_b16"])
def test_the_decay_mask_is_that_of_big_vision(name: str) -> None:
    """In all its configs, weight decay applies to the parameters that its modules call kernel."""
    config = small_config(vit_spec.get(name))
    with torch.device("meta"):
        params = dict(vit_torch.ViT(config).named_parameters())
    mask = vit_torch.optimizer.decay_mask(config, params)
    marked = {key: np.full(param.shape, mask[key], np.float32) for key, param in params.items()}
    theirs = dict(converted_arrays(Checkpoint(config, "torch", marked), "big_vision:loop"))
    assert sum(key.endswith("/kernel") for key in theirs) >= 6 * config.depth
    for key, decays in theirs.items():
        assert (decays == key.endswith("/kernel")).all(), key
