"""Both twins draw every parameter by its row's law: the same shapes, the same moments, the same tables."""

from math import sqrt
from typing import Any

import numpy as np
import pytest

import vit_spec
from vit_spec import ViTConfig, rows
from vit_spec.laws import TRUNCATED_STD, Law

LAWS = ViTConfig(  # every kind of row at once, each large enough for its moments to be seen
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
ROWS = rows(LAWS)


def drawn_by_jax(config: ViTConfig) -> dict[str, np.ndarray]:
    """The parameters of a fresh functional twin, by their names in the rows."""
    vit_jax, jax = pytest.importorskip("vit_jax"), pytest.importorskip("jax")
    leaves = jax.tree_util.tree_leaves_with_path(vit_jax.init(config, seed=3))
    names = {"kernel": "weight", "scale": "weight"}
    found = {}
    for path, leaf in leaves:
        *parents, last = (entry.key for entry in path)
        found[".".join((*parents, names.get(last, last)))] = np.asarray(leaf)
    return found


def drawn_by_torch(config: ViTConfig) -> dict[str, np.ndarray]:
    """The parameters of a fresh object twin, by their names in the rows, blocks stacked."""
    vit_torch, torch = pytest.importorskip("vit_torch"), pytest.importorskip("torch")
    torch.manual_seed(3)
    stacks: dict[str, list[Any]] = {}
    for name, parameter in vit_torch.ViT(config).named_parameters():
        row = ".".join(word for word in name.split(".") if not word.isdigit())
        stacks.setdefault(row, []).append(parameter.detach().numpy())
    return {name: np.stack(stack) for name, stack in stacks.items()}


DRAWN = {"jax": drawn_by_jax, "torch": drawn_by_torch}


@pytest.fixture(scope="module", params=DRAWN)
def drawn(request: pytest.FixtureRequest) -> dict[str, np.ndarray]:
    return DRAWN[request.param](LAWS)


def test_a_fresh_model_has_exactly_the_rows(drawn: dict[str, np.ndarray]) -> None:
    assert {name: array.size for name, array in drawn.items()} == {name: row.size for name, row in ROWS.items()}


@pytest.mark.parametrize("name", ROWS)
def test_a_parameter_has_the_mean_and_variance_of_its_law(name: str, drawn: dict[str, np.ndarray]) -> None:
    law, array = ROWS[name].law, drawn[name].astype(np.float64)
    assert law is not None
    if not law.std:
        np.testing.assert_allclose(array, law.mean, rtol=1e-7)
        return
    n = array.size  # five standard errors: of the mean, and of the standard deviation of a normal
    assert abs(array.mean() - law.mean) < 5 * law.std / sqrt(n)
    assert abs(array.std() / law.std - 1) < 5 / sqrt(2 * n)


def test_blocks_are_drawn_independently(drawn: dict[str, np.ndarray]) -> None:
    weight = drawn["blocks.attn.qkv.weight"]
    assert abs(np.corrcoef(weight[0].ravel(), weight[1].ravel())[0, 1]) < 5 / sqrt(weight[0].size)


def test_a_truncated_normal_ends_at_two_standard_deviations_of_its_parent(drawn: dict[str, np.ndarray]) -> None:
    law = ROWS["patch_embed.proj.weight"].law
    assert law is not None
    bound, largest = 2 * law.std / TRUNCATED_STD, np.abs(drawn["patch_embed.proj.weight"]).max()
    assert 0.98 * bound < largest <= bound * (1 + 1e-6)


def test_the_constant_of_truncation_is_the_standard_deviation_of_what_is_left() -> None:
    x = np.linspace(-2, 2, 400_001)
    density = np.exp(-(x**2) / 2)
    assert abs(sqrt((x**2 * density).sum() / density.sum()) - TRUNCATED_STD) < 1e-5


@pytest.mark.parametrize("twin", DRAWN)
@pytest.mark.parametrize("table", ["sincos_1d", "sincos_2d_mae"])
def test_a_learned_table_starts_from_the_table_that_it_names(twin: str, table: str) -> None:
    config = LAWS.replace(positions={"table": table})
    (expected,) = vit_spec.position_table(config, config.grid)
    found = DRAWN[twin](config)["pos_embed"].reshape(expected.shape)
    np.testing.assert_array_equal(found, expected.astype(np.float32))


ARTICLES = {  # what the articles say of their start
    "article_xray_rope": {"cls_token": Law("normal", (1.0,))},
    "article_multihead": {"cls_token": Law("normal", (1.0,)), "pos_embed": Law("normal", (1.0,))},
    "article_sincos": {"cls_token": Law("uniform", (0.0, 1.0)), "pos_embed": None},
    "article_rectangular": {"cls_token": Law("trunc_normal", (0.02,))},
}


@pytest.mark.parametrize("name", ARTICLES)
def test_an_article_model_starts_as_its_article_says(name: str) -> None:
    found = rows(vit_spec.get(name))
    assert {row: found[row].law for row in ARTICLES[name]} == ARTICLES[name]
    assert not found["cls_token"].decays


def test_the_same_seed_draws_the_same_parameters_and_another_seed_others() -> None:
    vit_jax = pytest.importorskip("vit_jax")
    one, same, other = (vit_jax.init(LAWS, seed)["patch_embed"]["proj"]["kernel"] for seed in (1, 1, 2))
    assert (one == same).all()
    assert not (one == other).any()


def test_a_twin_inside_another_module_is_drawn_by_the_same_laws() -> None:
    vit_jax, jax, linen = (pytest.importorskip(name) for name in ("vit_jax", "jax", "flax.linen"))

    class Pair(linen.Module):
        def setup(self) -> None:
            self.norm, self.vit = linen.LayerNorm(), vit_jax.ViT(LAWS)

        def __call__(self, images: Any) -> Any:
            return self.vit(self.norm(images))

    params = jax.jit(Pair().init)(jax.random.key(0), jax.numpy.zeros((1, 64, 48, 3)))["params"]
    assert abs(float(params["vit"]["cls_token"].mean()) - 0.5) < 5 * sqrt(1 / 12 / 64)
    assert (params["vit"]["blocks"]["ls1"]["gamma"] == np.float32(0.1)).all()
