"""`parity.derive_table` with PyTorch classes of strangers: right tables are proven, and impostors are refused."""

import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn

import parity
import vit_spec
import vit_torch
from parity.checkpoints.format_file import parse_format
from parity.checkpoints.formats import registered
from parity.checkpoints.layout import Array
from parity.comparison.own_model import DerivedTable, derive_table
from parity.comparison.own_model.candidate import Candidate
from parity.comparison.own_model.construct import build
from parity.comparison.own_model.model import ImageShape, select_output
from parity.comparison.own_model.proof import prove, random_weights
from parity.comparison.own_model.structures import find_candidates
from parity.comparison.own_model.torch_model import TorchModel
from parity.comparison.tolerances import FLOAT64_TOLERANCE
from tests.strangers import torch_models
from vit_spec import InputError

MODULE = "tests.strangers.torch_models"
EXPLICIT = "tests.strangers.more_torch_models:Changed('plain')"  # its scores are an array; our twin has a fused kernel


def trained(like: str, seed: int = 0) -> nn.Module:
    """Return the model of a class, with noise on all its parameters, as after training."""
    model: nn.Module = build(f"{MODULE}:{like}" if ":" not in like else like).model.float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def derived(like: str, folder: Path, **options: Any) -> tuple[DerivedTable, nn.Module]:
    """Return the table of a class and the trained model whose checkpoint it was derived from."""
    model = trained(like)
    torch.save(model.state_dict(), folder / "theirs.pth")
    like = like if ":" in like else f"{MODULE}:{like}"
    return derive_table(like, folder / "theirs.pth", **options), model


