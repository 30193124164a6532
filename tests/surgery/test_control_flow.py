"""What a forward asks, stores and enters: after the conversion it does so at every call, as before."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from normmatters.precision import arithmetic
from normmatters.surgery import ConversionReport, convert, fold
from normmatters.surgery.blocks import FusedBlock
from support.blocks import Block


def pair(make: Callable[[], Any]) -> tuple[Any, Any]:
    """A converted block and its twin that was not converted."""
    block, original = make(), make()
    original.load_state_dict(block.state_dict())
    return convert(block, "l2"), original


class Stores(Block):
    """Its forward does something beside its output, which is told it from outside."""

    def __init__(self, effect: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.effect = effect
        self.lists: dict[str, list[Any]] = {"a": []}
        self.last: deque[Any] = deque(maxlen=2)
        self.notes = SimpleNamespace(x=None)
        self.notes.deeper = SimpleNamespace(x=None)
        self.notes.count = 0
        self.relu.count = 0

    def kept(self) -> list[Any]:
        seen = [*self.lists["a"], *self.last, self.notes.x, self.notes.deeper.x, getattr(self.relu, "seen", None)]
        counts = [self.relu.count, self.notes.count, self.bn.num_batches_tracked]
        return [*counts, *(x for x in seen if x is not None)]

    def forward(self, x: Tensor) -> Tensor:
        self.effect(self, x)
        return F.relu(self.bn(self.conv(x)) + x)


@pytest.mark.parametrize(
    "effect",
    [
        lambda self, x: self.lists["a"].append(x),
        lambda self, x: self.last.append(x),
        lambda self, x: setattr(self.relu, "seen", x),
        lambda self, x: setattr(self.relu, "count", self.relu.count + 1),
        lambda self, x: self.bn.num_batches_tracked.add_(1),
        lambda self, x: setattr(self.notes, "x", x),
        lambda self, x: setattr(self.notes, "count", self.notes.count + 1),
        lambda self, x: setattr(self.notes.deeper, "x", x),
    ],
)
def test_what_forward_stores_is_stored_after_the_conversion_too(effect: Callable[..., Any]) -> None:
    block, original = pair(lambda: Stores(effect))
    x = torch.randn(2, 3, 4, 4)
    for model in (block, original):
        model(x)
    assert_close(block.kept(), original.kept())


class Chooses(Block):
    """Its forward asks something whose answer changes, and does one thing or another."""

    def __init__(self, choose: Callable[[Any], bool]) -> None:
        super().__init__()
        self.choose = choose
        self.random, self.torch = random.Random(0), torch.Generator().manual_seed(0)
        self.numpy, self.mersenne = np.random.default_rng(0), np.random.Generator(np.random.MT19937(0))
        self.old_numpy = np.random.RandomState(0)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn(self.conv(x)) + x)
        return out if self.choose(self) else 2 * out


@pytest.mark.parametrize(
    "choose",
    [
        lambda self: self.random.random() < 0.5,
        lambda self: torch.rand((), generator=self.torch).item() < 0.5,
        lambda self: self.numpy.random() < 0.5,
        lambda self: self.mersenne.random() < 0.5,
        lambda self: self.old_numpy.random() < 0.5,
        lambda self: torch.is_grad_enabled(),
        lambda self: torch.is_autocast_enabled("cpu"),
        lambda self: torch.get_autocast_dtype("cpu") is torch.half,
        lambda self: not torch.is_inference_mode_enabled(),
        lambda self: torch.jit.is_tracing(),
        lambda self: torch.distributed.is_initialized(),
    ],
)
def test_a_choice_of_forward_is_not_made_once_for_all(choose: Callable[[Any], bool]) -> None:
    block, original = pair(lambda: Chooses(choose))
    x = torch.randn(2, 3, 4, 4)
    half = torch.autocast("cpu", dtype=torch.half)
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu"), half, *[torch.enable_grad()] * 5):
        with mode:
            assert_close(block(x), original(x))


class Reads(Block):
    """Its forward makes a number, or a dtype, of a tensor that it has."""

    def __init__(self, read: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.read = read
        self.hidden = self.steps  # no buffer: what PyTorch knows nothing of

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.read(self, F.relu(self.bn(self.conv(x)) + x))
        return result


@pytest.mark.parametrize(
    "read",
    [
        lambda self, x: 2 * x if self.steps > 0 else x,
        lambda self, x: x * float(self.steps),
        lambda self, x: x * self._buffers["steps"].item(),
        lambda self, x: x * int(self.bn.num_batches_tracked),
        lambda self, x: x * self.hidden.item(),
        lambda self, x: x.to(next(self.parameters()).dtype),
        lambda self, x: x * self.steps.item(),
        lambda self, x: x.to(self.steps.dtype) + self.steps.view(1, 1, 1),
    ],
)
def test_what_a_tensor_holds_is_read_at_every_call(read: Callable[[Any, Tensor], Any]) -> None:
    block = Reads(read)
    original = copy.deepcopy(block)
    convert(block, "l2")
    assert isinstance(block, FusedBlock)
    x = torch.randn(2, 3, 4, 4, dtype=torch.double)
    for model in (block, original):
        model.double()
        for steps in (model.steps, model.hidden):
            steps.fill_(3)
    for _ in range(2):
        assert_close(block(x), original(x))


def test_a_norm_is_not_called_behind_what_changes_its_statistics() -> None:
    class Resets(Block):
        def forward(self, x: Tensor) -> Tensor:
            out = self.bn(self.conv(x))
            self.bn.running_mean.zero_()
            return F.relu(out + x)

    block, original = pair(Resets)
    x = torch.randn(2, 3, 4, 4)
    assert_close(block(x), original(x))
    assert_close(block.state_dict(), original.state_dict())


class WithAutocastOff(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):  # it is, while tracing
            return F.relu(self.bn(self.conv(x.float())))


class MethodWithAutocastOff(Block):
    @torch.autocast("cpu", enabled=False)
    def _exact(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x.float())))

    def forward(self, x: Tensor) -> Tensor:
        return self._exact(x)


class WithGradients(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return F.relu(self.bn(self.conv(x)))


class InArithmetic(Block):
    def forward(self, x: Tensor) -> Tensor:
        with arithmetic("fp16"):
            return F.relu(self.bn(self.conv(x.float())))


class Tries(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = self.bn(self.conv(x[:, :, :3]))
        try:
            return F.relu(out + x)
        except RuntimeError:  # of another size
            return F.relu(out)


@pytest.mark.parametrize("cls", [WithAutocastOff, MethodWithAutocastOff, WithGradients, InArithmetic, Tries])
def test_a_context_of_forward_is_entered_and_an_error_caught_after_the_conversion_too(cls: type[Block]) -> None:
    block, original = pair(cls)
    convert(original, "l2", fuse=False)
    x = torch.randn(2, 3, 4, 4)
    with torch.autocast("cpu"), torch.no_grad():
        found, expected = block(x), original(x)
    assert found.requires_grad == expected.requires_grad
    assert_close(found, expected, rtol=0, atol=0)


class Skips(Block):
    """Its forward asks something about what it is given, which a symbolic value would answer for itself."""

    def joined(self, x: Tensor, skip: Any) -> Tensor:
        return x if skip is None else x + skip


class AsksNone(Skips):
    def forward(self, x: Tensor, skip: Any) -> Tensor:
        out = self.bn(self.conv(x))
        if skip is not None:
            out = out + skip
        return F.relu(out)


class AsksNoneInMethod(Skips):
    def forward(self, x: Tensor, skip: Any) -> Tensor:
        return F.relu(self.joined(self.bn(self.conv(x)), skip))


class AsksIsTensor(Skips):
    def forward(self, x: Tensor, skip: Any) -> Tensor:
        return F.relu(self.bn(self.conv(x)) + (skip if torch.is_tensor(skip) else 1))


class AsksType(Skips):
    def forward(self, x: Tensor, skip: Any) -> Tensor:
        return F.relu(self.bn(self.conv(x)) + (skip if type(skip) is Tensor else 1))


class AsksAttribute(Skips):
    def forward(self, x: Tensor, skip: Any) -> Tensor:
        return F.relu(self.bn(self.conv(x)) + (skip.mask if hasattr(skip, "mask") else x))


class SetsData(Skips):
    def forward(self, x: Tensor, skip: Any) -> Tensor:
        out = self.conv(x)
        out.data = out.data.sign()
        return F.relu(self.bn(out) + x)


@pytest.mark.parametrize("cls", [AsksNone, AsksNoneInMethod, AsksIsTensor, AsksType, AsksAttribute, SetsData])
def test_what_a_forward_asks_of_its_arguments(cls: type[Block]) -> None:
    block, original = pair(cls)
    x = torch.randn(2, 3, 4, 4)
    for skip in (x, None):
        assert_close(block(x, skip), original(x, skip))


def test_what_forward_computes_may_be_compared_to_none() -> None:
    class Sums(Block):
        def forward(self, x: Tensor) -> Tensor:
            total: Tensor | None = None
            for part in (self.bn(self.conv(x)), x[None][0], x):
                total = part if total is None else total + part
            return F.relu(total)

    block = Sums()
    original = copy.deepcopy(block)
    convert(block, "l2")
    x = torch.randn(2, 3, 4, 4)
    assert_close(block(x), original(x))


class Named(dict[str, Tensor]):
    """A dict with more to it, as the outputs of transformers' models are."""


