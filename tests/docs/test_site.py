"""The site builds without a warning. Needs the extra ``docs``."""

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
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package, reason=f"{package} is not installed (`make docs` does)")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == ""
    front = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "Quickstart" in front
    optim = (tmp_path / "api" / "optim.html").read_text(encoding="utf-8")
    assert 'id="normmatters.optim.AngularSGD"' in optim
    assert "&gt;&gt;&gt;" in optim  # an example as code,
    assert "<blockquote>" not in optim  # not as a quotation
    for made in ("examples/angular", "experiments/fig1", "contributing", "recipes/index"):
        assert (tmp_path / f"{made}.html").is_file(), made
    # Every link and picture of every page leads to a file: the site works without a server.
    for page in tmp_path.rglob("*.html"):
        if page.name != "404.html":
            targets = re.findall(r'(?:href|src)="(?![a-z]+:|#)([^"#?]+)', page.read_text(encoding="utf-8"))
            assert [target for target in targets if not (page.parent / unquote(target)).exists()] == [], page
