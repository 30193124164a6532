from __future__ import annotations

import copy
import importlib
import io
import math

import pytest
import torch
from torch import nn

from normmatters.optim import _base
from normmatters.optim._base import RESCALE_AT
from normmatters.optim.weight_decay_free import WeightDecayFreeSGD, largest_decay, next_alpha_kappa
from normmatters.optim.weight_decay_free_adamw import WeightDecayFreeAdamW
from support.digits import IMAGES, backward, digit_net, direction_error, split, train

# Rounding of float64 grows over 500 steps of a chaotic map; it stays far below this, and a wrong formula far above.
EXACT = 1e-10


def free_sgd(net: nn.Sequential, **kwargs: object) -> WeightDecayFreeSGD:
    invariant, rest = split(net)
    return WeightDecayFreeSGD([{"params": invariant}, {"params": rest, "weight_decay_free": False}], **kwargs)


def free_adamw(net: nn.Sequential, **kwargs: object) -> WeightDecayFreeAdamW:
    invariant, rest = split(net)
    return WeightDecayFreeAdamW([{"params": invariant}, {"params": rest, "weight_decay_free": False}], **kwargs)


def warmup_and_drop(t: int) -> float:
    return 0.1 * min(1.0, t / 20) if t < 300 else 0.01  # the first step has lr 0


@pytest.mark.parametrize(
    ("momentum", "nesterov", "weight_decay"),
    [(0.0, False, 5e-3), (0.9, False, 5e-4), (0.9, False, 5e-3), (0.9, True, 5e-3)],
)
def test_directions_are_those_of_sgd_with_weight_decay(momentum, nesterov, weight_decay):
    kwargs = {"lr": 0.1, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
    decayed, free = digit_net(), digit_net()
    train(decayed, torch.optim.SGD(decayed.parameters(), **kwargs), 500, warmup_and_drop)
    optimizer = free_sgd(free, **kwargs)
    train(free, optimizer, 500, warmup_and_drop)

    assert direction_error(split(decayed)[0], split(free)[0]) < EXACT
    for p, q in zip(split(decayed)[1], split(free)[1]):  # ordinary SGD with decay there
        assert (p - q).abs().max() < EXACT
    # And the norms differ by the α of the recursion, which had something to do.
    alpha = optimizer.state[free[0].weight]["alpha"]
    assert alpha > 1.01
    assert (free[0].weight.norm() / decayed[0].weight.norm()).item() == pytest.approx(alpha, rel=1e-9)


@pytest.mark.parametrize(("nesterov", "capturable"), [(False, True), (True, False)])
def test_long_runs_rescale(nesterov, capturable):
    # ηλ = .002, close to the bound: α grows 2.2 % a step and would pass 1e3.
    kwargs = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.02, "nesterov": nesterov}
    decayed, free = digit_net(), digit_net()
    train(decayed, torch.optim.SGD(decayed.parameters(), **kwargs), 300)
    optimizer = free_sgd(free, **kwargs, capturable=capturable)
    train(free, optimizer, 300)
    alpha, kappa = 1.0, 0.0
    for _ in range(300):
        alpha, kappa = next_alpha_kappa(alpha, kappa, 0.1, 0.02, 0.9, nesterov)
    state = optimizer.state[free[0].weight]
    assert alpha > RESCALE_AT**2
    assert float(state["alpha"]) < RESCALE_AT
    assert direction_error(split(decayed)[0], split(free)[0]) < EXACT


@pytest.mark.parametrize("make", [free_sgd, free_adamw])
def test_running_statistics_fit_the_weights_where_these_are_rescaled(make):
    """They are of the last batches: after a jump of the weights evaluation would be at chance for 50 steps."""
    net = digit_net()
    kwargs = {"momentum": 0.9} if make is free_sgd else {}
    optimizer = make(net, lr=0.1, weight_decay=0.01 * (1 if make is free_sgd else 10), **kwargs)
    train(net, optimizer, 220)
    assert optimizer.state[net[0].weight]["alpha"] < RESCALE_AT / 1.05
    for t in range(220, 380):
        train(net, optimizer, 1, start=t)
        var = net[0](IMAGES).var((0, 2, 3))
        assert (var / net[1].running_var).log().abs().max() < math.log(10), t  # 16² after a jump
    assert optimizer.state[net[0].weight]["alpha"] > RESCALE_AT / 1.05


