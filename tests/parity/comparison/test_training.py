"""Both twins train alike, and a fault in one twin's optimizer or gradients is found and named."""

import json
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
torch = pytest.importorskip("torch")

import jax.numpy as jnp

import parity.comparison.training.steps
import vit_jax.optimizer
import vit_spec
import vit_torch
import vit_torch.optimizer
from parity.comparison.tolerances import FLOAT64_TRAINING_TOLERANCE
from parity.comparison.training import TrainingComparison, compare_training
from parity.comparison.training.steps import make_torch_trainer
from parity.comparison.training.trajectories import MAX_PERTURBED_RUNS, _perturbed_runs, _train
from tests.twins import perturbed_params, random_images, small_config
from vit_spec import InputError, ViTConfig

PLAIN = small_config(vit_spec.get("vit_s16"))
AdamW, adamw = vit_torch.optimizer.AdamW, vit_jax.optimizer.adamw


@pytest.fixture(scope="module", autouse=True)
def compile_quickly() -> Iterator[None]:
    """Compile with few optimizations: each test compiles its own step and runs only a few steps."""
    options = {**parity.comparison.training.steps.compiler_options(), "xla_backend_optimization_level": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity.comparison.training.steps, "compiler_options", lambda: options)
        yield


def compare_plain(config: ViTConfig = PLAIN, steps: int = 3) -> TrainingComparison:
    """Return the comparison for perturbed weights."""
    return compare_training(config, perturbed_params(config), steps=steps)


@pytest.fixture(scope="module")
def plain() -> TrainingComparison:
    """Return the comparison of three steps of correct twins."""
    return compare_plain()


@pytest.mark.parametrize(("name", "steps"), [("vit_s16", 50), ("siglip_b16", 5)])
def test_steps_of_a_model_pass_g0_and_g3(name: str, steps: int) -> None:
    report = compare_plain(small_config(vit_spec.get(name)), steps=steps)
    assert report.passed, report


def test_the_default_settings_use_warmup_clipping_and_weight_decay(plain: TrainingComparison) -> None:
    settings = plain.settings
    rates = [settings.learning_rate(step) for step in range(50)]
    assert np.argmax(rates) == settings.warmup - 1
    assert 0 < settings.clip < math.inf
    assert settings.weight_decay > 0


def test_training_on_given_images_reduces_the_loss() -> None:
    report = compare_training(PLAIN, perturbed_params(PLAIN), images=random_images(PLAIN), steps=5)
    losses = report.losses["torch float64"]
    assert report.passed, report
    assert losses[-1] < losses[0]


def torch_fault(**changes: Any) -> dict[str, Any]:
    """Return a patch that gives the PyTorch twin's optimizer other hyperparameters."""

    def faulty(params, learning_rate, **options):
        given = {"learning_rate": learning_rate, **options}
        return AdamW(params, **given | {name: change(given) for name, change in changes.items()})

    return {"vit_torch.optimizer.AdamW": faulty}


def jax_fault(**changes: Any) -> dict[str, Any]:
    """Return a patch that gives the JAX twin's optimizer other hyperparameters."""

    def faulty(learning_rate, **options):
        given = {"learning_rate": learning_rate, **options}
        return adamw(**given | {name: change(given) for name, change in changes.items()})

    return {"vit_jax.optimizer.adamw": faulty}


