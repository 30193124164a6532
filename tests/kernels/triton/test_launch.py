"""A kept launch: what it hands to the compiled kernel, and when Triton's own way is taken instead."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

import triton

import normmatters.kernels.triton
from normmatters.kernels.triton import launch as module
from normmatters.kernels.triton.batch_norm import layout
from normmatters.kernels.triton.launch import Launch


class CudaLauncher:
    """As Triton 3.6's: a C function, and what the Python around it would look after."""

    def __init__(self, calls: list, scratch: int) -> None:
        self.calls = calls
        self.global_scratch_size, self.profile_scratch_size = scratch, 0
        self.launch_cooperative_grid, self.launch_pdl = False, True

    def launch(self, *arguments: Any) -> None:
        self.calls.append(("C", arguments))

    def __call__(self, *arguments: Any) -> None:
        self.calls.append(("Python", arguments))


class Kernel:
    """A kernel that notes who launches it, and compiles to a launcher that does."""

    def __init__(self, scratch: int = 0, *, tensors: int = 2, numbers: int = 1) -> None:
        pointers, others = (f"t{i}_ptr" for i in range(tensors)), (f"number{i}" for i in range(numbers))
        self.arg_names = [*pointers, "rows", "cols", *others, "BLOCK", "EVEN", "OVERLAP"]
        self.__name__ = "kernel"
        self.calls: list = []
        self.run = CudaLauncher(self.calls, scratch)

    def __getitem__(self, grid: tuple[int, int]) -> Any:
        def triton_launches(*arguments: Any, **options: Any) -> Any:
            self.calls.append(("Triton", arguments))
            return SimpleNamespace(run=self.run, function=77, packed_metadata=(4, 1, 0))

        return triton_launches

    @property
    def ways(self) -> list[str]:
        return [way for way, _ in self.calls]


@pytest.fixture(autouse=True)
def one_stream_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 500 + device, raising=False)
    monkeypatch.setattr(module, "can_overlap", lambda device: True)
    monkeypatch.setattr(triton, "__version__", "3.6.0")


def launch_of(kernel: Kernel) -> Launch:
    return Launch(kernel, (8, 3), {"rows": 10, "cols": 20, "BLOCK": 64, "EVEN": True, "unused": 1})


def test_the_second_launch_goes_to_the_compiled_kernel():
    kernel = Kernel()
    launch = launch_of(kernel)
    x, y = torch.zeros(64), torch.zeros(64)
    launch((x, y), (0.5,))
    launch((y, x), (0.25,))
    (first, seen), (second, arguments) = kernel.calls
    assert (first, seen[2:]) == ("Triton", (10, 20, 0.5))
    assert second == "C"
    fixed = (77, False, True, None, None, (4, 1, 0), None, None, None)
    assert arguments == (8, 3, 1, 499, *fixed, y.data_ptr(), x.data_ptr(), 10, 20, 0.25, 64, True, None)


def test_a_pointer_that_is_not_aligned_goes_another_way_and_changes_nothing():
    kernel = Kernel(numbers=0)
    launch = launch_of(kernel)
    x = torch.zeros(64)
    launch((x[1:], x))  # what was compiled for this pointer is not kept
    launch((x, x))
    launch((x, x))
    for tensors in ((x, x[1:]), (x[2:], x[2:]), (x[4:], x)):  # the last one is 16 bytes on
        launch(tensors)
    assert kernel.ways == ["Triton", "Triton", "C", "Triton", "Triton", "C"]


def test_a_whole_number_is_compiled_as_any_other():
    """A momentum of 1 or an eps of 0 may come as integers. Compiled as such, the kernel would not take the next one."""
    kernel = Kernel(tensors=1, numbers=2)
    launch = launch_of(kernel)
    x = torch.zeros(64)
    launch((x,), (1, 0))
    ((_, seen),) = kernel.calls
    assert [type(number) for number in seen[1:]] == [int, int, float, float]
    assert seen[1:] == (10, 20, 1.0, 0.0)


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
@pytest.mark.parametrize("replaced", [False, True])
def test_while_somebody_listens_triton_launches(name, replaced, monkeypatch):
    kernel = Kernel(tensors=1, numbers=0)
    launch = launch_of(kernel)
    tensors = (torch.zeros(64),)
    launch(tensors)
    launch(tensors)
    runtime, listener = triton.knobs.runtime, lambda *_: None
    if replaced:
        with monkeypatch.context() as patch:
            patch.setattr(runtime, name, listener)
            launch(tensors)
    else:
        getattr(runtime, name).add(listener)
        launch(tensors)
        getattr(runtime, name).remove(listener)
    launch(tensors)
    assert kernel.ways == ["Triton", "C", "Triton", "C"]


