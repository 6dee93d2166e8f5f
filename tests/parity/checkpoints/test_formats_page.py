"""docs/reference/formats.md agrees with the code and with the recorded proofs, and every format has a proof."""

import json
import sys

import pytest

from parity.checkpoints.formats import OWN, formats
from parity.comparison.tolerances import FLOAT64_TOLERANCE
from tests.peers import table
from tests.peers.table import PAGE, PROOFS, collect_proofs, formats_page, merge_proofs


def test_the_page_agrees_with_the_code_and_the_proofs():
    assert PAGE.read_text() == formats_page(json.loads(PROOFS.read_text())), "run `python -m tests.peers.table`"


def test_every_format_is_proven_against_an_independent_implementation():
    """The formats of the twins are tested by the tests of the twins."""
    proofs = json.loads(PROOFS.read_text())
    unproven = [name for name in formats() if name not in OWN and not proofs.get(name, {}).get("peers")]
    assert not unproven, (
        f"no proof of {', '.join(unproven)} is recorded in {PROOFS.name}: compare the twins with its library in "
        f"tests/peers, and record the proof, as docs/guides/extend.md says under 'A format'"
    )
    assert not [name for name, proof in proofs.items() if not proof["difference"] <= FLOAT64_TOLERANCE]


def test_new_figures_replace_those_of_their_formats_only(tmp_path):
    lines = [{"format": "timm", "peer": f"timm {n}", "torch": n * 1e-16, "jax": 2e-16} for n in (3, 1)]
    (tmp_path / "1.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    old = {"peers": ["timm 0"], "difference": 1e-15}
    merged = merge_proofs({"timm": old, "mae": old, "gone": old}, collect_proofs(tmp_path))
    assert list(merged) == ["mae", "timm"] and merged["mae"] == old
    assert merged["timm"] == {"peers": ["timm 1", "timm 3"], "difference": 3e-16}


@pytest.mark.parametrize("name", ["", "nowhere"])
def test_a_folder_without_proofs_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["table", str(tmp_path / name)])
    with pytest.raises(SystemExit, match="has no recorded proofs: give the folder"):
        table.main()
