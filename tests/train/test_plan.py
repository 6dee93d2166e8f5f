"""What a run needs: sums by hand, what jax keeps in fact, and the command as a user types it."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest

pytest.importorskip("grain")

import vit_spec
from tests import ROOT
from train.cli import main
from train.jax.memory_estimate import Needs, needs
from train.loop.request import Request
from train.plan import Devices, opened, parse, times
from train.recipes import Augment, Optimizer, Recipe
from vit_spec import InputError, ViTConfig

ONE = {"data": 1, "fsdp": 1, "tensor": 1}
EIGHT = {"data": 2, "fsdp": 2, "tensor": 2}
CONFIG = ViTConfig(image_size=(32, 48), width=24, depth=2, num_heads=2, mlp_dim=40, num_classes=5)

# By hand, of one block and of what is around the blocks: 6 patches of 768 values, 7 tokens, heads of 12
BLOCK = 24 * 72 + 24 * 24 + 24 * 40 + 40 * 24
AROUND = 768 * 24 + 24 * 5
HEADS = 72 + 40  # biases that heads and hidden units have
VECTORS = 2 * (4 * 24 + 24 + 24) + 24 + 24 + 7 * 24 + 2 * 24 + 5  # the other biases, norms, the token, the table


def of(sizes: dict[str, int] = ONE, config: ViTConfig = CONFIG, **changes: Any) -> Needs:
    return needs(config, Recipe(batch_size=8, **changes), sizes)


# Memory ---------------------------------------------------------------------------------------------------------------


def test_the_parameters_of_one_device_are_all() -> None:
    assert of().memory["parameters"] == 4 * vit_spec.count(CONFIG) == 4 * (2 * BLOCK + AROUND + 2 * HEADS + VECTORS)


def test_matrices_lie_in_parts_along_both_axes_and_vectors_where_heads_are_split() -> None:
    assert of(EIGHT).memory["parameters"] == 4 * (2 * BLOCK // 4 + AROUND // 2 + 2 * HEADS // 2 + VECTORS)


@pytest.mark.parametrize(("name", "kept"), [("adamw", 2), ("lamb", 2), ("lion", 1), ("sgd", 1)])
def test_an_optimizer_keeps_so_many_numbers_for_a_parameter(name: Any, kept: int) -> None:
    assert of(EIGHT, optimizer=Optimizer(name=name)).memory["optimizer"] == kept * of(EIGHT).memory["parameters"]


def test_muon_keeps_one_number_for_the_matrices_of_blocks_and_two_for_all_else() -> None:
    assert of(optimizer=Optimizer(name="muon")).memory["optimizer"] == 4 * (2 * vit_spec.count(CONFIG) - 2 * BLOCK)


@pytest.mark.parametrize("name", get_args(get_type_hints(Optimizer)["name"]))
def test_what_an_optimizer_keeps_is_what_jax_allocates_for_it(name: Any) -> None:
    pytest.importorskip("optax")
    import jax

    import vit_jax
    from train.jax.optimizers import optimizer

    config = CONFIG.replace(width=128, mlp_dim=256)  # so long that Adafactor keeps rows and columns
    chosen = Optimizer(name=name)
    made = optimizer(chosen, config)
    state = jax.eval_shape(lambda: made.init(vit_jax.init(config)))
    kept = sum(leaf.size for leaf in jax.tree.leaves(state) if leaf.size >= 5)  # no parameter is smaller; counts are
    assert of(config=config, optimizer=chosen).memory["optimizer"] == 4 * kept


def test_a_running_mean_is_as_large_as_the_parameters() -> None:
    assert of(EIGHT, ema=0.9).memory["running mean"] == of(EIGHT).memory["parameters"]


def test_a_batch_is_bytes_and_lies_in_parts_along_data_and_fsdp() -> None:
    assert of(EIGHT).memory["batch"] == 2 * (32 * 48 * 3 + 4)


def test_accumulation_keeps_the_activations_of_a_part() -> None:
    assert of(accumulate=4).memory["activations"] * 4 == of().memory["activations"]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tanh": {"mlp": {"activation": "gelu_tanh"}},
    "gated": {"mlp": {"activation": "swiglu"}},
    "relu": {"mlp": {"activation": "relu"}},
    "scaled": {"norms": {"layer_scale": 0.1}},
    "normalised queries": {"attention": {"qk_norm": True}},
    "noise": {"regularisation": {"drop_path": 0.1, "mlp_drop": 0.1, "attn_drop": 0.1}},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("remat", ["none", "dots", "full"])
@pytest.mark.parametrize("option", OPTIONS)
def test_activations_are_what_jax_keeps_of_the_blocks(option: str, remat: Any, dtype: Any) -> None:
    jax = pytest.importorskip("jax")
    import jax.numpy as jnp

    import vit_jax

    config = CONFIG.replace(**OPTIONS[option])
    narrow = jnp.dtype(dtype)
    model = vit_jax.ViT(config, vit_jax.Execution(dtype=narrow, remat=remat))
    params = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, narrow if p.ndim > 2 else p.dtype),
        jax.eval_shape(lambda: vit_jax.init(config)),
    )

    def apply(params: Any, images: Any) -> Any:
        return model.apply({"params": params}, images, train=True, rngs={"dropout": jax.random.key(0)})

    images = jax.ShapeDtypeStruct((8, 32, 48, 3), np.float32)
    kept = jax.tree.leaves(jax.eval_shape(lambda p, x: jax.vjp(apply, p, x)[1], params, images))
    blocks = sum(x.size * x.dtype.itemsize for x in kept if x.shape[:2] == (2, 8) and x.shape[-1] > 1)

    def planned(depth: int) -> int:
        memory = of(config=config.replace(depth=depth), remat=remat, dtype=dtype).memory
        return memory["activations"] + memory.get("attention weights", 0)

    assert blocks == 2 * (planned(2) - planned(1))


# Operations and transfers ---------------------------------------------------------------------------------------------


def test_a_step_costs_three_forward_passes_whatever_is_computed_twice() -> None:
    assert {of(remat=remat).flops for remat in ("none", "dots", "full")} == {3 * 8 * vit_spec.flops(CONFIG)}


def test_what_is_computed_twice_is_the_blocks_or_their_attention() -> None:
    attention = 2 * 4 * 7 * 7 * 24
    blocks = attention + 2 * 7 * 2 * BLOCK
    assert of(remat="dots").recomputed == 8 * attention
    assert of(remat="full").recomputed == 8 * (blocks + 2 * 24 * 5)  # and the head, which is as good as nothing


def test_one_device_sends_nothing() -> None:
    assert not of(augment=Augment(mixup=0.2)).transfers


def test_images_split_over_data_alone_cost_one_sum_of_all_gradients() -> None:
    assert of(ONE | {"data": 8}).transfers == {("all-reduce", "data"): 4 * vit_spec.count(CONFIG)}


def test_fsdp_fetches_the_blocks_forward_and_back_and_sums_their_gradients_into_parts() -> None:
    assert of(ONE | {"fsdp": 2}, dtype="bfloat16").transfers == {
        ("all-gather", "fsdp"): 2 * (2 * 2 * BLOCK + AROUND),
        ("reduce-scatter", "fsdp"): 2 * 2 * BLOCK,
        ("all-reduce", "fsdp"): 2 * (AROUND + 2 * HEADS + VECTORS) + 2 * (2 * 4 * 24 + 2 * 24),  # norms are float32
    }


def test_tensor_sums_two_activations_a_block_forward_and_two_back() -> None:
    assert of(ONE | {"tensor": 2}).transfers == {("all-reduce", "tensor"): 4 * 8 * 2 * 4 * 7 * 24}


def test_a_step_lasts_between_its_longest_part_and_all_its_parts() -> None:
    found = of(EIGHT)
    computing = found.flops / 8 / (1e12 * 0.5)
    devices = Devices(8, 1 << 30, peak=1e12, reached=0.5, links={"": 1e9, "data": 1e6})
    took = times(found, devices, EIGHT)
    assert took is not None and took.computing == computing
    assert took.least == took.sending["data+fsdp"]  # the slower of the two links counts
    assert took.most == computing + sum(took.sending.values())
    gathered, summed = found.transfers["all-gather", "fsdp"], found.transfers["reduce-scatter", "fsdp"]
    assert took.sending["fsdp"] == pytest.approx((gathered + summed) / 2 / 1e9)


MESH = "data=2,fsdp=2,tensor=2"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What programs for eight simulated devices send, and what was planned: see `tests.meshes`."""
    from tests.train.test_mesh import once  # which needs jax, as nothing else here does

    return once(tmp_path_factory, 8, "--parts", MESH)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "adafactor", "lamb"])
