"""The training step of `JaxEngine`, its optimizers and its initial weights, in float64, so that rounding hides no bug."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
pytest.importorskip("grain")

import jax.numpy as jnp
import optax
from safetensors.numpy import load_file, save_file

import parity
import vit_spec
from parity.checkpoints.surgery import select_outputs
from parity.checkpoints.weights import as_checkpoint
from tests.twins import perturbed_params
from train.data.augment import Mix, mix_images, mix_targets
from train.data.batches import Batch
from train.jax import one_cpu
from train.jax.engine import JaxEngine
from train.jax.losses import loss_and_metric, soft_targets
from train.jax.optimizers import make_optimizer
from train.loop.init_from import load_initial_weights
from train.recipes import OPTIMIZERS, Augment, Optimizer, Recipe
from vit_spec import InputError

SIZES: dict[str, Any] = {"image_size": (8, 8), "patch_size": 4, "width": 16, "depth": 3, "num_heads": 2, "mlp_dim": 32}
CONFIG = vit_spec.get("vit_ti16", num_classes=5, **SIZES)
RATE = 0.01


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def make_batch(seed: int = 0, size: int = 12, mix: Mix | None = None) -> Batch:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (size, 8, 8, 3), np.uint8)
    return Batch(images, rng.integers(0, 5, size).astype(np.int32), np.arange(size), np.ones(size, bool), mix)


START = as_checkpoint(jax.tree.map(lambda x: np.asarray(x, np.float64), perturbed_params(CONFIG)), CONFIG, "jax")


def new_engine(**changes: Any) -> JaxEngine:
    recipe = replace(Recipe(batch_size=12, optimizer=Optimizer(eps=1e-3)), **changes)
    return JaxEngine(
        CONFIG, recipe, task="classes", learning_rate=lambda step: RATE, initial_weights=START, folder=Path("unused")
    )


@cache
def engine_and_state(**changes: Any) -> tuple[JaxEngine, Any]:
    """Return an engine and its initial state as NumPy arrays, which no step overwrites."""
    engine = new_engine(**changes)
    return engine, jax.tree.map(np.array, engine.state)


def make_engine(**changes: Any) -> JaxEngine:
    """Return an engine in its initial state.  Tests with the same recipe share it, because it compiles for a second."""
    engine, initial = engine_and_state(**changes)
    engine.state = jax.tree.map(jnp.array, initial)
    return engine


def train(engine: JaxEngine, steps: int, batches: Any = make_batch) -> Any:
    """Return the state after some steps, and their losses; `batches` maps a step to its batch."""
    metrics = [engine.step(batches(seed)) for seed in range(steps)]
    return engine.state, [float(each["loss"]) for each in metrics]


def train_steps(steps: int, batches: Any = make_batch, **changes: Any) -> Any:
    """Return the same for an engine in its initial state."""
    return train(make_engine(**changes), steps, batches)


def max_relative_error(one: Any, other: Any) -> float:
    """Return the largest norm-wise relative difference between the arrays of two pytrees."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)