def check_function(table: DerivedTable, model: nn.Module, folder: Path) -> None:
    """Check in float32, through files alone, that a checkpoint read with the table computes the function of the model."""
    (folder / "table.txt").write_text(table.text)
    parity.write(table.checkpoint, folder / "ours.safetensors", "torch")
    with pytest.warns(parity.AssumptionWarning, match="pixels.mean"):
        twin = vit_torch.load(folder / "ours.safetensors")
    assert {each.field.partition(".")[0] for each in table.checkpoint.assumed} <= {"pixels", "resampling"}
    images = torch.randn(3, table.config.in_channels, *table.config.image_size, generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        torch.testing.assert_close(twin(images), select_output(model(images)), rtol=1e-4, atol=1e-4)


# Proven ---------------------------------------------------------------------------------------------------------------

STRANGERS = {
    "Renamed": ["blocks.norm1.weight | stack.{block}.norm_b.weight", "set: norms.eps=1e-06"],
    "Lucid(image_size=(16, 24))": ["to_patch_embedding.1.weight | width (ph pw rgb)", "set: num_heads=5"],
    "Assembled('split')": ["words: qkv = 3 1 2", "set: mlp.activation=gelu_tanh", "position.weight"],
    "Assembled('pair')": ["weight[qkv=1:kv] | encoder.{block}.attention.to_kv.weight | (kv head dim) width"],
    "Assembled('scores')": ["qkv.bias[qkv=0:kv] | encoder.{block}.attention.scores.bias | (head kv dim)"],
    "Assembled('values_first')": ["qkv.weight[qkv=2] | encoder.{block}.attention.value.weight | (head dim) width"],
    "Assembled('other_order')": ["qkv.weight[qkv=0] | encoder.{block}.attention.kvq.weight | (qkv=2 head dim) width"],
    "Assembled('values_before_keys')": ["qkv.weight[qkv=1] | encoder.{block}.attention.vk.weight | (kv=1 head dim) width"],
    "Assembled('heads')": ["encoder.{block}.attention.heads.{head}.{qkv}.weight | dim width"],
    "Assembled('dim_first')": ["encoder.{block}.attention.all.weight | (head dim qkv) width"],
    "Assembled('transposed')": ["w_qkv | width (qkv head dim)", "w_out | (head dim) width", "set: attention.scale=1.0"],
    "Assembled('torch')": ["mha.in_proj_weight", "constant: position_ids"],
    "Encoder": ["set: norms.order=post", "set: mlp.activation=relu", "set: head.pool_prefix=True", "register width"],
    "Encoder(norm_first=True, activation='gelu')": ["set: norms.order=pre", "set: mlp.activation=gelu"],
    "Renamed(depth=1)": ["stack.{block}.mix.weight | (qkv head dim) width"],
    "Renamed(classes=1)": ["head.weight | out.weight | label feature"],
    "Gated": ["words: glu = 1 3", "set: norms.kind=rms", "pos_embed", "blocks.ls2.gamma", "k_norm"],
    "Gated(persistent=False)": ["set: positions.table=sincos_2d_mae", "set: head.pool=mean"],
}


@pytest.mark.parametrize("like", STRANGERS)
def test_the_table_of_a_class_is_found_and_proven(like: str, tmp_path: Path) -> None:
    table, model = derived(like, tmp_path)
    assert table.proof.largest <= FLOAT64_TOLERANCE
    text = re.sub(" +", " ", table.text)
    assert [line for line in STRANGERS[like] if line not in text] == [], table.text
    check_function(table, model, tmp_path)


def test_a_table_reads_and_writes_other_checkpoints_without_the_class(tmp_path: Path) -> None:
    table, _ = derived("Assembled('heads')", tmp_path)
    (tmp_path / "mine.txt").write_text(table.text)
    other = trained("Assembled('heads')", seed=5)
    torch.save(other.state_dict(), tmp_path / "other.pth")
    from parity.checkpoints.format_file import read_format
    from parity.checkpoints.formats import registered

    with registered(read_format(tmp_path / "mine.txt")):
        parity.convert(tmp_path / "other.pth", tmp_path / "ours.safetensors", "torch")
        parity.convert(tmp_path / "ours.safetensors", tmp_path / "back.safetensors", "assembled")
        back = parity.load(tmp_path / "back.safetensors")
    state = {key: value for key, value in other.state_dict().items() if key != "position_ids"}
    assert back.arrays.keys() == state.keys()
    assert all(np.array_equal(np.asarray(back.arrays[key]), state[key].numpy()) for key in state)


def test_names_do_not_decide(tmp_path: Path) -> None:
    table, _ = derived("Renamed", tmp_path)
    assert re.search(r"blocks.norm2.weight +[|] stack.{block}.norm_a.weight", table.text)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("eps everywhere", "set: norms.eps=1e-05"),
        ("tanh", "set: mlp.activation=gelu_tanh"),
        ("temperature", f"set: attention.scale={16**-0.5 / 1.01!r}"),
    ],
)
def test_a_change_that_the_config_expresses_is_found(change: str, line: str, tmp_path: Path) -> None:
    assert line in derived(f"Impostor('{change}')", tmp_path)[0].text


def test_weights_in_a_wrapper_are_found(tmp_path: Path) -> None:
    model = trained("Renamed")
    state = {f"ours.inner.{key}": value for key, value in model.state_dict().items()}
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "theirs.ckpt")
    table = derive_table(f"{MODULE}:Renamed", tmp_path / "theirs.ckpt")
    assert "strip: state_dict.ours.inner.\n" in table.text


def test_modules_of_torch_compile_within_a_model_are_left_out(tmp_path: Path) -> None:
    state = {
        re.sub(r"^(stem|stack[.]\d)", r"\1._orig_mod", key): value for key, value in trained("Renamed").state_dict().items()
    }
    torch.save({"model": state}, tmp_path / "theirs.pth")
    assert "| stack.{block}.mix.weight" in derive_table(f"{MODULE}:Renamed", tmp_path / "theirs.pth").text


def test_a_model_can_be_given_itself_and_is_not_changed(tmp_path: Path) -> None:
    model = trained("Renamed").train()
    torch.save(model.state_dict(), tmp_path / "theirs.pth")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    table = derive_table(model, tmp_path / "theirs.pth")
    assert table.config.depth == 2 and model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert next(model.parameters()).dtype == torch.float32


