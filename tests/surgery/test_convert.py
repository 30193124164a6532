"""convert on whole networks: the same function, parameters and state before and after; clear errors; the report."""

from __future__ import annotations

import copy
import io
import logging
import math
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from normmatters.nn.batchnorm import (
    L1BatchNorm1d,
    L1BatchNorm2d,
    LInfBatchNorm2d,
    LpBatchNorm2d,
    RangeBatchNorm2d,
    TopKBatchNorm2d,
)
from normmatters.nn.layernorm import L1LayerNorm, LpLayerNorm
from normmatters.nn.layernorm2d import L1LayerNorm2d, LpLayerNorm2d
from normmatters.nn.sync import SyncLpBatchNorm
from normmatters.surgery import ConversionReport, convert, to_torch
from normmatters.surgery.blocks import FusedBlock
from support.models import NETS, BasicBlock, BatchNormAct2d, ResNet, assert_same_step, batch, make, step, vgg_bn

FUSED = {"resnet": 7, "resnet-bottleneck": 10, "vgg": 3, "timm": 5, "functional": 6, "regnet": 5}


@pytest.mark.parametrize("name", NETS)
def test_l2_is_the_original(name: str) -> None:
    original, converted = make(name), convert(make(name), "l2")
    for training in (True, False, True):
        assert_same_step(converted.train(training), original.train(training))


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("norm", ["l1", "topk", 3.0])
def test_fused_is_unfused(name: str, norm: str | float) -> None:
    report = ConversionReport()
    fused = convert(make(name), norm, k=3, report=report)
    plain = convert(make(name), norm, k=3, fuse=False)
    assert len(report.fused) == FUSED[name]
    for training in (True, False):
        assert_same_step(fused.train(training), plain.train(training))


