"""The options --like and --table of `convert`, as a user types them."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import parity
from parity.__main__ import main
from tests.parity.comparison.test_own_model import MODULE, trained

RENAMED = f"{MODULE}:Renamed"


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    torch.save(trained("Renamed").state_dict(), tmp_path / "theirs.pth")
    return tmp_path / "theirs.pth"


def convert(source: Path, target: Path, *options: str) -> int:
    return main(["convert", str(source), str(target), "--to", "timm", *options])


def test_like_writes_the_checkpoint_and_the_table(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = theirs.with_name("ours.safetensors")
    assert convert(theirs, target, "--like", RENAMED) == 0
    out = capsys.readouterr().out
    table = theirs.with_name("ours.table.txt")
    assert "proven: the outputs agree to" in out and f"table: {table}" in out.replace("\n", "")
    loaded = parity.load(target)
    assert loaded.format == "timm:vit" and loaded.config.norms.eps == 1e-6
    # Other checkpoints of the class are read with the table alone, and written back.
    torch.save(trained("Renamed", seed=1).state_dict(), theirs)
    again = theirs.with_name("again.safetensors")
    assert convert(theirs, again, "--format-file", str(table)) == 0
    back = theirs.with_name("back.pth")
    arguments = ["convert", str(again), str(back), "--to", "renamed", "--format-file", str(table)]
    assert main(arguments) == 0
    first, second = torch.load(theirs), torch.load(back)
    assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


def test_the_json_output_has_the_proof(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = theirs.with_name("mine.txt")
    options = ("--like", RENAMED, "--table", str(table), "--json")
    assert convert(theirs, theirs.with_name("ours.safetensors"), *options) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["table"] == str(table) and table.is_file()
    assert 0 < facts["proof"]["random"]["output"] < 1e-12 and "blocks.attn.qkv.weight" in facts["proof"]["own"]


def test_nothing_is_written_if_the_proof_fails(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    like = f"{MODULE}:Impostor('scaled residual')"
    assert convert(theirs, theirs.with_name("ours.safetensors"), "--like", like) == 2
    error = capsys.readouterr().err
    assert "no config of ViTConfig computes the same function" in error and error.count("\n") == 1
    assert [path.name for path in theirs.parent.iterdir()] == ["theirs.pth"]


def test_nothing_is_written_if_the_format_cannot_store_the_model(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["convert", str(theirs), str(theirs.with_name("ours.npz")), "--to", "lucidrains", "--like", RENAMED]
    assert main(arguments) == 2
    assert "format 'lucidrains'" in capsys.readouterr().err
    assert [path.name for path in theirs.parent.iterdir()] == ["theirs.pth"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--table", "x.txt"), "--table is for --like"),
        (("--like", RENAMED, "--from", "timm"), "--from together with --like"),
        (("--like", "nowhere:ViT"), "there is no module nowhere"),
        (("--like", RENAMED, "--set", "norms.epps=1"), "is not a field of the config"),
        (("--like", RENAMED, "--table", "no/such/folder/x.txt"), "there is no folder"),
    ],
)
def test_wrong_options_are_one_line(
    options: tuple[str, ...], message: str, theirs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(theirs, theirs.with_name("ours.safetensors"), *options) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert [path.name for path in theirs.parent.iterdir()] == ["theirs.pth"]


def test_an_existing_table_needs_force(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = theirs.with_name("ours.table.txt")
    table.write_text("mine")
    options = ("--like", RENAMED)
    assert convert(theirs, theirs.with_name("ours.safetensors"), *options) == 2
    assert "exists: give another name with --table, or --force" in capsys.readouterr().err and table.read_text() == "mine"
    assert convert(theirs, theirs.with_name("ours.safetensors"), *options, "--force") == 0
    assert table.read_text() != "mine"


def test_the_table_cannot_be_the_target(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = theirs.with_name("ours.safetensors")
    assert convert(theirs, target, "--like", RENAMED, "--table", str(target)) == 2
    assert "is also DST" in capsys.readouterr().err
