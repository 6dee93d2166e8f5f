"""The verdict on a pair of models as JSON: the command `assert`, the option --parity-json, and the page of its fields."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")
torch = pytest.importorskip("torch")

from flax import linen

from parity.__main__ import main
from parity.comparison.any_model import compare_models, verdict
from parity.comparison.any_model.report import UnequalWeightsError
from parity.comparison.any_model.trace.fixed_parts import FixedPart
from parity.comparison.any_model.trace.origin import Origin
from parity.comparison.any_model.trace.places import Place
from parity.comparison.any_model.trace.tables import Table
from tests import ROOT
from tests.json_pages import documented_fields, fields

pytest_plugins = ["pytester"]

PAGE = (ROOT / "docs" / "reference" / "verdict.md").read_text()
ROWS = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
PLACE = Place("norm", "add", "model.py", 3, "forward")
PART = FixedPart("flax", "softmax", "float32", "convert_element_type")
TABLE = Table(np.ones((2, 3)), np.ones((2, 3)), "flax", "rope", None)
OF_USER = """
import flax.linen, jax.numpy as jnp, numpy as np, torch

def pair(**options):
    print("a message")
    params = {"params": {"kernel": jnp.ones((4, 2)) * 1.5, "bias": jnp.arange(2.0)}}
    x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    model = {"flax_apply": flax.linen.Dense(2).apply, "params": params, "torch_module": torch.nn.Linear(4, 2), "inputs": x}
    return {**model, **options}

def wrong(): return pair(torch_module=torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.ReLU()))
def zeros():
    module = torch.nn.Linear(4, 2)
    torch.nn.init.zeros_(module.weight)
    return pair(torch_module=module, weights="equal")
def misspelled(): return pair(input_axis="")
def incomplete(): return {"params": {}}
def a_list(): return []
def raises(): return 1 / 0
def branches(): return pair(flax_apply=lambda params, x: x if x.sum() > 0 else -x)
def child_prints():
    import os, subprocess
    os.write(1, b"a library; ")
    subprocess.run(["echo", "a child"], check=True)
    return pair()
