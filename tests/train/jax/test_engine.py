"""One step of the JAX trainer: its parts are what their names say, in float64 where rounding could hide a mistake."""

from collections.abc import Iterator
from dataclasses import replace
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
from parity.checkpoints.weights import held
from tests.twins import perturbed
from train.data.augment import Mix, mixed_images, mixed_targets
from train.data.batches import Batch
from train.jax.engine import JaxEngine
from train.jax.losses import loss_and_score, shares
from train.jax.optimizers import optimizer
from train.loop.init_from import opened
from train.recipes import Augment, Optimizer, Recipe
from vit_spec import InputError

SIZES: dict[str, Any] = {"image_size": (8, 8), "patch_size": 4, "width": 16, "depth": 3, "num_heads": 2, "mlp_dim": 32}
CONFIG = vit_spec.get("vit_ti16", num_classes=5, **SIZES)
RATE = 0.01


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def batch(seed: int = 0, size: int = 12, mix: Mix | None = None) -> Batch:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (size, 8, 8, 3), np.uint8)
    return Batch(images, rng.integers(0, 5, size).astype(np.int32), np.arange(size), np.ones(size, bool), mix)


def engine(**changes: Any) -> JaxEngine:
    start = held(jax.tree.map(lambda x: np.asarray(x, np.float64), perturbed(CONFIG)), CONFIG, "jax")
    recipe = replace(Recipe(batch_size=12, optimizer=Optimizer(eps=1e-3)), **changes)
    return JaxEngine(CONFIG, recipe, task="classes", rate=lambda step: RATE, start=start, folder=Path("unused"))


def after(steps: int, batches: Any = batch, **changes: Any) -> Any:
    turned = engine(**changes)
    metrics = [turned.step(batches(seed)) for seed in range(steps)]
    return turned._state, [float(each["loss"]) for each in metrics]


def difference(one: Any, other: Any) -> float:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)


# Parts of a batch -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("augment", [Augment(), Augment(mixup=0.2)], ids=["plain", "mixed"])
def test_a_batch_in_parts_gives_the_step_of_the_whole(augment: Augment) -> None:
    mix = Mix(np.float32(0.75), np.zeros(4, np.int32), np.float32(0.75)) if augment.mixes else None
    (whole, losses), (parts, others) = (
        after(4, lambda seed: batch(seed, mix=mix), augment=augment, accumulate=n, label_smoothing=0.1) for n in (1, 4)
    )
    assert difference(parts.params, whole.params) < 1e-12
    assert losses == pytest.approx(others, rel=1e-12)


def test_a_batch_that_does_not_divide_into_parts_is_told() -> None:
    with pytest.raises(InputError, match=r"--batch-size 12 does not divide by .*5 parts \(--accumulate\): give 15"):
        engine(accumulate=5)


# What is learnt from --------------------------------------------------------------------------------------------------


def test_mixed_images_and_targets_are_those_of_the_definition() -> None:
    rng = np.random.default_rng(0)
    images, others = rng.random((2, 3, 6, 7, 2))
    targets, theirs = rng.random((2, 3, 4))
    cut = Mix(np.float32(1), np.array([1, 2, 4, 6], np.int32), np.float32(0.6))
    found, answers = mixed_images(cut, images, others), mixed_targets(cut, targets, theirs)
    wanted = images.copy()
    wanted[:, 1:4, 2:6] = others[:, 1:4, 2:6]
    assert np.array_equal(found, wanted)
    assert np.allclose(answers, np.float32(0.6) * targets + (1 - np.float32(0.6)) * theirs, rtol=1e-15)
    blended = mixed_images(Mix(np.float32(0.75), np.zeros(4, np.int32), np.float32(0.75)), images, others)
    assert np.allclose(blended, 0.75 * images + 0.25 * others, rtol=1e-15)


