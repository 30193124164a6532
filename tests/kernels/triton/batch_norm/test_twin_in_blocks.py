"""``convert`` sends the two norms that end a downsampling block through one operation, where that is what they were."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from normmatters import precision
from normmatters.kernels import backends
from normmatters.nn import LpBatchNorm2d, twin
from normmatters.nn.sync import convert_sync_batchnorm
from normmatters.surgery import convert, to_torch
from support.residual_block import DEVICE, Block


class Down(nn.Module):
    """The end of a residual block that downsamples, as torchvision writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))

    def forward(self, x):
        out = self.bn(self.conv(x))
        out += self.downsample(x)
        return self.relu(out)


class Early(Down):
    """The shortcut comes first, and the add is out of place."""

    def forward(self, x):
        shortcut = self.downsample(x)
        return torch.relu(self.bn(self.conv(x)) + shortcut)


class Alone(Early):
    """The shortcut is a norm alone: what it reads may be changed before the add."""

    def __init__(self) -> None:
        super().__init__()
        self.bn, self.conv, self.downsample = nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)


class Changed(Alone):
    """And here it is."""

    def __init__(self) -> None:
        super().__init__()
        self.downsample = nn.Sequential(nn.Identity(), nn.BatchNorm2d(3))

    def forward(self, x):
        x = x * 1
        shortcut = self.downsample(x)
        x = x.abs_()
        return torch.relu(self.bn(self.conv(x)) + shortcut)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each pair of norms that went through one operation, whether a link was asked for."""
    seen: list[bool] = []
    run = twin.twin_batch_norm

    def watched(*arguments, linked=False):
        seen.append(linked)
        return run(*arguments, linked=linked)

    monkeypatch.setattr(twin, "twin_batch_norm", watched)
    return seen


def converted(net: nn.Module, memory: str = "exact") -> nn.Module:
    torch.manual_seed(0)
    net = convert(net.to(DEVICE), "l1", memory=memory)
    for module in net.modules():
        if isinstance(module, LpBatchNorm2d):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return net


@pytest.fixture
def block() -> nn.Module:
    return converted(Down())


def step(model, call=None):
    torch.manual_seed(1)
    x = torch.randn(4, 3, 3, 3, device=DEVICE).requires_grad_()
    model.zero_grad()
    y = (model if call is None else call)(x)
    (y * torch.linspace(-1, 2, y.numel(), device=DEVICE).view_as(y)).sum().backward()
    return [y, x.grad, *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())]


def by_two(model):
    """A step of a copy in which nothing fits; on a CPU it goes by the equations."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(twin, "twin_fits", lambda *_: False)
        if all(module.memory == "exact" for module in model.modules() if isinstance(module, LpBatchNorm2d)):
            patched.setattr(backends, "INTERPRETED", False)
        return step(copy.deepcopy(model))


