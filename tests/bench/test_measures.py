"""Passes, memory and the check itself; and that the peers are what they say."""

from __future__ import annotations

import math
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from normmatters import provenance
from normmatters.bench import check, harness, layernorm, peers, resnet50, timing
from normmatters.functional import lp_layer_norm
from normmatters.surgery import convert
from normmatters.surgery.report import ConversionReport

CPU = torch.device("cpu")


def test_a_copy_is_two_passes() -> None:
    size, seconds = 2**30, 0.5e-3
    bandwidth = 2 * size / seconds  # as memory_bandwidth counts: each byte is read and written
    assert harness.passes(seconds * 1e3, bandwidth, size) == 2
    assert harness.passes(seconds * 1e3, bandwidth, size // 4) == 8


def test_memory_bandwidth_counts_bytes_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "time_calls", lambda calls, device: timing.Timing(2.0, 3.0, "clock"))
    assert timing.memory_bandwidth(CPU, 1000) == 2 * 1000 / 2e-3


def test_bandwidth_is_that_of_a_kernel_not_of_the_drivers_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def once(calls: Any, device: torch.device) -> timing.Timing:
        calls[0]()
        return timing.Timing(1.0, 1.0, "clock")

    monkeypatch.setattr(timing, "time_calls", once)
    monkeypatch.setattr(torch, "neg", lambda source, out: done.append(f"{source.dtype} {source.numel()}"))
    timing.memory_bandwidth(CPU, 4096)
    assert done == ["torch.float32 1024"]


def test_the_median_is_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])

    def call(seconds: float) -> None:
        clock[0] += seconds

    found = timing.time_calls([lambda: call(0.001), lambda: call(0.003)], CPU)
    assert math.isclose(found.ms, 2.0)  # milliseconds, averaged over the calls that take turns


def test_memory_counts_what_autograd_holds_but_for_output_and_parameters() -> None:
    x = torch.randn(10, requires_grad=True)
    weight = torch.randn(10, requires_grad=True)

    def forward() -> torch.Tensor:
        return (x * weight).exp().exp()  # holds x, weight, exp(x * weight) and the output

    found = timing.memory(forward, lambda output: torch.autograd.grad(output, x, output), [weight])
    assert found == timing.Memory(saved=2 * 10 * 4, allocated=None, peak=None)
    assert timing.memory(forward, lambda output: None, []).saved == 3 * 10 * 4


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_data_have_no_ties_among_the_extremes(dtype: torch.dtype, last: bool) -> None:
    # Of 16384 values the mean is known to 0.01; extremes of opposite signs are 1/8 apart but for twice that.
    data = check.BatchNormData.random((64, 5, 16, 16), dtype, CPU, last=last, residual=True)
    layout = torch.channels_last if last else torch.contiguous_format
    assert all(t.is_contiguous(memory_format=layout) for t in (data.x, data.g, data.copies().x, data.residual))
    channels = data.x.detach().double().transpose(0, 1).flatten(1)
    far = (channels - channels.mean(1, keepdim=True)).abs().sort(1, descending=True).values
    assert ((far[:, :11] - far[:, 1:12]) > 0.03).all()
    assert channels.max(1).values.min() > 5.5
    assert channels.min(1).values.max() < -4.5
    assert (channels.sort(1).values.diff(dim=1)[:, [0, -1]] > 0).all()


@pytest.mark.parametrize("residual", [False, True])
def test_gradients_do_not_depend_on_which_side_of_the_relu_rounding_falls(residual: bool) -> None:
    data = check.BatchNormData.random((16, 4, 8, 8), torch.bfloat16, CPU, last=True, residual=residual)
    reference = check.BatchNormReference.of(data, "l1")
    near = reference.before_relu.abs() < 8 * torch.finfo(torch.bfloat16).eps
    assert near.any()
    assert (reference.g[near] == 0).all()
    assert (reference.g != 0).double().mean() > 0.75


