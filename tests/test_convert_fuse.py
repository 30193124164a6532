"""What fusion must leave alone: one small block for each way in which a rewritten forward could differ."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.testing import assert_close

from normmatters.nn.sync import convert_sync_batchnorm
from normmatters.surgery import ConversionReport, convert, to_torch
from normmatters.surgery.fused import FusedBlock, FusedReLU, norm_add_relu
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
    SlotRelu,
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
        (ResidualLeft, "add + relu"),
        (Broadcast, "add + relu"),
        (BroadcastUp, "add + relu"),
        (ResidualIsFused, "add + relu"),
    ],
)
def test_fuses(cls: type[Block], kind: str) -> None:
    assert fusion_of(cls()) == (kind, "")


@pytest.mark.parametrize(
    ("make", "name", "fusion"),
    [
        (ReluInSequential, "bn", ("", "Sequential follows it, not a ReLU")),
        (ReluInSequentials, "bn", ("relu", "")),
        (ReluInSequentials, "first.1", ("", "Sequential follows it, not a ReLU")),
    ],
)
def test_a_relu_that_a_sequential_keeps(make: type[Block], name: str, fusion: tuple[str, str]) -> None:
    assert fusion_of(make(), name) == fusion


@pytest.mark.parametrize("cls", [AddInto, AddIntoShortcut, MethodAdd, ResidualLeft])
@pytest.mark.parametrize("training", [True, False])
def test_under_autocast_the_dtype_is_that_of_the_add(cls: type[Block], training: bool) -> None:
    original = nn.Sequential(cls(), cls()).train(training)
    report = ConversionReport()
    model = convert(copy.deepcopy(original), "l2", report=report)
    assert [change.fused for change in report.fused] == ["add + relu"] * 2
    results = []
    for each in (original, model):
        x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = each(x)
        output.float().square().sum().backward()
        results.append((output, x.grad))
    assert_close(results[1], results[0], rtol=0.1, atol=0.1)  # and of one dtype
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert fx.symbolic_trace(model)(x).dtype == output.dtype


def test_residual_of_a_wider_dtype_promotes_as_the_add_did() -> None:
    model = convert(MethodAdd().eval(), "l2")
    model.bn.bfloat16()
    norm = copy.deepcopy(model.bn)
    norm.act = None
    x = torch.randn(2, 3, 4, 4)
    seen: list[str | None] = []
    model.bn.register_forward_hook(lambda module, arguments, output: seen.append(module.act))
    out = norm_add_relu(model.bn, x.bfloat16(), x)
    assert out.dtype == torch.float32
    assert_close(out, torch.relu(norm(x.bfloat16()) + x))
    assert seen == ["relu"]  # all along: other threads may call the model meanwhile


# --- Forms that must not fuse, each with its reason ---


@pytest.mark.parametrize(
    ("cls", "note"),
    [
        (Unused, "its output is used 0 times"),
        (UsedTwice, "its output is used 2 times"),
        (AddUsedTwice, "its output is used 2 times"),
        (Relu6, "relu6 follows it, not a ReLU"),
        (CalledTwice, "CalledTwice calls it 2 times"),
        (Alpha, "the add behind it is not of two tensors"),
        (AddNumber, "the add behind it is not of two tensors"),
        (AddItself, "the add behind it is not of two tensors"),
        (TwoAdds, "add follows it, not a ReLU"),
        (IntoResidual, "it is the residual: it is added into another tensor"),
        (InputUsedBeforeAdd, "its input is used again before the add"),
        (EvalOnly, "no ReLU behind it was found"),
        (DataDependent, "DataDependent cannot be traced: symbolically traced variables cannot be used as inputs to"),
        (OptionalArgument, "OptionalArgument cannot be traced: its forward has the optional argument 'mask'"),
        (AsksType, "AsksType cannot be traced: its forward asks for the type of a value"),
        (NoGrad, "NoGrad cannot be traced: its forward changes the gradient or autocast mode"),
        (Draws, "Draws cannot be traced: its forward draws random numbers outside the graph"),
        (DrawsTorch, "DrawsTorch cannot be traced: its forward draws random numbers outside the graph"),
        (Counts, "Counts cannot be traced: its forward sets count on the module"),
        (CountsInBuffer, "CountsInBuffer cannot be traced: its forward sets steps on the module"),
        (Keeps, "Keeps cannot be traced: its forward sets seen on the module"),
        (Constant, "Constant cannot be traced: its forward makes a tensor that does not come from its input"),
        (OwnCopy, "OwnCopy defines its own copying, so its forward stays"),
    ],
)
def test_leaves_alone(cls: type[Block], note: str) -> None:
    block = cls()
    fused, reason = fusion_of(block)
    assert fused == ""
    assert reason.startswith(note)
    assert type(block) is cls
    assert block.bn.act is None


@torch.no_grad()
def test_a_view_of_the_input_that_is_changed_before_the_add() -> None:
    block = ViewChangedBeforeAdd().eval()
    x = torch.randn(4, 3, 5, 5)
    expected = block(x)
    report = ConversionReport()
    assert_close(convert(block, "l2", report=report)(x), expected)
    assert [change.note for change in report.changes] == ["its input is used again before the add"]


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


def test_tracing_leaves_no_mark() -> None:
    for cls in (Counts, CountsInBuffer, Keeps, Constant, Draws, DrawsTorch):
        block = cls()
        block.conv.eval()
        state, torch_state, names = random.getstate(), torch.get_rng_state(), set(vars(block))
        convert(block, "l1")
        assert (random.getstate(), set(vars(block))) == (state, names)
        assert torch.equal(torch.get_rng_state(), torch_state)
        assert (block.count, block.seen, block.steps.item()) == (0, [], 0)
        assert block.training
        assert not block.conv.training


def test_decorated_or_replaced_forward() -> None:
    class Decorated(Block):
        @torch.no_grad()
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.bn(self.conv(x)))

    report = ConversionReport()
    replaced = TorchRelu()
    replaced.forward = lambda x: replaced.bn(x)  # type: ignore[method-assign]
    convert(nn.ModuleList([Decorated(), replaced]), "l1", report=report)
    assert [change.note for change in report.changes] == [
        "Decorated cannot be traced: its forward is decorated or not a plain function",
        "TorchRelu cannot be traced: its forward was replaced on the instance",
    ]


def test_checkpointed_forward() -> None:
    report = ConversionReport()
    assert type(convert(Checkpointed(), "l1", report=report)) is Checkpointed
    assert report.changes[0].note.endswith("changes the gradient or autocast mode, or checkpoints activations")


@pytest.mark.parametrize("hook", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hook_on_the_relu_keeps_it(hook: str) -> None:
    block = BasicBlock(3, 3)
    block.relu.inplace = False  # torch refuses it behind a backward hook
    getattr(block.relu, f"register_{hook}_hook")(lambda *_: None)
    assert fusion_of(block, "bn2") == ("", "ReLU with hooks or another forward follows it")


# --- Where blocks begin and end ---


class Outer(nn.Module):
    """Control flow that cannot be traced around blocks that can."""

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


def test_untraceable_model_gets_fused_blocks() -> None:
    model = Outer()
    fused, note = fusion_of(model)
    assert fused == ""
    assert note.startswith("Outer cannot be traced")
    assert type(model) is Outer
    assert model.stem[1].act == "relu"
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
    fused, note = fusion_of(CallsInside(), "features.1")
    assert (fused, note) == ("", "CallsInside calls it from outside its own block")


def test_relu_across_nested_sequentials() -> None:
    inner = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    model = nn.Sequential(nn.Sequential(inner, nn.Identity()), nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 2, 1)))
    assert fusion_of(model, "0.0.1") == ("relu", "")
    assert type(model[1][0]) is FusedReLU
    shared = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    twice = nn.Sequential(shared, nn.ReLU(), shared)
    assert fusion_of(twice, "0.1") == ("", "it is used at several places")


def test_one_relu_object_at_many_places_of_a_sequential() -> None:
    relu = nn.ReLU()
    model = nn.Sequential(
        nn.Conv2d(3, 3, 1), relu, nn.BatchNorm2d(3), relu, nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), relu
    )
    assert fusion_of(model, "2") == ("relu", "")
    assert [type(model[i]).__name__ for i in (1, 3, 6)] == ["ReLU", "FusedReLU", "FusedReLU"]


def test_relu_module_is_replaced_only_if_all_its_calls_are_fused() -> None:
    shared, alone = SharedRelu(), SlotRelu()
    assert fusion_of(shared) == ("relu", "")
    assert isinstance(shared, FusedBlock)
    assert type(shared.relu) is nn.ReLU
    assert fusion_of(alone) == ("relu", "")
    assert not alone.fusion_program.train  # its own forward
    assert type(alone.relu) is FusedReLU


def test_a_block_used_twice_is_fused_once() -> None:
    block = BasicBlock(3, 3)
    assert fusion_of(nn.Sequential(block, block), "0.bn2") == ("add + relu", "")


def test_of_two_norms_before_an_add_the_left_takes_it() -> None:
    assert fusion_of(BothNorms()) == ("add + relu", "")
    assert fusion_of(BothNorms(), "other") == ("", "it is the residual of another norm")


def test_a_users_attribute_may_have_any_name() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())
    for module in model:
        module.program = module.act = module.pool = "the user's"
    assert fusion_of(model, "1") == ("relu", "")


# --- After the conversion ---


def test_changed_flags_are_noticed() -> None:
    block = convert(BasicBlock(3, 3), "l1")
    block(torch.randn(2, 3, 4, 4))
    block.downsample = nn.Conv2d(3, 3, 1)
    with pytest.raises(RuntimeError, match=r"BasicBlock\.downsample is Conv2d.* but was None when"):
        block(torch.randn(2, 3, 4, 4))
    block.downsample = None
    block.stride = 7  # not read by forward
    block(torch.randn(2, 3, 4, 4))


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


def test_converting_again_leaves_fused_blocks() -> None:
    model = convert(BasicBlock(3, 3), "l1")
    cls = type(model)
    report = ConversionReport()
    assert type(convert(model, "linf", report=report)) is cls
    assert len(report.skipped) == 2
    model.bn1 = nn.BatchNorm2d(3)
    report = ConversionReport()
    convert(model, "l1", report=report)
    assert (
        report.converted[0].note == "FusedBasicBlock cannot be traced: it was fused before: go back with to_torch first"
    )


def test_graph_modules_are_converted_without_a_new_forward() -> None:
    block = torch.fx.symbolic_trace(BasicBlock(3, 3))
    assert fusion_of(block, "bn2")[1].endswith("defines its own copying, so its forward stays")
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