class Returns(Block):
    def __init__(self, kind: type[dict[str, Tensor]]) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return self.kind(out=F.relu(self.bn(self.conv(x)) + x), x=x)


@pytest.mark.parametrize("kind", [OrderedDict, Named, dict])
def test_a_dict_that_forward_returns_keeps_its_class(kind: type[dict[str, Tensor]]) -> None:
    block = Returns(kind)
    original = copy.deepcopy(block)
    convert(block, "l2")
    assert isinstance(block, FusedBlock)
    x = torch.randn(2, 3, 4, 4)
    found, expected = block(x), original(x)
    assert type(found) is kind
    assert_close(found, expected)


class Adds(Block):
    def forward(self, x: Tensor, other: Tensor | float) -> Tensor:
        return F.relu(self.bn(self.conv(x)) + other)


def test_a_block_may_be_given_a_number_to_add() -> None:
    block = Adds()
    original = copy.deepcopy(block)
    convert(block, "l2")
    x = torch.randn(2, 3, 4, 4)
    for other in (0, 0.5, x):
        assert_close(block(x, other), original(x, other))


class Calls(nn.Conv2d):
    """What surrounds a module's forward here would be recorded, and be done by the module as well."""

    def __call__(self, x: Tensor) -> Tensor:
        return torch.exp(super().__call__(x))  # type: ignore[no-any-return]


