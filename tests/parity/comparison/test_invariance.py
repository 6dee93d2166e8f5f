"""`parity.invariance`: models of both frameworks that mix the images of a batch, or draw noise, fail; others pass."""

import copy
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")

import jax.numpy as jnp
from flax import linen, nnx
from torch import nn

import parity
import vit_spec
import vit_torch
from parity.__main__ import main
from parity.comparison.invariance import Change, conditions, measurement, twins
from parity.comparison.invariance.conditions import compare
from parity.comparison.invariance.jax_runner import JaxRunner
from parity.comparison.invariance.torch_runner import NotTestedError
from parity.comparison.tolerances import five_sigma_factor
from tests import ROOT
from tests.pairs_of_models import ConvNet, Mlp, perturbed_module, random_variables, torch_conv_net
from tests.twins import perturbed_params, small_config
from vit_spec import InputError

RNG = np.random.default_rng(0)
IMAGES = RNG.standard_normal((5, 6, 8, 2)).astype(np.float32)
NCHW = IMAGES.transpose(0, 3, 1, 2)
ROWS = RNG.standard_normal((5, 4)).astype(np.float32)
KERNEL = {"kernel": RNG.standard_normal((4, 3)).astype(np.float32)}


@pytest.fixture
def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out JAX's processes with other numbers of threads, to save time."""

    def refuse(self: Any, dtype: str, inputs: Any) -> Any:
        raise NotTestedError("left out")

    monkeypatch.setattr(JaxRunner, "run_on_threads", refuse)


def of(report: Any, condition: str, dtype: str = "float32") -> Any:
    """Return the change of the only output under a condition."""
    [found] = [change for change in report.changes if (change.condition, change.dtype) == (condition, dtype)]
    return found


# Models that pass -----------------------------------------------------------------------------------------------------


def test_a_linen_model_passes(without_processes: None) -> None:
    model = ConvNet()
    report = parity.invariance(model, IMAGES, random_variables(model, IMAGES))
    assert report.passed and report.verdict.startswith("PASS: ") and report.framework == "jax"


def test_a_linen_apply_passes_as_its_module_does(without_processes: None) -> None:
    model = ConvNet()
    variables = random_variables(model, IMAGES)
    assert parity.invariance(model.apply, IMAGES, variables).changes == parity.invariance(model, IMAGES, variables).changes


def test_an_nnx_module_passes(without_processes: None) -> None:
    assert parity.invariance(perturbed_module(Mlp(nnx.Rngs(0))), ROWS).passed


def test_a_torch_module_passes() -> None:
    report = parity.invariance(torch_conv_net().eval(), NCHW)
    assert report.passed and not report.verdict.startswith("FAIL")


def test_a_model_of_single_operations_is_bit_equal() -> None:
    report = parity.invariance(nn.ReLU(), ROWS)
    assert report.bit_equal and report.verdict == "PASS: bit-equal in float32 under all 8 conditions"


def test_each_condition_is_tested_in_both_types() -> None:
    report = parity.invariance(nn.Linear(4, 3), ROWS)
    in_both = {
        "run twice",
        "alone and in a batch of 2",
        "alone and in a batch of 5",
        "the batch in reverse order",
        "each image at the next place",
        "padded with zeros",
        "padded with other images",
    }
    by_dtype = {dtype: {c.condition for c in report.changes if c.dtype == dtype} for dtype in ("float32", "float64")}
    assert by_dtype["float64"] == in_both
    assert {name.split(" threads")[0].rstrip("0123456789 ") for name in by_dtype["float32"] - in_both} == {"on 1 and on"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_a_model_passes_in_other_types(dtype: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 3))
    assert parity.invariance(model, ROWS, dtype=dtype).passed


def test_the_tolerance_is_wider_for_a_model_that_amplifies_rounding_errors() -> None:
    single, double = (Change("x", dtype, "output", False, 1e-13, 0.0, 0, None) for dtype in ("float32", "float64"))
    outputs = {"output": np.ones((2, 10_000), np.float32)}
    for changes, expected in (([single], 2 * 5e-6), ([single, double], 2 * 1e-13 * 2**29)):
        tolerance = measurement.with_tolerances(changes, outputs)[0].tolerance
        assert tolerance == pytest.approx(expected * five_sigma_factor(20_000))


# Faults ---------------------------------------------------------------------------------------------------------------

