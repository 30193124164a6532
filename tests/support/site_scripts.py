"""The scripts that make the site, imported by their paths: their folder is no package."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from support.markdown_pages import ROOT


def site_module(stem: str) -> ModuleType:
    name = f"site_{stem}"
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "_site" / f"{stem}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where a dataclass looks for its module
    spec.loader.exec_module(module)
    return module
