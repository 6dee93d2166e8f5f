"""A fixture for modules that make many runs: their curves are rendered once per kind of picture."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def rendered_once() -> Iterator[None]:
    """Render the curves once for all runs that plot the same metrics, and write this picture for each of them.

    Rendering takes longer than a run of `FakeEngine`.  The curves of each run are still computed, plotted and written.
    """
    from train.loop import curves

    pictures: dict[Any, bytes] = {}

    class SharedFigure(curves.Figure):
        def savefig(self, file: Any, **options: Any) -> None:
            plots = [(axes, line) for axes in self.axes for line in axes.lines]
            # Of the points of a line, it matters whether there is none, one or more.
            key = str([(axes.get_title("left"), line.get_label(), min(2, len(line.get_xdata()))) for axes, line in plots])
            if key not in pictures:
                super().savefig(file, **options)
                pictures[key] = file.getvalue()
            else:
                file.write(pictures[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "Figure", SharedFigure)
        yield