@pytest.mark.parametrize("name", NETS)
def test_keys_parameters_and_classes_stay(name: str) -> None:
    model = make(name)
    before = copy.deepcopy(model)
    tensors = {key: tensor.data_ptr() for key, tensor in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    modules = dict(model.named_modules())
    assert convert(model, "l1") is model
    assert {key: tensor.data_ptr() for key, tensor in model.state_dict().items()} == tensors
    assert all(parameters[key] is parameter for key, parameter in model.named_parameters())
    assert dict(model.named_modules()).keys() == modules.keys()
    assert all(
        isinstance(new, type(old)) for old, new in zip(before.modules(), model.modules()) if list(old.children())
    )
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


@pytest.mark.parametrize("name", NETS)
def test_checkpoints_move_both_ways(name: str) -> None:
    plain, converted = make(name, seed=3), convert(make(name), "l1")
    converted.load_state_dict(plain.state_dict())
    assert_close(converted.eval()(batch()), plain.eval()(batch()))
    converted.train()(batch())
    plain.load_state_dict(converted.state_dict())
    assert_close(converted.eval()(batch()), plain.eval()(batch()))


def test_only_blocks_in_which_something_fuses_change_class() -> None:
    model = convert(ResNet(), "l1")
    assert isinstance(model, FusedBlock)
    assert isinstance(model, ResNet)
    assert repr(model) == repr(convert(ResNet(), "l1", fuse=False))
    assert type(model.layer2[0].downsample) is nn.Sequential
    assert type(convert(ResNet(), "l1", fuse=False)) is ResNet
    assert isinstance(model.layer1[0], BasicBlock)
    assert type(model.layer1[0]) is type(model.layer1[1])  # one class for all blocks of a class
    assert model.layer2[0].stride == 2
    vgg = convert(vgg_bn(), "l1")
    assert [type(module).__name__ for module in vgg[0][:3]] == ["Conv2d", "L1BatchNorm2d", "ReLU"]
    assert vgg[0][1].act is None


def test_the_class_of_a_converted_block_builds_blocks() -> None:
    """With norms that are plain, and the same function."""
    model = convert(make("resnet"), "l2")
    built = type(model)(BasicBlock, 4).double()
    assert isinstance(built.bn1, nn.BatchNorm2d)
    original = ResNet(BasicBlock, 4).double()
    original.load_state_dict(built.state_dict())
    assert_same_step(built, original)
    block = type(model.layer1[0])(4, 4).double()
    assert block(torch.ones(2, 4, 3, 3, dtype=torch.float64)).shape == (2, 4, 3, 3)


def test_filter_chooses_by_name_and_module() -> None:
    asked: list[str] = []

    def wanted(name: str, module: nn.Module) -> bool:
        asked.append(name)
        return name != "bn1" and module.num_features == 4

    report = ConversionReport()
    model = convert(make("resnet"), "l1", filter=wanted, report=report)
    assert type(model.bn1) is type(model.layer2[0].bn1) is nn.BatchNorm2d
    assert type(model.layer1[0].bn1) is L1BatchNorm2d
    assert asked == [change.name for change in report.changes]
    assert {change.note for change in report.skipped} == {"the filter leaves it out"}
    with pytest.raises(TypeError, match="filter must be"):
        convert(model, "l1", filter="bn1")  # type: ignore[arg-type]


def test_the_report_names_every_normalization_layer() -> None:
    report = ConversionReport()
    kept = [nn.RMSNorm(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), nn.LayerNorm(4), nn.LocalResponseNorm(2)]
    convert(nn.Sequential(nn.BatchNorm2d(4), *kept), "l1", report=report)
    assert [change.before for change in report.skipped] == [type(norm).__name__ for norm in kept]
    assert all(change.note for change in report.skipped)


def test_the_report_has_the_rewritten_forwards() -> None:
    report = ConversionReport()
    convert(make("resnet"), "l1", report=report)
    assert report.forwards.keys() == {"ResNet.forward", "ResNet._forward_impl", "BasicBlock.forward"}
    assert "fusion.call(self.bn1, out)" in report.forwards["BasicBlock.forward"].replace(
        "fusion.attr(self, 'bn1')", "self.bn1"
    )


@pytest.mark.parametrize("name", ["resnet", "vgg", "functional"])
def test_optimizers_made_before_go_on(name: str) -> None:
    model = make(name).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    convert(model, "l1")
    fresh = convert(make(name).train(), "l1")
    fresh_optimizer = torch.optim.SGD(fresh.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        step(model, batch())
        optimizer.step()
        step(fresh, batch())
        fresh_optimizer.step()
    assert_close(model.state_dict(), fresh.state_dict())
    assert not torch.equal(next(model.parameters()), next(make(name).parameters()))


@pytest.mark.parametrize("name", ["resnet-bottleneck", "functional", "regnet"])
def test_copies_and_pickles(name: str) -> None:
    model = convert(make(name), "l1")
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    others = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(stream, weights_only=False),  # our own bytes, from the lines above
        torch.optim.swa_utils.AveragedModel(model).module,
    ]
    for other in others:
        assert [type(module) for module in other.modules()] == [type(module) for module in model.modules()]
        twin = convert(make(name), "l1")
        for training in (True, False):
            assert_same_step(twin.train(training), other.train(training))


def test_copy_can_be_trained_apart() -> None:
    model = convert(make("resnet"), "l1")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.layer1[0].bn2.bias += 1
    assert not torch.allclose(model.eval()(batch()), other.eval()(batch()))


def test_compiles_whole() -> None:
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Conv2d(3, 4, 1), BasicBlock(4, 4)).double(), "l1")
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    for training in (True, False):
        model.train(training)
        compiled.train(training)
        for mine, other in zip(step(model, batch()), step(compiled, batch())):
            if isinstance(other, dict):
                other = {key.removeprefix("_orig_mod."): value for key, value in other.items()}
            assert_close(mine, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("norm", "cls", "p", "k"),
    [
        ("l1", L1BatchNorm2d, 1, None),
        (1.0, L1BatchNorm2d, 1, None),
        ("l2", LpBatchNorm2d, 2, None),
        (2.5, LpBatchNorm2d, 2.5, None),
        ("linf", LInfBatchNorm2d, math.inf, None),
        (math.inf, LInfBatchNorm2d, math.inf, None),
        ("topk", TopKBatchNorm2d, math.inf, 4),
        ("range", RangeBatchNorm2d, "range", None),
    ],
)
def test_each_norm_with_its_arguments(norm: str | float, cls: type, p: float, k: int | None) -> None:
    old = nn.BatchNorm2d(3, eps=0.25, momentum=None, dtype=torch.float64).eval()
    old.weight.requires_grad_(False)
    old.tag = "mine"
    new = convert(old, norm, k=4, constant="none", memory="lean")
    assert type(new) is cls
    assert (new.p, new.k, new.constant, new.memory, new.act) == (p, k, "none", "lean", None)
    assert (new.eps, new.momentum, new.training, new.tag, new.num_features) == (0.25, None, False, "mine", 3)
    assert new.weight is old.weight
    assert new.bias is old.bias
    assert not new.weight.requires_grad
    assert new.running_var is old.running_var
    assert new.num_batches_tracked is old.num_batches_tracked
    x = torch.randn(5, 3, 2, 2, dtype=torch.float64)
    assert_close(new(x), old(x))


