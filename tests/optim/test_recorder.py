"""NormRecorder and Recording: right numbers, on disk and back, resumed bit for bit, cheap."""

from __future__ import annotations

import builtins
import copy
import dataclasses
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.lr_scheduler import MultiStepLR

from normmatters.optim import (
    AngularSGD,
    NormRecorder,
    Recording,
    StepSizeCorrection,
    WeightDecayFreeSGD,
    angular_update,
    channel_norms,
    effective_step_size,
    scale_invariant_parameters,
)
from normmatters.optim import recorder as recorder_module
from normmatters.weight_norm import bounded_weight_norm
from support.optim_nets import INVARIANT, batch, convnet, groups, train


def sgd(model: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(groups(model, 1e-3), **{"lr": 0.1, "momentum": 0.9} | options)


@pytest.fixture(scope="module")
def run() -> tuple[Recording, list[dict[str, torch.Tensor]]]:
    """12 steps in 3 epochs, an LR drop after 8, and the weights themselves before each step and at the end."""
    model = convnet()
    optimizer = sgd(model)
    scheduler = MultiStepLR(optimizer, [8])
    invariant = scale_invariant_parameters(model, batch(0)[0])
    recorder = NormRecorder(invariant, optimizer, metadata={"model": "convnet"})
    weights = [{n: p.detach().clone() for n, p in model.named_parameters()}]

    def after(t: int) -> None:
        scheduler.step()
        weights.append({n: p.detach().clone() for n, p in model.named_parameters()})
        if t % 4 == 3:
            recorder.end_epoch()

    train(model, optimizer, range(12), after)
    return recorder.recording(), weights


def test_norms_angles_and_step_sizes(run: tuple[Recording, list[dict[str, torch.Tensor]]]) -> None:
    recording, weights = run
    assert recording.names == INVARIANT
    assert recording.steps.tolist() == list(range(13))
    assert recording.epoch_ends == (4, 8, 12)
    assert recording.steps_per_epoch == 4
    lrs = [0.1] * 8 + [0.1 * 0.1] * 4
    for name in INVARIANT:
        assert recording.learning_rate(name).tolist() == pytest.approx(lrs, rel=1e-15)
        for t, lr in enumerate(lrs):
            before, after = weights[t][name], weights[t + 1][name]
            torch.testing.assert_close(recording.norms[name][t], channel_norms(before), rtol=1e-14, atol=0)
            torch.testing.assert_close(recording.angles[name][t], angular_update(before, after), rtol=1e-7, atol=0)
            ours = recording.effective_step_size(name)[t]
            torch.testing.assert_close(ours, effective_step_size(before, lr), rtol=1e-13, atol=0)
            layer = recording.effective_step_size(name, layer=True)[t]
            torch.testing.assert_close(layer[None], effective_step_size(before, lr, None), rtol=1e-13, atol=0)
            whole = recording.angle(name, layer=True)[t]
            torch.testing.assert_close(whole[None], angular_update(before, after, None), rtol=1e-7, atol=0)
        assert torch.equal(recording.at_epochs(name), recording.norms[name][[4, 8, 12]])
    assert recording.weight_decay.eq(1e-3).all()


@pytest.mark.parametrize(("every", "steps"), [(5, [0, 5, 10]), ("epoch", [0, 4, 8, 12])])
def test_coarser_records_are_rows_of_the_fine_one(
    run: tuple[Recording, list[dict[str, torch.Tensor]]], every: Any, steps: list[int]
) -> None:
    fine, weights = run
    model = convnet()
    optimizer = sgd(model)
    scheduler = MultiStepLR(optimizer, [8])
    recorder = NormRecorder({n: dict(model.named_parameters())[n] for n in INVARIANT}, optimizer, every=every)

    def after(t: int) -> None:
        scheduler.step()
        if t % 4 == 3 and every == "epoch":
            recorder.end_epoch()

    train(model, optimizer, range(12), after)
    recording = recorder.recording()
    assert recording.steps.tolist() == steps
    for name in INVARIANT:
        assert torch.equal(recording.norms[name], fine.norms[name][steps])
        turned = angular_update(weights[steps[1]][name], weights[steps[2]][name])
        torch.testing.assert_close(recording.angles[name][1], turned, rtol=1e-7, atol=0)


def test_save_and_load_bit_for_bit(run: tuple[Recording, list[dict[str, torch.Tensor]]], tmp_path: Path) -> None:
    recording, _ = run
    recording.save(tmp_path / "run.safetensors")
    loaded = Recording.load(tmp_path / "run.safetensors")
    for item in dataclasses.fields(Recording):
        mine, theirs = getattr(recording, item.name), getattr(loaded, item.name)
        if item.name in ("norms", "angles"):
            assert list(mine) == list(theirs)
            assert all(torch.equal(mine[n], theirs[n]) for n in mine)
        elif isinstance(mine, torch.Tensor):
            assert torch.equal(mine, theirs)
        else:
            assert mine == theirs, item.name
    assert loaded.signature == recording.signature
    assert loaded.tested
    assert loaded.metadata["model"] == "convnet"


def test_load_refuses_other_and_damaged_files(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"is not a normmatters\.recording"):
        Recording.load(tmp_path / "other.safetensors")
    torch.save({"x": torch.ones(1)}, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"model\.pt is no safetensors file"):
        Recording.load(tmp_path / "model.pt")
    header = {
        "format": "normmatters.recording",
        "version": "1",
        "parameters": '{"w": [[2, 3], 0, null]}',
        "signature": "",
        "epoch_ends": "[]",
        "tested": "false",
        "metadata": "{}",
    }
    tensors = {"steps": torch.arange(2), "lr": torch.zeros(1, 0), "weight_decay": torch.zeros(1, 0)}
    save_file({"steps": torch.arange(2)}, tmp_path / "part.safetensors", metadata=header)
    with pytest.raises(ValueError, match=r"part\.safetensors is damaged: it has no lr, weight_decay"):
        Recording.load(tmp_path / "part.safetensors")
    save_file(tensors, tmp_path / "lost.safetensors", metadata=header)
    with pytest.raises(ValueError, match="describes 'w' and holds no norms"):
        Recording.load(tmp_path / "lost.safetensors")
    save_file(tensors | {"norm/w": torch.ones(2, 1)}, tmp_path / "narrow.safetensors", metadata=header)
    with pytest.raises(ValueError, match=r"norms of 'w' .* must be \[2, 2\], got \[2, 1\]"):
        Recording.load(tmp_path / "narrow.safetensors")
    save_file(tensors | {"norm/w": torch.ones(2, 2)}, tmp_path / "forged.safetensors", metadata=header)
    with pytest.raises(ValueError, match="signature"):
        Recording.load(tmp_path / "forged.safetensors")


@pytest.mark.parametrize("every", ["step", 3])
def test_resume_in_mid_run_is_bit_for_bit(every: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "CHUNK", 4)  # so that the run crosses chunks

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer, NormRecorder]:
        model = convnet(torch.float32)
        optimizer = sgd(model)
        return model, optimizer, NormRecorder(model, optimizer, every=every)

    model, optimizer, whole = fresh()
    train(model, optimizer, range(14))
    model, optimizer, first = fresh()
    train(model, optimizer, range(7))
    torch.save([model.state_dict(), optimizer.state_dict(), first.state_dict()], tmp_path / "checkpoint")
    model, optimizer, second = fresh()
    for part, state in zip((model, optimizer, second), torch.load(tmp_path / "checkpoint", weights_only=True)):
        part.load_state_dict(state)
    train(model, optimizer, range(7, 14))
    one, two = whole.recording(), second.recording()
    assert torch.equal(one.steps, two.steps)
    assert torch.equal(one.lr, two.lr)
    for name in one.names:
        assert torch.equal(one.norms[name], two.norms[name])
        assert torch.equal(one.angles[name], two.angles[name])


