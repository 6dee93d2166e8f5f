"""The dataclass `Recipe`, the complete configuration of a run.  The docstrings of its fields are the help of its flags."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

import vit_spec
from parity.checkpoints.config_overrides import parse_overrides
from train.recipes.augmentation import Augment
from train.recipes.durations import parse_duration
from train.recipes.fields import FieldError, format_value, from_json, to_json
from train.recipes.schedule import DecayShape
from vit_spec import InputError, ViTConfig

Task = Literal["classes", "labels", "values"]

OptimizerName = Literal["adamw", "sgd", "lamb", "lion", "adafactor", "muon"]
OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)

# The fields that are durations, with the unit of a number alone.
DURATIONS = {"epochs": "epochs", "warmup": "share", "cooldown": "share", "eval_every": "epochs", "save_every": "epochs"}


class DataInfo(NamedTuple):
    """The properties of the data that a recipe depends on.

    images: the number of training images.
    channels: 1 for grey, 3 for colour.
    size: (height, width), if all images are alike and small.
    """

    images: int
    channels: int
    size: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model. Its number of outputs follows from the data and the task."""

    name: str = "vit_s16"
    """A named model; `python -m parity models` lists them."""
    image_size: tuple[int, int] | int | None = None
    """Height and width in pixels that images are resized to, such as 384x256; one integer for a square. None: chosen to
    suit the data."""
    in_channels: int | None = None
    """1 for grey, 3 for colour. None: the same as the data."""
    changes: tuple[str, ...] = ()
    """Overrides of other fields of the model's config, in addition to the recipe's own: depth=4 head.pool=mean
    regularisation.drop_path=0.1"""

    def __post_init__(self) -> None:
        if isinstance(self.image_size, int):
            object.__setattr__(self, "image_size", (self.image_size, self.image_size))


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The optimizer, with gradient clipping, layer-wise learning rates and freezing."""

    name: OptimizerName = "adamw"
    """The update rule. Both trainers compute each of them alike, to rounding."""
    lr: float = 1e-3
    """Highest learning rate, reached at the end of the warm-up."""
    weight_decay: float = 0.05
    """Decoupled weight decay, multiplied by the learning rate; biases, norms and tokens do not decay."""
    beta1: float = 0.9
    """Momentum: decay of the mean gradient per step; 0: none. muon uses 0.95 for the matrices of blocks, and this value for
    all other parameters."""
    beta2: float = 0.999
    """Decay of the mean squared gradient per step, for adamw, lamb and the parameters that muon leaves to Adam. For lion,
    decay of the mean gradient: give 0.99, as its paper does. sgd has none; adafactor has its own, which rises to 0.999."""
    eps: float = 1e-8
    """Added to the root of the mean square in the denominator, for adamw, lamb and what muon leaves to Adam."""
    clip: float = 1.0
    """Gradients with a larger global norm are scaled down to this norm."""
    layer_decay: float = 1.0
    """Layer-wise decay: each layer's learning rate divided by that of the next layer; for fine-tuning, 0.65 to 0.9."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained, by patterns of their names in PyTorch: 'patch_embed.*' 'blocks.[0-5].*'"""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The complete configuration of a training run."""

    model: Model = field(default_factory=Model)
    init: str | None = None
    """Weights to start from: a run's folder (its best weights), any file or hf:// name that `python -m parity inspect`
    reads, or timm:NAME, which is hf://timm/NAME. None: random, from the seed."""
    init_set: tuple[str, ...] = ()
    """Override config fields of the file of --init, such as: norms.eps=1e-5 num_heads=6"""
    teacher: str | None = None
    """Knowledge distillation: the weights of a teacher of the same classes, a run's folder or any file or hf:// name as for
    --init. A student with a distillation token learns the teacher's answers with that token's head."""
    teacher_set: tuple[str, ...] = ()
    """Override config fields of the file of --teacher, as --init-set does"""
    distillation: Literal["hard", "soft"] = "hard"
    """The answer of the teacher that the student learns. hard: its most likely class. soft: its probabilities."""
    distillation_weight: float = 0.5
    """Share of the teacher in the loss; the targets of the data have the rest."""
    distillation_temperature: float = 3.0
    """Temperature of the teacher's and the student's probabilities for --distillation soft."""
    data: str = "digits"
    """The data set: digits (1,797 handwritten digits, no download), folder:PATH (class folders of images),
    parquet:PATH, npz:FILE, idx:PATH, cifar:PATH, csv:TABLE, tar:PATTERN or hf://OWNER/NAME; see docs/reference/data.md.
    ?test=0.2 behind it sets a test split aside."""
    held_out: float | str | None = None
    """The images for evaluation: the name of a split of the data, or a share of every class of the training images. None:
    the data's validation split, else its test split, else 0.2."""
    compare_data: Literal["sample", "all", "none"] = "sample"
    """The part of the data by which a resumed run recognises them; they may have moved. sample: names, sizes and targets,
    and a sample of the contents. all: every byte, from the start of the run. none: accept data changed on purpose."""
    corrupt: Literal["stop", "skip"] = "stop"
    """On a damaged image: stop and name it; or skip it, and name and count it."""
    workers: int | None = None
    """Worker processes that prepare images. None: chosen for the data and this machine; 0: threads instead."""
    task: Task | None = None
    """The kind of prediction. classes: one class per image (softmax). labels: each label independently (sigmoid).
    values: numbers (mean squared error); for data of classes, the numbers in their names. None: the data's own."""
    augment: Augment = field(default_factory=Augment)
    optimizer: Optimizer = field(default_factory=Optimizer)
    batch_size: int = 64
    """Images per step, over all devices together."""
    accumulate: int = 1
    """Gradient accumulation: the number of parts that a batch is processed in, one after the other, to save memory."""
    epochs: float | str = 10
    """Length of the run in epochs; or a duration such as 2000steps or 1e6examples."""
    warmup: float | str = 0.1
    """Linear warm-up of the learning rate from zero: a share of the run; or a duration such as 10%, 500steps or 5epochs."""
    decay: DecayShape = "cosine"
    """The schedule after the warm-up: half a cosine to zero; constant; or rsqrt, one over the root of the step."""
    cooldown: float | str = 0
    """Linear decay to zero at the end, on top of the schedule: a share of the run, or a duration."""
    loss: Literal["softmax", "sigmoid"] = "softmax"
    """For classes: softmax cross-entropy; or sigmoid, a binary cross-entropy per class (DeiT-III)."""
    label_smoothing: float = 0.0
    """Share of a target that is distributed evenly over all classes."""
    class_weights: Literal["none", "balanced"] = "none"
    """Weights of the classes or labels in the training loss. balanced: one over their frequency, so that all classes have
    the same weight in an epoch."""
    sampling: Literal["uniform", "balanced"] = "uniform"
    """The images of an epoch. uniform: each once. balanced: as many of each class, those of a rare class several times."""
    ema: float = 0.0
    """Decay per step of an exponential moving average of the weights, such as 0.9999, warmed up over the first steps. The
    average is evaluated and saved as weights and best, the raw weights beside it as weights_raw and best_raw. 0: none."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of activations (mixed precision); parameters and optimizer state are always float32."""
    remat: Literal["none", "dots", "full"] = "none"
    """Activations that the backward pass recomputes to save memory: none, all but matrix products (dots), or all."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Whether train.torch compiles the model (torch.compile), which delays the first step; auto: on GPUs. train.jax
    always compiles."""
    mesh: str = "data=-1"
    """Parallelism over devices: data=N shards images, fsdp=N shards images and parameters, tensor=N shards heads and hidden
    units; one of them may be -1, all remaining devices. Example: data=-1,fsdp=4,tensor=2"""
    seed: int = 0
    """Seed of the initial weights, the order of images and all other random numbers; the same seed gives the same run."""
    rng: Literal["own", "shared"] = "own"
    """The initial weights and the random numbers of dropout, drop path and patch dropout. own: those of the framework.
    shared: numbers that train.jax and train.torch both compute, so that their runs are the same up to rounding."""
    run: str | None = None
    """Folder to write to; a run in it is resumed. None: runs/RECIPE-DATE-TIME."""
    log_every: int = 10
    """Steps between two records of training metrics."""
    eval_every: float | str = 1
    """Epochs between two evaluations on the held-out images, or a duration; the weights are saved each time."""
    patience: int = 0
    """Early stopping: the run ends after this many evaluations in a row that are not better than the best one. 0: never."""
    save_every: float | str = 1
    """Epochs between two checkpoints, or a duration: a run that is killed loses no more than this."""
    keep: int = 2
    """Number of the newest checkpoints to keep; the checkpoint of the best evaluation is kept too."""
    non_finite: Literal["stop", "skip"] = "stop"
    """On a loss or gradient that is not finite: stop; or skip the step and report it, and stop after 20 in a row."""
    tensorboard: bool = True
    """Write TensorBoard events too: tensorboard --logdir runs"""
    wandb: str | None = None
    """A project of Weights & Biases to log the metrics to as well; needs the package wandb."""
    profile: tuple[int, int] | None = None
    """First and last step to profile, counted from 1; the profile is written to the run's folder."""

    def __post_init__(self) -> None:
        lengths = {name: _check_duration(name, getattr(self, name), unit) for name, unit in DURATIONS.items()}
        for name, is_valid, expected in (
            *((name, length > 0, "more than 0") for name, length in lengths.items() if DURATIONS[name] == "epochs"),
            ("held_out", not isinstance(self.held_out, float) or 0 < self.held_out < 1, "a share between 0 and 1"),
            ("workers", self.workers is None or self.workers >= 0, "0 or more processes"),
            ("batch_size", self.batch_size > 0, "a positive number of images"),
            ("accumulate", self.accumulate > 0, "a positive number of parts"),
            ("label_smoothing", 0 <= self.label_smoothing < 1, "a share from 0 up to 1"),
            ("ema", 0 <= self.ema < 1, "a number from 0 up to 1"),
            ("distillation_weight", 0 <= self.distillation_weight <= 1, "a share from 0 to 1"),
            ("distillation_temperature", 0 < self.distillation_temperature < math.inf, "a positive number"),
            ("seed", 0 <= self.seed < 2**63, "0 or more, below 2^63"),
            ("log_every", self.log_every > 0, "a positive number of steps"),
            ("patience", self.patience >= 0, "a number of evaluations, or 0"),
            ("keep", self.keep > 0, "1 or more"),
            ("profile", 0 < (self.profile or (1, 1))[0] <= (self.profile or (1, 1))[1], "a first step and a last one"),
            # Their product is below the largest number in float32.
            ("optimizer.lr", 0 <= self.optimizer.lr <= 1e30, "a number from 0 to 1e30"),
            ("optimizer.weight_decay", 0 <= self.optimizer.weight_decay <= 1e6, "a number from 0 to 1e6"),
            # Smaller numbers are 0 in float32, also times a bias correction: the first update would be 0 / 0.
            ("optimizer.eps", 1e-30 <= self.optimizer.eps <= 1e30, "a number from 1e-30 to 1e30"),
            ("optimizer.beta1", 0 <= self.optimizer.beta1 < 1, "a number from 0 up to 1"),
            ("optimizer.beta2", 0 < self.optimizer.beta2 < 1, "a number between 0 and 1"),
            ("optimizer.clip", self.optimizer.clip >= 1e-30, "a norm of at least 1e-30"),
            ("optimizer.layer_decay", 0 < self.optimizer.layer_decay <= 1, "a factor above 0 and up to 1"),
        ):
            if not is_valid:
                part, _, leaf = name.rpartition(".")
                value = getattr(getattr(self, part) if part else self, leaf)
                raise FieldError(name, f" is {format_value(value)}: give {expected}")
        # The partner of an image is `repeats` images away, also around the end of the batch.
        if self.augment.mixes and self.batch_size < (least := 2 * self.augment.repeats):
            raise FieldError(
                "batch_size",
                f" is {self.batch_size}, so that mixup or CutMix would mix images with themselves: give {least} or more, "
                "twice --augment.repeats, or --augment.mixup 0 --augment.cutmix 0",
            )