# Gradient accumulation ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("augment", [Augment(), Augment(mixup=0.2)], ids=["plain", "mixed"])
def test_gradient_accumulation_equals_a_step_on_the_whole_batch(augment: Augment) -> None:
    mix = Mix(np.float32(0.75), np.zeros(4, np.int32), np.float32(0.75)) if augment.mixes else None
    smoothing = 0.1 if mix else 0.0
    (whole, losses), (parts, others) = (
        train_steps(4, lambda seed: make_batch(seed, mix=mix), augment=augment, accumulate=n, label_smoothing=smoothing)
        for n in (1, 4)
    )
    assert max_relative_error(parts.params, whole.params) < 1e-12
    assert losses == pytest.approx(others, rel=1e-12)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_long_step_on_one_cpu_equals_a_step_on_the_whole_batch(accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, losses = train_steps(3)
    monkeypatch.setattr(one_cpu, "LONG_STEP", 0)
    monkeypatch.setattr(one_cpu, "PART_TOKENS", 3 * CONFIG.num_tokens)
    engine = new_engine(accumulate=accumulate)
    assert engine._parts == 4
    parts, others = train(engine, 3)
    assert max_relative_error(parts.params, whole.params) < 1e-12
    assert losses == pytest.approx(others, rel=1e-12)


def test_a_batch_that_accumulate_does_not_divide_is_refused() -> None:
    with pytest.raises(InputError, match=r"--batch-size 12 cannot be divided by .*5 parts \(--accumulate\): give 15"):
        make_engine(accumulate=5)


# Mixing and losses ----------------------------------------------------------------------------------------------------


def test_mixup_and_cutmix_equal_their_definitions() -> None:
    rng = np.random.default_rng(0)
    images, other_images = rng.random((2, 3, 6, 7, 2))
    targets, other_targets = rng.random((2, 3, 4))
    cut = Mix(np.float32(1), np.array([1, 2, 4, 6], np.int32), np.float32(0.6))
    mixed_images, mixed_targets = mix_images(cut, images, other_images), mix_targets(cut, targets, other_targets)
    expected = images.copy()
    expected[:, 1:4, 2:6] = other_images[:, 1:4, 2:6]
    assert np.array_equal(mixed_images, expected)
    assert np.allclose(mixed_targets, np.float32(0.6) * targets + (1 - np.float32(0.6)) * other_targets, rtol=1e-15)
    blended = mix_images(Mix(np.float32(0.75), np.zeros(4, np.int32), np.float32(0.75)), images, other_images)
    assert np.allclose(blended, 0.75 * images + 0.25 * other_images, rtol=1e-15)


@pytest.mark.parametrize("repeats", [1, 3])
def test_an_image_is_mixed_with_the_one_before_its_repeats(repeats: int) -> None:
    mixed = make_batch(mix=Mix(np.float32(0), np.zeros(4, np.int32), np.float32(0)))  # only the partner remains
    _, [loss] = train_steps(1, lambda seed: mixed, augment=Augment(mixup=0.2, repeats=repeats))
    rolled = mixed._replace(images=np.roll(mixed.images, repeats, 0), targets=np.roll(mixed.targets, repeats), mix=None)
    _, [expected] = train_steps(1, lambda seed: rolled)
    assert loss == pytest.approx(expected, rel=1e-13)


def test_one_hot_probabilities_have_the_loss_and_metric_of_class_indices() -> None:
    rng = np.random.default_rng(0)
    outputs, targets = rng.normal(size=(6, 5)), rng.integers(0, 5, 6)
    one = loss_and_metric("classes", outputs, targets)
    other = loss_and_metric("classes", outputs, soft_targets("classes", targets, 5, 0.0))
    assert all(np.allclose(a, b, rtol=1e-13) for a, b in zip(one, other, strict=True))


def test_the_sigmoid_loss_of_classes_equals_the_loss_of_one_hot_labels_and_the_metric_is_accuracy() -> None:
    rng = np.random.default_rng(0)
    outputs, targets = rng.normal(size=(6, 5)), rng.integers(0, 5, 6)
    one_hot = np.eye(5)[targets]
    loss, score = loss_and_metric("classes", outputs, targets, sigmoid=True)
    assert np.allclose(loss, loss_and_metric("labels", outputs, one_hot)[0], rtol=1e-13)
    assert np.array_equal(score, outputs.argmax(1) == targets)
    assert np.allclose(loss, loss_and_metric("classes", outputs, one_hot, sigmoid=True)[0], rtol=1e-13)


def test_label_smoothing_equals_its_definition_and_optax() -> None:
    found = soft_targets("classes", np.array([1]), 4, 0.2)
    assert np.allclose(found, [[0.05, 0.85, 0.05, 0.05]], rtol=1e-7)
    assert np.allclose(soft_targets("labels", np.array([[1.0, 0.0]]), 2, 0.2), [[0.9, 0.1]], rtol=1e-7)
    assert np.allclose(found, optax.smooth_labels(jax.nn.one_hot(np.array([1]), 4), 0.2), rtol=1e-7)


# EMA, freezing, learning rates and optimizers -------------------------------------------------------------------------


def test_the_ema_is_evaluated_and_saved_unless_raw_selects_the_weights(tmp_path: Path) -> None:
    engine = make_engine(ema=0.6)
    expected = jax.tree.map(np.asarray, engine.state.params)
    for step, step_size in enumerate((1.0, 0.9, 9 / 11, 0.75)):
        engine.step(make_batch(step))
        expected = jax.tree.map(
            lambda mean, p, c=step_size: (1 - c) * mean + c * np.asarray(p), expected, engine.state.params
        )
    assert max_relative_error(engine.state.ema, expected) < 1e-14
    for raw, weights in ((False, expected), (True, engine.state.params)):
        engine.save_weights(tmp_path / "w.safetensors", raw=raw)
        assert max_relative_error(parity.to_jax(parity.load(tmp_path / "w.safetensors")), weights) < 1e-14
        plain = make_engine()
        plain.state = plain.state._replace(params=engine._eval_params(raw))
        assert np.array_equal(engine.evaluate(make_batch(), raw=raw)[0], plain.evaluate(make_batch())[0])
    assert engine.has_ema and not make_engine().has_ema


def test_frozen_parameters_do_not_change_and_have_no_gradient_moments() -> None:
    freeze = ("patch_embed.*", "pos_embed", "blocks.[01].*")
    (state, _), (again, _) = (train_steps(2, optimizer=Optimizer(clip=0.1, freeze=freeze)) for _ in range(2))
    initial = make_engine().state.params
    assert np.array_equal(state.params["patch_embed"]["proj"]["kernel"], initial["patch_embed"]["proj"]["kernel"])
    now, before = (np.asarray(params["blocks"]["attn"]["qkv"]["kernel"]) for params in (state.params, initial))
    assert (now != before).any((1, 2, 3, 4)).tolist() == [False, False, True]
    assert float(optax.tree.norm(state.moments.mean["patch_embed"])) == 0
    assert max_relative_error(state.params, again.params) == 0


def test_the_gradient_norm_is_that_of_the_parameters_that_are_trained() -> None:
    whole, rest, block = (
        float(make_engine(optimizer=Optimizer(freeze=freeze)).step(make_batch())["grad_norm"])
        for freeze in ((), ("blocks.1.*",), ("[!b]*", "blocks.[!1].*"))
    )
    assert block > 0.1 * whole and whole**2 == pytest.approx(rest**2 + block**2, rel=1e-12)


def test_gradients_of_frozen_parameters_are_not_computed() -> None:
    whole, head = (make_engine(optimizer=Optimizer(freeze=freeze)) for freeze in ((), ("[!h]*",)))
    # The forward pass, the gradients of the activations and those of the weights cost about the same; the first remains.
    assert head.compiled_step.cost_analysis()["flops"] < 0.45 * whole.compiled_step.cost_analysis()["flops"]


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_a_step_has_its_own_learning_rate_also_after_a_skipped_step(name: Any) -> None:
    recipe = Recipe(batch_size=12, optimizer=Optimizer(name=name), non_finite="skip")
    rate = 1e-6  # so small that the gradients hardly change; each update of AdamW and Lion is then one learning rate
    engine = JaxEngine(
        CONFIG.replace(depth=1),
        recipe,
        task="values",
        learning_rate=lambda step: rate * 0.5**step,
        initial_weights=None,
        folder=Path("unused"),
    )
    for step, target in enumerate((1.0, np.nan, 1.0)):
        before = np.asarray(engine.state.params["head"]["bias"])
        logged_rate = float(engine.step(make_batch()._replace(targets=np.full((12, 5), target, np.float32)))["lr"])
        moved = np.abs(np.asarray(engine.state.params["head"]["bias"]) - before)
        assert logged_rate == pytest.approx(rate * 0.5**step, rel=1e-12)
        # The rates of the neighbouring steps are twice and half as large.
        assert np.allclose(moved, 0 if np.isnan(target) else logged_rate, rtol=1e-3, atol=0)


def test_layer_decay_scales_the_update_of_each_layer() -> None:
    initial = jax.tree.map(np.asarray, make_engine().state.params)
    changes = [
        jax.tree.map(lambda a, b: np.asarray(a) - b, train_steps(1, optimizer=Optimizer(layer_decay=d))[0].params, initial)
        for d in (1.0, 0.5)
    ]
    ratios = changes[1]["blocks"]["mlp"]["fc1"]["kernel"] / changes[0]["blocks"]["mlp"]["fc1"]["kernel"]
    assert np.allclose(ratios, np.array([0.125, 0.25, 0.5])[:, None, None], rtol=1e-6)
    assert np.allclose(changes[1]["head"]["kernel"], changes[0]["head"]["kernel"], rtol=1e-9)


def compiled_optimizer(settings: Optimizer) -> tuple[Any, Any]:
    """Return `init` and `update` of an optimizer; compiled, an update takes less time than its many small operations."""
    optimizer = make_optimizer(settings, CONFIG)
    return optimizer.init, jax.jit(optimizer.update)


OTHER_OPTIMIZERS = [name for name in OPTIMIZERS if name != "adamw"]


@pytest.mark.parametrize("name", OTHER_OPTIMIZERS)
def test_every_optimizer_reduces_the_loss_and_decays_only_matrices(name: Any) -> None:
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), perturbed_params(CONFIG))
    zero_grads = jax.tree.map(jnp.zeros_like, params)
    settings = Optimizer(name=name, weight_decay=0.5)
    init, update = compiled_optimizer(settings)
    updates, _ = update(zero_grads, init(params), params, rate=RATE)
    kernel, bias = updates["blocks"]["attn"]["proj"]["kernel"], updates["blocks"]["attn"]["proj"]["bias"]
    weights = params["blocks"]["attn"]["proj"]["kernel"]
    # LAMB scales its update to the norm of the weights: without a gradient, it subtracts the learning rate times them.
    assert np.allclose(kernel, -RATE * (1.0 if name == "lamb" else 0.5) * weights, rtol=1e-6, atol=1e-12)
    assert not np.asarray(bias).any()
    init, update = compiled_optimizer(replace(settings, weight_decay=0.0, clip=1e9))
    current, state = params, init(params)
    for _ in range(5):  # the loss is half the squared norm of the weights, so its gradient is the weights
        updates, state = update(current, state, current, rate=RATE)
        current = optax.apply_updates(current, updates)
    assert float(optax.tree.norm(current)) < 0.999 * float(optax.tree.norm(params))


