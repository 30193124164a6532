"""The native CPU library is found, built for this processor, and converts dtypes as PyTorch does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from normmatters.kernels import cpu

needs_library = pytest.mark.skipif(cpu.library() is None, reason=cpu.why_not())


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes_convert_as_in_pytorch(dtype: torch.dtype) -> None:
    convert = cpu.library().function("nm_convert", "ppiii")
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    values = every.view(dtype) if dtype.itemsize == 2 else torch.randn(2**16)
    wide = torch.empty(values.numel())
    convert(values.data_ptr(), wide.data_ptr(), values.numel(), cpu.DTYPES[dtype], 1)
    torch.testing.assert_close(wide, values.float(), rtol=0, atol=0, equal_nan=True)

    between = torch.cat([wide, wide * (1 + 2.0**-9), wide * (1 + 2.0**-12), wide.nextafter(torch.tensor(9e9))])
    powers = torch.randn(10007) * 10.0 ** torch.randint(-45, 39, (10007,))
    wide = torch.cat([between, powers])
    narrow = torch.empty(wide.numel(), dtype=dtype)
    convert(narrow.data_ptr(), wide.data_ptr(), wide.numel(), cpu.DTYPES[dtype], 0)
    torch.testing.assert_close(narrow, wide.to(dtype), rtol=0, atol=0, equal_nan=True)


def _in_process(code: str, fails: bool = False, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode != 0) == fails, done.stderr
    return done.stdout + done.stderr


# It warns where the library is missing by accident; then the doctor speaks.
WARN = "from normmatters.kernels import cpu; cpu.warn_if_missing(); cpu.warn_if_missing(); "
DOCTOR = WARN + "import sys; sys.argv = ['normmatters', 'doctor', '--env']; from normmatters.cli import main; main()"


def test_an_instruction_set_can_be_forced() -> None:
    """The doctor says which one serves, or why none does."""
    pytest.importorskip("typer")
    if cpu.library() is not None:
        assert "native kernels (baseline" in _in_process(DOCTOR, NORMMATTERS_CPU_ISA="baseline")
    off = _in_process(DOCTOR, NORMMATTERS_CPU_ISA="off")
    assert "NORMMATTERS_CPU_ISA=off" in off
    assert "native CPU kernels, which is slower" not in off
    expected = "ValueError: NORMMATTERS_CPU_ISA must be one of baseline, avx2, avx512 or off, got 'sse'"
    assert expected in _in_process(WARN, fails=True, NORMMATTERS_CPU_ISA="sse")
    said = _in_process("from normmatters_command import main; main()", fails=True, NORMMATTERS_CPU_ISA="sse")
    assert said.strip() == expected.replace("ValueError", "Error")


FIRST = """
import torch, normmatters as nm
x = torch.randn(4, 8)
for layer in ({}):
    layer(x)
"""
LAYER_NORMS = "nm.L1LayerNorm(8), nm.L1RMSNorm(8), nm.L1LayerNorm(8)"
BATCH_NORMS = "nm.L1BatchNorm1d(8), nm.LpBatchNorm1d(8, 2)"


@pytest.mark.parametrize("code", [WARN, FIRST.format(LAYER_NORMS), FIRST.format(BATCH_NORMS)])
def test_a_missing_library_is_reported_once(code, tmp_path) -> None:
    """By the first norm in training, of whatever kind."""
    said = _in_process(code, NORMMATTERS_CPU_LIBRARY=str(tmp_path))
    assert said.count("native CPU kernels, which is slower") == 1
    if code is not WARN:
        for choice in ({"NORMMATTERS_CPU_ISA": "off"}, {"NORMMATTERS_KERNELS": "0"}):
            assert "slower" not in _in_process(code, NORMMATTERS_CPU_LIBRARY=str(tmp_path), **choice)


def test_a_switch_turns_all_kernels_off() -> None:
    """The optimizers' too, whose results say so by other roundings alone."""
    code = """
import torch
from normmatters.kernels.cpu import optimizer_rows as rows
from normmatters.optim import AngularSGD, channels
w = torch.nn.Parameter(torch.randn(4, 5))
w.grad = torch.randn(4, 5)
rows.RotationPlan.__init__ = None  # who makes a plan fails
AngularSGD([w], angle=0.1).step()
print(rows.ROTATED, rows.MEASURED, rows.STEPPED)
"""
    assert _in_process(code, NORMMATTERS_KERNELS="0").strip() == "() () ()"


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cmake") is None, reason="needs CMake and Linux")
@pytest.mark.parametrize("system", ["Linux", "Darwin"])
def test_what_is_linked_statically(system, tmp_path) -> None:
    """Clang on macOS, which has no static libgcc, refuses the flag."""
    root = Path(__file__).parents[3]
    toolchain = tmp_path / "toolchain.cmake"
    toolchain.write_text(f"set(CMAKE_SYSTEM_NAME {system})\nset(CMAKE_CXX_COMPILER_WORKS TRUE)\n")
    done = subprocess.run(
        ["cmake", "-S", root, "-B", tmp_path / "build", f"-DCMAKE_TOOLCHAIN_FILE={toolchain}"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    links = [path.read_text() for path in (tmp_path / "build").rglob("link.txt")]
    flags = "\n".join(links) or "\n".join(path.read_text() for path in (tmp_path / "build").glob("*.ninja"))
    assert flags
    assert ("-static-libgcc" in flags) == (system == "Linux")
