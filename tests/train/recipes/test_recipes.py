"""Recipes and the command line: every field can be set, and invalid values are refused in one line."""

import dataclasses
import json
import re
import subprocess
import sys
from itertools import chain, pairwise
from typing import Any

import pytest

import vit_spec
from train.cli import DIGITS, list_recipes, main, parse_request
from train.loop.request import Request
from train.recipes import (
    IMAGENET,
    RECIPES,
    Augment,
    DataInfo,
    Model,
    Recipe,
    flatten_fields,
    model_config,
    parse_recipe,
    recipe_to_json,
)
from train.recipes.fields import describe_difference
from train.recipes.recipe import OPTIMIZERS
from vit_spec import InputError, bounded_json

OTHER_VALUES: dict[str, Any] = {  # for fields that `other_value` cannot double
    "model.name": "vit_b16",
    "model.image_size": (48, 64),
    "model.in_channels": 3,
    "model.changes": ("depth=3", "head.pool=mean"),
    "init": "weights.safetensors",
    "teacher": "teacher.safetensors",
    "teacher_set": ("num_heads=4",),
    "distillation": "soft",
    "distillation_weight": 0.3,
    "init_set": ("num_heads=4", "norms.eps=1e-5"),
    "held_out": 0.3,
    "corrupt": "skip",
    "workers": 3,
    "task": "labels",
    "compare_data": "all",
    "augment.crop": "inception",
    "augment.crop_area": (0.1, 0.9),
    "augment.filter": "box",
    "augment.held_out_filter": "box",
    "augment.shift": 0.1,
    "augment.scale": 1.5,
    "augment.randaugment": (2, 10),
    "augment.jitter": 0.3,
    "augment.erase": 0.25,
    "augment.mixup": 0.2,
    "augment.cutmix": 1.0,
    "augment.share": 0.875,
    "run": "somewhere",
    "optimizer.name": "lion",
    "optimizer.beta1": 0.0,
    "optimizer.beta2": 0.95,
    "optimizer.layer_decay": 0.75,
    "optimizer.freeze": ("patch_embed.*", "pos_embed"),
    "epochs": "2000steps",
    "warmup": "5%",
    "decay": "rsqrt",
    "cooldown": 0.2,
    "loss": "sigmoid",
    "label_smoothing": 0.1,
    "class_weights": "balanced",
    "sampling": "balanced",
    "ema": 0.999,
    "dtype": "bfloat16",
    "remat": "dots",
    "compile": "on",
    "mesh": "data=2,fsdp=2",
    "eval_every": "100steps",
    "patience": 5,
    "save_every": 0.5,
    "seed": 7,
    "rng": "shared",
    "non_finite": "skip",
    "wandb": "a-project",
    "profile": (3, 5),
}


def other_value(name: str, value: Any) -> Any:
    if name in OTHER_VALUES:
        return OTHER_VALUES[name]
    return not value if isinstance(value, bool) else 2 * value