def random_weights_and_gradients(first_block_factor: float) -> tuple[Any, Any]:
    """Return weights and gradients; those of the first block are multiplied by a factor."""
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), perturbed_params(CONFIG))
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), params)
    for values in (params, grads):
        values["blocks"] = jax.tree.map(lambda x: x.at[0].multiply(first_block_factor), values["blocks"])
    return params, grads


def test_lamb_scales_the_update_of_each_layer_to_the_norm_of_its_weights() -> None:
    params, grads = random_weights_and_gradients(10.0)
    init, update = compiled_optimizer(Optimizer(name="lamb", clip=1e9))
    updates, _ = update(grads, init(params), params, rate=RATE)
    moved, weights = (
        [np.linalg.norm(block) for block in values["blocks"]["attn"]["qkv"]["kernel"]] for values in (updates, params)
    )
    assert np.allclose(moved, RATE * np.array(weights), rtol=1e-12)
    assert float(optax.tree.norm(updates["patch_embed"]["proj"]["kernel"])) == pytest.approx(
        RATE * float(optax.tree.norm(params["patch_embed"]["proj"]["kernel"])), rel=1e-12
    )
    # Parameters that do not decay are not scaled: Adam's first update is +1 or -1 up to eps / gradient, 1e-8 / 1e-3.
    assert np.allclose(np.abs(updates["blocks"]["attn"]["qkv"]["bias"]), RATE, rtol=1e-5)


