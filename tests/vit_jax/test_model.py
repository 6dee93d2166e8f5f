"""The JAX twin: dropout, dtypes, attention kernels, scan, rematerialization, NNX, intermediates, and errors."""

import importlib
import warnings
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp
from flax import nnx
from flax.errors import ScopeParamShapeError
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import vit_jax
import vit_spec
from tests.extreme_weights import draw_example
from tests.twins import random_images, small_config
from vit_jax import layers
from vit_jax.attention import supports_cudnn_attention
from vit_jax.compilation import is_stored
from vit_jax.layers import _normalize
from vit_spec import InputError, ViTConfig

PLAIN = small_config(vit_spec.get("vit_s16"))
RICH = small_config(vit_spec.get("dinov3_s16plus")).replace(head={"pool": "attention", "hidden": 6}, num_classes=5)
TABLE = small_config(vit_spec.get("beit_b16")).replace(tokens={"registers": 1})
SHARED_TABLE = TABLE.replace(positions={"relative_shared": True})
SHARED_MLP = SHARED_TABLE.replace(positions={"relative": "mlp", "relative_dim": 4})
DROPOUT = ("pos_drop", "attn_drop", "mlp_drop", "patch_drop", "drop_path")


cached_params = cache(vit_jax.init)


@cache
def params_and_apply(config: ViTConfig, execution: vit_jax.Execution) -> Any:
    """Return parameters of seed 0, and the compiled `apply` of the model."""
    params = cached_params(replace(config, regularisation=vit_spec.Regularisation()))
    return params, jax.jit(vit_jax.ViT(config, execution).apply, static_argnames="train")


def run(config: ViTConfig, execution: vit_jax.Execution | None = None, **options: Any) -> Any:
    """Return the outputs for two images; `options` are arguments of `apply`."""
    params, apply = params_and_apply(config, execution or vit_jax.Execution())
    return apply({"params": params}, random_images(config), **options)


@pytest.mark.parametrize("kind", DROPOUT)
def test_dropout_acts_only_in_training_and_follows_its_key(kind: str) -> None:
    config = PLAIN.replace(regularisation={kind: 0.5})
    first, same_key, other_key = (run(config, train=True, rngs={"dropout": jax.random.key(seed)}) for seed in (1, 1, 2))
    assert (first == same_key).all()
    assert not (first == other_key).all()
    assert (run(config) == run(PLAIN)).all()


def test_patch_dropout_keeps_the_prefix_and_a_fraction_of_the_patches() -> None:
    config = RICH.replace(regularisation={"patch_drop": 0.5})
    apply = partial(vit_jax.ViT(config).apply, train=True, mutable=["intermediates"], rngs={"dropout": jax.random.key(0)})
    _, state = jax.eval_shape(apply, {"params": cached_params(RICH)}, random_images(config, (64, 64)))
    assert state["intermediates"]["embed"][0].shape[1] == config.num_prefix + 8


def test_drop_path_keeps_the_first_block_and_drops_whole_images() -> None:
    config = PLAIN.replace(regularisation={"drop_path": 0.9})
    x = np.tile(random_images(config), (64, 1, 1, 1))
    options = {"train": True, "mutable": ["intermediates"], "capture_intermediates": True}
    apply = jax.jit(partial(vit_jax.ViT(config).apply, **options))
    _, state = apply({"params": cached_params(PLAIN)}, x, rngs={"dropout": jax.random.key(0)})
    found = state["intermediates"]
    outputs = found["blocks"]["__call__"][0][0]
    skipped = [
        np.asarray((after == before).all((1, 2)))
        for after, before in zip(outputs, (found["embed"][0], outputs[0]), strict=True)
    ]
    assert not skipped[0].any()
    assert 0.5 < skipped[1].mean() < 0.95  # attention and MLP: 0.81


@pytest.mark.parametrize("config", [PLAIN, RICH], ids=["plain", "rich"])
def test_bfloat16_is_computed_in_bfloat16_within_its_rounding_error(config: ViTConfig) -> None:
    params, apply = params_and_apply(config, vit_jax.Execution(dtype=jnp.float32))
    bfloat16_params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    exact = apply({"params": bfloat16_params}, jnp.asarray(random_images(config), jnp.bfloat16))
    rounded = run(config, vit_jax.Execution(dtype=jnp.bfloat16))
    assert rounded.dtype == jnp.bfloat16
    assert jnp.linalg.norm(rounded - exact) < 10 * 2**-9 * jnp.linalg.norm(exact)  # ten rounding errors