@pytest.mark.parametrize("repeats", [1, 3])
def test_the_partner_of_an_image_is_the_one_before_it_and_its_repetitions(repeats: int) -> None:
    shown = batch(mix=Mix(np.float32(0), np.zeros(4, np.int32), np.float32(0)))  # the partner's alone
    _, [loss] = after(1, lambda seed: shown, augment=Augment(mixup=0.2, repeats=repeats))
    rolled = shown._replace(images=np.roll(shown.images, repeats, 0), targets=np.roll(shown.targets, repeats), mix=None)
    _, [wanted] = after(1, lambda seed: rolled)
    assert loss == pytest.approx(wanted, rel=1e-13)


def test_shares_of_classes_are_judged_as_the_classes_are_where_they_are_whole() -> None:
    rng = np.random.default_rng(0)
    outputs, targets = rng.normal(size=(6, 5)), rng.integers(0, 5, 6)
    one = loss_and_score("classes", outputs, targets)
    other = loss_and_score("classes", outputs, shares("classes", targets, 5, 0.0))
    assert all(np.allclose(a, b, rtol=1e-13) for a, b in zip(one, other, strict=True))


def test_classes_asked_for_by_themselves_are_judged_as_labels_and_scored_as_classes() -> None:
    rng = np.random.default_rng(0)
    outputs, targets = rng.normal(size=(6, 5)), rng.integers(0, 5, 6)
    one_hot = np.eye(5)[targets]
    loss, score = loss_and_score("classes", outputs, targets, sigmoid=True)
    assert np.allclose(loss, loss_and_score("labels", outputs, one_hot)[0], rtol=1e-13)
    assert np.array_equal(score, outputs.argmax(1) == targets)
    assert np.allclose(loss, loss_and_score("classes", outputs, one_hot, sigmoid=True)[0], rtol=1e-13)


def test_smoothing_spreads_a_share_over_all_classes() -> None:
    found = shares("classes", np.array([1]), 4, 0.2)
    assert np.allclose(found, [[0.05, 0.85, 0.05, 0.05]], rtol=1e-7)
    assert np.allclose(shares("labels", np.array([[1.0, 0.0]]), 2, 0.2), [[0.9, 0.1]], rtol=1e-7)
    assert np.allclose(found, optax.smooth_labels(jax.nn.one_hot(np.array([1]), 4), 0.2), rtol=1e-7)


# What moves -----------------------------------------------------------------------------------------------------------


def test_the_running_mean_of_the_weights_is_evaluated_and_saved_and_so_are_the_raw_weights(tmp_path: Path) -> None:
    turned = engine(ema=0.6)
    wanted = jax.tree.map(np.asarray, turned._state.params)
    for step, share in enumerate((1.0, 0.9, 9 / 11, 0.75)):
        turned.step(batch(step))
        wanted = jax.tree.map(lambda mean, p, c=share: (1 - c) * mean + c * np.asarray(p), wanted, turned._state.params)
    assert difference(turned._state.ema, wanted) < 1e-14
    for raw, weights in ((False, wanted), (True, turned._state.params)):
        turned.save_weights(tmp_path / "w.safetensors", raw=raw)
        assert difference(parity.to_jax(parity.load(tmp_path / "w.safetensors")), weights) < 1e-14
        plain = engine()
        plain._state = plain._state._replace(params=turned._chosen(raw))
        assert np.array_equal(turned.evaluate(batch(), raw=raw)[0], plain.evaluate(batch())[0])
    assert turned.averages and not engine().averages


def test_what_is_frozen_stays_and_has_no_part_in_the_norm() -> None:
    freeze = ("patch_embed.*", "pos_embed", "blocks.[01].*")
    (state, _), (still, _) = (after(2, optimizer=Optimizer(clip=0.1, freeze=freeze)) for _ in range(2))
    begun = engine()._state.params
    assert np.array_equal(state.params["patch_embed"]["proj"]["kernel"], begun["patch_embed"]["proj"]["kernel"])
    now, before = (np.asarray(params["blocks"]["attn"]["qkv"]["kernel"]) for params in (state.params, begun))
    assert (now != before).any((1, 2, 3, 4)).tolist() == [False, False, True]
    assert float(optax.tree.norm(state.moments.mean["patch_embed"])) == 0
    assert difference(state.params, still.params) == 0


