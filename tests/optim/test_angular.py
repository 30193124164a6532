from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn

from normmatters.optim import Angular, AngularSGD, _base, channels
from normmatters.optim.channels import ChannelRotator, Momentum, angular_update, channel_norms, rotate_channel_
from normmatters.optim.equilibrium import adamw_equilibrium_angle, equilibrium_angle
from support.digits import IMAGES, LABELS, backward, digit_net, split, train
from support.quick_interpreter import quicken

FLOAT64 = 1e-12  # a few hundred roundings of float64


def angular_sgd(net: nn.Sequential, **kwargs: object) -> AngularSGD:
    invariant, rest = split(net)
    return AngularSGD([{"params": invariant}, {"params": rest, "angular": False, "lr": 0.1}], **kwargs)


def wrapped(
    net: nn.Sequential, inner: type[torch.optim.Optimizer], angle: float | None = None, **kwargs: object
) -> Angular:
    invariant, rest = split(net)
    return Angular(inner([{"params": invariant}, {"params": rest, "angular": False}], **kwargs), angle)


def turned(net: nn.Sequential, optimizer: torch.optim.Optimizer, steps: int = 1) -> list[Tensor]:
    """The angle by which every neuron of each invariant weight turns in the last of these steps."""
    train(net, optimizer, steps - 1)
    before = [p.detach().clone() for p in split(net)[0]]
    train(net, optimizer, 1, start=steps)
    return [angular_update(b, p) for b, p in zip(before, split(net)[0])]


@pytest.mark.parametrize("dim", [0, 1, None])
def test_rotation_is_by_the_angle_towards_the_direction(dim):
    w, d, g = torch.randn(3, 5, 3, 4, 2, dtype=torch.float64)
    norm = channel_norms(w, dim) * 1.5
    start, theta = w.clone(), 0.3
    rotate_channel_(w, d, g, norm, theta, dim)
    torch.testing.assert_close(channel_norms(w, dim), norm, rtol=FLOAT64, atol=0)
    torch.testing.assert_close(angular_update(start, w, dim), torch.full_like(norm, theta), rtol=FLOAT64, atol=0)
    if dim is None:
        start, w, d = (x.reshape(1, -1) for x in (start, w, d))
    else:
        start, w, d = (x.movedim(dim, 0).flatten(1) for x in (start, w, d))
    # In the plane of w and d, on the side away from d.
    for u, v, x in zip(start, d, w):
        assert torch.linalg.matrix_rank(torch.stack([u, v, x]), rtol=1e-10) == 2
        assert (x / x.norm() - u / u.norm()) @ (v - (v @ u) / (u @ u) * u) < 0


def test_no_gradient_or_a_radial_direction_is_no_rotation():
    w = torch.tensor([[3.0, 4.0], [3.0, 4.0], [3.0, 4.0]])
    d = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.3, 0.4]])
    g = torch.tensor([[0.0, 1e-40], [0.0, 0.0], [1.0, 1.0]])
    rotate_channel_(w, d, g, torch.full((3,), 5.0), 0.1)
    assert not torch.equal(w[0], torch.tensor([3.0, 4.0]))  # a gradient that squares to zero is still one
    torch.testing.assert_close(w[1:], torch.tensor([[3.0, 4.0], [3.0, 4.0]]))


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_every_neuron_turns_by_the_recipes_angle_and_keeps_its_norm(momentum, nesterov):
    net = digit_net()
    norms = [channel_norms(p.detach()) for p in split(net)[0]]
    optimizer = angular_sgd(net, lr=0.1, weight_decay=5e-4, momentum=momentum, nesterov=nesterov)
    expected = equilibrium_angle(0.1, 5e-4, momentum, nesterov=nesterov)
    for angles, p, norm in zip(turned(net, optimizer, 20), split(net)[0], norms):
        torch.testing.assert_close(angles, torch.full_like(angles, expected), rtol=1e-9, atol=0)
        torch.testing.assert_close(channel_norms(p.detach()), norm, rtol=FLOAT64, atol=0)