def test_norms_without_parameters_or_statistics() -> None:
    old = nn.BatchNorm1d(3, affine=False, track_running_stats=False)
    new = convert(copy.deepcopy(old), "l2")
    assert new.weight is None
    assert new.running_mean is None
    x = torch.randn(6, 3)
    assert_close(new.eval()(x), old.eval()(x))
    assert isinstance(convert(old, "l1"), L1BatchNorm1d)


def test_shared_norm_stays_shared() -> None:
    norm = nn.BatchNorm2d(3)
    model = nn.Sequential(nn.Conv2d(3, 3, 1), norm, nn.ReLU(), nn.Conv2d(3, 3, 1), norm)
    report = ConversionReport()
    convert(model, "l1", report=report)
    assert model[1] is model[4]
    assert [change.fused for change in report.changes] == ["relu"]  # where a ReLU follows it
    assert bool((model(torch.randn(2, 3, 4, 4)) < 0).any())


def test_sync_batch_norm() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.SyncBatchNorm(4), nn.ReLU()).double().eval()
    expected = model(batch())
    convert(model, "topk", k=7)
    assert type(model[1]) is SyncLpBatchNorm
    assert model[1].k == 7
    assert_close(model(batch()), expected)


def test_layer_norm_only_if_asked() -> None:
    def make_layers() -> nn.Module:
        return nn.Sequential(
            nn.LayerNorm(6), nn.LayerNorm((2, 3), bias=False), nn.LayerNorm(3, elementwise_affine=False)
        )

    kept = convert(make_layers(), "l1")
    assert all(type(module) is nn.LayerNorm for module in kept)
    model = make_layers()
    weights = [module.weight for module in model]
    convert(model, "l1", layer_norm="l1")
    assert all(type(module) is L1LayerNorm for module in model)
    assert all(module.weight is weight for module, weight in zip(model, weights))
    assert model[1].bias is None
    same = make_layers().double()
    converted = convert(copy.deepcopy(same), "l1", layer_norm="l2")
    assert type(converted[0]) is LpLayerNorm
    x = torch.randn(4, 6, dtype=torch.float64)
    assert_close(converted[0](x), same[0](x))


def test_timm_norm_with_activation() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        BatchNormAct2d(3, nn.ReLU()),
        BatchNormAct2d(3),
        nn.ReLU(),
        BatchNormAct2d(3, nn.SiLU()),
        nn.ReLU(),  # not the norm's: a SiLU lies between
        BatchNormAct2d(3, nn.ReLU(), nn.Dropout(0.5)),
        BatchNormAct2d(3, nn.PReLU()),
    ).double()
    before = copy.deepcopy(model)
    report = ConversionReport()
    convert(model, "l2", report=report)
    assert [type(module).__name__ for module in model] == [
        "LpBatchNorm2d",
        "LpBatchNorm2d",
        "ReLU",
        "LpBatchNormAct2d",
        "ReLU",
        "LpBatchNormAct2d",
        "BatchNormAct2d",
    ]
    assert [change.fused for change in report.changes] == ["relu", "relu", "", "", ""]
    assert [change.note for change in report.skipped] == ["its activation has a state, which would change its key"]
    assert model.state_dict().keys() == before.state_dict().keys()
    assert_same_step(model, before)
    assert_same_step(copy.deepcopy(model), copy.deepcopy(before))
    assert_close(model.eval()(batch()), before.eval()(batch()))


