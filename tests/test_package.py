"""The package as a whole: its names, what importing it takes along, and what a wheel of it holds."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

import normmatters as nm
from normmatters.lab import cells

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

_RANKED = ("Lp", "L1", "LInf", "TopK", "Range", "MeanOnly")
PUBLIC = {
    *(f"{norm}BatchNorm{rank}d" for norm in _RANKED for rank in (1, 2, 3)),
    *("L1LayerNorm", "LpLayerNorm", "L1RMSNorm", "TReLU", "SyncLpBatchNorm", "convert_sync_batchnorm", "update_bn"),
    *("functional", "constants", "migrate", "optim", "precision", "weight_norm", "register_fusion"),
    *(
        "bounded_weight_norm",
        "apply_weight_norm",
        "remove_weight_norm",
        "classic_weight_norm",
        "move_rho_to_last_layer",
    ),
    *("convert", "fold", "to_torch", "ConversionReport", "__version__"),
}
OPTIM = {
    *("NormRecorder", "StepSizeCorrection", "NormSchedule", "WeightDecayFreeSGD", "AngularSGD", "Angular"),
    *("effective_step_size", "scale_invariant_parameters"),
}


def _python(code: str) -> str:
    """Run code in a Python of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_public_names() -> None:
    assert set(nm.__all__) == PUBLIC
    assert set(nm.functional.__all__) == {"lp_batch_norm", "lp_layer_norm", "lp_rms_norm", "bounded_weight"}
    assert set(nm.optim.__all__) >= OPTIM
    assert callable(nm.constants.gaussian_scale)
    assert callable(nm.precision.arithmetic)
    assert set(dir(nm)) >= PUBLIC
    with pytest.raises(AttributeError, match="no attribute 'L3BatchNorm2d'"):
        nm.L3BatchNorm2d  # noqa: B018


@pytest.mark.parametrize("home", [nm, nm.functional, nm.optim], ids=lambda module: module.__name__)
def test_every_public_name_is_documented(home: ModuleType) -> None:
    for name in home.__all__:
        value = getattr(home, name)
        if isinstance(value, str):
            continue
        assert inspect.getdoc(value), name
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__doc__, f"{name} has only the docstring that it inherits"


def test_convert_is_a_function_and_no_package_has_its_name() -> None:
    import normmatters as nm

    assert inspect.isfunction(nm.convert)
    assert importlib.util.find_spec("normmatters.convert") is None


def test_library_needs_torch_alone_and_imports_quickly() -> None:
    """All extras are blocked; and importing us takes a small part of the time that importing torch takes.

    Importing torch's compiler, or triton, takes about as long as torch: each would show.
    """
    extras = [
        name for group in ("lab", "dev", "workflows") for name in PROJECT["project"]["optional-dependencies"][group]
    ]
    modules = {name.split(">")[0].replace("-", "_") for name in extras} | {"sklearn", "scipy", "torchvision", "timm"}
    code = f"""
import sys, time
start = time.process_time()
import torch
torch_alone = time.process_time() - start
for name in {sorted(modules - {"numpy"})!r}:  # torch itself imports numpy where there is one
    assert name not in sys.modules, name
    sys.modules[name] = None  # an import of it fails

start = time.process_time()
import normmatters as nm
took = time.process_time() - start
assert "torch._dynamo" not in sys.modules
assert "normmatters.optim" not in sys.modules  # only when it is asked for
ours = {{name for name in sys.modules if name.startswith("normmatters.")}}
assert not {{name for name in ours if name.split(".")[1] in ("lab", "bench", "cli")}}, ours

model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU())
nm.convert(model)(torch.randn(2, 3, 5, 5)).sum().backward()
assert nm.optim.AngularSGD and nm.precision.arithmetic("fp16")
for name in nm.__all__:
    getattr(nm, name)
print(took, torch_alone)
"""
    took, torch_alone = map(float, _python(code).split())
    assert took < 0.25 * torch_alone


def test_metadata() -> None:
    project = PROJECT["project"]
    assert project["version"] == nm.__version__ == metadata.version("normmatters")
    assert project["dependencies"] == ["torch>=2.11"]
    assert project["license"] == "Apache-2.0"
    license_text = (ROOT / project["license-files"][0]).read_text(encoding="utf-8")
    assert "Apache License\n                           Version 2.0, January 2004" in license_text
    assert "END OF TERMS AND CONDITIONS" in license_text
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {nm.__version__}\n" in citation
    assert f"\nlicense: {project['license']}\n" in citation
    assert nm.__version__ in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    (script,) = metadata.entry_points(group="console_scripts", name="normmatters")
    assert callable(script.load())


def test_wheel_takes_along_types_and_experiments() -> None:
    build = PROJECT["tool"]["scikit-build"]
    packages = {into: ROOT / name for into, name in build["wheel"]["packages"].items()}
    package = packages["normmatters"]
    assert (package / "py.typed").exists()  # without it type checkers ignore our types
    # What is not Python lies in the package, or the wheel takes it there from elsewhere.
    assert packages["normmatters/experiments"] == ROOT / "experiments"
    assert cells.folder() in (ROOT / "experiments", package / "experiments")
    assert {cell.path for cell in cells.load_cells()} == {*cells.folder().glob("*/*.toml")}