def assert_same(ours, expected):
    for mine, theirs in zip(ours, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_blocks_in_a_row(calls):
    """In a Sequential, and the next block takes the link."""
    model = converted(nn.Sequential(Block(3, 4), Block(4, 4)), "lean")
    expected = by_two(model)
    assert calls == []
    assert_same(step(model), expected)
    assert calls == [True]


@pytest.mark.parametrize(
    ("cls", "memory", "fits"), [(Down, "exact", 1), (Down, "lean", 1), (Early, "exact", 1), (Alone, "exact", 1)]
)
def test_blocks(cls, memory, fits, calls):
    model = converted(cls(), memory)
    expected = by_two(model)
    assert_same(step(model), expected)
    assert calls == [False] * fits


def test_a_shortcut_reads_before_what_comes_behind_it_writes():
    torch.manual_seed(0)
    block = Changed().to(DEVICE)
    with torch.no_grad():
        x = torch.randn(4, 3, 3, 3, device=DEVICE)
        expected = copy.deepcopy(block)(x)
        torch.testing.assert_close(convert(block, "l2")(x), expected, rtol=1e-4, atol=1e-4)


def _replace(block, norm):
    norm.load_state_dict(block.downsample[1].state_dict())
    block.downsample[1] = norm.to(DEVICE)


def _act(block):
    block.downsample[1].act = "relu"


def _memory(block):
    block.downsample[1].memory = "lean"


CHANGES = {
    "another statistic": lambda block: _replace(block, LpBatchNorm2d(4, p=2)),
    "torch's own": lambda block: _replace(block, nn.BatchNorm2d(4)),
    "a ReLU": _act,
    "other memory": _memory,
    "evaluation of one": lambda block: block.downsample[1].eval(),
    "evaluation of the other": lambda block: block.bn.eval(),
    "no norm at the end": lambda block: block.downsample.append(nn.Tanh()),
    "all processes": lambda block: convert_sync_batchnorm(block),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_does_not_fit_goes_the_usual_way(change, calls, block):
    CHANGES[change](block)
    expected = by_two(block)
    assert_same(step(block), expected)
    assert calls == []


class First(nn.Conv2d):
    """Of the first sample only: the strides say nothing about it."""

    def forward(self, x):
        return super().forward(x[:1])


@pytest.mark.parametrize("conv", [lambda: nn.Conv2d(3, 4, 3), lambda: First(3, 4, 1)], ids=["one pixel", "one sample"])
def test_shapes_that_broadcast(conv, calls, block):
    block.downsample[0] = conv().to(DEVICE)
    expected = by_two(block)
    assert_same(step(block), expected)
    assert calls == []


@pytest.mark.parametrize("place", ["bn", "downsample", "downsample.0", "downsample.1"])
def test_hooks_are_called(place, calls, block):
    """Whatever a hook does must see the other norm done; a norm's, or the Sequential's, an output of its own."""
    expected = by_two(block)
    seen = []
    block.get_submodule(place).register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    assert_same(step(block), expected)
    assert seen == [(4, 4, 3, 3)]
    assert calls == []


def test_cumulative_and_absent_running_statistics(calls, block):
    block.bn.momentum = None
    block.downsample[1].momentum = 0.5
    block.bn.num_batches_tracked += 3
    expected = by_two(block)
    assert_same(step(block), expected)
    assert (block.bn.num_batches_tracked, block.downsample[1].num_batches_tracked) == (4, 1)
    block.bn.track_running_stats, block.bn.running_mean, block.bn.running_var = False, None, None
    expected = by_two(block)
    assert_same(step(block), expected)
    assert len(calls) == 2


def test_frozen_parts(calls, block):
    for frozen in (block.downsample, block.bn):
        block.requires_grad_(True)
        frozen.requires_grad_(False)
        block.zero_grad()
        expected = by_two(block)
        assert_same(step(block), expected)
    assert len(calls) == 2


def test_checkpointing_counts_the_batch_once(calls, block):
    expected = by_two(block)
    assert_same(step(block, lambda x: checkpoint(block, x, use_reentrant=False)), expected)
    assert len(calls) == 2  # and once more in the backward pass


def test_bad_input_changes_nothing(block):
    before = copy.deepcopy(block.state_dict())
    norm, other = block.bn, block.downsample[1]
    one, two, three = (torch.randn(shape, device=DEVICE) for shape in ((1, 4, 1, 1), (2, 4, 1, 1), (2, 3, 1, 1)))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        twin.twin_batch_norm(norm, one, other, one)
    with pytest.raises(ValueError, match="expected 4 channels"):
        twin.twin_batch_norm(norm, two, other, three)
    for name, value in block.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_where_no_kernel_runs(calls, block):
    x = torch.randn(4, 3, 3, 3, device=DEVICE)
    with precision.arithmetic("fp16"):
        low = block(x)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(backends, "TRITON_MISSING", "there is none")
        torch.testing.assert_close(low, block(x), rtol=0.02, atol=0.02)
    block.eval()(x)
    assert calls == []


def test_copies_and_the_way_back(calls, block):
    keys = list(Down().state_dict())
    assert list(block.state_dict()) == keys
    expected = by_two(block)
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert_same(step(other), expected)
    assert len(calls) == 2
    x = torch.randn(4, 3, 3, 3, device=DEVICE)
    before = block.eval()(x)
    back = to_torch(block)
    assert list(back.state_dict()) == keys
    assert type(back) is Down
    torch.testing.assert_close(back(x), before)
