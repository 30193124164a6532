"""The tables behind the multi-tensor kernels, rotation and norms of rows: on a GPU, or through Triton's interpreter."""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from normmatters.kernels.triton import rows
from normmatters.kernels.triton.rows import MOMENTUM, NESTEROV, RotationPlan, RowNormsPlan
from normmatters.optim import AngularSGD, NormRecorder, StepSizeCorrection, angular_update, channel_norms, channels
from normmatters.optim.channels import Channels, Momentum, rotate_channel_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def matrices(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    made = [torch.randn(shape, device=DEVICE) for shape in shapes]
    return [x.to(memory_format=torch.channels_last) if x.ndim == 4 else x for x in made]


def check_rotation(weights: list[Tensor], directions: list[Tensor], grads: list[Tensor], angle: float) -> None:
    norms = [torch.rand(w.shape[0], device=DEVICE) + 0.5 for w in weights]
    expected = [w.double() for w in weights]
    for w, d, g, norm in zip(expected, directions, grads, norms):
        rotate_channel_(w, d.double(), g.double(), norm.double(), angle)
    RotationPlan(weights)(weights, directions, grads, norms, torch.tensor(angle, device=DEVICE))
    for w, reference in zip(weights, expected):
        # A row of norm 1: √n roundings of its sums, then a few of each element.
        bound = 8 * torch.finfo(torch.float32).eps * (w.numel() / w.shape[0]) ** 0.5
        torch.testing.assert_close(w.double(), reference, rtol=0, atol=bound)


SHAPES: list[tuple[int, ...]] = [(5, 1), (37, 3), (19, 4, 3, 3), (2, 128), (6, 200), (3, 700), (2, 2100), (1, 64)]
FEW: list[tuple[int, ...]] = [(7, 4, 3, 3), (2, 128), (2, 700)]  # for what takes several steps


@pytest.mark.parametrize("angle", [0.1, -2.0])
def test_rotation_is_the_equation(angle):
    weights, directions, grads = (matrices(SHAPES) for _ in range(3))
    grads[1][4] = 0  # keeps its direction
    directions[5][1] = weights[5][1] * 2  # has no direction to turn to
    check_rotation(weights[1:], directions[1:], grads[1:], angle)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("on_device", [False, True])
def test_momentum_is_taken_in_on_the_way(nesterov, on_device):
    """Step after step: the buffers and the weights of float64."""
    weights, buffers = (matrices(FEW) for _ in range(2))
    momentum = Momentum(0.9, -1.0, nesterov)
    norms = [channel_norms(w) for w in weights]
    expected, exact = ([x.double() for x in xs] for xs in (weights, buffers))
    plan = RotationPlan(weights, NESTEROV if nesterov else MOMENTUM)
    for step in range(2):
        grads = matrices(FEW)
        grads[0][4] = 0  # keeps its direction, and its momentum fades
        angle = 0.1 + step
        directions = momentum.take_in_(exact, [g.double() for g in grads])
        for w, d, g, norm in zip(expected, directions, grads, norms):
            rotate_channel_(w, d, g.double(), norm.double(), angle)
        given = torch.tensor(angle, device=DEVICE) if on_device else angle
        plan(weights, buffers, grads, norms, given, momentum.decay, momentum.sign)
        for ours, reference in zip([*weights, *buffers], [*expected, *exact]):
            bound = 16 * torch.finfo(torch.float32).eps * ours.numel() / ours.shape[0]
            torch.testing.assert_close(ours.double(), reference, rtol=0, atol=bound)


def test_the_turner_looks_again_where_a_layout_changes(monkeypatch):
    """A step with gradients strided otherwise, of another dtype, or along another dimension is a right step."""
    monkeypatch.setitem(channels.BACKENDS, DEVICE, "normmatters.kernels.triton.rows")
    torch.manual_seed(0)
    momentum, turn = Momentum(0.9), channels.ChannelRotator()
    shapes = [(6, 5, 3, 3), (7, 20)]
    weights, buffers = (matrices(shapes) for _ in range(2))
    norms = [channel_norms(w) for w in weights]
    expected, exact = ([x.double() for x in xs] for xs in (weights, buffers))
    found = []
    for change in (None, None, "strides", None, "dtype"):
        grads = matrices(shapes)
        if change == "strides":
            grads[0] = grads[0].contiguous()
        if change == "dtype":
            for xs in (weights, buffers, grads):
                xs[1] = xs[1].double()
        turn(weights, buffers, grads, norms, 0.1, 0, momentum)
        found.append((turn.plain, [members for members, _ in turn.launches]))
        directions = momentum.take_in_(exact, [g.double() for g in grads])
        for w, d, g, norm in zip(expected, directions, grads, norms):
            rotate_channel_(w, d, g.double(), norm.double(), 0.1)
        for ours, reference in zip([*weights, *buffers], [*expected, *exact]):
            torch.testing.assert_close(ours.double(), reference, rtol=0, atol=1e-5)
    assert found == [([], [[0, 1]])] * 2 + [([0], [[1]])] + [([], [[0, 1]])] + [([1], [[0]])]


def test_angular_sgd_takes_the_same_steps_through_the_kernel(monkeypatch):
    """Beside weights that it does not take, with a gradient that comes and goes, and from a saved state."""
    runs = []
    for kernel in (True, False):
        monkeypatch.setattr(channels, "BACKENDS", {DEVICE: "normmatters.kernels.triton.rows"} if kernel else {})
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(w) for w in matrices([(5, 3, 3, 3), (4, 9), (3, 8, 2)])]
        bias = torch.nn.Parameter(torch.zeros(4, device=DEVICE))
        groups = [
            {"params": weights[:2]},
            {"params": weights[2:], "dim": 1, "momentum": 0.0},
            {"params": [bias], "angular": False, "lr": 0.1},
        ]
        optimizer = AngularSGD(groups, angle=0.05, nesterov=False)
        for step in range(6):
            for p in (*weights, bias):
                p.grad = torch.randn_like(p)
            if step in (2, 3):
                weights[1].grad = None
            if step == 4:
                state = optimizer.state_dict()
                optimizer = AngularSGD(groups, angle=0.05, nesterov=False)
                optimizer.load_state_dict(state)
            optimizer.step()
        runs.append([*weights, bias])
    for ours, plain in zip(*runs):
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-5)


