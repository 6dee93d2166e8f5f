"""State dicts with the names of the five articles are read as the articles' models.

The tests rename keys without `parity`.  The expected outputs are those of literal transcripts of the articles' code
(`tests/goldens/from_articles.py`).
"""

import re
from itertools import product

import numpy as np
import pytest

import parity
import vit_spec
from parity.checkpoints.containers import Contents
from parity.checkpoints.containers.container import StoredArray
from parity.checkpoints.reading import build_checkpoint
from parity.checkpoints.writing import write
from tests.goldens.golden import read
from tests.peers.proof import prove
from vit_spec import InputError

torch = pytest.importorskip("torch")

import vit_torch

# Article -> regular expression of the PyTorch twin's names -> the article's name, applied in order.
NAMES = {
    "article_xray_rope": {
        r"^patch_embed\.proj": "patch_embedding.patch_embed",
        r"^blocks": "transformer_blocks",
        r"mlp\.fc1": "mlp.0",
        r"mlp\.fc2": "mlp.2",
        r"^head": "mlp_head",
    },
    "article_multihead": {
        "^cls_token": "class_embedding",
        "^pos_embed": "position_embedding",
        r"^patch_embed\.proj": "patch_embedding.conv",
        r"^fc_norm": "classifier.0",
        r"^head": "classifier.1",
        r"^blocks": "vit",
        r"\.norm1": ".attention.layer",
        r"\.norm2": ".mlp.norm",
        r"attn\.qkv\.": "attention.attention.in_proj_",
        r"attn\.proj": "attention.attention.out_proj",
        r"mlp\.fc": "mlp.linear",
    },
    "article_sincos": {
        r"^(cls_token|pos_embed)": r"patchemb.\1",
        r"^patch_embed\.proj": "patchemb.projection.0",
        r"^head": "ff",
        r"^blocks": "attention",
        r"norm1": "ll",
        r"mlp\.fc1": "ff.ff.0",
        r"mlp\.fc2": "ff.ff.1",
    },
    "article_rectangular": {
        r"^patch_embed\.proj": "patch_tokens.project",
        r"^(cls_token|blocks|norm|head)": r"backbone.\1",
        r"\.mlp\.": ".neuralnet.",
    },
    "article_dino": {},
}
# Article -> fields of its golden file's config that neither the tensors nor the article's own config determine.
GIVEN = {
    "article_xray_rope": {"image_size": (12, 20), "num_heads": 2},
    "article_multihead": {"image_size": (12, 20), "num_heads": 3},
    "article_sincos": {"image_size": (12, 20)},
    "article_rectangular": {"image_size": (12, 20), "num_heads": 3},
    "article_dino": {"image_size": (12, 20), "num_heads": 3},
}
with_every_article = pytest.mark.parametrize("name", NAMES)


def article_state_dict(name, weights):
    """Return the article's state dict for weights with the twin's names."""
    found = {}
    for key, array in weights.items():
        for pattern, replacement in NAMES[name].items():
            key = re.sub(pattern, replacement, key)
        found[key] = torch.tensor(array)
    if name in ("article_xray_rope", "article_rectangular"):  # patches flattened as channels, rows, columns
        key = "patch_embedding.patch_embed.weight" if "xray" in name else "patch_tokens.project.weight"
        found[key] = found[key].flatten(1)
    if name == "article_sincos":
        found["patchemb.pos_embed"] = found["patchemb.pos_embed"][0]
        for key in [key for key in found if ".attn.qkv." in key]:
            for part, rows in zip(("query", "key", "value"), found.pop(key).chunk(3), strict=True):
                found[key.replace("attn.qkv", f"att.{part}")] = rows.contiguous()
    return found


def save_article(tmp_path, name):
    """Save the state dict of an article's golden file, and return its path."""
    torch.save(article_state_dict(name, read(name).weights), tmp_path / "article.pth")
    return tmp_path / "article.pth"


def load(path, name, given=None):
    """Load an article's file.  The format of DINO's article must be given, because its names are timm's."""
    return parity.load(path, format="article_dino" if name == "article_dino" else None, given=given)


