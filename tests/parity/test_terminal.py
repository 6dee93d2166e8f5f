"""Names from files cannot control the terminal, and cannot fill it."""

import argparse
import io
import json
import os
import re
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.table import Table
from rich.text import Text

from parity.__main__ import main
from parity.checkpoints import containers
from parity.commands.run_command import run_command
from parity.terminal import Terminal, print_error, print_lines
from tests import ROOT
from vit_spec import InputError
from vit_spec.printable import printable

EVIL = "\x1b]0;title\x07\x1b[2J\x9b31m\u202eabc\u2066\r\x00\x7f[/red][bold]\U000e0041\ud800:smile:\u2028"


def is_harmless(text):
    """Return whether a text contains only printable characters and line breaks."""
    return all(character.isprintable() or character == "\n" for character in text)


def test_printable_text_is_not_changed():
    assert printable("blocks.0 → 3×4 žluťoučký 猫 \u00a0 \\x1b") == "blocks.0 → 3×4 žluťoučký 猫 \u00a0 \\x1b"


def test_characters_that_control_a_terminal_are_escaped():
    assert printable("a\x1b[31m\u202eb\n") == r"a\x1b[31m\u202eb\n"
    assert all(printable(chr(code)).isprintable() or chr(code).isspace() for code in range(0x3000))
    assert printable(printable(EVIL)) == printable(EVIL)


def test_the_middle_of_a_long_text_is_omitted():
    text = printable("begin" + "x" * 10**6 + "end", max_length=100)
    assert text.startswith("begin") and text.endswith("end") and len(text) < 200 and "999,908 characters left out" in text


def test_a_nested_error_has_one_count_of_omitted_characters():
    inner = InputError("a" * 10**6)
    outer = str(InputError(f"{'file ' * 50}: {InputError(f'{inner}: do this')}"))
    assert len(outer) < 8100 and outer.count("left out") == 1
    omitted = int(re.search(r"\(([\d,]+) characters left out\)", outer)[1].replace(",", ""))
    assert len(re.sub(r" \.\.\. .* \.\.\. ", "", outer)) + omitted == len(f"{'file ' * 50}: {'a' * 10**6}: do this")


def test_an_error_is_one_harmless_line():
    assert is_harmless(str(InputError(f"{EVIL} is no name"))) and "\n" not in str(InputError("a\nb"))


def test_printed_lines_tables_and_errors_are_harmless(capfd):
    table = Table(title=EVIL)
    table.add_column(EVIL)
    table.add_row(EVIL)
    print_lines(EVIL, table)
    print_error(EVIL)
    out, err = capfd.readouterr()
    assert is_harmless(out) and is_harmless(err) and err.count("\n") == 1
    assert "[/red]" in out and ":smile:" in out


def test_a_line_with_a_line_break_is_one_line(capfd):
    print_lines("a\nread: format timm", "b")
    assert capfd.readouterr().out == "a\\nread: format timm\nb\n"


@pytest.mark.parametrize("command", ["inspect", "convert", "check"])
@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".msgpack"])
def test_a_key_cannot_control_the_terminal(tmp_path, command, suffix, capfd):
    container, spec = containers.by_suffix(Path(f"a{suffix}")), containers.ArraySpec((1,), np.dtype("f4"))
    key = EVIL.replace("\x00", "").replace("\ud800", "").replace("/", "")
    path = tmp_path / f"a\x1b[31m{suffix}"
    with container.create(path, {key: spec}, {}) as writer:
        writer.write(key, 0, np.zeros(1, np.float32))
    more = [str(tmp_path / "b.npz"), "--to", "jax"] if command == "convert" else []
    assert main([command, str(path), *more]) == 2
    out, err = capfd.readouterr()
    assert is_harmless(out + err) and err.count("\n") == 1 and r"\x1b[31m" in err


def test_the_length_of_a_message_about_many_keys_is_limited(tmp_path, capfd):
    header = {f"{'k' * 5000}{i}": {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i in range(500)}
    text = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(2000))
    assert main(["inspect", str(tmp_path / "a.safetensors")]) == 2
    assert len(capfd.readouterr().err) < 10_000


def test_markup_is_printed_literally_next_to_other_text():
    terminal = Terminal(width=40, force_terminal=False)
    with terminal.capture() as capture:
        terminal.print("[bold]a[/bold]", Text("b"))
    assert capture.get() == "[bold]a[/bold] b\n"


def test_no_other_module_prints_text():
    """`print` is used only for JSON, and rich's own Console, which does not escape, is not used."""
    for path in [*ROOT.glob("parity/**/*.py"), *ROOT.glob("train/**/*.py")]:
        text = path.read_text()
        if path.name == "terminal.py":
            continue
        assert not re.search(r"\bConsole\(", text), path
        for line in re.findall(r"^.*(?<![\w.])print\(.*$", text, re.M):
            assert "json.dumps" in line or "list_recipes()" in line or line.rstrip().endswith("print("), f"{path}: {line}"


def write(text):
    """Print a text as a command does; return the exit code."""
    return run_command(lambda: print(text) or 0)


def write_help():
    """Print a help as a command does; return the exit code.  argparse ignores errors of stdout, and exits."""
    return run_command(lambda: argparse.ArgumentParser().parse_args(["--help"]))


def open_stream(file, *, is_buffered):
    """Return a stream to a file as Python opens stdout, or as it does with -u."""
    return io.TextIOWrapper(open(file, "wb", buffering=-1 if is_buffered else 0), write_through=not is_buffered)


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_character_that_stdout_cannot_encode_is_printed_as_an_escape(errors, monkeypatch):
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, "ascii", errors))
    assert write("3 × 4") == 0 and printed.getvalue() == b"3 \\xd7 4\n"


@pytest.mark.parametrize("is_buffered", [True, False], ids=["buffered", "-u"])
@pytest.mark.parametrize(
    "run",
    [lambda: write("text"), lambda: write("text" * 10**5), write_help],
    ids=["short", "longer than the buffer", "help"],
)
def test_the_error_of_a_full_disk_names_standard_output_and_is_not_repeated_at_exit(run, is_buffered, monkeypatch, capsys):
    with open_stream("/dev/full", is_buffered=is_buffered) as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert run() == 2
    line = "error: standard output: No space left on device; make room, or write elsewhere\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("is_buffered", [True, False], ids=["buffered", "-u"])
@pytest.mark.parametrize("run", [lambda: write("text"), write_help], ids=["text", "help"])
def test_a_reader_that_has_ended_is_no_error(run, is_buffered, monkeypatch, capsys):
    reading, writing = os.pipe()
    os.close(reading)
    with open_stream(writing, is_buffered=is_buffered) as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert run() == 141
    assert capsys.readouterr().err == ""