def test_unaligned_tensors():
    flat = torch.randn(3, 81, device=DEVICE)
    weights, directions, grads = ([flat[i, 1:].view(10, 8)] for i in range(3))
    check_rotation(weights, directions, grads, 0.3)


def test_every_row_has_one_task():
    tensors = matrices(SHAPES)
    tables = rows.tables_of(tensors)
    assert tables is rows.tables_of([torch.empty_like(x) for x in tensors])
    assert tables.rows == sum(x.shape[0] for x in tensors)
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
    assert (offsets, tables.numel) == rows.places_of([x.numel() for x in tensors])
    ends = [offset + x.numel() for offset, x in zip(offsets, tensors)]
    assert all(end <= start < end + 64 and start % 64 == 0 for end, start in zip(ends, [*offsets[1:], tables.numel]))
    assert before[3] == sum(x.shape[0] for x in tensors[:3])


def test_tables_that_two_threads_make_at_once_are_one(monkeypatch):
    """A graph reads the tables of its capture: those that are kept, not some that end with the plan."""
    tensors = matrices([(5, 7), (3, 1009)])
    whole, others = rows.places_of, []

    def meanwhile(sizes):
        monkeypatch.setattr(rows, "places_of", whole)
        others.append(rows.tables_of(tensors))
        return whole(sizes)

    monkeypatch.setattr(rows, "places_of", meanwhile)
    assert rows.tables_of(tensors) is others[0]
    assert rows.tables_of(tensors) is others[0]


