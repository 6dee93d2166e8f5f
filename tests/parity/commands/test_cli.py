"""The command line: output, exit codes, error messages, and which modules it does not import."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

import parity
import vit_spec
from parity.__main__ import COMMANDS, main
from parity.checkpoints.formats import formats, get
from parity.commands.options import build_parser
from tests import ROOT
from vit_spec import ViTConfig

TINY = ViTConfig(image_size=(4, 6), patch_size=2, width=8, depth=2, num_heads=2, mlp_dim=6, num_classes=3)


@pytest.fixture
def saved(tmp_path):
    """Return the path of a checkpoint in the torch format."""
    arrays = {
        key: np.full(layout.shape(TINY.sizes), i, np.float32)
        for i, layout in enumerate(get("torch").layouts(TINY).values())
        for key in layout.keys(TINY.sizes)
    }
    parity.save(tmp_path / "vit.safetensors", arrays, TINY, "torch")
    return tmp_path / "vit.safetensors"


def python(*arguments, **environment):
    """Run Python in a separate process and capture its output."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, env=os.environ | environment
    )


def run(capsys, *arguments):
    """Run a command in this process; return its exit code, stdout and stderr."""
    code = main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("SRC", ["inspect", ""]),
        ("DST", ["convert", "{saved}", "", "--to", "timm", "--force"]),
        ("--html", ["check", "{saved}", "--html", ""]),
        ("--logits", ["diagnose", "{saved}", "--logits", ""]),
        ("--format-file", ["formats", "--format-file="]),
        ("--show", ["formats", "--show", ""]),
        ("FILE", ["golden", "verify", ""]),
    ],
)
def test_an_empty_argument_does_not_mean_the_working_folder(name, words, saved, monkeypatch, capsys):
    monkeypatch.chdir(saved.parent)
    code, out, err = run(capsys, *(word.format(saved=saved) for word in words))
    assert (code, out) == (2, "") and f"error: {name} is empty: give a path or another value; see " in err


# Imports --------------------------------------------------------------------------------------------------------------

LOADED = "import sys; print(sorted({'jax', 'torch', 'flax', 'orbax', 'huggingface_hub'} & set(sys.modules)))"


def test_importing_parity_imports_neither_framework():
    assert python("-c", f"import parity; {LOADED}").stdout == "[]\n"


def test_the_test_above_detects_an_imported_framework():
    pytest.importorskip("torch")
    assert python("-c", f"import parity, torch; {LOADED}").stdout == "['torch']\n"


@pytest.mark.parametrize("command", ["convert", "inspect", "formats", "models"])
def test_commands_that_run_no_model_import_neither_framework(saved, command):
    arguments = {"convert": [saved, saved.with_name("b.safetensors"), "--to", "jax"], "inspect": [saved]}.get(command, [])
    words = [command, *map(str, arguments)]
    done = python("-c", f"from parity.__main__ import main; code = main({words}); {LOADED}; raise SystemExit(code)")
    assert done.returncode == 0 and done.stdout.endswith("\n[]\n")


# Commands ------------------------------------------------------------------------------------------------------------


def test_convert_writes_the_other_format(saved, capsys):
    target = saved.with_name("b.safetensors")
    code, out, err = run(capsys, "convert", saved, target, "--to", "jax")
    assert (code, err) == (0, "") and str(target) in out and "format jax" in out
    assert parity.load(target).format == "jax"


def test_convert_replaces_a_file_only_with_force(saved, capsys):
    code, _, err = run(capsys, "convert", saved, saved, "--to", "jax")
    assert code == 2 and "--force" in err and parity.load(saved).format == "torch"
    assert run(capsys, "convert", saved, saved, "--to", "jax", "--force")[0] == 0
    assert parity.load(saved).format == "jax"


def test_formats_lists_every_format_with_an_example(capsys):
    code, out, _ = run(capsys, "formats")
    assert code == 0 and all(name in out for name in formats())
    assert "blocks.{block}.attn.qkv.weight | (qkv head dim) width" in out


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 512000000 bytes."),
        OSError(12, "Cannot allocate memory"),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB"),
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8589934592 bytes."),
    ],
)
def test_the_error_for_too_little_memory_is_one_line(monkeypatch, error, capsys):
    def fails(_):
        raise error

    monkeypatch.setitem(COMMANDS, "formats", fails)
    assert main(["formats"]) == 2
    assert capsys.readouterr().err.startswith("error: not enough memory")


