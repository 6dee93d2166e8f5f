"""Diagnosis of random faults in the operations of a forward pass: the answer is right, or UNKNOWN.

One fault is drawn here for each of four model structures; `python -m benchmarks.random_faults` draws any number, at
realistic widths.
"""

import pytest

torch = pytest.importorskip("torch")

import vit_spec
from tests.faults.operations import assess_random_fault
from tests.twins import small_config

PLAIN = small_config(vit_spec.get("vit_s16"))
STRUCTURES = {
    "plain": PLAIN,
    "layer scale": small_config(vit_spec.get("deit3_s16")),
    "rotary": small_config(vit_spec.get("article_xray_rope")),
    "fixed positions": PLAIN.replace(positions={"kind": "fixed", "table": "sincos_2d_mae"}),
}


@pytest.mark.parametrize(("seed", "name"), list(enumerate(STRUCTURES)))
def test_a_random_fault_is_found_or_unknown_with_the_right_layer(seed: int, name: str) -> None:
    assessment = assess_random_fault(STRUCTURES[name], seed, pairs=20)
    assert not assessment.is_wrong, assessment
    assert assessment.outcome != "unknown, layer not named" or not assessment.with_intermediates, assessment