def faulty_adamw(learning_rate, *, clip, b1, b2, eps, weight_decay, decays, fault):
    """Return the JAX twin's optimizer with a fault in its formulas."""

    def update(grads, state, params):
        t = (state.updates + 1).astype(float)
        grads = grads if fault == "clip after Adam" else vit_jax.optimizer.clip_by_global_norm(grads, clip)
        unbias1, unbias2 = 1 - b1**t, 1 - b2**t
        if fault == "b2 in float32":
            unbias2 = (1 - jnp.float32(b2) ** t.astype(jnp.float32)).astype(float)
        if fault == "no correction of the second moment":
            unbias2 = 1.0
        if fault == "no correction of the first moment":
            unbias1 = 1.0
        if fault == "coupled decay":
            grads = jax.tree.map(lambda g, p, d: g + weight_decay * p if d else g, grads, params, decays)
        mean = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mean, grads)
        square = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.square, grads)

        def change(m, v, p, d):
            root = jnp.sqrt(v / unbias2 + eps) if fault == "eps inside the root" else jnp.sqrt(v / unbias2) + eps
            root = jnp.sqrt(v) + eps if fault == "eps before the correction" else root
            root = root / jnp.sqrt(unbias2) if fault == "eps before the correction" else root
            return -learning_rate(t - 1) * (
                m / unbias1 / root + (weight_decay * p if d and fault != "coupled decay" else 0)
            )

        changes = jax.tree.map(change, mean, square, params, decays)
        if fault == "clip after Adam":
            changes = vit_jax.optimizer.clip_by_global_norm(changes, clip)
        return changes, vit_jax.optimizer.Moments(state.updates + 1, mean, square)

    return optax.GradientTransformation(
        adamw(learning_rate, clip=1, b1=b1, b2=b2, eps=1, weight_decay=1, decays=0).init, update
    )


def adamw_fault(fault: str) -> dict[str, Any]:
    """Return a patch that replaces the JAX twin's optimizer by `faulty_adamw`."""
    return {"vit_jax.optimizer.adamw": partial(faulty_adamw, fault=fault)}


def clip_with_epsilon(grads, limit):
    """Clip like torch.nn.utils.clip_grad_norm_, which adds 1e-6 to the norm."""
    norm = torch.nn.utils.get_total_norm(grads)
    torch.nn.utils.clip_grads_with_norm_([torch.nn.Parameter(g) for g in grads], limit, norm)
    for g in grads:
        g.mul_((limit / (norm + 1e-6)).clamp(max=1.0))


def decay_all_weights(config, params):
    return {name: name.endswith("weight") for name in params}


FAULTS: dict[str, tuple[dict[str, Any], str]] = {  # fault -> the patches, and the piece that must be named
    "no decay": (torch_fault(weight_decay=lambda given: 0.0), "weight decay of patch_embed.proj.weight and 9 more"),
    "half the decay": (jax_fault(weight_decay=lambda given: 0.05), "weight decay of patch_embed.proj.weight and 9 more"),
    "decay of norms": (
        {"vit_torch.optimizer.decay_mask": decay_all_weights},
        "weight decay of blocks.0.norm1.weight and 4 more",
    ),
    "clip epsilon": ({"vit_torch.optimizer.clip_by_global_norm": clip_with_epsilon}, "clipping"),
    "no clipping": (torch_fault(clip=lambda given: math.inf), "clipping"),
    "clip after Adam": (adamw_fault("clip after Adam"), "clipping"),
    "rate one step early": (
        torch_fault(learning_rate=lambda given: lambda step: given["learning_rate"](step + 1)),
        "learning rate",
    ),
    "rate one step late": (
        jax_fault(learning_rate=lambda given: lambda step: given["learning_rate"](step - 1)),
        "learning rate",
    ),
    "b1": (torch_fault(b1=lambda given: 0.95), "first moment"),
    "b2": (jax_fault(b2=lambda given: 0.99), "second moment"),
    "b1 and b2 swapped": (torch_fault(b1=lambda given: 0.999, b2=lambda given: 0.9), "first moment"),
    "epsilon": (torch_fault(eps=lambda given: 2 * given["eps"]), "epsilon"),
    "eps inside the root": (adamw_fault("eps inside the root"), "epsilon"),
    "eps before the correction": (adamw_fault("eps before the correction"), "epsilon"),
    "b2 in float32": (adamw_fault("b2 in float32"), "second moment's bias correction"),
    "no correction of the second moment": (
        adamw_fault("no correction of the second moment"),
        "second moment's bias correction",
    ),
    "no correction of the first moment": (
        adamw_fault("no correction of the first moment"),
        "first moment's bias correction",
    ),
    "coupled decay": (adamw_fault("coupled decay"), "weight decay"),
}


