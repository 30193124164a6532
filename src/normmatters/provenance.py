"""What made a number: which version of the code, on which machine."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch


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


def device_name(device: torch.device) -> str:
    """The model of the GPU, or of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
