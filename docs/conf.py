"""Settings of Sphinx; `make docs` builds the pages into docs/_build."""

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
for folder in (ROOT, ROOT / "preprocessing"):
    sys.path.insert(0, str(folder))

project = "Tandem"
extensions = [
    "myst_parser",
    "sphinx.ext.apidoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build", "api/modules.rst"]
html_theme = "alabaster"
html_theme_options = {"description": "AlexNet with several processes", "fixed_sidebar": True}
html_sidebars = {"**": ["about.html", "searchfield.html", "navigation.html"]}

myst_heading_anchors = 3  # links to headings of the Markdown pages, as GitHub makes them

# Docstrings have numpydoc's sections; a known name in `single backticks` becomes a link.
default_role = "py:obj"
napoleon_google_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
autodoc_default_options = {
    "members": True,
    "show-inheritance": True,
    "ignore-module-all": True,
}
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # docstrings have more: shapes, layouts, units
autodoc_mock_imports = ["mpi4py", "pycuda"]  # optional packages, not needed here

# An attribute's name may be ambiguous; it is then not linked.
suppress_warnings = ["ref.python"]

# One page for each module of the library.
apidoc_modules = [
    {
        "path": "../tandem",
        "destination": "api",
        "separate_modules": True,
        "automodule_options": {"members", "show-inheritance", "ignore-module-all"},
        "module_first": True,
    }
]


def setup(app: Any) -> None:
    """Connect the hooks; called by Sphinx."""
    app.connect("source-read", _without_links_out)


def _without_links_out(app: Any, page: str, source: list[str]) -> None:
    """Replace links to Markdown outside docs/ by their text."""
    source[0] = re.sub(r"\[([^]]*)\]\(\.\./[^)]*\.md(#[^)]*)?\)", r"\1", source[0])
