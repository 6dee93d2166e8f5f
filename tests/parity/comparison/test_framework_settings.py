"""Settings are audited, made strict and restored, and the recorded environment is reproducible."""

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
from parity.comparison.framework_settings import Setting, audit, compiler_options, environment, strict_settings
from tests import ROOT

UNFUSED = {"xla_cpu_experimental_ynn_fusion_type": ""}


@pytest.fixture(autouse=True, scope="module")
def _initialize_xla() -> None:
    """Make XLA read XLA_FLAGS now: it reads them only once, so flags that a test sets later change only the audit."""
    with suppress(ImportError):
        import jax

        jax.jit(lambda x: x + 1)(1.0)


def find_setting(name: str, options: dict[str, object] | None = None) -> Setting:
    """Return the setting with this name from the audit."""
    return next(setting for setting in audit(options) if setting.name == name)


@contextmanager
def loose_settings(torch) -> Iterator[None]:
    """Set one setting of PyTorch of each kind to a value that is not strict."""
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


def medium_precision_dtype(torch) -> str:
    """Return the type that PyTorch's "medium" precision rounds float32 matrices to on this machine."""
    return "TF32" if torch.cuda.is_available() else "bfloat16"


def torch_settings() -> dict[str, str | None]:
    """Return a dict from the names of all settings to their values in PyTorch."""
    return {setting.name: setting.torch for setting in audit()}


@pytest.mark.parametrize(
    ("name", "loose_value", "strict_value"),
    [
        ("matmul TF32", "dtype of medium", "off"),
        ("matmul precision", "medium", "highest"),
        ("autotuning", "on", "off"),
        ("deterministic", "off", "on"),
        ("reduced-precision reductions", "cuBLAS fp16, cuBLAS bf16, cuBLAS fp16 sums, attention", "off"),
        ("autocast", "on", "off"),
        ("flush denormals", "on", "off"),
    ],
)
def test_strict_settings_of_torch_are_set_and_restored(name: str, loose_value: str, strict_value: str) -> None:
    torch = pytest.importorskip("torch")
    loose_value = medium_precision_dtype(torch) if loose_value == "dtype of medium" else loose_value
    with loose_settings(torch):
        before = torch_settings()
        with strict_settings():
            during = torch_settings()
        after = torch_settings()
    assert (before[name], during[name], after[name]) == (loose_value, strict_value, loose_value)


@pytest.mark.parametrize(
    ("is_set", "is_initialized", "warns"), [(True, True, False), (False, False, False), (False, True, True)]
)
def test_on_a_gpu_nondeterministic_algorithms_only_warn_if_cublas_is_nondeterministic(
    is_set: bool, is_initialized: bool, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if not is_set:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialized)
    with strict_settings():
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled() is warns


def test_strict_settings_are_restored_after_an_exception() -> None:
    torch = pytest.importorskip("torch")
    with loose_settings(torch):
        before = audit()
        with pytest.raises(RuntimeError, match="in the model"), strict_settings():
            raise RuntimeError("in the model")
        assert audit() == before


def test_strict_settings_restore_whether_a_precision_is_inherited() -> None:
    torch = pytest.importorskip("torch")
    read, write = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    own = read("mkldnn", "conv")
    write("generic", "all", "tf32")
    try:
        with strict_settings():
            assert read("mkldnn", "conv") == "ieee"
        assert read("mkldnn", "conv") == "tf32"
    finally:
        write("generic", "all", "none")
    assert read("mkldnn", "conv") == own


def test_older_and_newer_settings_that_disagree_are_reported_made_strict_and_restored() -> None:
    torch = pytest.importorskip("torch")
    read, write = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
    own = read("cuda", "matmul")
    write("cuda", "matmul", "tf32")
    try:
        before = torch_settings()["matmul precision"]
        with strict_settings():
            during = torch_settings()["matmul precision"]
        after = torch_settings()["matmul precision"], read("cuda", "matmul")
    finally:
        write("cuda", "matmul", own)
    assert (before, during, after) == (
        "older and newer setting disagree",
        "highest",
        ("older and newer setting disagree", "tf32"),
    )


@pytest.mark.parametrize("allowed", [True, False])
def test_strict_settings_keep_the_older_and_the_newer_setting_of_convolutions_equal(allowed: bool) -> None:
    torch = pytest.importorskip("torch")
    cudnn, before = torch.backends.cudnn, torch.backends.cudnn.allow_tf32
    cudnn.allow_tf32 = allowed
    try:
        with strict_settings():
            assert cudnn.allow_tf32 is False
        assert cudnn.allow_tf32 is allowed
    finally:
        cudnn.allow_tf32 = before