def loss_gradient(execution: vit_jax.Execution) -> Any:
    """Return the function of parameters of RICH that computes the gradient of a loss."""
    model = vit_jax.ViT(RICH, execution)
    return jax.jit(jax.grad(lambda p: jnp.square(model.apply({"params": p}, random_images(RICH))).sum()))


def float64_params() -> Any:
    """Return the parameters of RICH in float64."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), cached_params(RICH))


@cache
def cpu_gradients(execution: vit_jax.Execution) -> list[Any]:
    """Return the gradients by `loss_gradient` in float64, of the program for the CPU."""
    with jax.enable_x64(True):
        return jax.tree.leaves(loss_gradient(execution)(float64_params()))


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
def test_execution_options_do_not_change_the_gradients(execution: vit_jax.Execution) -> None:
    for one, two in zip(cpu_gradients(vit_jax.Execution()), cpu_gradients(execution), strict=True):
        assert np.linalg.norm(one - two) <= 1e-12 * np.linalg.norm(one)


@pytest.mark.parametrize(
    ("capability", "supported"),
    [("9.0", True), ("8.0", True), ("12.1", True), ("7.5", False), ("gfx942", False), (None, False)],
)
def test_the_fused_kernel_is_supported_from_compute_capability_8_on(capability: str | None, supported: bool) -> None:
    device: Any = SimpleNamespace() if capability is None else SimpleNamespace(compute_capability=capability)
    assert supports_cudnn_attention(device) is supported


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace jax's local devices by a stand-in for a GPU."""
    gpu, find = SimpleNamespace(platform="gpu", compute_capability="9.0"), jax.local_devices
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: find(backend=backend) if backend else [gpu])


@pytest.mark.usefixtures("fake_gpu")
def test_on_a_machine_with_a_gpu_the_cpu_can_run_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    platforms: list[str] = []
    monkeypatch.setattr(
        "vit_jax.attention.supports_cudnn_attention", lambda device: bool(platforms.append(device.platform))
    )
    model, params = vit_jax.ViT(PLAIN, vit_jax.Execution(dtype=jnp.bfloat16)), cached_params(PLAIN)
    for place in (None, "cpu", jax.devices("cpu")[0]):
        with jax.default_device(place):
            jax.eval_shape(lambda: model.apply({"params": params}, random_images(PLAIN)))
    assert list(dict.fromkeys(platforms)) == ["gpu", "cpu"]


@pytest.mark.usefixtures("fake_gpu")
@pytest.mark.parametrize(("version", "constrained"), [((0, 10, 2), False), ((0, 11, 2), True)])
def test_the_layout_of_tokens_is_constrained_on_gpus_from_jax_0_11_on(
    version: tuple[int, ...], constrained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "__version_info__", version)
    apply = jax.jit(lambda x: vit_jax.ViT(PLAIN).apply({"params": cached_params(PLAIN)}, x))
    assert ("LayoutConstraint" in apply.lower(random_images(PLAIN)).as_text()) is constrained


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_the_program_for_gpus_has_a_loop_only_with_remat_and_computes_the_same_gradients(
    remat: Any, request: pytest.FixtureRequest
) -> None:
    execution = vit_jax.Execution(remat=remat)
    plain = cpu_gradients(execution)
    request.getfixturevalue("fake_gpu")
    with jax.enable_x64(True):
        params = float64_params()
        program = loss_gradient(execution).lower(params)
        assert ("stablehlo.while" in program.as_text()) is (remat != "none")
        assert "optimization_barrier" in program.as_text()
        for one, two in zip(plain, jax.tree.leaves(program.compile()(params)), strict=True):
            assert np.linalg.norm(one - two) <= 1e-12 * np.linalg.norm(one)


