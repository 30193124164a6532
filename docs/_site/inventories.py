"""Fetch what other projects' sites describe, so that names of torch and Python in signatures become links.

Without a network there are no such links, and the site is built all the same.
Run: python docs/_site/inventories.py build/inventories
"""

from __future__ import annotations

import sys
import urllib.request
from pathlib import Path

SITES = {"torch": "https://docs.pytorch.org/docs/stable/", "python": "https://docs.python.org/3/"}


def fetch(folder: Path) -> None:
    """Save each inventory that is not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, site in SITES.items():
        file = folder / f"{name}.inv"
        if file.exists():
            continue
        try:
            with urllib.request.urlopen(f"{site}objects.inv", timeout=10) as answer:
                file.write_bytes(answer.read())
        except OSError as error:
            print(f"No links to {site}: {error}")


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
