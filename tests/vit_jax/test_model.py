"""The functional twin as JAX users use it: noise, types, scan, rematerialisation, meshes, NNX, looking inside."""

from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp
from flax import nnx

import vit_jax
import vit_spec
from tests.extreme_weights import drawn
from tests.twins import pictures, small
from vit_jax.layers import _layer_norm, runs_cudnn
from vit_spec import InputError, ViTConfig

PLAIN = small(vit_spec.get("vit_s16"))
RICH = small(vit_spec.get("dinov3_s16plus")).replace(head={"pool": "attention", "hidden": 6}, num_classes=5)
NOISE = ("pos_drop", "attn_drop", "mlp_drop", "patch_drop", "drop_path")


PARAMS = cache(vit_jax.init)


@cache
def compiled(config: ViTConfig, execution: vit_jax.Execution) -> Any:
    """Parameters drawn from seed 0, and the model's compiled `apply`."""
    params = PARAMS(replace(config, regularisation=vit_spec.Regularisation()))
    return params, jax.jit(vit_jax.ViT(config, execution).apply, static_argnames="train")


def run(config: ViTConfig, execution: vit_jax.Execution | None = None, **options: Any) -> Any:
    """The outputs on two pictures."""
    params, apply = compiled(config, execution or vit_jax.Execution())
    return apply({"params": params}, pictures(config), **options)


@pytest.mark.parametrize("kind", NOISE)
def test_noise_acts_in_training_alone_and_follows_its_key(kind: str) -> None:
    config = PLAIN.replace(regularisation={kind: 0.5})
    one, same, other = (run(config, train=True, rngs={"dropout": jax.random.key(seed)}) for seed in (1, 1, 2))
    assert (one == same).all()
    assert not (one == other).all()
    assert (run(config) == run(PLAIN)).all()


def test_patch_dropout_keeps_the_prefix_and_a_share_of_the_patches() -> None:
    config = RICH.replace(regularisation={"patch_drop": 0.5})
    apply = jax.jit(partial(vit_jax.ViT(config).apply, train=True, mutable=["intermediates"]))
    _, state = apply({"params": PARAMS(RICH)}, pictures(config, (64, 64)), rngs={"dropout": jax.random.key(0)})
    assert state["intermediates"]["embed"][0].shape[1] == config.num_prefix + 8


def test_drop_path_leaves_the_first_block_whole_and_drops_whole_images() -> None:
    config = PLAIN.replace(regularisation={"drop_path": 0.9})
    x = np.tile(pictures(config), (64, 1, 1, 1))
    _, state = vit_jax.ViT(config).apply(
        {"params": PARAMS(PLAIN)},
        x,
        train=True,
        rngs={"dropout": jax.random.key(0)},
        mutable=["intermediates"],
        capture_intermediates=True,
    )
    found = state["intermediates"]
    outputs = found["blocks"]["__call__"][0][0]
    skipped = [
        np.asarray((after == before).all((1, 2)))
        for after, before in zip(outputs, (found["embed"][0], outputs[0]), strict=True)
    ]
    assert not skipped[0].any()
    assert 0.5 < skipped[1].mean() < 0.95  # both halves: 0.81


@pytest.mark.parametrize("config", [PLAIN, RICH], ids=["plain", "rich"])
def test_bfloat16_is_computed_in_bfloat16_within_its_rounding(config: ViTConfig) -> None:
    params, apply = compiled(config, vit_jax.Execution(dtype=jnp.float32))
    near = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    exact = apply({"params": near}, jnp.asarray(pictures(config), jnp.bfloat16))
    rounded = run(config, vit_jax.Execution(dtype=jnp.bfloat16))
    assert rounded.dtype == jnp.bfloat16
    assert jnp.linalg.norm(rounded - exact) < 10 * 2**-9 * jnp.linalg.norm(exact)  # ten roundings, as G2 has it


@pytest.mark.parametrize(
    "execution",
    [
        vit_jax.Execution(remat="full"),
        vit_jax.Execution(remat="dots"),
        vit_jax.Execution(unroll=2),
        vit_jax.Execution(attention="explicit"),
    ],
    ids=["remat full", "remat dots", "unroll", "explicit"],
)
def test_how_it_runs_does_not_change_what_it_computes(execution: vit_jax.Execution) -> None:
    def gradient(execution: vit_jax.Execution) -> Any:
        model = vit_jax.ViT(RICH, execution)
        return jax.jit(jax.grad(lambda p: jnp.square(model.apply({"params": p}, pictures(RICH))).sum()))(params)

    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), PARAMS(RICH))
        plain, other = gradient(vit_jax.Execution()), gradient(execution)
    for one, two in zip(jax.tree.leaves(plain), jax.tree.leaves(other), strict=True):
        assert np.linalg.norm(one - two) <= 1e-12 * np.linalg.norm(one)