def test_adafactor_divides_by_the_root_of_its_second_moment_and_does_not_clip() -> None:
    params, grads = random_weights_and_gradients(1.0)
    larger = jax.tree.map(lambda x: 1e3 * x, grads)
    init, update = compiled_optimizer(Optimizer(name="adafactor", weight_decay=0, clip=1e9, beta1=0))
    _, state = update(grads, init(params), params, rate=RATE)
    updates, _ = update(larger, state, params, rate=RATE)
    b = 1 - 2**-0.8  # the decay of the second update
    old, new = (np.asarray(each["blocks"]["attn"]["qkv"]["kernel"]) for each in (grads, larger))
    expected = -RATE * new / np.sqrt(b * old**2 + (1 - b) * new**2)
    assert np.allclose(updates["blocks"]["attn"]["qkv"]["kernel"], expected, rtol=1e-12)


def test_the_decay_of_adafactors_second_moment_is_at_most_0_999() -> None:
    params, grads = random_weights_and_gradients(1.0)
    init, update = compiled_optimizer(Optimizer(name="adafactor", clip=1e9))
    late = jax.tree_util.tree_map_with_path(  # counts after which 1 - t^-0.8 is 1 - 1.6e-5
        lambda path, x: jnp.full_like(x, 10**6) if getattr(path[-1], "name", "") == "count" else x, init(params)
    )
    _, state = update(grads, late, params, rate=RATE)
    of_parts = [tree["head"]["kernel"] for _, tree in optax.tree.get_all_with_path(state, "v")]
    [found] = [kernel for kernel in of_parts if isinstance(kernel, jax.Array)]  # others are masked
    assert np.allclose(found, 0.001 * np.square(grads["head"]["kernel"]), rtol=1e-6)