def test_no_gradient_is_computed_of_what_is_frozen() -> None:
    whole, head = (engine(optimizer=Optimizer(freeze=freeze)) for freeze in ((), ("[!h]*",)))
    assert head._update.cost_analysis()["flops"] < 0.45 * whole._update.cost_analysis()["flops"]  # of three parts one


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_the_rate_is_that_of_the_step_though_one_before_it_is_left_out(name: Any) -> None:
    recipe = Recipe(batch_size=12, optimizer=Optimizer(name=name), non_finite="skip")
    rate = 1e-6  # so small that gradients stay, and with them AdamW's and Lion's step of one rate
    turned = JaxEngine(
        CONFIG.replace(depth=1),
        recipe,
        task="values",
        rate=lambda step: rate * 0.5**step,
        start=None,
        folder=Path("unused"),
    )
    for step, target in enumerate((1.0, np.nan, 1.0)):
        before = np.asarray(turned._state.params["head"]["bias"])
        told = float(turned.step(batch()._replace(targets=np.full((12, 5), target, np.float32)))["lr"])
        moved = np.abs(np.asarray(turned._state.params["head"]["bias"]) - before)
        assert told == pytest.approx(rate * 0.5**step, rel=1e-12)
        # The rate of another step would be half or twice as much.
        assert np.allclose(moved, 0 if np.isnan(target) else told, rtol=1e-3, atol=0)


def test_layer_decay_multiplies_each_layers_change() -> None:
    begun = jax.tree.map(np.asarray, engine()._state.params)
    changes = [
        jax.tree.map(lambda a, b: np.asarray(a) - b, after(1, optimizer=Optimizer(layer_decay=d))[0].params, begun)
        for d in (1.0, 0.5)
    ]
    ratios = changes[1]["blocks"]["mlp"]["fc1"]["kernel"] / changes[0]["blocks"]["mlp"]["fc1"]["kernel"]
    assert np.allclose(ratios, np.array([0.125, 0.25, 0.5])[:, None, None], rtol=1e-6)
    assert np.allclose(changes[1]["head"]["kernel"], changes[0]["head"]["kernel"], rtol=1e-9)


OTHERS = ["sgd", "lamb", "lion", "adafactor", "muon"]


@pytest.mark.parametrize("name", OTHERS)
def test_every_optimizer_learns_and_decays_the_matrices_alone(name: Any) -> None:
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), perturbed(CONFIG))
    still = jax.tree.map(jnp.zeros_like, params)
    o = Optimizer(name=name, weight_decay=0.5)
    turned = optimizer(o, CONFIG)
    updates, _ = turned.update(still, turned.init(params), params, rate=RATE)
    kernel, bias = updates["blocks"]["attn"]["proj"]["kernel"], updates["blocks"]["attn"]["proj"]["bias"]
    weights = params["blocks"]["attn"]["proj"]["kernel"]
    # LAMB scales its update to the weights' norm, so without a gradient it takes the learning rate of them.
    assert np.allclose(kernel, -RATE * (1.0 if name == "lamb" else 0.5) * weights, rtol=1e-6, atol=1e-12)
    assert not np.asarray(bias).any()
    turned = optimizer(replace(o, weight_decay=0.0, clip=1e9), CONFIG)
    here, state = params, turned.init(params)
    for _ in range(5):  # the gradient of half the square of all weights is the weights
        updates, state = turned.update(here, state, here, rate=RATE)
        here = optax.apply_updates(here, updates)
    assert float(optax.tree.norm(here)) < 0.999 * float(optax.tree.norm(params))


def weights_and_gradients(first: float) -> tuple[Any, Any]:
    """Weights and gradients; the first block's are so many times as large as the others'."""
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), perturbed(CONFIG))
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), params)
    for values in (params, grads):
        values["blocks"] = jax.tree.map(lambda x: x.at[0].multiply(first), values["blocks"])
    return params, grads