@pytest.mark.parametrize("like", [torch_models.Renamed, partial(torch_models.Renamed, depth=3), lambda: trained("Renamed")])
def test_a_class_or_a_function_that_returns_a_model_is_called(like: Any) -> None:
    built = build(like)
    assert isinstance(built.model, torch_models.Renamed) and built.name == f"{MODULE}:Renamed"


@pytest.mark.parametrize(("like", "kind"), [({}, "dict"), (dict, "type")])
def test_an_object_that_is_no_model_is_one_line(like: Any, kind: str) -> None:
    with pytest.raises(InputError, match=rf"like is a {kind}: a dict is no torch\.nn\.Module and no Flax module"):
        build(like)


def test_images_that_a_model_changes_in_place_are_not_changed() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(12, 2)

        def forward(self, x: Any) -> Any:
            return self.fc(x.mul_(2).flatten(1))

    for shape in (ImageShape(2, 2, 3, channels_last=True), ImageShape(4, 3, 1, channels_last=False)):
        model, images = TorchModel(build(InPlace())), np.ones((2, shape.height, shape.width, shape.channels))
        assert not model.fit(shape)
        model.run({}, images)
        assert (images == 1).all()


def test_half_precision_is_converted_bit_by_bit(tmp_path: Path) -> None:
    model = trained("Renamed").bfloat16()
    torch.save(model.state_dict(), tmp_path / "theirs.pth")
    table = derive_table(f"{MODULE}:Renamed", tmp_path / "theirs.pth")
    found = parity.to_torch(table.checkpoint)["blocks.1.attn.qkv.weight"]
    assert torch.equal(found, model.state_dict()["stack.1.mix.weight"])


def test_a_buffer_in_float32_is_read_as_it_is_stored(tmp_path: Path) -> None:
    torch_models.Rounded = lambda: torch_models.Gated(dtype=torch.float32)  # type: ignore[attr-defined]
    try:
        table, _ = derived("Rounded", tmp_path)
    finally:
        del torch_models.Rounded  # type: ignore[attr-defined]
    assert table.config.positions.kind == "learned" and "| table" in table.text


@pytest.mark.slow
def test_a_class_of_real_size_is_proven(tmp_path: Path) -> None:
    import tests.goldens.peers  # noqa: F401  # makes torchvision importable, which timm imports

    pytest.importorskip("timm")
    like = "timm.models.vision_transformer:VisionTransformer(img_size=64, embed_dim=192, depth=12, num_heads=3)"
    table, _ = derived(like, tmp_path)
    assert (table.config.width, table.config.depth) == (192, 12) and table.proof.largest <= FLOAT64_TOLERANCE


def candidate_of(like: str, size: tuple[int, int], **fields: Any) -> tuple[TorchModel, Candidate, dict[str, Array], Array]:
    """Return a model, its likeliest candidate, random weights and images, for the proof alone, without the search."""
    model, shape = TorchModel(build(like)), ImageShape(*size, 3, False)
    assert model.fit(shape) == ""
    weights = random_weights(model.weights, 1)
    images = np.random.default_rng(0).standard_normal((2, *size, 3))
    order = model.trace(weights, images).order
    shapes = {key: array.shape for key, array in model.weights.items()}
    candidate = next(find_candidates(shapes, order, shape, (2, 7)))
    return model, candidate.with_fields(norms__kind="layer", norms__eps=1e-5, head__pool="token", **fields), weights, images