@pytest.mark.parametrize("residual", [False, True])
def test_lean_codes_pass_where_lean_and_fail_where_exact(residual: bool) -> None:
    """A dγ off by a third of √n·rms(g) is what 4 bits give: right for lean with a residual, wrong for all else."""
    data = check.BatchNormData.random((16, 4, 8, 8), torch.float16, CPU, last=True, residual=residual)
    reference = check.BatchNormReference.of(data, "l1")
    open_g = (reference.g * (reference.before_relu > 0)).double()
    reference.dweight += 0.33 * open_g.square().sum((0, 2, 3)).sqrt()
    module = peers.NaiveL1BatchNormReLU(4)
    with torch.no_grad():
        module.norm.weight.copy_(data.weight)
        module.norm.bias.copy_(data.bias)
    with pytest.raises(harness.Wrong, match=r"^dweight is off by [0-9.]+ × its tolerance$"):
        check.check_batch_norm(module, module.norm, data, reference, lean=False)
    module.norm.reset_running_stats()
    if residual:
        assert 0.1 < check.check_batch_norm(module, module.norm, data, reference, lean=True) < 0.7
    else:
        with pytest.raises(harness.Wrong):
            check.check_batch_norm(module, module.norm, data, reference, lean=True)


def test_lean_codes_may_be_off_by_what_they_clip_where_few_elements_are_open() -> None:
    """A channel far below zero keeps its large x̂ open and little else: their codes' errors are most of dγ's."""
    torch.manual_seed(0)
    data = check.BatchNormData.random((16, 4, 8, 8), torch.float16, CPU, last=True, residual=True)
    data.bias.fill_(-2.0)
    reference = check.BatchNormReference.of(data, "l1")
    open_g = (reference.g * (reference.before_relu > 0)).double()
    x_hat = (data.x.detach().double() - reference.mean.view(-1, 1, 1)) / (
        math.sqrt(math.pi / 2)
        * (data.x.detach().double() - reference.mean.view(-1, 1, 1)).abs().mean((0, 2, 3), keepdim=True)
    )
    codes = (0.4 * ((x_hat / 0.4).floor() + 0.5)).clamp(-2.6, 2.6)
    spread = (open_g * (x_hat - codes)).square().sum((0, 2, 3)).sqrt()
    assert (spread > 0.3 * open_g.square().sum((0, 2, 3)).sqrt()).all()  # far from a step's 0.4/√12
    module = peers.NaiveL1BatchNormReLU(4)
    with torch.no_grad():
        module.norm.weight.copy_(data.weight)
        module.norm.bias.copy_(data.bias)
    exact = reference.dweight
    reference.dweight = exact + 5 * spread
    assert 0.8 < check.check_batch_norm(module, module.norm, data, reference, lean=True) < 0.85
    for shift in (7 * spread, -7 * spread):
        module.norm.reset_running_stats()
        reference.dweight = exact + shift
        with pytest.raises(harness.Wrong, match=r"dweight is off by 1\.1"):
            check.check_batch_norm(module, module.norm, data, reference, lean=True)
    module.norm.reset_running_stats()
    reference.dweight, reference.dbias = exact, reference.dbias + spread  # no code is in dβ
    with pytest.raises(harness.Wrong, match="dbias is off"):
        check.check_batch_norm(module, module.norm, data, reference, lean=True)


def test_a_channel_that_is_closed_everywhere_is_right() -> None:
    """Its gradients are 0, and so are their tolerances."""
    data = check.BatchNormData.random((4, 4, 6, 6), torch.float32, CPU, last=False, residual=False)
    data.bias[1] = -9.0
    reference = check.BatchNormReference.of(data, "l1")
    assert reference.dweight[1] == 0
    module = peers.NaiveL1BatchNormReLU(4)
    with torch.no_grad():
        module.norm.weight.copy_(data.weight)
        module.norm.bias.copy_(data.bias)
    assert check.check_batch_norm(module, module.norm, data, reference, lean=False) < 1


def test_a_result_that_is_not_a_number_is_wrong() -> None:
    data = check.RowNormData.random(4, 16, torch.float32, CPU)
    reference = check.row_norm_reference(data, 1, rms=False, eps=1e-5)
    y = lp_layer_norm(data.x, [16], data.weight, data.bias, 1e-5, p=1)
    results = [y, *torch.autograd.grad(y, (data.x, data.weight, data.bias), data.g)]
    assert check.check_row_norm(results, reference, data) < 1
    for index, name in enumerate(("output", "dx", "dweight", "dbias")):
        damaged = [t.detach().clone() for t in results]
        damaged[index].view(-1)[3] = math.nan
        with pytest.raises(harness.Wrong, match=f"^{name} is off by nan"):
            check.check_row_norm(damaged, reference, data)


