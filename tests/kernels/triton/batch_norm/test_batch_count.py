"""num_batches_tracked is raised by the kernel that moves the running statistics, and by nobody else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("triton")

from normmatters.nn.batchnorm import L1BatchNorm2d, LpBatchNorm2d
from support import called
from support.batch_norm_cases import DEVICE, KINDS, LAYOUTS, made
from support.pooled_cases import PooledNorm

SHAPE = (5, 3, 2, 3)


def fresh(norm: nn.Module) -> nn.Module:
    """``norm`` with a count that nothing has changed yet."""
    norm.num_batches_tracked = torch.zeros((), dtype=torch.int64, device=DEVICE)
    return norm


def counted(norm: nn.Module) -> tuple[int, bool]:
    """The count, and whether PyTorch raised it: its own operators mark what they change."""
    count = norm.num_batches_tracked
    return int(count), count._version > 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_counts(kind, layout):
    p, k = KINDS[kind]
    norm = fresh(LpBatchNorm2d(3, p, k=k, device=DEVICE))
    for _ in range(3):
        norm(made(SHAPE, layout))
    assert counted(norm) == (3, False)
    norm.eval()(made(SHAPE, layout))
    assert counted(norm) == (3, False)


def test_more_channels_than_a_program_has():
    """Of many programs one counts."""
    norm = fresh(L1BatchNorm2d(200, device=DEVICE))
    norm(made((2, 200, 2, 2), "channels_last"))
    assert counted(norm) == (1, False)


@pytest.mark.parametrize("kind", [L1BatchNorm2d, PooledNorm])
def test_a_count_that_no_kernel_takes(kind):
    norm = fresh(kind(3, act="relu", device=DEVICE))
    norm.num_batches_tracked = norm.num_batches_tracked.int()
    norm(made(SHAPE, "channels_last"))
    assert counted(norm) == (1, True)


def test_without_running_statistics_of_its_own():
    count = torch.zeros((), dtype=torch.int64, device=DEVICE)
    x = made(SHAPE, "channels_last")
    for training in (True, False):
        running = [torch.ones(3, device=DEVICE) if not training else None] * 2
        called.batch_norm(x, *running, None, None, training, 0.1, 1e-5, num_batches_tracked=count)
    assert count == 2  # whoever hands it over wants it raised


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cumulative_average(layout):
    norm = fresh(L1BatchNorm2d(3, momentum=None, device=DEVICE))
    batches = [made(SHAPE, layout) for _ in range(3)]
    for x in batches:
        norm(x)
    assert counted(norm) == (3, False)
    torch.testing.assert_close(norm.running_mean, torch.stack(batches).mean((0, 1, 3, 4)))


def test_a_call_that_fails_counts_nothing():
    norm = fresh(L1BatchNorm2d(3, device=DEVICE))
    with pytest.raises(ValueError, match="residual must have the input's shape"):
        norm(made(SHAPE, "contiguous"), made((5, 3, 2, 2), "contiguous"))
    assert counted(norm) == (0, False)


@pytest.mark.parametrize("kind", [L1BatchNorm2d, PooledNorm])
def test_compiled_counts_by_itself(kind):
    norm = fresh(kind(3, act="relu", device=DEVICE))
    compiled = torch.compile(norm, backend="eager", fullgraph=True)
    for _ in range(2):
        compiled(made(SHAPE, "channels_last"))
    assert counted(norm) == (2, True)