class CallsBlock(Block):
    def __call__(self, x: Tensor) -> Tensor:
        return 3 - super().__call__(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)) + x)


class CallsSequential(nn.Sequential):
    def __call__(self, x: Tensor) -> Tensor:
        return 3 - super().__call__(x)  # type: ignore[no-any-return]


def calls() -> nn.Module:
    block = CallsBlock()
    block.conv = Calls(3, 3, 1)
    return block


@pytest.mark.parametrize(
    "make",
    [
        calls,
        lambda: nn.Sequential(CallsBlock(), CallsBlock()),
        lambda: nn.Sequential(CallsSequential(nn.BatchNorm2d(3)), nn.ReLU()),
    ],
)
def test_a_call_of_ones_own_is_done_once(make: Callable[[], nn.Module]) -> None:
    model, original = make(), make()
    original.load_state_dict(model.state_dict())
    convert(model, "l2")
    x = torch.randn(2, 3, 4, 4)
    assert_close(model(x), original(x))


class Features(Block):
    def features(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x) * self.scale


class FeaturesBeforeReLU(Features):
    def features(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.features(x))  # type: ignore[no-any-return]


class FeaturesWithAdd(Features):
    def features(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)) + x)


class Private(Features):
    def _impl(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)) + x)

    def features(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self._impl(x)


class ForwardAlone(Features):
    """Its forward does not call its other methods."""

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(self.conv(x)))  # type: ignore[no-any-return]

    def features(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(self.conv(x)))  # type: ignore[no-any-return]