def test_products_under_strict_settings_have_the_highest_precision() -> None:
    torch = pytest.importorskip("torch")
    a = torch.tensor(np.random.default_rng(0).standard_normal((64, 64)), dtype=torch.float32)
    exact = a @ a
    with loose_settings(torch):
        loose_value = a @ a
        with strict_settings():
            strict_value = a @ a
    assert torch.equal(strict_value, exact)
    assert not torch.equal(loose_value, exact)


def test_strict_settings_set_the_highest_precision_in_jax_and_restore_it() -> None:
    jax = pytest.importorskip("jax")
    with jax.default_matmul_precision("bfloat16"):
        with strict_settings():
            during = find_setting("matmul precision").jax
        after = find_setting("matmul precision").jax
    assert (during, after) == ("highest", "bfloat16")


def test_strict_options_make_xla_round_after_every_operation() -> None:
    jax = pytest.importorskip("jax")
    x = jax.numpy.asarray(np.random.default_rng(0).standard_normal((32, 64)), jax.numpy.bfloat16)
    with jax.disable_jit():
        eager = jax.nn.softmax(x)
    strict, default = (jax.jit(jax.nn.softmax, compiler_options=options)(x) for options in (compiler_options(), {}))
    assert (strict == eager).all()
    assert not (default == eager).all()


def test_xla_accepts_strict_options_together_with_others() -> None:
    jax = pytest.importorskip("jax")
    double = jax.jit(lambda x: 2 * x, compiler_options={**compiler_options(), **UNFUSED})
    assert double(1.0) == 2


def test_an_unknown_backend_has_no_options() -> None:
    jax = pytest.importorskip("jax")
    with jax.default_device("tpu"):
        assert compiler_options() == {}


def test_a_comparison_that_is_not_strict_has_no_options() -> None:
    assert compiler_options(strict=False) == {}


def test_the_audit_reads_fusion_from_a_compiled_program() -> None:
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "cpu":
        pytest.skip("UNFUSED is an option of XLA on CPU")
    assert find_setting("fusion", UNFUSED).jax == "off"


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
        assert find_setting(name).jax == value


def test_the_audit_reads_xla_flags_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jax = pytest.importorskip("jax")
    (tmp_path / "flags").write_text("--xla_cpu_enable_fast_math=true\n")
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "flags"))
    with jax.default_device("cpu"):
        assert (find_setting("fast-math").jax, find_setting("XLA_FLAGS").jax) == ("on", "--xla_cpu_enable_fast_math=true")


def test_compiler_options_override_xla_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    jax = pytest.importorskip("jax")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    with jax.default_device("cpu"):
        assert find_setting("fast-math", compiler_options()).jax == "off"


def test_an_environment_variable_is_recorded_for_the_framework_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert (find_setting("MKL_CBWR").jax, find_setting("MKL_CBWR").torch) == (None, "COMPATIBLE")


@pytest.mark.parametrize(("jax", "torch"), [("on", "on"), (None, "on"), ("on", None)])
def test_equal_or_missing_settings_do_not_differ(jax: str | None, torch: str | None) -> None:
    assert not Setting("autotuning", jax, torch, "off", "").differs


def test_no_setting_differs_under_strict_settings() -> None:
    pytest.importorskip("jax")
    pytest.importorskip("torch")
    with strict_settings():
        assert not any(setting.differs for setting in audit(compiler_options()))


def test_loose_settings_of_torch_differ_from_jax() -> None:
    jax, torch = pytest.importorskip("jax"), pytest.importorskip("torch")
    with loose_settings(torch), jax.default_device("cpu"):
        assert ("matmul TF32", "off", medium_precision_dtype(torch)) in [
            (s.name, s.jax, s.torch) for s in audit() if s.differs
        ]


@pytest.mark.parametrize("missing", ["jax", "torch"])
def test_one_framework_alone_can_be_audited(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with strict_settings():
        assert all(getattr(setting, missing) is None for setting in audit() if setting.name in framework_settings._STRICT)
    assert missing not in environment()["threads"]


def test_the_environment_is_the_same_in_another_process() -> None:
    code = "import json\nfrom parity.comparison.framework_settings import environment\nprint(json.dumps(environment()))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == json.dumps(environment())


def test_the_environment_has_no_path_and_no_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to={ROOT} --xla_cpu_enable_fast_math=false")
    text = json.dumps(environment())
    assert not [word for word in (str(ROOT), sys.prefix, os.path.expanduser("~"), socket.gethostname()) if word in text]