@pytest.mark.parametrize("make", [WeightDecayFreeSGD, WeightDecayFreeAdamW])
def test_float32_never_overflows(make):
    """At the bound α grows 5 % a step: after 2500 steps by e^130, and float32 ends at e^88."""
    w = nn.Parameter(torch.randn(4, 3))
    kwargs = {"lr": 0.1, "weight_decay": 0.0263} | ({"momentum": 0.9} if make is WeightDecayFreeSGD else {})
    kwargs["weight_decay"] *= 20 if make is WeightDecayFreeAdamW else 1
    optimizer = make([w], **kwargs)
    for _ in range(2500):
        unit = w.detach() / w.detach().norm()
        w.grad = torch.randn(4, 3) / w.detach().norm()
        w.grad -= (w.grad * unit).sum() * unit
        optimizer.step()
        assert optimizer.state[w]["alpha"] < RESCALE_AT
    assert w.isfinite().all()
    assert 1e-3 < w.norm() < 1e3


def test_momentum_may_change_and_parameters_may_miss_steps():
    """A step without a gradient does not decay a parameter, so α is its own; OneCycle changes μ from step to step."""
    decayed, free = digit_net(), digit_net()
    sgd = torch.optim.SGD(decayed.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-3)
    optimizer = free_sgd(free, lr=0.1, momentum=0.9, weight_decay=5e-3)
    for net, opt in ((decayed, sgd), (free, optimizer)):
        for t in range(120):
            backward(net, torch.arange(32) + t)
            if t % 3 == 0:
                net[3].weight.grad = None
            for group in opt.param_groups:
                group["momentum"] = 0.85 + 0.1 * math.sin(t / 9) ** 2
            opt.step()
    assert direction_error(split(decayed)[0], split(free)[0]) < EXACT
    assert optimizer.state[free[0].weight]["alpha"] > 1.02 * optimizer.state[free[3].weight]["alpha"]


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}])
def test_momentum_may_pause(options):
    """Without momentum SGD neither uses nor changes its buffer; the weights that move on see another part of it."""
    decayed, free = digit_net(), digit_net()
    sgd = torch.optim.SGD(decayed.parameters(), lr=0.1, weight_decay=0.02)
    optimizer = free_sgd(free, lr=0.1, weight_decay=0.02, **options)
    for net, opt in ((decayed, sgd), (free, optimizer)):
        for t in range(170):
            for group in opt.param_groups:
                group["momentum"] = 0.9 if 3 <= t < 120 or t >= 140 else 0.0
            backward(net, torch.arange(32) + t)
            opt.step()
            if t in (119, 139) and opt is optimizer:  # α reaches RESCALE_AT in the pause
                assert (opt.state[net[0].weight]["alpha"] > RESCALE_AT / 1.02) == (t == 139)
    assert direction_error(split(decayed)[0], split(free)[0]) < EXACT


@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"foreach": False}, {"fused": True}, {"capturable": True}, {"lr": "tensor"}]
)
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_implementations_agree(options, momentum, nesterov):
    if nesterov and "fused" in options:
        pytest.skip("refused, see below")
    if "lr" in options:  # what a CUDA graph needs under a scheduler; the last layer's SGD must read it too
        options = {"lr": torch.tensor(0.1, dtype=torch.float64), "capturable": True}
    plain, other = digit_net(), digit_net()
    for net, extra in ((plain, {}), (other, options)):
        kwargs = {"lr": 0.1, "momentum": momentum, "weight_decay": 5e-3, "nesterov": nesterov} | extra
        optimizer = free_sgd(net, **kwargs)
        train(net, optimizer, 15)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.1
        train(net, optimizer, 15, start=15)
    for p, q in zip(plain.parameters(), other.parameters()):
        assert (p - q).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ({}, 2),
        ({"momentum": 0.0}, 2),
        ({"fused": True}, 2),
        ({"fused": False}, 0),
        ({"foreach": True}, 0),
        ({"foreach": False}, 0),
        ({"nesterov": True}, 1),  # ordinary SGD has it in every form
        ({"capturable": True}, 1),
    ],
)
def test_the_fused_kernel_is_chosen_where_it_applies(options, groups, monkeypatch):
    """The choice is that of CUDA parameters, made here for a CPU, which has the kernel too."""
    monkeypatch.setattr(_base, "FUSED_ON", {"cpu"})
    calls = []
    real = torch._fused_sgd_
    monkeypatch.setattr(torch, "_fused_sgd_", lambda *args, **kwargs: (calls.append(args), real(*args, **kwargs)))
    kwargs = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-3} | options
    decayed, net = digit_net(), digit_net()
    same = {k: v for k, v in kwargs.items() if k not in ("fused", "foreach", "capturable")}
    train(decayed, torch.optim.SGD(decayed.parameters(), **same), 20)
    train(net, free_sgd(net, **kwargs), 20)
    assert len(calls) == 20 * groups
    assert direction_error(split(decayed)[0], split(net)[0]) < EXACT
    for p, q in zip(split(decayed)[1], split(net)[1]):
        assert (p - q).abs().max() < EXACT


