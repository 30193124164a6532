"""Which version of the code made a number."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def commit() -> str | None:
    """The commit of the checkout that this code lies in; a ``+`` says that files were changed since. None: not known.

    ``NORMMATTERS_COMMIT`` names it where the code was copied, with its history, without it, or into another checkout.
    """

    def git(*command: str) -> str:
        here = str(Path(__file__).resolve().parent)
        run = subprocess.run(["git", "-C", here, *command], capture_output=True, text=True, check=True, timeout=10)
        return run.stdout.strip()

    if named := os.environ.get("NORMMATTERS_COMMIT"):
        return named
    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # else it is installed inside somebody's checkout
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None