@pytest.mark.usefixtures("fake_gpu")
@pytest.mark.parametrize("unroll", [None, 1])
def test_a_block_on_a_gpu_stores_two_arrays_of_the_mlp_and_four_of_the_width(unroll: int | None) -> None:
    """Those are the product of fc1 and the activation; both norms and their inputs."""
    config = PLAIN
    model = vit_jax.ViT(config, vit_jax.Execution(dtype=jnp.bfloat16, attention="explicit", unroll=unroll))
    params, images = cached_params(config), random_images(config)
    pullback = jax.eval_shape(lambda p: jax.vjp(lambda p: model.apply({"params": p}, images), p)[1], params)
    block = (config.depth, len(images), config.num_tokens)
    stored = [leaf for leaf in jax.tree.leaves(pullback) if leaf.shape[:3] == block and leaf.shape[3:] != (1,)]  # no means
    assert Counter(leaf.shape[3:] for leaf in stored) == {(config.mlp_dim,): 2, (config.width,): 4}
    assert {leaf.dtype for leaf in stored} == {jnp.dtype(jnp.bfloat16)}
    weights = (config.depth, len(images), config.num_heads, config.num_tokens, config.num_tokens)
    assert [leaf.shape for leaf in jax.tree.leaves(pullback)].count(weights) == 1


def test_a_block_on_a_gpu_stores_the_results_of_the_fused_attention_kernel() -> None:
    """jax has no public name of the operation.  With another one, the kernel would run again in the backward pass."""
    kernel = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    assert is_stored(kernel._dot_product_attention_fwd_p_wrapper)


@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("centre", [True, False], ids=["layer", "rms"])
def test_norms_have_second_derivatives_and_those_along_a_direction(
    centre: bool, on_gpu: bool, request: pytest.FixtureRequest
) -> None:
    def plain(x: Any) -> Any:
        y = x - x.mean(-1, keepdims=True) if centre else x
        return y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + 1e-2)

    if on_gpu:
        request.getfixturevalue("fake_gpu")
    with jax.enable_x64(True):
        x, direction = np.random.default_rng(0).normal(2, 1, (2, 3, 6))
        for derive in (
            lambda f: jax.jvp(f, (x,), (direction,))[1],
            lambda f: jax.hessian(lambda x: jnp.sin(f(x)).sum())(x),
        ):
            functions = plain, lambda x: layers._standardize(x, 1e-2, centre, (-1,))
            expected, found = jax.jit(lambda derive=derive, functions=functions: [derive(each) for each in functions])()
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "quick_gelu", "silu", "mish"])
def test_activation_functions_round_once_in_half_precision(kind: str) -> None:
    x = jnp.linspace(-6, 6, 1001, dtype=jnp.bfloat16)
    value, slope = jax.vmap(jax.value_and_grad(lambda x: layers.activation(x, kind)))(x)
    exact, exact_slope = jax.vmap(jax.value_and_grad(lambda x: layers.activation(x, kind)))(x.astype(jnp.float32))
    for rounded, wide in ((value, exact), (slope, exact_slope)):
        np.testing.assert_allclose(np.float32(rounded), wide, rtol=2**-8, atol=1e-30)  # half a unit in the last place


@pytest.mark.parametrize("side", [16, 24], ids=["5 tokens", "10 tokens"])
def test_attention_with_the_arguments_of_the_fused_kernel_is_the_same_function(
    side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is replaced by jax's own attention, which has the same arguments and runs everywhere."""
    config = RICH.replace(image_size=(side, side), patch_size=8, tokens={"registers": 0})
    calls = []

    def attention_anywhere(*arguments: Any, implementation: str, **options: Any) -> Any:
        calls.append((implementation, arguments[0].shape[1]))
        return dot_product_attention(*arguments, implementation="xla", **options)

    def gradient(kind: Any, params: Any) -> Any:
        model = vit_jax.ViT(config, vit_jax.Execution(attention=kind))
        return jax.jit(jax.grad(lambda p: jnp.square(model.apply({"params": p}, random_images(config))).sum()))(params)

    dot_product_attention = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", attention_anywhere)
    with jax.enable_x64(True):
        noise = np.random.default_rng(0)  # large enough that no gradient is nearly zero
        initial = cached_params(config.replace(image_size=(16, 16)))  # positions are rotary: no shape depends on the size
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf + noise.normal(0, 0.3, leaf.shape)), initial)
        explicit, fused = gradient("explicit", params), gradient("cudnn", params)
    assert set(calls) == {("cudnn", 6 if side == 16 else 10)}  # even numbers of tokens; attention pooling does not use it
    for one, two in zip(jax.tree.leaves(explicit), jax.tree.leaves(fused), strict=True):
        assert np.linalg.norm(one - two) <= 10 * 2**-24 * np.linalg.norm(one)  # jax's own attention has scores in float32