def test_the_plain_resnet50_is_torchvisions_and_converts_whole() -> None:
    with torch.device("meta"):
        model = peers.ResNet50()
    assert sum(p.numel() for p in model.parameters()) == 25_557_032  # torchvision's count
    report = ConversionReport()
    small = peers.ResNet50(depths=(1, 2), width=4, classes=3)
    x = torch.randn(2, 3, 32, 32)
    expected = small(x)
    converted = convert(small, "l2", fuse=True, report=report)
    torch.testing.assert_close(converted(x), expected, rtol=1e-4, atol=1e-5)
    # The stem's, three norms of each of three blocks, and the two shortcuts', which no ReLU follows.
    assert (len(report.converted), len(report.fused)) == (1 + 3 * 3 + 2, 1 + 3 * 3)


def test_the_naive_norm_trains_by_the_equation_and_evaluates_by_its_statistics() -> None:
    data = check.BatchNormData.random((8, 3, 5, 5), torch.float32, CPU, last=False, residual=False)
    norm = peers.NaiveL1BatchNorm2d(3)
    y = norm(data.x)
    reference = check.BatchNormReference.of(data, "l1")
    torch.testing.assert_close(norm.running_mean, reference.running[0].float())
    torch.testing.assert_close(norm.running_var, reference.running[1].float())
    before = (reference.before_relu - data.bias.view(-1, 1, 1)) / data.weight.view(-1, 1, 1)
    torch.testing.assert_close(y, before.float(), rtol=1e-4, atol=1e-5)


def test_a_peer_that_is_not_installed_is_skipped_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(harness.Skip, match="Liger's kernels are not installed"):
        layernorm.peer("Liger", "liger_kernel.ops.layer_norm", "LigerLayerNormFunction")


