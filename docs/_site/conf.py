"""Sphinx's settings for the site. ``make docs`` writes the pages first (``pages.py``), then builds them with these."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from inventories import SITES  # noqa: E402

project = "normmatters"
author = "The normmatters authors"
html_title = "normmatters"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.intersphinx"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_site"]

myst_heading_anchors = 4  # anchors as code hosts make them
myst_links_external_new_tab = False

# Only what could be fetched: a machine without a network builds the same site without links to torch.
_folder = Path(os.environ.get("INVENTORIES", "build/inventories")).resolve()
intersphinx_mapping = {
    name: (site, str(_folder / f"{name}.inv")) for name, site in SITES.items() if (_folder / f"{name}.inv").exists()
}

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_default_options |= {"exclude-members": "extra_repr, reset_parameters"}
autodoc_inherit_docstrings = False
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
maximum_signature_line_length = 88
add_module_names = False

html_theme = "furo"
html_static_path = [str(HERE / "site.css")]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
pygments_style, pygments_dark_style = "friendly", "github-dark"


def _escape(app: object, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Docstrings say |x − μ| and (N, *): signs that would begin markup and never end it."""
    inside = False
    for i, line in enumerate(lines):
        inside = line.lstrip().startswith(">>>") or (inside and bool(line.strip()))  # an example, with its output
        parts = line.split("``")
        for j in range(0, len(parts), 2):
            parts[j] = parts[j].replace("|", "\\|")
            if parts[j].count("*") == 1:
                parts[j] = parts[j].replace("*", "\\*")
        if not inside:
            lines[i] = "``".join(parts)


def _public_name(app: Any, env: Any, node: Any, content: Any) -> Any:
    """A signature names a class by the file that defines it, the API by the package that gives it out."""
    last = str(node.get("reftarget", "")).rpartition(".")[2]
    domain = env.domains["py"]
    found = [name for name in domain.objects if name.startswith("normmatters.") and name.rpartition(".")[2] == last]
    if node.get("refdomain") != "py" or len(found) != 1:
        return None
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", found[0], node, content)


def setup(app: Any) -> None:
    app.connect("missing-reference", _public_name)
    app.connect("autodoc-process-docstring", _escape, priority=400)  # before napoleon