MIXED: dict[str, Callable[[Any], Any]] = {
    "the mean": lambda x: x - x.mean(0),
    "a millionth of the mean": lambda x: x - 1e-6 * x.mean(0),
    "the first image": lambda x: x - 0.1 * x[:1],
    "the image before": lambda x: x + 0.1 * (jnp if isinstance(x, jax.Array) else torch).roll(x, 1, 0),
    "the largest": lambda x: x / abs(x).max(),
    "its place": lambda x: x + 0.1 * (jnp if isinstance(x, jax.Array) else torch).arange(len(x))[:, None],
    "the size": lambda x: x * len(x),
}


@pytest.mark.parametrize("mixed", MIXED)
def test_a_torch_module_that_mixes_images_fails(mixed: str) -> None:
    class Mixing(nn.Linear):
        def forward(self, x: Any) -> Any:
            return MIXED[mixed](super().forward(x))

    report = parity.invariance(Mixing(4, 3), ROWS)
    assert not report.passed and report.verdict.startswith("FAIL, not invariant: ") and of(report, "run twice").bit_equal


@pytest.mark.parametrize("mixed", MIXED)
def test_a_flax_function_that_mixes_images_fails(mixed: str, without_processes: None) -> None:
    report = parity.invariance(lambda params, x: MIXED[mixed](x @ params["kernel"]), ROWS, KERNEL)
    assert not report.passed and report.verdict.startswith("FAIL, not invariant: ")


def test_a_small_part_of_the_mean_is_within_float32_rounding_and_fails_in_float64() -> None:
    class Mixing(nn.Linear):
        def forward(self, x: Any) -> Any:
            y = super().forward(x)
            return y - 1e-7 * y.mean(0)

    report = parity.invariance(Mixing(4, 3), ROWS)
    assert report.worst.dtype == "float64" and of(report, "padded with zeros").passed
    assert "hint: the change is as large as float32 rounding; does a part of the model cast to float32?" in str(report)


def test_the_verdict_names_the_condition_and_the_size_of_the_change() -> None:
    report = parity.invariance(torch_conv_net().train(), NCHW)
    change = report.worst
    assert change.difference > 0.1
    assert report.verdict == (
        f"FAIL, not invariant: {change.condition}: output differs by {change.difference:.1e} in float64 (tolerance 1e-12)"
    )


def test_batch_norm_in_train_mode_fails_in_linen(without_processes: None) -> None:
    model = linen.BatchNorm(use_running_average=False)
    variables = random_variables(model, IMAGES)
    report = parity.invariance(lambda own, x: model.apply(own, x, mutable=["batch_stats"])[0], IMAGES, variables)
    assert not report.passed


def test_batch_norm_in_train_mode_fails_in_nnx(without_processes: None) -> None:
    assert not parity.invariance(nnx.BatchNorm(2, rngs=nnx.Rngs(0)), IMAGES).passed


def test_noise_in_torch_fails_as_not_deterministic() -> None:
    report = parity.invariance(nn.Dropout().train(), ROWS)
    assert report.verdict.startswith("FAIL, not deterministic: run twice: output differs by ")


def test_noise_in_jax_fails_as_not_deterministic() -> None:
    rng = np.random.default_rng(0)

    def noisy(params: Any, x: Any) -> Any:
        noise = jax.pure_callback(
            lambda x: rng.standard_normal(x.shape).astype(x.dtype), jax.ShapeDtypeStruct(x.shape, x.dtype), x
        )
        return x @ params["kernel"] + noise[:, :3]

    report = parity.invariance(noisy, ROWS, KERNEL)
    assert report.verdict.startswith("FAIL, not deterministic: run twice: output differs by ")
    assert report.not_tested["threads"].startswith("the program does not run in another process (")


class BatchMean(nn.Linear):
    """Adds half of the mean of the batch to the outputs, and appends a constant."""

    def __init__(self, constant: float) -> None:
        super().__init__(4, 3)
        self.constant = constant

    def forward(self, x: Any) -> Any:
        y = super().forward(x)
        return torch.cat([y + 0.5 * y.mean(0), torch.full_like(y, self.constant)], 1)


def test_outputs_with_nan_are_refused() -> None:
    """The same NaN in every batch would hide the mean of the batch."""
    with pytest.raises(InputError, match=r"^output has NaN in float32 for 5 of 5 images: "):
        parity.invariance(BatchMean(math.nan), ROWS)