def argument(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        part, _, leaf = flag.rpartition(".")
        return ["--" + (flag if value else f"{part}.no-{leaf}".lstrip("."))]
    return [f"--{flag}", *map(str, value if isinstance(value, tuple) else [value])]


@pytest.mark.parametrize("weights", [False, True], ids=["a network", "weights"])
def test_every_field_can_be_set_on_the_command_line(weights: bool) -> None:
    known = DataInfo(1258, 1, (8, 8))  # the digits without the held-out share below
    usual = dict(flatten_fields(RECIPES["vit_s16"](known)))
    wanted = {name: other_value(name, value) for name, value in usual.items() if name != "data"}
    for name in ["model.name"] if weights else ["init", "init_set"]:  # weights have their own model
        del wanted[name]
    asked = parse_request("train.jax", ["--config", "vit_s16", *chain(*(argument(*each) for each in wanted.items()))])
    assert dict(flatten_fields(asked.recipe)) == usual | wanted
    assert not [name for name, value in wanted.items() if value == usual[name]]


@pytest.mark.parametrize("form", [["--config", "tiny"], ["--config=tiny"]])
def test_config_names_the_recipe_that_is_changed(form: list[str]) -> None:
    asked = parse_request("train.jax", [*form, "--epochs", "3"])
    assert (asked.name, asked.recipe) == ("tiny", dataclasses.replace(RECIPES["tiny"](DIGITS), epochs=3))


def test_flags_may_be_written_with_underscores_and_the_last_one_counts() -> None:
    requests: list[Request] = []

    def fit(request: Request) -> int:
        requests.append(request)
        return 0

    assert main("train.jax", fit, "--batch-size 8 --batch_size=16 --run a_b --no-tensorboard --dry_run".split()) == 0
    recipe = requests[0].recipe
    assert (recipe.batch_size, recipe.run, recipe.tensorboard) == (16, "a_b", False)
    assert requests[0].dry_run


def test_the_values_of_a_repeated_list_are_joined() -> None:
    given = "--optimizer.freeze pos_embed --model.changes depth=2 --optimizer.freeze=blocks.0.* cls_token".split()
    with pytest.raises(InputError, match="unrecognized arguments: cls_token"):
        parse_request("train.jax", given)
    recipe = parse_request("train.jax", [*given[:-1], "--model.changes", "norms.eps=1e-5"]).recipe
    assert recipe.optimizer.freeze == ("pos_embed", "blocks.0.*")
    assert recipe.model.changes[-2:] == ("depth=2", "norms.eps=1e-5")


def test_none_can_be_given() -> None:
    given = "--config cifar10 --model.image-size None --held-out None".split()
    recipe = parse_request("train.jax", given, lambda data, held_out: parse_request("train.jax", []).source).recipe
    assert (recipe.model.image_size, recipe.held_out) == (None, None)


def test_without_config_the_recipe_is_vit_s16_for_the_digits() -> None:
    asked = parse_request("train.jax", [])
    assert (asked.name, asked.recipe, len(asked.source.train)) == ("vit_s16", RECIPES["vit_s16"](DIGITS), 1438)


def test_the_command_is_what_was_typed_without_the_folder() -> None:
    asked = parse_request("train.jax", ["--config", "tiny", "--run", "a b", "--epochs", "3", "--augment.mixup", "0.2"])
    assert asked.command == "python -m train.jax --config tiny --epochs 3 --augment.mixup 0.2"
    assert parse_request("train.jax", ["--run=x"]).command == "python -m train.jax"


# Recipes depend on the data -------------------------------------------------------------------------------------------


def test_the_plain_recipe_for_imagenet_is_the_published_one() -> None:
    r = RECIPES["vit_s16"](IMAGENET)
    assert (r.batch_size, r.epochs, r.warmup, r.optimizer.lr, r.optimizer.clip) == (1024, 90, "10000steps", 1e-3, 1.0)
    # big_vision does not multiply the weight decay by the rate.
    assert r.optimizer.lr * r.optimizer.weight_decay == pytest.approx(1e-4)
    assert (r.augment.crop, r.augment.crop_area, r.augment.randaugment) == ("inception", (0.05, 1.0), (2, 10))
    assert (r.augment.mixup, r.augment.flip, r.augment.filter) == (0.2, True, "bilinear_aliased")
    assert (r.augment.share, r.augment.held_out_filter) == (224 / 256, "box")  # resize_small(256), area; central_crop(224)
    assert model_config(r.model, num_outputs=1000, in_channels=3, size=None) == vit_spec.get("vit_s16_plain")


@pytest.mark.parametrize("name", ["vit_s16", "vit_b16"])
def test_fewer_images_get_a_shorter_run_of_smaller_batches(name: str) -> None:
    runs = [RECIPES[name](DataInfo(count, 3)) for count in (1438, 10_000, 50_000, 1_281_167)]
    for fewer, more in pairwise(runs):
        assert fewer.batch_size < more.batch_size and fewer.epochs < more.epochs
        assert fewer.optimizer.lr <= more.optimizer.lr


def test_handwriting_is_never_flipped_and_photographs_are() -> None:
    assert not RECIPES["vit_s16"](DataInfo(5000, 1)).augment.flip and RECIPES["vit_s16"](DataInfo(5000, 3)).augment.flip


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_documents_its_command_hardware_time_and_result(name: str) -> None:
    message = RECIPES[name].__doc__ or ""
    assert f"python -m train.jax --config {name}" in message
    assert re.search(r"Hardware: .*Time: .*\d.*(accuracy|auroc|error): .*(\d|none is published)", message, re.S | re.I)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_listed_and_gives_a_valid_model(name: str) -> None:
    assert name in list_recipes()
    for known in (DIGITS, IMAGENET):
        config = model_config(RECIPES[name](known).model, num_outputs=10, in_channels=known.channels, size=known.size)
        assert config.num_classes == 10


def test_help_explains_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse_request("train.jax", ["--help"])
    message = capsys.readouterr().out
    assert not [name for name, _ in flatten_fields(Recipe()) if f"--{name.replace('_', '-')}" not in message]


def test_help_shows_the_commands_of_its_own_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse_request("train.torch", ["--config", "vit_s16", "--help"])
    message = capsys.readouterr().out
    assert "python -m train.torch --config vit_s16\n" in message and "python -m train.jax" not in message


INVALID = {
    "--config vits16": "unknown recipe 'vits16'; did you mean 'vit_s16'?",
    "--config": "--config needs a value",
    "--config --epochs 3": "--config needs a value",
    "--plan": "--plan needs a value",
    "--plan 8x80GiB --dry_run": "--plan and --dry-run exclude each other: leave out one of them",
    "--lr 1e-3": "did you mean '--optimizer.lr'?",
    "--drop-path 0.1": "give --model.changes regularisation.drop_path=VALUE",
    "--model.width 32": "give --model.changes width=VALUE",
    "--max-steps=40": "give --epochs, as in --epochs 1000steps",
    "--opt lion": "give --optimizer.name",
    "--version": "unrecognized arguments: --version; see python -m train",
    "--optimizer.name adamww": f"{', '.join(OPTIMIZERS)}; did you mean 'adamw'?",
    "--model.changes num_classes=3 --plan 8x80GiB": "num_classes, which follows from the data and the task: leave it out",
    "--model.changes depht=3 --plan 8x80GiB": "--model.changes depht is not a field of the config; did you mean 'depth'?",
    "--init-set num_heads=3": "--init-set needs --init",
    "--teacher x --distillation-temperature 7": "--distillation-temperature is for --distillation soft: give both",
    "--distillation soft": "--distillation needs --teacher WEIGHTS: give both, or leave it out",
    "--model.in-channels 0 --plan 8x80GiB": "in_channels",
    "--confg vit_s16": "did you mean '--config'?",
    "--epocs 3": "did you mean '--epochs'?",
    "--optimizer.lrr 3": "did you mean '--optimizer.lr'?",
    "--epochs many": "'many' is not a duration: write, for example, 90epochs, 2000steps, 1e6examples or 10%",
    "--epochs 3weeks": "--epochs: '3weeks' has an unknown unit",
    "--warmup 100%": "--warmup is 100%: give less than the whole run",
    "--data nowhere:x": "unknown data 'nowhere:x'",
    "--held-out test": "",
    "--optimizer.layer-decay 2": "--optimizer.layer-decay is 2: give a factor above 0 and up to 1",
    "--optimizer.name adam": "--optimizer.name is 'adam': give one of adamw, sgd,",
    "--label-smoothing 1": "error: --label-smoothing is 1: give a share from 0 up to 1",
    "--profile 4 3": "error: --profile is 4 3: give a first step and a last one",
    "--decay linear": "--decay is 'linear': give one of cosine, constant, rsqrt\n",
    "--accumulate 0": "--accumulate is 0: give a positive number of parts",
    "--augment.mixup 0.2 --batch-size 1": "--batch-size is 1, so that mixup or CutMix would mix images with",
    "--config deit_s16 --batch-size 5": "themselves: give 6 or more, twice --augment.repeats, or --augment.mixup 0",
    "--ema 1": "--ema is 1: give a number from 0 up to 1",
    "--model.image-size 3 3 3": "--model.image-size is '3 3 3': give an integer, HxW such as 384x256, or None",
    "--model.image-size 64x": "--model.image-size is '64x': give an integer, HxW such as 384x256, or None",
    "--profile 4x8": "--profile is '4x8': give 2 values, each an integer, or None",
    "--seed seven": "--seed is 'seven': give an integer",
    "--seed": "argument --seed: expected one argument",
    "tiny": "unrecognized arguments: tiny",
    "--batch_sise 8": "did you mean '--batch-size'?",
    "--task guess": "--task is 'guess': give one of classes, labels, values, or None",
    "--epochs -1": "--epochs: -1 is not a duration: give 0 or more",
    "--epochs 0": "--epochs is 0: give more than 0",
    "--held-out 1.5": "--held-out is 1.5: give a share between 0 and 1",
    "--augment.scale 0.5": "--augment.scale is 0.5: give a factor of 1 or more",
    "--optimizer.lr nan": "--optimizer.lr is nan: give a number from 0 to 1e30",
    "--optimizer.weight-decay -1": "--optimizer.weight-decay is -1: give a number from 0 to 1e6",
    "--optimizer.weight-decay 1e300": "--optimizer.weight-decay is 1e+300: give a number from 0 to 1e6",
    "--optimizer.beta1 1": "--optimizer.beta1 is 1: give a number from 0 up to 1",
    "--optimizer.eps 0": "--optimizer.eps is 0: give a number from 1e-30 to 1e30",
    "--optimizer.eps 1e-50": "--optimizer.eps is 1e-50: give a number from 1e-30 to 1e30",
    "--optimizer.clip 1e-50": "--optimizer.clip is 1e-50: give a norm of at least 1e-30",
    "--seed 9223372036854775808": "give 0 or more, below 2^63",
    "--config finetune": "--config finetune needs initial weights: give --init FILE",
    "--epochs 1%": "--epochs is 1%, a share of the run, but it sets the length of the run: give epochs, steps or examples",
    "--model.name deit_s16 --init w.npz": "--model.name cannot be used with --init",
    "--augment.mixup -1": "error: --augment.mixup is -1: ",
    "--plan 8x80GiB --check-data found.csv": "--plan and --check-data exclude each other: leave out one of them",
    "--check-data found.csv --dry-run": "--check-data and --dry-run exclude each other: leave out one of them",
    "--list --config vit_s16": "--list lists the recipes and does nothing else: leave --config vit_s16 out",
    "--model.changes": "--model.changes has no values: give FIELD=VALUE",
    "--init=": "--init is empty: give a path or another value",
    "--config finetune --init=": "--init is empty",
    "--teacher=": "--teacher is empty",
    "--plan 8x80GiB --optimizer.freeze block.*": "error: --optimizer.freeze has 'block.*', which matches no parameter",
    "--plan 8x80GiB --dry-run": "--plan and --dry-run exclude each other: leave out one of them",
}


@pytest.mark.parametrize("arguments", INVALID)
def test_an_invalid_argument_is_refused_in_one_line(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main("train.jax", lambda asked: 0, arguments.split())
    message = capsys.readouterr().err
    assert status == 2 and message.startswith("error: ") and message.count("\n") == 1
    assert INVALID[arguments] in message


def test_an_invalid_value_in_python_is_refused_by_the_name_of_its_field() -> None:
    with pytest.raises(InputError, match=r"^label_smoothing is 1: give a share from 0 up to 1$"):
        Recipe(label_smoothing=1.0)
    with pytest.raises(InputError, match=r"^augment\.crop_area is 1 0\.5: give two shares"):
        Augment(crop_area=(1.0, 0.5))


def test_the_smallest_batch_that_mixes_no_image_with_itself_is_accepted() -> None:
    asked = parse_request("train.jax", "--config deit_s16 --batch-size 6".split())
    assert (asked.recipe.batch_size, asked.recipe.augment.repeats, asked.recipe.augment.mixes) == (6, 3, True)
    Recipe(batch_size=1, augment=Augment(repeats=3))  # repeats alone mix nothing


def test_an_interruption_before_the_run_exits_with_130() -> None:
    def interrupt(request: Request) -> int:
        raise KeyboardInterrupt

    assert main("train.jax", interrupt, []) == 130


def test_model_changes_are_added_to_those_of_the_recipe() -> None:
    own = parse_request("train.jax", ["--config", "vit_ti16"]).recipe.model.changes
    more = parse_request("train.jax", ["--config", "vit_ti16", "--model.changes", "depth=2", "norms.eps=1e-5"]).recipe.model
    assert own and more.changes == (*own, "depth=2", "norms.eps=1e-5")
    config = model_config(more, num_outputs=10, in_channels=3, size=(32, 32))
    assert (config.depth, config.norms.eps, config.tokens.class_token) == (2, 1e-5, False)


def test_model_changes_are_written_like_other_config_overrides() -> None:
    changes = ("attention.qk_norm=true", "patch_size=8x4", "eps=1e-5", "norm_order=post")
    config = model_config(Model(name="vit_ti16", changes=changes), num_outputs=10, in_channels=3, size=(32, 32))
    assert config.attention.qk_norm and config.patch_size == (8, 4)
    assert (config.norms.eps, config.norms.order) == (1e-5, "post")


def test_with_init_only_the_regularisation_of_a_recipes_model_changes_applies() -> None:
    known = ["--init", "weights.safetensors", "--model.changes", "regularisation.attn_drop=0.1"]
    plain, deit = (
        parse_request("train.jax", ["--config", name, *known]).recipe.model.changes for name in ("vit_b16", "deit_s16")
    )
    assert plain == ("regularisation.attn_drop=0.1",)
    assert deit == ("regularisation.drop_path=0.1", "regularisation.attn_drop=0.1")


def test_with_init_the_weights_keep_their_image_size_unless_another_is_given() -> None:
    sizes = [
        parse_request("train.jax", ["--config", "cifar10", "--init", "weights.safetensors", *more]).recipe.model.image_size
        for more in ([], *(["--model.image-size", *words] for words in (["64", "48"], ["64x48"], ["64"])))
    ]
    assert sizes == [None, (64, 48), (64, 48), (64, 64)] and RECIPES["cifar10"](IMAGENET).model.image_size == (36, 36)


def test_the_help_of_an_image_size_says_that_it_may_be_height_x_width(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main("train.jax", lambda asked: 0, ["--help"])
    assert "--model.image-size None|HxW|INT\n" in capsys.readouterr().out


def test_each_command_of_a_recipe_is_one_line_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main("train.jax", lambda asked: 0, ["--help"])
    message = capsys.readouterr().out
    commands = [line for line in message.splitlines() if "train.jax --config vit_s16" in line]
    assert len(commands) == 2 and all(line.count("python -m") == 1 for line in commands)


@pytest.mark.parametrize("option", ["--help", "--list"])
def test_a_closed_pipe_ends_the_program_silently(option: str) -> None:
    command = [sys.executable, "-m", "train.jax", option]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_ctrl_c_ends_a_program_with_nothing_to_save_at_any_point() -> None:
    lines = "import signal\nfrom train.loop.interruption import exit_on_ctrl_c\nexit_on_ctrl_c()\ntry:\n"
    lines += "    signal.raise_signal(signal.SIGINT)\nexcept BaseException:\n    pass\nprint('went on')"
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\ninterrupted; what was saved before is kept\n")


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_read_from_json_that_every_program_reads(name: str) -> None:
    recipe = RECIPES[name](IMAGENET)
    assert parse_recipe(bounded_json.parse(json.dumps(recipe_to_json(recipe)))) == recipe


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optimizer": {"lr": "abc"}}, "optimizer.lr is 'abc': give a number"),
        ({"batch_size": 32.5}, "batch_size is 32.5: give an integer"),
        ({"batch_size": True}, "batch_size is True: give an integer"),
        ({"tensorboard": 1}, "tensorboard is 1: give true or false"),
        ({"epochs": [1]}, "epochs is [1]: give text, or a number"),
        ({"init": 3}, "init is 3: give text, or None"),
        ({"init_set": "a=1"}, "init_set is 'a=1': give values, each text"),
        ({"augment": {"crop_area": [0.1]}}, "augment.crop_area is [0.1]: give 2 values, each a number"),
        ({"profile": [1, "2"]}, "profile is [1, '2']: give 2 values, each an integer, or None"),
        ({"decay": {}}, "decay is {}: give one of cosine, constant, rsqrt"),
        ({"model": 3}, "model is not an object with names and values"),
        ([], "recipe is not an object with names and values"),
        ({"optimizer": {"colour": 1}}, "optimizer.colour is a field that this version does not have"),
        ({"optimizer": {"lr": "inf"}}, "optimizer.lr is inf: give a number from 0 to 1e30"),
    ],
)
def test_a_recipe_of_json_with_other_types_is_refused_with_the_name_of_the_field(fields: Any, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        parse_recipe(fields)


MANY = [f"positions.table={name}" for name in ("sincos", "learned", "rope", "fixed", "none")]


@pytest.mark.parametrize(
    ("was", "now", "words"),
    [
        (["a=1"], ["a=1", "b=2"], "its x is ['a=1'], and here it is ['a=1', 'b=2']"),
        (MANY, [*MANY, "b=2", "b=2"], "its x lacks 'b=2', 'b=2'"),
        ([*MANY, "b=2"], MANY, "its x has 'b=2', and here it has not"),
        (["a=1", *MANY], [*MANY, "b=2"], "its x has 'a=1', and here it has 'b=2' instead"),
        (MANY, [*MANY[:3], MANY[4], MANY[3]], "its x[3] is positions.table=fixed, and here it is positions.table=none"),
        ([*MANY, "1"], [*MANY, 1], "its x has '1', and here it has 1 instead"),
        (
            f"{'p' * 100}data{'q' * 100}",
            f"{'p' * 100}other",
            f"its x is ...{'p' * 30}data{'q' * 46}..., and here it is ...{'p' * 30}other",
        ),
        ("a  b", "a b", "its x is a  b, and here it is a b"),
        (None, "v" * 90, f"its x is None, and here it is {'v' * 80}..."),
    ],
)
def test_a_difference_shows_what_differs_also_of_long_values(was: Any, now: Any, words: str) -> None:
    assert describe_difference("x", was, now) == words


# The model ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "wanted"), [((8, 8), (32, 32)), ((28, 28), (48, 48)), ((32, 64), (64, 128)), ((200, 50), (224, 96))]
)
def test_small_images_are_enlarged_twofold_up_to_the_models_own_size(size: Any, wanted: Any) -> None:
    assert model_config(Model(), num_outputs=10, in_channels=1, size=size).image_size == wanted


def test_the_image_size_follows_a_changed_patch_size() -> None:
    model = Model(changes=("patch_size=(4, 6)",))
    assert model_config(model, num_outputs=10, in_channels=1, size=(8, 8)).image_size == (8, 12)


def test_grey_images_have_the_average_mean_and_std_of_the_three_colours() -> None:
    own = vit_spec.get("deit_s16").pixels
    grey = model_config(Model(name="deit_s16"), num_outputs=2, in_channels=1, size=None).pixels
    assert grey.mean == (sum(own.mean) / 3,) and grey.std == (sum(own.std) / 3,)


def test_a_given_image_size_is_used() -> None:
    assert model_config(Model(image_size=(48, 64)), num_outputs=10, in_channels=1, size=(8, 8)).image_size == (48, 64)


def test_images_of_different_sizes_get_the_models_own_size() -> None:
    assert model_config(Model(), num_outputs=10, in_channels=3, size=None).image_size == (224, 224)


def test_changes_reach_every_field_of_the_config() -> None:
    model = Model(changes=("depth=3", "head.pool=mean", "norms.eps=1e-5", "norms.layer_scale=None"))
    config = model_config(model, num_outputs=10, in_channels=3, size=None)
    assert (config.depth, config.head.pool, config.norms.eps, config.norms.layer_scale) == (3, "mean", 1e-5, None)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Model(name="vit_s17"), "did you mean 'vit_s16'"),
        (Model(changes=("widht=3",)), "did you mean 'width'"),
        (Model(changes=("norms.epsilon=3",)), "norms.epsilon"),
        (Model(changes=("nrms.eps=3",)), "did you mean 'norms.eps'"),
        (Model(changes=("depth",)), "--model.changes 'depth' sets nothing: write it as norms.eps=1e-5"),
        (Model(image_size=(30, 30)), "not a multiple of the patch"),
    ],
)
def test_an_invalid_model_is_refused(model: Model, message: str) -> None:
    with pytest.raises(InputError, match=message):
        model_config(model, num_outputs=10, in_channels=3, size=(8, 8))
