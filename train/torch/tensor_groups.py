"""Groups of tensors, so that the temporary tensors of an update are small, however large the model is.

The memory estimate imports this module, which therefore imports no framework.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# Entries of the tensors of a group.  On a GPU, a kernel of `torch._foreach_*` computes with 320 x 65,536 entries at most:
# larger groups would save few launches.
GROUP_SIZE = 1 << 24


def tensor_groups(*lists: "Sequence[Tensor]") -> "Iterator[tuple[list[Tensor], ...]]":
    """Yield the lists in parts, of `GROUP_SIZE` entries at most, or of a single tensor that has more.

    lists: lists of one length; the n-th tensors of all have one shape.
    """
    start, size = 0, 0
    for n, tensor in enumerate(lists[0]):
        if n > start and size + tensor.numel() > GROUP_SIZE:
            yield tuple([*each[start:n]] for each in lists)
            start, size = n, 0
        size += tensor.numel()
    if lists[0]:
        yield tuple([*each[start:]] for each in lists)


def largest_group(sizes: Sequence[int]) -> int:
    """Return a bound of the entries of a group, of tensors with these numbers of entries."""
    return min(sum(sizes), max(GROUP_SIZE, *sizes)) if sizes else 0


def group_length(size: int) -> int:
    """Return the number of tensors of a group, of tensors with `size` entries each."""
    return max(1, GROUP_SIZE // size)