def test_the_default_device_does_not_matter(tmp_path: Path) -> None:
    """A recording lies on the host, and so does what is reckoned from it, wherever new tensors go (here: nowhere)."""
    model, (images, labels) = convnet(), batch(0)
    optimizer = sgd(model)
    path = str(tmp_path / "run.safetensors")
    with torch.device("meta"):
        recorder = NormRecorder(model.named_parameters(), optimizer)
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        recorder.end_epoch()
        recorder.save(path)
        recording = Recording.load(path)
        assert recording.rows_by_step("exact").tolist() == [0, 1]
        assert recording.rows_by_step("paper").tolist() == [1, 1]
        plain = torch.optim.SGD(groups(model, 0.0), lr=0.1)
        corrected = StepSizeCorrection(plain, recording, scale_invariant_parameters(model, images), form="exact")
        corrected.step()
    assert all(p.isfinite().all() for p in model.parameters())


def test_capacity_records_the_same_and_reports_overflow() -> None:
    recordings = []
    for capacity in (None, 6):
        model = convnet(torch.float32)
        optimizer = sgd(model, lr=torch.tensor(0.1))
        recorder = NormRecorder(model, optimizer, capacity=capacity)
        train(model, optimizer, range(5))
        recorder.end_epoch()
        recordings.append(recorder.recording())
    one, two = recordings
    assert torch.equal(one.lr, two.lr)
    assert one.epoch_ends == two.epoch_ends == (5,)
    assert all(torch.equal(one.norms[n], two.norms[n]) and torch.equal(one.angles[n], two.angles[n]) for n in one.names)
    train(model, optimizer, range(5, 6))
    with pytest.raises(ValueError, match=r"7 rows were recorded, capacity=6"):
        recorder.recording()


