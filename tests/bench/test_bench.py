"""The smoke run of every benchmark, what a wrong or failing kernel does to it, and the choice of rows."""

from __future__ import annotations

import copy
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from normmatters import bench
from normmatters.bench import __main__ as command
from normmatters.bench import cpu, harness, layers, optim, peers, resnet50, roofline, timing, warmup, weightnorm
from normmatters.kernels import dispatch
from normmatters.norm import Norm, RunningStats
from normmatters.optim import channel_norms

TIMED = {"error", "fwd_ms", "bwd_ms", "eager_fwd_ms", "eager_bwd_ms", "timed_by", "ratio"}
MEMORY = {"saved_bytes", "saved_share", "allocated_bytes", "peak_bytes"}
STEP = {"error", "ms", "fastest_ms", "graph_ms", "after_forward_bytes", "peak_bytes"}
FIELDS = {
    "layers": TIMED | MEMORY | {"dtype", "layout", "form", "size", "tensor_bytes"},
    "cpu": {"part", "dtype", "size", "ms", "samples", "ratio"},
    "layernorm": TIMED | MEMORY | {"dtype", "size"},
    "resnet50": STEP | {"dtype", "mode", "ratio", "ratio_same_mode", "graph_ratio_same_mode", "memory_ratio"},
    "weightnorm": {"part", "mode", "ms", "added_ms", "error"},
    "optim": {"mode", "ms", "ratio"},
}
COUNTS = {"layers": 57, "cpu": 105, "layernorm": 9, "resnet50": 10, "weightnorm": 10}


@pytest.fixture(autouse=True)
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile as far as the graph, without the C++ compiler: seconds instead of a minute."""
    monkeypatch.setattr(peers, "BACKEND", "aot_eager")


@pytest.mark.parametrize("name", bench.NAMES)
def test_smoke_gives_complete_rows_and_a_file(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run([name], smoke=True, device="cpu", out=tmp_path) == 0
    data = json.loads((tmp_path / f"{name}.json").read_text())
    assert data["environment"]["torch"] == torch.__version__
    assert {"device", "triton", "python", "commit", "date"} <= data["environment"].keys()
    assert data["memory_bandwidth"] > 0
    rows = data["rows"]
    assert len(rows) == COUNTS.get(name, len(rows)) > 0
    printed = capsys.readouterr().out
    for row in rows:
        peer = re.search("liger|quack", row["variant"])
        if peer is not None:
            assert row["status"] == "skipped"
            assert peer[0] in row["note"].lower()
            continue
        assert row["status"] == "ok", row
        assert not FIELDS[name] - row.keys()
        assert row["variant"] in printed
        assert all(row[key] > 0 for key in ("ms", "fwd_ms", "bwd_ms") if key in row)
        assert not any(key.endswith("_passes") for key in row)  # they follow from times and bandwidth
        assert row.get("error") is None or 0 < row["error"] <= 1 or row["variant"] == "none"


def test_the_layers_rows_say_what_is_kept(tmp_path: Path) -> None:
    assert bench.run(["layers"], smoke=True, device="cpu", out=tmp_path, only=["fp16", "cl", "relu", "native"]) == 0
    (row,) = json.loads((tmp_path / "layers.json").read_text())["rows"]
    # Batch norm keeps its input, and a mean and an inverse deviation in fp32 for each of 16 channels.
    assert row["tensor_bytes"] == 4 * 16 * 6 * 6 * 2
    assert row["saved_bytes"] == row["tensor_bytes"] + 2 * 16 * 4
    assert row["ratio"] == 1


class _Scaled(torch.autograd.Function):
    """The identity, but its gradient is too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return g * ctx.factor, None


def _damaged(what: str) -> Any:
    right = dispatch.linked_batch_norm

    def wrong(
        x: Tensor, norm: Norm, weight: Tensor, bias: Tensor, running: RunningStats, *args: Any, **kwargs: Any
    ) -> Any:
        if what == "dx":
            x = _Scaled.apply(x, 1.02)
        elif what == "dweight":
            weight = _Scaled.apply(weight, 1.5)
        elif what == "dbias":
            bias = _Scaled.apply(bias, 1.5)
        elif what == "dresidual":
            kwargs["residual"] = _Scaled.apply(kwargs["residual"], 1.02)
        y, link = right(x, norm, weight, bias, running, *args, **kwargs)
        if what == "running_var":
            assert running.var is not None
            running.var.mul_(1.01)
        return y * 1.02 if what == "output" else y, link

    return wrong