def test_tables_that_nobody_holds_go_when_there_are_many(monkeypatch):
    monkeypatch.setattr(rows, "_tables", OrderedDict())
    monkeypatch.setattr(rows, "_MAX_TABLES", 4)
    tensors = [matrices([(3, n)]) for n in range(2, 12)]
    plan = RotationPlan(tensors[0])
    gone = weakref.ref(rows.tables_of(tensors[1]).layers)
    for one in tensors:
        rows.tables_of(one)
    assert len(rows._tables) == 4
    assert gone() is None
    assert [tables.layers[0].item() for tables in rows._tables.values()] == [8, 9, 10, 11]  # the latest
    weights, directions, grads = (matrices([(3, 2)]) for _ in range(3))
    check_rotation(weights, directions, grads, 0.3)
    assert plan._tables.layers.tolist() == [[2], [3], [0], [0]]  # a plan holds its own


@pytest.mark.gpu
def test_tables_that_a_graph_reads_stay(monkeypatch):
    monkeypatch.setattr(rows, "_tables", OrderedDict())
    monkeypatch.setattr(rows, "_MAX_TABLES", 1)
    shapes = [(64, 147), (256, 64)]
    weights, directions, grads = (matrices(shapes) for _ in range(3))
    expected = [w.clone() for w in weights]
    norms = [torch.ones(w.shape[0], device=DEVICE) for w in weights]
    plan = RotationPlan(weights)
    plan(expected, directions, grads, norms, 0.1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan(weights, directions, grads, norms, 0.1)
    tables = plan._tables
    assert rows._captured[id(tables)] is tables
    tasks = weakref.ref(tables.tasks[0][1])
    del plan, tables
    for n in range(5, 40):
        rows.tables_of(matrices([(n, n)]))
    assert tasks() is not None
    graph.replay()
    for ours, theirs in zip(weights, expected):
        assert torch.equal(ours, theirs)


def test_tables_do_not_follow_the_default_device():
    tensors = matrices([(4, 6), (2, 1013)])
    pointers = [x.data_ptr() for x in tensors]
    with torch.device("meta"):
        tables = rows.tables_of(tensors)
        addresses = rows.address_table(pointers, tables)
    assert tables.layers.device == addresses.device == tensors[0].device
    assert tables.layers.tolist() == [[6, 1013], [4, 2], [0, 64], [0, 4]]
    assert addresses.tolist() == pointers


def test_addresses_follow_the_tensors():
    first, second = torch.zeros(3, device=DEVICE), torch.zeros(3, device=DEVICE)
    pointers = [first.data_ptr(), second.data_ptr()]
    tables = rows.tables_of([first, second])
    assert rows.address_table(pointers, tables).tolist() == pointers
    assert rows.address_table(pointers[::-1], tables).tolist() == pointers[::-1]
    assert rows.aligned(pointers)
    assert not rows.aligned([first.data_ptr(), second[1:].data_ptr()])


@pytest.mark.gpu
def test_many_address_tables():
    """More than are kept: the oldest go, and the right one is used."""
    for _ in range(rows._MAX_ADDRESS_TABLES + 8):
        tensors = [torch.randn(4, 8, device=DEVICE) for _ in range(3)]
        check_rotation(*([t] for t in tensors), 0.1)
        del tensors
    assert len(rows._addresses) <= rows._MAX_ADDRESS_TABLES


@pytest.mark.gpu
def test_a_graph_keeps_its_own_addresses():
    shapes = [(64, 147), (256, 64), (512, 4608)]
    weights, directions, grads = (matrices(shapes) for _ in range(3))
    norms = [torch.ones(w.shape[0], device=DEVICE) for w in weights]
    angle = torch.tensor(0.1, device=DEVICE)
    start = [w.clone() for w in weights]
    plan = RotationPlan(weights)
    plan(weights, directions, grads, norms, angle)
    expected = [w.clone() for w in weights]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan(weights, directions, grads, norms, angle)
    for _ in range(2):
        plan([w.clone() for w in weights], directions, grads, norms, angle)
        for w, s in zip(weights, start):
            w.copy_(s)
        graph.replay()
        for w, reference in zip(weights, expected):
            assert torch.equal(w, reference)


def check_norms(before: list[Tensor], after: list[Tensor], relative: float = 1e-6, absolute: float = 0.0) -> None:
    """Norms and angles of the kernel against float64; and `previous` becomes the weights."""
    previous = [b.clone() for b in before]
    outputs = [[torch.full((w.shape[0],), 7.0, device=DEVICE) for w in after] for _ in range(3)]
    norms, tangents, alone = outputs
    RowNormsPlan(after, norms, previous, tangents)()
    RowNormsPlan(after, alone)()
    for b, w, kept, norm, tangent, same in zip(before, after, previous, norms, tangents, alone):
        assert torch.equal(kept, w)
        assert torch.equal(norm, same)
        torch.testing.assert_close(norm.double(), channel_norms(w.double()), rtol=1e-6, atol=0)
        angle = angular_update(b.double(), w.double())
        ours = 2 * tangent.double().atan()
        torch.testing.assert_close(ours, angle, rtol=relative, atol=absolute, equal_nan=True)


@pytest.mark.parametrize("step", [1.0, 1e-2, 1e-4, 1e-6])
def test_norms_and_angles_are_those_of_float64(step):
    """However small the step is: the arc cosine of float32 has no digit left at 1e-4."""
    before = matrices(SHAPES[1:])
    after = [b + step * torch.randn_like(b) for b in before]
    before[2][0] = after[2][0]  # did not move
    check_norms(before, after, relative=2e-6)


def test_angles_of_rows_that_grow_and_of_odd_rows():
    before = matrices(SHAPES[1:])
    after = [2.5 * b + 1e-3 * torch.randn_like(b) for b in before]
    before[2][0], before[3][0] = 0, 0  # no direction
    after[2][1], after[3][0] = 0, 0
    after[4][1] = -before[4][1]  # opposite
    after[5][1] = 1e-3 * torch.randn_like(before[5][1]) - before[5][1]
    # The difference is rounded relative to the row, not to the angle.
    check_norms(before, after, relative=2e-6, absolute=1e-7)
    tangents = [torch.zeros(w.shape[0], device=DEVICE) for w in after]
    RowNormsPlan(after, [t.clone() for t in tangents], before, tangents)()
    assert tangents[2][:2].isnan().all()
    assert tangents[2][2:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_of_half_precision_weights(dtype):
    before = [b.to(dtype) for b in matrices(SHAPES[1:])]
    check_norms(before, [(b + 0.1 * torch.randn_like(b)).to(dtype) for b in before], relative=2e-6)


def test_norms_of_unaligned_weights():
    flat = torch.randn(2, 81, device=DEVICE)
    before, after = ([flat[i, 1:].view(10, 8)] for i in range(2))
    check_norms(before, after)


def test_the_recorder_records_the_same_through_the_kernel(monkeypatch):
    """Beside weights that the kernel does not take: along dimension 1, whole, and of another dtype."""
    recordings = []
    launches = []

    def plan(weights, *others):
        launches.append([tuple(w.shape) for w in weights])
        return RowNormsPlan(weights, *others)

    monkeypatch.setattr("normmatters.kernels.triton.rows.RowNormsPlan", plan)
    for kernel in (True, False):
        monkeypatch.setattr(channels, "BACKENDS", {DEVICE: "normmatters.kernels.triton.rows"} if kernel else {})
        torch.manual_seed(0)
        dims = {"conv": 0, "transposed": 1, "whole": None, "half": 0, "vector": 0}
        weights = dict(zip(dims, matrices([(5, 3, 3, 3), (4, 6, 2, 2), (3, 7), (4, 9), (11,)])))
        weights["half"] = weights["half"].bfloat16()
        recorder = NormRecorder(weights, dims=dims)
        for _ in range(3):
            for w in weights.values():
                w += 0.01 * torch.randn_like(w)
            recorder.step()
        recordings.append(recorder.recording())
    assert launches == [[(5, 3, 3, 3), (11,)], [(4, 9)]]  # planned once
    ours, plain = recordings
    for name in plain.names:
        torch.testing.assert_close(ours.norms[name], plain.norms[name], rtol=1e-6, atol=0)
        # The plain path knows the difference of two norms to float32 only.
        torch.testing.assert_close(ours.angles[name], plain.angles[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_are_scaled_each_by_its_number(dtype, monkeypatch):
    """Beside weights that the kernel does not take."""
    monkeypatch.setitem(channels.BACKENDS, DEVICE, "normmatters.kernels.triton.rows")
    dims = {"conv": 0, "transposed": 1, "whole": None, "long": 0, "odd": 0}
    tensors = [w.to(dtype) for w in matrices([(5, 3, 3, 3), (4, 6, 2, 2), (3, 7), (2, 2100), (19, 130)])]
    weights = dict(zip(dims, tensors))
    rows_of = Channels(weights, dims)
    ratio = torch.rand(rows_of.total, device=DEVICE) * 3
    expected = [r.double() * w.double() for w, r in zip(tensors, rows_of.broadcast(ratio))]
    scaler = channels.ChannelScaler(rows_of, ratio)
    scaler.scale_()
    assert (scaler.plain, len(scaler.launches)) == ([1, 2], 1)
    for w, reference in zip(tensors, expected):
        # One rounding in the kernel, two where the plain path rounds the ratio too.
        torch.testing.assert_close(w.double(), reference, rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_step_size_correction_takes_the_same_steps_through_the_kernels(monkeypatch):
    runs = []
    for kernel in (True, False):
        monkeypatch.setattr(channels, "BACKENDS", {DEVICE: "normmatters.kernels.triton.rows"} if kernel else {})
        torch.manual_seed(0)
        weights = {n: torch.nn.Parameter(w) for n, w in zip("ab", matrices([(5, 3, 3, 3), (4, 9)]))}
        reference = torch.optim.SGD(weights.values(), lr=0.1, weight_decay=0.1)
        recorder = NormRecorder(weights, reference)
        for optimizer in (reference, None):
            if optimizer is None:
                sgd = torch.optim.SGD(weights.values(), lr=0.1, momentum=0.9)
                optimizer = StepSizeCorrection(sgd, recorder.recording(), weights, form="exact")
            for _ in range(4):
                for w in weights.values():
                    g = torch.randn_like(w)
                    sums = tuple(range(1, w.ndim))
                    along = (g * w).sum(sums, keepdim=True) / w.square().sum(sums, keepdim=True)
                    w.grad = (g - along * w).detach()  # as a normalization behind it would have it
                optimizer.step()
            recorder.remove()
        assert bool(optimizer._scaler.launches) is kernel
        copied = copy.deepcopy(optimizer)  # launches are not copied
        assert copied._scaler.launches == []
        runs.append([*weights.values(), *optimizer.ratio.values()])
    for ours, plain in zip(*runs):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_the_recorder_in_a_graph_through_the_kernel_and_plain(monkeypatch):
    shapes = [(64, 3, 7, 7), (256, 64, 1, 1), (512, 512, 3, 3)]
    runs = []
    for captured, kernel in ((False, True), (True, True), (False, False)):
        monkeypatch.setattr(channels, "BACKENDS", {DEVICE: "normmatters.kernels.triton.rows"} if kernel else {})
        torch.manual_seed(0)
        weights = {n: torch.nn.Parameter(w) for n, w in zip("abc", matrices(shapes))}
        for w in weights.values():
            w.grad = torch.zeros_like(w)
        optimizer = torch.optim.SGD(weights.values(), lr=0.1)
        recorder = NormRecorder(weights, optimizer, capacity=16)
        step = optimizer.step
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            step = graph.replay
        for _ in range(5):
            for w in weights.values():
                w.grad.normal_(std=1e-2)
            step()
        runs.append(recorder.recording())
    eager, replayed, plain = runs
    assert len(eager.steps) == len(replayed.steps) == len(plain.steps) == 7
    for name in eager.names:
        assert torch.equal(eager.norms[name], replayed.norms[name])
        assert torch.equal(eager.angles[name], replayed.angles[name])
        assert (eager.angles[name][1:] > 0).all()
        torch.testing.assert_close(eager.norms[name], plain.norms[name], rtol=1e-6, atol=0)
        torch.testing.assert_close(eager.angles[name], plain.angles[name], rtol=1e-3, atol=1e-6)