@pytest.mark.parametrize("fused", [True, False])
def test_a_factor_that_waits_for_the_next_step_is_not_lost_where_the_run_goes_on(fused):
    """A captured run leaves 1/factor to its next step; that step may be one of another implementation."""
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-3}
    net = digit_net()
    first = free_sgd(net, **options, capturable=True)
    train(net, first, 3)
    weights, saved = copy.deepcopy(net.state_dict()), copy.deepcopy(first.state_dict())
    ends = []
    for waits in (False, True):
        net.load_state_dict(weights)
        state = copy.deepcopy(saved)
        for group in state["param_groups"]:
            group.update(capturable=False, fused=fused)
        for one in state["state"].values():
            if waits and "pending" in one:
                one["pending"] = one["pending"] * 0.25
                one["momentum_buffer"] *= 4
        optimizer = free_sgd(net, **options)
        optimizer.load_state_dict(state)
        train(net, optimizer, 3)
        ends.append([p.detach().clone() for p in net.parameters()])
    for plain, waited in zip(*ends):
        torch.testing.assert_close(waited, plain, rtol=1e-12, atol=1e-14)


def test_gradients_that_the_fused_kernel_refuses_are_stepped_by_foreach(monkeypatch):
    monkeypatch.setattr(_base, "FUSED_ON", {"cpu"})
    monkeypatch.setattr(torch, "_fused_sgd_", lambda *args, **kwargs: pytest.fail("strides differ"))
    x, g = torch.randn(2, 3, 4, 5, dtype=torch.float64).unbind(0)
    weight = nn.Parameter(x.clone()[None])
    weight.grad = g[None].contiguous(memory_format=torch.channels_last)
    WeightDecayFreeSGD([weight], lr=0.1, momentum=0.9, weight_decay=5e-3, check_invariance=False).step()
    alpha, _ = next_alpha_kappa(1.0, 0.0, 0.1, 5e-3, 0.9)
    torch.testing.assert_close(weight.detach()[0], x - 0.1 * alpha * g, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("default", [{"cuda"}, {"cpu"}], ids=["foreach", "as on a GPU"])
def test_weights_that_are_cast_in_mid_run(default, monkeypatch):
    """As in torch.optim.SGD, whose buffers stay what they were; the fused kernel does not take them as they are."""
    monkeypatch.setattr(_base, "FUSED_ON", default)
    ends = []
    for dtype in (torch.float64, torch.float32):
        net = digit_net().to(dtype)
        optimizer = free_sgd(net, lr=0.1, momentum=0.9, weight_decay=5e-3)
        train(net, optimizer, 3)
        train(net.double(), optimizer, 3, start=3)
        ends.append([p.detach() for p in net.parameters()])
    assert all(p.dtype == torch.float64 for p in ends[1])
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


def test_a_state_goes_from_one_implementation_to_another():
    """As after a move from a GPU, where fused is the default, to a CPU: one state, one run."""
    whole = digit_net()
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.02}
    train(whole, free_sgd(whole, **options), 90)
    net, state = digit_net(), None
    for start, fused in ((0, True), (30, False), (60, True)):
        optimizer = free_sgd(net, **options, fused=fused)
        if state is not None:
            for group in state["param_groups"]:
                group["fused"] = fused
            optimizer.load_state_dict(state)
        train(net, optimizer, 30, start=start)
        state = copy.deepcopy(optimizer.state_dict())
    assert direction_error(split(whole)[0], split(net)[0]) < EXACT