@pytest.mark.parametrize("norm", ["l1", "topk", 1.5])
def test_timm_norm_with_activation_in_another_norm(norm: str | float) -> None:
    model = nn.Sequential(BatchNormAct2d(3, nn.SiLU())).double()
    plain = convert(nn.Sequential(nn.BatchNorm2d(3), nn.SiLU()).double(), norm, k=5)
    convert(model, norm, k=5)
    for mine, other in zip(step(model, batch()), step(plain, batch())):
        assert_close(list(mine.values()), list(other.values())) if isinstance(mine, dict) else assert_close(mine, other)
    assert_close(list(model.state_dict().values()), list(plain.state_dict().values()))


class LayerNorm2d(nn.LayerNorm):
    """torchvision's and timm's: over the channels of (N, C, H, W)."""

    __module__ = "torchvision.models.convnext"

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_channels_first_layer_norm(memory_format: torch.memory_format) -> None:
    model = nn.Sequential(LayerNorm2d(3, eps=1e-6)).double()
    nn.init.normal_(model[0].weight)
    nn.init.normal_(model[0].bias)
    before = copy.deepcopy(model)
    x = batch().contiguous(memory_format=memory_format)
    converted = convert(copy.deepcopy(model), layer_norm="l2")
    assert type(converted[0]) is LpLayerNorm2d
    for mine, other in zip(step(converted, x), step(before, x)):
        assert_close(mine, other)
    back = to_torch(converted)
    assert isinstance(back[0], nn.LayerNorm)
    assert not isinstance(back[0], LpLayerNorm2d)
    assert_close(back(x), before(x))

    assert type(convert(model, layer_norm="l1")[0]) is L1LayerNorm2d
    assert model[0].eps == 1e-6
    mean = x.mean(1, keepdim=True)
    scale = math.sqrt(math.pi / 2) * (x - mean).abs().mean(1, keepdim=True)  # F10
    weight, bias = (p.view(1, 3, 1, 1) for p in model[0].parameters())
    assert_close(model(x), (x - mean) / (scale**2 + 1e-6).sqrt() * weight + bias)
    with pytest.raises(ValueError, match=r"expected 4D input, \(N, .*, H, W\), got shape"):
        model(x[0])


class _Scaled(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_skips_with_reasons() -> None:
    patched = nn.BatchNorm2d(3)
    patched.forward = lambda input: input  # type: ignore[method-assign]
    model = nn.Sequential(_Scaled(3), nn.LazyBatchNorm2d(), patched, L1BatchNorm2d(3), nn.BatchNorm2d(3))
    report = ConversionReport()
    model.append(nn.LazyInstanceNorm2d())
    convert(model, "l1", report=report)
    assert {change.name: change.note for change in report.skipped} == {
        "0": "_Scaled is a subclass: what it adds is not known",
        "1": "it is not initialised yet: run the model once first",
        "2": "its forward was replaced on the instance",
        "3": "it is one of normmatters already: go back with to_torch first",
        "5": "LazyInstanceNorm2d has no counterpart here",
    }
    assert [change.name for change in report.converted] == ["4"]


def test_hooks_go_on_and_can_be_removed() -> None:
    model = vgg_bn()
    seen: list[Tensor] = []
    handle = model[0][1].register_forward_hook(lambda module, args, output: seen.append(output.clone()))
    report = ConversionReport()
    convert(model, "l1", report=report)
    model(torch.randn(2, 3, 8, 8))
    assert len(seen) == 1
    assert bool((seen[0] < 0).any())  # what the norm gives, not the ReLU: a norm with a hook is not fused
    assert "hooks" in report.changes[0].note
    handle.remove()
    model(torch.randn(2, 3, 8, 8))
    assert len(seen) == 1


def test_modules_that_a_norm_was_given_come_with_it() -> None:
    """As the observers that quantization puts on every module, which a hook calls, are."""
    model = nn.Sequential(nn.BatchNorm2d(3))
    model[0].after = nn.PReLU()
    model[0].register_forward_hook(lambda module, args, output: module.after(output))
    keys, x = list(model.state_dict()), torch.randn(4, 3, 5, 5)
    expected = copy.deepcopy(model)(x)
    convert(model, "l2")
    assert_close(model(x), expected)
    assert list(model.state_dict()) == keys
    assert list(to_torch(model).state_dict()) == keys


def test_hooks_of_loading_meet_the_new_norm() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3))
    seen: list[nn.Module] = []
    model[0].register_load_state_dict_pre_hook(lambda module, *_: seen.append(module))
    convert(model, "l1")
    model.load_state_dict(model.state_dict())
    assert seen == [model[0]]


