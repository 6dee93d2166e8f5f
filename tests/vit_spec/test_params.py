"""Rules that the rows of all parameters follow, on random configs: weight decay and initial values."""

import random
import re

import pytest

from tests.random_configs import config_of_choices
from vit_spec import Row, rows
from vit_spec.initialisation import Law

# Parameters that are added to something, so that zero is a usual initial value.  All others are factors.
ADDED = re.compile(r".*[._]bias|(cls|dist|reg)_token|pos_embed(_y|_x)?|(.*[.])?rel_pos[.]table")
# Factors without weight decay: weights of norms, layer scales, the query of attention pooling, which is a token, and the
# frequencies of rotary positions, which are angles.
NOT_DECAYED = re.compile(
    r"(.*[._])?norm(1|2|_pre)?[.]weight|blocks[.]ls[12][.]gamma|attn_pool[.]latent|blocks[.]attn[.]freqs"
)


@pytest.fixture(scope="module")
def all_rows() -> dict[str, Row]:
    """Return one row of each name in random configs."""
    choice = random.Random(0).choice
    drawn = [config_of_choices(lambda *values: choice(values)) for _ in range(200)]
    return {name: row for config in drawn for name, row in rows(config).items()}


def test_weight_decay_applies_to_matrices_only(all_rows: dict[str, Row]) -> None:
    """A new factor is a matrix, or is named in `NOT_DECAYED`; what is added does not decay."""
    matrices = {name for name in all_rows if not ADDED.fullmatch(name) and not NOT_DECAYED.fullmatch(name)}
    assert {name for name, row in all_rows.items() if row.decays} == matrices
    assert all(name.endswith(".weight") and len(all_rows[name].axes) >= 2 for name in matrices)


def test_no_factor_starts_at_zero(all_rows: dict[str, Row]) -> None:
    """A factor of zero takes the gradient from all that it multiplies."""
    zero = {name for name, row in all_rows.items() if row.law == Law("constant", (0.0,))}
    assert "blocks.attn.proj.bias" in zero and all(ADDED.fullmatch(name) for name in zero)