def test_lamb_moves_each_layer_by_the_norm_of_its_weights() -> None:
    params, grads = weights_and_gradients(10.0)
    turned = optimizer(Optimizer(name="lamb", clip=1e9), CONFIG)
    updates, _ = turned.update(grads, turned.init(params), params, rate=RATE)
    moved, weights = (
        [np.linalg.norm(block) for block in values["blocks"]["attn"]["qkv"]["kernel"]] for values in (updates, params)
    )
    assert np.allclose(moved, RATE * np.array(weights), rtol=1e-12)
    assert float(optax.tree.norm(updates["patch_embed"]["proj"]["kernel"])) == pytest.approx(
        RATE * float(optax.tree.norm(params["patch_embed"]["proj"]["kernel"])), rel=1e-12
    )
    # What does not decay is not scaled: Adam's first update is +1 or -1, but for eps over the gradient, 1e-8 over 1e-3.
    assert np.allclose(np.abs(updates["blocks"]["attn"]["qkv"]["bias"]), RATE, rtol=1e-5)


def test_adafactor_divides_by_the_root_of_the_squares_it_remembers_and_clips_nothing() -> None:
    params, grads = weights_and_gradients(1.0)
    larger = jax.tree.map(lambda x: 1e3 * x, grads)
    turned = optimizer(Optimizer(name="adafactor", weight_decay=0, clip=1e9, beta1=0), CONFIG)
    _, state = turned.update(grads, turned.init(params), params, rate=RATE)
    updates, _ = turned.update(larger, state, params, rate=RATE)
    b = 1 - 2**-0.8  # in the second update
    old, new = (np.asarray(each["blocks"]["attn"]["qkv"]["kernel"]) for each in (grads, larger))
    wanted = -RATE * new / np.sqrt(b * old**2 + (1 - b) * new**2)
    assert np.allclose(updates["blocks"]["attn"]["qkv"]["kernel"], wanted, rtol=1e-12)


def test_adafactor_forgets_squares_by_a_thousandth_a_step_at_least() -> None:
    params, grads = weights_and_gradients(1.0)
    turned = optimizer(Optimizer(name="adafactor", clip=1e9), CONFIG)
    late = optax.tree.set(turned.init(params), count=jnp.int32(10**6))  # 1 - t^-0.8 is 1 - 1.6e-5 there
    _, state = turned.update(grads, late, params, rate=RATE)
    found = optax.tree.get(state, "v")["head"]["kernel"]
    assert np.allclose(found, 0.001 * np.square(grads["head"]["kernel"]), rtol=1e-6)


def test_muon_turns_each_of_q_k_and_v_of_each_block_by_itself() -> None:
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), perturbed(CONFIG))
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), params)
    # Nine matrices with singular values from 0.5 to 1, of sizes that differ by up to 10^8.
    frames = np.linalg.qr(rng.normal(size=(2, 3, 3, 16, 16)))[0]
    matrices = frames[0] * np.linspace(0.5, 1, 16) @ frames[1] * 10.0 ** np.arange(9).reshape(3, 3, 1, 1)
    grads["blocks"]["attn"]["qkv"]["kernel"] = jnp.asarray(np.moveaxis(matrices, 1, 2).reshape(3, 16, 3, 2, 8))
    turned = optimizer(Optimizer(name="muon", weight_decay=0, clip=1e9), CONFIG)
    change = np.asarray(turned.update(grads, turned.init(params), params, rate=RATE)[0]["blocks"]["attn"]["qkv"]["kernel"])
    for block in range(3):
        for part in range(3):
            matrix = change[block, :, part].reshape(16, 16)
            sizes = np.linalg.svd(matrix, compute_uv=False) / (RATE * 0.2 * 4)  # 0.2 times the root of 16
            assert 0.6 < sizes.min() and sizes.max() < 1.3  # what five of its Newton-Schulz steps leave


# Where it begins ------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "start.safetensors"
    parity.save(path, perturbed(CONFIG), CONFIG, "jax")
    return path


def test_weights_to_start_from_are_taken_as_they_are_where_they_fit(file: Path) -> None:
    checkpoint, notes = opened(Recipe(init=str(file)), num_outputs=5, in_channels=3)
    assert checkpoint.config == CONFIG and notes == [f"weights are from {file}", "its head of 5 outputs is kept"]


