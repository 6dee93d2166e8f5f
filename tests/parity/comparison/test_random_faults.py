"""Faults drawn from the operations of a forward pass: the diagnosis is right, or says that it does not know.

Here are one fault of each structure; `python -m benchmarks.random_faults` draws as many as are asked for, at real widths.
"""

import pytest

torch = pytest.importorskip("torch")

import vit_spec
from tests.faults.operations import judged
from tests.twins import small

PLAIN = small(vit_spec.get("vit_s16"))
STRUCTURES = {
    "plain": PLAIN,
    "mean": PLAIN.replace(head={"pool": "mean"}),
    "layer scale": small(vit_spec.get("deit3_s16")),
    "gated": small(vit_spec.get("dinov2_g14")),
    "rotary": small(vit_spec.get("article_xray_rope")),
    "distilled": small(vit_spec.get("deit_s16_distilled")),
    "fixed positions": PLAIN.replace(positions={"kind": "fixed", "table": "sincos_2d_mae"}),
    "norms of queries": PLAIN.replace(attention={"qk_norm": True}),
}


@pytest.mark.parametrize(("seed", "name"), list(enumerate(STRUCTURES)))
def test_a_random_fault_is_found_or_said_to_be_unknown_at_the_right_layer(seed: int, name: str) -> None:
    found = judged(STRUCTURES[name], seed, pairs=20)
    assert not found.wrong, found
    assert found.outcome != "unknown, layer not told" or not found.intermediates, found
