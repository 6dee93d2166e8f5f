"""The tutorial docs/guides/first_port.md: its file has the planted mistake, and its commands print what it shows."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from parity.__main__ import main
from tests import ROOT

pytest.importorskip("jax")
pytest.importorskip("torch")

pytest_plugins = ["pytester"]

GUIDE = (ROOT / "docs" / "guides" / "first_port.md").read_text()
FILE, CORRECTION, TEST = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
SHOWN = [block.partition("\n")[2] for block in re.findall(r"```\n(\$ .*?)```", GUIDE, re.DOTALL)]
WRONG_LINE = 41


def correct(file: str) -> str:
    """Return the file with the line that the tutorial corrects."""
    lines = file.splitlines(keepends=True)
    lines[WRONG_LINE - 1] = CORRECTION
    return "".join(lines)


def shape(text: str) -> list[str]:
    """Return the words of a text, with every measured number as "#"."""
    return re.sub(r"\d\.\de[-+]\d\d", "#", text).split()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that writes the file and returns the exit code and the output of the tutorial's command."""
    monkeypatch.chdir(tmp_path)

    def run(file: str) -> tuple[int, str]:
        Path("my_port.py").write_text(file)
        sys.modules.pop("my_port", None)
        code = main(["assert", "my_port:pair"])
        return code, capsys.readouterr().out

    yield run
    sys.modules.pop("my_port", None)


def test_the_planted_mistake_is_found_at_its_line(run: Any) -> None:
    code, out = run(FILE)
    assert code == 1 and FILE.splitlines()[WRONG_LINE - 1].strip().startswith("return x + self.fc2(jax.nn.gelu(")
    shown = shape(SHOWN[0].partition("...")[0])
    assert shape(out)[: len(shown)] == shown
    for line in re.findall(r"^  blocks/.*$", GUIDE, re.MULTILINE):
        assert line in out


def test_the_corrected_port_passes(run: Any) -> None:
    code, out = run(correct(FILE))
    shown = shape(re.sub(r"\(gradient.*\)", "", SHOWN[1].partition("...")[0]))
    assert code == 0 and shape(re.sub(r"\(gradient.*?\)", "", out, count=1))[: len(shown)] == shown


def test_the_test_of_the_tutorial_passes(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(my_port=correct(FILE), test_port=TEST)
    result = pytester.runpytest_inprocess("-p", "twin_vision_transformers_pytest", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