def test_options_for_whose_weights_the_memory_is_too_little_are_named(saved, capsys):
    classes = 10**15  # no process has so much address space
    line = ("convert", saved, saved.with_name("b.safetensors"), "--to", "jax", "--num-classes", classes)
    code, _, error = run(capsys, *line)
    assert code == 2 and error.startswith(
        f"error: not enough memory for the weights with --num-classes {classes}: give smaller values"
    )


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(36, "File name too long", "a" * 9), "aaaaaaaaa: File name too long; give another path"),
        (OSError(28, "No space left on device", "a"), "a: No space left on device; make room, or write elsewhere"),
        (OSError(24, "Too many open files"), "Too many open files"),
        (OSError(122, "Disk quota exceeded"), "Disk quota exceeded; make room, or write elsewhere"),
        (
            PermissionError(13, "Permission denied", "a"),
            "a: Permission denied; give this user access, or give another path",
        ),
        (ModuleNotFoundError("No module named 'x'; 'y' is not a package"), "No module named 'x'; 'y' is not a package"),
        (
            ModuleNotFoundError(name="pyarrow"),
            "the package pyarrow is not installed: pip install '.[parquet]' in the checkout",
        ),
    ],
)
def test_an_error_of_the_system_is_one_line_with_a_remedy_that_helps(monkeypatch, error, line, capsys):
    def fails(_):
        raise error

    monkeypatch.setitem(COMMANDS, "formats", fails)
    assert main(["formats"]) == 2
    assert capsys.readouterr().err == f"error: {line}\n"


def test_an_interrupted_command_says_so_and_exits_with_130(monkeypatch, capsys):
    def fails(_):
        raise KeyboardInterrupt

    monkeypatch.setitem(COMMANDS, "formats", fails)
    assert main(["formats"]) == 130
    assert capsys.readouterr().err == "interrupted; what was saved before is kept\n"


def test_models_lists_every_model_with_its_size(capsys):
    code, out, _ = run(capsys, "models")
    assert code == 0 and [line.split()[0] for line in out.splitlines()[1:]] == vit_spec.names()
    assert f"{vit_spec.count(vit_spec.get('vit_b16')):,}" in out


def test_inspect_shows_the_config_and_every_parameter(saved, capsys):
    code, out, _ = run(capsys, "inspect", saved)
    assert code == 0 and "eps=1e-06" in out
    line = next(line for line in out.splitlines() if line.startswith("blocks.{block}.attn.qkv.weight"))
    assert line.split() == "blocks.{block}.attn.qkv.weight (qkv head dim) width 24 × 8 float32 2 384 1,536".split()
    total = next(line for line in out.splitlines() if line.startswith("all "))
    assert total.split() == ["all", "32", f"{vit_spec.count(TINY):,}", f"{4 * vit_spec.count(TINY):,}"]


DEFAULTS = {"seed": 0, "backward": True, "strict": True}  # other arguments of compare are not passed


@pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 1)])
def test_check_prints_the_report_and_its_exit_code_is_the_verdict(saved, capsys, monkeypatch, passed, code):
    class Report(SimpleNamespace):
        def __str__(self):
            return "the report"

    def compare(config, checkpoint, **options):
        assert config == TINY and checkpoint.arrays["norm.weight"].shape == (8,)
        assert {name: value for name, value in options.items() if name != "progress"} == DEFAULTS
        return Report(passed=passed)

    monkeypatch.setattr("parity.comparison.twins.compare", compare)
    assert run(capsys, "check", saved) == (
        code,
        "read: vit.safetensors, format torch, container safetensors\nthe report\n",
        "",
    )