def test_weights_are_brought_to_another_size_head_and_noise_and_it_is_said(file: Path) -> None:
    model = replace(Recipe().model, image_size=(16, 12), changes=("regularisation.drop_path=0.1",))
    checkpoint, notes = opened(Recipe(init=str(file), model=model), num_outputs=7, in_channels=1)
    config = checkpoint.config
    assert (config.image_size, config.num_classes, config.in_channels) == ((16, 12), 7, 1)
    assert config.regularisation.drop_path == 0.1
    said = "; ".join(notes)
    assert all(word in said for word in ("image_size", "pos_embed", "num_classes 5 -> 7", "in_channels"))
    parity.to_jax(checkpoint)


def test_a_runs_folder_stands_for_its_best_weights(file: Path) -> None:
    newest, best = file.parent / "weights.safetensors", file.parent / "best.safetensors"
    parity.save(best, jax.tree.map(lambda x: x + 1, perturbed(CONFIG)), CONFIG, "jax")
    file.rename(newest)
    checkpoint, notes = opened(Recipe(init=str(file.parent)), num_outputs=5, in_channels=3)
    assert notes[0] == f"weights are from {best}"
    found, wanted = (each.arrays["head/bias"] for each in (checkpoint, parity.load(best)))
    assert np.array_equal(np.asarray(found), np.asarray(wanted))


def test_what_the_weights_do_not_tell_is_asked_for_by_the_trainers_own_option(file: Path) -> None:
    bare = file.with_name("bare.safetensors")
    parity.convert(file, bare, "torch")
    save_file(load_file(bare), bare)  # without the config that lay in it
    with pytest.raises(InputError, match="--init-set num_heads="):
        opened(Recipe(init=str(bare)), num_outputs=5, in_channels=3)


def test_changes_of_the_weights_themselves_are_refused(file: Path) -> None:
    recipe = Recipe(init=str(file), model=replace(Recipe().model, changes=("depth=2",)))
    with pytest.raises(InputError, match=r"--model\.changes changes weights that --init brings"):
        opened(recipe, num_outputs=5, in_channels=3)


def test_half_precision_weights_are_widened_to_train_them(tmp_path: Path) -> None:
    path = tmp_path / "half.safetensors"
    parity.save(path, jax.tree.map(lambda x: x.astype(jnp.bfloat16), perturbed(CONFIG)), CONFIG, "jax")
    checkpoint, _ = opened(Recipe(init=str(path)), num_outputs=5, in_channels=3)
    turned = JaxEngine(
        CONFIG, Recipe(batch_size=12), task="classes", rate=lambda step: RATE, start=checkpoint, folder=tmp_path
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(turned._state.params)} == {np.dtype(np.float32)}


# How it computes ------------------------------------------------------------------------------------------------------


def test_bfloat16_computes_in_half_and_keeps_the_weights_in_float32() -> None:
    with jax.enable_x64(False):
        turned = JaxEngine(
            CONFIG,
            Recipe(batch_size=12, dtype="bfloat16"),
            task="classes",
            rate=lambda step: RATE,
            start=None,
            folder=Path("unused"),
        )
        loss = float(turned.step(batch())["loss"])
        whole = engine_in_float32()
        assert loss == pytest.approx(float(whole.step(batch())["loss"]), rel=5 * 2**-8) and np.isfinite(loss)
        assert {leaf.dtype for leaf in jax.tree.leaves(turned._state.params)} == {np.dtype(np.float32)}
        assert "bf16" in turned._update.as_text()


def engine_in_float32() -> JaxEngine:
    return JaxEngine(
        CONFIG, Recipe(batch_size=12), task="classes", rate=lambda step: RATE, start=None, folder=Path("unused")
    )


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_computing_again_changes_no_step(remat: Any) -> None:
    (whole, _), (again, _) = after(2), after(2, remat=remat)
    assert difference(again.params, whole.params) < 1e-12
