"""The public API is what `tests/support/api.txt` says, and importing it is quick."""

from __future__ import annotations

import compileall
import difflib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import normmatters as nm
from support import public_api

_IMPORT = """
import sys, time
sys.meta_path = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_editable")]
import torch
start = time.process_time()
import normmatters
print(time.process_time() - start)
assert not normmatters.__file__.startswith(sys.argv[1]), normmatters.__file__  # the copy
"""


def test_the_api_is_the_one_that_was_agreed_on() -> None:
    agreed = public_api.FILE.read_text(encoding="utf-8").splitlines()
    now = list(public_api.lines())
    changes = difflib.unified_diff(agreed, now, "agreed", "now", lineterm="", n=0)
    assert now == agreed, "\n".join(
        [
            "The public API has changed. If that is meant, say so in CHANGELOG.md (a name that is gone or takes other",
            "arguments breaks programs: raise the version as SemVer asks) and run: python tests/support/public_api.py",
            *changes,
        ]
    )


def test_a_version_is_three_numbers() -> None:
    numbers = nm.__version__.split(".")
    assert len(numbers) == 3
    assert all(number.isdigit() for number in numbers)


def test_importing_takes_no_more_than_50_ms_beyond_torch(tmp_path: Path) -> None:
    """Processor time: about 20 ms, and another try or two for what else the machine does.

    As installed, that is with bytecode that has been compiled.
    """
    package = Path(nm.__file__).parent
    copy = tmp_path / package.name
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__", "lab", "bench", "cli*"))
    assert compileall.compile_dir(copy, quiet=1)
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "COVERAGE_PROCESS_CONFIG": ""}

    def took() -> float:
        command = [sys.executable, "-c", _IMPORT, str(package)]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return float(done.stdout)

    assert any(took() < 0.05 for _ in range(3))