def test_maximize_is_minimizing_the_negative():
    nets = digit_net(), digit_net()
    for net, sign in zip(nets, (1, -1)):
        optimizer = free_sgd(net, lr=0.1, momentum=0.9, weight_decay=5e-3, nesterov=True, maximize=sign < 0)
        for t in range(20):
            backward(net, torch.arange(32) + t)
            for p in net.parameters():
                p.grad.mul_(sign)
            optimizer.step()
    for p, q in zip(nets[0].parameters(), nets[1].parameters()):
        assert torch.equal(p, q)


@pytest.mark.parametrize("make", [free_sgd, free_adamw])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_resume_is_bit_for_bit(make, dtype):
    """Through a file, as a checkpoint goes; α is kept in double whatever the weights are."""
    kwargs = {"lr": 0.05, "weight_decay": 0.02} | ({"momentum": 0.9} if make is free_sgd else {})
    whole = digit_net().to(dtype)
    optimizer = make(whole, **kwargs)
    train(whole, optimizer, 10)
    file = io.BytesIO()
    torch.save({"net": whole.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    train(whole, optimizer, 10, start=10)

    resumed = digit_net(seed=1).to(dtype)
    saved = torch.load(file, weights_only=True)
    resumed.load_state_dict(saved["net"])
    again = make(resumed, lr=1.0 if make is free_sgd else 0.1, weight_decay=1e-3)
    again.load_state_dict(saved["optimizer"])
    train(resumed, again, 10, start=10)
    for p, q in zip(whole.parameters(), resumed.parameters()):
        assert torch.equal(p, q)
    assert optimizer.state[whole[0].weight]["alpha"] == again.state[resumed[0].weight]["alpha"]


def test_capturable_scalars_stay_double_and_shared_after_a_load():
    whole = digit_net().float()
    kwargs = {"lr": torch.tensor(0.1), "momentum": 0.9, "weight_decay": 0.02, "capturable": True}
    groups = [{"params": split(whole)[0]}]
    optimizer = WeightDecayFreeSGD(groups, **kwargs)
    train(whole, optimizer, 10)
    resumed = copy.deepcopy(whole)
    again = WeightDecayFreeSGD([{"params": split(resumed)[0]}], **kwargs)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(whole, optimizer, 40, start=10)
    train(resumed, again, 40, start=10)
    assert torch.equal(whole[3].weight, resumed[3].weight)
    first, second = (again.state[p]["alpha"] for p in split(resumed)[0])
    assert first is second
    assert first.dtype == torch.float64
    assert torch.equal(first, optimizer.state[whole[0].weight]["alpha"])


@pytest.mark.parametrize("make", [free_sgd, free_adamw])
def test_capturable_may_be_turned_on_and_off_in_mid_run(make, monkeypatch):
    """As after a load, which brings the saved groups' setting; a weight that has no gradient then is left alone."""
    adam = importlib.import_module("torch.optim.adam")
    monkeypatch.setattr(adam, "_get_capturable_supported_devices", lambda **_: ["cpu"])
    options = {"lr": 0.05, "weight_decay": 0.02} | ({"momentum": 0.9} if make is free_sgd else {})
    nets = digit_net(), digit_net()
    for net, captured in zip(nets, ((), (10, 30))):
        optimizer = make(net, **options)
        for start in (0, 10, 20, 30):
            for group in optimizer.param_groups:
                group["capturable"] = start in captured
            net[3].weight.requires_grad_(start != 10)
            net[3].weight.grad = None
            train(net, optimizer, 10, start=start)
    assert optimizer.state[nets[1][0].weight]["alpha"].dtype == torch.float64
    # AdamW counts captured steps, and what comes of them, in float32.
    tolerance = EXACT if make is free_sgd else 1e-5
    assert direction_error(split(nets[0])[0], split(nets[1])[0]) < tolerance


def test_closure_scheduler_grad_scaler_and_named_parameters():
    decayed, free = digit_net(), digit_net()
    sgd = torch.optim.SGD(decayed.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-3)
    optimizer = free_sgd(free, lr=0.1, momentum=0.9, weight_decay=5e-3)
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=40, cycle_momentum=True) for o in (sgd, optimizer)
    ]
    for t in range(40):
        for net, opt, scheduler in ((decayed, sgd, schedulers[0]), (free, optimizer, schedulers[1])):
            loss = opt.step(torch.enable_grad()(lambda net=net, t=t: backward(net, torch.arange(32) + t)))
            assert loss.item() > 0
            if t < 39:
                scheduler.step()
    assert direction_error(split(decayed)[0], split(free)[0]) < EXACT

    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before, alpha = free[0].weight.clone(), optimizer.state[free[0].weight]["alpha"]
    scaler.scale(backward(free, torch.arange(32))).detach()
    free[0].weight.grad[0, 0, 0, 0] = torch.inf  # a skipped step is none: α must not move
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(before, free[0].weight)
    assert optimizer.state[free[0].weight]["alpha"] == alpha


