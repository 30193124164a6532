"""The kernels' tests run on a GPU, or, without one, on CPU tensors through Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

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


@pytest.fixture
def fresh_plans() -> Iterator[None]:
    """No plan from before the test's own settings, and none left behind."""
    from normmatters.kernels.triton.launch import forget_plans  # here, for Triton is not everywhere

    forget_plans()
    yield
    forget_plans()


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch, fresh_plans: None) -> None:
    """Tiles of 8 rows and 16 columns and at most 2 programs down the rows: small tensors meet every loop and edge."""
    from normmatters.kernels.triton.batch_norm import layout

    def cut(whole):
        def tiling_of(view, itemsize, *programs):
            tiling = whole(view, itemsize, *programs)
            block_c, block_r = min(tiling.block_c, 16), min(tiling.block_r, 2)
            tiles = -(-view.code_rows // block_r)
            return tiling._replace(
                block_c=block_c, block_r=block_r, group=min(tiling.group, block_c), tiles=tiles, splits=min(tiles, 2)
            )

        return tiling_of

    monkeypatch.setattr(layout, "apply_tiling_of", cut(layout.apply_tiling_of))
    monkeypatch.setattr(layout, "tiling_of", cut(layout.tiling_of))
