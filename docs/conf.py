"""Configuration of the documentation site: `make docs` builds it with Sphinx.

Pages are Markdown (MyST). The pages in api/ take their text from the docstrings, reference/command_line.md from `--help`.
"""

import os
import subprocess
import sys
from importlib.metadata import version as installed_version

from docutils import nodes
from docutils.parsers.rst import Directive

project = "Twin Vision Transformers"
author = "Twin Vision Transformers contributors"
project_copyright = author
release = version = installed_version("twin-vision-transformers")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]

myst_heading_anchors = 3  # headings that pages can link to
suppress_warnings = ["misc.highlighting_failure"]

napoleon_numpy_docstring = False
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = False  # those of torch.nn.Module.forward and nn.Module.setup say nothing about the twins
python_use_unqualified_type_names = True

# The copy button takes commands without their prompt and without their output.
copybutton_prompt_text = "$ "

html_theme = "furo"
html_title = project
html_copy_source = False
html_show_sourcelink = False


class Help(Directive):
    """Insert what `python -m COMMAND --help` prints: ```` ```{help} parity convert ````."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Run the command and return its output as a literal block."""
        command = [sys.executable, "-m", *self.arguments[0].split(), "--help"]
        env = os.environ | {"COLUMNS": "90", "NO_COLOR": "1"}
        text = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
        return [nodes.literal_block(text, text, language="text")]


def setup(app: object) -> None:
    """Register the directive."""
    app.add_directive("help", Help)  # type: ignore[attr-defined]