@pytest.mark.parametrize("name", ["vit_s16", "vit_h14", "siglip_so400m14", "dinov2_s14_reg4"])
def test_a_training_step_with_the_fused_kernel_lowers_for_cuda(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowering raises the errors of jax for 197, 257, 256 and 1,374 tokens and head dimensions of 64, 80 and 72."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)
    config = vit_spec.get(name, depth=2, width=vit_spec.get(name).head_dim * 2, num_heads=2, mlp_dim=16)
    model = vit_jax.ViT(config, vit_jax.Execution(dtype=jnp.bfloat16, attention="cudnn"))
    images = jax.ShapeDtypeStruct((2, *config.image_size, config.in_channels), jnp.float32)
    step = jax.jit(jax.grad(lambda p, x: model.apply({"params": p}, x).astype(jnp.float32).sum()))
    program = step.trace(jax.eval_shape(lambda: vit_jax.init(config)), images).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmhaSoftmaxBackward" in program


def test_attention_dropout_with_the_fused_kernel_is_refused() -> None:
    config = PLAIN.replace(regularisation={"attn_drop": 0.5})
    with pytest.raises(InputError, match="cudnn"):
        run(config, vit_jax.Execution(attention="cudnn"), train=True, rngs={"dropout": jax.random.key(0)})


def test_relative_positions_with_the_fused_kernel_are_refused() -> None:
    config = PLAIN.replace(positions={"relative": "table"})
    apply, params = vit_jax.ViT(config, vit_jax.Execution(attention="cudnn")).apply, lambda: vit_jax.init(config)
    with pytest.raises(InputError, match='attention="cudnn" has no relative positions'):
        jax.eval_shape(apply, {"params": jax.eval_shape(params)}, random_images(config))


def test_the_compiled_program_does_not_grow_with_depth() -> None:
    def instructions(depth: int) -> int:
        config = replace(PLAIN, depth=depth)
        params = jax.eval_shape(lambda: vit_jax.init(config))
        apply = jax.jit(lambda p, x: vit_jax.ViT(config).apply({"params": p}, x))
        return len(apply.lower(params, random_images(config)).as_text().splitlines())

    assert instructions(24) <= instructions(3) + 2


def test_the_model_runs_through_the_nnx_bridge() -> None:
    images = random_images(RICH)
    model = nnx.jit(lambda: nnx.bridge.ToNNX(vit_jax.ViT(RICH), rngs=nnx.Rngs(params=0)).lazy_init(images))()
    params = jax.tree.map(lambda leaf: leaf, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    expected = jax.jit(vit_jax.ViT(RICH).apply)({"params": params}, images)
    np.testing.assert_array_equal(nnx.jit(lambda model, images: model(images))(model, images), expected)
    gradient = nnx.jit(nnx.grad(lambda m: jnp.square(m(images)).sum()))(model)
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradient["blocks"]["attn"]["qkv"]))


@pytest.mark.parametrize("config", [RICH, TABLE, SHARED_MLP], ids=["rotary", "table", "shared mlp"])
def test_attention_maps_are_the_weights_of_the_heads(config: ViTConfig) -> None:
    rng, model, shapes = np.random.default_rng(0), vit_jax.ViT(config), jax.eval_shape(lambda: vit_jax.init(config))
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: jnp.asarray(0.5 * rng.standard_normal(leaf.shape)), shapes)
        x = random_images(config).astype(np.float64)
        (_, found), maps = jax.jit(
            lambda *given: (vit_jax.intermediates(model, *given), vit_jax.attention_maps(model, *given))
        )(params, x)
        heads = jnp.einsum("bhts,bshd->bthd", maps, found["blocks.1.attn.v"])
        np.testing.assert_allclose(heads, found["blocks.1.attn.heads"], rtol=1e-12, atol=1e-14)
    assert maps.shape == (2, config.num_heads, config.num_tokens, config.num_tokens)