class Rotated(nn.Module):
    """Multiplies the inputs by a complex buffer; the imaginary part of the product is that of the image before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turns", torch.polar(torch.ones(4), torch.linspace(0, 3, 4)))

    def forward(self, x: Any) -> Any:
        turned = x * self.turns
        return torch.cat([turned.real, turned.imag.roll(1, 0)], 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.filterwarnings("error")
def test_the_imaginary_part_of_a_complex_buffer_is_kept(dtype: Any) -> None:
    assert not parity.invariance(Rotated(), ROWS, dtype=dtype).passed


@pytest.mark.filterwarnings("error")
def test_the_imaginary_part_of_complex_inputs_is_kept(without_processes: None) -> None:
    z = ROWS + 1j * ROWS[:, ::-1]
    assert not parity.invariance(Rotated(), z).passed
    assert not parity.invariance(lambda params, x: jnp.roll(x.imag, 1, 0) @ params["kernel"], z, KERNEL).passed


@pytest.mark.parametrize("mask", [-1e18, torch.finfo(torch.float32).min, -math.inf])
def test_entries_of_a_mask_do_not_hide_the_others(mask: float) -> None:
    report = parity.invariance(BatchMean(mask), ROWS)
    assert not report.passed and report.worst.difference > 0.1


def test_infinite_entries_of_a_mask_are_no_change(without_processes: None) -> None:
    def masked(params: Any, x: Any) -> Any:
        return jnp.where(x > 0, x, -jnp.inf)

    assert parity.invariance(masked, ROWS, KERNEL).bit_equal


# Amplified rounding errors --------------------------------------------------------------------------------------------


def amplified(x: Any, factor: float, leak: float = 0.0) -> Any:
    """Return sines, which amplify rounding errors by the factor, and a part of their mean over the batch."""
    y = (jnp if isinstance(x, jax.Array) else torch).sin(factor * x)
    return y + leak * y.mean(0)


class Amplified(nn.Linear):
    """Sums over 512 inputs, which are rounded differently alone and in a batch, and their sines."""

    def __init__(self, factor: float, leak: float = 0.0) -> None:
        torch.manual_seed(0)
        super().__init__(512, 64)
        self.factor, self.leak = factor, leak

    def forward(self, x: Any) -> Any:
        return amplified(super().forward(x), self.factor, self.leak)


LONG_ROWS = RNG.standard_normal((5, 512)).astype(np.float32)
LONG_KERNEL = {"kernel": RNG.standard_normal((512, 64)).astype(np.float32)}


def test_a_torch_module_that_amplifies_rounding_errors_passes() -> None:
    report = parity.invariance(Amplified(1e4), LONG_ROWS)
    assert of(report, "alone and in a batch of 5", "float64").difference > 1e-12, "nothing was amplified"
    assert report.passed, str(report)


def test_a_flax_function_that_amplifies_rounding_errors_passes(without_processes: None) -> None:
    report = parity.invariance(lambda params, x: amplified(x @ params["kernel"], 1e3), LONG_ROWS, LONG_KERNEL)
    assert of(report, "alone and in a batch of 5", "float64").difference > 1e-12, "nothing was amplified"
    assert report.passed, str(report)


def test_a_dependence_on_the_batch_fails_in_models_that_amplify_rounding_errors(without_processes: None) -> None:
    def leaking(params: Any, x: Any) -> Any:
        return amplified(x @ params["kernel"], 1e3, leak=1e-6)

    reports = parity.invariance(Amplified(1e4, 1e-6), LONG_ROWS), parity.invariance(leaking, LONG_ROWS, LONG_KERNEL)
    for report in reports:
        assert report.verdict.startswith("FAIL, not invariant: ") and report.worst.dtype == "float64"


def test_noise_is_not_measured_as_rounding() -> None:
    class Noisy(Amplified):
        def forward(self, x: Any) -> Any:
            return super().forward(x) + torch.rand(())

    report = parity.invariance(Noisy(1e4), LONG_ROWS)
    assert report.verdict.startswith("FAIL, not deterministic: ")


def test_outputs_that_are_all_rounding_error_are_refused() -> None:
    with pytest.raises(InputError, match=r"^float64 cannot tell whether output depends on the batch: 16 unit roundoffs"):
        parity.invariance(Amplified(1e11), LONG_ROWS)


# What is measured -----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_nproc_is_the_number_of_xlas_threads() -> None:
    code = """if True:
        import jax, os
        jax.jit(lambda x: x @ x)(jax.numpy.ones((8, 8))).block_until_ready()
        names = [open(f"/proc/self/task/{n}/comm").read() for n in os.listdir("/proc/self/task")]
        print(sum("XLAEigen" in name for name in names))
    """
    for count in ("1", "3"):
        environment = os.environ | {"NPROC": count, "JAX_PLATFORMS": "cpu"}
        found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert found.stdout.strip() == count


def test_all_devices_of_jax_are_compared_and_xla_runs_with_one_thread_and_with_several() -> None:
    """A process of its own has two devices, and starts others with 1 and with several threads."""
    several = max(2, os.cpu_count() or 1)
    code = f"""if True:
        import numpy as np
        from parity import invariance
        rows, kernel = np.random.default_rng(0).standard_normal((2, 5, 4)).astype(np.float32)
        report = invariance(lambda params, x: x @ params.T, rows, kernel)
        passed = {{c.condition: c.passed for c in report.changes if c.dtype == "float32"}}
        print(sum(name.startswith("on ") for name in passed), passed["in processes with 1 and with {several} threads"])
        print(sorted(report.not_tested))
    """
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout == "1 True\n[]\n"


def test_the_module_stays_as_it_is() -> None:
    module = torch_conv_net().train()
    before = copy.deepcopy(module.state_dict())
    parity.invariance(module, NCHW)
    assert module.training and all(torch.equal(tensor, before[key]) for key, tensor in module.state_dict().items())


def test_the_number_of_torch_threads_is_restored() -> None:
    before = torch.get_num_threads()
    parity.invariance(nn.Linear(4, 3), ROWS)
    assert torch.get_num_threads() == before


def test_several_inputs_and_outputs_are_compared() -> None:
    class Two(nn.Module):
        def forward(self, x: Any, tokens: Any) -> Any:
            return {"sum": x + tokens, "largest": x.argmax(-1)}

    report = parity.invariance(Two(), (ROWS, np.arange(20).reshape(5, 4)))
    assert {change.output for change in report.changes} == {"output.sum", "output.largest"}
    assert {change.tolerance for change in report.changes if change.output == "output.largest"} == {None, 1e-12}


def test_a_model_that_does_not_compute_in_float64_is_tested_in_float32_alone() -> None:
    class Fixed(nn.Linear):
        def forward(self, x: Any) -> Any:
            return super().forward(x).float()

    report = parity.invariance(Fixed(4, 3), ROWS)
    assert report.passed and {change.dtype for change in report.changes} == {"float32"}
    assert report.not_tested["float64"] == "output is float32 with weights and inputs in float64"


class Largest(nn.Linear):
    """Returns the index of the largest output, which changes in float32 with each run; float64 may be refused."""

    def __init__(self, *, has_float64: bool) -> None:
        super().__init__(4, 3)
        self.has_float64, self.runs = has_float64, 0

    def forward(self, x: Any) -> Any:
        if x.dtype == torch.float64:
            if not self.has_float64:
                raise RuntimeError("no kernel")
            return super().forward(x).argmax(1)
        self.runs += 1
        return torch.full((len(x),), self.runs)


def test_integers_that_change_fail_if_float64_was_not_tested() -> None:
    report = parity.invariance(Largest(has_float64=False), ROWS)
    assert report.verdict.startswith("FAIL, not deterministic: run twice: output differs by 1.0e+00 in float32")
    assert "hint: rounding too may change integers, and float64, which would tell, was not tested" in str(report)


def test_integers_that_change_in_float32_alone_pass_and_are_not_called_rounding() -> None:
    report = parity.invariance(Largest(has_float64=True), ROWS)
    assert report.passed and "by rounding alone" not in report.verdict
    assert report.verdict == "PASS: output changes in float32 (run twice), but is judged in float64 alone"


def test_the_steps_between_neighbouring_numbers_are_counted_across_zero() -> None:
    for dtype in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16):
        smallest = np.array([1], f"i{np.dtype(dtype).itemsize}").view(dtype)
        [change] = compare("x", "float32", {"output": smallest}, {"output": -smallest})
        assert change.ulps == 2
    one = np.ones((1, 1), np.float32)
    [change] = compare("x", "float32", {"output": one}, {"output": np.nextafter(one, 2, dtype=np.float32)})
    assert (change.ulps, change.bit_equal, change.largest) == (1, False, 2.0**-23)


def test_nan_in_one_of_two_results_is_an_infinite_change() -> None:
    [change] = compare("x", "float32", {"output": np.ones((2, 1))}, {"output": np.array([[1.0], [np.nan]])})
    assert change.difference == np.inf and change.ulps is None


def test_a_padded_batch_keeps_half_of_the_images() -> None:
    padded = {batch.condition: batch for batch in conditions.batches([ROWS])}["padded with other images"]
    assert np.array_equal(padded.inputs[0][:3], ROWS[:3]) and np.array_equal(padded.inputs[0][3:], ROWS[3:, ::-1])


def test_the_facts_have_the_verdict_and_every_change() -> None:
    report = parity.invariance(nn.Linear(4, 3), ROWS)
    found = json.loads(json.dumps(report.facts(), allow_nan=False))
    assert found["passed"] and found["verdict"] == report.verdict and len(found["changes"]) == len(report.changes)
    assert found["changes"][0]["condition"] == "run twice" and found["changes"][0]["passed"]


@pytest.mark.parametrize(
    ("model", "inputs", "params", "options", "what"),
    [
        (nn.Linear(4, 3), ROWS[:1], None, {}, "axis 0 must be the same batch of at least 2 images in all"),
        (nn.Linear(4, 3), np.float32(1), None, {}, "axis 0 must be the same batch"),
        (nn.Linear(4, 3), (ROWS, ROWS[:2]), None, {}, "the inputs have shapes (5, 4), (2, 4)"),
        (nn.Linear(4, 3), ROWS, KERNEL, {}, "params are given with a torch.nn.Module, which has its own"),
        (nn.Linear(4, 3), ROWS, None, {"dtype": "float23"}, "dtype is 'float23': give one of float32, bfloat16"),
        (nn.Linear(5, 3), ROWS, None, {}, "the model does not run on a batch of 5: RuntimeError: "),
        (nn.MSELoss(), (ROWS, ROWS), None, {}, "output has shape () for a batch of 5: axis 0 must be the batch"),
        (lambda params, x: x, ROWS, None, {}, "params are missing: give the parameters of the Flax function"),
        (lambda params, x: None, ROWS, KERNEL, {}, "the model returns no array"),
        (3, ROWS, None, {}, "the model is a int: give a torch.nn.Module, a Flax module or a function"),
        (nn.Linear, ROWS, None, {}, "the model is the class Linear: give an instance of it"),
        (nn.LazyLinear(3), ROWS, None, {}, "weight of torch has no shape before the first call"),
        (nn.Linear(4, 3, device="meta"), ROWS, None, {}, "weight of torch is on the device meta"),
        (nn.Linear(4, 3), "rows", None, {}, "input 0 is a str, which is no array of numbers"),
    ],
)
def test_bad_input_is_refused(model: Any, inputs: Any, params: Any, options: Any, what: str) -> None:
    with pytest.raises(InputError) as caught:
        parity.invariance(model, inputs, params, **options)
    assert what in str(caught.value)


def test_tensors_of_any_kind_are_inputs() -> None:
    for rows in (torch.tensor(ROWS, requires_grad=True), torch.tensor(ROWS).bfloat16()):
        assert parity.invariance(nn.Linear(4, 3), rows).passed


def test_missing_packages_of_a_flax_model_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("jax", "flax"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match="runs in JAX, and the packages jax and flax are not installed: pip install "):
        parity.invariance(lambda params, x: x, ROWS, KERNEL)


# The command ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return the path of a checkpoint of a small model."""
    config = small_config(vit_spec.get("vit_s16"))
    path = tmp_path / "vit.safetensors"
    parity.save(path, perturbed_params(config), config, "jax")
    return path


