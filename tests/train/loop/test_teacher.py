"""Knowledge distillation: its loss, the images that a teacher gets, and teachers that cannot teach or have changed."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
pytest.importorskip("grain")

import jax.numpy as jnp
from torch.nn import functional as F

import parity
import train.jax.losses
import train.torch.losses
import vit_spec
import vit_torch
from parity.checkpoints.conversion import checksum
from parity.checkpoints.weights import Checkpoint, as_checkpoint
from tests.torch_costs import LiveTensors
from tests.twins import perturbed_params
from train.data.sources import open_dataset
from train.loop import session
from train.loop.class_names import match_outputs
from train.loop.metrics_file import read_records
from train.loop.request import Request
from train.loop.teacher import InputTransform, Teacher
from train.loop.teacher_weights import load_teacher
from train.plan import with_teacher
from train.recipes import RECIPES, DataInfo, Model, Optimizer, Recipe
from train.torch.engine import TorchEngine
from train.torch.memory_estimate import estimate_memory
from train.torch.teacher import TeacherModel
from vit_spec import InputError, ViTConfig

pytestmark = pytest.mark.usefixtures("rendered_once")

SIZES: dict[str, Any] = {"patch_size": 4, "width": 16, "depth": 2, "num_heads": 2, "mlp_dim": 32, "num_classes": 10}
COLOUR = vit_spec.get("vit_ti16", image_size=(12, 16), **SIZES, pixels={"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.25, 0.3)})
GREY = vit_spec.get("vit_ti16", image_size=(8, 8), in_channels=1, **SIZES, pixels={"mean": (0.3,), "std": (0.7,)})
DIGITS = tuple("0123456789")
ONE = {"data": 1, "fsdp": 1, "tensor": 1}


def weights_of(config: ViTConfig) -> Checkpoint:
    return as_checkpoint(jax.tree.map(lambda x: 3 * np.asarray(x), perturbed_params(config)), config, "jax")


def save(path: Path, config: ViTConfig, **metadata: Any) -> str:
    """Write the weights of a teacher, and return the path."""
    parity.save(path, jax.tree.map(np.asarray, perturbed_params(config)), config, format="jax", force=True, **metadata)
    return str(path)


# The loss and the images ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 3.0, None])
def test_the_loss_is_that_of_pytorch_functions(temperature: float | None) -> None:
    rng = np.random.default_rng(0)
    student, teacher = (torch.tensor(3 * rng.normal(size=(7, 5))) for _ in range(2))
    expected = F.cross_entropy(student, teacher.argmax(1), reduction="none")
    if temperature is not None:
        logs = [F.log_softmax(each / temperature, 1) for each in (student, teacher)]
        expected = temperature**2 * F.kl_div(*logs, reduction="none", log_target=True).sum(1)
    found = train.torch.losses.teacher_loss(student, teacher, temperature)
    assert found.numpy() == pytest.approx(expected.numpy(), rel=1e-12)
    with jax.enable_x64(True):
        of_jax = train.jax.losses.teacher_loss(*(jnp.asarray(each.numpy()) for each in (student, teacher)), temperature)
        assert np.asarray(of_jax) == pytest.approx(expected.numpy(), rel=1e-12)


def test_a_teacher_gets_the_images_in_its_own_size_colours_and_normalization() -> None:
    pixels = torch.rand(3, 1, 8, 8)
    mean, std = (torch.tensor(each)[:, None, None] for each in (COLOUR.pixels.mean, COLOUR.pixels.std))
    resized = F.interpolate(pixels, (12, 16), mode="bicubic", antialias=True).expand(-1, 3, -1, -1)
    recipe = Recipe(distillation_weight=1.0)
    teacher = TeacherModel(Teacher("", weights_of(COLOUR), np.arange(10), []), GREY, recipe, None, torch.device("cpu"))
    transformed = teacher._transformed((pixels - 0.3) / 0.7)
    torch.testing.assert_close(transformed, (resized - mean) / std, atol=1e-5, rtol=1e-5)


def test_images_of_the_same_kind_are_not_changed() -> None:
    scale, shift, *matrices = InputTransform.between(COLOUR, COLOUR.replace(depth=1))
    assert (scale == 1).all() and not shift.any() and matrices == [None, None]


def test_both_heads_of_a_distilled_model_are_returned_and_their_mean_is_the_output() -> None:
    config = COLOUR.replace(tokens={"distillation": True})
    model = vit_torch.ViT(config).eval()
    images = torch.rand(2, 3, 12, 16)
    both = model(images, both_heads=True)
    assert both.shape == (2, 2, 10) and not torch.equal(*both.unbind(1))
    assert torch.equal(both.sum(1) / 2, model(images))
    with pytest.raises(InputError, match=r"both_heads is for models with tokens\.distillation=True"):
        vit_torch.ViT(COLOUR)(images, both_heads=True)


# Teachers that cannot teach -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "metadata", "options", "message"),
    [
        ({}, {"labels": DIGITS[::-1]}, {}, ""),
        (
            {"num_classes": 7},
            {},
            {},
            "the teacher has 7 outputs, and the data has 10 classes: give a teacher of these classes",
        ),
        ({}, {"labels": tuple("abcdefghij")}, {}, "the data has the class '0', which the teacher does not have: give a"),
        ({"num_classes": 0}, {}, {}, "gives features and no classes: give the weights of a classifier"),
        ({}, {"task": "labels"}, {}, "gives labels and no classes: give the weights of a classifier"),
        (
            {"in_channels": 1, "pixels": {"mean": (0.5,), "std": (0.5,)}},
            {},
            {},
            "takes images of 1 channels, and the student of",
        ),
        ({}, {}, {"task": "labels"}, "--teacher is for classes, and the task is labels: leave it out"),
    ],
)
def test_a_teacher_is_of_the_same_classes(
    changes: dict[str, Any], metadata: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    file = save(tmp_path / "teacher.safetensors", COLOUR.replace(**changes), **metadata)
    arguments: Any = (Recipe(teacher=file), options.get("task", "classes"), DIGITS, 3)
    if message:
        with pytest.raises(InputError, match=message):
            load_teacher(*arguments)
        return
    teacher = load_teacher(*arguments)
    assert teacher is not None and teacher.columns.tolist() == list(range(10))[::-1]


def test_the_config_of_a_bare_file_can_be_given(tmp_path: Path) -> None:
    state = {name: torch.tensor(np.asarray(x)) for name, x in parity.to_torch(weights_of(COLOUR)).items()}
    torch.save(state, tmp_path / "bare.pth")
    with pytest.raises(InputError, match="--teacher-set"):
        load_teacher(Recipe(teacher=str(tmp_path / "bare.pth")), "classes", DIGITS, 3)
    with pytest.raises(InputError, match="loaded, --teacher-set num_head is not a field of the config"):
        load_teacher(Recipe(teacher=str(tmp_path / "bare.pth"), teacher_set=("num_head=2",)), "classes", DIGITS, 3)
    recipe = Recipe(teacher=str(tmp_path / "bare.pth"), teacher_set=("num_heads=2", "image_size=(12,16)"))
    teacher = load_teacher(recipe, "classes", DIGITS, 3)
    assert teacher is not None and teacher.checkpoint.config.num_heads == 2
    assert any("no names of classes" in note for note in teacher.notes)


# Runs -----------------------------------------------------------------------------------------------------------------

RECIPE = Recipe(
    model=Model(name="vit_ti16", image_size=(8, 8), changes=tuple(f"{name}={value}" for name, value in SIZES.items())[:-1]),
    optimizer=Optimizer(lr=3e-3),
    epochs=1,
)


def run_training(recipe: Recipe) -> int:
    return session.train(Request("test", recipe, open_dataset("digits"), "python -m train.torch"), TorchEngine)


def test_a_run_shows_its_teacher_and_resumes_with_the_same_one_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = save(tmp_path / "first.safetensors", COLOUR)
    recipe = replace(RECIPE, run=str(tmp_path / "run"), teacher=first)
    assert run_training(recipe) == 0
    printed = capsys.readouterr().out
    assert f"{vit_spec.count(COLOUR):,} parameters: its most likely class, 50% of the loss; images are resized" in printed
    moved = str(shutil.move(first, tmp_path / "moved.safetensors"))
    assert run_training(replace(recipe, teacher=moved)) == 0
    other = str(tmp_path / "other.safetensors")
    parity.save(other, jax.tree.map(np.asarray, perturbed_params(COLOUR, seed=1)), COLOUR, format="jax")
    with pytest.raises(
        InputError, match=r"its teacher is .*moved.safetensors, and --teacher .*other.* has other weights; give"
    ):
        run_training(replace(recipe, teacher=other))
    with pytest.raises(
        InputError, match=r"it has the teacher .*moved.safetensors, and --teacher is not given; give the same"
    ):
        run_training(replace(recipe, teacher=None))
    with pytest.raises(InputError, match=r"the teacher cannot be loaded, .*; --teacher WEIGHTS says where it is"):
        run_training(recipe)
    plain = replace(RECIPE, run=str(tmp_path / "plain"))
    assert run_training(plain) == 0
    with pytest.raises(InputError, match=r"it has no teacher, and --teacher is .*moved"):
        run_training(replace(plain, teacher=moved))


def test_a_plan_adds_what_a_teacher_needs() -> None:
    config, sizes = GREY, {"data": 2, "fsdp": 1, "tensor": 2}
    recipe = Recipe(batch_size=8)
    plain, taught = (each(config, recipe, sizes) for each in (estimate_memory, with_teacher(estimate_memory, COLOUR)))
    held = (COLOUR.num_prefix + 12) * (5 * 16 + 2 * 32)
    assert taught.total - plain.total == 4 * (vit_spec.count(COLOUR) + 4 * (held + 2 * 12 * 16 * 3))
    assert taught.flops - plain.flops == 2 * 8 * vit_spec.flops(COLOUR)


class PeakOfLiveTensors(LiveTensors):
    peak = 0

    def __torch_dispatch__(self, *arguments: Any) -> Any:
        out = super().__torch_dispatch__(*arguments)
        self.peak = max(self.peak, self.bytes)
        return out


@pytest.mark.parametrize("name", ["vit_ti16", "dinov2_s14", "deit_s16_distilled"])
def test_a_teacher_needs_the_planned_memory(name: str) -> None:
    """At the sizes of published models, with two images; the classifier's small arrays are not planned."""
    config = vit_spec.get(name, depth=2)
    recipe = Recipe(batch_size=2)
    teacher = TeacherModel(Teacher("", weights_of(config), np.arange(2), []), config, recipe, None, torch.device("cpu"))
    with PeakOfLiveTensors() as live:
        teacher.add_loss(torch.zeros(2), torch.zeros(2, 3, *config.image_size), torch.zeros(2, 2))
    held = live.peak + sum(parameter.nbytes for parameter in teacher.model.parameters())
    assert held == pytest.approx(with_teacher(estimate_memory, config)(config, recipe, ONE).memory["teacher"], rel=0.02)