@pytest.mark.parametrize("options", [[], ["--level", "train"], ["--against", "{saved}"], ["--invariance"]])
def test_check_names_all_frameworks_that_are_not_installed(saved, capsys, monkeypatch, options):
    for name in ("jax", "torch"):
        monkeypatch.setitem(sys.modules, name, None)
    options = [option.format(saved=saved) for option in options]
    code, _, err = run(capsys, "check", saved, *options)
    assert code == 2 and err == (
        "error: the comparison runs both twins, and the packages jax and torch are not installed: pip install "
        "'.[jax,torch]' in the checkout\n"
    )


def test_diagnose_names_the_framework_that_is_not_installed(saved, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    code, _, err = run(capsys, "diagnose", saved, "--against", saved)
    assert code == 2 and "PyTorch twin, and the package torch is not installed: pip install '.[torch]' in the ch" in err


def write_altered(path, target, **changes):
    """Write a copy of a checkpoint with some entries changed, and return its path."""
    checkpoint = parity.load(path)
    arrays = {key: np.array(array) for key, array in checkpoint.arrays.items()}
    for key, (index, value) in changes.items():
        arrays[key.replace("__", ".")][index] = value
    parity.save(target, arrays, checkpoint.config, "torch")
    return target


def test_inspect_lists_suspicious_values(saved, tmp_path, capsys):
    suspicious = {"norm__weight": (slice(2), np.nan), "head__weight": ((1, 1), np.inf), "norm__bias": (3, 1e-40)}
    path = write_altered(saved, tmp_path / "altered.safetensors", **suspicious)
    _, out, _ = run(capsys, "inspect", path)
    line = next(line for line in out.splitlines() if line.startswith("suspicious: "))
    assert "norm.weight has 2 NaN" in line and "head.weight has 1 infinite" in line and "norm.bias has 1 denormal" in line
    assert "patch_embed.proj.weight has all zero" in line  # the first array of the fixture
    _, out, _ = run(capsys, "inspect", path, "--no-values")
    assert "suspicious" not in out and "--values" in out


def test_json_output_has_the_content_of_the_text_output(saved, capsys):
    found = json.loads(run(capsys, "inspect", saved, "--json")[1])
    assert next(iter(found.items())) == ("schema", "parity.inspect/1")
    assert found["format"] == "torch" and found["config"]["width"] == 8 and found["assumed"] == []
    assert sum(entry["entries"] for entry in found["parameters"]) == vit_spec.count(TINY)
    done = json.loads(run(capsys, "convert", saved, saved.with_name("b.npz"), "--to", "jax", "--json")[1])
    assert (done["target_format"], done["target_container"], done["bytes"]) == ("jax", "npz", 4 * vit_spec.count(TINY))
    assert (done["format"], done["container"]) == ("torch", "safetensors")
    assert set(json.loads(run(capsys, "formats", "--json")[1])["formats"]) == set(formats())
    assert json.loads(run(capsys, "formats", "--show", saved, "--json")[1])["format"] == "torch"
    assert json.loads(run(capsys, "models", "--json")[1])["models"]["vit_b16"]["parameters"] == vit_spec.count(
        vit_spec.get("vit_b16")
    )


def write_without_config(saved, name="bare.safetensors"):
    """Write the checkpoint of the fixture without a config, and return its path."""
    path = saved.with_name(name)
    save_file({key: np.asarray(array) for key, array in parity.load(saved).arrays.items()}, path)
    return path


def test_assumed_config_fields_are_printed_and_can_be_overridden(saved, capsys):
    path, heads, size = write_without_config(saved), ("--set", "num_heads=2"), ("--set", "image_size=4x6")
    code, out, _ = run(capsys, "inspect", path, *heads, *size)
    assert code == 0 and "norms.eps=1e-06" in out.partition("assumed, as in models of format timm: ")[2]
    code, out, _ = run(capsys, "inspect", path, *heads, *size, "--set", "norm_eps=1e-5")
    assert code == 0 and "eps=1e-05" in out and "norms.eps=" not in out


def test_convert_prints_surgery_and_rounding(saved, capsys):
    target = saved.with_name("b.safetensors")
    line = ("--image-size", "8x6", "--num-classes", "5", "--dtype", "bfloat16")
    code, out, _ = run(capsys, "convert", saved, target, "--to", "jax", *line)
    changed = [line for line in out.splitlines() if line.startswith("changed: ")]
    assert code == 0 and len(changed) == 3 and "rounded to bfloat16" in changed[-1]
    code, out, _ = run(capsys, "convert", saved, target, "--to", "jax", *line, "--force", "--json")
    assert code == 0 and [f"changed: {change}" for change in json.loads(out)["changes"]] == changed
    checkpoint = parity.load(target)
    assert (checkpoint.config.image_size, checkpoint.config.num_classes) == ((8, 6), 5)
    assert {array.dtype.name for array in checkpoint.arrays.values()} == {"bfloat16"}


@pytest.mark.slow
def test_check_against_compares_the_functions_of_two_checkpoints(saved, tmp_path, capsys):
    pytest.importorskip("jax"), pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    arrays = {key: rng.normal(size=array.shape) for key, array in parity.load(saved).arrays.items()}
    parity.save(tmp_path / "a.safetensors", arrays, TINY, "torch")
    parity.convert(tmp_path / "a.safetensors", tmp_path / "b.npz", "jax")
    code, out, _ = run(capsys, "check", tmp_path / "a.safetensors", "--against", tmp_path / "b.npz")
    assert code == 0 and "PASS: the same function, outputs agree to 0.0e+00" in out
    other = write_altered(tmp_path / "a.safetensors", tmp_path / "c.safetensors", blocks__1__mlp__fc1__bias=(0, 3.0))
    code, out, _ = run(capsys, "check", tmp_path / "a.safetensors", "--against", other)
    assert code == 1 and "FAIL: another function" in out and "the first part that differs is blocks.1.mlp" in out
    code, out, _ = run(capsys, "check", tmp_path / "a.safetensors", "--against", other, "--json")
    assert code == 1 and json.loads(out)["passed"] is False


@pytest.mark.parametrize("command", ["check", "diagnose"])
def test_a_checkpoint_to_compare_with_that_needs_options_has_a_command_that_takes_them(
    command, saved, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    save_file({key: np.asarray(array) for key, array in parity.load(saved).arrays.items()}, "bare model.safetensors")
    options = ["--set", "num_heads=2", "image_size=4x6"]
    code, _, err = run(capsys, command, saved, "--against", "bare model.safetensors", *options)
    assert code == 2 and f"here these options are for {saved}" in err
    line = shlex.split(re.search("`python -m parity (.*)`", err)[1])
    code, _, err = run(capsys, *line, *options)
    assert code == 0 and parity.load("OTHER.safetensors").config.num_heads == 2, err


def test_help_names_every_command():
    done = python("-m", "parity", "--help")
    assert done.returncode == 0 and all(name in done.stdout for name in COMMANDS)


# Invalid input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("convrt a b", "unknown command 'convrt'; did you mean 'convert'?"),
        ("zzz", "unknown command 'zzz': give one of convert, inspect, check, diagnose, assert, golden, formats, models"),
        ("", "COMMAND; see python -m parity --help"),
        ("convert a", "DST, --to; see python -m parity convert --help"),
        (
            "convert a b.npz --tto timm",
            "unrecognized arguments: --tto; did you mean '--to'?; see python -m parity convert",
        ),
        ("inspect a --version", "unrecognized arguments: --version; see python -m parity inspect"),
        ("convert a --set eps=1 --to timm", "the following arguments are required: DST; see python -m parity convert"),
        ("golden record a.npz", "the following arguments are required: FILE; see python -m parity golden record --help"),
        ("convert a b.safetensors --to jux", "unknown format 'jux'; did you mean 'jax'?"),
        ("convert a b.safetensors --to ours", ", article_dino, or define it with --format-file FILE"),
        ("inspect", "SRC"),
        ("inspect a --colour", "unrecognized arguments: --colour"),
        ("inspect nowhere/a", "no file nowhere/a: there is no folder nowhere"),
        ("check nowhere/a", "no file nowhere/a"),
        ("inspect timm/vit_tiny", "no file timm/vit_tiny: there is no folder timm; on the hub, it is hf://timm/vit_tiny"),
        ("inspect https://huggingface.co/timm/vit_tiny/tree/main", "a page of the hub: give hf://timm/vit_tiny"),
        ("inspect a --set eps", "--set 'eps' sets nothing: write it as norms.eps=1e-5"),
        ("inspect a --set norms.esp=1", "--set norms.esp is not a field of the config; did you mean 'norms.eps'?"),
        ("inspect a --set covers=1 --set table=0", "no file a"),
        ("inspect a --set norms.eps={[]:1}", "no file a"),
        (f"inspect a --set image_size={'9' * 5000}x1", "no file a"),
        (f"inspect a --set width=0x{'f' * 5000}", "no file a"),
        (f"convert a b.npz --to jax --shard {'9' * 5000}", "is not a file size: write it as 500MB or 5GB"),
        ("inspect a --set init=zeros", "--set init may mean head.init or tokens.init: say which"),
        ("convert a b.npz --to jax --shard many", "'many' is not a file size: write it as 500MB or 5GB"),
        ("convert a b.npz --to jax --drop-head --num-classes 3", "not allowed with argument --drop-head"),
        ("convert README b.safetensors --to jax", "no file README"),
        ("check a --steps 0", "--steps: '0' is not a number of optimizer steps: give 1 or more, below 2^63"),
        ("check a --seed 9223372036854775808", "--seed: '9223372036854775808' is not a seed: give 0 or more, below 2^63"),
        (f"check a --seed {'9' * 5000}", "is not a seed: give 0 or more, below 2^63"),
        (
            "convert a b --to jax --num-classes x",
            "--num-classes: 'x' is not a number of classes: give 1 or more, below 2^63",
        ),
        ("convert a b --to jax --in-channels 0", "--in-channels: '0' is not a number of channels: give 1 or more"),
        ("diagnose a --against b --pairs -1", "--pairs: '-1' is not a number of pairs: give 0 or more"),
        ("check a --against b --level train --as-is", "in float64: remove --level and --as-is"),
        ("check a --steps 5", "--steps is the number of optimizer steps for --level train: give both, or leave it out"),
        ("check a --level precision --steps 5", "--steps is the number of optimizer steps for --level train"),
        ("check a --level function --dtype bfloat16", "compares only in float64: give --level precision, or leave --dtype"),
        ("diagnose a --logits b.npz --seed 0", "--seed is of the images for --against, and --logits has its own"),
        ("diagnose a", "one of the arguments --logits --against is required"),
        ("golden", "record | verify | table; see python -m parity golden --help"),
        ("golden record vit_s17 a.npz", "'vit_s17' is neither a named model nor a file; did you mean 'vit_s16'?"),
    ],
)
def test_invalid_input_gives_a_one_line_error_and_exit_code_2(capsys, line, what):
    code, out, err = run(capsys, *line.split())
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1 and what in err


