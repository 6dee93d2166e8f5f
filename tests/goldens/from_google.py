"""Golden files of Google's original code, which is written in JAX, from clones."""

import functools
import importlib
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np

from tests.goldens.golden import Array, Golden, noise
from tests.goldens.peers import at_commit, case, clone, random_parameter, rng_for, tiny_config
from vit_spec import ViTConfig

Params = dict[str, Any]


def flax_golden(
    name: str,
    model: Any,
    config: ViTConfig,
    run: Callable[[Any, Params, Any], dict[str, Any]],
    *,
    peer: str,
    size: tuple[int, int] | None = None,
    positions: Callable[[Array], Array] = lambda table: table,
) -> Golden:
    """Fill one of Google's models with noise, run it in float64, and return its golden file.

    size: height and width of the images; by default the config's.
    positions: a function that is applied to the position table before it is given to the model.
    """
    with jax.enable_x64(True):
        rng, example = rng_for(name), jnp.zeros((1, *config.image_size, config.in_channels))
        shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), example, train=False))["params"]
        params: Params = {}
        for path, like in jax.tree_util.tree_leaves_with_path(shapes):
            key = "/".join(entry.key for entry in path)
            params[key] = random_google_parameter(rng, key, like.shape)
        images = noise(rng, (2, config.in_channels, *(size or config.image_size)), 1.0)

        given = {key: positions(value) if key.endswith("pos_embedding") else value for key, value in params.items()}
        found = run(model, unflatten(given), images.transpose(0, 2, 3, 1))
        outputs = {key: np.asarray(value) for key, value in found.items()}
    about = {"peer": peer, "class": f"{type(model).__module__}.{type(model).__qualname__}"}
    about |= {"jax": jax.__version__, "flax": flax.__version__}
    return Golden(config, google_names(config, params), images, outputs, about)


def random_google_parameter(rng: np.random.Generator, key: str, shape: tuple[int, ...]) -> Array:
    """Return noise for one parameter, whose shape has Flax's order of axes.

    The inputs of a kernel are all axes except the last; for query, key and value, they are the first axis only.
    """
    if key.endswith("kernel"):
        inputs = shape[0] if key.split("/")[-2] in ("query", "key", "value") else int(np.prod(shape[:-1]))
        return noise(rng, shape, 1.2 * inputs**-0.5)
    return random_parameter(rng, key, shape)


def unflatten(flat: Params) -> Params:
    """Return the nested dictionary for keys like "Transformer/encoder_norm/scale"."""
    tree: Params = {}
    for key, value in flat.items():
        *parents, leaf = key.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


def google_names(config: ViTConfig, params: Params) -> dict[str, Array]:
    """Return Google's parameters under the names of the PyTorch twin.

    Google's kernels have their inputs first and a separate axis for heads.
    """
    inner = config.num_heads * config.head_dim
    result: dict[str, Array] = {}

    def linear(ours: str, theirs: str) -> None:
        result[f"{ours}.weight"] = params[f"{theirs}/kernel"].T
        result[f"{ours}.bias"] = params[f"{theirs}/bias"]

    def norm(ours: str, theirs: str) -> None:
        result[f"{ours}.weight"], result[f"{ours}.bias"] = params[f"{theirs}/scale"], params[f"{theirs}/bias"]

    def merged_projections(ours: str, theirs: str, parts: tuple[str, ...]) -> None:
        kernels = [params[f"{theirs}/{part}/kernel"].reshape(config.width, inner).T for part in parts]
        result[f"{ours}.weight"] = np.concatenate(kernels)
        result[f"{ours}.bias"] = np.concatenate([params[f"{theirs}/{part}/bias"].reshape(inner) for part in parts])

    def attention(ours: str, theirs: str) -> None:
        result[f"{ours}.proj.weight"] = params[f"{theirs}/out/kernel"].reshape(inner, config.width).T
        result[f"{ours}.proj.bias"] = params[f"{theirs}/out/bias"]

    result["patch_embed.proj.weight"] = params["embedding/kernel"].transpose(3, 2, 0, 1)
    result["patch_embed.proj.bias"] = params["embedding/bias"]
    if "cls" in params:
        result["cls_token"] = params["cls"]
    for key, value in params.items():
        if key.endswith("pos_embedding"):
            result["pos_embed"] = value
    for i in range(config.depth):
        ours, theirs = f"blocks.{i}", f"Transformer/encoderblock_{i}"
        old = f"{theirs}/MlpBlock_3/Dense_0/kernel" in params  # vision_transformer has one counter per block
        attn, mlp, second = ("_1", "_3", "_2") if old else ("_0", "_0", "_1")
        norm(f"{ours}.norm1", f"{theirs}/LayerNorm_0")
        merged_projections(f"{ours}.attn.qkv", f"{theirs}/MultiHeadDotProductAttention{attn}", ("query", "key", "value"))
        attention(f"{ours}.attn", f"{theirs}/MultiHeadDotProductAttention{attn}")
        norm(f"{ours}.norm2", f"{theirs}/LayerNorm{second}")
        linear(f"{ours}.mlp.fc1", f"{theirs}/MlpBlock{mlp}/Dense_0")
        linear(f"{ours}.mlp.fc2", f"{theirs}/MlpBlock{mlp}/Dense_1")
    norm("norm", "Transformer/encoder_norm")
    if "MAPHead_0/probe" in params:
        result["attn_pool.latent"] = params["MAPHead_0/probe"]
        merged_projections("attn_pool.q", "MAPHead_0/MultiHeadDotProductAttention_0", ("query",))
        merged_projections("attn_pool.kv", "MAPHead_0/MultiHeadDotProductAttention_0", ("key", "value"))
        attention("attn_pool", "MAPHead_0/MultiHeadDotProductAttention_0")
        norm("attn_pool.norm", "MAPHead_0/LayerNorm_0")
        linear("attn_pool.mlp.fc1", "MAPHead_0/MlpBlock_0/Dense_0")
        linear("attn_pool.mlp.fc2", "MAPHead_0/MlpBlock_0/Dense_1")
    for name in ("pre_logits", "head"):
        if f"{name}/kernel" in params:
            linear(name, name)
    return result


