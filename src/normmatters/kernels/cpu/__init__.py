"""The native CPU kernels: a C++ library without PyTorch's headers, opened by ctypes, on PyTorch's own threads.

The build (CMakeLists.txt) makes one library for each instruction set. :func:`library` opens the best one that the
processor can run, once per process. Without a compiler the package is installed without them: then :func:`library` is
None, :func:`why_not` says why, and the plain PyTorch path serves.

Environment:
    NORMMATTERS_CPU_ISA: ``baseline``, ``avx2`` or ``avx512`` forces an instruction set, ``off`` uses none. Any other
        value is a ValueError at import.
    NORMMATTERS_CPU_LIBRARY: a folder with libraries of another build, for example one with sanitizers.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
from pathlib import Path
from typing import Any

import torch

__all__ = ["DTYPES", "Library", "library", "warn_if_missing", "why_not"]

logger = logging.getLogger("normmatters.kernels")

VERSION = 7  # of the C interface; CMakeLists.txt reads it here

#: The dtypes of the kernels and their numbers in C (DType in native/common.h).
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}

#: By what `nm_processor` returns.
_ISAS = ("baseline", "avx2", "avx512")

_C_TYPES: dict[str, Any] = {"s": ctypes.c_char_p, "p": ctypes.c_void_p, "i": ctypes.c_int64, "d": ctypes.c_double}


class Library:
    """An opened library. ``isa`` is the instruction set that it was compiled for."""

    def __init__(self, path: Path, isa: str) -> None:
        self.path, self.isa = path, isa
        self._library = ctypes.CDLL(str(path))
        version = self.function("nm_version", "", "i")()
        if version != VERSION:
            raise OSError(f"{path} has version {version} of the interface, expected {VERSION}: build it again")

    def function(self, name: str, arguments: str, returns: str = "") -> ctypes._NamedFuncPointer:
        """A function of the library; ``p`` is a pointer, ``s`` packed bytes, ``i`` an int64, ``d`` a double.

        Pointers are ``tensor.data_ptr()``, or None for NULL.
        """
        function = self._library[name]
        function.argtypes = [_C_TYPES[letter] for letter in arguments]
        function.restype = _C_TYPES[returns] if returns else None
        return function


def library() -> Library | None:
    """The library for this processor, or None: see :func:`why_not`."""
    return _load()[0]


def why_not() -> str:
    """Why there is no native library in this process; empty if there is one.

    Example::

        >>> bool(why_not()) == (library() is None)
        True
    """
    return _load()[1]


# A constant to the compiler, which would otherwise trace into the cache of ``_load``, and warn.
why_not._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def warn_if_missing() -> None:
    """Say once per process if the library is missing by accident."""
    if library() is None and _forced() != "off":
        logger.warning("normmatters runs without its native CPU kernels, which is slower: %s", why_not())


def _forced() -> str:
    return os.environ.get("NORMMATTERS_CPU_ISA", "").lower()


@functools.cache
def _load() -> tuple[Library | None, str]:
    forced = _forced()
    if forced == "off":
        return None, "NORMMATTERS_CPU_ISA=off switches the native CPU kernels off"
    if forced and forced not in _ISAS:
        raise ValueError(f"NORMMATTERS_CPU_ISA must be one of {', '.join(_ISAS)} or off, got {forced!r}")
    folder = Path(os.environ.get("NORMMATTERS_CPU_LIBRARY") or Path(__file__).parent)
    present = [isa for isa in _ISAS if (folder / f"native_{isa}.so").exists()]
    if "baseline" not in present:
        reason = "was there a C++ compiler at installation?"
        return None, f"the native kernels are not built: {folder} has no native_baseline.so ({reason})"
    try:
        threads = _torch_threads()
        baseline = Library(folder / "native_baseline.so", "baseline")
        supported = _ISAS[: 1 + baseline.function("nm_processor", "", "i")()]
        if forced and forced not in supported:
            return None, f"NORMMATTERS_CPU_ISA={forced}, but this processor supports {', '.join(supported)}"
        if forced and forced not in present:
            return None, f"NORMMATTERS_CPU_ISA={forced}, but the installation has {', '.join(present)}"
        isa = forced or [isa for isa in present if isa in supported][-1]
        chosen = baseline if isa == "baseline" else Library(folder / f"native_{isa}.so", isa)
        chosen.function("nm_init", "pp")(*threads)
    except (OSError, AttributeError) as error:
        return None, f"the native library could not be loaded: {error}"
    return chosen, ""


def _torch_threads() -> list[ctypes.c_void_p]:
    """PyTorch's stable C functions for its thread pool."""
    suffix = "dylib" if platform.system() == "Darwin" else "so"
    handle = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{suffix}"))
    return [ctypes.cast(handle[name], ctypes.c_void_p) for name in ("torch_parallel_for", "torch_get_num_threads")]
