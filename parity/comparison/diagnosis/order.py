"""The order in which pairs of causes are tried."""

from collections.abc import Iterator

import numpy as np

from parity.checkpoints.layout import Array


def likeliest_pairs(
    outputs: list[Array], before: Array, expected: Array, families: list[str], rare: list[bool]
) -> Iterator[tuple[int, int]]:
    """Yield pairs of different families: in turn by the sum of their effects, by the nearer of both, and by likelihood.

    Small effects add up, so that a pair's outputs are foretold by those of its two causes without a run.  Pairs with a
    rare cause come after all others.

    outputs: with each cause by itself, the likeliest cause first.
    """
    n = len(outputs)
    same = [place for place, each in enumerate(outputs) if each.shape == before.shape]
    effects = np.zeros((n, before.size))
    for place in same:
        effects[place] = (outputs[place] - before).ravel()
    missing = (expected - before).ravel()
    gram, along = effects @ effects.T, effects @ missing
    squares = np.diag(gram)
    foretold = squares[:, None] + squares + 2 * gram - 2 * (along[:, None] + along)
    errors = np.linalg.norm(effects - missing, axis=1)
    nearer = np.minimum(errors[:, None], errors) * (1 + 1e-3 * np.maximum.outer(np.arange(n), np.arange(n)))
    likelihood = np.add.outer(np.arange(n), np.arange(n))
    a, b = np.triu_indices(n, 1)
    different = np.array([families[i] != families[j] for i, j in zip(a, b, strict=True)], bool)
    a, b = a[different], b[different]
    last = np.add.outer(np.array(rare, int), np.array(rare, int))[a, b]
    orders = [np.lexsort((score[a, b], last)) for score in (foretold, nearer, likelihood)]
    seen: set[int] = set()
    for turn in zip(*orders, strict=True):
        for place in map(int, turn):
            if place not in seen:
                seen.add(place)
                yield int(a[place]), int(b[place])
