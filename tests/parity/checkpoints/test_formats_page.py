"""docs/reference/formats.md agrees with the code and with the recorded proofs, and every format has a proof."""

import json

from parity.checkpoints.formats import formats
from parity.comparison.tolerances import FLOAT64_TOLERANCE
from tests.peers.table import PAGE, PROOFS, formats_page

OWN = ("torch", "jax")  # tested by the tests of the twins


def test_the_page_agrees_with_the_code_and_the_proofs():
    assert PAGE.read_text() == formats_page(json.loads(PROOFS.read_text())), "run `python -m tests.peers.table`"


def test_every_format_is_proven_against_an_independent_implementation():
    proofs = json.loads(PROOFS.read_text())
    proven = [name for name in formats() if name not in OWN and proofs[name]["peers"]]
    assert {*proven, *OWN} == set(formats())
    assert not [name for name in proven if not proofs[name]["difference"] <= FLOAT64_TOLERANCE]
