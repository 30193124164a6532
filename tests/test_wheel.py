"""The built wheel, installed into a folder of its own, works without the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import normmatters as nm
from support import native_steps

pytest.importorskip("scikit_build_core", reason="builds the wheel without a network")
ROOT = Path(__file__).parents[1]
PIP = ["-m", "pip", "--disable-pip-version-check", "--no-input", "-q"]

# An editable installation must not help out.
ALONE = """
import sys

sys.meta_path = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_editable")]
"""

# One process for all: most of its time is importing torch.
USE = (
    ALONE
    + """
from pathlib import Path

where, root = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
sys.path = [place for place in sys.path if not Path(place or ".").resolve().is_relative_to(root) or ".venv" in place]

import torch
import normmatters as nm

assert Path(nm.__file__).is_relative_to(where), nm.__file__
model = nm.convert(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU()))
model(torch.randn(2, 3, 5, 5)).sum().backward()
assert type(model[1]) is nm.L1BatchNorm2d and model[1].weight.grad.isfinite().all()

from normmatters_command import main
from normmatters.lab import cells

assert cells.folder().is_relative_to(where), cells.folder()
for words in (["--help"], ["reproduce", "all", "--dry-run"], ["doctor", "--env"],
              ["doctor", "torch.nn:Linear", "-s", "in_features=2", "-s", "out_features=3"]):
    sys.argv = ["normmatters", *words]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (words, end.code)
ours = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "normmatters"}
strays = [name for name, module in ours.items() if not Path(module.__file__).is_relative_to(where)]
assert not strays, strays
"""
)


STEPS = (
    ALONE
    + """
import normmatters
import torch
from normmatters.kernels import cpu
from support import native_steps

where, isa, out = sys.argv[1:]
assert normmatters.__file__.startswith(where), normmatters.__file__
assert cpu.library() and cpu.library().isa == isa, cpu.why_not()
torch.set_num_threads(1)
torch.save(native_steps.results(), out)
"""
)


def _run(*words: str, cwd: Path, timeout: float = 240, **env: str) -> str:
    env = {**os.environ, "COVERAGE_PROCESS_CONFIG": "", **env}  # what is installed elsewhere is not counted
    done = subprocess.run([sys.executable, *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def _build(out: Path, **env: str) -> Path:
    _run(
        *PIP,
        "wheel",
        str(ROOT),
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        cwd=out.parent,
        timeout=3000,
        **env,
    )
    (wheel,) = out.iterdir()
    return wheel


def _install(wheel: Path, site: Path) -> None:
    _run(*PIP, "install", "--no-deps", "--no-compile", "--no-index", "--target", str(site), str(wheel), cwd=site.parent)


def test_the_wheel_works_away_from_the_repository_and_without_a_compiler(tmp_path: Path) -> None:
    wheel = _build(tmp_path / "dist", CXX="/no/compiler", SKBUILD_BUILD_DIR=str(tmp_path / "build"))
    assert wheel.name == f"normmatters-{nm.__version__}-py3-none-any.whl"  # no compiler was found
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert "normmatters/py.typed" in names
    assert not {
        name for name in names if name.startswith(("tests/", "tools/")) or name.endswith((".pyc", ".so", ".cpp"))
    }
    assert any(name.startswith("normmatters/experiments/") for name in names)
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    _install(wheel, site)
    elsewhere.mkdir()
    printed = _run("-c", USE, str(site), str(ROOT), cwd=elsewhere, PYTHONPATH=str(site), COLUMNS="120", NO_COLOR="1")
    assert "reproduce all" in printed  # the help
    assert "fig1/wd_on" in printed  # a cell of an experiment
    assert "3×2" in printed  # the doctor's patient
    assert "on a CPU: plain PyTorch: the native kernels are not built" in printed  # doctor --env
    assert printed.count("normmatters runs without its native CPU kernels") == 1  # the first norm's warning
    assert list(elsewhere.iterdir()) == []  # a dry run leaves nothing


@pytest.mark.timeout(3600)
@pytest.mark.skipif(os.environ.get("NORMMATTERS_WHEEL") != "native", reason="compiles for minutes: make wheel-check")
def test_the_wheel_with_kernels_gives_equal_results_on_each_instruction_set(tmp_path: Path) -> None:
    wheel = _build(tmp_path / "dist", SKBUILD_BUILD_DIR=str(ROOT / "build/wheel"))
    assert wheel.name.startswith(f"normmatters-{nm.__version__}-py3-none-")  # for every Python
    assert not wheel.name.endswith("-any.whl")
    site, results = tmp_path / "site", {}
    _install(wheel, site)
    for isa in native_steps.instruction_sets():
        out, path = tmp_path / f"{isa}.pt", os.pathsep.join((str(site), str(ROOT / "tests")))
        _run("-c", STEPS, str(site), isa, str(out), cwd=tmp_path, PYTHONPATH=path, NORMMATTERS_CPU_ISA=isa)
        results[isa] = torch.load(out)
    baseline = results.pop("baseline")
    for isa, found in results.items():
        native_steps.compare(found, baseline, isa)
