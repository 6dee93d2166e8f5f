"""What a run learns from, with and how: a frozen dataclass of which each field has a line of help."""

import ast
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import vit_spec
from train.recipes.augmentation import Augment
from train.recipes.durations import parse
from train.recipes.schedule import Shape
from vit_spec import InputError, ViTConfig

Task = Literal["classes", "labels", "values"]

# The fields that say how long something takes, and what a number alone counts there.
DURATIONS = {"epochs": "epochs", "warmup": "share", "cooldown": "share", "eval_every": "epochs", "save_every": "epochs"}


class Known(NamedTuple):
    """What is known of the data when a recipe is asked for.

    images: how many there are to train on.
    channels: 1 for grey, 3 for colour.
    size: height and width, where all are alike and small.
    """

    images: int
    channels: int
    size: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Model:
    """The network. Its number of outputs follows from the data and the task."""

    name: str = "vit_s16"
    """A named model; `python -m parity models` lists them."""
    image_size: tuple[int, int] | None = None
    """Height and width in pixels that images are brought to. None: what suits the data."""
    in_channels: int | None = None
    """1 for grey, 3 for colour. None: what the data has."""
    changes: tuple[str, ...] = ()
    """Any other fields of the model's config, on top of those that the recipe changes, such as: depth=4 head.pool=mean
    regularisation.drop_path=0.1"""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """How a gradient moves the weights, and what holds it back."""

    name: Literal["adamw", "sgd", "lamb", "lion", "adafactor", "muon"] = "adamw"
    """The rule. adamw is the one that both frameworks compute alike to the last digit."""
    lr: float = 1e-3
    """Highest learning rate, reached at the end of the warm-up."""
    weight_decay: float = 0.05
    """Share of a weight that is taken away per unit of learning rate; biases, norms and tokens are left alone."""
    beta1: float = 0.9
    """Memory of the mean gradient, per step: momentum. muon has 0.95 for the matrices of blocks, and this for all else."""
    beta2: float = 0.999
    """Memory of the mean squared gradient, per step, for adamw, lamb and what muon leaves to Adam. For lion, memory of the
    mean gradient: give 0.99, as its paper does. sgd has none, and adafactor one of its own, which rises to 0.999."""
    eps: float = 1e-8
    """Added to the root of the mean square before dividing by it: by adamw, lamb and what muon leaves to Adam."""
    clip: float = 1.0
    """Gradients of a larger global norm are scaled down to it."""
    layer_decay: float = 1.0
    """What a layer has of the learning rate of the layer after it; for fine-tuning, 0.65 to 0.9."""
    freeze: tuple[str, ...] = ()
    """Weights that stay as they are, by patterns of their names in PyTorch: 'patch_embed.*' 'blocks.[0-5].*'"""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides what a run learns."""

    model: Model = field(default_factory=Model)
    init: str | None = None
    """Weights to start from: a run's folder (its best), or any file or hf:// name that `python -m parity inspect` reads.
    None: drawn by the seed."""
    init_set: tuple[str, ...] = ()
    """What the file of those weights does not tell of its model, such as: num_heads=4 norms.eps=1e-5"""
    data: str = "digits"
    """Where the images come from: digits (1,797 handwritten digits, no download), folder:PATH (class folders of images),
    parquet:PATH, npz:FILE, idx:PATH, cifar:PATH, csv:TABLE, tar:PATTERN or hf://OWNER/NAME; see docs/training.md."""
    held_out: float | str | None = None
    """What the model is judged by: the name of a split of the data, or a share of every class kept for it. None: the
    split that the data has for it, else 0.2."""
    compare_data: Literal["sample", "all", "none"] = "sample"
    """How a run that resumes knows its data, which may lie elsewhere by then. sample: by names, sizes and answers, and a
    sample of contents. all: by every byte, from the run's beginning. none: go on with data changed on purpose."""
    corrupt: Literal["stop", "skip"] = "stop"
    """Where an image is damaged: stop, naming it; or skip it, naming and counting it."""
    workers: int | None = None
    """Processes that prepare images. None: what suits the data and this machine; 0: threads of the trainer's own."""
    task: Task | None = None
    """What is learnt. classes: one class an image (softmax). labels: each label yes or no on its own (sigmoid).
    values: numbers (mean squared error), classes by their names. None: what the data says."""
    augment: Augment = field(default_factory=Augment)
    optimizer: Optimizer = field(default_factory=Optimizer)
    batch_size: int = 64
    """Images in a step, over all devices together."""
    accumulate: int = 1
    """Parts that a batch is taken in, one after the other, where all of it needs too much memory."""
    epochs: float | str = 10
    """How often every training image is shown; or a length such as 2000steps or 1e6examples."""
    warmup: float | str = 0.1
    """How long the learning rate grows from zero: a share of the run; or a length such as 10%, 500steps or 5epochs."""
    decay: Shape = "cosine"
    """What follows: half a cosine to zero; constant; or rsqrt, one over the root of the step."""
    cooldown: float | str = 0
    """How long it falls to zero at the end, on top: a share of the run, or a length."""
    loss: Literal["softmax", "sigmoid"] = "softmax"
    """Of classes: softmax lets them compete; sigmoid asks for each by itself (DeiT-III)."""
    label_smoothing: float = 0.0
    """Share of a target that is spread evenly over all classes."""
    ema: float = 0.0
    """Memory of a running mean of the weights, per step, such as 0.9999, warmed up over the first steps. The mean is
    evaluated and saved as weights and best, the weights themselves beside it as weights_raw and best_raw. 0: none."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What activations are computed in; weights and what the optimizer keeps are float32 always."""
    remat: Literal["none", "dots", "full"] = "none"
    """What is computed again rather than kept for the backward pass: nothing, all but matrix products, or all."""
    mesh: str = "data=-1"
    """How devices are used: data=N splits images, fsdp=N images and weights, tensor=N heads and hidden units; one may be
    -1, what is left. data=-1,fsdp=4,tensor=2"""
    seed: int = 0
    """Decides the starting weights, the order of images and every other random choice; one seed, one run."""
    run: str | None = None
    """Folder to write to; a run that is in it goes on where it stopped. None: runs/RECIPE-DATE-TIME."""
    log_every: int = 10
    """Steps between two lines of training metrics."""
    eval_every: float | str = 1
    """Epochs between two looks at the held-out images, or a length; the weights are saved each time."""
    save_every: float | str = 1
    """Epochs between two checkpoints, or a length: no more than this is lost when a run is cut off."""
    keep: int = 2
    """How many of the newest checkpoints stay; that of the best look stays besides."""
    non_finite: Literal["stop", "skip"] = "stop"
    """Where the loss or a gradient is no finite number: stop, or leave the step out and say so."""
    tensorboard: bool = True
    """Write TensorBoard events too: tensorboard --logdir runs"""
    wandb: str | None = None
    """A project of Weights & Biases to write the metrics to as well; needs its package."""
    profile: tuple[int, int] | None = None
    """First and last step to record with the profiler, into the run's folder; steps are counted from 1."""

    def __post_init__(self) -> None:
        lengths = {name: _length(name, getattr(self, name), alone) for name, alone in DURATIONS.items()}
        for name, holds, wanted in (
            *((name, length > 0, "more than none") for name, length in lengths.items() if DURATIONS[name] == "epochs"),
            ("held_out", not isinstance(self.held_out, float) or 0 < self.held_out < 1, "a share between 0 and 1"),
            ("workers", self.workers is None or self.workers >= 0, "0 or more processes"),
            ("batch_size", self.batch_size > 0, "a positive number of images"),
            ("accumulate", self.accumulate > 0, "a positive number of parts"),
            ("label_smoothing", 0 <= self.label_smoothing < 1, "a share from 0 up to 1"),
            ("ema", 0 <= self.ema < 1, "a number from 0 up to 1"),
            ("seed", 0 <= self.seed < 2**63, "0 or more, below 2^63"),
            ("log_every", self.log_every > 0, "a positive number of steps"),
            ("keep", self.keep > 0, "1 or more"),
            ("profile", 0 < (self.profile or (1, 1))[0] <= (self.profile or (1, 1))[1], "a first step and a last one"),
            ("optimizer.lr", 0 <= self.optimizer.lr < math.inf, "0 or more"),
            ("optimizer.weight_decay", 0 <= self.optimizer.weight_decay < math.inf, "0 or more"),
            ("optimizer.eps", 0 < self.optimizer.eps < math.inf, "a positive number"),
            ("optimizer.beta1", 0 < self.optimizer.beta1 < 1, "a number between 0 and 1"),
            ("optimizer.beta2", 0 < self.optimizer.beta2 < 1, "a number between 0 and 1"),
            ("optimizer.clip", self.optimizer.clip > 0, "a positive norm"),
            ("optimizer.layer_decay", 0 < self.optimizer.layer_decay <= 1, "a factor above 0 and up to 1"),
        ):
            if not holds:
                part, _, leaf = name.rpartition(".")
                value = getattr(getattr(self, part) if part else self, leaf)
                raise InputError(f"{name} is {value}: give {wanted}")


