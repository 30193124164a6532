"""Activation checkpointing runs the forward pass twice; the batch must be counted once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from normmatters.nn import L1BatchNorm2d, LpBatchNorm2d, RangeBatchNorm2d, TopKBatchNorm2d


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_statistics_are_updated_once(use_reentrant: bool, momentum: float | None) -> None:
    block = nn.Sequential(
        nn.Conv2d(2, 3, 1),
        L1BatchNorm2d(3, momentum=momentum, act="relu"),
        nn.Conv2d(3, 3, 1),
        TopKBatchNorm2d(3, k=4, momentum=momentum),
        RangeBatchNorm2d(3, momentum=momentum),
        LpBatchNorm2d(3, p=2, momentum=momentum),  # by torch's own, whose node keeps the running statistics too
    ).double()
    plain = copy.deepcopy(block)
    for _ in range(2):
        x = torch.randn(4, 2, 3, 3, dtype=torch.float64)
        mine, reference = (x.clone().requires_grad_() for _ in range(2))
        y, expected = checkpoint(block, mine, use_reentrant=use_reentrant), plain(reference)
        torch.testing.assert_close(y, expected)
        y.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(mine.grad, reference.grad)
    for (key, value), expected_value in zip(block.state_dict().items(), plain.state_dict().values()):
        torch.testing.assert_close(value, expected_value, msg=key)
    assert block[1].num_batches_tracked == 2
    for a, b in zip(block.parameters(), plain.parameters()):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("p", [1, 2, 1.5, "mean"])
def test_selective_checkpointing(p: float | str, momentum: float | None) -> None:
    """It knows what was kept by counting operators: a recomputed pass with fewer would get what is another's."""
    bn = LpBatchNorm2d(3, p=p, momentum=momentum)
    plain = copy.deepcopy(bn)
    x = torch.randn(4, 3, 2, 2)
    mine, reference = (x.clone().requires_grad_() for _ in range(2))
    y = checkpoint(
        lambda x: (bn(x).sin() * 3 + 1).cos(),
        mine,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts([torch.ops.aten.mul.Tensor, torch.ops.aten.add.Tensor]),
    )
    expected = (plain(reference).sin() * 3 + 1).cos()
    for output in (y, expected):
        output.sum().backward()
    torch.testing.assert_close(mine.grad, reference.grad)
    for value, expected_value in zip(bn.buffers(), plain.buffers()):
        torch.testing.assert_close(value, expected_value)


def test_a_forward_pass_after_a_backward_pass_counts() -> None:
    bn = L1BatchNorm2d(3)
    for count in (1, 2):
        bn(torch.randn(4, 3, 2, 2, requires_grad=True)).sum().backward()
        assert bn.num_batches_tracked == count