def test_direction_is_that_of_sgd():
    """The tangent part of AngularSGD's step is parallel to the tangent part of SGD's momentum, neuron by neuron."""
    net, momentum = digit_net(), 0.9
    optimizer = angular_sgd(net, angle=1e-3, momentum=momentum)
    buffer = torch.zeros_like(net[3].weight)
    for t in range(5):
        backward(net, torch.arange(32) + t)
        buffer = momentum * buffer + net[3].weight.grad
        before = net[3].weight.detach().clone()
        optimizer.step()
    w, step, b = before.flatten(1), (net[3].weight.detach() - before).flatten(1), buffer.flatten(1)
    unit = w / w.norm(dim=1, keepdim=True)
    step, b = (x - (x * unit).sum(1, keepdim=True) * unit for x in (step, b))
    cosine = nn.functional.cosine_similarity(step, b, dim=1)
    torch.testing.assert_close(cosine, -torch.ones_like(cosine), rtol=1e-9, atol=0)


def test_schedulers_move_the_angle_as_documented():
    recipe, direct = digit_net(), digit_net()
    a = angular_sgd(recipe, lr=0.1, weight_decay=5e-4)
    b = angular_sgd(direct, angle=0.01)
    c_net = digit_net()
    c = wrapped(c_net, torch.optim.SGD, angle=0.01, lr=0.1, momentum=0.9)
    for optimizer in (a, b, c):
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [1], gamma=0.01).step()
    assert turned(recipe, a)[0].mean().item() == pytest.approx(equilibrium_angle(0.1, 5e-4, 0.9) / 10, rel=1e-9)
    assert turned(direct, b)[0].mean().item() == pytest.approx(1e-4, rel=1e-9)
    assert turned(c_net, c)[0].mean().item() == pytest.approx(1e-4, rel=1e-9)


@pytest.mark.parametrize(
    ("inner", "kwargs", "expected"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}, equilibrium_angle(0.1, 5e-4, 0.9)),
        (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}, adamw_equilibrium_angle(1e-2, 0.1, 0.9)),
    ],
)
def test_angular_around_an_optimizer(inner, kwargs, expected):
    net, plain = digit_net(), digit_net()
    norms = [channel_norms(p.detach()) for p in split(net)[0]]
    optimizer = wrapped(net, inner, **kwargs)
    for angles, p, norm in zip(turned(net, optimizer, 15), split(net)[0], norms):
        torch.testing.assert_close(angles, torch.full_like(angles, expected), rtol=1e-9, atol=0)
        torch.testing.assert_close(channel_norms(p.detach()), norm, rtol=FLOAT64, atol=0)
    assert optimizer.param_groups[0]["weight_decay"] == kwargs["weight_decay"]
    # Groups with angular=False are the wrapped optimizer's own: the first step is the same as without the wrapper.
    fresh = digit_net()
    train(fresh, wrapped(fresh, inner, **kwargs), 1)
    train(plain, inner(plain.parameters(), **kwargs), 1)
    for p, q in zip(split(fresh)[1], split(plain)[1]):
        assert torch.equal(p, q)


def test_angular_sgd_is_angular_around_sgd():
    """Two implementations, one trajectory (SGD's Nesterov changes gradients in place, which must not matter)."""
    for nesterov in (False, True):
        own, around = digit_net(), digit_net()
        train(own, angular_sgd(own, lr=0.1, weight_decay=5e-4, nesterov=nesterov), 25)
        # Groups with angular=False keep their weight decay in both.
        optimizer = wrapped(around, torch.optim.SGD, lr=0.1, weight_decay=5e-4, momentum=0.9, nesterov=nesterov)
        train(around, optimizer, 25)
        for p, q in zip(own.parameters(), around.parameters()):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-9)


def test_dead_neurons_stay_put_and_live_ones_go_on():
    net = digit_net()
    optimizer = angular_sgd(net, angle=0.01)
    train(net, optimizer, 5)  # momentum is not zero now
    before = net[0].weight.detach().clone()
    for t in range(3):
        backward(net, torch.arange(32) + t)
        net[0].weight.grad[2] = 0
        optimizer.step()
    angles = angular_update(before, net[0].weight)
    assert angles[2] < 1e-12
    assert (angles[[0, 1, 3, 4, 5]] > 0.02).all()


