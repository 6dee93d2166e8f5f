"""Google's formats: files of vision_transformer, big_vision and scenic give the outputs of Google's modules.

`tests/google_names.py` renames keys without `parity`.  `tests/goldens/from_google.py` ran the original modules.
"""

import re

import ml_dtypes
import numpy as np
import pytest

import parity
from tests.goldens.golden import read
from tests.google_names import google_names
from tests.peers.proof import prove
from vit_spec import InputError, ViTConfig

POSITIONS = {
    "google": "Transformer/posembed_input/pos_embedding",
    "big_vision": "pos_embedding",
    "encoder": "Transformer/pos_embedding",
}
# Name -> golden file, format, key of the positions, and options of `google_names`.
FILES = {
    "pre-linen": ("google_vit", "google:pre-linen", POSITIONS["google"], {"old": True}),
    "linen": ("google_vit", "google:linen", POSITIONS["google"], {}),
    "sincos loop": ("big_vision_sincos", "big_vision:loop", "", {}),
    "sincos scan": ("big_vision_sincos", "big_vision:scan", "", {"scan": True}),
    "map loop": ("big_vision_map", "big_vision:loop", POSITIONS["big_vision"], {}),
    "map scan": ("big_vision_map", "big_vision:scan", POSITIONS["big_vision"], {"scan": True}),
    "token loop": ("big_vision_token", "big_vision:loop", POSITIONS["big_vision"], {}),
    "token scan": ("big_vision_token", "big_vision:scan", POSITIONS["big_vision"], {"scan": True}),
    "positions in the encoder": ("big_vision_map", "big_vision-old:encoder", POSITIONS["encoder"], {}),
}
with_every_file = pytest.mark.parametrize("name", FILES)


def google_file(name):
    """Return the arrays of a file, the golden file that they come from, and the format."""
    golden_name, format, positions, options = FILES[name]
    golden = read(golden_name)
    return google_names(golden.weights, golden.config, positions, **options), golden, format


def save_npz(path, arrays):
    """Save arrays, and return the path."""
    np.savez(path, **arrays)
    return path


def given(golden):
    """Return the fields that the position table does not determine."""
    return {"image_size": golden.config.image_size}


def is_same(a, b):
    """Return whether two dictionaries of arrays have the same keys and bytes."""
    return a.keys() == b.keys() and all(np.asarray(a[key]).tobytes() == np.asarray(b[key]).tobytes() for key in a)


# Outputs --------------------------------------------------------------------------------------------------------------


@with_every_file
def test_both_twins_compute_the_outputs_of_googles_module(name, tmp_path):
    arrays, golden, format = google_file(name)
    path = save_npz(tmp_path / "a.npz", arrays)
    logits = golden.outputs["logits"]
    checkpoint = prove(path, golden.images, logits, format=format, peer=golden.provenance["peer"], given=given(golden))
    assert checkpoint.config.replace(resampling=golden.config.resampling.__dict__) == golden.config.replace(
        positions={"table": checkpoint.config.positions.table}, head={"init": checkpoint.config.head.init}
    )


@with_every_file
def test_conversion_to_the_jax_twin_and_back_preserves_every_bit(name, tmp_path):
    arrays, golden, format = google_file(name)
    path = save_npz(tmp_path / "a.npz", {key: value.astype(ml_dtypes.bfloat16) for key, value in arrays.items()})
    before = parity.load(path, given=given(golden))
    parity.convert(path, tmp_path / "jax.safetensors", "jax", given=given(golden))
    parity.convert(tmp_path / "jax.safetensors", tmp_path / "b.npz", format)
    assert before.arrays.keys() == arrays.keys()
    assert is_same(parity.load(tmp_path / "b.npz").arrays, before.arrays)


# Recognition ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["img/", "opt/target/", "params/img/"])
def test_a_prefix_of_the_weights_is_removed_and_arrays_outside_are_reported(prefix, tmp_path):
    arrays, _, format = google_file("map scan")
    around = {f"{prefix}{key}": value for key, value in arrays.items()}
    beside = {"opt/state/mu/x": np.ones(3), "params/txt/x": np.ones(2), "t": np.ones(1), "b": np.ones(1)}
    checkpoint = parity.load(save_npz(tmp_path / "a.npz", around | beside))
    assert checkpoint.format == format and is_same(checkpoint.arrays, arrays)
    assert checkpoint.left and all("beside the weights" in line for line in checkpoint.left)