def test_outputs_are_matched_by_name() -> None:
    names = ("crane", "dog", "crane")
    assert match_outputs("the teacher", names, 3, "classes", names).tolist() == [0, 1, 2]
    assert match_outputs("the teacher", names, 3, "classes", ("dog",)).tolist() == [1]
    for labels, wanted in ((names, ("dog", "crane")), (("dog", "crane"), names)):
        with pytest.raises(InputError, match="'crane' names several classes, so the teacher cannot be matched by names"):
            match_outputs("the teacher", labels, len(labels), "classes", wanted)
    with pytest.raises(InputError, match=r"'café', which the teacher has in another Unicode form \(rename it\)"):
        match_outputs("the teacher", ("cafe\u0301", "dog"), 2, "classes", ("dog", "caf\u00e9"))


def test_the_checksum_of_weights_does_not_depend_on_their_format() -> None:
    weights = weights_of(COLOUR)
    assert checksum(as_checkpoint(parity.to_torch(weights), COLOUR, "torch")) == checksum(weights)
    assert checksum(weights_of(GREY)) != checksum(weights)


def test_a_student_learns_the_digits_from_a_teacher_alone(tmp_path: Path) -> None:
    recipe = replace(RECIPES["tiny"](DataInfo(3, 1)), epochs=3, run=str(tmp_path / "teacher"))
    assert run_training(recipe) == 0
    taught = replace(recipe, run=str(tmp_path / "student"), teacher=str(tmp_path / "teacher"), distillation_weight=1.0)
    assert run_training(replace(taught, seed=1)) == 0
    scores = [
        max(each["accuracy"] for each in read_records(path / "metrics.jsonl") if each["set"] == "held_out")
        for path in (tmp_path / "teacher", tmp_path / "student")
    ]
    assert min(scores) > 0.4