def test_a_state_too_long_for_the_capacity_changes_nothing() -> None:
    long, short = convnet(), convnet()
    recorder, small = (NormRecorder(m, sgd(m), capacity=c) for m, c in ((long, 6), (short, 3)))
    train(long, recorder._optimizer, range(4))
    train(short, small._optimizer, range(1))
    with pytest.raises(ValueError, match="the state has 5 rows, capacity=3 was reserved"):
        small.load_state_dict(recorder.state_dict())
    assert small.recording().steps.tolist() == [0, 1]


def test_module_without_optimizer_and_transposed_convolutions() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(2, 3, 2), nn.Conv2d(3, 4, 1))
    recorder = NormRecorder(model, angle=False)
    with torch.no_grad():
        model[0].weight.mul_(2)
    recorder.step()
    first = recorder.recording()
    recorder.reset()
    with torch.no_grad():
        model[0].weight.mul_(2)
    recorder.step()
    recording = recorder.recording()
    assert recording.steps.tolist() == first.steps.tolist() == [0, 1]
    torch.testing.assert_close(recording.norms["0.weight"], 2 * first.norms["0.weight"])
    assert recording.dims == {"0.weight": 1, "1.weight": 0}
    torch.testing.assert_close(recording.norms["0.weight"][1], channel_norms(model[0].weight.detach(), 1))
    torch.testing.assert_close(recording.norms["0.weight"][1], 2 * recording.norms["0.weight"][0])
    with pytest.raises(ValueError, match="without an optimizer"):
        recording.effective_step_size("0.weight")
    with pytest.raises(ValueError, match="without angles"):
        recording.angle("0.weight")


def test_the_direction_of_a_transposed_convolution_with_weight_norm() -> None:
    layer = bounded_weight_norm(nn.ConvTranspose2d(2, 3, 2), dim=1)
    recording = NormRecorder(layer).recording()
    v = layer.parametrizations.weight.original
    torch.testing.assert_close(recording.norms["parametrizations.weight.original"][0], channel_norms(v.detach(), 1))


def test_a_channel_of_norm_zero_has_no_angle_and_spoils_no_layer() -> None:
    weights = {"w": torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64)}
    recorder = NormRecorder(weights)
    weights["w"][0] = torch.tensor([4.0, 3.0])
    recorder.step()
    recording = recorder.recording()
    turned = angular_update(torch.tensor([[3.0, 4.0]]).double(), torch.tensor([[4.0, 3.0]]).double())
    torch.testing.assert_close(
        recording.angles["w"][0], torch.cat([turned, turned.new_full((1,), torch.nan)]), equal_nan=True
    )
    torch.testing.assert_close(recording.angle("w", layer=True), turned)
    written: dict[str, float] = {}

    class Writer:
        def add_scalar(self, tag: str, value: float, step: int) -> None:
            written[tag] = value

    recording.to_tensorboard(Writer())
    assert written["norms/angle/w"] == pytest.approx(turned.item())


def test_a_state_does_not_change_while_the_run_goes_on() -> None:
    weights = {"w": torch.randn(3, 4)}
    recorder = NormRecorder(weights, capacity=8)
    state = recorder.state_dict()
    saved = [state["rows"].clone(), *(p.clone() for p in state["previous"])]
    weights["w"].mul_(2)
    recorder.step()
    recorder.load_state_dict(state)
    recorder.step()
    assert all(torch.equal(a, b) for a, b in zip(saved, [state["rows"], *state["previous"]]))
    torch.testing.assert_close(recorder.recording().norms["w"][1], 2 * saved[0][0, :3])


