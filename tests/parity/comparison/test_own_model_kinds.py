"""`parity.derive_table` with more kinds of PyTorch classes: rotary positions, attention pooling, other layers, tokens."""

import re
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn

import parity
import vit_torch
from parity.checkpoints.format_file import parse_format
from parity.checkpoints.formats import registered
from parity.comparison.diagnosis.repair import repair
from parity.comparison.own_model import DerivedTable
from parity.comparison.own_model.construct import build
from parity.comparison.tolerances import FLOAT64_TOLERANCE
from tests.parity.comparison.test_own_model import check_function, derived, trained
from vit_spec import InputError

ROTARY, MORE = "tests.strangers.rotary_models", "tests.strangers.more_torch_models"


def check_round_trip(table: DerivedTable, like: str, folder: Path) -> None:
    """Check that other weights of the class are the same after they were written as ours and back with the table."""
    other = trained(like, seed=5)
    torch.save(other.state_dict(), folder / "other.pth")
    format = parse_format(table.text, "table.txt")
    with registered(format):
        parity.convert(folder / "other.pth", folder / "other.safetensors", "torch")
        parity.convert(folder / "other.safetensors", folder / "back.pth", format.name)
    back: nn.Module = build(like).model.float().eval()
    back.load_state_dict(torch.load(folder / "back.pth"), strict=False)  # without the constants
    for (name, first), second in zip(other.named_parameters(), back.parameters(), strict=True):
        assert torch.equal(first, second), name


# Proven ---------------------------------------------------------------------------------------------------------------

PROVEN = {
    f"{ROTARY}:DinoStyle": ["set: positions.rotary=dinov3", "set: positions.rotary_base=100.0", "set: positions.kind=none"],
    f"{ROTARY}:DinoStyle(class_token=False)": ["set: positions.rotary=dinov3", "set: head.pool=mean"],
    f"{ROTARY}:EvaStyle": [
        "set: positions.rotary=eva",
        "set: positions.rotary_grid=16x16",
        "set: positions.rotary_base=10000.0",
    ],
    f"{ROTARY}:ComplexStyle": [
        "set: positions.rotary=rope_vit",
        "| (head qkv dim) width",
        "set: positions.rotary_start=0.0",
    ],
    f"{ROTARY}:FromOne": ["set: positions.rotary=axial", "| (qkv head dim) width"],
    f"{MORE}:attention_pooled": [
        "attn_pool.kv.weight | head.attention.in_proj_weight | (qkv=1:kv pool_head pool_dim) width"
    ],
    f"{MORE}:attention_pooled('torch', 2, 0)": ["set: head.pool_heads=2"],
    f"{MORE}:attention_pooled('split')": ["words: kv = k v", "attn_pool.latent | head.seed"],
    f"{MORE}:Changed('lists')": ["layers.{block}.attn.{qkv}.{head}.weight | dim width"],
    f"{MORE}:Changed('parameter lists')": ["layers.{block}.attn.w{qkv}.{head} | width dim"],
    f"{MORE}:Changed('einsum')": ["layers.{block}.attn.w{qkv} | head width dim"],
    f"{MORE}:Changed('conv1d')": ["layers.{block}.attn.to_qkv.weight | (qkv head dim) width 1"],
    f"{MORE}:Changed('head first')": ["layers.{block}.attn.to_qkv.weight | (head qkv dim) width"],
    f"{MORE}:Changed('dim head')": ["layers.{block}.attn.to_qkv.weight | (qkv dim head) width"],
    f"{MORE}:Changed('values first')": [
        "blocks.attn.qkv.weight[qkv=2] | layers.{block}.attn.to_qkv.weight | (qkv=0 head dim) width"
    ],
    f"{MORE}:Changed('value before gate')": [
        "blocks.mlp.fc1.weight[glu=0] | layers.{block}.fc.weight | (glu=1 ff) width",
        "blocks.mlp.fc1.bias[glu=1] | layers.{block}.fc.bias | (glu=0 ff)",
    ],
    f"{MORE}:Changed('positions of patches, class token last')": [
        "pos_embed | pos | 1 token width",
        "set: head.pool=token",
    ],
}