@pytest.mark.parametrize(("weight_decay", "amsgrad"), [(0.05, False), (0.5, True)])
def test_directions_are_those_of_adamw(weight_decay, amsgrad):
    kwargs = {"lr": 0.01, "weight_decay": weight_decay, "amsgrad": amsgrad, "eps": 1e-4}  # an eps that would show
    decayed, free = digit_net(), digit_net()
    schedule = lambda t: warmup_and_drop(t) / 10  # noqa: E731
    train(decayed, torch.optim.AdamW(decayed.parameters(), **kwargs), 320, schedule)
    optimizer = free_adamw(free, **kwargs)
    train(free, optimizer, 320, schedule)
    assert direction_error(split(decayed)[0], split(free)[0]) < EXACT
    for p, q in zip(split(decayed)[1], split(free)[1]):
        assert (p - q).abs().max() < EXACT
    assert optimizer.state[free[0].weight]["alpha"] > 1.1


def test_adamw_reads_a_tensor_as_lr_where_it_does_not_capture():
    """``foreach=True`` raised in the ordinary group, at the first step; ``torch.optim`` refuses it when it is built."""
    nets = digit_net(), digit_net()
    for net, lr in zip(nets, (0.05, torch.tensor(0.05, dtype=torch.float64))):
        train(net, free_adamw(net, lr=lr, foreach=True), 5)
    for p, q in zip(nets[0].parameters(), nets[1].parameters()):
        assert torch.equal(p, q)


def test_adamw_rescales():
    kwargs = {"lr": 0.02, "weight_decay": 2.0}
    decayed, free = digit_net(), digit_net()
    train(decayed, torch.optim.AdamW(decayed.parameters(), **kwargs), 120)
    optimizer = free_adamw(free, **kwargs)
    train(free, optimizer, 120)
    assert (1 - 0.04) ** -120 > RESCALE_AT > optimizer.state[free[0].weight]["alpha"]
    assert direction_error(split(decayed)[0], split(free)[0]) < EXACT


@pytest.mark.parametrize("kind", [WeightDecayFreeSGD, WeightDecayFreeAdamW])
@pytest.mark.parametrize("name", ["lr", "weight_decay"])
@pytest.mark.parametrize("capturable", [True, False])
def test_alpha_is_exact_with_a_float32_tensor_as_lr_or_weight_decay(kind, name, capturable, monkeypatch):
    """1 − ηλ in float32 is wrong by 1 % of ηλ = 1e-6, at every step alike."""
    monkeypatch.setattr(WeightDecayFreeAdamW, "_adamw", lambda *_: None)  # which torch captures on GPUs only
    weight = nn.Parameter(torch.eye(2))
    weight.grad = torch.eye(2).flip(0)
    settings = {"lr": 1e-4, "weight_decay": 1e-2}
    settings[name] = torch.tensor(settings[name])
    optimizer = kind([weight], **settings, capturable=capturable)
    for _ in range(100):
        optimizer.step()
    lr, decay = map(float, settings.values())
    expected = -100 * math.log1p(-lr * decay)
    assert math.log(optimizer.state[weight]["alpha"]) == pytest.approx(expected, rel=1e-9)
    assert isinstance(optimizer.state[weight]["alpha"], torch.Tensor) == capturable


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.5, False), (0.9, False), (0.5, True), (0.9, True)])
def test_the_bound_is_where_alpha_turns_negative(momentum, nesterov):
    def stays_positive(product: float) -> bool:
        alpha, kappa = 1.0, 0.0
        for _ in range(20_000):
            new, kappa = next_alpha_kappa(alpha, kappa, 1.0, product, momentum, nesterov)
            if not new > 0:
                return False
            alpha = 1.0
        return True

    bound = largest_decay(momentum, nesterov)
    assert stays_positive(bound * 0.999)
    if momentum > 0:
        assert not stays_positive(bound * 1.001)