def two_inputs(): return pair(inputs=[[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
def integers(): return pair(inputs=np.arange(8).reshape(2, 4))
def other_width(): return pair(inputs=np.zeros((3, 5), np.float32))
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], request: Any) -> Any:
    """Return a function that runs `assert` on a function of a module in the working directory."""
    name = re.sub(r"\W", "_", f"models_of_{request.node.name}")  # the module stays imported
    (tmp_path / f"{name}.py").write_text(OF_USER)
    monkeypatch.chdir(tmp_path)

    def run(function: str, *options: str) -> tuple[int, str, str]:
        code = main(["assert", f"{name}:{function}", *options])
        return code, *capsys.readouterr()

    return run


def test_assert_prints_the_report_and_exits_with_0_if_the_models_pass(run: Any) -> None:
    code, out, err = run("pair")
    assert code == 0 and out.startswith("PASS: ") and "kernel | in out  <->  weight | out in" in out
    assert err == "a message\n"


def test_assert_exits_with_1_and_names_the_failed_check_if_the_models_differ(run: Any) -> None:
    code, out, _ = run("wrong", "--json")
    found = json.loads(out)
    assert (code, found["passed"], found["failed_check"]) == (1, False, "G0")
    assert next(iter(found.items())) == ("schema", verdict.SCHEMA)


def test_the_level_option_replaces_the_level_of_the_function(run: Any) -> None:
    found = json.loads(run("pair", "--json", "--level", "function")[1])
    assert found["level"] == "function" and {each["flax"] for each in found["tensors"]} == {None}


def test_unequal_weights_fail_without_a_failed_check(run: Any) -> None:
    code, out, _ = run("zeros", "--json")
    found = json.loads(out)
    assert (code, found["passed"], found["failed_check"], found["digest"]) == (1, False, None, None)
    assert found["verdict"].startswith("FAIL: the weights are not equal: ") and len(found["parameters"]) == 2


@pytest.mark.parametrize(
    ("function", "what"),
    [
        ("misspelled", "'input_axis' is no argument of parity.assert_parity; did you mean 'input_axes'?"),
        ("incomplete", "the dict has no flax_apply, torch_module, inputs: return a dict with flax_apply, params"),
        ("a_list", "returned a list: return a dict with flax_apply, params, torch_module, inputs"),
        ("raises", "raised ZeroDivisionError: division by zero ("),
        ("other_width", "the comparison raised "),
        ("np.pi", "is a float: name a function that returns the models"),
        ("pear", "has no pear; did you mean 'pair'?"),
        ("flex", "has no flex: check the name"),  # flax is a module
        ("pair()", "does not name a function: write it as package.module:function"),
    ],
)
def test_bad_input_exits_with_2_and_gives_the_error_as_json_and_as_text(run: Any, function: str, what: str) -> None:
    code, out, err = run(function, "--json")
    found = json.loads(out)
    assert code == 2 and found.keys() == {"schema", "passed", "error"} and found["passed"] is None
    assert what in found["error"] and err.endswith(f"error: {found['error']}\n")


def test_the_name_of_a_file_is_refused_with_that_of_its_module(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["assert", "mine.py:pair"]) == 2
    assert "mine.py is a file: write its module, mine" in capsys.readouterr().err


@pytest.mark.parametrize("function", ["raises", "branches"])
def test_an_error_of_the_users_code_names_its_line(run: Any, function: str) -> None:
    (line,) = (n for n, text in enumerate(OF_USER.splitlines(), 1) if text.startswith(f"def {function}()"))
    assert run(function)[2].endswith(f".py, line {line})\n")


def test_stdout_has_only_the_object_if_libraries_and_child_processes_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models_that_print.py").write_text(OF_USER)
    monkeypatch.chdir(tmp_path)
    assert main(["assert", "models_that_print:child_prints", "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out)["passed"] and err.startswith("a library; a child\n")


def test_a_line_of_the_standard_library_is_not_called_the_users(run: Any) -> None:
    assert run("two_inputs")[2].endswith("takes 2 positional arguments but 3 were given\n")


def test_integers_for_a_model_of_floating_point_numbers_are_named(run: Any) -> None:
    code, _, err = run("integers")
    assert code == 2 and "give input 0, which has integers, as floating-point numbers" in err


# The page -------------------------------------------------------------------------------------------------------------


def report(**changes: Any) -> Any:
    """Return the report of a linen layer and the same layer in PyTorch, with other attributes."""
    params = {"params": {"kernel": np.ones((4, 2), np.float32), "bias": np.zeros(2, np.float32)}}
    found = compare_models(linen.Dense(2).apply, params, torch.nn.Linear(4, 2), ROWS)
    return dataclasses.replace(found, **changes)


def test_the_page_lists_exactly_the_fields_that_are_printed() -> None:
    mapping = dataclasses.replace(report().correspondence, skipped={"position_ids": "an index"})
    lists: dict[str, Any] = {
        "fixed_parts": (PART,),
        "tables": (TABLE,),
        "hints": ("norm",),
        "skipped_outputs": {"a": "text"},
    }
    found = report(origin=Origin(PLACE, PLACE), correspondence=mapping, **lists).facts()
    documented = documented_fields(PAGE)
    assert documented == {"schema", *fields(found, documented), *fields(verdict.error_facts("x"), documented)}


def test_every_verdict_has_the_same_fields() -> None:
    unequal = UnequalWeightsError("the weights are not equal\nparameters (flax <-> torch):\n  a  <->  b")
    assert verdict.unequal_weights_facts(unequal, "function", {}).keys() == report().facts().keys()


def test_an_operation_that_was_not_found_in_one_framework_is_null() -> None:
    origin = report(origin=Origin(None, PLACE)).facts()["origin"]
    assert origin["flax"] is None and origin["torch"]["line"] == 3


def test_the_page_names_the_version_of_the_schema() -> None:
    assert f"| `schema` | text | `{verdict.SCHEMA}` |" in PAGE


# The pytest plugin ----------------------------------------------------------------------------------------------------

TESTS = """
from models_of_plugin import other_width, pair, wrong, zeros
import pytest

def positional(arguments):
    return [arguments.pop(name) for name in ("flax_apply", "params", "torch_module", "inputs")]

@pytest.mark.parametrize("make", [pair, wrong, zeros])
def test_it(assert_parity, make):
    arguments = make()
    assert_parity(*positional(arguments), **arguments)

def test_bad_input(assert_parity):
    assert_parity(*positional(pair()), level="functional")

def test_crash(assert_parity):
    assert_parity(*positional(other_width()))

def test_typo(assert_parity):
    assert_parity(*positional(pair()), layout=[])
"""


@pytest.fixture
def verdicts(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs a project with six tests, and returns its verdicts by test."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(test_mine=TESTS, models_of_plugin=OF_USER)

    def run(*options: str) -> dict[str, Any]:
        file = pytester.path / "folder" / "verdicts.jsonl"
        given = ("-p", "twin_vision_transformers_pytest", "-p", "no:cacheprovider", "-W", "error")
        pytester.runpytest_inprocess(*given, "--parity-json", "folder/verdicts.jsonl", *options)
        return {found["test"]: found for found in map(json.loads, file.read_text().splitlines())}

    return run


def test_parity_json_has_a_verdict_for_each_call(verdicts: Any) -> None:
    found = {test.partition("::")[2]: each["passed"] for test, each in verdicts().items()}
    assert found == {"test_it[pair]": True, "test_it[wrong]": False, "test_it[zeros]": False} | dict.fromkeys(
        ("test_bad_input", "test_crash", "test_typo")
    )


def test_pytest_prints_an_error_of_one_line_without_the_source_of_the_package(
    verdicts: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    verdicts("-k", "bad_input or zeros")
    printed = capfd.readouterr().out
    assert "level is 'functional'" in printed and "the weights are not equal" in printed
    assert "any_model/comparison.py" not in printed and "any_model/assertion.py" not in printed


def test_parity_json_replaces_the_file_of_an_earlier_run(verdicts: Any) -> None:
    verdicts()
    assert list(verdicts("-k", "pair")) == ["test_mine.py::test_it[pair]"]


def test_the_page_lists_the_fields_that_the_plugin_adds(verdicts: Any) -> None:
    [found] = verdicts("-k", "pair").values()
    assert next(iter(found.items())) == ("schema", verdict.SCHEMA)
    of_pytest = {name.removesuffix("[]") for name in documented_fields(PAGE, "field of pytest")}
    assert of_pytest == found.keys() - {"schema", *report().facts()}


def test_parity_json_has_the_changes_from_the_golden_file(verdicts: Any, pytester: pytest.Pytester) -> None:
    verdicts("-k", "pair", "--parity-record")
    source = pytester.path / "models_of_plugin.py"
    source.write_text(source.read_text().replace("* 1.5", "* 12.5"))  # another size, so that Python compiles it again
    [found] = verdicts("-k", "pair").values()
    assert found["passed"] and "was recorded with other weights" in found["golden"][0]


def test_parity_json_has_the_error_of_a_failed_recording(verdicts: Any, pytester: pytest.Pytester) -> None:
    (pytester.path / "parity_goldens").write_text("a file, and no folder")
    [found] = verdicts("-k", "pair", "--parity-record").values()
    assert found["passed"] and "test_mine.test_it[pair].npz (File exists)" in found["golden"][0]


def test_parity_json_has_the_error_of_a_golden_file_that_the_system_does_not_open(
    verdicts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twin_vision_transformers_pytest._golden_path", lambda file, *_: file.parent / ("x" * 300))
    [found] = verdicts("-k", "pair").values()
    assert found["passed"] and "File name too long" in found["golden"][0]


def test_a_path_that_cannot_be_written_is_refused_before_the_tests(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile("def test_it(): pass")
    (pytester.path / "file").write_text("")
    found = pytester.runpytest_inprocess("-p", "twin_vision_transformers_pytest", "--parity-json", "file/a.jsonl")
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    assert "cannot be written (" in found.stderr.str() and "give another path" in found.stderr.str()