@case
def google_vit() -> Golden:
    """The model of the paper as it was published: GELU by tanh, and a hidden layer ahead of the classifier."""
    config = tiny_config(mlp={"activation": "gelu_tanh"}, head={"hidden": 9})

    def run(model: Any, params: Params, images: Any) -> dict[str, Any]:
        return {"logits": model.apply({"params": params}, images, train=False)}

    with clone("vision_transformer"):
        models = importlib.import_module("vit_jax.models_vit")
        # Its encoder does not pass the precision on to the blocks.
        models.Encoder1DBlock = functools.partial(models.Encoder1DBlock, dtype=jnp.float64)
        model = models.VisionTransformer(
            num_classes=config.num_classes,
            patches=SimpleNamespace(size=config.patch_size),
            transformer={"num_layers": 2, "num_heads": 3, "mlp_dim": 18, "dropout_rate": 0.0},
            hidden_size=config.width,
            representation_size=9,
        )
        return flax_golden("google_vit", model, config, run, peer=at_commit("google-research/vision_transformer"))


def big_vision(name: str, config: ViTConfig, size: tuple[int, int] | None = None, **options: Any) -> Golden:
    """Return the golden file of big_vision's model; `options` are arguments of its class."""

    def run(model: Any, params: Params, images: Any) -> dict[str, Any]:
        logits, found = model.apply({"params": params}, images)
        return {"logits": logits, "norm": found["encoded"]}

    with clone("big_vision"):
        sys.modules["big_vision.utils"] = ModuleType("big_vision.utils")  # the real one loads files and imports TensorFlow
        try:
            package = importlib.import_module("big_vision")
            package.utils = sys.modules["big_vision.utils"]  # type: ignore[attr-defined]
            models = importlib.import_module("big_vision.models.vit")
        finally:
            del sys.modules["big_vision.utils"]
        # The pooling head leaves its MLP at the default precision; the blocks pass theirs on.
        models.MlpBlock = functools.partial(models.MlpBlock, dtype_mm="float64")
        model = models._Model(
            num_classes=config.num_classes or None,
            patch_size=config.patch_size,
            width=config.width,
            depth=config.depth,
            mlp_dim=config.mlp_dim,
            num_heads=config.num_heads,
            dtype_mm="float64",
            **options,
        )

        def positions(table: Array) -> Array:
            if size is None:
                return table
            rows, columns = config.grid_of(*size)
            return np.asarray(models.resample_posemb(table, np.zeros((1, rows * columns, config.width))))

        return flax_golden(
            name, model, config, run, peer=at_commit("google-research/big_vision"), size=size, positions=positions
        )


@case
def big_vision_sincos() -> Golden:
    """The better plain ViT: a fixed 2-D table, the mean, and a hidden layer with tanh."""
    config = tiny_config(
        tokens={"class_token": False},
        positions={"kind": "fixed", "table": "sincos_2d_big_vision"},
        mlp={"activation": "gelu_tanh"},
        head={"pool": "mean", "hidden": 12},
    )
    return big_vision("big_vision_sincos", config, posemb="sincos2d", pool_type="gap", rep_size=True)


@case
def big_vision_map() -> Golden:
    """SigLIP's original code: attention pooling, and learned positions resampled to another grid."""
    config = tiny_config(
        image_size=(12, 12),
        num_classes=0,
        tokens={"class_token": False},
        resampling={"kernel": "bilinear", "antialias": False, "align_corners": True},
        mlp={"activation": "gelu_tanh"},
        head={"pool": "attention"},
    )
    return big_vision("big_vision_map", config, size=(20, 20), posemb="learn", pool_type="map")


@case
def big_vision_token() -> Golden:
    """A class token that is prepended after positions were added."""
    config = tiny_config(positions={"covers": "none"}, mlp={"activation": "gelu_tanh"})
    golden = big_vision("big_vision_token", config, posemb="learn", pool_type="tok")
    del golden.outputs["norm"]  # it has the patches alone
    return golden
