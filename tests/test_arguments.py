"""Wrong arguments of public functions: each is refused in one line that names the argument and what to give."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")

import parity
import vit_jax
import vit_spec
import vit_torch
from parity import surgery
from parity.checkpoints.reading import build_checkpoint
from tests.twins import small_config
from vit_spec import InputError

CONFIG = small_config(vit_spec.get("vit_s16"))
IMAGES = np.zeros((1, *CONFIG.image_size, 3), np.float32)


def attention_maps(framework: str, block: Any) -> object:
    if framework == "jax":
        return vit_jax.attention_maps(vit_jax.ViT(CONFIG), vit_jax.init(CONFIG), IMAGES, block)
    return vit_torch.attention_maps(vit_torch.ViT(CONFIG), torch.tensor(IMAGES).permute(0, 3, 1, 2), block)


@pytest.mark.parametrize(
    ("make", "execution", "message"),
    [
        (vit_jax.ViT, vit_torch.Execution(), "execution is a vit_torch.Execution: give a vit_jax.Execution"),
        (vit_torch.ViT, vit_jax.Execution(), "execution is a vit_jax.Execution: give a vit_torch.Execution"),
        (vit_jax.ViT, None, "execution is None: give a vit_jax.Execution"),
        (vit_torch.ViT, "float16", "execution is 'float16': give a vit_torch.Execution"),
    ],
    ids=["of torch", "of jax", "None", "a dtype"],
)
def test_execution_options_of_another_class_are_refused(make: Any, execution: Any, message: str) -> None:
    with pytest.raises(InputError) as error:
        make(CONFIG, execution)
    assert str(error.value) == message


@pytest.mark.parametrize("make", [vit_jax.ViT, vit_torch.ViT], ids=["jax", "torch"])
def test_a_model_of_anything_but_a_config_is_refused(make: Callable[[Any], object]) -> None:
    for config, message in {
        "vit_ti16": "config is 'vit_ti16': give a vit_spec.ViTConfig, such as vit_spec.get('vit_ti16')",
        CONFIG.norms: "config is a vit_spec.Norms: give a vit_spec.ViTConfig, such as vit_spec.get('vit_b16')",
    }.items():
        with pytest.raises(InputError) as error:
            make(config)
        assert str(error.value) == message


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, "0", None, True])
def test_a_seed_that_is_no_integer_of_64_bits_is_refused(seed: Any) -> None:
    for use in (partial(vit_jax.init, CONFIG), vit_torch.random_key):
        with pytest.raises(InputError) as error:
            use(seed)
        assert str(error.value) == f"seed is {seed!r}: give an integer from 0 up to 2^64 - 1"


@pytest.mark.parametrize(
    ("seed", "what"),
    [
        (jax.numpy.array([1, 2]), r"int32, \(2,\)"),
        (np.array(1.5), r"float64, \(\)"),
        (jax.numpy.array(True), r"bool, \(\)"),
        (jax.random.split(jax.random.key(0)), r"key<fry>, \(2,\)"),
        (jax.random.PRNGKey(0, impl="rbg"), r"uint32, \(4,\)"),
    ],
)
def test_an_array_that_is_no_seed_and_no_key_is_refused(seed: Any, what: str) -> None:
    with pytest.raises(InputError, match=f"seed is an array of {what}: give an integer, a scalar integer array, or a key"):
        vit_jax.init(CONFIG, seed)


def test_an_array_or_a_key_gives_the_parameters_of_its_seed() -> None:
    config = vit_spec.get("vit_ti16", image_size=8, patch_size=8, width=8, depth=1, num_heads=1, mlp_dim=8, num_classes=0)
    seeds = (7, np.array(7), jax.numpy.array(7), jax.random.key(7), jax.random.PRNGKey(7))

    @jax.jit  # one program, which computes only these kernels
    def kernels() -> list[Any]:
        return [vit_jax.init(config, seed)["patch_embed"]["proj"]["kernel"] for seed in seeds]

    first, *others = map(np.asarray, kernels())
    assert first.any() and all(np.array_equal(other, first) for other in others)


def test_unstacked_refuses_parameters() -> None:
    with pytest.raises(InputError) as error:
        vit_jax.unstacked({"blocks": {"attn": {}}})
    assert str(error.value) == (
        "'blocks' is a dict: give arrays by name, as vit_jax.intermediates(..., stacked=True) returns them"
    )


NO_CONFIG = "config is 'vit_ti16': give a vit_spec.ViTConfig, such as vit_spec.get('vit_ti16')"
NO_MODEL = "model is a vit_spec.ViTConfig: give a vit_jax.ViT"
NO_PIXELS = "pixels are None: give a vit_spec.Pixels, such as config.pixels"


WRONG_CALLS: dict[str, tuple[Any, str]] = {
    "rows": (lambda: vit_spec.rows("vit_ti16"), NO_CONFIG),
    "rows of no hashable value": (
        lambda: vit_spec.rows({}),
        "config is a dict: give a vit_spec.ViTConfig, such as vit_spec.get('vit_b16')",
    ),
    "count": (lambda: vit_spec.count("vit_ti16"), NO_CONFIG),
    "flops": (lambda: vit_spec.flops("vit_ti16"), NO_CONFIG),
    "memory": (lambda: vit_spec.memory("vit_ti16"), NO_CONFIG),
    "init": (lambda: vit_jax.init("vit_ti16"), NO_CONFIG),
    "nnx": (lambda: vit_jax.nnx("vit_ti16", {}), NO_CONFIG),
    "compiler_options": (lambda: vit_jax.compiler_options("vit_ti16", 2), NO_CONFIG),
    "to_jax": (lambda: parity.to_jax({}, "vit_ti16"), NO_CONFIG),
    "to_torch of variables": (
        lambda: parity.to_torch({"params": vit_jax.init(CONFIG)}, CONFIG),
        "weights have the key 'params', as variables of vit_jax: give variables['params']",
    ),
    "to_torch of a state dict": (
        lambda: parity.to_torch(vit_torch.ViT(CONFIG).state_dict(), CONFIG),
        "weights are a state dict of PyTorch, not parameters of vit_jax: parity.to_jax(weights, config) converts them",
    ),
    "to_jax of parameters": (
        lambda: parity.to_jax(vit_jax.init(CONFIG), CONFIG),
        "weights are parameters of vit_jax, not a state dict of PyTorch: parity.to_torch(weights, config) converts them",
    ),
    "compare": (lambda: parity.compare("vit_ti16", {}), NO_CONFIG),
    "compile_forward": (lambda: vit_jax.compile_forward(CONFIG, {}, 1), NO_MODEL),
    "intermediates": (lambda: vit_jax.intermediates(CONFIG, {}, IMAGES), NO_MODEL),
    "attention_maps": (lambda: vit_jax.attention_maps(CONFIG, {}, IMAGES), NO_MODEL),
    **{
        f"block={block!r} of attention_maps in {name}": (
            partial(attention_maps, name, block),
            f"block is {block!r}: give an integer from {-CONFIG.depth} to {CONFIG.depth - 1}",
        )
        for name in ("jax", "torch")
        for block in (CONFIG.depth, -CONFIG.depth - 1, 0.0)
    },
    **{
        f"outputs={outputs!r} of select_outputs": (
            partial(surgery.select_outputs, parity.Checkpoint(CONFIG, "torch", {}), outputs),
            f"outputs are {outputs!r}: give different numbers from 0 to {CONFIG.num_classes - 1}",
        )
        for outputs in ([0.0, 1.0], ["a"], [True, False], "01", [], [0, 0], [CONFIG.num_classes], [[0]], 1)
    },
    **{
        f"image_size={size!r} of load in {name}": (
            partial(load, "nowhere.pth", image_size=size),
            f"image_size is {size!r}: give 2 numbers, such as (224, 224)",
        )
        for name, load in (("jax", vit_jax.load), ("torch", vit_torch.load))
        for size in (64.0, "64")
    },
    "image size": (lambda: vit_spec.memory(CONFIG, "1"), "image_size is '1': give 2 numbers, such as (224, 224)"),
    "batch size": (lambda: vit_jax.compiler_options(CONFIG, "2"), "batch_size is '2': give an integer"),
    "negative": (lambda: vit_jax.compiler_options(CONFIG, -5), "batch_size is -5: give a number of images"),
    "images in jax": (
        lambda: vit_jax.layers.check_images(IMAGES.tolist(), CONFIG),
        "images are a list: give a jax.Array or numpy.ndarray",
    ),
    "images in torch": (lambda: vit_torch.ViT(CONFIG)(None), "images are None: give a torch.Tensor"),
    "pixels in jax": (lambda: vit_jax.normalize(IMAGES, None), NO_PIXELS),
    "pixels in torch": (lambda: vit_torch.normalize(torch.tensor(IMAGES), None), NO_PIXELS),
    "array": (
        lambda: vit_torch.normalize(IMAGES, CONFIG.pixels),
        "images are a numpy.ndarray: give a torch.Tensor",
    ),
    "channel_dim": (
        lambda: vit_torch.normalize(torch.zeros(4, 4), CONFIG.pixels),
        "images have the shape (4, 4), without the dimension channel_dim=-3: give another one",
    ),
    "scalar image": (
        lambda: vit_jax.normalize(1.0, CONFIG.pixels),
        "images are a scalar: give an array of the shape (..., H, W, C)",
    ),
    **{
        f"config of {make.__name__}": (partial(make, "vit_ti16", (4, 4)), NO_CONFIG)
        for make in (
            vit_spec.position_table,
            vit_spec.rotary_tables,
            vit_spec.relative_tables,
            vit_spec.resampling_matrices,
        )
    },
    "grid of fractions": (lambda: vit_spec.resampling_matrices(CONFIG, (2.5, 3)), "grid is 2.5: give an integer"),
    "grid without rows": (
        lambda: vit_spec.relative_tables(CONFIG, (0, 3)),
        "grid is (0, 3): give positive numbers of rows and columns",
    ),
    "table that is not computed": (
        lambda: vit_spec.position_table(CONFIG, (4, 4)),
        "positions.table is 'normal(0.02)': only sincos_1d, sincos_2d_big_vision, sincos_2d_mae, sincos_2d_timm are "
        "computed tables",
    ),
    "no rotary embedding": (
        lambda: vit_spec.rotary_tables(CONFIG, (4, 4)),
        "positions.rotary is 'none': give a config with a rotary embedding, such as 'axial'",
    ),
    "path as a checkpoint": (
        lambda: parity.write("a.safetensors", "b.safetensors", "torch"),
        "checkpoint is 'a.safetensors': give a parity.Checkpoint, such as parity.load(path)",
    ),
    "path": (lambda: parity.load(b"runs/tiny"), "path is a bytes: give a str or os.PathLike"),
    "head": (lambda: parity.surgery.new_head(None, "x"), "num_classes is 'x': give an integer"),
    "given": (
        lambda: build_checkpoint(None, {}, None, "norms.eps=1", None, ()),
        "given is 'norms.eps=1': give values by field name, such as {'norms.eps': 1e-5}",
    ),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_wrong_argument_is_named_with_what_to_give(name: str) -> None:
    call, message = WRONG_CALLS[name]
    with pytest.raises(InputError) as error:
        call()
    assert str(error.value) == message


def test_a_format_that_is_no_name_is_refused_with_the_names() -> None:
    with pytest.raises(InputError, match=r"^unknown format 'None': give one of timm, "):
        parity.checkpoints.formats.get(None)  # type: ignore[arg-type]