def test_a_damaged_file_gives_no_traceback(saved):
    saved.write_bytes(saved.read_bytes()[:-1])
    done = python("-m", "parity", "inspect", saved)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ") and "damaged" in done.stderr


def test_a_permission_error_gives_no_traceback_and_leaves_no_partial_file(saved, capsys, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    target = saved.with_name("b.safetensors")
    target.write_bytes(b"old")
    monkeypatch.setattr(os, "replace", refuse)
    code, _, err = run(capsys, "convert", saved, target, "--to", "jax", "--force")
    assert code == 2 and err.startswith("error: ") and "Permission denied" in err
    assert sorted(os.listdir(saved.parent)) == sorted([saved.name, target.name]) and target.read_bytes() == b"old"


# Terminals ------------------------------------------------------------------------------------------------------------


def test_lines_are_not_wrapped_in_a_pipe(saved):
    done = python("-m", "parity", "inspect", saved, COLUMNS="40")
    assert any(line.startswith("regularisation") and "drop_path=0.0" in line for line in done.stdout.splitlines())


@pytest.mark.parametrize("columns", [20, 40, 80])
def test_nothing_is_truncated_on_a_narrow_terminal(saved, columns):
    done = python("-m", "parity", "inspect", saved, COLUMNS=str(columns), TTY_COMPATIBLE="1", NO_COLOR="1", TERM="xterm")
    assert done.returncode == 0 and "…" not in done.stdout
    plain = re.sub(r"\x1b\[\d*m", "", done.stdout)
    assert max(map(len, plain.splitlines())) <= columns


def test_json_can_be_given_before_or_after_a_golden_action(capsys):
    golden = ROOT / "tests" / "goldens" / "versions" / "vit_s16.npz"
    ahead, after = run(capsys, "golden", "--json", "table", golden), run(capsys, "golden", "table", golden, "--json")
    assert ahead == after and json.loads(ahead[1])["files"][0]["file"] == str(golden)


# Several overrides after one --set ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["--set", "num_heads=2", "norms.eps=1e-5", "SRC"],
        ["--set", "num_heads=2", "--set", "norms.eps=1e-5", "SRC"],
        ["SRC", "--set", "num_heads=2", "norms.eps=1e-5"],
        ["--set=num_heads=2", "eps=1e-5", "SRC", "--no-values"],
        ["--set", "num_heads=2", "norms.eps=1e-5", "--json", "SRC"],
        ["--set", "num_heads=2", "SRC", "--set", "norms.eps=1e-5"],
        ["--set", "num_heads=2", "norms.eps=1e-5", "--", "SRC"],
    ],
)
def test_one_option_sets_several_fields(saved, capsys, words):
    path = write_without_config(saved)
    given = ["inspect", *(path if word == "SRC" else word for word in words), "--set", "image_size=4x6"]
    if "--" in words:
        given = ["inspect", "--set", "image_size=4x6", *given[1:-2]]
    code, out, err = run(capsys, *given, *([] if "--json" in words or "--" in words else ["--json"]))
    assert code == 0, err
    if "--" not in words:
        config = json.loads(out)["config"]
        assert (config["num_heads"], config["norms"]["eps"]) == (2, 1e-5)
    assert "num_heads=" not in out.partition("config")[0]


