"""One training step of a module, and the same step as a CUDA graph; GPU tests compare such steps to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


def step(
    module: nn.Module, x: Tensor | list[Tensor], g: Tensor, call: Callable[..., Any] | None = None
) -> list[Tensor]:
    """The output, all gradients and all buffers after one step; ``call`` runs the module, if it does not itself."""
    inputs = [t.detach().requires_grad_() for t in _listed(x)]
    module.zero_grad()
    y = (module if call is None else call)(*inputs)
    y.backward(g)
    return [y.detach(), *(t.grad for t in (*inputs, *module.parameters())), *(b.clone() for b in module.buffers())]


def equal(ours: Iterable[Tensor], reference: Iterable[Tensor]) -> None:
    """Raise unless every tensor is the other side's, to the bit."""
    for i, (mine, theirs) in enumerate(zip(ours, reference, strict=True)):
        assert torch.equal(mine, theirs), f"tensor {i} differs by {(mine - theirs).abs().max()}"


def check_cuda_graph(module: nn.Module, data: Callable[[], tuple[Tensor | list[Tensor], Tensor]]) -> None:
    """Raise unless a captured step, replayed with new data, is the eager step. ``data`` makes inputs and a gradient."""
    eager = copy.deepcopy(module)
    x, g = data()
    inputs = [t.requires_grad_() for t in _listed(x)]
    leaves = [*inputs, *module.parameters()]

    def once() -> tuple[Tensor, ...]:
        y = module(*inputs)
        return y.detach(), *torch.autograd.grad(y, leaves, g)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        once()  # compiles the kernels, which a capture could not
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = once()
    module.load_state_dict(eager.state_dict())
    for _ in range(3):
        fresh, fresh_g = data()
        with torch.no_grad():
            for old, new in zip(inputs, _listed(fresh), strict=True):
                old.copy_(new)
        g.copy_(fresh_g)
        graph.replay()
        equal([*outputs, *module.buffers()], step(eager, fresh, fresh_g))


def _listed(x: Tensor | list[Tensor]) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else x
