"""The order in which pairs of causes are tried."""

from collections.abc import Iterator

import numpy as np

from parity.checkpoints.layout import Array


def likeliest_pairs(
    outputs: list[Array], baseline: Array, expected: Array, families: list[str], is_rare: list[bool]
) -> Iterator[tuple[int, int]]:
    """Yield pairs of causes of different families, as indices into `outputs`, the likeliest pairs first.

    Three rankings contribute in turn: by the error that the sum of both effects predicts, by the smaller error of the two
    causes, and by the position in the catalogue.  Small effects add up, so the outputs of a pair are predicted from the
    outputs with each of its causes, without running it.  Pairs with a rare cause come after all others.

    outputs: the outputs with each cause separately, the likeliest cause first.
    baseline: the outputs of the unchanged model.
    families: the family of each cause.
    is_rare: whether each cause is unlikely to be one of two simultaneous causes.
    """
    n = len(outputs)
    same_shape = [index for index, output in enumerate(outputs) if output.shape == baseline.shape]
    effects = np.zeros((n, baseline.size))
    for index in same_shape:
        effects[index] = (outputs[index] - baseline).ravel()
    missing = (expected - baseline).ravel()
    gram, projections = effects @ effects.T, effects @ missing
    squares = np.diag(gram)
    predicted = squares[:, None] + squares + 2 * gram - 2 * (projections[:, None] + projections)
    errors = np.linalg.norm(effects - missing, axis=1)
    smaller_error = np.minimum(errors[:, None], errors) * (1 + 1e-3 * np.maximum.outer(np.arange(n), np.arange(n)))
    likelihood = np.add.outer(np.arange(n), np.arange(n))
    a, b = np.triu_indices(n, 1)
    is_compatible = np.array([families[i] != families[j] for i, j in zip(a, b, strict=True)], bool)
    a, b = a[is_compatible], b[is_compatible]
    rarity = np.add.outer(np.array(is_rare, int), np.array(is_rare, int))[a, b]
    orders = [np.lexsort((score[a, b], rarity)) for score in (predicted, smaller_error, likelihood)]
    seen: set[int] = set()
    for candidates in zip(*orders, strict=True):
        for index in map(int, candidates):
            if index not in seen:
                seen.add(index)
                yield int(a[index]), int(b[index])