def test_transposed_convolutions_turn_along_dim_one():
    conv = nn.ConvTranspose2d(3, 4, 3, bias=False).double()
    optimizer = AngularSGD([{"params": conv.parameters(), "dim": 1}], angle=0.05)
    before = conv.weight.detach().clone()
    conv(torch.randn(2, 3, 5, 5, dtype=torch.float64)).square().sum().backward()
    optimizer.step()
    angles = angular_update(before, conv.weight, 1)
    assert angles.shape == (4,)
    torch.testing.assert_close(angles, torch.full_like(angles, 0.05), rtol=1e-10, atol=0)


@pytest.mark.parametrize("kind", ["own", "sgd", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_resume_is_bit_for_bit(kind, dtype):
    def make(net: nn.Sequential, lr: float) -> torch.optim.Optimizer:
        if kind == "own":
            return angular_sgd(net, lr=lr, weight_decay=5e-3)
        if kind == "sgd":
            return wrapped(net, torch.optim.SGD, lr=lr, momentum=0.9, weight_decay=5e-3)
        return wrapped(net, torch.optim.AdamW, lr=lr, weight_decay=5e-3)

    whole = digit_net().to(dtype)
    optimizer = make(whole, 0.1)
    train(whole, optimizer, 5)
    file = io.BytesIO()
    torch.save({"net": whole.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    train(whole, optimizer, 5, start=5)
    saved = torch.load(file, weights_only=True)
    resumed = digit_net(seed=1).to(dtype)
    resumed.load_state_dict(saved["net"])
    again = make(resumed, 0.01)
    again.load_state_dict(saved["optimizer"])
    train(resumed, again, 5, start=5)
    for p, q in zip(whole.parameters(), resumed.parameters()):
        assert torch.equal(p, q)


def test_closure_grad_scaler_new_groups_and_copies():
    for make in (
        lambda net: angular_sgd(net, angle=0.01),
        lambda net: wrapped(net, torch.optim.SGD, angle=0.01, lr=0.1, momentum=0.9),
    ):
        net = digit_net()
        optimizer = make(net)
        loss = optimizer.step(lambda net=net: backward(net, torch.arange(32)))
        assert loss.item() > 0
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(backward(net, torch.arange(32))).detach()
        net[0].weight.grad[0, 0, 0, 0] = torch.inf
        before = net[0].weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, net[0].weight)

        extra = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
        optimizer.add_param_group(
            {"params": [extra], "angle": 0.2} | ({} if isinstance(optimizer, AngularSGD) else {"lr": 0.1})
        )
        start = extra.detach().clone()
        extra.grad = torch.randn_like(extra)
        optimizer.step()
        torch.testing.assert_close(angular_update(start, extra), torch.full((3,), 0.2, dtype=torch.float64))
        twin = copy.deepcopy(optimizer)
        assert twin.param_groups[0]["params"][0] is not optimizer.param_groups[0]["params"][0]
        assert str(twin).startswith(type(optimizer).__name__)


@pytest.mark.parametrize("wrap", [False, True])
def test_a_weight_decay_of_no_angle_is_named_in_the_midst_of_a_run(wrap):
    net = digit_net()
    recipe = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-3}
    optimizer = wrapped(net, torch.optim.SGD, **recipe) if wrap else angular_sgd(net, **recipe)
    train(net, optimizer, 1)
    before = copy.deepcopy(net.state_dict())
    optimizer.param_groups[0]["weight_decay"] = -5e-3
    with pytest.raises(ValueError, match=r"weight_decay must be >= 0 and finite, got -0\.005"):
        optimizer.step()
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


def test_capturable_reads_the_lr_tensor_at_every_step():
    net = digit_net()
    lr = torch.tensor(0.1, dtype=torch.float64)
    optimizer = AngularSGD(split(net)[0], lr=lr, weight_decay=5e-3, capturable=True)
    assert turned(net, optimizer)[0].mean().item() == pytest.approx(equilibrium_angle(0.1, 5e-3, 0.9), rel=1e-6)
    lr.fill_(0.4)
    assert turned(net, optimizer)[0].mean().item() == pytest.approx(equilibrium_angle(0.4, 5e-3, 0.9), rel=1e-6)


def test_an_lr_on_the_device_is_not_rounded_to_half_precision():
    """Nor for the other weights of an ordinary group, where the first is of half precision."""
    ends = []
    for kind, options in ((torch.optim.SGD, {}), (AngularSGD, {"angular": False, "capturable": True, "momentum": 0.0})):
        half, single = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16)), nn.Parameter(torch.ones(2, 2))
        half.grad, single.grad = torch.ones_like(half), torch.ones_like(single)
        group = {"params": [half, single], "lr": torch.tensor(0.1), **options}
        kind([group], lr=0.1, weight_decay=0.0).step()
        ends.append((half.detach(), single.detach()))
    assert torch.equal(ends[0][0], ends[1][0])
    torch.testing.assert_close(ends[0][1], ends[1][1], rtol=1e-7, atol=0)


