"""Both twins initialize every parameter as its row says: with the same shapes, means, variances and tables."""

from dataclasses import replace
from math import sqrt
from typing import Any

import numpy as np
import pytest

import vit_spec
from vit_spec import ViTConfig, rows
from vit_spec.initialisation import TRUNCATED_STD, Law

CONFIG = ViTConfig(  # all kinds of rows, each large enough to estimate its mean and variance
    image_size=(64, 48),
    patch_size=8,
    width=64,
    depth=2,
    num_heads=4,
    mlp_dim=128,
    num_classes=100,
    tokens=vit_spec.Tokens(registers=16, init="uniform(0, 1)"),
    positions=vit_spec.Positions(table="normal(1.0)"),
    attention=vit_spec.Attention(qk_norm=True),
    mlp=vit_spec.Mlp(activation="swiglu"),
    norms=vit_spec.Norms(layer_scale=0.1, before_blocks=True, after_pool=True),
    head=vit_spec.Head(pool="attention", hidden=64),
)
ROWS = rows(CONFIG)


def jax_parameters(config: ViTConfig) -> dict[str, np.ndarray]:
    """Return initial parameters of the JAX twin, by the names of their rows."""
    vit_jax, jax = pytest.importorskip("vit_jax"), pytest.importorskip("jax")
    leaves = jax.tree_util.tree_leaves_with_path(vit_jax.init(config, seed=3))
    names = {"kernel": "weight", "scale": "weight"}
    found = {}
    for path, leaf in leaves:
        *parents, last = (entry.key for entry in path)
        found[".".join((*parents, names.get(last, last)))] = np.asarray(leaf)
    return found


def torch_parameters(config: ViTConfig) -> dict[str, np.ndarray]:
    """Return initial parameters of the PyTorch twin, by the names of their rows, with blocks stacked."""
    vit_torch, torch = pytest.importorskip("vit_torch"), pytest.importorskip("torch")
    torch.manual_seed(3)
    stacks: dict[str, list[Any]] = {}
    for name, parameter in vit_torch.ViT(config).named_parameters():
        row = ".".join(word for word in name.split(".") if not word.isdigit())
        stacks.setdefault(row, []).append(parameter.detach().numpy())
    return {name: np.stack(stack) for name, stack in stacks.items()}


PARAMETERS = {"jax": jax_parameters, "torch": torch_parameters}


@pytest.fixture(scope="module", params=PARAMETERS)
def initial(request: pytest.FixtureRequest) -> dict[str, np.ndarray]:
    return PARAMETERS[request.param](CONFIG)


def test_an_initial_model_has_exactly_the_parameters_of_the_rows(initial: dict[str, np.ndarray]) -> None:
    assert {name: array.size for name, array in initial.items()} == {name: row.size for name, row in ROWS.items()}


@pytest.mark.parametrize("name", ROWS)
def test_a_parameter_has_the_mean_and_variance_of_its_distribution(name: str, initial: dict[str, np.ndarray]) -> None:
    law, array = ROWS[name].law, initial[name].astype(np.float64)
    assert law is not None
    if not law.std:
        np.testing.assert_allclose(array, law.mean, rtol=1e-7)
        return
    n = array.size  # five standard errors: of the mean, and of the standard deviation of a normal
    assert abs(array.mean() - law.mean) < 5 * law.std / sqrt(n)
    assert abs(array.std() / law.std - 1) < 5 / sqrt(2 * n)


def test_blocks_are_initialized_independently(initial: dict[str, np.ndarray]) -> None:
    weight = initial["blocks.attn.qkv.weight"]
    assert abs(np.corrcoef(weight[0].ravel(), weight[1].ravel())[0, 1]) < 5 / sqrt(weight[0].size)


def test_a_normal_is_truncated_at_two_of_its_standard_deviations(initial: dict[str, np.ndarray]) -> None:
    law = ROWS["patch_embed.proj.weight"].law
    assert law is not None
    bound, largest = 2 * law.std / TRUNCATED_STD, np.abs(initial["patch_embed.proj.weight"]).max()
    assert 0.98 * bound < largest <= bound * (1 + 1e-6)


def test_truncated_std_is_the_standard_deviation_after_truncation() -> None:
    x = np.linspace(-2, 2, 400_001)
    density = np.exp(-(x**2) / 2)
    assert abs(sqrt((x**2 * density).sum() / density.sum()) - TRUNCATED_STD) < 1e-5