def test_refuses_what_has_no_weight_decay_free_form():
    net = digit_net()
    with pytest.raises(ValueError, match=r"lr \* weight_decay = 0.005 is more than \(1-sqrt\(momentum\)\)\^2 = 0.0026"):
        free_sgd(net, lr=0.1, momentum=0.9, weight_decay=0.05)
    with pytest.raises(ValueError, match=r"lr \* weight_decay must be below 1, got 1: nothing is left"):
        free_sgd(net, lr=0.1, weight_decay=10.0)
    optimizer = free_sgd(net, lr=0.1, momentum=0.9, weight_decay=5e-3)
    train(net, optimizer, 1)
    before = copy.deepcopy(net.state_dict())
    optimizer.param_groups[0]["lr"] = 1.0
    with pytest.raises(ValueError, match="turn negative"):
        optimizer.step()
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    with pytest.raises(ValueError, match="below 1, got 2"):
        free_adamw(net, lr=1.0, weight_decay=2.0)
    with pytest.raises(ValueError, match="dampening must be 0"):
        free_sgd(net, lr=0.1, momentum=0.9, dampening=0.1)
    with pytest.raises(ValueError, match="nesterov=True needs momentum"):
        free_sgd(net, lr=0.1, nesterov=True)
    with pytest.raises(ValueError, match="fused=True does not go with"):
        free_sgd(net, lr=0.1, momentum=0.9, nesterov=True, fused=True)
    with pytest.raises(ValueError, match="fused=True and foreach=True are two implementations"):
        free_sgd(net, lr=0.1, fused=True, foreach=True)
    with pytest.raises(TypeError, match="lr must be a number, got str"):
        free_sgd(net, lr="0.1")
    with pytest.raises(ValueError, match="momentum must be in"):
        free_sgd(net, lr=0.1, momentum=1.0)


def test_errors_name_the_parameter():
    net = digit_net()
    optimizer = WeightDecayFreeSGD(net.named_parameters(), lr=0.1, weight_decay=5e-4)
    backward(net, torch.arange(64))
    with pytest.raises(ValueError, match=r"'1.weight' \(parameter 1 of group 0, shape \(6,\)\) is a vector"):
        optimizer.step()
    optimizer = WeightDecayFreeSGD([(n, p) for n, p in net.named_parameters() if p.ndim > 1], lr=0.1)
    with pytest.raises(ValueError, match=r"'7.weight' \(parameter 2 of group 0.*is not scale invariant: the cosine"):
        optimizer.step()
    assert not any(optimizer.state.values())
    zero = nn.Parameter(torch.zeros(3, 2))
    optimizer = WeightDecayFreeSGD([("still", zero)], lr=0.1)
    zero.grad = torch.ones(3, 2)
    with pytest.raises(ValueError, match=r"'still'.*all zero"):
        optimizer.step()
    table = nn.Embedding(4, 3, sparse=True)
    optimizer = WeightDecayFreeSGD(table.parameters(), lr=0.1)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"parameter 0 of group 0, shape \(4, 3\) has a torch.sparse_coo gradient"):
        optimizer.step()
    half = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    half.grad = torch.zeros_like(half)
    with pytest.raises(ValueError, match="needs float32 or float64 parameters"):
        WeightDecayFreeSGD([half], lr=0.1, capturable=True).step()


