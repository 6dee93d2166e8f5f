"""AdamW, clipping and the decay mask against their formulas in float64, and against torch."""

import math

import numpy as np
import pytest

pytest.importorskip("jax")
pytest.importorskip("optax")

import jax
import jax.numpy as jnp
import optax

import vit_jax
import vit_spec
from train.optimizer import adamw, clip_by_global_norm, decay_mask

B1, B2, EPS, LR, DECAY = 0.9, 0.999, 1e-8, 1e-3, 0.1
STEPS = 300


def gradients(steps: int = STEPS) -> np.ndarray:
    """(steps, 2, 500) float32, two parameters, of sizes from 1e-4 to 1e1."""
    rng = np.random.default_rng(0)
    return (rng.normal(size=(steps, 2, 500)) * 10 ** rng.uniform(-4, 1, (2, 500))).astype(np.float32)


def reference(grads: np.ndarray, start: np.ndarray) -> np.ndarray:
    """AdamW in float64, as its docstring has it; the second parameter does not decay."""
    p, m, v = start.astype(np.float64), np.zeros_like(start, np.float64), np.zeros_like(start, np.float64)
    decay = np.array([[DECAY], [0.0]])
    for t, g in enumerate(grads.astype(np.float64), start=1):
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g * g
        p = p - LR * (m / (1 - B1**t) / (np.sqrt(v / (1 - B2**t)) + EPS) + decay * p)
    return p


def ours(grads: np.ndarray, start: np.ndarray) -> np.ndarray:
    params = [jnp.asarray(p) for p in start]
    optimizer = adamw(lambda count: LR, b1=B1, b2=B2, eps=EPS, weight_decay=DECAY, decays=[True, False])

    @jax.jit
    def run(params, grads):
        def step(carry, g):
            params, state = carry
            updates, state = optimizer.update([g[0], g[1]], state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), grads)[0][0]

    return np.stack([np.asarray(p) for p in run(params, jnp.asarray(grads))])


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Root mean square of the difference, relative to b's."""
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def test_float64_updates_are_those_of_the_formula() -> None:
    grads, start = gradients().astype(np.float64), np.zeros((2, 500))
    with jax.enable_x64(True):
        assert distance(ours(grads, start), reference(grads, start)) < 1e-13


def test_a_float32_update_is_within_float32_rounding_of_the_formula() -> None:
    # optax's own adamw errs by 7e-6 here: its bias correction is made of float32 numbers.
    grads, start = gradients(10), np.zeros((2, 500), np.float32)
    assert distance(ours(grads, start), reference(grads, start)) < 1e-6


def test_float32_updates_err_no_more_than_twice_as_much_as_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    grads, start = gradients(), np.zeros((2, 500), np.float32)
    params = [torch.nn.Parameter(torch.tensor(p)) for p in start]
    groups = [{"params": params[:1], "weight_decay": DECAY}, {"params": params[1:], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(B1, B2), eps=EPS)
    for g in grads:
        params[0].grad, params[1].grad = torch.tensor(g[0]), torch.tensor(g[1])
        optimizer.step()
    theirs, exact = np.stack([p.detach().numpy() for p in params]), reference(grads, start)
    assert distance(ours(grads, start), exact) < 2 * distance(theirs, exact)


def test_the_learning_rate_of_the_first_update_is_that_of_step_0() -> None:
    optimizer = adamw(lambda count: count + 1.0, b1=B1, b2=B2, eps=0.0, weight_decay=0.0, decays=False)
    param = jnp.zeros(())
    update, _ = optimizer.update(jnp.asarray(3.0), optimizer.init(param), param)
    assert float(update) == pytest.approx(-1.0, rel=1e-6)  # the first step of Adam is one learning rate long


@pytest.mark.parametrize(("norm", "factor"), [(10.0, 0.1), (1.0, 1.0), (0.5, 1.0), (0.0, 1.0)])
def test_gradients_are_scaled_down_to_the_limit_and_never_up(norm: float, factor: float) -> None:
    grads = {"a": jnp.asarray([0.6 * norm]), "b": jnp.asarray([[0.0, 0.8 * norm]])}
    clipped, _ = clip_by_global_norm(1.0).update(grads, optax.EmptyState())
    assert jax.tree.all(jax.tree.map(lambda c, g: bool(jnp.allclose(c, factor * g, rtol=1e-6)), clipped, grads))


def test_a_gradient_that_is_not_finite_stays_visible_after_clipping() -> None:
    clipped, _ = clip_by_global_norm(1.0).update(jnp.asarray([1.0, math.nan]), optax.EmptyState())
    assert np.isnan(clipped).all()


@pytest.mark.parametrize("name", ["vit_s16", "deit3_s16", "siglip_b16", "dinov2_g14"])
def test_what_decays_is_what_the_rows_say(name: str) -> None:
    if name not in vit_spec.names():
        pytest.skip(f"no model is called {name}")
    config = vit_spec.get(name)
    params = jax.eval_shape(lambda: vit_jax.init(config))
    mask = decay_mask(config, params)
    sizes = jax.tree.map(lambda p, decays: p.size if decays else 0, params, mask)
    assert sum(jax.tree.leaves(sizes)) == sum(row.size for row in vit_spec.rows(config).values() if row.decays)
    assert mask["blocks"]["attn"]["qkv"]["kernel"] and not mask["blocks"]["norm1"]["scale"]
