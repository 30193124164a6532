"""Links through a converted network: a residual's gradient reaches the norm before it unadded, all else stays."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

pytest.importorskip("triton")

from normmatters import L1BatchNorm2d
from normmatters.kernels.triton.launch import Launches
from normmatters.surgery import convert, to_torch
from normmatters.surgery.blocks import FusedBlock
from support.residual_block import DEVICE, Block


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Sequential(Block(3, 4), Block(4, 4), Block(4, 4), Block(4, 4)))
    return convert(net.to(DEVICE), "l1", memory="lean")


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each backward pass of a norm, or of two that are added, whether it got two gradients.

    A compiled graph gives zeros in place of none.
    """
    seen: list[bool] = []
    launch = Launches.__call__

    def watched(self, tensors, numbers=()):
        g, link = tensors.get("g_ptr"), tensors.get("link_ptr")
        if link is not None and type(link) is torch.Tensor:  # and no fake one
            seen.append(link is not g and bool(link.any()))
        launch(self, tensors, numbers)

    monkeypatch.setattr(Launches, "__call__", watched)
    return seen


def unlinked(model: nn.Module) -> nn.Module:
    plain = copy.deepcopy(model)
    for part in plain:
        object.__setattr__(part, "__class__", nn.Sequential)
    return plain


def step(model, call=None):
    torch.manual_seed(1)
    x = torch.randn(4, 3, 3, 3, device=DEVICE).requires_grad_()
    model.zero_grad()
    y = (model if call is None else call)(x)
    y.square().sum().backward()
    return [y, x.grad, *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())]


def assert_same(ours, expected):
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_links_go_from_block_to_block(model, links):
    expected = step(unlinked(model))
    assert not any(links)
    links.clear()
    assert_same(step(model), expected)
    assert (len(links), sum(links)) == (8, 3)  # 9 norms, of which the first block adds two; it has no use for a link in


def test_compiled(model, links):
    expected = step(unlinked(model))
    links.clear()
    assert_same(step(model, torch.compile(model, backend="aot_eager", fullgraph=True)), expected)
    assert sum(links) == 3


@pytest.mark.parametrize("how", ["eager", "compiled", "watched", "frozen"])
def test_a_shortcut_sends_its_gradient_through_the_link(how, links):
    """A block that downsamples uses its input twice as well: for its first convolution and for its shortcut's."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Sequential(Block(3, 4), Block(4, 4), Block(4, 6), Block(6, 6)))
    model = convert(net.to(DEVICE), "l1", memory="lean")
    assert isinstance(model[0], FusedBlock)
    if (
        how == "watched"
    ):  # what the shortcut gives is no longer a part of the add, and its gradient takes the link still
        model[0][2].downsample[1].register_forward_hook(lambda module, inputs, output: None)
    if how == "frozen":
        model[0][0].requires_grad_(False)
        model[0][1].requires_grad_(False)
    call = torch.compile(model, backend="aot_eager", fullgraph=True) if how == "compiled" else None

    def gradients(net, call=None):
        return [t for t in step(net, call) if t is not None]

    expected = gradients(unlinked(model))
    links.clear()
    assert_same(gradients(model, call), expected)
    # Blocks 1, 2 and 3 take a link: to the first norm's output, to the second's and to the third's. A hook must see
    # done what comes before it, so with one the add of block 2 runs as it is written, and gives no link.
    assert sum(links) == (2 if how == "watched" else 3)


def test_a_watched_block_is_called(model, links):
    seen = []
    model[0][1].register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    expected = step(unlinked(model))
    links.clear()
    seen.clear()
    assert_same(step(model), expected)
    assert seen == [(4, 4, 3, 3)]
    assert sum(links) == 1  # the hook's neighbours do without


def test_a_watched_norm_is_called(model, links):
    seen = []
    model[0][1].bn2.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    step(model)
    assert seen == [(4, 4, 3, 3)]


def test_hooks_of_all_modules_see_every_block_and_norm(model, links):
    """As a profiler's or a counter of operations."""
    seen = []
    handle = register_module_forward_hook(lambda module, inputs, output: seen.append(module))
    step(model)
    handle.remove()
    assert sum(links) == 0
    assert {*model[0], *(norm for norm in model.modules() if isinstance(norm, L1BatchNorm2d))} <= set(seen)


def test_evaluation_copies_and_the_way_back(model, links):
    assert isinstance(model[0], FusedBlock)
    x = torch.randn(4, 3, 3, 3, device=DEVICE)
    expected = step(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.load_state_dict(model.state_dict())
        assert_same(step(other)[:-27], expected[:-27])
    model.eval()
    before = model(x)
    back = to_torch(model)
    assert type(back[0]) is nn.Sequential
    torch.testing.assert_close(back(x), before)


def test_a_frozen_first_block(model, links):
    """Nothing in front learns: the second block's link carries no gradient, and the third's does."""
    model[0][0].requires_grad_(False)
    x = torch.randn(4, 3, 3, 3, device=DEVICE)
    plain = unlinked(model)
    for net in (model, plain):
        net(x).square().sum().backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)


class Doubles(Block):
    """Changes its input in place, which is what the norm before it gave."""

    def forward(self, x):
        x.view(-1).mul_(2)
        return self.relu(self.bn2(self.conv2(x)) + x)


def test_a_block_that_changes_its_input_takes_no_link(links):
    net = nn.Sequential(nn.Sequential(Block(3, 4), Doubles(4, 4), Block(4, 4), Block(4, 4)))
    model = convert(net.to(DEVICE), "l1")

    def gradients(net):
        return [t for t in step(net) if t is not None]  # Doubles has a norm that it does not use

    expected = gradients(unlinked(model))
    links.clear()
    assert_same(gradients(model), expected)
    assert sum(links) == 2  # from the second block to the third, and from there to the fourth


CHANGES = {
    "none": lambda z: z,
    "in place": lambda z: z.mul_(3),
    "by a view": lambda z: z.view(-1).mul_(3).view(z.shape),
    "in part": lambda z: (z[0].zero_(), z)[1],
    "another": lambda z: 3 * z,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("compiled", ["nothing", "all", "the first", "the second"])
def test_a_link_to_what_was_changed_is_not_used(compiled, change, links):
    torch._dynamo.reset()
    first, second = (L1BatchNorm2d(4, act="relu", device=DEVICE) for _ in range(2))

    def begin(x, linked):
        z, link = first.forward_linked(x, linked=linked)
        assert (link is not None) == linked
        return CHANGES[change](z), link

    def forward(x, linked):
        z, link = start(x, linked)
        return end(2 * z, z, link, linked=False)[0]

    start, end, call = begin, second.forward_linked, forward
    if compiled == "the first":
        start = torch.compile(begin, backend="aot_eager", fullgraph=True)
    if compiled == "the second":
        end = torch.compile(end, backend="aot_eager", fullgraph=True)
    if compiled == "all":
        call = torch.compile(forward, backend="aot_eager", fullgraph=True)
    results = []
    for linked in (False, True):
        x = torch.linspace(-1, 2, 48, device=DEVICE).sin().view(3, 4, 2, 2).requires_grad_()
        call(x, linked).square().sum().backward()
        results.append(x.grad)
    torch.testing.assert_close(*results)
    # A graph knows nothing of what comes in, and nobody knows what comes out of it.
    assert any(links) == (change == "none" and compiled in ("nothing", "all"))