@pytest.mark.parametrize("config", [PLAIN, RICH, TABLE, SHARED_TABLE], ids=["learned", "rotary", "table", "shared table"])
def test_a_program_may_have_numpy_parameters_as_constants(config: ViTConfig) -> None:
    shapes, images = jax.eval_shape(lambda: vit_jax.init(config)), random_images(config)
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), shapes)
    logits = jax.eval_shape(lambda x: vit_jax.ViT(config).apply({"params": params}, x), images)
    assert logits.shape == (2, config.num_classes)


@pytest.mark.parametrize("config", [PLAIN, RICH], ids=["learned", "rotary"])
def test_a_model_is_exported_for_any_batch_but_one_image_size(config: ViTConfig) -> None:
    model, params, x = vit_jax.ViT(config), vit_jax.init(config), random_images(config)
    (height, width), batch, side = config.image_size, *jax.export.symbolic_shape("batch, side")

    def program(*shape: Any) -> Any:
        images = jax.ShapeDtypeStruct((*shape, config.in_channels), x.dtype)
        return jax.export.export(jax.jit(partial(model.apply, {"params": params})))(images)

    logits = program(batch, height, width).call(x)
    np.testing.assert_allclose(logits, model.apply({"params": params}, x), rtol=0, atol=1e-5)
    for size in ((side, width), (height, side)):
        with pytest.raises(InputError, match="is symbolic: export at one image size; only the batch may be dynamic"):
            program(batch, *size)


def test_fed_values_that_replace_nothing_are_refused() -> None:
    def trace(fed: Any) -> Any:
        return vit_jax.intermediates(vit_jax.ViT(PLAIN), vit_jax.init(PLAIN), random_images(PLAIN), fed)

    messages = {
        ("norms", "poll"): r"^fed names 'norms', 'poll', which .*; did you mean 'norm'\?",
        ("blocks.0.sum",): r"^fed names 'blocks\.0\.sum', but not the same of all 2 blocks: feed all or none",
        ("blocks.0.attn.weights", "blocks.1.attn.weights"): "^fed names 'weights', which no later operation reads: ",
    }
    for names, message in messages.items():
        with pytest.raises(InputError, match=message):
            jax.eval_shape(trace, dict.fromkeys(names, jnp.zeros(1)))


def test_both_twins_have_the_same_intermediates() -> None:
    torch, vit_torch = pytest.importorskip("torch"), pytest.importorskip("vit_torch")
    model, params = vit_jax.ViT(RICH), cached_params(RICH)
    _, in_jax = jax.eval_shape(partial(vit_jax.intermediates, model), params, random_images(RICH))
    explicit = vit_torch.ViT(RICH, vit_torch.Execution(attention="explicit")).eval()
    _, in_torch = vit_torch.intermediates(explicit, torch.tensor(random_images(RICH)).permute(0, 3, 1, 2))
    assert {name: value.shape for name, value in in_jax.items()} == {k: tuple(v.shape) for k, v in in_torch.items()}


INVALID_IMAGES = {
    "a single image": (lambda x: x[0], "a single image is images[None]"),
    "channels first": (lambda x: x.transpose(0, 3, 1, 2), "use images.transpose(0, 2, 3, 1)"),
    "another number of channels": (lambda x: x[..., :2], "with 3 channels"),
    "uint8": (lambda x: x.astype(np.uint8), "normalize them first"),
    "a size that is not a multiple of the patch size": (lambda x: x[:, :, :-1], "resize images to 32x48"),
}


@pytest.mark.parametrize("what", INVALID_IMAGES)
def test_the_error_for_invalid_images_is_one_line(what: str) -> None:
    change, message = INVALID_IMAGES[what]
    with pytest.raises(InputError) as error:
        vit_jax.ViT(PLAIN).apply({"params": cached_params(PLAIN)}, change(random_images(PLAIN)))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_parameters_of_another_shape_are_refused_with_their_path() -> None:
    params = jax.eval_shape(lambda: vit_jax.init(PLAIN.replace(mlp_dim=25)))
    message = r'"kernel" in "/blocks/mlp/fc1", .* shape \(16, 24\), .* shape \(16, 25\)'
    with pytest.raises(ScopeParamShapeError, match=message):
        jax.eval_shape(vit_jax.ViT(PLAIN).apply, {"params": params}, random_images(PLAIN))