def test_a_wrong_layout_is_not_proven() -> None:
    """The proof refuses two swapped axes, two swapped layers and another activation."""
    like = f"{MODULE}:Assembled('split')"
    model, found, weights, images = candidate_of(like, (16, 24), num_heads=3, mlp__activation="gelu_tanh")
    right = found.with_words("qkv", ("3", "1", "2"))
    assert prove(model, right, weights, images, 0).largest <= FLOAT64_TOLERANCE
    wrong = {
        "the words": right.with_words("qkv", ("1", "3", "2")),
        "the activation": right.with_fields(mlp__activation="gelu"),
        "the heads": right.with_dims("blocks.attn.proj.weight", (("width",), ("dim", "head"))),
    }
    for each in wrong.values():
        with pytest.raises(InputError, match="the output differs by"):
            prove(model, each, weights, images, 0)


def test_weights_that_amplify_rounding_errors_prove_a_right_table_alone() -> None:
    """Large weights saturate the softmax of attention, where the implementations of its gradient round differently."""
    model, right, _, images = candidate_of(EXPLICIT, (32, 48), num_heads=4)
    large = {key: 25 * array for key, array in model.weights.items()}
    proof = prove(model, right, large, images, 0)
    assert proof.largest > FLOAT64_TOLERANCE >= max(proof.differences["random"].values())
    assert all(proof.differences["own"][name] <= 3 * error for name, error in proof.rounding.items())
    assert "the weights of the checkpoint amplify rounding errors, which are " in str(proof)
    with pytest.raises(InputError, match="differs by"):
        prove(model, right.with_fields(norms__eps=1e-6), large, images, 0)


def test_weights_whose_rounding_errors_would_hide_a_wrong_table_prove_nothing() -> None:
    model, right, weights, images = candidate_of(EXPLICIT, (32, 48), num_heads=4)
    large = {key: 200 * array for key, array in weights.items()}
    with pytest.raises(InputError, match=r"random weights agree, but .* cannot show .*; give --like a checkpoint of the"):
        prove(model, right, large, images, 0)


# Refused --------------------------------------------------------------------------------------------------------------

IMPOSTORS = {
    "eps of the blocks": "the MLP of the first block differs by 4e?.*its norms have the epsilons 1e-06, 1e-05",
    "eps of one norm": "its norms have the epsilons 1e-06, 1e-05",
    "eps of the dtype": "the epsilon of float64, 2.2.*: in a copy of the class give that of float32, 1.192092895507812",
    "statistics": "of a batch norm|pooling, classifier. differ",
    "normalized images": "normalizes its images by its buffers mean and std, .* --set pixels.mean=0.485,0.456,0.406 --set",
    "normalized by an unsaved buffer": "images by its buffers mean and std, .* --set pixels.mean=0.485,0.456,0.406 --set",
    "pixels from -1 to 1": "its images by mean 0.5 and .*: leave it out .* --set pixels.mean=0.5 --set pixels.std=0.5",
    "unused": "does not use mask_token: if it is for training, give --ignore 'mask_token'",
    "windows": r"relative \(3, 13, 13\)",
    "flipped images": "images of 16x24: .* but attention .*agrees without positions, .* the patches mirrored left to right",
    "columns of patches": "agrees without positions, .* takes the patches column by column; .* bring the rows of where",
    "activation of patches": "differs by",
    "class token last": r"pooling, classifier. differ",
    "flipped tokens": r"pooling, classifier. differ .* tried.; state what is known with --set FIELD=VALUE, or, if",
    "factor of positions": "positions are multiplied by 0.5 before they are added; .* the checkpoint multiply where by it",
    "dropout": "two forward passes with the same weights and images return different outputs",
    "reversed blocks": "do not run in the order of their numbers: stack.1",
    "shared twice": "the blocks together differ by",
    "normalized feature": r"pooling, classifier. differ",
    "temperature of logits": "the logits are multiplied by 0.990.*; .* the checkpoint multiply out.weight and out.bias by",
    "cap of logits": "if out.weight is zero, the output is not out.bias: are the logits capped or changed",
    "residual of the norm": "still depends on the norms of the blocks: is attention or the MLP added to the output of a",
    "causal": "attention of the first block differs",
    "normalized weights": "attention of the first block differs",
    "scaled residual": r"pooling, classifier. differ",
    "tanh in one block": "the projection of patches agree, but the blocks together differ",
    "activation after the MLP": "the MLP of the first block differs",
    "relu6": "with norms and biases 20 times as large, the output differs by",
    "range of float16": r"with norms and biases 1e\+06 times as large, the output differs by",
    "large pixels": "with three images with pixels from 0 to 255, the output differs by",
    "batch of two": "with one image with pixels from 0 to 1, the output differs by",
    "no gradients": "with one image with pixels from 0 to 1, the output differs by",
    "detached": "its output has no gradients",
}