def test_muon_orthogonalizes_each_of_q_k_and_v_of_each_block_separately() -> None:
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), perturbed_params(CONFIG))
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), params)
    # Nine matrices with singular values from 0.5 to 1, multiplied by 1 to 10^8.
    frames = np.linalg.qr(rng.normal(size=(2, 3, 3, 16, 16)))[0]
    matrices = frames[0] * np.linspace(0.5, 1, 16) @ frames[1] * 10.0 ** np.arange(9).reshape(3, 3, 1, 1)
    grads["blocks"]["attn"]["qkv"]["kernel"] = jnp.asarray(np.moveaxis(matrices, 1, 2).reshape(3, 16, 3, 2, 8))
    init, update = compiled_optimizer(Optimizer(name="muon", weight_decay=0, clip=1e9))
    change = np.asarray(update(grads, init(params), params, rate=RATE)[0]["blocks"]["attn"]["qkv"]["kernel"])
    for block in range(3):
        for part in range(3):
            matrix = change[block, :, part].reshape(16, 16)
            singular_values = np.linalg.svd(matrix, compute_uv=False) / (RATE * 0.2 * 4)  # Muon's factor: 0.2 sqrt(16)
            # The range after five Newton-Schulz steps of Muon.
            assert 0.6 < singular_values.min() and singular_values.max() < 1.3


# Initial weights ------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint_path(tmp_path: Path) -> Path:
    path = tmp_path / "start.safetensors"
    parity.save(path, perturbed_params(CONFIG), CONFIG, "jax")
    return path


def test_initial_weights_that_fit_are_used_unchanged(checkpoint_path: Path) -> None:
    checkpoint, notes = load_initial_weights(Recipe(init=str(checkpoint_path)), num_outputs=5, in_channels=3)
    assert checkpoint.config == CONFIG and notes == [
        f"initial weights are from {checkpoint_path}",
        "the head of 5 outputs is kept",
    ]


def test_initial_weights_are_adapted_to_image_size_classes_and_channels_and_the_notes_say_so(checkpoint_path: Path) -> None:
    model = replace(Recipe().model, image_size=(16, 12), changes=("regularisation.drop_path=0.1",))
    checkpoint, notes = load_initial_weights(Recipe(init=str(checkpoint_path), model=model), num_outputs=7, in_channels=1)
    config = checkpoint.config
    assert (config.image_size, config.num_classes, config.in_channels) == ((16, 12), 7, 1)
    assert config.regularisation.drop_path == 0.1
    text = "; ".join(notes)
    assert all(word in text for word in ("image_size", "pos_embed", "num_classes 5 -> 7", "in_channels"))
    parity.to_jax(checkpoint)