class NormInMethod(ForwardAlone):
    def features(self, x: Tensor) -> Tensor:
        return self._stem(x)

    def _stem(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x))  # type: ignore[no-any-return]


class ReLUInMethod(ForwardAlone):
    def features(self, x: Tensor) -> Tensor:
        return self.relu(x)  # type: ignore[no-any-return]


class AddInMethod(ForwardAlone):
    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(self.conv(x)) + x)  # type: ignore[no-any-return]

    def features(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(self.conv(x)) + x)  # type: ignore[no-any-return]


class CallsForward(ForwardAlone):
    def features(self, x: Tensor) -> Tensor:
        nn.init.ones_(self.bn.weight)
        return self.forward(x) + self(x)  # type: ignore[no-any-return]


class Backbone(nn.Module):
    def features(self, x: Tensor) -> Tensor:
        return 2 * x


class FeaturesOfAnother(Block):
    """Its forward calls a method of another module that has the name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(self.conv(self.backbone.features(x))))  # type: ignore[no-any-return]

    def features(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(self.backbone.features(x)))  # type: ignore[no-any-return]


class FeaturesOfItsBase(Features):
    def forward(self, x: Tensor) -> Tensor:
        return super().features(x) * self.scale


@torch.no_grad()
@pytest.mark.parametrize(
    "cls",
    [ForwardAlone, NormInMethod, ReLUInMethod, AddInMethod, CallsForward, Features, FeaturesBeforeReLU]
    + [FeaturesWithAdd, Private, FeaturesOfAnother, FeaturesOfItsBase],
)
def test_other_methods_of_a_block_stay_what_they_were(cls: type[Any]) -> None:
    block = cls().double().eval()
    nn.init.normal_(block.bn.bias)
    original = copy.deepcopy(block)
    convert(block, "l2")
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    assert_close(block(x), original(x))
    assert_close(block.features(x), original.features(x))


class Registered(Block):
    """Keeps a register of its subclasses, each of which has to have a key."""

    register: ClassVar[dict[str, type[nn.Module]]] = {}

    def __init_subclass__(cls, *, key: str) -> None:
        Registered.register[cls.__name__] = cls


class Entry(Registered, key="entry"):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)) + x)


def test_a_register_of_subclasses_hears_nothing_of_the_conversion() -> None:
    assert isinstance(convert(Entry(), "l1"), FusedBlock)
    assert Registered.register == {"Entry": Entry}


class Beside(Block):
    """A block whose norm can be fused, with something beside it that can hardly be looked at."""

    def __init__(self, beside: nn.Module) -> None:
        super().__init__()
        self.beside = beside

    def forward(self, x: Tensor) -> Tensor:
        return self.beside(F.relu(self.bn(self.conv(x)) + x))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_scripted_and_lazy_modules_are_left_and_named() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)))
    for beside, name, note in [
        (scripted, "beside.1", "a scripted module cannot be changed"),
        (nn.LazyBatchNorm2d(), "beside", "it is not initialised yet: run the model once first"),
    ]:
        model = nn.Sequential(Beside(beside))
        report = ConversionReport()
        convert(model, "l1", report=report)
        assert [(change.name, change.fused) for change in report.converted] == [("0.bn", "add + relu")]
        assert [(change.name, change.note) for change in report.skipped] == [(f"0.{name}", note)]
        fold(model.eval(), report=(folded := ConversionReport()))
        assert [change.name for change in folded.converted] == ["0.bn"]
        assert model(torch.randn(2, 3, 4, 4)).shape == (2, 3, 4, 4)