def test_adam_turns_weights_by_lr_over_norm_and_sgd_by_lr_over_norm_squared():
    """Measured: multiply the norm by c; the first step's angle falls by c for Adam and by c² for SGD."""

    def angle(make, scale: float) -> float:
        net = digit_net()
        with torch.no_grad():
            net[0].weight.mul_(scale)
        before = net[0].weight.detach().clone()
        train(net, make(net.parameters()), 3)
        after = net[0].weight.detach()
        cosine = (before * after).sum() / (before.norm() * after.norm())
        return math.acos(min(1.0, cosine.item()))

    adam = [angle(lambda p: torch.optim.Adam(p, lr=1e-4, eps=1e-30), c) for c in (1.0, 10.0)]
    sgd = [angle(lambda p: torch.optim.SGD(p, lr=1e-3), c) for c in (1.0, 10.0)]
    assert math.log10(adam[0] / adam[1]) == pytest.approx(1.0, abs=0.01)
    assert math.log10(sgd[0] / sgd[1]) == pytest.approx(2.0, abs=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [free_sgd, free_adamw])
def test_cuda_graph_replays_the_same_steps(make):
    kwargs = {"weight_decay": 0.02, "capturable": True, "check_invariance": False}
    kwargs |= {"lr": 0.1, "momentum": 0.9} if make is free_sgd else {"lr": torch.tensor(0.01, device="cuda")}
    nets = [digit_net().float().cuda() for _ in range(2)]
    optimizers = []
    for net in nets:
        for p in net.parameters():
            p.grad = torch.zeros_like(p)
        optimizers.append(make(net, **kwargs))
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    gradients = [[torch.randn_like(p) for p in nets[0].parameters()] for _ in range(60)]

    def give(net, t):
        for p, g in zip(net.parameters(), gradients[t]):
            p.grad.copy_(g)

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        give(nets[0], 0)
        optimizers[0].step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        optimizers[0].step()
    for t in range(1, 60):
        give(nets[0], t)
        graph.replay()
    for t in range(60):
        give(nets[1], t)
        optimizers[1].step()
    for p, q in zip(nets[0].parameters(), nets[1].parameters()):
        torch.testing.assert_close(p, q)


@pytest.mark.gpu
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_default_on_a_gpu_is_fused_and_gives_the_same_steps(momentum, memory_format, monkeypatch):
    calls = []
    real = torch._fused_sgd_
    monkeypatch.setattr(torch, "_fused_sgd_", lambda *args, **kwargs: (calls.append(args), real(*args, **kwargs)))
    nets = []
    for options in ({}, {"foreach": True}):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 5, 1)).double().cuda().to(memory_format=memory_format)
        optimizer = WeightDecayFreeSGD(
            [{"params": [net[0].weight, net[1].weight]}, {"params": [net[0].bias], "weight_decay_free": False}],
            lr=0.1,
            momentum=momentum,
            weight_decay=5e-3 if momentum else 0.1,
            check_invariance=False,
            **options,
        )
        for _ in range(50):
            net(torch.randn(2, 3, 6, 6, dtype=torch.float64, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        nets.append(net)
    assert len(calls) == 100
    for p, q in zip(*(net.parameters() for net in nets)):
        assert (p - q).abs().max() < EXACT


@pytest.mark.parametrize("capturable", [False, True])
def test_a_saved_step_count_may_be_a_number(capturable, monkeypatch):
    """As in old and converted checkpoints of Adam, which torch.optim loads too."""
    if capturable:  # which torch has on GPUs only
        adam = importlib.import_module("torch.optim.adam")
        monkeypatch.setattr(adam, "_get_capturable_supported_devices", lambda **_: ["cpu"])
    runs = []
    for as_number in (False, True):
        w = torch.nn.Parameter(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)))
        optimizer = WeightDecayFreeAdamW([w], lr=0.1, capturable=capturable, check_invariance=False)
        for t in range(4):
            w.grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(t))
            if t == 2:
                state = copy.deepcopy(optimizer.state_dict())
                if as_number:
                    state["state"][0]["step"] = int(state["state"][0]["step"])
                optimizer = WeightDecayFreeAdamW([w], lr=0.1, capturable=capturable, check_invariance=False)
                optimizer.load_state_dict(state)
            optimizer.step()
        runs.append(w.detach())
    assert torch.equal(*runs)