@pytest.mark.parametrize("fault", list(FAULTS)[::2])  # `python -m benchmarks.faults` plants more
def test_a_fault_in_an_optimizer_is_named(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patches, piece = FAULTS[fault]
    for target, replacement in patches.items():
        monkeypatch.setattr(target, replacement)
    twin = "jax" if "jax" in next(iter(patches)) else "torch"
    report = compare_plain()
    assert not report.passed
    assert report.verdict.startswith(f"FAIL: optimizer: {piece}, from step 1 on: in {twin} "), report.verdict


def test_a_correct_optimizer_is_not_blamed_for_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    right = vit_torch.ViT
    monkeypatch.setattr(vit_torch, "ViT", lambda config: right(config.replace(norms={"eps": 1e-5})))
    assert [cause.piece.split(" of ")[0] for cause in compare_plain().causes] == ["gradient"]


def test_the_learning_rate_of_another_step_is_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*next(iter(FAULTS["rate one step early"][0].items())))
    assert compare_plain().verdict.endswith("; that is the rate of step 2")


def test_a_late_fault_is_reported_with_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(given):
        return lambda step: given["learning_rate"](step) * (1.0 if step < 2 else 1.001)

    monkeypatch.setattr(*next(iter(torch_fault(learning_rate=late).items())))
    assert compare_plain(steps=5).verdict.startswith("FAIL: optimizer: learning rate, from step 3 on: in torch ")


def test_rounded_gradients_of_one_twin_fail_g3_only(monkeypatch: pytest.MonkeyPatch) -> None:
    right = vit_torch.optimizer.clip_by_global_norm

    def coarse(grads, limit):
        right(grads, limit)
        for g in grads:
            g.copy_(g.bfloat16() if g.dtype == torch.float32 else g)

    # PyTorch's perturbed runs round their gradients in the same way, so the rounding does not count as their noise.
    monkeypatch.setattr(vit_torch.optimizer, "clip_by_global_norm", coarse)
    report = compare_plain(steps=5)
    assert (report.same_function, report.is_within_noise) == (True, False)
    assert "in float32" in report.verdict


def test_more_perturbed_runs_follow_if_a_few_do_not_explain_the_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first five runs are replaced by runs without perturbation, which measure no noise."""

    def unperturbed_at_first(task: Any, settings: Any, start: Any, steps: int) -> Any:
        yield from [_train(make_torch_trainer(task, settings)(start), steps)] * 5
        yield from _perturbed_runs(task, settings, start, steps)

    monkeypatch.setitem(compare_training.__globals__, "_perturbed_runs", unperturbed_at_first)
    report = compare_plain()
    assert report.passed, report
    assert report.perturbed_differences[:5] == (0.0,) * 5 and 5 < len(report.perturbed_differences) <= MAX_PERTURBED_RUNS
    assert f"in {len(report.perturbed_differences)} runs" in str(report)


def test_the_noise_includes_the_rounding_of_large_weights_at_each_step(plain: TrainingComparison) -> None:
    params = perturbed_params(PLAIN)
    params["norm"]["scale"][...] *= 1000  # a unit in the last place is 6e-5, and a step changes them by 1e-3
    report = compare_training(PLAIN, params, steps=3)
    assert report.passed, report
    assert report.noise > 100 * plain.noise


def test_facts_are_json_with_every_parameter(plain: TrainingComparison) -> None:
    facts = json.loads(json.dumps(plain.facts()))
    assert facts["passed"] and facts["tolerance"] == FLOAT64_TRAINING_TOLERANCE
    assert [len(values) for values in facts["losses"].values()] == [3] * 4
    assert all(set(part) == set(vit_torch.ViT(PLAIN).state_dict()) for part in facts["parameters"].values())


def test_the_verdict_is_the_last_line(plain: TrainingComparison) -> None:
    assert str(plain).splitlines()[-1].startswith("PASS: after 3 steps ")


def test_zero_steps_are_refused() -> None:
    with pytest.raises(InputError, match="steps is 0: give at least 1"):
        compare_plain(steps=0)


def test_weights_that_are_not_finite_are_refused() -> None:
    params = perturbed_params(PLAIN)
    params["head"]["bias"] = params["head"]["bias"] * np.nan
    with pytest.raises(InputError, match="the gradient of these weights has norm nan"):
        compare_training(PLAIN, params)