def test_arrays_of_dtype_v2_are_read_as_bfloat16(tmp_path):
    arrays, _, format = google_file("map loop")
    halves = {key: value.astype(ml_dtypes.bfloat16) for key, value in arrays.items()}
    checkpoint = parity.load(save_npz(tmp_path / "a.npz", {key: value.view("V2") for key, value in halves.items()}))
    assert checkpoint.format == format and is_same(checkpoint.arrays, halves)


def test_a_position_table_with_a_row_for_the_class_token_is_read_in_the_old_format_of_big_vision(tmp_path):
    config = read("google_vit").config.replace(image_size=(12, 12), head={"hidden": None})
    arrays = {key: value for key, value in google_file("linen")[0].items() if "pre_logits" not in key}
    table = arrays.pop(POSITIONS["google"])[:, :10]
    arrays |= {"pos_embedding": table, "head/kernel": arrays["head/kernel"][[0, *range(9), 1, 2]]}
    checkpoint = parity.load(save_npz(tmp_path / "a.npz", arrays))
    assert checkpoint.format == "big_vision-old:root" and checkpoint.config.positions.covers == "all"
    assert checkpoint.config.image_size == config.image_size


def test_a_pooling_head_at_the_root_is_read(tmp_path):
    arrays, golden, _ = google_file("positions in the encoder")
    arrays = {key.removeprefix("MAPHead_0/"): value for key, value in arrays.items()}
    path = save_npz(tmp_path / "a.npz", arrays)
    prove(
        path,
        golden.images,
        golden.outputs["logits"],
        format="big_vision-old:encoder-inlined",
        peer=golden.provenance["peer"],
    )


def test_a_hybrid_is_refused_with_the_reason(tmp_path):
    arrays, golden, _ = google_file("pre-linen")
    path = save_npz(
        tmp_path / "a.npz", arrays | {"conv_root/kernel": np.ones((7, 7, 3, 4)), "block1/unit1/gn1/scale": np.ones(4)}
    )
    with pytest.raises(InputError, match=r"a ResNet precedes its patches .* hybrid models are not"):
        parity.load(path, given=given(golden))


def test_googles_defaults_are_reported_as_assumptions(tmp_path):
    checkpoint = parity.load(save_npz(tmp_path / "a.npz", google_file("map loop")[0]))
    assumed = {each.field: each.value for each in checkpoint.assumed}
    assert assumed["mlp.activation"] == "gelu_tanh" and assumed["norms.eps"] == 1e-6
    assert assumed["resampling.kernel"] == "bilinear" and assumed["resampling.align_corners"] is True


# Scenic ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("around", [["params"], ["optimizer", "target"]], ids="/".join)
@pytest.mark.parametrize("classifier", ["token", "gap"])
def test_both_twins_compute_the_outputs_of_a_module_with_scenics_names(classifier, around, tmp_path):
    jax, nn = pytest.importorskip("jax"), pytest.importorskip("flax.linen")
    from flax.serialization import msgpack_serialize

    module, rng = scenic(nn, classifier), np.random.default_rng(0)
    images = rng.standard_normal((2, 3, 12, 20))
    with jax.enable_x64(True):
        shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), images.transpose(0, 2, 3, 1)))["params"]
        params = jax.tree.map(lambda like: rng.normal(0, 0.3, like.shape), shapes)
        logits = np.asarray(module.apply({"params": params}, images.transpose(0, 2, 3, 1)))
    tree = {"global_step": np.array(7), around[-1]: params}
    for word in around[:-1]:
        tree = {word: tree}
    (tmp_path / "checkpoint_7.msgpack").write_bytes(msgpack_serialize(tree))
    prove(
        tmp_path / "checkpoint_7.msgpack",
        images,
        logits,
        format="scenic",
        peer="a module of the names in google-research/scenic",
        given={"image_size": (12, 20)},
    )