@pytest.mark.parametrize("name", ["depth=12", "depth=12.npz", "run/depth=12", "lr=0.1.npz"])
def test_a_path_with_an_equals_sign_after_an_override_is_a_path(saved, tmp_path, capsys, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    source = tmp_path / name
    source.parent.mkdir(exist_ok=True)
    source.write_bytes(Path(write_without_config(saved)).read_bytes())
    code, out, err = run(capsys, "inspect", "--set", "image_size=4x6", "num_heads=2", name, "--no-values", "--json")
    assert code == 0, err
    assert json.loads(out)["config"]["num_heads"] == 2


def test_a_target_with_an_equals_sign_after_an_override_is_a_path(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_without_config(saved)
    given = ["convert", path, "--to", "jax", "--set", "image_size=4x6", "num_heads=2"]
    assert run(capsys, *given, "depth=12.npz")[0] == 0 and (tmp_path / "depth=12.npz").is_file()
    code, _, err = run(capsys, *given, "run=12")  # without a suffix and a slash, it is an override
    assert code == 2 and err.count("\n") == 1 and "the following arguments are required: DST" in err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--set", "num_heads=2", "nrom_eps=1e-5"], "--set nrom_eps is not a field of the config; did you mean"),
        (["--set", "num_heads=2", "norms.eps="], "--set 'norms.eps=' sets nothing"),
        (["--set"], "expected one argument"),
    ],
)
def test_an_invalid_override_after_another_is_named(saved, capsys, words, what):
    code, _, err = run(capsys, "inspect", write_without_config(saved), *words)
    assert code == 2 and what in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (
            ["convert", "a.pth", "~/b.pth", "--to", "timm", "--table", "~/t.txt", "--format-file", "~/f.toml"],
            "target table format_file",
        ),
        (["check", "a.pth", "--html", "~/report.html"], "html"),
        (["diagnose", "a.pth", "--logits", "~/logits.npz"], "logits"),
        (["golden", "record", "vit_s16", "~/golden.npz"], "file"),
    ],
)
def test_a_leading_tilde_of_an_option_is_the_home_folder(
    arguments: list[str], names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    given = vars(build_parser(COMMANDS).parse_args(arguments))
    found = [each for name in names.split() for each in np.atleast_1d(given[name])]
    assert all(each.startswith("/home/someone/") for each in found)