def test_check_tests_both_twins(saved: Path, without_processes: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(saved), "--invariance"]) == 0
    out = capsys.readouterr().out
    assert "jax: PASS: " in out and "torch: PASS: " in out and "alone and in a batch of 8" in out


def test_check_exits_with_1_and_names_the_twin_that_depends_on_the_batch(
    saved: Path, without_processes: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = vit_torch.ViT.forward

    def mix(self: Any, images: Any) -> Any:
        logits = forward(self, images)
        return logits - 1e-3 * logits.mean(0)

    monkeypatch.setattr(vit_torch.ViT, "forward", mix)
    assert main(["check", str(saved), "--invariance", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["passed"], found["jax"]["passed"], found["torch"]["passed"]) == (False, True, False)


def test_check_tests_the_twins_in_half_precision(saved: Path, without_processes: None) -> None:
    report = twins.twins_invariance(parity.load(saved), dtype="bfloat16")
    assert report.passed and report.jax.dtype == report.torch.dtype == "bfloat16"


@pytest.mark.parametrize(
    "option", ["--against b", "--level train", "--steps 3", "--no-gradients", "--as-is", "--html a.html"]
)
def test_options_that_do_not_combine_are_refused_by_name(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "a", "--invariance", *option.split()]) == 2
    assert f"on the batch: remove {option.split()[0]}\n" in capsys.readouterr().err
