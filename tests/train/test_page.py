"""docs/training.md and the recipes' docstrings: their commands do what they say, and what is printed there is printed."""

import re
import shlex
import subprocess
import sys

import pytest

pytest.importorskip("tyro")
pytest.importorskip("grain")

from tests import ROOT
from train.cli import main, parse
from train.plan import opened
from train.recipes import RECIPES

PAGE = (ROOT / "docs" / "training.md").read_text()
SAID = "\n".join([PAGE, (ROOT / "README.md").read_text(), *(function.__doc__ or "" for function in RECIPES.values())])
LINES = re.findall(r"^[ $]*(?:[A-Z_]+=\S+ )*python -m train\.jax( --config .*)$", SAID, re.MULTILINE)
COMMANDS = sorted({re.split(r"\s{3,}", line.strip())[0] for line in LINES})
BLOCKS = re.findall(r"^\$ python -m train\.jax (.*--plan.*)\n((?:.+\n)+?)```", PAGE, re.MULTILINE)


def without_plan(arguments: list[str]) -> list[str]:
    place = arguments.index("--plan") if "--plan" in arguments else len(arguments)
    return arguments[:place] + arguments[place + 2 :]


@pytest.mark.parametrize("command", [command for command in COMMANDS if "--init" in command])
def test_every_command_that_starts_from_weights_is_understood(command: str) -> None:
    assert parse("train.jax", shlex.split(command), opened).name in RECIPES


@pytest.mark.parametrize("command", [command for command in COMMANDS if "--init" not in command])
def test_every_other_command_can_be_planned_without_its_data(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main("train.jax", lambda asked: 2, [*without_plan(shlex.split(command)), "--plan", "8x80GiB"])
    assert status in (0, 1) and re.search(r"^(fits|does not fit): ", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(("command", "printed"), BLOCKS, ids=["64_devices", "1_device"])
def test_a_plan_on_the_page_is_what_the_command_prints(
    command: str, printed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main("train.jax", lambda asked: 2, shlex.split(command))
    said = [re.sub(r"\s+", " ", line) for line in capsys.readouterr().out.splitlines()]
    wanted = [re.sub(r"\s+", " ", line) for line in printed.splitlines() if line != "..."]
    assert [line for line in wanted if line not in said] == []


def test_the_first_command_takes_its_first_step() -> None:
    command = next(iter(re.findall(r"^python -m (train\.jax --config vit_s16)$", PAGE, re.MULTILINE)))
    done = subprocess.run([sys.executable, "-m", *command.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "dry run  one step and a look at 64 images" in done.stdout