@with_every_article
def test_both_twins_compute_the_outputs_of_the_article(name, tmp_path, monkeypatch):
    golden = read(name)
    if name == "article_dino":
        monkeypatch.setattr(parity, "load", lambda path, given, load=parity.load: load(path, format=name, given=given))
    format = "article_multihead:linear" if name == "article_multihead" else name
    logits = golden.outputs["logits"]
    peer = "its article, transcribed"
    found = prove(save_article(tmp_path, name), golden.images, logits, format=format, peer=peer, given=GIVEN[name])
    assert found.config == golden.config


class ShapeOnly(StoredArray):
    """An array that has a shape but no values."""

    def __init__(self, shape):
        self.shape, self.dtype = shape, np.dtype(np.float32)

    def read(self, start, stop):
        raise AssertionError("the config follows from the shapes")


@with_every_article
def test_a_state_dict_of_the_articles_sizes_has_the_articles_config(name):
    config = vit_spec.get(name)
    layouts, sizes = parity.checkpoints.formats.get(name).layouts(config), config.sizes
    arrays = {(key,): ShapeOnly(layout.shape(sizes)) for layout in layouts.values() for key in layout.keys(sizes)}
    format = name if name == "article_dino" else None
    assert build_checkpoint(Contents("pth", arrays), {}, format, {}).config == config


@with_every_article
def test_conversion_to_the_jax_twin_and_back_preserves_every_bit(name, tmp_path):
    path = save_article(tmp_path, name)
    before = load(path, name, GIVEN[name])
    write(before, tmp_path / "jax.safetensors", "jax")
    parity.convert(tmp_path / "jax.safetensors", tmp_path / "back.pth", name)
    after = torch.load(tmp_path / "back.pth", weights_only=True)
    article = torch.load(path, weights_only=True)
    assert all(torch.equal(after[key], article[key]) for key in article)


@pytest.mark.parametrize("both", [True, False])
def test_the_second_names_of_the_multihead_mlp_are_read_or_reported_as_ignored(both, tmp_path):
    state = article_state_dict("article_multihead", read("article_multihead").weights)
    twice = {key: array for key, array in state.items() if "linear" in key}
    for key, array in twice.items():
        state[key.replace("linear1", "seq.0").replace("linear2", "seq.3")] = array
    if not both:
        state = {key: array for key, array in state.items() if key not in twice}
    state |= {f"vit.{i}.norm.{word}": torch.ones(12) for i in range(2) for word in ("weight", "bias")}
    torch.save(state, tmp_path / "a.pth")
    found = parity.load(tmp_path / "a.pth", given=GIVEN["article_multihead"])
    assert found.format == f"article_multihead:{'linear' if both else 'seq'}"
    assert [line.partition(": ")[2] for line in found.left] == [
        *(["the same array as linear1 or linear2"] if both else []),
        "a norm that the model never calls",
    ]
    weights = {key: value.numpy() for key, value in parity.to_torch(found).items()}
    assert all(np.array_equal(weights[key], array) for key, array in read("article_multihead").weights.items())


def test_second_names_of_the_multihead_mlp_with_other_weights_are_refused(tmp_path):
    state = article_state_dict("article_multihead", read("article_multihead").weights)
    for key in [key for key in state if "linear" in key]:
        state[key.replace("linear1", "seq.0").replace("linear2", "seq.3")] = state[key].clone()
    state["vit.1.mlp.seq.3.weight"][0, -1] *= 1 + 2**-23
    torch.save(state, tmp_path / "a.pth")
    with pytest.raises(InputError, match=r"vit\.1\.mlp\.seq\.3\.weight differs from vit\.1\.mlp\.linear2\.weight"):
        parity.load(tmp_path / "a.pth", given=GIVEN["article_multihead"])