def test_images_of_numpy_in_float64_are_taken_in_the_dtype_of_jax_without_a_warning() -> None:
    images = random_images(PLAIN)
    model, variables = vit_jax.ViT(PLAIN), {"params": cached_params(PLAIN)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logits = model.apply(variables, images.astype(np.float64))
    np.testing.assert_array_equal(logits, model.apply(variables, images))


def test_images_on_explicit_mesh_axes_need_auto_axes() -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
    images = jax.device_put(random_images(PLAIN), NamedSharding(mesh, PartitionSpec("data")))
    apply, variables = jax.jit(vit_jax.ViT(PLAIN).apply), {"params": cached_params(PLAIN)}
    with pytest.raises(InputError, match=r"explicit mesh axis 'data'.* call jax.sharding.auto_axes\(model.apply, "):
        apply(variables, images)
    automatic = jax.sharding.auto_axes(apply, out_sharding=NamedSharding(mesh, PartitionSpec("data")))
    for logits in (automatic(variables, images), jax.jit(automatic)(variables, images)):
        np.testing.assert_allclose(logits, apply(variables, random_images(PLAIN)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("train", [False, True])
def test_a_batch_without_images_gives_no_logits(train: bool) -> None:
    logits = vit_jax.ViT(PLAIN).apply({"params": cached_params(PLAIN)}, random_images(PLAIN)[:0], train=train)
    assert logits.shape == (0, PLAIN.num_classes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "fused"}, "execution.attention is 'fused': give one of auto, explicit, cudnn"),
        ({"remat": "Full"}, "execution.remat is 'Full': give one of none, dots, full; did you mean 'full'?"),
        ({"dtype": "int32"}, "execution.dtype is 'int32': give a floating-point dtype of 16 bits"),
        ({"dtype": "float8_e4m3fn"}, "execution.dtype is 'float8_e4m3fn': give a floating-point dtype of 16 bits"),
        ({"dtype": "bf16"}, "execution.dtype is 'bf16': give a floating-point dtype of 16 bits"),
        ({"precision": "higher"}, "execution.precision is 'higher': give a precision of jax.lax.dot, such as 'highest'"),
        ({"unroll": 0}, "execution.unroll is 0: give a positive number of blocks, or None"),
        ({"unroll": -1}, "execution.unroll is -1: give a positive number of blocks, or None"),
        ({"unroll": 1.5}, "execution.unroll is 1.5: give an integer"),
    ],
)
def test_unknown_execution_options_are_refused(options: Any, message: str) -> None:
    with pytest.raises(InputError) as error:
        vit_jax.Execution(**options)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("precision", ["bfloat16_3x", ("high", "default"), "TF32_TF32_F32", jax.lax.Precision.HIGH])
def test_every_kind_of_precision_of_jax_is_accepted(precision: Any) -> None:
    assert vit_jax.Execution(precision=precision).precision == precision


def test_every_named_model_at_full_size_has_the_parameter_count_of_its_rows() -> None:
    counts = {}
    for name in vit_spec.names():
        params = jax.eval_shape(partial(vit_jax.init, vit_spec.get(name)))
        counts[name] = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert counts == {name: vit_spec.count(vit_spec.get(name)) for name in vit_spec.names()}


def test_attention_scores_in_the_billions_give_finite_outputs() -> None:
    pytest.importorskip("torch")  # draws the example
    _, _, config, params, images = draw_example(91)  # weights times 10 to 300, whose scores reach 3e9
    assert np.isfinite(jax.jit(vit_jax.ViT(config).apply)({"params": params}, images)).all()


def test_the_gradient_of_a_norm_is_precise_where_float32_nearly_overflows() -> None:
    x, cotangent = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32)

    def gradient(dtype: Any) -> np.ndarray:
        arrays = [jnp.asarray(each, dtype) for each in (1e13 * x, np.ones(8), np.zeros(8), cotangent)]
        return np.asarray(
            jax.grad(lambda x, scale, bias, y: jnp.vdot(_normalize(x, scale, bias, 1e-6, True, (-1,)), y))(*arrays)
        )

    with jax.enable_x64(True):
        exact = gradient(np.float64)
    assert np.linalg.norm(gradient(np.float32) - exact) <= 1e-5 * np.linalg.norm(exact)