@pytest.mark.parametrize("change", IMPOSTORS)
def test_an_impostor_is_refused(change: str, tmp_path: Path) -> None:
    # Fewer hypotheses, and no other sizes of images, which are tried if the parameters have no roles for one.
    given: dict[str, Any] = {"num_heads": 3} if change != "scaled residual" else {}
    # The message about flipped images names their size, and no heads.
    given = {} if change == "flipped images" else given | {"image_size": (16, 24)}
    with pytest.raises(InputError, match=IMPOSTORS[change]) as error:
        derived(f"Impostor('{change}')", tmp_path, given=given)
    assert "\n" not in str(error.value)


def test_an_epsilon_of_float64_can_be_confirmed(tmp_path: Path) -> None:
    eps = float(np.finfo(np.float64).eps)
    table, _ = derived("Impostor('eps of the dtype')", tmp_path, given={"num_heads": 3, "norms.eps": eps})
    assert table.config.norms.eps == eps


def test_an_ignored_parameter_that_is_not_used_is_left_out(tmp_path: Path) -> None:
    table, _ = derived("Impostor('unused')", tmp_path, ignore=["mask_token"])
    assert "ignore: mask_token not used by the forward pass of the class" in table.text


def test_a_class_with_the_buffers_of_a_normalization_that_it_does_not_compute_is_read(tmp_path: Path) -> None:
    """The remedy of the message about a class that does."""
    given = {"pixels.mean": (0.485, 0.456, 0.406), "pixels.std": (0.229, 0.224, 0.225)}
    table, _ = derived("Impostor('unused normalization')", tmp_path, given=given)
    assert table.config.pixels.mean == given["pixels.mean"]


def test_an_ignored_parameter_that_is_used_is_not_left_out(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        derived("Renamed", tmp_path, ignore=["start"])


def test_a_given_field_is_not_searched(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="differ by"):
        derived("Renamed", tmp_path, given={"norms.eps": 1e-5, "num_heads": 3, "head.pool": "token"})
    with pytest.raises(InputError, match="--set width=64, but the parameters show 48"):
        derived("Renamed", tmp_path, given={"width": 64})


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ("NeedsLabels", "takes no batch of images alone: .*missing 1 required positional argument: 'labels'"),
        ("TwoOutputs", "returns a tuple of 2 arrays: let a subclass return the logits alone"),
        ("SingleTyped", "its output is torch.float32, with weights and images in float64"),
        ("Tied", "stack.0.up.weight and stack.1.up.weight as one parameter"),
        ("Convolutional", "do not fit any block of ViTConfig"),
    ],
)
def test_a_class_that_is_no_vit_is_refused(like: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message) as error:
        derived(like, tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ("Renamed", "does not name a class: write it as package.module:Class"),
        ("no_such_module:ViT", "there is no module no_such_module"),
        (f"{MODULE}:Renamd", "has no Renamd; did you mean 'Renamed'"),
        (f"{MODULE}:Renamed(width=3)", "cannot be called: got an unexpected keyword argument 'width'"),
        (f"{MODULE}:Lucid", r"cannot be called: missing a required .*'image_size'; give its arguments"),
        (f"{MODULE}:Renamed(depth=open('x'))", "is not a literal"),
        (f"{MODULE}:Renamed(**{{}})", r"\*\* is not allowed"),
        (f"{MODULE}:Renamed(", "does not name a class|are not Python"),
        (f"{MODULE}:Renamed()()", "is not one call|are not Python"),
        (f"{MODULE}:raises('no')", "raised KeyError: 'no'"),
        (f"{MODULE}:NUMBER", "is no torch.nn.Module and no Flax module"),
        (f"{MODULE}:sincos_table(2, 3, 8)", "a Tensor is no torch.nn.Module"),
    ],
)
def test_a_wrong_class_is_one_line(like: str, message: str, tmp_path: Path) -> None:
    torch.save(trained("Renamed").state_dict(), tmp_path / "theirs.pth")
    with pytest.raises(InputError, match=message) as error:
        derive_table(like, tmp_path / "theirs.pth")
    assert "\n" not in str(error.value)


