"""The site builds without a warning, and is whole in itself. Needs the extra ``docs``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

from support.markdown_pages import ROOT


def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    for package in ("sphinx", "furo", "myst_parser"):
        pytest.importorskip(package, reason=f"{package} is not installed (`make docs` does)")
    source, site = tmp_path / "pages", tmp_path / "site"
    scripts = ROOT / "docs" / "_site"
    # No inventories, as on a machine without a network.
    environment = {**os.environ, "INVENTORIES": str(tmp_path / "none"), "TRITON_INTERPRET": ""}
    command = [sys.executable, str(scripts / "pages.py"), str(source)]
    subprocess.run(command, check=True, env=environment, timeout=240)
    build = ["-q", "-W", "--keep-going", "-b", "html", "-c", str(scripts), str(source), str(site)]
    command = [sys.executable, "-m", "sphinx", *build]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stderr.strip()) == (0, "")
    assert "Quickstart" in (site / "index.html").read_text(encoding="utf-8")
    optim = (site / "api" / "optim.html").read_text(encoding="utf-8")
    assert 'id="normmatters.optim.AngularSGD"' in optim
    assert "&gt;&gt;&gt;" in optim  # an example
    convert = (site / "api" / "convert.html").read_text(encoding="utf-8")
    signature = convert.partition('id="normmatters.surgery.convert"')[2].partition("</dt>")[0]
    assert 'href="#normmatters.surgery.ConversionReport"' in signature  # a type that leads to its description
    for made in ("examples/angular", "experiments/fig1", "contributing", "recipes/index"):
        assert (site / f"{made}.html").is_file(), made
    experiments = (site / "experiments" / "index.html").read_text(encoding="utf-8")
    assert "Figure 1: Weight decay is a step size" in experiments  # not the folder's name alone
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        # No page asks another server for anything: a link is followed by the reader, all else is here.
        assert re.findall(r'<(?:script|img|iframe)[^>]*src="(?:https?:)?//', text) == [], page
        assert re.findall(r'<link(?![^>]*rel="(?:canonical|next|prev)")[^>]*href="(?:https?:)?//', text) == [], page
        # Every link and picture leads to a file: the site works without a server.
        targets = re.findall(r'(?:href|src)="(?![a-z]+:|#|//)([^"#?]+)', text)
        assert [target for target in targets if not (page.parent / unquote(target)).exists()] == [], page
    # The search's index is a script, which a page opened from disk may load.
    assert (site / "searchindex.js").read_text(encoding="utf-8").startswith("Search.setIndex(")
    assert 'src="searchindex.js' in (site / "search.html").read_text(encoding="utf-8")


def test_every_page_is_in_the_tree() -> None:
    """One that is not would fail the build; this says so without building."""
    text = (ROOT / "docs" / "_site" / "pages.py").read_text(encoding="utf-8")
    named = set(re.findall(r'"([\w/-]+)": "', text))
    folders = {"recipes", "api"}  # whose index lists what there is
    docs = ROOT / "docs"
    pages = {page.relative_to(docs).as_posix().removesuffix(".md") for page in docs.rglob("*.md")}
    assert {page for page in pages if page.partition("/")[0] not in folders} - {"index"} <= named
