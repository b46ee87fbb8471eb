"""Settings of Sphinx, which is started in the project's folder; `make docs` does."""

import logging
import sys
from pathlib import Path
from typing import Any

from docs.pages import built

ROOT = Path(__file__).parent.parent
for folder in (ROOT, ROOT / "preprocessing"):
    sys.path.insert(0, str(folder))

project = "Tandem"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "api"]  # api: of builds before library/ was written
html_theme = "furo"
html_theme_options = {"top_of_page_buttons": []}
html_title = "Tandem"
html_show_copyright = False
html_show_sourcelink = False
highlight_language = "none"  # of blocks that name none: output, and single commands
html_static_path = ["_static"]
html_css_files = ["pages.css"]
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"  # what programs print: none

myst_heading_anchors = 3  # links to headings of the Markdown pages, as GitHub makes them

# Docstrings have numpydoc's sections; a known name in `single backticks` becomes a link.
default_role = "py:obj"
napoleon_google_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings have more: shapes, layouts, units
autodoc_mock_imports = ["mpi4py", "pycuda", "triton"]  # optional packages, not needed here

# An attribute's name may be ambiguous; it is then not linked.
suppress_warnings = ["ref.python"]


logging.getLogger("pytensor.configparser").setLevel(logging.WARNING)  # of its own flags


def setup(app: Any) -> None:
    """Connect the hook; called by Sphinx."""
    app.connect("source-read", _complete)


def _complete(app: Any, page: str, source: list[str]) -> None:
    if Path(app.env.doc2path(page)).suffix == ".md":
        source[0] = built(source[0])
