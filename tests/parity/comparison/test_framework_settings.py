"""Settings are audited, made strict and restored; the card of the environment is the same twice, whenever and wherever."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from parity.comparison import framework_settings
from parity.comparison.framework_settings import Setting, audit, compiler_options, environment, strict
from tests import ROOT

UNFUSED = {"xla_cpu_experimental_ynn_fusion_type": ""}


@pytest.fixture(autouse=True, scope="module")
def _xla_has_read_its_flags() -> None:
    """XLA reads them once, so that what a test puts there afterwards is for the audit alone."""
    with suppress(ImportError):
        import jax

        jax.jit(lambda x: x + 1)(1.0)


def now(name: str, options: dict[str, object] | None = None) -> Setting:
    """One setting as the audit finds it."""
    return next(setting for setting in audit(options) if setting.name == name)


@contextmanager
def loose(torch) -> Iterator[None]:
    """Every switch of PyTorch the wrong way round."""
    c = torch._C
    pairs = [
        (c._get_cudnn_benchmark, c._set_cudnn_benchmark, True),
        (c._get_cublas_allow_fp16_accumulation, c._set_cublas_allow_fp16_accumulation, True),
        (c._get_math_sdp_allow_fp16_bf16_reduction, c._set_math_sdp_allow_fp16_bf16_reduction, True),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    ]
    before = [read() for read, _, _ in pairs]
    for _, write, value in pairs:
        write(value)
    torch.set_flush_denormal(True)
    try:
        with torch.autocast("cpu"):
            yield
    finally:
        torch.set_flush_denormal(False)
        for (_, write, _), value in zip(pairs, before, strict=True):
            write(value)


def coarsest(torch) -> str:
    """What PyTorch's "medium" rounds entries of float32 matrices to where it computes, on a GPU or else on CPU."""
    return "TF32" if torch.cuda.is_available() else "bfloat16"


def of_torch() -> dict[str, str | None]:
    return {setting.name: setting.torch for setting in audit()}


@pytest.mark.parametrize(
    ("name", "careless", "careful"),
    [
        ("matmul TF32", "coarsest", "off"),
        ("matmul precision", "medium", "highest"),
        ("autotuning", "on", "off"),
        ("deterministic", "off", "on"),
        ("reduced-precision reductions", "cuBLAS fp16, cuBLAS bf16, cuBLAS fp16 sums, attention", "off"),
        ("autocast", "on", "off"),
        ("flush denormals", "on", "off"),
    ],
)
def test_strict_sets_what_was_careless_in_torch_and_restores_it(name: str, careless: str, careful: str) -> None:
    torch = pytest.importorskip("torch")
    careless = coarsest(torch) if careless == "coarsest" else careless
    with loose(torch):
        before = of_torch()
        with strict():
            during = of_torch()
        after = of_torch()
    assert (before[name], during[name], after[name]) == (careless, careful, careless)