def scenic(nn, classifier):
    """Return the ViT of scenic's projects/baselines, with its names and its order of operations."""
    import jax.numpy as jnp

    f64 = {"dtype": jnp.float64}

    class MlpBlock(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.gelu(nn.Dense(18, **f64)(x))
            return nn.Dense(12, **f64)(x)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = nn.LayerNorm(**f64)(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=3, **f64)(y, y)
            return x + MlpBlock()(nn.LayerNorm(**f64)(x))

    class Positions(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + self.param("pos_embedding", nn.initializers.zeros, (1, *x.shape[1:]))

    class Encoder(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = Positions(name="posembed_input")(x)
            for i in range(2):
                x = Block(name=f"encoderblock_{i}")(x)
            return nn.LayerNorm(name="encoder_norm", **f64)(x)

    class ViT(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Conv(12, (4, 4), strides=(4, 4), padding="VALID", name="embedding", **f64)(x)
            x = x.reshape(len(x), -1, 12)
            if classifier == "token":
                cls = self.param("cls", nn.initializers.zeros, (1, 1, 12))
                x = jnp.concatenate([jnp.tile(cls, (len(x), 1, 1)), x], axis=1)
            x = Encoder(name="Transformer")(x)
            x = x[:, 0] if classifier == "token" else x.mean(axis=1)
            x = nn.tanh(nn.Dense(9, name="pre_logits", **f64)(x))
            return nn.Dense(5, name="output_projection", **f64)(x)

    return ViT()


# Configs that a format cannot store -----------------------------------------------------------------------------------

TINY = ViTConfig(image_size=12, patch_size=4, width=12, depth=1, num_heads=3, mlp_dim=18, num_classes=5)


@pytest.mark.parametrize(
    ("format", "changes", "what"),
    [
        ("google", {"positions": {"covers": "none"}}, "positions.covers='none'"),
        ("google", {"head": {"pool": "mean"}}, "head.pool='mean'"),
        ("google", {"attention": {"qkv_bias": "none"}}, "attention.qkv_bias='none'"),
        ("google", {"attention": {"head_dim": 8}}, "attention.head_dim=8"),
        ("google", {"mlp": {"activation": "swiglu"}}, "mlp.activation='swiglu'"),
        ("google", {"norms": {"shared_norm": True}}, "norms.shared_norm=True"),
        ("google", {"norms": {"layer_scale": 1.0}}, "no key for blocks.ls1.gamma"),
        ("google", {"tokens": {"registers": 2}}, "no key for reg_token"),
        ("google", {"positions": {"kind": "fixed", "table": "sincos_1d"}}, "positions.kind='fixed'"),
        ("big_vision", {}, "positions.covers='all'"),
        (
            "big_vision",
            {"tokens": {"class_token": False}, "positions": {"kind": "none"}, "head": {"pool": "mean"}},
            "kind='none'",
        ),
        (
            "big_vision",
            {
                "width": 24,
                "tokens": {"class_token": False},
                "positions": {"kind": "fixed", "table": "sincos_2d_mae"},
                "head": {"pool": "mean"},
            },
            "positions.table='sincos_2d_mae'",
        ),
        ("scenic", {"positions": {"rotary": "axial"}}, "positions.rotary='axial'"),
        ("scenic", {"norms": {"after_blocks": False}}, "norms.after_blocks=False"),
    ],
)
def test_a_config_that_the_format_cannot_store_is_refused_by_field(format, changes, what):
    with pytest.raises(InputError, match=re.escape(what)):
        parity.checkpoints.formats.get(format).layouts(TINY.replace(**changes))


def test_an_eps_that_readers_of_the_format_do_not_expect_is_remarked(tmp_path):
    from parity.checkpoints.writing import write

    arrays, golden, _ = google_file("linen")
    checkpoint = parity.load(save_npz(tmp_path / "a.npz", arrays), given={**given(golden), "norms.eps": 1e-5})
    [remark] = write(checkpoint, tmp_path / "b.npz", "google").remarks
    assert remark.startswith("norms.eps=1e-05 is only in our own metadata")
