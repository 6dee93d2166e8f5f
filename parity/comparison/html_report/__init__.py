"""The report of a comparison as one self-contained HTML page: it needs no network, no other files and no server."""

import hashlib
import shlex
from base64 import b64encode
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from parity.checkpoints.atomic_write import atomic_replace
from parity.checkpoints.weights import Checkpoint
from parity.comparison.report import Report
from vit_spec import InputError

if TYPE_CHECKING:
    from parity.comparison.html_report.attention import AttentionMaps

GENERATOR = "twin-vision-transformers: report of parity check"  # marks the files of a report
_HEAD_BYTES = 4096  # at the start of a file, in which the mark is expected
REQUIRED_PACKAGES = ("jinja2", "matplotlib")


def check_output_path(path: str | Path) -> Path:
    """Return the path of a page after checking that it can be written.  Call this before a long comparison.

    Raises:
        InputError: a package is missing, the name does not end in .html, no file can be written there, or a file that is
            not part of an earlier report has the name of the page or of its plot.
    """
    if missing := [name for name in REQUIRED_PACKAGES if find_spec(name) is None]:
        raise InputError(f"a report needs {' and '.join(missing)}, not installed: pip install '.[report]' in the checkout")
    path = Path(path)
    if path.suffix not in (".html", ".htm"):
        raise InputError(f"{path} is not the name of an HTML page: give one that ends in .html")
    if not path.parent.is_dir():
        raise InputError(f"the folder {path.parent} does not exist: create it, or write the report elsewhere")
    for each in _output_paths(path):
        _check_replaceable(each)
    return path


def _check_replaceable(path: Path) -> None:
    """Raise InputError if something that is not the page or the plot of an earlier report has a path."""
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is not a file: write the report elsewhere")
    if path.exists() and not _is_of_a_report(path):
        raise InputError(f"{path} exists and is not part of a report: give another name, or remove the file")


def _is_of_a_report(path: Path) -> bool:
    """Return whether a file is the page or the plot of an earlier report, and may be replaced."""
    with path.open("rb") as file:
        return GENERATOR.encode() in file.read(_HEAD_BYTES)


def write(
    report: Report,
    checkpoint: Checkpoint,
    path: str | Path,
    *,
    source: str = "SRC",
    options: Sequence[str] = (),
    seed: int | None = None,
) -> list[Path]:
    """Write the page, and its main plot as a PNG file of the same name; those of an earlier report are replaced atomically.

    Args:
        report: the result of `compare`.
        checkpoint: the weights that were compared, for the attention maps of a sample image.
        path: path of the page, which ends in .html.
        source: the weights as given on the command line, which the page shows and uses in commands.
        options: the words of the command line that say how to read them, such as "--from" and its value.
        seed: seed of the random images; None if images were given.

    Returns:
        The paths of the two files.

    Raises:
        InputError: see `check_output_path`.
    """
    path = check_output_path(path)
    from parity.comparison.html_report import attention, plot

    page = render(report, attention.compute_attention_maps(checkpoint), source=source, options=options, seed=seed)
    contents = (page.encode(), plot.error_png(report, title(report), GENERATOR))
    for each, content in zip(_output_paths(path), contents, strict=True):
        with atomic_replace(each, check=_check_replaceable) as partial:  # it may be new since `check_output_path`
            partial.write_bytes(content)
    return _output_paths(path)


def title(report: Report) -> str:
    """Return the title of the PNG file: the verdict, the model, the number of tensors and the level."""
    from parity.comparison.html_report import view

    verdict = "PASS" if report.passed else "FAIL"
    return f"{verdict}: {view.describe_model(report.config)}, {len(report.measures)} tensors, level {report.level}"


def render(
    report: Report,
    maps: "AttentionMaps",
    *,
    source: str = "SRC",
    options: Sequence[str] = (),
    seed: int | None = None,
) -> str:
    """Return the page as text; see `write`.  The same report and maps give the same text."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from parity.comparison.html_report import plot, view

    here = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(here),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=view.printable_text,
    )
    environment.filters |= {
        each.__name__: each for each in (view.short_number, view.full_number, view.unbroken_numbers, view.breakable_name)
    }
    script = (here / "page.js").read_text()
    return environment.get_template("page.html.jinja").render(
        report=report,
        generator=GENERATOR,
        maps=maps,
        source=shlex.quote(source),
        options=shlex.join(options),
        seed=seed,
        view=view,
        plot=plot,
        training=report.training.facts() if report.training else None,
        css=(here / "page.css").read_text(),
        script=script,
        hash=b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _output_paths(path: Path) -> list[Path]:
    return [path, path.with_suffix(".png")]