@pytest.mark.parametrize(
    ("names", "outputs", "line"),
    [
        ("abcde", [0, 1, 2, 3, 4], "the head is kept: its 5 outputs have the names of the data"),
        ("edcba", [4, 3, 2, 1, 0], "num_classes 5 -> 5; kept: the outputs 4, 3, 2, 1, 0 of head.weight, head.bias, by"),
        ("db", [3, 1], "kept: the outputs 3, 1 of head.weight, head.bias, head_dist.weight, head_dist.bias, by the"),
        ("abcdx", None, "its 5 labels are lost; the data has the class 'x', which the head does not have"),
        ("aba", None, "its 5 labels are lost; 'a' names several classes, so the head cannot be matched by names"),
    ],
)
def test_the_outputs_of_initial_weights_are_matched_by_name(
    names: str, outputs: list[int] | None, line: str, tmp_path: Path
) -> None:
    path, config = tmp_path / "start.safetensors", CONFIG.replace(tokens={"distillation": outputs == [3, 1]})
    params = perturbed_params(config)
    parity.save(path, params, config, "jax", labels=tuple("abcde"))
    checkpoint, notes = load_initial_weights(
        Recipe(init=str(path)), num_outputs=len(names), in_channels=3, names=tuple(names)
    )
    assert line in notes[1]
    heads = ("head", "head_dist") if config.tokens.distillation else ("head",)
    for head in heads:
        found, old = parity.to_jax(checkpoint)[head]["bias"], np.asarray(params[head]["bias"])
        assert np.array_equal(found, old[outputs]) if outputs else not np.isin(found, old).any()
    assert checkpoint.labels == (tuple(names) if outputs else None)


@pytest.mark.parametrize("outputs", [[], [0, 0], [5], [-1]])
def test_outputs_that_are_not_there_or_given_twice_are_refused(outputs: list[int]) -> None:
    weights = as_checkpoint(perturbed_params(CONFIG), CONFIG, "jax")
    with pytest.raises(InputError, match="give different numbers from 0 to 4"):
        select_outputs(weights, outputs)


def test_a_run_folder_as_init_means_its_best_weights(checkpoint_path: Path) -> None:
    newest, best = checkpoint_path.parent / "weights.safetensors", checkpoint_path.parent / "best.safetensors"
    parity.save(best, jax.tree.map(lambda x: x + 1, perturbed_params(CONFIG)), CONFIG, "jax")
    checkpoint_path.rename(newest)
    checkpoint, notes = load_initial_weights(Recipe(init=str(checkpoint_path.parent)), num_outputs=5, in_channels=3)
    assert notes[0] == f"initial weights are from {best}"
    found, expected = (each.arrays["head/bias"] for each in (checkpoint, parity.load(best)))
    assert np.array_equal(np.asarray(found), np.asarray(expected))


def test_a_run_folder_without_best_weights_as_init_is_noted(checkpoint_path: Path) -> None:
    newest = checkpoint_path.rename(checkpoint_path.with_name("weights.safetensors"))
    (newest.parent / "config.json").write_text('{"recipe": {}, "data": {}}')
    _, notes = load_initial_weights(Recipe(init=str(newest.parent)), num_outputs=5, in_channels=3)
    assert notes[1] == f"{newest.parent} has no best.safetensors: its newest weights are used, {newest}"


def test_an_init_set_of_what_the_file_states_is_noted(checkpoint_path: Path) -> None:
    recipe = Recipe(init=str(checkpoint_path), init_set=("norms.eps=0.5",))
    checkpoint, notes = load_initial_weights(recipe, num_outputs=5, in_channels=3)
    assert checkpoint.config.norms.eps == 0.5
    assert notes[1] == "norms.eps is 0.5 by --init-set; the file states 1e-06"