def test_an_optimizer_of_matrices_rows_or_layers_sends_what_was_planned(name: str, compiled: dict[str, Any]) -> None:
    sent, planned = compiled["sent"][name]
    assert sent == planned != {}


@pytest.mark.slow
def test_a_shared_norm_keys_without_a_bias_and_heads_that_nothing_mixes_send_what_was_planned(
    compiled: dict[str, Any],
) -> None:
    sent, planned = compiled["sent"]["model"]
    assert sent == planned


@pytest.mark.slow
def test_muon_moves_the_weights_of_split_matrices_as_on_one_device(compiled: dict[str, Any]) -> None:
    # float64, and updates near 1.  Sums in another order differ by 1e-15; each of Muon's five steps makes a small singular
    # value, and its error, up to 3.4 times as large: 500 times in all.
    assert compiled["apart"] < 1e-12


def of_muon(sizes: dict[str, int]) -> dict[tuple[str, str], int]:
    """What Muon sends of its own."""
    rest = of(sizes).transfers
    found = of(sizes, optimizer=Optimizer(name="muon")).transfers
    return {key: size - rest.get(key, 0) for key, size in found.items() if size != rest.get(key)}


def test_muons_matrices_change_hands_there_and_back_along_the_axes_that_split_them() -> None:
    # Four devices share a matrix.  Of two blocks q, k and v are six, filled up to two for each; of the others there are
    # two, filled up to one for each.  Both halves of `data` turn the same.
    filled = 8 * 24 * 24 + 4 * (24 * 24 + 2 * 24 * 40)
    part = 4 * filled // 4
    assert of_muon(EIGHT) == {("all-to-all", "fsdp"): 2 * part, ("all-to-all", "tensor"): 2 * part}