@pytest.mark.parametrize(
    ("capability", "runs"), [("9.0", True), ("8.0", True), ("12.1", True), ("7.5", False), ("gfx942", False), (None, False)]
)
def test_the_fused_kernel_is_taken_on_the_devices_that_run_it(capability: str | None, runs: bool) -> None:
    device: Any = SimpleNamespace() if capability is None else SimpleNamespace(compute_capability=capability)
    assert runs_cudnn(device) is runs


@pytest.fixture
def beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the twin find a GPU where it asks for jax's first device."""
    gpu, find = SimpleNamespace(platform="gpu", compute_capability="9.0"), jax.local_devices
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: find(backend=backend) if backend else [gpu])


@pytest.mark.usefixtures("beside_a_gpu")
def test_beside_a_gpu_the_cpu_still_runs_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("vit_jax.layers.runs_cudnn", lambda device: bool(asked.append(device.platform)))
    model, params = vit_jax.ViT(PLAIN, vit_jax.Execution(dtype=jnp.bfloat16)), PARAMS(PLAIN)
    for place in (None, "cpu", jax.devices("cpu")[0]):
        with jax.default_device(place):
            jax.eval_shape(lambda: model.apply({"params": params}, pictures(PLAIN)))
    assert list(dict.fromkeys(asked)) == ["gpu", "cpu"]


@pytest.mark.usefixtures("beside_a_gpu")
@pytest.mark.parametrize(("version", "held"), [((0, 11, 2), False), ((0, 12, 0), True)])
def test_tokens_are_held_in_rows_where_the_compiler_would_turn_them(
    version: tuple[int, ...], held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "__version_info__", version)
    apply = jax.jit(lambda x: vit_jax.ViT(PLAIN).apply({"params": PARAMS(PLAIN)}, x))
    assert ("LayoutConstraint" in apply.lower(pictures(PLAIN)).as_text()) is held


@pytest.mark.parametrize("side", [16, 24], ids=["5 tokens", "10 tokens"])
def test_the_fused_kernel_is_given_what_makes_it_the_same_function(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """jax's own attention takes the kernel's place, since it takes the same arguments and runs everywhere."""
    config = RICH.replace(image_size=(side, side), patch_size=8, tokens={"registers": 0})
    asked = []

    def anywhere(*arguments: Any, implementation: str, **options: Any) -> Any:
        asked.append((implementation, arguments[0].shape[1]))
        return dot_product_attention(*arguments, implementation="xla", **options)

    def gradient(kind: Any, params: Any) -> Any:
        model = vit_jax.ViT(config, vit_jax.Execution(attention=kind))
        return jax.jit(jax.grad(lambda p: jnp.square(model.apply({"params": p}, pictures(config))).sum()))(params)

    dot_product_attention = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", anywhere)
    with jax.enable_x64(True):
        noise = np.random.default_rng(0)  # so large that no gradient is nearly nothing
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf + noise.normal(0, 0.3, leaf.shape)), PARAMS(config))
        written_out, fused = gradient("explicit", params), gradient("cudnn", params)
    assert set(asked) == {("cudnn", 6 if side == 16 else 10)}  # an even number; the pooling's query is no concern of it
    for one, two in zip(jax.tree.leaves(written_out), jax.tree.leaves(fused), strict=True):
        assert np.linalg.norm(one - two) <= 10 * 2**-24 * np.linalg.norm(one)  # jax's own holds scores in float32