def _check_duration(name: str, duration: float | str, default_unit: str) -> float:
    """Return the number of a field's duration.

    Raises:
        FieldError: an invalid duration, or a share of the whole run or more.
    """
    try:
        value, unit = parse_duration(duration, default_unit=default_unit)
    except InputError as error:
        raise FieldError(name, f": {error}") from None
    if name == "epochs" and unit == "share":
        raise FieldError(
            name, f" is {duration}, a share of the run, but it sets the length of the run: give epochs, steps or examples"
        )
    if unit == "share" and value >= 1:
        raise FieldError(name, f" is {format_value(duration)}: give less than the whole run")
    return value


def flatten_fields(part: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of every field of a recipe, with dotted names as on the command line."""
    for name, value in vars(part).items():
        if hasattr(value, "__dataclass_fields__"):
            yield from flatten_fields(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def recipe_to_json(recipe: Recipe) -> dict[str, Any]:
    """Return the fields of a recipe as JSON can hold them; see `train.recipes.fields.to_json`."""
    return {name: to_json(value) for name, value in asdict(recipe).items()}


def parse_recipe(fields: Any) -> Recipe:
    """Return the recipe whose fields `recipe_to_json` has returned.

    Fields that are missing have their defaults.

    Raises:
        InputError: an unknown field, a value of another type, or one that the recipe refuses.  The message names the field.
    """
    recipe: Recipe = _build(Recipe, fields, "")
    return recipe


def _build(cls: Any, given: Any, name: str) -> Any:
    """Return an object of a dataclass of a recipe, from the values of its fields in JSON; name: its own, "" for all."""
    if not isinstance(given, dict):
        raise FieldError(name or "recipe", " is not an object with names and values")
    kinds, values = get_type_hints(cls), {}
    for leaf, value in given.items():
        path = f"{name}.{leaf}".lstrip(".")
        if leaf not in kinds:
            raise FieldError(path, " is a field that this version does not have: use the version that wrote it")
        is_part = is_dataclass(kinds[leaf])
        values[leaf] = _build(kinds[leaf], value, path) if is_part else from_json(path, value, kinds[leaf])
    return cls(**values)


def config_overrides(model: Model) -> dict[str, Any]:
    """Return `model.changes` as dotted fields, for `ViTConfig.with_fields`.

    Raises:
        InputError: a text that is not FIELD=VALUE, or an ambiguous or unknown field.
    """
    return parse_overrides(model.changes, "--model.changes")


def model_config(model: Model, *, num_outputs: int, in_channels: int, size: tuple[int, int] | None) -> ViTConfig:
    """Return the config of the model: from the recipe first, then chosen for the data, then from the named model.

    size: (height, width) of the data's images, if all are alike.  Small images are enlarged twofold, so a patch of 16
        covers 8 pixels a side; the image size is at least two patches a side and at most the named model's own.

    Raises:
        InputError: an unknown model or field, or a value that the config refuses.
    """
    channels = in_channels if model.in_channels is None else model.in_channels
    overrides: dict[str, Any] = {"num_classes": num_outputs, "in_channels": channels}
    if model.image_size:
        overrides["image_size"] = model.image_size
    changes = config_overrides(model)
    if "num_classes" in changes:
        raise InputError("--model.changes has num_classes, which follows from the data and the task: leave it out")
    overrides |= changes
    base = vit_spec.get(model.name)
    # The base has a mean for each of red, green and blue.
    if overrides["in_channels"] != base.in_channels and not overrides.keys() & {"pixels.mean", "pixels.std"}:
        mean, std = (sum(values) / len(values) for values in (base.pixels.mean, base.pixels.std))
        overrides |= {"pixels.mean": (mean,), "pixels.std": (std,)}
    if size is None or "image_size" in overrides:
        return base.with_fields(overrides)
    config = base.with_fields({**overrides, "image_size": overrides.get("patch_size", base.patch_size)})
    rows, columns = (max(2, pixels // 8) for pixels in size)
    (ph, pw), (height, width) = config.patch_size, base.image_size
    return config.replace(image_size=(min(rows * ph, height // ph * ph), min(columns * pw, width // pw * pw)))
