"""One small block for each way in which a rewritten forward could differ: what fuses, and that nothing changes."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from normmatters.nn.sync import convert_sync_batchnorm
from normmatters.surgery import ConversionReport, convert, to_torch
from normmatters.surgery.blocks import FusedBlock
from support.blocks import (
    AddInto,
    AddIntoShortcut,
    AddItself,
    AddNumber,
    AddUsedTwice,
    Alias,
    Alpha,
    AsksType,
    Block,
    BothNorms,
    Broadcast,
    BroadcastUp,
    CalledTwice,
    Checkpointed,
    Constant,
    Counts,
    CountsInBuffer,
    DataDependent,
    Draws,
    DrawsTorch,
    EvalOnly,
    InputUsedBeforeAdd,
    IntoResidual,
    Keeps,
    MethodAdd,
    NoGrad,
    OptionalArgument,
    OwnCopy,
    Relu6,
    ReluInSequential,
    ReluInSequentials,
    ReluMethod,
    ResidualIsFused,
    ResidualLeft,
    SharedRelu,
    TorchRelu,
    TupleOutput,
    TwoAdds,
    Unused,
    UsedTwice,
    ViewChangedBeforeAdd,
)
from support.models import BasicBlock, HandWrittenBlock, RegNetBlock, ResNet, vgg_bn


def fusion_of(block: nn.Module, name: str = "bn") -> tuple[str, str]:
    """How the norm was fused and the note, after checking that the converted block is still the same function."""
    torch.manual_seed(0)
    block = block.double()
    for module in block.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1, 0.5)
            nn.init.normal_(module.bias)
    original = copy.deepcopy(block)
    report = ConversionReport()
    converted = convert(block, "l2", report=report)
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64)
    for training in (True, False):
        results = []
        for model in (original, converted):
            torch.manual_seed(3)
            random.seed(3)
            data = x.clone().requires_grad_()
            output = model.train(training)(data * 1)
            output = output if isinstance(output, Tensor) else sum(part.sum() for part in output)
            model.zero_grad()
            if output.requires_grad:
                (output * torch.linspace(0, 1, output.numel()).view_as(output)).sum().backward()
            results.append((output.detach(), data.grad, [p.grad for p in model.parameters()], model.state_dict()))
        assert_close(results[0], results[1], rtol=1e-10, atol=1e-12)
    (change,) = [change for change in report.changes if change.name == name]
    assert (change.fused == "") == bool(change.note)
    return change.fused, change.note


# --- Forms that fuse ---


@pytest.mark.parametrize(
    ("cls", "kind"),
    [
        (Alias, "relu"),
        (ReluMethod, "relu"),
        (TorchRelu, "relu"),
        (TupleOutput, "relu"),
        (MethodAdd, "add + relu"),
        (Broadcast, "add + relu"),  # where the shapes are equal; here they are not, and it runs as it is written
        (BroadcastUp, "add + relu"),
        (ResidualIsFused, "add + relu"),
        (ReluInSequential, "add + relu"),
        (InputUsedBeforeAdd, "add + relu"),
        (SharedRelu, "relu"),
        (CalledTwice, "relu"),
        (AddNumber, "add + relu"),
        (DataDependent, "relu"),
        (OptionalArgument, "relu"),
        (AsksType, "relu"),
        (NoGrad, "relu"),
        (Draws, "relu"),
        (DrawsTorch, "relu"),
        (Counts, "relu"),
        (CountsInBuffer, "relu"),
        (Keeps, "relu"),
        (Constant, "relu"),
    ],
)
def test_fuses(cls: type[Block], kind: str) -> None:
    assert fusion_of(cls()) == (kind, "")


def test_a_norm_and_its_relu_in_two_sequentials() -> None:
    assert fusion_of(ReluInSequentials())[0] == "relu"
    assert fusion_of(ReluInSequentials(), "first.1")[0] == "add + relu"
    assert fusion_of(ReluInSequential(), "then.2")[0] == ""


@pytest.mark.parametrize("cls", [AddInto, AddIntoShortcut, MethodAdd])
@pytest.mark.parametrize("training", [True, False])
def test_under_autocast_the_dtype_is_that_of_the_add(cls: type[Block], training: bool) -> None:
    original = nn.Sequential(cls(), cls()).train(training)
    report = ConversionReport()
    model = convert(copy.deepcopy(original), "l2", report=report)
    assert len(report.fused) == (0 if cls is AddIntoShortcut else 2)
    results = []
    for each in (original, model):
        x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = each(x)
        output.float().square().sum().backward()
        results.append((output, x.grad))
    assert_close(results[1], results[0], rtol=0.1, atol=0.1)  # and of one dtype


def test_residual_of_a_wider_dtype_promotes_as_the_add_did() -> None:
    original = MethodAdd().eval()
    original.forward = lambda x: original.relu(original.bn(x.bfloat16()) + x)  # type: ignore[method-assign]
    block = Promotes()
    block.load_state_dict(original.state_dict())
    model = convert(block.eval(), "l2")
    x = torch.randn(2, 3, 4, 4)
    out = model(x)
    assert out.dtype == torch.float32
    assert_close(out, original(x), rtol=0, atol=0)


class Promotes(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(x.bfloat16()) + x)


# --- Forms that do not fuse ---


@pytest.mark.parametrize(
    "cls",
    [Unused, UsedTwice, AddUsedTwice, Relu6, Alpha, AddItself, TwoAdds, IntoResidual, ResidualLeft, EvalOnly],
)
def test_leaves_alone(cls: type[Block]) -> None:
    block = cls()
    fused, reason = fusion_of(block)
    assert fused == ""
    assert "no ReLU follows it" in reason
    assert type(block) is cls


class Tries(Block):
    def forward(self, x: Tensor) -> Tensor:
        try:
            return F.relu(self.bn(self.conv(x)))
        except ValueError:
            return x


class Decorated(Block):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


class CallsSuper(TorchRelu):
    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(super().forward(x)))


class SeesLocals(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = self.bn(self.conv(x))
        return F.relu(locals()["out"])


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (Tries, "it has a try"),
        (Decorated, "it is no plain function"),
        (CallsSuper, "it is a closure, or calls super()"),
        (SeesLocals, "it calls locals()"),
        (OwnCopy, "its class defines its own copying"),
    ],
)
def test_a_forward_that_cannot_be_rewritten_stays(cls: type[Block], reason: str) -> None:
    block = cls()
    assert fusion_of(block) == ("", f"{cls.__name__}.forward stays as it is written: {reason}")
    assert type(block) is cls


@torch.no_grad()
def test_a_view_of_the_input_that_is_changed_before_the_add() -> None:
    block = ViewChangedBeforeAdd().eval()
    x = torch.randn(4, 3, 5, 5)
    expected = block(x)
    report = ConversionReport()
    assert_close(convert(block, "l2", report=report)(x), expected)


class TwoInputs(Block):
    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return torch.relu(self.bn(x) + self.relu(skip))


def test_two_inputs_may_be_one_tensor_that_is_changed_before_the_add() -> None:
    block = TwoInputs()
    block.relu.inplace = True
    converted = convert(copy.deepcopy(block), "l2")
    for training in (True, False):
        given = [torch.linspace(-1, 2, 96).view(2, 3, 4, 4) for _ in range(2)]
        with torch.no_grad():
            results = [model.train(training)(x, x) for model, x in zip((block, converted), given)]
        assert_close(results[1], results[0])


def test_a_forward_on_the_instance_is_called() -> None:
    replaced = TorchRelu()
    replaced.forward = lambda x: replaced.bn(x)  # type: ignore[method-assign]
    fused = convert(replaced, "l2").eval()
    x = torch.randn(2, 3, 4, 4)
    assert_close(fused(x), fused.bn(x))
    assert bool((fused(x) < 0).any())


def test_checkpointed_forward() -> None:
    block, converted = Checkpointed(), Checkpointed()
    converted.load_state_dict(block.state_dict())
    convert(block, "l2", fuse=False)  # it counts the batch once, as torch's does not
    convert(converted, "l2")
    x = torch.randn(4, 3, 5, 5)
    for model in (block, converted):
        model(x.requires_grad_()).square().sum().backward()
    assert_close(converted.state_dict(), block.state_dict())
    assert_close([p.grad for p in converted.parameters()], [p.grad for p in block.parameters()], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("hook", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hook_on_the_relu_keeps_it(hook: str) -> None:
    block = BasicBlock(3, 3)
    block.relu.inplace = False  # torch refuses it behind a backward hook
    getattr(block.relu, f"register_{hook}_hook")(lambda *_: None)
    assert fusion_of(block, "bn2")[0] == ""


# --- Where blocks begin and end ---


class Outer(nn.Module):
    """Blocks in a list, which a loop calls where it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
        self.blocks = nn.ModuleList([BasicBlock(4, 4), HandWrittenBlock(4, 4), RegNetBlock(4)])
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            if x.mean() > -1:
                x = block(x)
        return F.relu(self.bn(x))


