"""Limits on the memory and time that opening one file or folder may take.

A small file can describe very large contents: a pickle can repeat parts of itself through its memo, and a zip can list
one member a million times.  Limits on the size of the file and on the size of the result would stop neither.  Therefore
every reader charges the objects that it creates to one budget.  The budget is created when a path is opened, and is
shared by all files that belong to that path.

Arrays are limited in another way: by their bytes on disk, see `max_array_bytes`.
"""

from vit_spec import InputError

MAX_OBJECTS = 1 << 21  # creating so many takes about two seconds and at most 256 MiB
MAX_TEXT_BYTES = 1 << 26
MAX_COMPARISONS = 1 << 27
_UNCHECKED_BYTES = 1 << 28  # arrays may take this many bytes whatever their size on disk
_MAX_EXPANSION = 64  # and in addition this many times their bytes on disk


def max_array_bytes(stored_bytes: int) -> int:
    """Return how many bytes arrays may take in memory if they take `stored_bytes` on disk."""
    return _UNCHECKED_BYTES + _MAX_EXPANSION * stored_bytes


class Budget:
    """The remaining budget of one opened path.

    objects: number of small objects, for example the results of the instructions of a pickle.
    text_bytes: bytes of text and of lists that are built from other text and lists.
    comparisons: number of comparisons in algorithms that compare each number more than once.
    """

    def __init__(
        self, objects: int = MAX_OBJECTS, text_bytes: int = MAX_TEXT_BYTES, comparisons: int = MAX_COMPARISONS
    ) -> None:
        self.objects, self.text_bytes, self.comparisons = objects, text_bytes, comparisons

    def spend(self, objects: int = 1, text_bytes: int = 0) -> None:
        """Charge objects and bytes of text before they are created.

        Raises:
            InputError: the budget is exceeded; the caller adds the path.
        """
        self.objects -= objects
        self.text_bytes -= text_bytes
        if self.objects < 0 or self.text_bytes < 0:
            what = "objects" if self.objects < 0 else "bytes of text"
            raise InputError(f"it describes more {what} than weights need: keep the weights alone in it")

    def spend_comparisons(self, count: int) -> None:
        """Charge comparisons before they are made.

        Raises:
            InputError: the budget is exceeded; the caller adds the path.
        """
        self.comparisons -= count
        if self.comparisons < 0:
            raise InputError("its tensors have too many chunks to compare: keep the weights alone in it")
