"""The twins' AdamW, clipping and decay masks: against the formula in float64, optax, big_vision, and each other."""

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
from parity.checkpoints.weights import Checkpoint, translate
from tests.twins import small

B1, B2, EPS, LR, DECAY, CLIP = 0.9, 0.999, 1e-8, 1e-3, 0.1, 100.0
OPTIONS = {"b1": B1, "b2": B2, "eps": EPS, "weight_decay": DECAY}
STEPS = 300
MODELS = ["vit_s16", "deit3_s16", "siglip_b16", "dinov2_g14"]


def gradients(steps: int = STEPS) -> np.ndarray:
    """(steps, 2, 500) float32, two parameters, of sizes from 1e-4 to 1e1; about half of the steps are clipped."""
    rng = np.random.default_rng(0)
    return (rng.normal(size=(steps, 2, 500)) * 10 ** rng.uniform(-4, 1, (2, 500))).astype(np.float32)


def rate(step):
    """A learning rate of which no two are alike."""
    return LR * (1 - 0.5**step / 2)


def reference(grads: np.ndarray, start: np.ndarray) -> np.ndarray:
    """AdamW in float64, as the docstrings have it; the second parameter does not decay."""
    p, m, v = start.astype(np.float64), np.zeros_like(start, np.float64), np.zeros_like(start, np.float64)
    decay = np.array([[DECAY], [0.0]])
    for t, g in enumerate(grads.astype(np.float64), start=1):
        g = g * min(1.0, CLIP / np.linalg.norm(g))
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g * g
        p = p - rate(t - 1) * (m / (1 - B1**t) / (np.sqrt(v / (1 - B2**t)) + EPS) + decay * p)
    return p


def of_jax(grads: np.ndarray, start: np.ndarray, optimizer: optax.GradientTransformation | None = None) -> np.ndarray:
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


def of_torch(grads: np.ndarray, start: np.ndarray) -> np.ndarray:
    params = {name: torch.nn.Parameter(torch.tensor(p)) for name, p in zip("ab", start, strict=True)}
    optimizer = vit_torch.optimizer.AdamW(params, rate, clip=CLIP, **OPTIONS, decays={"a": True, "b": False})
    for g in grads:
        params["a"].grad, params["b"].grad = torch.tensor(g[0]), torch.tensor(g[1])
        optimizer.step()
    return np.stack([p.detach().numpy() for p in params.values()])


TWINS = {"jax": of_jax, "torch": of_torch}


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Root mean square of the difference, relative to b's."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("twin", TWINS)
def test_float64_updates_are_those_of_the_formula(twin: str) -> None:
    # No step adds more than a few roundings of 1e-16, and 300 add up to less than their number.
    grads, start = gradients().astype(np.float64), np.zeros((2, 500))
    assert distance(TWINS[twin](grads, start), reference(grads, start)) < 1e-13


def test_float64_updates_and_clipping_are_those_of_optax() -> None:
    # As above: a few roundings of 1e-16 a step.
    grads, start = gradients().astype(np.float64), np.random.default_rng(1).standard_normal((2, 500))
    theirs = optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(rate, **OPTIONS, mask=[True, False]))
    assert distance(of_jax(grads, start) - start, of_jax(grads, start, theirs) - start) < 1e-13


@pytest.mark.parametrize(("steps", "bar"), [(1, 1e-12), (50, 1e-10)])
def test_the_twins_updates_are_the_same_in_float64(steps: int, bar: float) -> None:
    grads, start = gradients(steps).astype(np.float64), np.random.default_rng(1).standard_normal((2, 500))
    assert distance(of_jax(grads, start) - start, of_torch(grads, start) - start) < bar


def test_a_float32_update_is_within_float32_rounding_of_the_formula() -> None:
    # optax's own adamw errs by 7e-6 here: its bias correction is made of float32 numbers.
    grads, start = gradients(10), np.zeros((2, 500), np.float32)
    assert distance(of_jax(grads, start), reference(grads, start)) < 1e-6


def test_float32_updates_err_no_more_than_twice_as_much_as_those_of_the_other_twin() -> None:
    # torch's own AdamW is seven times worse here: it rounds 1 - lr weight_decay, once for all entries and steps.
    grads, start = gradients(), np.random.default_rng(1).standard_normal((2, 500)).astype(np.float32)
    exact = reference(grads, start) - start
    near, far = sorted(distance(twin(grads, start) - start, exact) for twin in TWINS.values())
    assert far < 2 * near


