"""What opening one file or folder may cost, counted where it is spent.

A small file can describe much: a pickle repeats itself through its memo, a zip lists one member a million times.  Limits
on the size of a file or on its result come too late for that.  So every reader counts what it makes against one budget,
which is made when a path is opened and shared by all the files behind that path.
"""

from vit_spec import InputError

NODES = 1 << 21  # about two seconds, and at most 256 MiB of objects
BYTES = 1 << 26
COMPARISONS = 1 << 27


class Budget:
    """What may still be made.

    nodes: steps that each make a small object: an instruction of a pickle, a member of a zip, an entry of a map.
    nbytes: bytes of text and of lists that one step makes of others.
    comparisons: numbers compared where that takes more than one look at each.
    """

    def __init__(self, nodes: int = NODES, nbytes: int = BYTES, comparisons: int = COMPARISONS) -> None:
        self.nodes, self.nbytes, self.comparisons = nodes, nbytes, comparisons

    def make(self, nodes: int = 1, nbytes: int = 0) -> None:
        """Count what is about to be made.

        Raises:
            InputError: it is too much; the caller names the file.
        """
        self.nodes -= nodes
        self.nbytes -= nbytes
        if self.nodes < 0 or self.nbytes < 0:
            what = "objects" if self.nodes < 0 else "bytes of text"
            raise InputError(f"it describes more {what} than weights need: keep the weights alone in it")

    def compare(self, count: int) -> None:
        """Count comparisons that are about to be made.

        Raises:
            InputError: they are too many; the caller names the file.
        """
        self.comparisons -= count
        if self.comparisons < 0:
            raise InputError("it is cut into too many parts to compare: keep the weights alone in it")
