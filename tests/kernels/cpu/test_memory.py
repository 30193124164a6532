"""Large outputs lie where earlier ones lay that nobody holds any more."""

import gc
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from normmatters import L1BatchNorm2d, L1LayerNorm
from normmatters.kernels.cpu import memory

LARGE = (64, 64, 16, 16)  # 4 MiB of float32


@pytest.fixture(autouse=True)
def nothing_held():
    memory.release_memory()
    yield
    memory.release_memory()


def _address(x) -> int:
    return memory.empty_like(x).data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_sizes_strides_and_dtypes(dtype) -> None:
    x = torch.empty(LARGE, dtype=dtype).to(memory_format=torch.channels_last)
    y = memory.empty_like(x)
    assert (y.shape, y.stride(), y.dtype, y.device) == (x.shape, x.stride(), x.dtype, x.device)
    assert not y._is_view()  # which could not be changed in place where autograd records
    assert y.fill_(3).eq(3).all()


def test_free_memory_is_used_again_and_the_newest_first() -> None:
    x = torch.empty(LARGE)
    first, second = memory.empty_like(x), memory.empty_like(x)
    addresses = first.data_ptr(), second.data_ptr()
    del first, second
    assert (_address(x), _address(x.view(torch.int32))) == (addresses[1], addresses[1])


HOLDERS = {
    "a view": lambda y: y[3:, 2],
    "a detached tensor": lambda y: y.detach(),
    "a storage": lambda y: y.untyped_storage(),
    "an array": lambda y: y.numpy(),
    "a graph": lambda y: torch.ones_like(y).requires_grad_() * y,
    "a capsule": lambda y: torch.utils.dlpack.to_dlpack(y),
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_what_somebody_holds_is_left_alone(hold) -> None:
    x = torch.empty(LARGE)
    y = memory.empty_like(x)
    address, held = y.data_ptr(), hold(y)
    del y
    assert _address(x) != address
    del held
    gc.collect()
    outputs = [memory.empty_like(x) for _ in range(2)]
    assert address in [output.data_ptr() for output in outputs]


def test_a_shared_tensor_has_moved() -> None:
    """To memory that other processes may read; what it held here is free."""
    y = memory.empty_like(torch.empty(LARGE)).fill_(2.0)
    y.share_memory_()
    memory.empty_like(torch.empty(LARGE)).fill_(5.0)
    assert y.eq(2).all()


def test_small_outputs_are_the_allocators() -> None:
    memory.empty_like(torch.empty(100))
    assert memory.held_bytes() == 0


def test_no_more_than_half_again_of_what_was_in_use() -> None:
    """Inputs whose size changes do not fill the memory."""
    least = memory.SMALLEST
    for i in range(50):
        outputs = [memory.empty_like(torch.empty(least + 64 * (i * 3 + j), dtype=torch.uint8)) for j in range(3)]
        del outputs
    assert memory.held_bytes() <= memory.SPARE * 3 * (least + 64 * 150)


def test_a_training_step_maps_nothing_new() -> None:
    """Of the second step on; also where gradients of one size are made while outputs of another are held (lean)."""
    for mode in ("exact", "lean"):
        widths = (64, 32, 16)
        norms = [L1BatchNorm2d(width, act="relu", memory=mode) for width in widths]
        blocks = []
        for _ in range(4):
            x = torch.randn(64, 64, 16, 16, requires_grad=True)
            y = x
            for norm, width in zip(norms, widths):
                y = norm(y[:, :width] * 1.0)
            y.sum().backward()
            del y
            blocks.append({id(block) for sized in memory._blocks.values() for block in sized})
        assert blocks[1] == blocks[2] == blocks[3]
        memory.release_memory()


def test_results_are_those_of_fresh_memory() -> None:
    """Two networks whose outputs take turns in the same memory, and one that keeps its outputs."""
    x = torch.randn(LARGE)
    first, second = L1BatchNorm2d(64), L1LayerNorm(16)
    kept = [first(x), second(x)]
    expected = [y.detach().clone() for y in kept]
    for _ in range(3):
        for y, module in zip(expected, (first, second)):
            assert torch.equal(module(x).detach(), y)
    assert all(torch.equal(y.detach(), e) for y, e in zip(kept, expected))


def test_several_threads() -> None:
    def work(seed: int) -> bool:
        x = torch.full((2**18,), float(seed))
        for _ in range(50):
            y = memory.empty_like(x).copy_(x)
            if not torch.equal(y, x):
                return False
        return True

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(work, range(8)))
    finally:
        sys.setswitchinterval(switch)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_has_memory_of_its_own() -> None:
    x = torch.empty(LARGE)
    y = memory.empty_like(x)
    y.view(-1)[0] = 1.0
    child = os.fork()
    if child == 0:
        y.view(-1)[0] = 2.0
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert y.view(-1)[0] == 1


def test_where_no_memory_is_left_the_allocator_answers(monkeypatch) -> None:
    def full(*_):
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(memory, "mmap", full)
    x = torch.empty(LARGE)
    assert memory.empty_like(x).shape == x.shape
    assert memory.held_bytes() == 0
