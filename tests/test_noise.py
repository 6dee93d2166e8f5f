"""Both twins compute the random numbers that `vit_spec.noise` defines: the same bits, and then the same training pass."""

from functools import cache
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")

import jax.numpy as jnp

import parity
import vit_jax
import vit_spec
import vit_torch
from parity.checkpoints.weights import as_checkpoint
from tests.twins import perturbed_params, random_images, small_config
from vit_jax.noise import make_noise as jax_noise
from vit_jax.noise import random_key as jax_random_key
from vit_spec import ViTConfig
from vit_spec.noise import SITES_PER_PART, Site, drop_path_rates, drop_threshold, num_parts
from vit_torch.noise import Noise, fold_in, make_noise, signed_threshold, threefry2x32

RATES = {"pos_drop": 0.1, "patch_drop": 0.3, "attn_drop": 0.2, "mlp_drop": 0.15, "drop_path": 0.4}
PLAIN = small_config(vit_spec.get("vit_s16")).replace(regularisation=RATES)
# Attention pooling with its own number of heads, gates, rotary embeddings, registers, blocks in parallel, relative
# positions: every place where numbers are drawn, and every shape that they have.
MODELS = {
    "plain": PLAIN,
    "pooling": PLAIN.replace(head={"pool": "attention", "pool_heads": 4}),
    "gates": small_config(vit_spec.get("dinov3_s16plus")).replace(regularisation=RATES),
    "parallel": small_config(vit_spec.get("vit_22b14")).replace(regularisation=RATES),
    "learned rotations": PLAIN.replace(positions={"rotary": "mixed"}),
}


def unsigned(words: Any) -> np.ndarray:
    """Return words of PyTorch, int32, as uint32."""
    return words.numpy().view(np.uint32)


def noise_of(seed: int, config: ViTConfig = PLAIN, **place: int) -> list[Noise]:
    """Return the random numbers of each part of a model."""
    before, inside, after = make_noise(config, vit_torch.Key(vit_torch.random_key(seed), **place))
    return [before, *inside, after]


# The generator ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((-1, -1), (-1, -1), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3 - 2**32), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_the_generator_gives_the_published_answers(key: Any, counter: Any, expected: Any) -> None:
    """From kat_vectors of Random123, the authors' implementation."""
    counters = (torch.tensor([word], dtype=torch.int32) for word in counter)
    found = torch.cat(threefry2x32(torch.tensor(key, dtype=torch.int32), *counters))
    assert tuple(unsigned(found)) == expected


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1])
def test_keys_are_those_of_jax(seed: int) -> None:
    jax_key = jax_random_key(seed)
    with jax.enable_x64(True):  # without, jax ignores the upper half of a seed
        key = jax.random.key(seed)
        assert unsigned(vit_torch.random_key(seed)).tolist() == jax.random.key_data(key).tolist()
        assert jax_key == key
        for number in (0, 7, 2**31, 2**32 - 1):
            expected = jax.random.key_data(jax.random.fold_in(key, np.uint32(number)))
            assert unsigned(fold_in(vit_torch.random_key(seed), number)).tolist() == expected.tolist()


@pytest.mark.parametrize("name", MODELS)
def test_the_words_of_every_place_are_those_of_jax_and_of_no_other_place(name: str) -> None:
    config = MODELS[name]
    before, inside, after = jax_noise(config, jax.random.key(3))
    parts = [before.keys, *inside.keys, after.keys]
    ours, seen = noise_of(3, config), set()
    assert len(ours) == len(parts) == num_parts(config)
    for one, keys in zip(ours, parts, strict=True):
        for site in Site:
            expected = jax.random.bits(keys[site], (5, 3), jnp.uint32)
            found = unsigned(one.words(site, (5, 3)))
            assert np.array_equal(found, expected)
            seen.add(found.tobytes())
    assert len(seen) == num_parts(config) * len(Site) and len(Site) <= SITES_PER_PART


def test_large_arrays_are_computed_in_chunks_with_the_same_words() -> None:
    shape = (3, 7, 70_001)  # more than a chunk, and not a multiple of it
    expected = jax.random.bits(jax_noise(PLAIN, jax.random.key(1))[0].keys[Site.OUTPUT], shape, jnp.uint32)
    assert np.array_equal(unsigned(noise_of(1)[0].words(Site.OUTPUT, shape)), expected)


def test_entries_beyond_two_to_the_32_have_words_of_their_own() -> None:
    rows, width = 2**20, 2**13  # the whole array has 2^33 entries; compute those on both sides of entry 2^32
    first = 2**32 // width - 1
    words = unsigned(noise_of(1, first_image=first)[0].words(Site.OUTPUT, (2, width)))
    key = jax_noise(PLAIN, jax.random.key(1))[0].keys[Site.OUTPUT]
    index = np.arange(first * width, (first + 2) * width, dtype=np.uint64)
    high, low = ((index >> np.uint64(32)).astype(np.uint32), index.astype(np.uint32))
    x, y = jax.extend.random.threefry2x32_p.bind(*jax.random.key_data(key), high, low)
    assert first + 2 < rows and np.array_equal(words.ravel(), np.asarray(x ^ y))
    assert not np.array_equal(words[1], unsigned(noise_of(1)[0].words(Site.OUTPUT, (1, width)))[0])


@pytest.mark.parametrize(("site", "shape", "dim"), [(Site.ATTENTION, (6, 2, 3, 3), 1), (Site.HIDDEN, (6, 5, 24), 2)])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_process_has_the_words_of_its_images_heads_and_hidden_units(
    site: Site, shape: tuple[int, ...], dim: int, shards: int
) -> None:
    whole = noise_of(2)[1].words(site, shape)
    for first in (0, 2, 4):
        for shard in range(shards):
            part = whole[first : first + 2].chunk(shards, dim)[shard]
            own = noise_of(2, first_image=first, shard=shard, shards=shards)[1]
            assert torch.equal(own.words(site, tuple(part.shape)), part)