def test_a_norm_that_was_compiled_is_converted_like_any_other() -> None:
    model, compiled = (nn.Sequential(nn.BatchNorm2d(3)) for _ in range(2))
    compiled[0].compile(backend="eager")
    x = torch.randn(4, 3, 4, 4) ** 3
    assert_close(convert(compiled, "l1")(x), convert(model, "l1")(x), rtol=0, atol=0)


def test_inplace_false_leaves_the_model() -> None:
    model = make("resnet")
    converted = convert(model, "l1", inplace=False)
    assert converted is not model
    assert type(model.bn1) is nn.BatchNorm2d
    assert type(converted.bn1) is L1BatchNorm2d
    assert type(model.layer1[0]) is BasicBlock
    assert converted.conv1.weight is not model.conv1.weight


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"norm": "L1"}, ValueError, "got 'L1'; did you mean 'l1'?"),
        ({"norm": "l_inf"}, ValueError, "did you mean 'linf'?"),
        ({"norm": "top-k"}, ValueError, "did you mean 'topk'?"),
        ({"norm": "mean"}, ValueError, "no weight to carry over"),
        ({"norm": 0.5}, ValueError, "0.5"),
        ({"norm": math.nan}, ValueError, "nan"),
        ({"norm": True}, TypeError, "got bool"),
        ({"norm": None}, TypeError, "got NoneType"),
        ({"norm": "topk", "k": 0}, ValueError, "k"),
        ({"norm": "l1", "constant": "exakt"}, ValueError, "exakt"),
        ({"norm": "l1", "constant": -1.0}, ValueError, "-1"),
        ({"norm": "l1", "memory": "less"}, ValueError, "'less'"),
        ({"norm": "l1", "layer_norm": "l3"}, ValueError, "layer_norm must be"),
        ({"norm": "l1", "report": True}, TypeError, "report must be a ConversionReport to fill, or None, got bool"),
    ],
)
def test_wrong_arguments_change_nothing(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    model = vgg_bn()
    with pytest.raises(error) as raised:
        convert(model, **arguments)  # type: ignore[arg-type]
    assert message in str(raised.value)
    assert type(model[0][1]) is nn.BatchNorm2d
    assert type(model[0][2]) is nn.ReLU


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit's own
def test_wrong_models() -> None:
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got OrderedDict"):
        convert(vgg_bn().state_dict(), "l1")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"before torch\.jit"):
        convert(torch.jit.trace(vgg_bn().eval(), torch.randn(1, 3, 8, 8)), "l1")


def test_report_is_a_table_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    report = ConversionReport()
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.BatchNorm2d(8), _Scaled(8))
    with caplog.at_level(logging.INFO, logger="normmatters"):
        convert(model, "l1", report=report)
    assert str(report).splitlines() == [
        "module  before       after          fused  note",
        "1       BatchNorm2d  L1BatchNorm2d  relu",
        "3       BatchNorm2d  L1BatchNorm2d  -      no ReLU follows it that its block's forward shows",
        "4       _Scaled      (kept)         -      _Scaled is a subclass: what it adds is not known",
        "2 converted, 1 fused, 1 skipped",
    ]
    assert caplog.messages == [str(report)]
    caplog.clear()
    convert(nn.Linear(2, 2), "l1")
    assert caplog.messages == ["no norm to convert was found"]
    caplog.clear()
    convert(model, "l2")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    first, *lines, last = caplog.messages[0].splitlines()
    assert (first, last) == ("no norm was converted", "0 converted, 0 fused, 3 skipped")
    assert lines[1].endswith("it is one of normmatters already: go back with to_torch first")


def test_transformer_encoder_evaluates_with_our_norm() -> None:
    """Its fast path would read the weights of the norm and use L2; nested tensors would reach it too."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = convert(nn.TransformerEncoder(layer, 2), layer_norm="l1").eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        fast = model(x)
    slow = model(x)  # with gradients the fast path is never taken
    torch.testing.assert_close(fast, slow.detach())
    padded = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        masked = model(x, src_key_padding_mask=padded)
    torch.testing.assert_close(masked[0], fast[0])

    plain = to_torch(convert(nn.TransformerEncoder(layer, 1), layer_norm="l2")).eval()
    assert plain.layers[0].activation_relu_or_gelu == 1