def rotary_state(dtype=torch.float32, base=10000.0, heads=3):
    """Return the state dict of an x-ray model of width 96, with the rotary tables that the article's module stores."""
    config = vit_spec.get("article_xray_rope").replace(
        image_size=(48, 80), width=96, depth=2, num_heads=heads, mlp_dim=64, positions={"rotary_base": base}
    )
    torch.manual_seed(0)
    state = article_state_dict(
        "article_xray_rope", {key: value.numpy() for key, value in vit_torch.ViT(config).state_dict().items()}
    )
    state["patch_embedding.patch_embed.weight"] = state["patch_embedding.patch_embed.weight"].flatten(1)
    tables = zip(("cos", "sin"), vit_spec.rotary_tables(config, config.grid), strict=True)
    for part, table in tables:
        for axis, half in zip("xy", np.split(table[0, :, 0], 2, axis=1), strict=True):
            for block in range(2):
                kept = torch.from_numpy(half.copy()).to(dtype)[None, None]
                state[f"transformer_blocks.{block}.attn.rope.{axis}_{part}"] = kept
    return state


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_rotary_tables_of_the_xray_model_determine_the_base_and_the_heads(tmp_path, dtype):
    for base, heads in ((10000.0, 3), (100.0, 6)):
        if dtype == torch.bfloat16 and base != 10000.0:
            continue  # 8 bits do not determine another base
        state = rotary_state(dtype, base, heads)
        torch.save(state, tmp_path / "a.pth")
        found = parity.load(tmp_path / "a.pth", given={"image_size": (48, 80)})
        assert (found.config.positions.rotary_base, found.config.num_heads) == (base, heads)
        assert not {"num_heads", "positions.rotary_base"} & {each.field for each in found.assumed}
        assert found.left[-1].endswith("and 7 more: a rotary table, which is computed")


def test_rotary_tables_of_another_rotation_are_refused(tmp_path):
    state = rotary_state()
    x, y = (f"transformer_blocks.1.attn.rope.{axis}_cos" for axis in "xy")
    first = "transformer_blocks.0.attn.rope.x_cos"
    for wrong in (
        {x: state[y], y: state[x]},  # rows for columns
        {x: state[x].flip(2)},
        {x: torch.ones(3)},
        {x: state[x][..., :7]},
        {first: state[first] * 1.01},
        {x: state[x] * float("nan")},
    ):
        torch.save(state | wrong, tmp_path / "a.pth")
        with pytest.raises(InputError, match="tables of rotary positions: it cannot be read"):
            parity.load(tmp_path / "a.pth")
    other = rotary_state(base=100.0)
    mixed = {key: array for key, array in other.items() if key.startswith("transformer_blocks.1.attn.rope.")}
    torch.save(state | mixed, tmp_path / "a.pth")
    with pytest.raises(InputError, match="its blocks have different tables of rotary positions"):
        parity.load(tmp_path / "a.pth")


def test_the_position_table_of_the_rectangular_model_is_written_and_not_read(tmp_path):
    path = save_article(tmp_path, "article_rectangular")
    write(load(path, "article_rectangular", GIVEN["article_rectangular"]), tmp_path / "b.pth", "article_rectangular")
    table = torch.load(tmp_path / "b.pth", weights_only=True)["backbone.pos_embed"]
    config = read("article_rectangular").config
    assert np.array_equal(table[0].numpy(), vit_spec.position_table(config, config.grid)[0])
    (tmp_path / "b.pth").rename(tmp_path / "c.pth")  # away from its metadata
    [line] = parity.load(tmp_path / "c.pth", given=GIVEN["article_rectangular"]).left
    assert line == "backbone.pos_embed: the fixed position table, which is computed"