@pytest.mark.parametrize(("version", "scratch"), [("3.6.0", 16), ("3.7.0", 0)])
def test_a_launcher_that_is_not_known_is_called_as_it_is(version, scratch, monkeypatch):
    """Where the kernel wants scratch memory, or Triton's launcher may be another one."""
    monkeypatch.setattr(triton, "__version__", version)
    kernel = Kernel(scratch, tensors=1, numbers=0)
    launch = launch_of(kernel)
    x = torch.zeros(64)
    launch((x,))
    launch((x,))
    way, arguments = kernel.calls[1]
    assert way == "Python"
    assert arguments == (8, 3, 1, 499, 77, (4, 1, 0), None, None, None, x.data_ptr(), 10, 20, 64, True, None)


def test_each_device_has_its_own_compiled_kernel_and_stream():
    class OnDevice1(Tensor):
        def get_device(self) -> int:
            return 1

    kernel = Kernel(tensors=1, numbers=0)
    launch = launch_of(kernel)
    here, there = torch.zeros(64), torch.zeros(64).as_subclass(OnDevice1)
    for tensor in (here, there, here, there):
        launch((tensor,))
    assert kernel.ways == ["Triton", "Triton", "C", "C"]
    assert [arguments[3] for _, arguments in kernel.calls[2:]] == [499, 501]


def test_plans_are_kept_for_so_many_shapes_and_no_more():
    """Also the caches by shape that are still to be written: only caches by device may be without a bound."""
    by_device = {"can_overlap", "multiprocessors"}
    found = {}
    package = normmatters.kernels.triton
    for one in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        for value in vars(importlib.import_module(one.name)).values():
            if hasattr(value, "cache_parameters"):
                found[f"{value.__module__}.{value.__qualname__}"] = value.cache_parameters()["maxsize"]
    assert len(found) > 10
    assert {name.rpartition(".")[2] for name, most in found.items() if most is None} <= by_device
    for n in range(normmatters.kernels.MAX_PLANS + 50):
        assert layout.view_of_shape((2, n + 1, 3), True) == (2, 3 * (n + 1), 3)
    assert layout.view_of_shape.cache_info().currsize == normmatters.kernels.MAX_PLANS
    layout.view_of_shape.cache_clear()


def test_kernels_share_values_and_tensors_by_name():
    first, second = Kernel(numbers=0), Kernel(tensors=1)
    launches = module.Launches(launch_of(first), launch_of(second))
    x, y = torch.zeros(64), torch.zeros(64)
    for _ in range(2):
        launches({"t1_ptr": y, "t0_ptr": x}, (0.5,))
    assert first.calls[0] == ("Triton", (x, y))
    assert second.calls[0] == ("Triton", (x, 10, 20, 0.5))
    assert first.calls[1][1][-7:] == (x.data_ptr(), y.data_ptr(), 10, 20, 64, True, None)
    assert second.calls[1][1][-7:] == (x.data_ptr(), 10, 20, 0.5, 64, True, None)


def test_a_signature_in_another_order_is_refused():
    kernel = Kernel(numbers=2)
    kernel.arg_names.insert(0, "number2")
    with pytest.raises(TypeError, match="tensors first"):
        launch_of(kernel)


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_tensors_without_memory_launch_nothing(kind):
    kernel = Kernel(tensors=1, numbers=0)
    with FakeTensorMode() if kind == "fake" else contextlib.nullcontext():
        launch_of(kernel)((torch.empty(64, device="cpu" if kind == "fake" else "meta"),))
    assert kernel.calls == []