def _length(name: str, duration: float | str, alone: str) -> float:
    """The number of a duration.

    Raises:
        InputError: naming the field, none; or a share that is all of the run or more.
    """
    try:
        value, unit = parse(duration, alone=alone)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    if name == "epochs" and unit == "share":
        raise InputError(f"{name} is {duration}, a share of what it is to say: give epochs, steps or examples")
    if unit == "share" and value >= 1:
        raise InputError(f"{name} is {duration}: give less than all of the run")
    return value


def fields(part: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every field of a recipe by its dotted name, as the command line has it, with its value."""
    for name, value in vars(part).items():
        if hasattr(value, "__dataclass_fields__"):
            yield from fields(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def changes(model: Model) -> dict[str, Any]:
    """Return `model.changes` as `ViTConfig.replace` takes them.

    Raises:
        InputError: one that is not FIELD=VALUE.
    """
    found: dict[str, Any] = {}
    for change in model.changes:
        path, equals, text = change.partition("=")
        if not equals:
            raise InputError(f"--model.changes has {change!r}: write FIELD=VALUE, such as depth=4 or head.pool=mean")
        try:
            value = ast.literal_eval(text)
        except (SyntaxError, ValueError, MemoryError, RecursionError):  # the last two of a text of brackets
            value = text  # a word, such as the name of a pooling
        part, _, leaf = path.rpartition(".")
        if part:
            found.setdefault(part, {})[leaf] = value
        else:
            found[leaf] = value
    return found


def model_config(model: Model, *, num_outputs: int, in_channels: int, size: tuple[int, int] | None) -> ViTConfig:
    """Return the config of the network: the recipe's word first, then what suits the data, then the named model's own.

    size: height and width of the data's images, where all are alike.  Small ones are enlarged twofold, so that a patch
        of 16 sees 8 pixels a side, to two patches a side at least and to the model's own size at most.

    Raises:
        InputError: an unknown model or field, or a value that the config refuses.
    """
    told: dict[str, Any] = {"num_classes": num_outputs, "in_channels": model.in_channels or in_channels}
    if model.image_size:
        told["image_size"] = model.image_size
    told |= changes(model)
    own = vit_spec.get(model.name)
    if told["in_channels"] != own.in_channels and "pixels" not in told:  # red, green and blue have one mean each
        mean, std = (sum(values) / len(values) for values in (own.pixels.mean, own.pixels.std))
        told["pixels"] = {"mean": (mean,), "std": (std,)}
    if size is None or "image_size" in told:
        return vit_spec.get(model.name, **told)
    config = vit_spec.get(model.name, **told, image_size=told.get("patch_size", own.patch_size))
    rows, columns = (max(2, pixels // 8) for pixels in size)
    (ph, pw), (height, width) = config.patch_size, own.image_size
    return config.replace(image_size=(min(rows * ph, height // ph * ph), min(columns * pw, width // pw * pw)))