def test_where_matrices_are_whole_each_device_turns_some_and_fetches_what_the_others_turned() -> None:
    assert of_muon(ONE | {"data": 2}) == {("all-gather", "data"): 4 * 2 * BLOCK}


def test_where_there_are_fewer_matrices_than_devices_that_hold_them_whole_each_turns_all() -> None:
    # Six matrices of q, k and v for eight devices, and two of each other kind
    assert of_muon(ONE | {"data": 8}) == {}


# Devices --------------------------------------------------------------------------------------------------------------


def test_devices_and_rates_are_read() -> None:
    wanted = Devices(64, 80 << 30, peak=989e12, reached=0.45, links={"": 450e9, "data": 50e9})
    assert parse("64x80GiB@989TFLOPs,45%,450GB/s,data=50GB/s") == wanted


@pytest.mark.parametrize("text", ["", "64", "0x80GiB", "64x0GiB", "64x80GB", "64x80GiB@", "64x80GiB@fast", "8x8GiB@0%"])
def test_other_words_for_devices_are_refused_in_a_line(text: str) -> None:
    with pytest.raises(InputError, match="write such as 64x80GiB"):
        parse(text)


def test_a_link_along_no_axis_is_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'fsdp'"):
        parse("8x80GiB@1PFLOPs,fspd=450GB/s")


# The command ----------------------------------------------------------------------------------------------------------


def refused(asked: Request) -> int:
    raise AssertionError("a plan trains nothing")


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main("train.jax", refused, arguments)
    said = capsys.readouterr()
    return status, said.out + said.err


LARGE = ("--config", "vit_l16", "--data", "parquet:imagenet-1k/data", "--mesh", "data=-1,fsdp=8")


def test_a_run_that_fits_says_so_and_how_long_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    status, said = planned(capsys, *LARGE, "--plan", "64x80GiB@989TFLOPs,450GB/s")
    assert status == 0
    assert re.search(r"112,603 steps +\S+ to \S+ hours", said)
    assert "\nfits: " in said


def test_a_run_that_does_not_fit_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    status, said = planned(capsys, *LARGE, "--plan=8x24GiB")
    assert status == 1
    assert "does not fit" in said and "the largest is activations" in said
    option, value = re.findall(r"(--remat|--accumulate) (\w+) \(", said)[0]
    assert planned(capsys, *LARGE, option, value, "--plan=8x24GiB")[0] == 0


def test_where_no_single_change_is_enough_all_together_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    _, said = planned(capsys, *LARGE[:-1], "data=-1", "--plan", "8x6GiB")
    words = re.search(r"try (--remat full --accumulate \d+ --mesh \S+) \(", said)
    assert words is not None
    assert planned(capsys, *LARGE[:-2], *words[1].split(), "--plan", "8x6GiB")[0] == 0


def test_where_nothing_is_enough_it_says_that(capsys: pytest.CaptureFixture[str]) -> None:
    assert "try more devices, or a smaller --batch-size" in planned(capsys, *LARGE, "--plan", "8x0.5GiB")[1]
    assert "try more devices along fsdp" in planned(capsys, *LARGE, "--plan", "8x0.01GiB")[1]


def test_what_a_mesh_leaves_whole_is_part_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    _, said = planned(capsys, "--mesh", "fsdp=5", "--batch-size", "5", "--plan", "5x80GiB")
    assert "100.0% of the weights are not split by fsdp=5" in said and "fetched matrices" not in said


def test_data_that_are_not_here_are_counted_as_imagenet_and_that_is_said() -> None:
    source = opened("parquet:nowhere/data")
    assert (len(source.train), len(source.classes)) == (1_281_167, 1000)
    assert source.notes == ("parquet:nowhere/data is not here: the numbers are those of ImageNet-1k",)


@pytest.mark.parametrize("data", ["imagenet", "parqet:imagenet", "digits:here"])
def test_data_of_an_unknown_kind_are_refused(data: str) -> None:
    with pytest.raises(InputError, match="unknown data"):
        opened(data)


def test_data_that_are_here_and_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        opened(f"folder:{tmp_path}")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--mesh", "data=3", "--plan", "8x80GiB"), "makes 3 of 8 devices"),
        (("--mesh", "tensor=8", "--plan", "8x80GiB"), "does not divide the 6 heads"),
        (("--batch-size", "100", "--plan", "8x80GiB"), "give 104"),
        (("--plan",), "write such as"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_line(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, line = planned(capsys, *arguments)
    assert status == 2 and line.startswith("error: ") and said in line and line.count("\n") == 1


def test_a_plan_loads_neither_a_twin_nor_a_trainer() -> None:
    code = (
        "import sys, train.plan; print(*({'vit_jax', 'vit_torch', 'flax', 'torch', 'train.jax.engine'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not run.stdout.strip()
