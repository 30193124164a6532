"""The tables behind the multi-tensor kernels, and the rotation of rows: on a GPU, or through Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from normmatters.kernels.triton import rows
from normmatters.kernels.triton.rotate_rows import rotate_rows_
from normmatters.optim.multi_tensor import rotate_channel_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")


def matrices(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    made = [torch.randn(shape, device=DEVICE) for shape in shapes]
    return [x.to(memory_format=torch.channels_last) if x.ndim == 4 else x for x in made]


def check_rotation(weights: list[Tensor], directions: list[Tensor], grads: list[Tensor], angle: float) -> None:
    norms = [torch.rand(w.shape[0], device=DEVICE) + 0.5 for w in weights]
    expected = [w.double() for w in weights]
    for w, d, g, norm in zip(expected, directions, grads, norms):
        rotate_channel_(w, d.double(), g.double(), norm.double(), angle)
    rotate_rows_(weights, directions, grads, norms, torch.tensor(angle, device=DEVICE))
    for w, reference in zip(weights, expected):
        # A row of norm 1: √n roundings of its sums, then a few of each element.
        bound = 8 * torch.finfo(torch.float32).eps * (w.numel() / w.shape[0]) ** 0.5
        torch.testing.assert_close(w.double(), reference, rtol=0, atol=bound)


SHAPES: list[tuple[int, ...]] = [(5, 1), (37, 3), (19, 4, 3, 3), (2, 128), (6, 200), (3, 700), (2, 2100), (1, 64)]


@pytest.mark.parametrize("angle", [0.1, -2.0])
def test_rotation_is_the_equation(angle):
    weights, directions, grads = (matrices(SHAPES) for _ in range(3))
    grads[1][4] = 0  # keeps its direction
    directions[5][1] = weights[5][1] * 2  # has no direction to turn to
    check_rotation(weights[1:], directions[1:], grads[1:], angle)


def test_unaligned_tensors():
    flat = torch.randn(3, 81, device=DEVICE)
    weights, directions, grads = ([flat[i, 1:].view(10, 8)] for i in range(3))
    check_rotation(weights, directions, grads, 0.3)


def test_every_row_has_one_task():
    tensors = matrices(SHAPES)
    tables = rows.tables_of(tensors)
    assert tables is rows.tables_of([torch.empty_like(x) for x in tensors])
    assert (tables.rows, tables.numel) == (sum(x.shape[0] for x in tensors), sum(x.numel() for x in tensors))
    lengths, counts, offsets, before = tables.layers.tolist()
    assert lengths == [x.numel() // x.shape[0] for x in tensors]
    covered = {t: torch.zeros(count, dtype=torch.int32) for t, count in enumerate(counts)}
    for wide, tasks in tables.tasks:
        for t, first in tasks.tolist():
            block = next((r for r, longest in rows.TILES if lengths[t] <= longest), 1)
            covered[t][first : first + block] += 1
            assert lengths[t] % wide == 0
            assert offsets[t] % wide == 0
    assert all((count == 1).all() for count in covered.values())
    assert offsets[3] == sum(x.numel() for x in tensors[:3])
    assert before[3] == sum(x.shape[0] for x in tensors[:3])


def test_addresses_follow_the_tensors():
    first, second = torch.zeros(3, device=DEVICE), torch.zeros(3, device=DEVICE)
    assert rows.addresses_of([first], [second]).tolist() == [first.data_ptr(), second.data_ptr()]
    assert rows.addresses_of([second], [first]).tolist() == [second.data_ptr(), first.data_ptr()]
    assert rows.aligned([first], [second])
    assert not rows.aligned([first], [second[1:]])


@pytest.mark.gpu
@needs_gpu
def test_many_address_tables():
    """More than are kept: the oldest go, and the right one is used."""
    for _ in range(rows._MAX_ADDRESS_TABLES + 8):
        tensors = [torch.randn(4, 8, device=DEVICE) for _ in range(3)]
        check_rotation(*([t] for t in tensors), 0.1)
        del tensors
    assert len(rows._addresses) <= rows._MAX_ADDRESS_TABLES


@pytest.mark.gpu
@needs_gpu
def test_a_graph_keeps_its_own_addresses():
    shapes = [(64, 147), (256, 64), (512, 4608)]
    weights, directions, grads = (matrices(shapes) for _ in range(3))
    norms = [torch.ones(w.shape[0], device=DEVICE) for w in weights]
    angle = torch.tensor(0.1, device=DEVICE)
    start = [w.clone() for w in weights]
    rotate_rows_(weights, directions, grads, norms, angle)
    expected = [w.clone() for w in weights]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rotate_rows_(weights, directions, grads, norms, angle)
    for _ in range(2):
        rotate_rows_([w.clone() for w in weights], directions, grads, norms, angle)
        for w, s in zip(weights, start):
            w.copy_(s)
        graph.replay()
        for w, reference in zip(weights, expected):
            assert torch.equal(w, reference)