@pytest.mark.parametrize("name", ["vit_s16", "vit_h14", "siglip_so400m14", "dinov2_s14_reg4"])
def test_a_step_with_the_fused_kernel_is_lowered_for_nvidia(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """197, 257, 256 and 1,374 tokens; heads of 64, 80 and 72: what jax refuses, it refuses here."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)
    config = vit_spec.get(name, depth=2, width=vit_spec.get(name).head_dim * 2, num_heads=2, mlp_dim=16)
    model = vit_jax.ViT(config, vit_jax.Execution(dtype=jnp.bfloat16, attention="cudnn"))
    images = jax.ShapeDtypeStruct((2, *config.image_size, config.in_channels), jnp.float32)
    step = jax.jit(jax.grad(lambda p, x: model.apply({"params": p}, x).astype(jnp.float32).sum()))
    program = step.trace(jax.eval_shape(lambda: vit_jax.init(config)), images).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaSoftmaxBackward" in program


def test_a_kernel_without_dropout_is_refused_where_there_is_some() -> None:
    config = PLAIN.replace(regularisation={"attn_drop": 0.5})
    with pytest.raises(InputError, match="cudnn"):
        run(config, vit_jax.Execution(attention="cudnn"), train=True, rngs={"dropout": jax.random.key(0)})


def test_compilation_does_not_grow_with_depth() -> None:
    def instructions(depth: int) -> int:
        config = replace(PLAIN, depth=depth)
        params = jax.eval_shape(lambda: vit_jax.init(config))
        apply = jax.jit(lambda p, x: vit_jax.ViT(config).apply({"params": p}, x))
        return len(apply.lower(params, pictures(config)).as_text().splitlines())

    assert instructions(24) <= instructions(3) + 2


def test_it_runs_through_the_bridge_to_nnx() -> None:
    model = nnx.bridge.ToNNX(vit_jax.ViT(RICH), rngs=nnx.Rngs(params=0)).lazy_init(pictures(RICH))
    params = jax.tree.map(lambda leaf: leaf, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    expected = vit_jax.ViT(RICH).apply({"params": params}, pictures(RICH))
    np.testing.assert_array_equal(model(pictures(RICH)), expected)
    gradient = nnx.jit(nnx.grad(lambda m: jnp.square(m(pictures(RICH))).sum()))(model)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradient["blocks"]["attn"]["qkv"]))


def test_attention_maps_are_the_weights_that_the_heads_used() -> None:
    with jax.enable_x64(True):
        model = vit_jax.ViT(RICH)
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), PARAMS(RICH))
        x = pictures(RICH).astype(np.float64)
        _, found = jax.jit(partial(vit_jax.intermediates, model))(params, x)
        maps = jax.jit(partial(vit_jax.attention_maps, model))(params, x)
        heads = jnp.einsum("bhts,bshd->bthd", maps, found["blocks.1.attn.v"])
        np.testing.assert_allclose(heads, found["blocks.1.attn.heads"], rtol=1e-12, atol=1e-14)
    assert maps.shape == (2, RICH.num_heads, RICH.num_tokens, RICH.num_tokens)


def test_both_twins_name_the_same_intermediates() -> None:
    torch, vit_torch = pytest.importorskip("torch"), pytest.importorskip("vit_torch")
    _, in_jax = vit_jax.intermediates(vit_jax.ViT(RICH), PARAMS(RICH), pictures(RICH))
    written_out = vit_torch.ViT(RICH, vit_torch.Execution(attention="explicit")).eval()
    _, in_torch = vit_torch.intermediates(written_out, torch.tensor(pictures(RICH)).permute(0, 3, 1, 2))
    assert {name: value.shape for name, value in in_jax.items()} == {k: tuple(v.shape) for k, v in in_torch.items()}


REFUSED = {
    "a single image": (lambda x: x[0], "a single image is images[None]"),
    "channels first": (lambda x: x.transpose(0, 3, 1, 2), "use images.transpose(0, 2, 3, 1)"),
    "another channel count": (lambda x: x[..., :2], "with 3 channels"),
    "bytes": (lambda x: x.astype(np.uint8), "normalise them first"),
    "a size that the patch does not divide": (lambda x: x[:, :, :-1], "resize images to 32x48"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_wrong_images_are_refused_in_one_line(what: str) -> None:
    change, message = REFUSED[what]
    with pytest.raises(InputError) as error:
        vit_jax.ViT(PLAIN).apply({"params": PARAMS(PLAIN)}, change(pictures(PLAIN)))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", vit_spec.names())
def test_a_named_model_at_full_size_has_the_shapes_of_its_rows(name: str) -> None:
    config = vit_spec.get(name)
    params = jax.eval_shape(lambda: vit_jax.init(config))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == vit_spec.count(config)


def test_scores_of_billions_give_finite_outputs() -> None:
    _, _, config, params, images = drawn(91)  # weights times 10 to 300, whose scores reach 3e9
    assert np.isfinite(jax.jit(vit_jax.ViT(config).apply)({"params": params}, images)).all()


def test_the_gradient_of_a_norm_keeps_both_terms_where_float32_nearly_overflows() -> None:
    x, ahead = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32)

    def gradient(dtype: Any) -> np.ndarray:
        arrays = [jnp.asarray(each, dtype) for each in (1e13 * x, np.ones(8), np.zeros(8), ahead)]
        return np.asarray(jax.grad(lambda x, scale, bias, y: jnp.vdot(_layer_norm(x, scale, bias, 1e-6), y))(*arrays))

    with jax.enable_x64(True):
        right = gradient(np.float64)
    assert np.linalg.norm(gradient(np.float32) - right) <= 1e-5 * np.linalg.norm(right)
