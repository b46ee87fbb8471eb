"""Settings of Sphinx, which is started in the project's folder; `make docs` does."""

import importlib
import inspect
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
    "sphinx.ext.apidoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build", "api/modules.rst"]
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


def named_like_a_function() -> list[str]:
    """Modules that export one function or class of their own name, which is on the package's page.

    An entry of the index is either the module or that.
    """
    found = []
    for file in sorted((ROOT / "tandem").rglob("__init__.py")):
        package = importlib.import_module(".".join(file.parent.relative_to(ROOT).parts))
        for name in getattr(package, "__all__", ()):
            module = file.with_name(f"{name}.py")
            if module.exists() and not inspect.ismodule(getattr(package, name)):
                found.append(str(module))
    return found


# One page for each module of the library; what a package exports is on its page, see `_skip`.
apidoc_modules = [
    {
        "path": str(ROOT / "tandem"),
        "destination": "api",
        "separate_modules": True,
        "automodule_options": {"members", "show-inheritance", "imported-members"},
        "module_first": True,
        "exclude_patterns": named_like_a_function(),
    }
]


logging.getLogger("pytensor.configparser").setLevel(logging.WARNING)  # of its own flags


def setup(app: Any) -> None:
    """Connect the hooks; called by Sphinx."""
    app.connect("source-read", _complete)
    app.connect("autodoc-skip-member", _skip)


def _complete(app: Any, page: str, source: list[str]) -> None:
    if Path(app.env.doc2path(page)).suffix == ".md":
        source[0] = built(source[0])


def _skip(app: Any, kind: str, name: str, value: Any, skip: bool, options: Any) -> bool | None:
    """Show a name once: in the package that exports it, else in the module that defines it."""
    name_of_page = app.env.current_document.autodoc_module
    if kind != "module" or name_of_page is None:
        return None
    parents = name_of_page.split(".")[:-1]
    for depth in range(1, len(parents) + 1):
        package = sys.modules[".".join(parents[:depth])]
        if name in getattr(package, "__all__", ()) and getattr(package, name, None) is value:
            return True
    page = sys.modules[name_of_page]
    if hasattr(page, "__path__") and hasattr(page, "__all__"):
        return None  # a package, of which autodoc shows what it exports
    return True if getattr(value, "__module__", name_of_page) != name_of_page else None