def test_quack_has_a_row_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in that has its signature."""
    quack = types.ModuleType("quack.rmsnorm")
    quack.rmsnorm = (
        lambda x, weight=None, bias=None, residual=None, eps=1e-6: nn.functional.rms_norm(  # type: ignore[attr-defined]
            x, x.shape[1:], weight, eps
        )
    )
    monkeypatch.setitem(sys.modules, "quack", types.ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.rmsnorm", quack)
    chosen = harness.Selection.of(["rms_native", "rms_quack"], [layernorm.AXES])
    native, row = layernorm.rows(harness.Setup(CPU, smoke=True, only=chosen))
    assert (native["status"], row["status"]) == ("ok", "ok")
    assert row["ratio"] > 0


def test_the_native_peer_keeps_its_input_alone() -> None:
    module = peers.NativeBatchNormReLU(4)
    x = torch.randn(8, 4, 3, 3, requires_grad=True)
    residual = torch.randn_like(x, requires_grad=True)
    free = [*module.parameters(), *module.buffers()]
    found = timing.memory(lambda: module(x, residual), lambda output: None, free)
    assert found.saved == x.numel() * 4 + 2 * 4 * 4
    assert isinstance(module.norm, nn.BatchNorm2d)
    expected = torch.relu(nn.functional.batch_norm(x, None, None, training=True) + residual)
    torch.testing.assert_close(module(x, residual), expected)


def test_a_checkout_that_code_is_installed_in_is_not_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NORMMATTERS_COMMIT", raising=False)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    installed = tmp_path / ".venv" / "provenance.py"
    installed.parent.mkdir()
    installed.touch()
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "theirs"], check=True)
    monkeypatch.setattr(provenance, "__file__", str(installed))
    assert provenance.commit() is None
    subprocess.run([*git, "add", str(installed)], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "ours"], check=True)
    found = provenance.commit()
    assert found is not None
    assert len(found) == 40


def test_code_without_its_history_may_be_told_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_repository(*args: object, **kwargs: object) -> None:
        raise OSError("git")

    monkeypatch.setenv("NORMMATTERS_COMMIT", "abc123")
    # A checkout that it was copied into says nothing about it.
    assert harness.Setup(CPU).environment["commit"] == "abc123"
    monkeypatch.setattr(provenance.subprocess, "run", no_repository)
    assert harness.Setup(CPU).environment["commit"] == "abc123"
    monkeypatch.delenv("NORMMATTERS_COMMIT")
    assert harness.Setup(CPU).environment["commit"] is None


# Captures that fail ---------------------------------------------------------------------------------------------------


class _NoCapture:
    """Stands in for `timing._capture` where there is no GPU: every second call cannot be captured."""

    def __init__(self) -> None:
        self.tried = 0

    def __call__(self, calls: Any, device: torch.device) -> Any:
        self.tried += 1
        if self.tried % 2 == 0:
            return torch.cuda.CUDAGraph
        try:
            raise RuntimeError("operation not permitted\n when stream is capturing")
        finally:  # as the end of a capture does
            raise RuntimeError("capture invalidated")


@pytest.fixture
def cuda_in_name(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(timing, "_spoiled", {})
    monkeypatch.setattr(timing, "_time_by_events", lambda run, quick: 3.0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", None, raising=False)
    return torch.device("cuda:0")


def test_a_row_says_why_it_has_no_time_of_a_graph(monkeypatch: pytest.MonkeyPatch, cuda_in_name: torch.device) -> None:
    monkeypatch.setattr(timing, "_capture", _NoCapture())
    failed = timing.time_calls([lambda: None], cuda_in_name)
    assert failed.ms == failed.eager_ms == 3.0
    assert failed.graph_ms is None
    assert failed.note == (
        "timed by events, as no graph was captured: operation not permitted when stream is capturing"
    )
    after = timing.time_calls([lambda: None], cuda_in_name)
    assert (after.by, after.graph_ms, after.note) == ("graph", 3.0, "")
    assert timing.Timing(1.0, 1.0, "clock").note == ""


@pytest.mark.parametrize("undone", [True, False])
def test_after_a_capture_that_cannot_be_undone_there_is_none(
    monkeypatch: pytest.MonkeyPatch, cuda_in_name: torch.device, undone: bool
) -> None:
    tried: list[str] = []

    class Broken:
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

        def __enter__(self) -> None:
            tried.append("capture")

        def __exit__(self, *args: object) -> None:
            raise RuntimeError("capture invalidated")

    def undo(*args: Any) -> None:
        tried.append("undo")
        if not undone:
            raise RuntimeError("the generator is stuck")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph", Broken)
    monkeypatch.setattr(timing, "_undo_capture", undo)
    first, second = (timing.time_calls([lambda: None], cuda_in_name) for _ in range(2))
    assert first.note.endswith("captured: capture invalidated")
    if undone:
        assert second.note == first.note
        assert tried == ["capture", "undo"] * 2
    else:
        assert second.note.endswith("an earlier capture failed and could not be undone: the generator is stuck")
        assert tried == ["capture", "undo"]


@pytest.mark.gpu
def test_a_capture_that_fails_does_not_spoil_what_comes_after() -> None:
    device = torch.device("cuda")
    x = torch.rand(2**20, device=device)

    def reads_on_the_host() -> torch.Tensor:
        y = torch.nn.functional.dropout(x)  # random numbers, and memory of the capture
        float(y[0])  # not allowed in a capture
        return y

    with timing.side_stream(device):
        failed = timing.time_calls([reads_on_the_host], device, quick=True)
    assert failed.graph_ms is None
    assert "no graph was captured: " in failed.note
    torch.manual_seed(1)
    expected = torch.rand(4, device=device)  # outside a capture
    torch.manual_seed(1)
    assert torch.equal(torch.rand(4, device=device), expected)
    before = torch.cuda.memory_reserved(device)
    for _ in range(3):
        with timing.side_stream(device):
            assert timing.time_calls([reads_on_the_host], device, quick=True).graph_ms is None
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(device) <= before + 2**22  # nothing is lost
    with timing.side_stream(device):
        fine = timing.time_calls([lambda: torch.nn.functional.dropout(x)], device, quick=True)
    assert fine.graph_ms is not None
    assert not timing._spoiled


def test_steps_are_timed_until_the_host_is_quiet() -> None:
    """At least so many series; more while the best median is far from the fastest step; the best one is given."""
    slow, quiet = [30.0, 36.0, 37.0], [30.1, 30.2, 30.3]

    def given(*series: list[float]) -> tuple[list[float], int]:
        left = list(series)
        return resnet50.best_series(lambda: left.pop(0), (2, 4)), len(series) - len(left)

    assert given(quiet, quiet, slow, slow) == (quiet, 2)
    assert given(slow, slow, quiet, slow) == (quiet, 3)
    assert given(slow, [30.0, 35.0, 37.0], slow, slow) == ([30.0, 35.0, 37.0], 4)