def test_it_trains():
    net = digit_net(12)
    optimizer = angular_sgd(net, angle=0.02)
    train(net, optimizer, 300)
    assert (net(IMAGES).argmax(1) == LABELS).double().mean() > 0.95


def test_errors_name_the_parameter_and_change_nothing():
    net = digit_net()
    with torch.no_grad():
        net[3].weight[4] = 0
    optimizer = AngularSGD([(n, p) for n, p in net.named_parameters() if p.ndim == 4], angle=0.1)
    before = copy.deepcopy(net.state_dict())
    backward(net, torch.arange(32))
    with pytest.raises(
        ValueError, match=r"'3.weight' \(parameter 1 of group 0.*neuron 4 has norm 0; 1 of its 6 neurons"
    ):
        optimizer.step()
    assert torch.equal(before["0.weight"], net[0].weight)
    assert not any(optimizer.state.values())

    with pytest.raises(ValueError, match=r"'1.weight'.*fewer than two numbers"):
        AngularSGD(net.named_parameters(), angle=0.1)
    with pytest.raises(ValueError, match="give either angle, or lr and weight_decay"):
        AngularSGD(net[0].parameters())
    with pytest.raises(ValueError, match="needs weight_decay > 0"):
        AngularSGD(net[0].parameters(), lr=0.1)
    with pytest.raises(ValueError, match="takes the place of weight_decay"):
        AngularSGD(net[0].parameters(), angle=0.1, weight_decay=0.1)
    with pytest.raises(ValueError, match=r"\[0, π/2\) radians, got 2"):
        AngularSGD(net[0].parameters(), angle=2.0)
    with pytest.raises(ValueError, match="needs an lr of its own"):
        AngularSGD([{"params": net[1].parameters(), "angular": False}], angle=0.1)
    with pytest.raises(ValueError, match="dim 4 is no dimension of"):
        AngularSGD(net[0].parameters(), angle=0.1, dim=4)
    with pytest.raises(TypeError, match=r"must be a torch.optim.Optimizer, got list"):
        Angular([net[0].weight])
    with pytest.raises(TypeError, match="AngularSGD sets its angle already"):
        Angular(optimizer)
    with pytest.raises(ValueError, match="known for SGD and AdamW, not for Adagrad"):
        Angular(torch.optim.Adagrad(net[0].parameters(), lr=0.1, weight_decay=0.1))
    inner = torch.optim.SGD(net[0].parameters(), lr=0.1)
    with pytest.raises(ValueError, match="needs weight_decay > 0"):
        Angular(inner)
    assert "angular" not in inner.param_groups[0]
    Angular(torch.optim.Adagrad(net[0].parameters(), lr=0.1), angle=0.1).step()