@pytest.mark.parametrize("twin", PARAMETERS)
@pytest.mark.parametrize("table", ["sincos_1d", "sincos_2d_mae"])
def test_a_learned_table_is_initialized_with_the_named_table(twin: str, table: str) -> None:
    config = CONFIG.replace(positions={"table": table})
    (expected,) = vit_spec.position_table(config, config.grid)
    found = PARAMETERS[twin](config)["pos_embed"].reshape(expected.shape)
    np.testing.assert_array_equal(found, expected.astype(np.float32))


ARTICLES = {  # initial distributions in the articles
    "article_xray_rope": {"cls_token": Law("normal", (1.0,))},
    "article_multihead": {"cls_token": Law("normal", (1.0,)), "pos_embed": Law("normal", (1.0,))},
    "article_sincos": {"cls_token": Law("uniform", (0.0, 1.0)), "pos_embed": None},
    "article_rectangular": {"cls_token": Law("trunc_normal", (0.02,))},
}


@pytest.mark.parametrize("name", ARTICLES)
def test_an_article_model_has_the_initial_distributions_of_its_article(name: str) -> None:
    found = rows(vit_spec.get(name))
    assert {row: found[row].law for row in ARTICLES[name]} == ARTICLES[name]
    assert not found["cls_token"].decays


def test_equal_seeds_give_equal_parameters_and_different_seeds_different_ones() -> None:
    vit_jax = pytest.importorskip("vit_jax")
    one, same, other = (vit_jax.init(CONFIG, seed)["patch_embed"]["proj"]["kernel"] for seed in (1, 1, 2**32 + 1))
    assert (one == same).all()
    assert not (one == other).any()


def test_a_seed_gives_the_same_parameters_as_in_earlier_versions() -> None:
    """How often flax traces a block while it initializes it changes the keys of its parameters."""
    vit_jax = pytest.importorskip("vit_jax")
    params = vit_jax.init(vit_spec.get("vit_ti16", depth=2, width=16, num_heads=2, mlp_dim=24, image_size=(32, 32)), seed=3)
    outside, inside = params["patch_embed"]["proj"]["kernel"][0, 0, 0], params["blocks"]["mlp"]["fc1"]["kernel"][1, 0]
    np.testing.assert_allclose(outside[:3], [0.00958921, 0.02732805, -0.05513037], rtol=1e-5)
    np.testing.assert_allclose(inside[:3], [-0.04398214, -0.04891157, -0.10917476], rtol=1e-5)


def test_a_twin_inside_another_module_is_initialized_the_same_way() -> None:
    vit_jax, jax, linen = (pytest.importorskip(name) for name in ("vit_jax", "jax", "flax.linen"))

    class Pair(linen.Module):
        def setup(self) -> None:
            self.norm, self.vit = linen.LayerNorm(), vit_jax.ViT(CONFIG)

        def __call__(self, images: Any) -> Any:
            return self.vit(self.norm(images))

    params = jax.jit(Pair().init)(jax.random.key(0), jax.numpy.zeros((1, 64, 48, 3)))["params"]
    assert abs(float(params["vit"]["cls_token"].mean()) - 0.5) < 5 * sqrt(1 / 12 / 64)
    assert (params["vit"]["blocks"]["ls1"]["gamma"] == np.float32(0.1)).all()


@pytest.mark.parametrize("twin", PARAMETERS)
def test_an_unknown_distribution_is_refused(twin: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = vit_spec.get("vit_ti16", depth=1, num_classes=3)
    unknown = {name: replace(row, law=Law("cauchy", (1.0,))) for name, row in rows(config).items()}
    monkeypatch.setattr(f"vit_{twin}.initialisation.rows", lambda config: unknown)
    with pytest.raises(ValueError, match="unknown distribution 'cauchy'"):
        PARAMETERS[twin](config)


def test_further_seeds_of_a_model_compile_nothing() -> None:
    vit_jax, jax = pytest.importorskip("vit_jax"), pytest.importorskip("jax")
    compiled: list[str] = []

    def count(event: str, seconds: float, **_: Any) -> None:
        compiled.extend([event] if event == "/jax/core/compile/backend_compile_duration" else [])

    first = vit_jax.init(CONFIG, seed=3)
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        second, third = vit_jax.init(CONFIG, seed=4), vit_jax.init(CONFIG, jax.random.key(3))
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert not compiled
    kernels = [params["head"]["kernel"] for params in (first, second, third)]
    assert (kernels[0] == kernels[2]).all()
    assert not (kernels[0] == kernels[1]).all()
