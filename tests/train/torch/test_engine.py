"""The training steps of `TorchEngine` and `JaxEngine` are the same function: on the same batches they agree in float64."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
pytest.importorskip("grain")

import parity
import vit_spec
from parity.checkpoints.weights import Checkpoint, as_checkpoint
from tests.random_configs import configs
from tests.torch_meshes import SCALE_FREE, make_engine
from tests.twins import perturbed_params
from train.data.augment import Mix
from train.data.batches import Batch
from train.jax.engine import JaxEngine
from train.jax.losses import soft_targets as jax_soft_targets
from train.loop.init_from import draw_initial_weights
from train.loop.loop_state import LoopState
from train.loop.teacher_weights import load_teacher
from train.recipes import OPTIMIZERS, Augment, Optimizer, Recipe
from train.recipes.schedule import learning_rate
from train.torch.engine import TorchEngine
from train.torch.losses import loss_and_metric, soft_targets
from train.torch.runtime import one_line_errors
from vit_spec import InputError, ViTConfig

SIZES: dict[str, Any] = {"image_size": (8, 8), "patch_size": 4, "width": 16, "depth": 2, "num_heads": 2, "mlp_dim": 32}
CONFIG = vit_spec.get("vit_ti16", num_classes=5, **SIZES)
START = as_checkpoint(jax.tree.map(lambda x: np.asarray(x, np.float64), perturbed_params(CONFIG)), CONFIG, "jax")
MIX = Mix(np.float32(0.75), np.array([0, 0, 4, 3], np.int32), np.float32(0.7))
STEPS = 50


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    with jax.enable_x64(True):
        yield
    torch.set_default_dtype(torch.float32)


def make_batch(seed: int, mix: Mix | None = None, task: str = "classes") -> Batch:
    """Return a batch of 12 random images and targets."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, 5, 12).astype(np.int32)
    if task != "classes":
        of_labels = task == "labels"
        targets = (rng.integers(0, 2, (12, 5)) if of_labels else rng.normal(size=(12, 5))).astype(np.float32)
    return Batch(rng.integers(0, 256, (12, 8, 8, 3), np.uint8), targets, np.arange(12), np.ones(12, bool), mix)


def make(
    engine: Any, task: Any = "classes", class_weights: Any = None, start: Checkpoint | None = None, **changes: Any
) -> Any:
    """Return an engine of the small model, with dropout if the random numbers are shared; or of other weights."""
    config = CONFIG.replace(regularisation=DROPOUT) if changes.get("rng") == "shared" else CONFIG
    config, start = (config, START) if start is None else (start.config, start)
    recipe = replace(Recipe(batch_size=12, optimizer=Optimizer(eps=1e-3)), **changes)

    def rate(step: Any) -> Any:
        return learning_rate(step, peak=0.01, warmup=5, total=STEPS)

    weights = None if class_weights is None else np.array(class_weights)
    teacher = load_teacher(recipe, task, tuple("abcde"), config.in_channels)
    others: dict[str, Any] = {"class_weights": weights, "teacher": teacher, "folder": Path("unused")}
    return engine(config, recipe, task=task, learning_rate=rate, initial_weights=start, **others)


def test_what_changes_after_the_call_is_not_in_the_checkpoint(tmp_path: Path) -> None:
    engine = make_engine("", tmp_path)
    saved = {name: entries.clone() for name, (_, entries) in engine._tensors().items()}
    engine.save_checkpoint(0, LoopState())
    for _, entries in engine._tensors().values():
        entries.data.fill_(7)
    engine.close()
    engine.restore_checkpoint()
    assert all(torch.equal(entries, saved[name]) for name, (_, entries) in engine._tensors().items())


def test_a_mesh_of_more_devices_than_there_are_is_refused() -> None:
    with pytest.raises(InputError, match="--mesh 'data=2' has a product of 2 for 1 devices"):
        make(TorchEngine, mesh="data=2")


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_rematerialization_does_not_change_a_step(remat: str) -> None:
    engines = [make(TorchEngine, remat=each) for each in ("none", remat)]
    for n in range(2):
        one, other = (float(engine.step(make_batch(n))["loss"]) for engine in engines)
        assert one == other
    one, other = (weights(engine, "params") for engine in engines)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by dynamo, of the input of a block