def test_a_field_that_cannot_be_inferred_is_asked_for_with_init_set(checkpoint_path: Path) -> None:
    bare = checkpoint_path.with_name("bare.safetensors")
    parity.convert(checkpoint_path, bare, "torch")
    save_file(load_file(bare), bare)  # removes the config from the metadata
    with pytest.raises(InputError, match="--init-set num_heads="):
        load_initial_weights(Recipe(init=str(bare)), num_outputs=5, in_channels=3)


@pytest.mark.parametrize(
    ("prefix", "more", "what"),
    [
        ("nets.", {}, "`python -m parity convert` with --strip nets. reads the model"),
        (
            "",
            {"aux": np.ones(3, np.float32)},
            "(by `python -m parity convert --ignore REGEX`, if the model",
        ),
    ],
)
def test_keys_that_only_a_conversion_reads_are_refused_with_its_option(
    checkpoint_path: Path, prefix: str, more: dict[str, np.ndarray], what: str
) -> None:
    bare = checkpoint_path.with_name("bare.safetensors")
    parity.convert(checkpoint_path, bare, "torch")
    save_file({f"{prefix}{key}": array for key, array in load_file(bare).items()} | more, bare)
    with pytest.raises(InputError) as caught:
        load_initial_weights(Recipe(init=str(bare)), num_outputs=5, in_channels=3)
    assert what in str(caught.value)


def test_changes_of_the_structure_of_initial_weights_are_refused(checkpoint_path: Path) -> None:
    recipe = Recipe(init=str(checkpoint_path), model=replace(Recipe().model, changes=("depth=2",)))
    with pytest.raises(InputError, match=r"--model\.changes changes parameters that --init loads"):
        load_initial_weights(recipe, num_outputs=5, in_channels=3)


def test_half_precision_initial_weights_are_converted_to_float32(tmp_path: Path) -> None:
    path = tmp_path / "half.safetensors"
    parity.save(path, jax.tree.map(lambda x: x.astype(jnp.bfloat16), perturbed_params(CONFIG)), CONFIG, "jax")
    checkpoint, _ = load_initial_weights(Recipe(init=str(path)), num_outputs=5, in_channels=3)
    engine = JaxEngine(
        CONFIG,
        Recipe(batch_size=12),
        task="classes",
        learning_rate=lambda step: RATE,
        initial_weights=checkpoint,
        folder=tmp_path,
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(engine.state.params)} == {np.dtype(np.float32)}


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="is about CPUs")
def test_a_step_on_a_cpu_starts_in_the_thread_that_calls_it() -> None:
    """In another thread, which jax uses while inputs are copied, each step would get its memory from the system anew."""
    batch = make_batch(size=12)
    large = batch._replace(images=np.zeros((12, 2048, 2048, 3), np.uint8))
    assert all(placed.is_ready() for placed in make_engine()._shard_batch(large)[:2])


# Mixed precision and rematerialization --------------------------------------------------------------------------------


def test_mixed_precision_computes_in_bfloat16_and_keeps_the_weights_in_float32() -> None:
    with jax.enable_x64(False):
        engine = JaxEngine(
            CONFIG,
            Recipe(batch_size=12, dtype="bfloat16"),
            task="classes",
            learning_rate=lambda step: RATE,
            initial_weights=START,
            folder=Path("unused"),
        )
        loss = float(engine.step(make_batch())["loss"])
        whole = make_float32_engine()
        assert loss == pytest.approx(float(whole.step(make_batch())["loss"]), rel=5 * 2**-8) and np.isfinite(loss)
        assert {leaf.dtype for leaf in jax.tree.leaves(engine.state.params)} == {np.dtype(np.float32)}
        assert "bf16" in engine.compiled_step.as_text()


def make_float32_engine() -> JaxEngine:
    return JaxEngine(
        CONFIG,
        Recipe(batch_size=12),
        task="classes",
        learning_rate=lambda step: RATE,
        initial_weights=START,
        folder=Path("unused"),
    )


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_rematerialization_does_not_change_a_step(remat: Any) -> None:
    (whole, _), (again, _) = train_steps(2), train_steps(2, remat=remat)
    assert max_relative_error(again.params, whole.params) < 1e-12
