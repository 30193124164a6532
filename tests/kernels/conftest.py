"""The kernels' tests run on a GPU, or, without one, on CPU tensors through Triton's interpreter."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from normmatters.kernels import backends
from support.quick_interpreter import quicken

if not torch.cuda.is_available():
    quicken()


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the dispatcher send CPU tensors to the kernels; everywhere else they take the equations."""
    monkeypatch.setattr(backends, "INTERPRETED", not torch.cuda.is_available())


@pytest.fixture
def fresh_seed() -> None:
    """Other numbers every time: what fails must fail by its tolerance, not by its seed."""
    print(f"seed {torch.seed()}")


def _batch_norms() -> tuple[ModuleType, ...]:
    """The modules that cut tensors into tiles, and keep plans."""
    names = ("gradient", "normalize", "saved", "small", "statistics")
    modules = (*(f"batch_norm_{name}" for name in names), "twin_batch_norm")
    # Here, for Triton is not everywhere.
    return tuple(importlib.import_module(f"normmatters.kernels.triton.{name}") for name in modules)


def _forget_plans() -> None:
    for module in _batch_norms():
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


@pytest.fixture
def fresh_plans() -> Iterator[None]:
    """No plan from before the test's own settings, and none left behind."""
    _forget_plans()
    yield
    _forget_plans()


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch, fresh_plans: None) -> None:
    """Tiles of 8 rows and 16 columns and at most 2 programs down the rows: small tensors meet every loop and edge."""

    def cut(whole):
        def tiling_of(view, itemsize, *programs):
            tiling = whole(view, itemsize, *programs)
            block_c, block_r = min(tiling.block_c, 16), min(tiling.block_r, 2)
            tiles = -(-view.code_rows // block_r)
            return tiling._replace(
                block_c=block_c, block_r=block_r, group=min(tiling.group, block_c), tiles=tiles, splits=min(tiles, 2)
            )

        return tiling_of

    for module in _batch_norms():
        for name in {"tiling_of", "apply_tiling_of"} & vars(module).keys():
            monkeypatch.setattr(module, name, cut(getattr(module, name)))