@pytest.mark.parametrize(
    ("set_before", "in_use", "warns"), [(True, True, False), (False, False, False), (False, True, True)]
)
def test_on_a_gpu_only_products_that_cannot_repeat_let_others_warn(
    set_before: bool, in_use: bool, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if not set_before:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    with strict():
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled() is warns


def test_strict_restores_after_an_exception() -> None:
    torch = pytest.importorskip("torch")
    with loose(torch):
        before = audit()
        with pytest.raises(RuntimeError, match="in the model"), strict():
            raise RuntimeError("in the model")
        assert audit() == before


def test_strict_restores_what_a_precision_inherits_and_not_only_what_it_comes_to() -> None:
    torch = pytest.importorskip("torch")
    read, write = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    own = read("mkldnn", "conv")
    write("generic", "all", "tf32")
    try:
        with strict():
            assert read("mkldnn", "conv") == "ieee"
        assert read("mkldnn", "conv") == "tf32"
    finally:
        write("generic", "all", "none")
    assert read("mkldnn", "conv") == own


def test_settings_in_both_spellings_at_odds_are_named_made_strict_and_left_at_odds() -> None:
    torch = pytest.importorskip("torch")
    read, write = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    own = read("cuda", "matmul")
    write("cuda", "matmul", "tf32")
    try:
        before = of_torch()["matmul precision"]
        with strict():
            during = of_torch()["matmul precision"]
        after = of_torch()["matmul precision"], read("cuda", "matmul")
    finally:
        write("cuda", "matmul", own)
    assert (before, during, after) == (
        "older and newer spelling at odds",
        "highest",
        ("older and newer spelling at odds", "tf32"),
    )


@pytest.mark.parametrize("allowed", [True, False])
def test_strict_keeps_both_spellings_of_convolutions_together(allowed: bool) -> None:
    torch = pytest.importorskip("torch")
    cudnn, before = torch.backends.cudnn, torch.backends.cudnn.allow_tf32
    cudnn.allow_tf32 = allowed
    try:
        with strict():
            assert cudnn.allow_tf32 is False
        assert cudnn.allow_tf32 is allowed
    finally:
        cudnn.allow_tf32 = before


def test_products_under_strict_are_those_of_highest_precision() -> None:
    torch = pytest.importorskip("torch")
    a = torch.tensor(np.random.default_rng(0).standard_normal((64, 64)), dtype=torch.float32)
    exact = a @ a
    with loose(torch):
        careless = a @ a
        with strict():
            careful = a @ a
    assert torch.equal(careful, exact)
    assert not torch.equal(careless, exact)


def test_strict_asks_jax_for_the_highest_precision_and_restores_it() -> None:
    jax = pytest.importorskip("jax")
    with jax.default_matmul_precision("bfloat16"):
        with strict():
            during = now("matmul precision").jax
        after = now("matmul precision").jax
    assert (during, after) == ("highest", "bfloat16")


def test_strict_options_make_xla_round_after_every_operation() -> None:
    jax = pytest.importorskip("jax")
    x = jax.numpy.asarray(np.random.default_rng(0).standard_normal((32, 64)), jax.numpy.bfloat16)
    with jax.disable_jit():
        eager = jax.nn.softmax(x)
    ours, usual = (jax.jit(jax.nn.softmax, compiler_options=options)(x) for options in (compiler_options(), {}))
    assert (ours == eager).all()
    assert not (usual == eager).all()


def test_xla_takes_the_options_of_this_backend_beside_others() -> None:
    jax = pytest.importorskip("jax")
    double = jax.jit(lambda x: 2 * x, compiler_options={**compiler_options(), **UNFUSED})
    assert double(1.0) == 2


def test_no_option_is_given_for_a_backend_whose_options_are_not_known() -> None:
    jax = pytest.importorskip("jax")
    with jax.default_device("tpu"):
        assert compiler_options() == {}


def test_no_option_is_given_where_the_check_is_not_strict() -> None:
    assert compiler_options(strict=False) == {}


def test_the_audit_finds_the_fusion_of_xla_by_looking() -> None:
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "cpu":
        pytest.skip("the fusion is that of the CPU")
    assert now("fusion", UNFUSED).jax == "off"


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        ("--xla_cpu_enable_fast_math=true", "fast-math", "on"),
        ("--xla_cpu_enable_fast_math", "fast-math", "on"),
        ("--xla_cpu_enable_fast_math=true --xla_cpu_enable_fast_math=false", "fast-math", "off"),
        ("--xla_allow_excess_precision=0", "excess precision", "off"),
    ],
)
def test_the_audit_reads_xla_flags(flags: str, name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    jax = pytest.importorskip("jax")
    monkeypatch.setenv("XLA_FLAGS", flags)
    with jax.default_device("cpu"):
        assert now(name).jax == value


def test_the_audit_reads_xla_flags_from_the_file_that_holds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jax = pytest.importorskip("jax")
    (tmp_path / "flags").write_text("--xla_cpu_enable_fast_math=true\n")
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "flags"))
    with jax.default_device("cpu"):
        assert (now("fast-math").jax, now("XLA_FLAGS").jax) == ("on", "--xla_cpu_enable_fast_math=true")


def test_options_of_a_run_count_before_xla_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    jax = pytest.importorskip("jax")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    with jax.default_device("cpu"):
        assert now("fast-math", compiler_options()).jax == "off"


def test_a_variable_that_is_set_is_recorded_on_the_side_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert (now("MKL_CBWR").jax, now("MKL_CBWR").torch) == (None, "COMPATIBLE")


@pytest.mark.parametrize(("jax", "torch"), [("on", "on"), (None, "on"), ("on", None)])
def test_sides_that_agree_or_are_alone_do_not_differ(jax: str | None, torch: str | None) -> None:
    assert not Setting("autotuning", jax, torch, "off", "").differs


def test_nothing_differs_during_a_strict_check() -> None:
    pytest.importorskip("jax")
    pytest.importorskip("torch")
    with strict():
        assert not any(setting.differs for setting in audit(compiler_options()))


def test_a_careless_torch_differs_from_jax() -> None:
    jax, torch = pytest.importorskip("jax"), pytest.importorskip("torch")
    with loose(torch), jax.default_device("cpu"):
        assert ("matmul TF32", "off", coarsest(torch)) in [(s.name, s.jax, s.torch) for s in audit() if s.differs]


@pytest.mark.parametrize("missing", ["jax", "torch"])
def test_one_framework_is_enough(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with strict():
        assert all(getattr(setting, missing) is None for setting in audit() if setting.name in framework_settings._STRICT)
    assert missing not in environment()["threads"]


def test_the_card_is_the_same_in_another_process() -> None:
    code = "import json\nfrom parity.comparison.framework_settings import environment\nprint(json.dumps(environment()))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == json.dumps(environment())


def test_the_card_holds_no_path_and_no_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to={ROOT} --xla_cpu_enable_fast_math=false")
    text = json.dumps(environment())
    assert not [word for word in (str(ROOT), sys.prefix, os.path.expanduser("~"), socket.gethostname()) if word in text]