@pytest.mark.parametrize("how", [copy.deepcopy, lambda all: pickle.loads(pickle.dumps(all))], ids=["copy", "pickle"])
@pytest.mark.parametrize("removed", [False, True])
def test_a_copy_goes_on_recording(how: Callable[[Any], Any], removed: bool) -> None:
    """Beside the copies of its model and optimizer; torch's optimizers are copied without their hooks."""
    model = convnet()
    optimizer = sgd(model)
    recorder = NormRecorder(model, optimizer)
    train(model, optimizer, range(2))
    if removed:
        recorder.remove()
    other = how((model, optimizer, recorder))
    for net, opt, _ in ((model, optimizer, recorder), other):
        train(net, opt, range(2, 5))
    assert (recorder.steps, other[2].steps) == ((2, 2) if removed else (5, 5))
    torch.testing.assert_close(other[2].state_dict()["rows"], recorder.state_dict()["rows"], rtol=0, atol=0)


@pytest.mark.parametrize("fused", [False, True])  # a fused optimizer steps all the same, and skips by itself
def test_skipped_amp_steps_are_not_recorded(fused: bool) -> None:
    model = convnet(torch.float32)
    optimizer = sgd(model, fused=fused)
    recorder = NormRecorder(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for t in range(3):
        images, labels = batch(t, torch.float32)
        optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(model(images), labels)).backward()
        if t == 1:
            model[0].weight.grad[0, 0, 0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
    assert recorder.steps == 2
    assert len(recorder.recording().steps) == 3


def test_names_are_plain_under_compile_prefixes_and_removal_stops_recording() -> None:
    model = convnet(torch.float32)
    wrapped = nn.DataParallel(model)
    optimizer = sgd(model)
    recorder = NormRecorder(wrapped, optimizer)
    train(model, optimizer, range(1))
    recorder.remove()
    train(model, optimizer, range(1, 3))
    recording = recorder.recording()
    assert recording.names == [*INVARIANT, "11.weight"]
    assert len(recording.steps) == 2


def test_names_are_plain_where_single_blocks_are_compiled_or_checkpointed() -> None:
    """As large models are: a recording of one fits the bare model, and the other way round."""
    model = convnet(torch.float32)
    model[0], model[3] = torch.compile(model[0], backend="eager"), checkpoint_wrapper(model[3])
    assert NormRecorder(model).recording().names == [*INVARIANT, "11.weight"]
    assert list(scale_invariant_parameters(model, batch(0, torch.float32)[0])) == INVARIANT


def test_repr_is_one_line(run: tuple[Recording, list[dict[str, torch.Tensor]]]) -> None:
    recording, _ = run
    channels = sum(norms.shape[1] for norms in recording.norms.values())
    text = repr(recording)
    assert "\n" not in text
    assert len(text) < 150
    for part in (f"{len(recording.names)} weights", f"{channels} channels", f"{len(recording.steps)} rows"):
        assert part in text


@pytest.mark.parametrize(("package", "call"), [("safetensors", "save"), ("matplotlib", "plot")])
def test_missing_extras_say_what_to_install(
    run: tuple[Recording, list[dict[str, torch.Tensor]]], package: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith(package):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    for loaded in [m for m in sys.modules if m.startswith(package)]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=f"pip install {package}"):
        getattr(run[0], call)("nowhere")


def test_bad_input_is_named() -> None:
    model = convnet(torch.float32)
    optimizer = sgd(model)
    with pytest.raises(ValueError, match="every must be"):
        NormRecorder(model, optimizer, every=0)
    with pytest.raises(ValueError, match="capacity needs"):
        NormRecorder(model, optimizer, every=2, capacity=5)
    with pytest.raises(TypeError, match=r"must be a torch.optim.Optimizer, got Linear"):
        NormRecorder(model, model[11])
    with pytest.raises(ValueError, match="does not hold 'stranger'"):
        NormRecorder({"stranger": torch.ones(2, 2)}, optimizer)
    with pytest.raises(ValueError, match=r"'w'.*dim must lie"):
        NormRecorder({"w": torch.ones(2, 2)}, dims={"w": 2})
    with pytest.raises(ValueError, match=r"dims names weights that are not here: \['v'\]"):
        NormRecorder({"w": torch.ones(2, 2)}, dims={"v": 0})
    with pytest.raises(ValueError, match="'w' must be a non-empty floating-point"):
        NormRecorder({"w": torch.ones(2, 2, dtype=torch.int64)})
    with pytest.raises(TypeError, match="got Tensor"):
        NormRecorder(torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"\(name, tensor\) pairs"):
        NormRecorder(model.parameters())  # type: ignore[arg-type]
    recorder = NormRecorder(model, optimizer)
    with pytest.raises(ValueError, match="nothing was recorded"):
        recorder.recording()
    with pytest.raises(ValueError, match="no step was taken"):
        recorder.end_epoch()
    other = NormRecorder({"w": torch.ones(2, 2)})
    with pytest.raises(ValueError, match="another recorder: its signature"):
        recorder.load_state_dict(other.state_dict())


def test_overhead_is_small_beside_a_step() -> None:
    """A bound loose enough for a busy machine; the measured number is in docs/optim/norm_recorder.md."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(nn.Conv2d(3, 32, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recorder = NormRecorder(model, optimizer)
    images = torch.randn(16, 3, 16, 16)

    def best(action: Any, times: int = 5) -> float:
        spans = []
        for _ in range(times):
            start = time.perf_counter()
            action()
            spans.append(time.perf_counter() - start)
        return min(spans)

    step = best(lambda: model(images).square().mean().backward())
    optimizer.step()
    assert best(recorder._record, 20) < 0.1 * step


@pytest.mark.gpu
def test_cuda_graph_records_every_replay() -> None:
    model = convnet(torch.float32).cuda()
    optimizer = sgd(model)
    recorder = NormRecorder(model, optimizer, capacity=32)
    images, labels = (t.cuda() for t in batch(0, torch.float32))

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    norms = []
    for _ in range(4):
        graph.replay()
        norms.append(channel_norms(model[0].weight.detach()).cpu())
    recording = recorder.recording()
    assert len(recording.steps) == 8
    torch.testing.assert_close(recording.norms["0.weight"][-4:], torch.stack(norms), rtol=1e-6, atol=0)
    assert (recording.angles["0.weight"] > 0).all()


@pytest.fixture
def one_process() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_record_and_correct_under_ddp() -> None:
    """A recording of a bare model fits the model in DDP, and the other way round."""
    recordings = []
    for wrap in (lambda m: m, nn.parallel.DistributedDataParallel):
        model = convnet()
        net = wrap(model)
        optimizer = sgd(model)
        recorder = NormRecorder(scale_invariant_parameters(net, batch(0)[0]), optimizer)
        train(net, optimizer, range(4))
        recorder.end_epoch()
        recordings.append(recorder.recording())
    bare, ddp = recordings
    assert bare.signature == ddp.signature
    assert all(torch.equal(bare.norms[n], ddp.norms[n]) for n in bare.names)
    for recording, parameters in ((bare, net), (ddp, model)):
        optimizer = StepSizeCorrection(torch.optim.SGD(groups(model, 0.0), lr=0.1), recording, parameters)
        train(net, optimizer, range(1))
        assert (optimizer.ratio["0.weight"] > 0).all()


@pytest.mark.parametrize("stop", [False, True], ids=["", "resumed"])
@pytest.mark.parametrize("every", ["epoch", 2])
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
def test_the_lr_of_an_epoch_is_its_own_also_behind_the_scheduler(lr: Any, every: Any, stop: bool) -> None:
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=copy.deepcopy(lr))
    scheduler = MultiStepLR(optimizer, [1])
    recorder = NormRecorder(layer, optimizer, every=every)
    for _ in range(2):
        for _ in range(3):
            layer(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        scheduler.step()
        if stop:
            state = recorder.state_dict()
            recorder = NormRecorder(layer, optimizer, every=every)
            recorder.load_state_dict(state)
        recorder.end_epoch()
    recording = recorder.recording()
    expected = [0.1 if step <= 3 else 0.01 for step in recording.steps[1:]]
    torch.testing.assert_close(recording.lr.flatten(), torch.tensor(expected).double())


def test_a_refused_first_step_leaves_no_row() -> None:
    model = convnet()
    weights = {n: model.get_parameter(n) for n in INVARIANT}
    optimizer = WeightDecayFreeSGD(weights.values(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    recorder = NormRecorder(weights, optimizer)
    optimizer.param_groups[0]["lr"] = 100.0
    with pytest.raises(ValueError, match="lr \\* weight_decay"):
        train(model, optimizer, range(1))
    optimizer.param_groups[0]["lr"] = 0.1
    train(model, optimizer, range(2))
    assert recorder.recording().steps.tolist() == [0, 1, 2]


def test_a_step_that_raises_is_none() -> None:
    """Not at first, where the weights may be others when the run really begins, nor later, between two rows."""
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    recorder = NormRecorder(layer, optimizer, every="epoch")

    def fails(lr: float) -> None:
        optimizer.param_groups[0]["lr"] = lr
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)  # as a loss that is not finite, or memory that runs out

    fails(0.1)
    with torch.no_grad():
        layer.weight.copy_(torch.ones(2, 3))
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    fails(7.0)
    recorder.end_epoch()
    recording = recorder.recording()
    assert recording.steps.tolist() == [0, 1]
    torch.testing.assert_close(recording.norms["weight"], torch.tensor([[1.0, 1.0], [0.9, 0.9]]) * 3**0.5)
    assert recording.lr.tolist() == [[0.1]]


@pytest.mark.parametrize("capacity", [None, 4])
def test_an_epoch_without_a_step_is_refused(capacity: int | None) -> None:
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    recorder = NormRecorder(layer, optimizer, capacity=capacity)
    with pytest.raises(ValueError, match="at step 0: no step was taken"):
        recorder.end_epoch()
    optimizer.step()
    recorder.end_epoch()
    assert recorder.recording().epoch_ends == (1,)


def test_an_optimizer_without_weight_decay_is_recorded_as_none() -> None:
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.Rprop(layer.parameters(), lr=0.1)
    assert "weight_decay" not in optimizer.param_groups[0]
    recorder = NormRecorder(layer, optimizer)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    found = recorder.recording()
    assert found.weight_decay.tolist() == [[0.0]]
    assert found.lr.tolist() == [[0.1]]


@pytest.mark.parametrize("options", [{}, {"lr": torch.tensor(0.05)}, {"capturable": True}])
def test_the_learning_rate_that_acts_in_place_of_weight_decay(options: dict[str, Any]) -> None:
    """Plain SGD whose lr grows: its effective step is that of the run with decay, but for its own 1/(1−ηλ)."""
    decayed, free = convnet(), convnet()
    sgd = torch.optim.SGD(groups(decayed, 0.02, 0.0), lr=0.05)
    ours = WeightDecayFreeSGD(
        [g | {"weight_decay_free": f} for g, f in zip(groups(free, 0.02, 0.0), (True, False))], **{"lr": 0.05} | options
    )
    found = []
    for model, optimizer in ((decayed, sgd), (free, ours)):
        recorder = NormRecorder({n: model.get_parameter(n) for n in INVARIANT}, optimizer)
        train(model, optimizer, range(40))
        found.append(recorder.recording())
    assert (found[1].lr / found[0].lr)[-1] > 1.05
    assert found[1].weight_decay.isnan().all()
    for name in INVARIANT:
        decayed_steps, ours_steps = (recording.effective_step_size(name) for recording in found)
        torch.testing.assert_close(ours_steps, decayed_steps / (1 - 0.05 * 0.02), rtol=1e-6, atol=0)


@pytest.mark.parametrize("by_closure", [False, True])
def test_the_learning_rate_that_acts_is_that_of_a_weight_that_learns(by_closure: bool) -> None:
    frozen, weight = nn.Parameter(torch.eye(3), requires_grad=False), nn.Parameter(torch.eye(3))
    optimizer = WeightDecayFreeSGD([frozen, weight], lr=0.1, weight_decay=0.1)
    recorder = NormRecorder({"frozen": frozen, "weight": weight}, optimizer)

    def closure() -> float:
        weight.grad = torch.zeros(3, 3)
        return 0.0

    for _ in range(2):
        optimizer.zero_grad()
        if by_closure:  # before it, no weight has a gradient
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    torch.testing.assert_close(recorder.recording().lr.flatten(), 0.1 / torch.tensor([0.99, 0.99**3]).double())


def test_an_angle_in_place_of_weight_decay_is_recorded() -> None:
    weight = nn.Parameter(torch.eye(3))
    optimizer = AngularSGD([weight], angle=0.01, momentum=0.0)
    recorder = NormRecorder({"w": weight}, optimizer)
    weight.grad = torch.eye(3).roll(1, 0)
    optimizer.step()
    recording = recorder.recording()
    assert recording.weight_decay.isnan().tolist() == [[True]]
    torch.testing.assert_close(recording.angles["w"], torch.full((1, 3), 0.01))