def test_outputs_are_not_divided() -> None:
    whole = noise_of(2)[1].words(Site.OUTPUT, (2, 3, 4))
    assert torch.equal(noise_of(2, shard=1, shards=2)[1].words(Site.OUTPUT, (2, 3, 4)), whole)


def test_rates_are_kept_within_the_error_of_sampling() -> None:
    n = 200_000
    for rate in (0.0, 1e-3, 0.25, 0.9):
        dropped = 1 - noise_of(5)[0].keeps(Site.OUTPUT, (n,), signed_threshold(rate)).double().mean()
        assert abs(dropped - rate) <= 5 * (rate * (1 - rate) / n) ** 0.5


def test_thresholds_and_rates_of_blocks() -> None:
    assert [drop_threshold(rate) for rate in (0.0, 0.5, 1 - 2**-53)] == [0, 2**31, 2**32 - 1]
    assert drop_path_rates(PLAIN.replace(depth=5)) == [0.0, 0.1, 0.2, pytest.approx(0.3), 0.4]
    assert drop_path_rates(PLAIN.replace(depth=1)) == [0.0]


# The twins -------------------------------------------------------------------------------------------------------------


@cache
def pass_of_jax(config: ViTConfig, dtype: str = "float64", remat: Any = "none") -> tuple[np.ndarray, dict[str, Any]]:
    """Return the logits and the gradients of the JAX twin in training, for key 7."""
    with jax.enable_x64(dtype == "float64"):
        params = jax.tree.map(lambda p: jnp.asarray(p, dtype), perturbed_params(config))

        def objective(params: Any) -> tuple[Any, Any]:
            model = vit_jax.ViT(config, vit_jax.Execution(remat=remat))
            logits = model.apply({"params": params}, jnp.asarray(images(config), dtype), train=True, key=jax.random.key(7))
            return jnp.square(logits).sum(), logits

        grads, logits = jax.jit(jax.grad(objective, has_aux=True))(params)
        return np.asarray(logits), dict(parity.to_torch(jax.tree.map(np.asarray, grads), config))


@cache
def pass_of_torch(
    config: ViTConfig, dtype: str = "float64", remat: Any = "none", seed: int = 7
) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the logits and the gradients of the PyTorch twin in training."""
    model = vit_torch.ViT(config, vit_torch.Execution(remat=remat)).to(getattr(torch, dtype))
    model.load_state_dict(parity.to_torch(as_checkpoint(perturbed_params(config), config, "jax")))
    x = torch.tensor(images(config), dtype=getattr(torch, dtype)).permute(0, 3, 1, 2)
    found = model.train()(x, vit_torch.Key(vit_torch.random_key(seed)))
    found.square().sum().backward()
    return found.detach().numpy(), {name: p.grad for name, p in model.named_parameters()}


def images(config: ViTConfig) -> np.ndarray:
    """Return two images, each of them twice."""
    return random_images(config).repeat(2, axis=0)


def distance(one: Any, two: Any) -> float:
    """Return the RMS of the difference, relative to that of `two`."""
    one, two = np.asarray(one), np.asarray(two)
    return float(np.linalg.norm(one - two) / np.linalg.norm(two))


@pytest.mark.parametrize("name", MODELS)
def test_the_twins_drop_the_same_entries(name: str) -> None:
    (logits, grads), (found, ours) = pass_of_jax(MODELS[name]), pass_of_torch(MODELS[name])
    assert distance(logits, found) < 1e-13
    for key, grad in ours.items():
        assert np.allclose(grads[key], grad, rtol=0, atol=1e-12 * max(1.0, float(grad.abs().max()))), key


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_recomputed_blocks_drop_the_same_entries(remat: Any) -> None:
    for of_twin in (pass_of_jax, pass_of_torch):
        (one, grads), (two, others) = of_twin(PLAIN), of_twin(PLAIN, remat=remat)
        assert distance(one, two) < 1e-13
        assert all(np.allclose(grads[key], others[key], rtol=0, atol=1e-11) for key in grads)


@pytest.mark.parametrize("of_twin", [pass_of_jax, pass_of_torch])
def test_float32_and_float64_drop_the_same_entries(of_twin: Any) -> None:
    assert distance(of_twin(PLAIN, "float32")[0], of_twin(PLAIN)[0]) < 1e-5


def test_another_key_drops_other_entries_and_evaluation_none() -> None:
    one, two = (pass_of_torch(PLAIN, "float32", seed=seed)[0] for seed in (1, 2))
    assert distance(one, two) > 1e-2
    model, x = vit_torch.ViT(PLAIN).eval(), torch.tensor(images(PLAIN)).permute(0, 3, 1, 2)
    assert torch.equal(model(x, vit_torch.Key(vit_torch.random_key(1))), model(x))


def test_without_a_key_jax_uses_the_stream_of_flax() -> None:
    params, x = perturbed_params(PLAIN), images(PLAIN)

    @jax.jit
    def apply(**source: Any) -> Any:
        return vit_jax.ViT(PLAIN).apply({"params": params}, x, train=True, **source)

    one, two, again = (apply(rngs={"dropout": jax.random.key(seed)}) for seed in (1, 2, 1))
    assert np.array_equal(one, again) and not np.array_equal(one, two)
    assert np.array_equal(apply(key=jax.random.PRNGKey(1)), apply(key=jax.random.key(1)))