@pytest.mark.parametrize("rng", ["own", "shared"])
def test_compiled_blocks_do_the_same_step(rng: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without dropout, or with the same dropout."""
    backend = partialmethod(torch.nn.Module.compile, backend="aot_eager", fullgraph=True)  # inductor takes a minute
    monkeypatch.setattr(torch.nn.Module, "compile", backend)
    torch._dynamo.reset()
    plain, compiled = (make(TorchEngine, compile=each, ema=0.9, remat="full", rng=rng) for each in ("auto", "on"))
    assert plain.hardware == "1 device (cpu)" and compiled.hardware == "1 device (cpu), compiled"
    for n in range(2):
        one, other = (
            {name: float(value) for name, value in each.step(make_batch(n)).items()} for each in (plain, compiled)
        )
        assert other == pytest.approx(one, rel=1e-12)
    assert np.asarray(compiled.evaluate(make_batch(0))[0]) == pytest.approx(np.asarray(plain.evaluate(make_batch(0))[0]))


def weights(engine: Any, name: str) -> dict[str, Any]:
    """Return the weights ("params") or their moving average ("ema") by the names of the PyTorch twin."""
    if isinstance(engine, TorchEngine):
        own = engine._params if name == "params" else engine.state.ema
        return {key: tensor.detach() for key, tensor in own.items()}
    tree = jax.tree.map(np.asarray, getattr(engine.state, name))
    return dict(parity.to_torch(as_checkpoint(tree, CONFIG, "jax")))


WEIGHTS = [0.4, 3.0, 0.0, 1.2, 0.9]
RECIPES: dict[str, dict[str, Any]] = {
    "accumulated": {"accumulate": 3, "ema": 0.99},
    "sigmoid": {"loss": "sigmoid", "optimizer": Optimizer(layer_decay=0.8, freeze=("patch_embed.*",))},
    "labels, mixed": {
        "augment": Augment(mixup=0.2),
        "label_smoothing": 0.1,
        "optimizer": Optimizer(name="sgd", lr=0.1),
    },
    "values, mixed": {"augment": Augment(mixup=0.2), "ema": 0.9},
    "weighted": {"class_weights": WEIGHTS},
    "weighted, mixed": {
        "class_weights": WEIGHTS,
        "augment": Augment(mixup=0.2, cutmix=1.0),
        "label_smoothing": 0.1,
        "accumulate": 2,
    },
    "weighted, sigmoid": {"class_weights": [WEIGHTS[::-1], WEIGHTS], "loss": "sigmoid"},
    "weighted labels": {"class_weights": [WEIGHTS[::-1], WEIGHTS]},
    "regularised": {"rng": "shared", "accumulate": 2, "label_smoothing": 0.1, "seed": 2**40 + 3},
}
# Every rate above 0; patch dropout leaves 3 of 4 patches.
DROPOUT = {"pos_drop": 0.1, "patch_drop": 0.2, "attn_drop": 0.2, "mlp_drop": 0.1, "drop_path": 0.3}


DISTILLED = {
    "hard": {},
    "soft": {"distillation": "soft", "distillation_weight": 0.3, "distillation_temperature": 2.0, "accumulate": 2},
    "mixed": {"distillation": "soft", "augment": Augment(cutmix=1.0), "label_smoothing": 0.1},
    "sigmoid": {"loss": "sigmoid"},
    "weighted": {"class_weights": WEIGHTS, "distillation_weight": 0.8},
}


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the files of a teacher for images as they are, and of one for larger images that has more classes."""
    folder = tmp_path_factory.mktemp("teachers")
    same = CONFIG.replace(width=24)
    pixels = {"mean": (0.4, 0.5, 0.6), "std": (0.2, 0.25, 0.3)}
    other = CONFIG.replace(depth=1, image_size=(12, 16), num_classes=7, pixels=pixels, mlp={"activation": "gelu_tanh"})
    files = {}
    for name, config, labels in (("same", same, None), ("other", other, tuple("gedfcba"))):
        weights = jax.tree.map(lambda x: 3 * np.asarray(x, np.float64), perturbed_params(config))
        files[name] = str(folder / f"{name}.safetensors")
        parity.save(files[name], weights, config, format="jax", labels=labels)
    return files


# Which outputs the losses read does not depend on the losses, so each loss is tried with one kind of student.
@pytest.mark.parametrize(
    ("name", "student"),
    [
        *(("hard", "one head"), ("mixed", "one head"), ("sigmoid", "one head")),
        *(("hard", "two heads"), ("soft", "two heads"), ("weighted", "two heads")),
    ],
)
def test_distillation_agrees_in_float64(name: str, student: str, teachers: dict[str, str]) -> None:
    tokens = {"distillation": student == "two heads"}
    config = CONFIG.replace(tokens=tokens, positions={"covers": "all"})
    start = as_checkpoint(jax.tree.map(lambda x: np.asarray(x, np.float64), perturbed_params(config)), config, "jax")
    teacher = teachers["other" if name in ("mixed", "soft") else "same"]
    engines = [make(each, start=start, teacher=teacher, **DISTILLED[name]) for each in (JaxEngine, TorchEngine)]
    plain = make(TorchEngine, start=start, **{**DISTILLED[name], "distillation_weight": 0.0})
    for n in range(10):
        batch = make_batch(n, MIX if name == "mixed" else None)
        of_jax, of_torch = ({key: float(value) for key, value in each.step(batch).items()} for each in engines)
        assert of_torch == pytest.approx(of_jax, rel=1e-10, abs=1e-12)
        if n == 0:  # the teacher has a part in the loss
            assert abs(float(plain.step(batch)["loss"]) - of_torch["loss"]) > 0.01


@pytest.mark.parametrize("name", RECIPES)
def test_fifty_steps_agree_in_float64(name: str) -> None:
    task = next((each for each in ("labels", "values") if each in name), "classes")
    engines = [make(each, task, **RECIPES[name]) for each in (JaxEngine, TorchEngine)]
    for n in range(STEPS):
        batch = make_batch(n, MIX if "mixed" in name else None, task)
        of_jax, of_torch = ({key: float(value) for key, value in each.step(batch).items()} for each in engines)
        assert of_torch == pytest.approx(of_jax, rel=1e-10, abs=1e-12)
    for part in ("params", "ema") if RECIPES[name].get("ema") else ("params",):
        expected, found = (weights(each, part) for each in engines)
        for key, tensor in found.items():
            assert (tensor - expected[key]).norm() <= 1e-10 * expected[key].norm(), (part, key)
    evaluated = [each.evaluate(make_batch(0, task=task)) for each in engines]
    for ours, theirs in zip(*evaluated, strict=True):
        assert np.asarray(ours) == pytest.approx(np.asarray(theirs), rel=1e-9, abs=1e-9)


@st.composite
def runs(draw: st.DrawFn) -> tuple[ViTConfig, dict[str, Any]]:
    """Draw a model that classifies images, and fields of a recipe for it."""

    def one(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    config = draw(configs())
    rates = {name: one(0.0, rate) for name, rate in DROPOUT.items()}
    rates["patch_drop"] *= config.positions.relative == "none"
    config = config.replace(num_classes=5, regularisation=rates, head={"pool": config.head.pool.replace("none", "mean")})
    optimizer = Optimizer(
        name=one(*OPTIMIZERS),
        layer_decay=one(1.0, 0.7),
        freeze=one((), ("patch_embed.*",)),
        eps=1e-3,
    )
    mixing = one(Augment(), Augment(mixup=0.2), Augment(mixup=0.2, repeats=2))
    changes = {"optimizer": optimizer, "augment": mixing, "accumulate": one(1, 2), "remat": one("none", "dots", "full")}
    changes |= {"ema": one(0.0, 0.9), "label_smoothing": one(0.0, 0.1), "loss": one("softmax", "sigmoid")}
    return config, changes | {"class_weights": None if changes["loss"] == "sigmoid" else one(None, WEIGHTS)}


@settings(max_examples=5, deadline=None, derandomize=True, phases=[Phase.generate])  # shrinking would take minutes
@given(runs())
def test_random_runs_agree_in_float64(run: tuple[ViTConfig, dict[str, Any]]) -> None:
    """Three steps of any model, with the random numbers that both frameworks share."""
    config, changes = run
    start = as_checkpoint(jax.tree.map(lambda x: np.asarray(x, np.float64), perturbed_params(config)), config, "jax")
    engines = [make(each, start=start, rng="shared", **changes) for each in (JaxEngine, TorchEngine)]
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (12, *config.image_size, config.in_channels), np.uint8)
    for n in range(3):
        batch = make_batch(n, MIX._replace(box=np.zeros(4, np.int32)) if changes["augment"].mixes else None)
        of_jax, of_torch = (
            {key: float(value) for key, value in each.step(batch._replace(images=images)).items()} for each in engines
        )
        # Scale-free updates, and orthogonalization, amplify rounding.
        precision = 1e-9 if changes["optimizer"].name in (*SCALE_FREE, "muon") else 1e-10
        assert of_torch == pytest.approx(of_jax, rel=precision, abs=1e-12)


def test_shared_random_numbers_start_both_trainers_with_the_same_weights() -> None:
    config = CONFIG.replace(positions={"rotary": "mixed"}, head={"init": "trunc_normal(0.02)"})
    one, other = (draw_initial_weights(config, seed) for seed in (1, 2))
    for name, tensor in parity.to_torch(one).items():
        law = vit_spec.rows(config)[".".join(word for word in name.split(".") if not word.isdigit())].law
        assert tensor.dtype == torch.float32
        assert law is None or law.kind == "constant" or not torch.equal(tensor, parity.to_torch(other)[name]), name
    blocks = [parity.to_torch(one)[f"blocks.{i}.attn.qkv.weight"] for i in range(2)]
    assert not torch.equal(*blocks)


def test_other_random_numbers_of_jax_are_refused() -> None:
    with jax.threefry_partitionable(False), pytest.raises(InputError, match="needs jax_threefry_partitionable"):
        make(JaxEngine, rng="shared")


def test_too_little_memory_and_the_end_of_another_process_are_reported_in_one_line() -> None:
    message = (
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory\nException raised from"
    )
    for error in (RuntimeError(message), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")):
        with pytest.raises(InputError, match=r"not enough memory \(.*\): give a smaller --batch-size"), one_line_errors():
            raise error
    with pytest.raises(InputError, match="another process of the run has ended: start all"), one_line_errors():
        raise RuntimeError("[pair.cc:538] Read error [127.0.0.1]:45704: Connection reset by peer")
    with pytest.raises(RuntimeError, match="something else"), one_line_errors():
        raise RuntimeError("something else")


@pytest.mark.parametrize("task", ["classes", "labels", "values"])
def test_targets_are_mixed_in_float64(task: Any) -> None:
    """In float32, one framework rounds a sum of products once and the other twice."""
    targets = make_batch(0, task=task).targets
    assert jax_soft_targets(task, targets, 5, 0.1).dtype == np.float64
    tensor = torch.tensor(targets).long() if task == "classes" else torch.tensor(targets)
    assert soft_targets(task, tensor, 5, 0.1).dtype == torch.float64


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_weights_mean_what_pytorch_means_by_them(smoothing: float) -> None:
    rng = np.random.default_rng(0)
    outputs, targets = torch.tensor(rng.normal(size=(9, 5))), torch.tensor(rng.integers(0, 5, 9))
    weights, soft = torch.tensor(WEIGHTS), soft_targets("classes", targets, 5, smoothing)
    expected = torch.nn.functional.cross_entropy(outputs, soft, weights, reduction="none")
    assert loss_and_metric("classes", outputs, soft, weights=weights)[0].numpy() == pytest.approx(expected.numpy())
    if not smoothing:
        assert loss_and_metric("classes", outputs, targets, weights=weights)[0].numpy() == pytest.approx(expected.numpy())
    labels = torch.tensor(rng.integers(0, 2, (9, 5)).astype(float))
    only_positive = torch.stack([torch.ones(5), weights])
    of_each = torch.nn.functional.binary_cross_entropy_with_logits(outputs, labels, pos_weight=weights, reduction="none")
    found = loss_and_metric("labels", outputs, labels, weights=only_positive)[0]
    assert found.numpy() == pytest.approx(of_each.mean(1).numpy())