@pytest.mark.parametrize("like", PROVEN)
def test_the_table_is_found_proven_and_used_in_both_directions(like: str, tmp_path: Path) -> None:
    table, model = derived(like, tmp_path)
    assert table.proof.largest <= FLOAT64_TOLERANCE
    text = re.sub(" +", " ", table.text)
    assert [line for line in PROVEN[like] if line not in text] == [], table.text
    check_function(table, model, tmp_path)
    check_round_trip(table, like, tmp_path)


def test_a_layer_of_einops_is_run(tmp_path: Path) -> None:
    pytest.importorskip("einops")
    table, _ = derived(f"{MORE}:Changed('rearrange')", tmp_path)
    assert "(ph pw rgb)" in table.text


def test_an_empty_list_beside_the_logits_is_left_out_and_all_positions_are_used(tmp_path: Path) -> None:
    table, _ = derived(f"{MORE}:Listed", tmp_path)
    assert table.config.num_tokens == table.config.sizes["token"] == 25


def test_a_base_of_rotary_positions_in_the_class_is_found(tmp_path: Path) -> None:
    given = {"positions.rotary": "rope_vit", "positions.rotary_start": 0.0, "num_heads": 4}
    table, _ = derived(f"{ROTARY}:ComplexStyle(theta=50.0)", tmp_path, given=given)
    assert "set: positions.rotary_base=50.0" in table.text


def test_values_beside_attention_are_found_unless_the_user_excludes_them(tmp_path: Path) -> None:
    given = {"image_size": (32, 48), "num_heads": 4, "attention.scale": 0.25}  # fewer hypotheses are tried
    table, _ = derived(f"{MORE}:Changed('values beside')", tmp_path, given=given)
    assert table.config.attention.value_skip
    with pytest.raises(InputError, match="the sum of attention and MLP differs"):
        derived(f"{MORE}:Changed('values beside')", tmp_path, given={**given, "attention.value_skip": False})


# Refused --------------------------------------------------------------------------------------------------------------

REFUSED = {
    f"{ROTARY}:OneDimensional": "it depends on the order of the patches, but not as rotary positions do",
    f"{MORE}:Changed('class token last')": "its row of pos is the last one, not the first; in a copy of the class",
    f"{MORE}:Changed('norm of flat patches', channels=1)": r"\[patches.0.weight \(64,\); .*a norm of 64 entries",
    f"{MORE}:Changed('norm of flat patches')": r"no place for \[patches.0.weight \(192,\); .*a norm of 192 entries",
    f"{MORE}:Changed('third norm')": r"no place for \[layers.\{block\}.ln_3.weight \(64,\); .*: if ViTConfig has such",
    f"{MORE}:Changed('mlp first')": r"uses layers.\{block\}.fc.weight, .*, before layers.\{block\}.attn.*: if its .* reads",
    f"{MORE}:Changed('mlp first, norms last')": "attention first: a class whose norms come after the MLP and attention can",
    f"{MORE}:Changed('temperature')": r"no place for \[layers.\{block\}.temperature \(\)\].*multiply it into the weights",
    f"{MORE}:Changed('temperature of heads')": r"no place for \[layers.\{block\}.temperature \(4, 1, 1\)\]",
    f"{MORE}:Changed('float32')": r"computes an array \(2, 4, 25, 25\) in float32; .* without .float\(\)",
    f"{MORE}:Changed('gelu in the head')": "ViTConfig has tanh after fc.0.weight: is there another activation",
    f"{MORE}:Changed('grouped queries')": "attention of the first block cannot be expressed: layers.0.attn.to_kv.weight",
    f"{MORE}:Changed('relu without projection')": "if layers.0.attn.to_q.weight is zero, .*: is there no softmax",
    f"{MORE}:Changed('parallel')": "the sum of attention and MLP cannot be expressed: its MLP does not read the output",
    f"{MORE}:Changed('parallel without bias')": "the sum of attention and MLP cannot be expressed: its MLP does not read",
    f"{MORE}:Changed('half of attention')": r"is multiplied by 0\.5 before it is added; .* multiply layers.0.out.weight,",
    f"{MORE}:Changed('tanh of attention')": "MLP differs by .*: is the output of attention scaled or changed before it is",
    f"{MORE}:Probabilities": "its output is probabilities, and that of ViTConfig logits; let a subclass return",
    f"{MORE}:Probabilities(logarithm=True)": "its output is log-probabilities",
    f"{MORE}:Tutorial": r"q_mappings.0.weight \(16, 16\) has no dimension of the width 64, which each layer",
}


