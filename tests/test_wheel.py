"""The built wheel, installed into a folder of its own, works without the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import normmatters as nm

pytest.importorskip("scikit_build_core", reason="builds the wheel without a network")
ROOT = Path(__file__).parents[1]

# One process for all: most of its time is importing torch.
USE = """
import sys
from pathlib import Path

where, root = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
# An editable installation must not help out.
sys.path = [place for place in sys.path if not Path(place or ".").resolve().is_relative_to(root) or ".venv" in place]
sys.meta_path = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_editable")]

import torch
import normmatters as nm

assert Path(nm.__file__).is_relative_to(where), nm.__file__
model = nm.convert(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU()))
model(torch.randn(2, 3, 5, 5)).sum().backward()
assert type(model[1]) is nm.L1BatchNorm2d and model[1].weight.grad.isfinite().all()

from normmatters.cli import main
from normmatters.lab import experiments

assert experiments.folder().is_relative_to(where), experiments.folder()
for words in (["--help"], ["reproduce", "all", "--dry-run"], ["doctor", "torch.nn:Linear", "-s", "in_features=2"]):
    sys.argv = ["normmatters", *words, *(["-s", "out_features=3"] if "-s" in words else [])]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (words, end.code)
ours = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "normmatters"}
strays = [name for name, module in ours.items() if not Path(module.__file__).is_relative_to(where)]
assert not strays, strays
"""


def _run(*words: str, cwd: Path, **env: str) -> str:
    env = {**os.environ, "COVERAGE_PROCESS_CONFIG": "", **env}  # what is installed elsewhere is not counted
    done = subprocess.run([sys.executable, *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_works_away_from_the_repository_and_without_a_compiler(tmp_path: Path) -> None:
    pip = ["-m", "pip", "--disable-pip-version-check", "--no-input", "-q"]
    _run(*pip, "wheel", str(ROOT), "--no-deps", "--no-build-isolation", "-w", str(tmp_path / "dist"), cwd=tmp_path,
         CXX="/no/compiler", SKBUILD_BUILD_DIR=str(tmp_path / "build"))  # fmt: skip
    (wheel,) = (tmp_path / "dist").iterdir()
    assert wheel.name == f"normmatters-{nm.__version__}-py3-none-any.whl"  # no compiler was found
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert "normmatters/py.typed" in names
    assert not {
        name for name in names if name.startswith(("tests/", "tools/")) or name.endswith((".pyc", ".so", ".cpp"))
    }
    assert any(name.startswith("normmatters/experiments/") for name in names)
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    _run(*pip, "install", "--no-deps", "--no-compile", "--no-index", "--target", str(site), str(wheel), cwd=tmp_path)
    elsewhere.mkdir()
    printed = _run("-c", USE, str(site), str(ROOT), cwd=elsewhere, PYTHONPATH=str(site), COLUMNS="120", NO_COLOR="1")
    assert "reproduce all" in printed  # the help
    assert "fig1/wd_on" in printed  # a cell of an experiment
    assert "3×2" in printed  # the doctor's patient
    assert list(elsewhere.iterdir()) == []  # a dry run leaves nothing