def test_a_checkpoint_of_another_class_is_refused_with_all_keys(tmp_path: Path) -> None:
    state = trained("Renamed").state_dict()
    state["out.weight"], state["more"] = torch.zeros(9, 48), torch.zeros(3)
    del state["last.bias"]
    torch.save(state, tmp_path / "theirs.pth")
    with pytest.raises(
        InputError, match=r"1 missing: last.bias. 1 unexpected: more. 1 of another shape: out.weight \(9, 48\)"
    ):
        derive_table(f"{MODULE}:Renamed", tmp_path / "theirs.pth")
    torch.save({"other": torch.zeros(3)}, tmp_path / "theirs.pth")
    with pytest.raises(InputError, match="has no key of the class"):
        derive_table(f"{MODULE}:Renamed", tmp_path / "theirs.pth")


def test_a_changed_constant_is_refused(tmp_path: Path) -> None:
    state = trained("Assembled('torch')").state_dict()
    state["position_ids"] = state["position_ids"].flip(0)
    torch.save(state, tmp_path / "theirs.pth")
    with pytest.raises(InputError, match="position_ids of the checkpoint is not a parameter, and its values are not those"):
        derive_table(f"{MODULE}:Assembled('torch')", tmp_path / "theirs.pth", given={"image_size": (16, 24)})


def test_averaged_weights_without_buffers_are_read(tmp_path: Path) -> None:
    like = "Assembled('torch')"
    model, average = trained(like), trained(like, seed=1)
    torch.save({"model": model.state_dict(), "model_ema": dict(average.named_parameters())}, tmp_path / "theirs.pth")
    checkpoint = derive_table(f"{MODULE}:{like}", tmp_path / "theirs.pth").checkpoint
    head = average.state_dict()["head.3.weight"]
    assert torch.equal(parity.to_torch(checkpoint)["head.weight"], head)
    assert ("values of a newly built model", "position_ids") in [(each.field, each.value) for each in checkpoint.assumed]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_buffer_that_differs_from_the_class_by_little_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    like, state = f"{MODULE}:Impostor('gate')", trained("Impostor('gate')").to(dtype).state_dict()
    given = {"num_heads": 3, "image_size": (16, 24)}
    torch.save(state, tmp_path / "theirs.pth")
    derive_table(like, tmp_path / "theirs.pth", given=given)
    state["gate"] = torch.nextafter(state["gate"], torch.tensor(2, dtype=dtype))
    torch.save(state, tmp_path / "theirs.pth")
    with pytest.raises(InputError, match="gate of the checkpoint is not a parameter, and its values are not those"):
        derive_table(like, tmp_path / "theirs.pth", given=given)


LOADING = {
    "hooks": "Loading changes stack.1.mix.weight in its state_dict: a table reads files as they are, so save dict",
    "load hook": "the class changes stack.1.mix.weight when it loads it: a table reads files as they are",
    "in place": "the class changes where when it loads it",
    "frozen start": "Loading changes start in its state_dict",
    "factor": r"pooling, classifier. differ",
    "raises": "load_state_dict of the class raised KeyError: 'version'",
}


@pytest.mark.parametrize("change", LOADING)
def test_a_class_that_changes_its_weights_when_it_loads_them_is_refused(change: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=LOADING[change]):
        derived(f"Loading('{change}')", tmp_path)


