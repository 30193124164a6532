"""The native CPU library is found, built for this processor, and converts dtypes as PyTorch does."""

from __future__ import annotations

import os
import subprocess
import sys

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


def _in_process(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@needs_library
def test_an_instruction_set_can_be_forced() -> None:
    code = "from normmatters.kernels import cpu; print(cpu.library() and cpu.library().isa, cpu.why_not())"
    assert _in_process(code, NORMMATTERS_CPU_ISA="baseline").startswith("baseline")
    assert "NORMMATTERS_CPU_ISA" in _in_process(code, NORMMATTERS_CPU_ISA="off")
    assert "'sse'" in _in_process(code, NORMMATTERS_CPU_ISA="sse")


def test_a_missing_library_is_reported_once(tmp_path) -> None:
    code = "from normmatters.kernels import cpu; cpu.warn_if_missing(); cpu.warn_if_missing()"
    assert _in_process(code, NORMMATTERS_CPU_LIBRARY=str(tmp_path)).count("native CPU kernels") == 1
    assert _in_process(code, NORMMATTERS_CPU_ISA="off") == ""


def test_the_doctor_says_which_kernels_run() -> None:
    pytest.importorskip("typer")
    code = "import sys; sys.argv = ['normmatters', 'doctor', '--env']; from normmatters.cli import main; main()"
    assert "NORMMATTERS_CPU_ISA=off" in _in_process(code, NORMMATTERS_CPU_ISA="off")
    if cpu.library() is not None:
        assert "native kernels (baseline" in _in_process(code, NORMMATTERS_CPU_ISA="baseline")
