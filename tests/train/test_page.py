"""The trainer's commands in README.md, docs/ and the recipes' docstrings work, and their output is as printed there."""

import re
import shlex
import subprocess
import sys

import pytest

pytest.importorskip("grain")

from tests import ROOT
from train.cli import main, parse_request
from train.plan import open_or_assume_imagenet
from train.recipes import RECIPES

PAGES = sorted((ROOT / "docs").rglob("*.md"))
PAGE = "\n".join(path.read_text() for path in PAGES)
TEXT = "\n".join([PAGE, (ROOT / "README.md").read_text(), *(function.__doc__ or "" for function in RECIPES.values())])
LINES = re.findall(r"^[ $]*(?:[A-Z_]+=\S+ )*python -m train\.jax( --config .*)$", TEXT, re.MULTILINE)
COMMANDS = sorted({re.split(r"\s{3,}", line.strip())[0] for line in LINES if "--help" not in line})
# (command, output) of each plan whose output the documentation shows
BLOCKS = re.findall(r"^\$ python -m train\.jax (.*--plan.*)\n((?:.+\n)+?)```", PAGE, re.MULTILINE)


def without_plan(arguments: list[str]) -> list[str]:
    index = arguments.index("--plan") if "--plan" in arguments else len(arguments)
    return arguments[:index] + arguments[index + 2 :]


WITH_WEIGHTS = [command for command in COMMANDS if "--init" in command or "--teacher" in command]


@pytest.mark.parametrize("command", WITH_WEIGHTS)
def test_a_command_with_weights_can_be_parsed(command: str) -> None:
    assert parse_request("train.jax", shlex.split(command), open_or_assume_imagenet).name in RECIPES


@pytest.mark.parametrize("command", sorted({*COMMANDS} - {*WITH_WEIGHTS}))
def test_a_command_without_weights_can_be_planned_without_its_data(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main("train.jax", lambda request: 2, [*without_plan(shlex.split(command)), "--plan", "8x80GiB"])
    assert status in (0, 1) and re.search(r"^(fits|does not fit): ", capsys.readouterr().out, re.MULTILINE)


def test_plans_printed_in_the_documentation_are_what_the_commands_print(capsys: pytest.CaptureFixture[str]) -> None:
    for command, documented in BLOCKS:
        main("train.jax", lambda request: 2, shlex.split(command))
        printed = [re.sub(r"\s+", " ", line) for line in capsys.readouterr().out.splitlines()]
        lines = [re.sub(r"\s+", " ", line) for line in documented.splitlines() if line != "..."]
        assert [line for line in lines if line not in printed] == [], command


def test_the_first_command_of_the_documentation_runs_its_first_step() -> None:
    command = next(iter(re.findall(r"^python -m (train\.jax --config vit_s16)$", PAGE, re.MULTILINE)))
    done = subprocess.run([sys.executable, "-m", *command.split(), "--dry-run"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "dry run  one step and an evaluation of 64 images" in done.stdout
