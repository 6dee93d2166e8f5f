"""docs/formats.md is what the code and the recorded proofs say, and every format is proven."""

import json

import pytest

from parity.checkpoints.formats import formats
from parity.comparison.tolerances import FUNCTION
from tests.peers.table import PAGE, PROOFS, page

OWN = ("torch", "jax")  # what the twins' own tests prove


def test_the_page_is_what_the_code_and_the_proofs_say():
    assert PAGE.read_text() == page(json.loads(PROOFS.read_text())), "run `python -m tests.peers.table`"


@pytest.mark.parametrize("name", [name for name in formats() if name not in OWN])
def test_every_format_is_proven_against_an_implementation_of_its_own(name):
    proof = json.loads(PROOFS.read_text())[name]
    assert proof["peers"] and proof["difference"] <= FUNCTION