@pytest.mark.parametrize(("options", "fused"), [({}, True), ({"nesterov": True}, True), ({"foreach": True}, False)])
def test_ordinary_groups_take_the_fused_kernel(options, fused, monkeypatch):
    """As parameters on a GPU do; here on a CPU, which has the kernel too. The steps are SGD's."""
    monkeypatch.setattr(_base, "FUSED_ON", {"cpu"})
    calls = []
    real = torch._fused_sgd_
    monkeypatch.setattr(torch, "_fused_sgd_", lambda *args, **kwargs: (calls.append(args), real(*args, **kwargs)))
    torch.manual_seed(0)
    ours, plain = (nn.Parameter(torch.ones(5, dtype=torch.float64)) for _ in range(2))
    nesterov = options.get("nesterov", False)
    optimizers = [
        AngularSGD([{"params": [ours], "angular": False, "lr": 0.1, "weight_decay": 0.01}], angle=0.1, **options),
        torch.optim.SGD([plain], 0.1, 0.9, weight_decay=0.01, nesterov=nesterov),
    ]
    for _ in range(4):
        ours.grad = torch.randn(5, dtype=torch.float64)
        plain.grad = ours.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert len(calls) == (4 if fused else 0)
    torch.testing.assert_close(ours, plain, rtol=1e-14, atol=1e-14)


def check_kernel(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [torch.randn(4, 3, 3, 3), torch.randn(2, 700), torch.randn(5, 7)]
    weights[0] = weights[0].to(memory_format=torch.channels_last)
    weights = [w.to(device) for w in weights]
    directions, grads = ([torch.randn_like(w) for w in weights] for _ in range(2))
    grads[0][1] = 0
    directions[2][3] = weights[2][3] * 2
    norms = [channel_norms(w) * 2 for w in weights]
    monkeypatch.setitem(channels.BACKENDS, device, "normmatters.kernels.triton.rows")
    turn = ChannelRotator()
    for momentum in (None, Momentum(0.9), Momentum(0.8, -1.0, True)):
        expected, buffers = ([x.double() for x in xs] for xs in (weights, directions))
        for angle in (0.1, torch.tensor(-0.3, device=device)):
            ds = buffers if momentum is None else momentum.take_in_(buffers, [g.double() for g in grads])
            for w, d, g, n in zip(expected, ds, grads, norms):
                rotate_channel_(w, d, g.double(), n, angle)
            turn(weights, directions, grads, norms, angle, 0, momentum)
            assert len(turn.launches) == 1
            assert not turn.plain
            for ours, exact in zip([*weights, *directions], [*expected, *buffers]):
                # √700 float32 roundings of numbers of size 1 to 10
                torch.testing.assert_close(ours.double(), exact, rtol=0, atol=2e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs on the GPU")
def test_kernel_is_the_equation_in_the_interpreter(monkeypatch):
    pytest.importorskip("triton")
    quicken()
    check_kernel("cpu", monkeypatch)


@pytest.mark.gpu
def test_kernel_is_the_equation_on_a_gpu(monkeypatch):
    check_kernel("cuda", monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["own", "wrapped"])
def test_cuda_graph_replays_the_same_steps(kind):
    nets = [digit_net().float().cuda() for _ in range(2)]
    gradients = [[torch.randn_like(p) for p in nets[0].parameters()] for _ in range(20)]

    def make(net):
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
        if kind == "own":
            return angular_sgd(net, angle=0.01, capturable=True)
        return wrapped(net, torch.optim.AdamW, angle=0.01, lr=torch.tensor(0.01, device="cuda"), capturable=True)

    def give(net, t):
        for p, g in zip(net.parameters(), gradients[t]):
            p.grad.copy_(g)

    optimizers = [make(net) for net in nets]
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        give(nets[0], 0)
        optimizers[0].step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        optimizers[0].step()
    for t in range(1, 20):
        give(nets[0], t)
        graph.replay()
    for t in range(20):
        give(nets[1], t)
        optimizers[1].step()
    for p, q in zip(nets[0].parameters(), nets[1].parameters()):
        torch.testing.assert_close(p, q)