def test_the_learning_rate_of_the_first_update_of_jax_is_that_of_step_0() -> None:
    options = {**OPTIONS, "eps": 0.0, "weight_decay": 0.0}
    optimizer = vit_jax.optimizer.adamw(lambda step: step + 1.0, clip=math.inf, **options, decays=False)
    param = jnp.zeros(())
    update, _ = optimizer.update(jnp.asarray(3.0), optimizer.init(param), param)
    assert float(update) == pytest.approx(-1.0, rel=1e-6)  # the first step of Adam is one learning rate long


def of_one(param, learning_rate):
    options = {**OPTIONS, "eps": 0.0, "weight_decay": 0.0}
    return vit_torch.optimizer.AdamW({"p": param}, learning_rate, clip=math.inf, **options, decays={"p": True})


def test_the_learning_rate_of_the_first_update_of_torch_is_that_of_step_0() -> None:
    param = torch.nn.Parameter(torch.zeros(()))
    param.grad = torch.tensor(3.0)
    of_one(param, lambda step: step + 1.0).step()
    assert float(param.detach()) == pytest.approx(-1.0, rel=1e-6)


def test_a_torch_optimizer_that_is_resumed_goes_on_counting() -> None:
    asked = []
    param = torch.nn.Parameter(torch.zeros(3))
    param.grad = torch.ones(3)
    first = of_one(param, lambda step: 1.0)
    first.step()
    second = of_one(param, lambda step: asked.append(step) or 1.0)
    second.load_state_dict(first.state_dict())
    second.step()
    assert asked == [1]


def clipped_by_jax(grads: list[np.ndarray], limit: float) -> list[np.ndarray]:
    return [np.asarray(g) for g in vit_jax.optimizer.clip_by_global_norm([jnp.asarray(g) for g in grads], limit)]


def clipped_by_torch(grads: list[np.ndarray], limit: float) -> list[np.ndarray]:
    tensors = [torch.tensor(g) for g in grads]
    vit_torch.optimizer.clip_by_global_norm(tensors, limit)
    return [tensor.numpy() for tensor in tensors]


CLIPS = pytest.mark.parametrize("clipped", [clipped_by_jax, clipped_by_torch])


@CLIPS
@pytest.mark.parametrize(("norm", "factor"), [(10.0, 0.1), (1.0, 1.0), (0.5, 1.0), (0.0, 1.0)])
def test_gradients_are_scaled_down_to_the_limit_and_never_up(norm: float, factor: float, clipped) -> None:
    grads = [np.asarray([0.6 * norm], np.float32), np.asarray([[0.0, 0.8 * norm]], np.float32)]
    for got, given in zip(clipped(grads, 1.0), grads, strict=True):
        np.testing.assert_allclose(got, factor * given, rtol=1e-6)


@CLIPS
def test_a_gradient_that_is_not_finite_stays_visible_after_clipping(clipped) -> None:
    assert np.isnan(clipped([np.asarray([1.0, math.nan], np.float32)], 1.0)).all()


@pytest.mark.parametrize("name", MODELS)
def test_what_decays_is_what_the_rows_say(name: str) -> None:
    config = vit_spec.get(name)
    params = jax.eval_shape(lambda: vit_jax.init(config))
    mask = vit_jax.optimizer.decay_mask(config, params)
    sizes = jax.tree.map(lambda p, decays: p.size if decays else 0, params, mask)
    assert sum(jax.tree.leaves(sizes)) == sum(row.size for row in vit_spec.rows(config).values() if row.decays)
    assert mask["blocks"]["attn"]["qkv"]["kernel"] and not mask["blocks"]["norm1"]["scale"]


@pytest.mark.parametrize("name", MODELS)
def test_as_much_decays_in_the_object_twin(name: str) -> None:
    config = vit_spec.get(name)
    with torch.device("meta"):
        params = dict(vit_torch.ViT(config).named_parameters())
    mask = vit_torch.optimizer.decay_mask(config, params)
    decaying = sum(param.numel() for name, param in params.items() if mask[name])
    assert decaying == sum(row.size for row in vit_spec.rows(config).values() if row.decays)
    assert mask["blocks.0.attn.qkv.weight"] and not mask["blocks.0.norm1.weight"]


@pytest.mark.parametrize("name", ["vit_s16_plain", "siglip_b16"])
def test_what_decays_is_what_big_vision_decays(name: str) -> None:
    """Its rule in every config: what its own modules call a kernel."""
    config = small(vit_spec.get(name))
    with torch.device("meta"):
        params = dict(vit_torch.ViT(config).named_parameters())
    mask = vit_torch.optimizer.decay_mask(config, params)
    marked = {key: np.full(param.shape, mask[key], np.float32) for key, param in params.items()}
    theirs = dict(translate(Checkpoint(config, "torch", marked), "big_vision:loop"))
    assert sum(key.endswith("/kernel") for key in theirs) >= 6 * config.depth
    for key, decays in theirs.items():
        assert (decays == key.endswith("/kernel")).all(), key