def test_a_loop_over_blocks() -> None:
    model = Outer()
    assert fusion_of(model) == ("relu", "")
    assert all(isinstance(block, FusedBlock) for block in model.blocks)


class CallsInside(nn.Module):
    """Looks at the modules of a Sequential one by one, as perceptual losses do."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 3, 1))

    def forward(self, x: Tensor) -> Tensor:
        total = x
        for layer in self.features:
            x = layer(x)
            total = total + x
        return total


def test_sequential_whose_modules_are_called_one_by_one() -> None:
    assert fusion_of(CallsInside(), "features.1")  # a norm in a Sequential that nobody calls whole


def test_relu_across_nested_sequentials() -> None:
    inner = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    model = nn.Sequential(nn.Sequential(inner, nn.Identity()), nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 2, 1)))
    assert fusion_of(model, "0.0.1") == ("relu", "")
    shared = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    twice = nn.Sequential(shared, nn.ReLU(), shared)
    assert fusion_of(twice, "0.1") == ("relu", "")  # where it is followed by one


def test_one_relu_object_at_many_places_of_a_sequential() -> None:
    relu = nn.ReLU()
    model = nn.Sequential(
        nn.Conv2d(3, 3, 1), relu, nn.BatchNorm2d(3), relu, nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), relu
    )
    assert fusion_of(model, "2") == ("relu", "")
    assert [type(module).__name__ for module in (model[1], model[3], model[6])] == ["ReLU"] * 3


def test_a_block_used_twice_is_fused_once() -> None:
    block = BasicBlock(3, 3)
    assert fusion_of(nn.Sequential(block, block), "0.bn2") == ("add + relu", "")


def test_of_two_norms_before_an_add_the_left_takes_it() -> None:
    assert fusion_of(BothNorms()) == ("add + relu", "")
    assert fusion_of(BothNorms(), "other")[0] == ""


def test_a_users_attribute_may_have_any_name() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())
    for module in model:
        module.program = module.act = module.pool = "the user's"
    assert fusion_of(model, "1") == ("relu", "")


# --- After the conversion ---


def test_submodules_can_be_swapped_after_fusion() -> None:
    block = convert(BasicBlock(3, 3), "l1").double().eval()
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    before = block(x)
    block.conv2 = nn.Identity()
    assert not torch.allclose(block(x), before)


def test_hooks_on_blocks_and_leaves_fire() -> None:
    model = convert(ResNet(), "l1")
    fired: list[str] = []
    for name, module in model.named_modules():
        if name in ("layer1.0", "layer1.0.conv2", "layer1.0.bn2", "layer2.0.downsample"):
            module.register_forward_hook(lambda *_, name=name: fired.append(name))
    model(torch.randn(2, 3, 8, 8))
    assert fired == ["layer1.0.conv2", "layer1.0.bn2", "layer1.0", "layer2.0.downsample"]


def test_converting_again() -> None:
    model = convert(BasicBlock(3, 3), "l1")
    cls = type(model)
    report = ConversionReport()
    assert type(convert(model, "linf", report=report)) is cls
    assert len(report.skipped) == 2
    model.bn1 = nn.BatchNorm2d(3)
    report = ConversionReport()
    assert type(convert(model, "l1", report=report)) is cls
    assert [change.fused for change in report.converted] == ["relu"]


def test_graph_modules_are_converted_without_a_new_forward() -> None:
    block = torch.fx.symbolic_trace(BasicBlock(3, 3))
    assert fusion_of(block, "bn2")[1].endswith("its class defines its own copying")
    assert type(block.bn2).__name__ == "LpBatchNorm2d"


def test_fused_blocks_survive_a_detour_over_sync_norms() -> None:
    model = nn.Sequential(vgg_bn()[0], BasicBlock(6, 6)).double().eval()
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    expected = model(x)
    synced = convert_sync_batchnorm(convert(model, "l1"))
    assert_close(synced(x), expected)
    assert_close(to_torch(synced)(x), expected)
    assert type(synced[1].bn2) is nn.SyncBatchNorm
    assert type(synced[0][1]) is nn.SyncBatchNorm
