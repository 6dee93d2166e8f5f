"""The report of a check as one page that needs nothing else: no network, no folder beside it, no server."""

import hashlib
import shlex
from base64 import b64encode
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from parity.checkpoints.atomic_write import replacing
from parity.checkpoints.weights import Checkpoint
from parity.comparison.report import Report
from vit_spec import InputError

if TYPE_CHECKING:
    from parity.comparison.html_report.attention import Maps

NEEDED = ("jinja2", "matplotlib")


def ready(path: str | Path) -> Path:
    """Return where a page is to be written, if it can be: to be asked before a check that takes long.

    Raises:
        InputError: a package that is missing, a name that is no page's, or a place where no file can be.
    """
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise InputError(
            f"a report needs {' and '.join(missing)}, not installed: pip install 'twin-vision-transformers[report]'"
        )
    path = Path(path)
    if path.suffix not in (".html", ".htm"):
        raise InputError(f"{path} is no name of a page: give one that ends in .html")
    if not path.parent.is_dir():
        raise InputError(f"the folder {path.parent} does not exist: make it, or write the report elsewhere")
    for each in _both(path):
        if each.exists() and not each.is_file():
            raise InputError(f"{each} is no file: write the report elsewhere")
    return path


def write(
    report: Report, checkpoint: Checkpoint, path: str | Path, *, source: str = "SRC", seed: int | None = None
) -> list[Path]:
    """Write the page, and its main plot beside it as PNG; replaces what was there, all of it or nothing.

    Args:
        checkpoint: the weights that were checked, to see where they look in a sample image.
        path: ends in .html.
        source: what the command line called the weights.
        seed: of the images that the check made itself; None where it was given some.

    Returns:
        The two files.

    Raises:
        InputError: see `ready`.
    """
    path = ready(path)
    from parity.comparison.html_report import attention, plot, view

    page = render(report, attention.maps(checkpoint), source=source, seed=seed)
    verdict = "PASS" if report.passed else "FAIL"
    title = f"{verdict}: {view.model(report.config)}, {len(report.measures)} tensors, level {report.level}"
    contents = (page.encode(), plot.png(report, title))
    for each, content in zip(_both(path), contents, strict=True):
        with replacing(each) as partial:
            partial.write_bytes(content)
    return _both(path)


def render(report: Report, maps: "Maps", *, source: str = "SRC", seed: int | None = None) -> str:
    """Return the page; see `write`.  The same report and maps give the same text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from parity.comparison.html_report import plot, view

    here = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(here), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {each.__name__: each for each in (view.figure, view.exact, view.unbroken, view.dotted)}
    script = (here / "page.js").read_text()
    return environment.get_template("page.html.jinja").render(
        report=report,
        maps=maps,
        source=shlex.quote(source),
        seed=seed,
        view=view,
        plot=plot,
        training=report.training.facts() if report.training else None,
        css=(here / "page.css").read_text(),
        script=script,
        hash=b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _both(path: Path) -> list[Path]:
    return [path, path.with_suffix(".png")]