def test_the_remedy_for_a_class_that_changes_its_weights_when_it_loads_them_works(tmp_path: Path) -> None:
    model = trained("Loading('hooks')")
    torch.save(dict(model.named_parameters()), tmp_path / "theirs.pth")
    check_function(derive_table(f"{MODULE}:Renamed", tmp_path / "theirs.pth"), model, tmp_path)


def test_a_class_that_renames_keys_of_old_checkpoints_is_read(tmp_path: Path) -> None:
    table, model = derived("Loading('renamed keys')", tmp_path)
    check_function(table, model, tmp_path)


def test_a_checkpoint_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    state = trained("Renamed").state_dict()
    state["last.bias"][3] = torch.nan
    torch.save(state, tmp_path / "theirs.pth")
    with pytest.raises(InputError, match=r"last\.bias of the checkpoint has values that are not finite"):
        derive_table(f"{MODULE}:Renamed", tmp_path / "theirs.pth")


def test_a_table_is_not_for_checkpoints_of_another_width(tmp_path: Path) -> None:
    """The heads of another width are others, which no tensor shows."""
    torch.save(trained("Renamed").state_dict(), tmp_path / "theirs.pth")
    assert "set: width=48" in derive_table(f"{MODULE}:Renamed", tmp_path / "theirs.pth").text


def test_a_class_for_grey_images_is_read(tmp_path: Path) -> None:
    config = vit_spec.get(
        "vit_ti16", image_size=(16, 24), patch_size=(4, 8), in_channels=1, width=48, depth=2, num_heads=3, num_classes=5
    )
    model = vit_torch.ViT(config)
    torch.save(model.state_dict(), tmp_path / "theirs.pth")
    found = derive_table(model, tmp_path / "theirs.pth", given={"image_size": (16, 24)})
    assert (found.config.in_channels, found.config.patch_size) == (1, (4, 8))


def test_the_table_refuses_other_checkpoints_whose_constants_were_changed(tmp_path: Path) -> None:
    state = trained("Assembled('torch')").state_dict()
    torch.save(state, tmp_path / "theirs.pth")
    format = parse_format(derive_table(f"{MODULE}:Assembled('torch')", tmp_path / "theirs.pth").text, "table.txt")
    state["cls"] = state["cls"] + 1
    torch.save(state, tmp_path / "second.pth")
    torch.save({**state, "position_ids": state["position_ids"].flip(0)}, tmp_path / "third.pth")
    with registered(format):
        assert torch.equal(
            parity.to_torch(parity.load(tmp_path / "second.pth"))["cls_token"].flatten(), state["cls"].flatten()
        )
        with pytest.raises(InputError, match=r"position_ids is a constant for table\.txt, but has other values"):
            parity.load(tmp_path / "third.pth")


def test_the_working_directory_is_searched_for_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_vit.py").write_text(f"from {MODULE} import Renamed as ViT\n")
    torch.save(trained("Renamed").state_dict(), tmp_path / "theirs.pth")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    try:
        assert "name: vit\n" in derive_table("their_vit:ViT(depth=2)", "theirs.pth").text
    finally:
        sys.modules.pop("their_vit", None)
    assert sys.path == before
    with pytest.raises(InputError, match="there is no module their_vi; did you mean 'their_vit'"):
        derive_table("their_vi:ViT", "theirs.pth")


@pytest.mark.parametrize(
    ("missing", "remedy"), [("torch", "pip install '.[torch]' in the checkout"), ("their_lib", "install it")]
)
def test_a_package_that_the_module_needs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, remedy: str
) -> None:
    (tmp_path / "their_vit.py").write_text(f"import {missing}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(InputError) as caught:
        derive_table("their_vit:ViT", "theirs.pth")
    assert str(caught.value).endswith(f"their_vit cannot be imported: the package {missing} is not installed: {remedy}")