@pytest.mark.parametrize("like", REFUSED)
def test_the_cause_is_named(like: str, tmp_path: Path) -> None:
    # Without the size of images, others are tried if the parameters have no roles for one.
    given = {"image_size": (32, 48), "num_heads": 4} if "Tutorial" not in like else {}
    with pytest.raises(InputError, match=REFUSED[like]) as error:
        derived(like, tmp_path, given=given)
    assert "\n" not in str(error.value) and "--set" not in str(error.value).partition("float32")[1]


@pytest.mark.parametrize(
    ("pools_prefix", "agree"),
    [
        (False, r"the parts outside of the blocks \(.*, classifier\), the MLP of the first block agree"),
        (True, ""),
    ],
    ids=["mean of the patches", "mean of all tokens"],
)
def test_another_order_of_tokens_ahead_of_the_patches_is_named(pools_prefix: bool, agree: str, tmp_path: Path) -> None:
    given = {"image_size": (32, 48), "num_heads": 4, "attention.scale": 0.25}  # fewer hypotheses are tried
    order = "the order registers, class token, and in ViTConfig class token, registers; .* rows of pos too"
    with pytest.raises(InputError, match=f"{agree}.*{order}$"):
        derived(f"{MORE}:Registered(True, {pools_prefix})", tmp_path, given=given)


def test_rotary_pairs_in_another_order_are_named_with_a_remedy_that_works(tmp_path: Path) -> None:
    given = {"positions.rotary": "eva", "positions.rotary_base": 10000.0, "positions.rotary_grid": (16, 16)}
    like = f"{ROTARY}:EvaStyle(pairs='halves')"
    with pytest.raises(InputError, match=r"rotary pairs .* lie as halves.*; in a copy .* right before") as error:
        derived(like, tmp_path, given=given)
    model, cause = trained(like), str(error.value).rpartition("--mend ")[2].strip("'")
    torch.save(model.state_dict(), tmp_path / "theirs.pth")
    copy = parity.derive_table(f"{ROTARY}:EvaStyle(pairs='reordered')", tmp_path / "theirs.pth", given=given)
    parity.write(repair(copy.checkpoint, [cause])[0], tmp_path / "mended.safetensors", "torch")
    with pytest.warns(parity.AssumptionWarning, match="pixels.mean"):
        twin = vit_torch.load(tmp_path / "mended.safetensors")
    images = torch.randn(2, 3, *copy.config.image_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(twin(images), model(images), rtol=1e-4, atol=1e-4)


def test_the_remedy_for_a_factor_of_attention_works() -> None:
    half, plain = (trained(f"{MORE}:Changed('{change}')") for change in ("half of attention", "plain"))
    state = {key: value / 2 if ".out." in key else value for key, value in half.state_dict().items()}
    plain.load_state_dict(state)
    images = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        np.testing.assert_allclose(plain(images), half(images), rtol=1e-4, atol=1e-4)


def test_the_remedy_for_another_order_of_tokens_ahead_of_the_patches_works() -> None:
    theirs, copy = (trained(f"{MORE}:Registered({registers_first})") for registers_first in (True, False))
    rows = theirs.state_dict()["pos"]
    copy.load_state_dict({**theirs.state_dict(), "pos": torch.cat([rows[:, 2:3], rows[:, :2], rows[:, 3:]], 1)})
    images = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        np.testing.assert_allclose(copy(images), theirs(images), rtol=1e-4, atol=1e-4)


def test_the_remedy_for_a_class_token_that_is_last_works(tmp_path: Path) -> None:
    """The class with its token first computes the same function, once the last row of positions is the first."""
    last, first = (trained(f"{MORE}:Changed('{change}')") for change in ("class token last", "plain"))
    state = last.state_dict()
    images = torch.randn(2, 3, 32, 48, generator=torch.Generator().manual_seed(0))
    first.load_state_dict({**state, "pos": state["pos"].roll(1, dims=1)})
    with torch.no_grad():
        np.testing.assert_allclose(first(images), last(images), rtol=1e-4, atol=1e-4)