def test_another_position_table_than_the_articles_is_refused(tmp_path):
    path = save_article(tmp_path, "article_rectangular")
    write(load(path, "article_rectangular", GIVEN["article_rectangular"]), tmp_path / "b.pth", "article_rectangular")
    state = torch.load(tmp_path / "b.pth", weights_only=True)
    state["backbone.pos_embed"] = state["backbone.pos_embed"].flip(1)
    torch.save(state, tmp_path / "c.pth")
    with pytest.raises(InputError, match=r"backbone\.pos_embed of .* has other values than expected \(the fixed position"):
        parity.load(tmp_path / "c.pth", given=GIVEN["article_rectangular"])


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("computed", [True, False], ids=["computed", "rounded"])
def test_a_position_table_of_low_precision_is_accepted_and_a_wrong_one_refused(tmp_path, kind, computed):
    path = save_article(tmp_path, "article_rectangular")
    write(load(path, "article_rectangular", GIVEN["article_rectangular"]), tmp_path / "b.pth", "article_rectangular")
    state = {key: value.double() for key, value in torch.load(tmp_path / "b.pth", weights_only=True).items()}
    exact, dtype = state["backbone.pos_embed"], getattr(torch, kind)
    _, length, width = exact.shape
    position, column = torch.arange(length, dtype=dtype)[:, None], torch.arange(width)
    angle = position / torch.tensor(10000.0, dtype=dtype) ** (column // 2 * 2 / width).to(dtype)
    table = torch.where(column % 2 == 0, angle.sin(), angle.cos())[None]
    state["backbone.pos_embed"] = (table if computed else exact.to(dtype)).double()
    torch.save(state, tmp_path / "c.pth")
    found = parity.load(tmp_path / "c.pth", given=GIVEN["article_rectangular"])
    [assumption] = [each for each in found.assumed if each.field == "position table"]
    error = float((state["backbone.pos_embed"] - exact).abs().max())
    assert assumption.value == f"exact sinusoids; in the file, they are rounded by up to {error:.0e}"
    state["backbone.pos_embed"] = exact.roll(1, 1)
    torch.save(state, tmp_path / "d.pth")
    with pytest.raises(InputError, match=r"backbone\.pos_embed of .* has other values than expected"):
        parity.load(tmp_path / "d.pth", given=GIVEN["article_rectangular"])


def test_a_written_multihead_model_has_every_key_of_the_articles_module(tmp_path):
    """The article's module registers the layers of its MLP twice and has a norm that is never called."""
    path = save_article(tmp_path, "article_multihead")
    found = load(path, "article_multihead", GIVEN["article_multihead"])
    write(found, tmp_path / "b.pth", "article_multihead")
    state = torch.load(tmp_path / "b.pth", weights_only=True)
    for one, other in (("linear1", "seq.0"), ("linear2", "seq.3")):
        for i, leaf in product(range(found.config.depth), ("weight", "bias")):
            assert torch.equal(state[f"vit.{i}.mlp.{one}.{leaf}"], state[f"vit.{i}.mlp.{other}.{leaf}"])
    assert all(state[f"vit.{i}.norm.weight"].shape == (found.config.width,) for i in range(found.config.depth))


def test_another_eps_and_activation_than_the_articles_can_be_given(tmp_path):
    path = save_article(tmp_path, "article_multihead")
    found = parity.load(path, given={**GIVEN["article_multihead"], "norms.eps": 1e-6, "mlp.activation": "gelu_tanh"})
    assert (found.config.norms.eps, found.config.mlp.activation) == (1e-6, "gelu_tanh")


def test_a_patch_size_that_the_projection_cannot_have_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"3 channels of patches of 4x4 are 48 values, the projection takes 16"):
        parity.load(save_article(tmp_path, "article_xray_rope"), given={"in_channels": 3, "patch_size": 4, "num_heads": 2})


@pytest.mark.parametrize(
    ("name", "changes", "what"),
    [
        ("article_sincos", {"norms": {"shared_norm": False}}, "norms.shared_norm=False"),
        ("article_sincos", {"attention": {"proj": True}}, "attention.proj=True"),
        ("article_xray_rope", {"positions": {"rotary": "none"}}, "positions.rotary='none'"),
        ("article_multihead", {"norms": {"after_pool": False}}, "norms.after_pool=False"),
        ("article_rectangular", {"attention": {"value_skip": False}}, "attention.value_skip=False"),
        ("article_rectangular", {"positions": {"table": "sincos_2d_mae"}}, "positions.table='sincos_2d_mae'"),
        ("article_dino", {"positions": {"covers": "none"}}, "positions.covers='none'"),
        ("article_dino", {"tokens": {"registers": 4}}, "no key for reg_token"),
    ],
)
def test_a_config_that_the_format_cannot_store_is_refused_by_field(name, changes, what):
    with pytest.raises(InputError, match=re.escape(what)):
        parity.checkpoints.formats.get(name).layouts(vit_spec.get(name).replace(**changes))


def test_the_variant_whose_first_keys_are_the_second_ones_is_written_once(tmp_path):
    path = save_article(tmp_path, "article_multihead")
    given = GIVEN["article_multihead"]
    parity.convert(path, tmp_path / "seq.safetensors", "article_multihead:seq", given=given)
    found = parity.load(tmp_path / "seq.safetensors")
    assert not [key for key in found.arrays if "linear" in key]
    first, second = parity.to_torch(parity.load(path, given=given)), parity.to_torch(found)
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