@pytest.mark.parametrize("what", ["output", "dx", "dweight", "dbias", "dresidual", "running_var"])
def test_a_wrong_kernel_gets_no_number(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "linked_batch_norm", _damaged(what))
    code = bench.run(
        ["layers"], smoke=True, device="cpu", out=tmp_path, only=["fp16", "cl", "add_relu", "native", "l1"]
    )
    assert code == 1
    native, ours = json.loads((tmp_path / "layers.json").read_text())["rows"]
    assert native["status"] == "ok"
    assert ours["status"] == "WRONG"
    assert f"{what} is off by" in ours["note"]
    assert not {"fwd_ms", "bwd_ms", "ratio"} & ours.keys()


def test_resnet50_gives_no_number_for_a_wrong_norm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(dispatch, "linked_batch_norm", _damaged("dx"))
    assert bench.run(["resnet50"], smoke=True, device="cpu", out=tmp_path, only=["fp16", "l1"]) == 1
    (row,) = json.loads((tmp_path / "resnet50.json").read_text())["rows"]
    assert row["status"] == "WRONG"
    assert "ms" not in row


@pytest.mark.parametrize("damage", ["output", "gradient"])
def test_a_compiled_network_must_agree_with_the_eager_one(
    damage: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def compiled(model: Any, **_: Any) -> Any:
        if damage == "output":
            return lambda x: 3 * model(x)
        return lambda x: _Scaled.apply(model(x), -1.0)

    monkeypatch.setattr(peers, "why_no_compiler", lambda device: None)
    monkeypatch.setattr(peers, "compiled", compiled)
    words = ["bf16", "l1", "compiled"]
    assert bench.run(["resnet50"], smoke=True, device="cpu", out=tmp_path, only=words) == 1
    (row,) = json.loads((tmp_path / "resnet50.json").read_text())["rows"]
    assert row["status"] == "WRONG"
    assert ("loss is" if damage == "output" else "last gradient has cosine -") in row["note"]
    monkeypatch.setattr(peers, "compiled", lambda model, **_: model)
    assert bench.run(["resnet50"], smoke=True, device="cpu", out=tmp_path, only=words) == 0


def test_one_failing_variant_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(dispatch, "linked_batch_norm", broken)
    assert bench.run(["layers"], smoke=True, device="cpu", only=["fp16", "cl", "relu", "native", "l1", "l2"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("failed: RuntimeError: out of memory") == 4  # two rows, and the list at the end
    assert " native " in printed


def test_without_a_compiler_its_rows_say_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_compiler(function: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no working C++ compiler\nmore lines")

    monkeypatch.setattr(torch, "compile", no_compiler)
    words = ["fp16", "cl", "relu", "native", "native_compiled"]
    assert bench.run(["layers"], smoke=True, device="cpu", out=tmp_path, only=words) == 0
    native, compiled = json.loads((tmp_path / "layers.json").read_text())["rows"]
    assert native["status"] == "ok"
    assert compiled["status"] == "skipped"
    assert compiled["note"] == "torch.compile does not work here: RuntimeError: no working C++ compiler"


def test_what_breaks_between_the_rows_is_a_row(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def broken(setup: harness.Setup) -> Any:
        raise MemoryError("too much")
        yield

    monkeypatch.setattr(layers, "rows", broken)
    assert bench.run(["layers"], smoke=True, device="cpu") == 1
    assert "failed: MemoryError: too much" in capsys.readouterr().out


def test_a_failing_peer_is_no_failure_of_ours() -> None:
    rows = [
        {"ours": False, "status": "failed"},
        {"ours": True, "status": "skipped"},
        {"ours": False, "status": "WRONG"},
        {"ours": True, "status": "failed"},
        {"ours": True, "status": "ok"},
    ]
    assert harness.failed(rows) == rows[2:4]


def test_selection_means_any_word_of_an_axis_and_all_axes() -> None:
    axes = {"dtype": ["fp16", "bf16"], "layout": ["cl", "nchw"]}
    selection = harness.Selection.of(["cl", "fp16", "bf16"], [axes])
    assert selection.allows(axes, {"dtype": "bf16", "layout": "cl"})
    assert not selection.allows(axes, {"dtype": "bf16", "layout": "nchw"})
    assert harness.Selection.of(["all"], [axes]).allows(axes, {"dtype": "fp16", "layout": "nchw"})
    assert harness.Selection.of([], [axes]).default()
    with pytest.raises(ValueError, match="no row is called 'fp15'; there are all, bf16, cl"):
        harness.Selection.of(["fp15"], [axes])


def test_words_may_come_with_commas():
    of = harness.Selection.of
    assert of(["fp16,cl relu"], [layers.AXES]) == of(["fp16", "cl", "relu"], [layers.AXES])
    with pytest.raises(ValueError, match="no row is called 'fp17'"):
        of(["fp16,fp17"], [layers.AXES])


def test_default_rows_are_fp16_channels_last_and_a_sample_of_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness.Setup, "free", lambda self: None)  # nothing is measured, and it takes minutes
    native = [
        case.names for case in layers.cases(harness.Setup(torch.device("cpu"))) if case.names["variant"] == "native"
    ]
    usual = [names for names in native if (names["dtype"], names["layout"]) == ("fp16", "cl")]
    assert len(usual) == 2 * len(layers.SHAPES)
    assert len(native) == len(usual) + 2 * 2 * len(layers.SAMPLE)
    everything = harness.Setup(torch.device("cpu"), only=harness.Selection.of(["all"], [layers.AXES]))
    assert len(list(layers.cases(everything))) == 2 * 2 * 2 * len(layers.SHAPES) * len(layers.VARIANTS)


def test_the_rows_that_matter_most_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is cut off loses what explains, not what is asked for."""
    monkeypatch.setattr(harness.Setup, "free", lambda self: None)
    for module, names in ((resnet50, ("_measure",)), (weightnorm, ("_measure_weights", "_measure_step"))):
        for name in names:
            monkeypatch.setattr(module, name, lambda *a: {"ms": 1.0, "graph_ms": None, "after_forward_bytes": None})
    setup = harness.Setup(torch.device("cpu"))
    events: list[Any] = []
    setup.warm_up = lambda: events.append("compile")
    given = []
    for row in resnet50.rows(setup):
        events.append((row["mode"], row["dtype"], row["variant"]))
        given.append(row)
    main = [(dtype, name) for dtype in ("fp16", "bf16") for name in ("native", "l1_lean")]
    assert events[:4] == [("eager", *row) for row in main]
    assert events[4:9] == ["compile", *[("compiled", *row) for row in main]]
    assert set(events[9:]) == {("eager", "fp16", name) for name in ("l1", "l2", "none")}
    # eager rows come before what they are compared with
    assert all(
        row["ratio"] == 1.0 and row["ratio_same_mode"] == 1.0 and row["graph_ratio_same_mode"] is None for row in given
    )
    events.clear()
    for row in weightnorm.rows(setup):
        events.append((row["part"], row["mode"], row["variant"]))
        assert row["added_ms"] == 0.0
    eager = [(part, "eager", name) for part in ("weights", "step") for name in weightnorm.VARIANTS]
    assert events[:11] == [*eager, "compile"]
    assert events[11:14] == [("step", "compiled", name) for name in ("none", "torch", "bounded")]
    assert events[14:] == [("weights", "compiled", name) for name in ("none", "torch", "bounded")]


def test_what_is_timed_is_compared_with_the_plain_network(capsys: pytest.CaptureFixture[str]) -> None:
    """A compiled module may have no truth value, as torch's has none in some versions; and a wrong one is found."""
    setup = harness.Setup(torch.device("cpu"), smoke=True)
    model = resnet50.build(setup, torch.nn.BatchNorm2d)

    class Compiled(torch.nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.inner, self.factor = model, factor

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.factor

        def __len__(self) -> int:
            raise TypeError("does not support len()")

    step = resnet50.Step(setup, model, torch.bfloat16, compile=False)
    step.model = Compiled(1.0)
    resnet50.check_same(step, model, model, first=True)
    step.model = Compiled(-3.0)
    with pytest.raises(harness.Wrong, match="the timed network's"):
        resnet50.check_same(step, model, model)
    step.model = lambda x: model(x).half()  # as a cache of compiled graphs that forgets autocast's dtype would
    with pytest.raises(harness.Wrong, match="where autocast asks for"):
        step()


def test_the_command_refuses_what_it_does_not_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main(["layer"])
    assert stopped.value.code == 2
    assert "no benchmark is called 'layer'; there are layers," in capsys.readouterr().err
    for device in ("meta", "gpu7"):
        with pytest.raises(ValueError, match=f"expected the device cpu or cuda, got '{device}'"):
            bench.run(["layers"], smoke=True, device=device)
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        bench.run(["layers"], smoke=True, device="cpu", out=tmp_path / "file")
    assert "layers" not in capsys.readouterr().out  # before anything is measured
    with pytest.raises(SystemExit):
        command.main(["layers", "--smoke", "--device", "cpu", "--out", str(tmp_path / "file")])
    assert "File exists" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no row is called fp16 and 256x64x56x56 in a smoke run"):
        bench.run(["layers"], smoke=True, device="cpu", only=["fp16", "256x64x56x56"])  # it had passed, with no row


def test_a_smoke_run_says_that_its_times_mean_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """It printed "0.22×" for a tensor of 2,304 elements."""
    assert bench.run(["layers"], smoke=True, device="cpu", only=["fp16", "cl", "relu", "native", "l1"]) == 0
    printed = capsys.readouterr().out
    assert "mean nothing" in printed
    assert not re.search(r"\d×", printed)


def test_smoke_writes_no_file_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main(["cpu", "--smoke"]) == 0
    assert list(tmp_path.iterdir()) == []


def test_some_rows_do_not_replace_the_file_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def one(setup: harness.Setup) -> Any:
        raise MemoryError("which is a row, too")
        yield

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(layers, "rows", one)
    bench.run(["layers"], device="cpu", only=["cl"])
    assert list(tmp_path.iterdir()) == []
    drawn: list[Path] = []
    monkeypatch.setattr(roofline, "draw", lambda data, path: drawn.append(path))
    bench.run(["layers"], device="cpu")
    assert drawn == [Path("results/bench/roofline.svg")]
    assert (tmp_path / "results" / "bench" / "layers.json").exists()


def test_a_wrong_kernel_gets_no_number_on_the_cpu_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "linked_batch_norm", _damaged("dx"))
    words = ["batch_norm", "fp32", "cl", "relu", "l1"]
    assert bench.run(["cpu"], smoke=True, device="cpu", out=tmp_path, only=words) == 1
    native, ours = json.loads((tmp_path / "cpu.json").read_text())["rows"]  # what it is compared with comes with it
    assert (native["status"], native["ratio"]) == ("ok", 1)
    assert ours["status"] == "WRONG"
    assert "dx is off by" in ours["note"]
    assert not {"ms", "fwd_ms", "bwd_ms", "ratio"} & ours.keys()


def test_ratios_are_medians_of_samples_taken_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disturbance hits a whole turn, and must not show in the ratio."""
    clock = [0.0]
    monkeypatch.setattr(cpu.time, "perf_counter", lambda: clock[0])
    taken: list[str] = []

    def sample(name: str, ms: float) -> tuple[float, ...]:
        disturbed = 10 if (len(taken) - 2) // 4 % 2 else 1  # two samples before the first turn, four in each
        taken.append(name)
        clock[0] += 0.1
        return ms * disturbed * 1e-3, ms * disturbed * 1e-3

    def prepare(name: str, ms: float) -> cpu.Ready:
        return cpu.Ready(lambda: sample(name, ms), {"error": 0.5})

    setup = harness.Setup(torch.device("cpu"))
    variants = {"native": (False, lambda: prepare("native", 2.0)), "l1": (True, lambda: prepare("l1", 1.0))}
    native, l1 = cpu._group(setup, {"part": "linear", "dtype": "fp32"}, variants, "native", elements=1000)
    assert (native["ratio"], l1["ratio"]) == (1.0, 0.5)
    assert l1["ns_per_element"] == pytest.approx(l1["ms"] * 1e3)
    assert l1["ms"] == pytest.approx(l1["fwd_ms"] + l1["bwd_ms"])
    assert l1["samples"] == native["samples"] >= 5
    assert taken[2:10] == ["l1", "l1", "native", "native", "native", "native", "l1", "l1"]


def _without_measuring(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The rows of a whole run, each as its axes."""
    monkeypatch.setattr(harness.Setup, "free", lambda self: None)
    monkeypatch.setattr(cpu, "attempt", lambda setup, case: dict(case.names))
    return list(cpu.rows(harness.Setup(torch.device("cpu"))))


def test_a_whole_run_on_the_cpu_has_every_norm_and_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = _without_measuring(monkeypatch)
    assert len({tuple(sorted(row.items())) for row in rows}) == len(rows)  # none twice

    def count(**values: str) -> int:
        return sum(all(row.get(axis) == value for axis, value in values.items()) for row in rows)

    for layout in ("cl", "nchw"):
        for name in ("native", "l1", "l1_lean", "linf", "range", "top10"):
            of_all = {"part": "batch_norm", "dtype": "fp32", "form": "relu", "layout": layout, "variant": name}
            assert count(**of_all) == len(cpu.SHAPES), of_all
        for name in ("l2", "lp1.5", "mean"):
            assert count(part="batch_norm", dtype="fp32", layout=layout, variant=name) == 2 * len(cpu.SAMPLES)
        assert count(part="batch_norm", dtype="fp16", layout=layout, variant="l1") == 2 * len(cpu.SAMPLES)
        for threads in ("1", "2", "4"):
            for shape in ("100x100x10x10", "10x1000x10x10", "1x10000x10x10"):
                linear = {"part": "linear", "layout": layout, "threads": threads, "size": shape}
                assert count(variant="l1", **linear) == count(variant="native", **linear) == 1
    assert count(part="linear", layout="nchw", variant="l1", threads=str(torch.get_num_threads())) >= 7
    for part in ("layer_norm", "rms_norm"):
        assert count(part=part, variant="lp1.5") == 2 * len(cpu.ROW_SHAPES)
    steps = {row["variant"] for row in rows if row["part"] == "optimizer"}
    assert {"NormRecorder", "NormSchedule", "StepSizeCorrection", "WeightDecayFreeSGD", "AngularSGD"} < steps


def test_every_row_of_the_summary_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{**row, "status": "ok", "ratio": 1.0} for row in _without_measuring(monkeypatch)]
    for line in cpu.SUMMARY:
        assert line in cpu.summary(rows)


def test_a_row_is_measured_on_its_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before, used = torch.get_num_threads(), []

    def prepare() -> cpu.Ready:
        used.append(torch.get_num_threads())
        return cpu.Ready(lambda: (1.0 + bool(used.append(torch.get_num_threads())),), {})

    setup = harness.Setup(torch.device("cpu"), smoke=True)
    axes = {"part": "linear", "dtype": "fp32", "threads": str(before + 2)}
    (row,) = cpu._group(setup, axes, {"native": (False, prepare)}, "native")
    assert row["status"] == "ok"
    assert {*used} == {before + 2}
    assert torch.get_num_threads() == before


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux alone says how much memory was used")
def test_the_peak_counts_memory_that_is_freed_again() -> None:
    size = 64 * 2**20

    def call() -> None:
        torch.ones(size // 4)
        torch.ones(size // 8)

    peak = timing.peak_memory(call)
    assert peak is not None
    assert 0.98 < peak / size < 1.1  # the system counts pages in batches


@pytest.mark.parametrize("name", ["NormRecorder", "NormSchedule", "StepSizeCorrection"])
def test_optimizers_beside_sgd_do_their_work(name: str) -> None:
    """Else their rows would time SGD alone."""
    build, shapes = cpu._OPTIMIZERS[name], optim.resnet50_shapes(8, (1, 1), 10)
    runs = []
    for one in (build, cpu._OPTIMIZERS[cpu._SGD]):
        named = optim.make_parameters(shapes, "cpu", torch.float32)
        optimizer = one(named, False)
        norms = channel_norms(named["conv1.weight"].detach())
        optimizer.step()
        runs.append((named["conv1.weight"].detach(), norms))
    (ours, norms), (plain, _) = runs
    if name == "NormRecorder":
        assert torch.equal(ours, plain)
    else:
        assert not torch.equal(ours, plain)
    if name == "NormSchedule":
        torch.testing.assert_close(channel_norms(ours), norms)


def test_the_network_that_is_timed_must_agree_with_float64() -> None:
    model = peers.ResNet18(depths=(1, 1), width=8, classes=10)
    assert 0 < cpu._check_step(copy.deepcopy(model), copy.deepcopy(model)) < 1
    with pytest.raises(harness.Wrong, match="the loss is off by"):
        cpu._check_step(torch.nn.Sequential(copy.deepcopy(model), torch.nn.Threshold(0.1, 0.1)), model)


def test_resnet18_is_the_one_of_the_paper() -> None:
    with torch.device("meta"):
        model = peers.ResNet18()
    assert sum(p.numel() for p in model.parameters()) == 11_689_512  # as torchvision's
    assert sum(isinstance(m, torch.nn.Conv2d) for m in model.modules()) == 20


def test_shares_of_the_rows_cover_each_row_once_and_measure_nothing(tmp_path: Path) -> None:
    found = []
    for index in range(3):
        code = bench.run(["layers"], smoke=True, device="cpu", out=tmp_path, only=["bf16", "cl"], share=(index, 3))
        assert code == 0
        path = tmp_path / "layers.json"
        found += json.loads(path.read_text())["rows"] if path.exists() else []
        path.unlink(missing_ok=True)
    assert all(row["status"] == "ok" and "fwd_ms" not in row for row in found)
    names = [(row["form"], row["variant"]) for row in found]
    ours = ["native", "l1_lean", "l1", "l2", "linf", "range", "top10"]
    # The first group of a smoke run has a compiled peer as well.
    assert sorted(names) == sorted(
        [(form, name) for form in ("relu", "add_relu") for name in ours] + [("relu", "native_compiled")]
    )


@pytest.mark.parametrize("name", ["layernorm", "resnet50", "weightnorm"])
def test_a_share_runs_every_benchmark(name: str, tmp_path: Path) -> None:
    words = {"layernorm": ["l1", "native"], "resnet50": ["fp16", "l1"], "weightnorm": ["bounded"]}[name]
    assert bench.run([name], smoke=True, device="cpu", out=tmp_path, only=words, share=(0, 1)) == 0
    rows = json.loads((tmp_path / f"{name}.json").read_text())["rows"]
    assert {row["variant"] for row in rows} == set(words) - {"fp16"}
    assert all(row["status"] == "ok" and not {"ms", "fwd_ms", "error"} & row.keys() for row in rows)


def test_the_processes_that_compile_get_a_share_each(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    class Process:
        def __init__(self, command: list[str], **kwargs: Any) -> None:
            assert kwargs["env"]["TORCHINDUCTOR_COMPILE_THREADS"].isdigit()
            started.append(command)

        def wait(self, timeout: float) -> int:
            return 0

        def poll(self) -> int:
            return 0

    monkeypatch.setattr(warmup, "Popen", Process)
    assert bench.run(["cpu", "layernorm"], smoke=True, device="cpu", only=["l1", "nchw", "relu"], jobs=2) == 0
    common = ["-m", "normmatters.bench", "layernorm", "--device", "cpu", "--share"]
    ending = ["--smoke", "--only", "l1,nchw,relu"]
    assert [command[1:] for command in started] == [[*common, "0/2", *ending], [*common, "1/2", *ending]]
    setup = harness.Setup(torch.device("cuda"))
    assert 0 <= warmup.default_jobs("layers", setup) <= 12
    assert warmup.default_jobs("optim", setup) == 0
    assert warmup.default_jobs("layers", harness.Setup(torch.device("cuda"), share=(0, 2))) == 0
    with pytest.raises(ValueError, match="jobs must not be negative, got -1"):
        bench.run(["cpu"], smoke=True, device="cpu", jobs=-1)


def test_a_terminal_without_the_signs_gets_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert command.main(["cpu", "--smoke", "--only", "batch_norm,fp32,cl,relu,native"]) == 0
    terminal.flush()
    assert b"time ? native" in terminal.buffer.getvalue()  # type: ignore[attr-defined]
