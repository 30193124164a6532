"""to_torch: classes, keys and evaluation of the original come back; what has no equal is kept and named."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import fusion, parametrize
from torch.testing import assert_close

from normmatters.nn.batchnorm import L1BatchNorm1d, L1BatchNorm2d, LpBatchNorm2d, MeanOnlyBatchNorm2d
from normmatters.nn.batchnorm_act import LpBatchNormAct2d
from normmatters.nn.layernorm import L1LayerNorm, L1RMSNorm, LpLayerNorm
from normmatters.nn.sync import SyncLpBatchNorm, convert_sync_batchnorm
from normmatters.surgery import ConversionReport, convert, fold, to_torch
from normmatters.surgery.back import BatchNormReLU1d, BatchNormReLU2d
from normmatters.surgery.blocks import FusedBlock
from normmatters.weight_norm import apply_weight_norm
from support.models import (
    NETS,
    BatchNormAct2d,
    HandWritten,
    ResNet,
    TimmResNet,
    assert_same_step,
    batch,
    make,
    regnet,
    vgg_bn,
)


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("norm", ["l1", "range"])
def test_round_trip(name: str, norm: str) -> None:
    original = make(name)
    model = convert(make(name), norm)
    parameters = list(model.parameters())
    model.train()(batch())
    expected = model.eval()(batch())
    report = ConversionReport()
    assert to_torch(model, report=report) is model
    assert_close(model(batch()), expected, rtol=1e-10, atol=1e-12)
    assert [type(module) for module in model.modules()] == [type(module) for module in original.modules()]
    assert [repr(module) for module in model.modules()] == [repr(module) for module in original.modules()]
    assert model.state_dict().keys() == original.state_dict().keys()
    assert all(mine is parameter for mine, parameter in zip(model.parameters(), parameters))
    assert len(report.converted) == sum(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    model.load_state_dict(original.state_dict())
    assert_same_step(model.train(), original.train())


def test_there_and_back_again_to_another_norm() -> None:
    model = convert(to_torch(convert(make("resnet"), "l1")), "linf")
    assert_same_step(model.train(), convert(make("resnet"), "linf").train())


def test_result_is_free_of_this_library() -> None:
    for net in (ResNet, vgg_bn, TimmResNet, HandWritten, regnet):
        model = to_torch(convert(net(), "l1"))
        assert not [m for m in model.modules() if type(m).__module__.startswith("normmatters")]
    model = to_torch(convert(vgg_bn(), "l1")).eval()
    x = torch.randn(2, 3, 8, 8)
    folded = fusion.fuse_conv_bn_eval(model[0][0], model[0][1])
    assert_close(folded(x), model[0][1](model[0][0](x)), rtol=1e-4, atol=1e-5)


class ByHand(nn.Module):
    """Written with this library's fused norms from the start: no ReLU module to put back."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.bn = L1BatchNorm2d(3, act="relu")
        self.bn2 = L1BatchNorm2d(3, act="relu")
        self.fc = nn.Sequential(nn.Linear(3, 4), L1BatchNorm1d(4, act="relu"))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(x))
        y = self.bn2(self.conv(y), residual=x)
        return self.fc(y.mean((2, 3)))


def test_hand_written_activations_stay_in_the_norm() -> None:
    torch.manual_seed(0)
    model = ByHand().double()
    model(batch())
    expected = model.eval()(batch())
    keys = list(model.state_dict())
    to_torch(model)
    assert_close(model(batch()), expected)
    assert [type(model.bn), type(model.bn2), type(model.fc[1])] == [BatchNormReLU2d, BatchNormReLU2d, BatchNormReLU1d]
    assert list(model.state_dict()) == keys


def test_a_hand_written_activation_before_an_add_and_a_relu_is_not_dropped() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = L1BatchNorm2d(3, act="relu")
            self.relu = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.relu(self.bn(x) + x)

    model = Block().double().eval()
    expected = model(batch())
    assert type(to_torch(model).bn) is BatchNormReLU2d
    assert_close(model(batch()), expected)


def test_timm_norm_comes_back_with_its_relu() -> None:
    model = nn.Sequential(BatchNormAct2d(3, nn.ReLU())).double().eval()
    expected = model(batch())
    keys = list(model.state_dict())
    assert type(to_torch(convert(model, "l1"))[0]) is BatchNormReLU2d
    assert_close(model(batch()), expected)
    assert list(model.state_dict()) == keys


def test_timm_norm_comes_back_with_any_activation() -> None:
    model = nn.Sequential(BatchNormAct2d(3, nn.SiLU(), nn.Dropout(0.5))).double()
    before = copy.deepcopy(model)
    synchronized = convert_sync_batchnorm(convert(copy.deepcopy(model), "l1"))
    assert isinstance(synchronized[0], SyncLpBatchNorm)
    assert_same_step(synchronized, convert(model, "l1"))  # the dropout and the activation came with it
    for converted in (synchronized, model):
        back = to_torch(converted)
        assert isinstance(back[0], nn.BatchNorm2d if converted is model else nn.SyncBatchNorm)
        assert back.state_dict().keys() == before.state_dict().keys()
        before.load_state_dict(back.state_dict())
        assert_close(back.eval()(batch()), before.eval()(batch()))


def test_mean_only_and_sync() -> None:
    model = nn.Sequential(MeanOnlyBatchNorm2d(3), SyncLpBatchNorm(3, 1), nn.ReLU()).double()
    model(batch())
    expected = model.eval()(batch())
    keys = list(model.state_dict())
    to_torch(model)
    assert [type(module) for module in model] == [nn.BatchNorm2d, nn.SyncBatchNorm, nn.ReLU]
    assert_close(model(batch()), expected)
    assert list(model.state_dict()) == keys
    assert model[1].process_group is None


def test_what_has_no_equal_is_kept_and_named() -> None:
    layers = [L1LayerNorm(4), LpLayerNorm(4, p=2), LpLayerNorm(4, p=2, constant=3.0), L1RMSNorm(4)]
    untracked = [L1BatchNorm2d(3, track_running_stats=False), LpBatchNorm2d(3, p=2, track_running_stats=False)]
    model = nn.ModuleList([*layers, *untracked]).double().eval()
    before = copy.deepcopy(model)
    report = ConversionReport()
    with pytest.warns(UserWarning, match=r"0 \(L1LayerNorm: torch.nn has only L2\), 2 \(LpLayerNorm.*3 \(L1RMSNorm"):
        to_torch(model, report=report)
    kinds = [type(module).__name__ for module in model]
    assert kinds == ["L1LayerNorm", "LayerNorm", "LpLayerNorm", "L1RMSNorm", "L1BatchNorm2d", "BatchNorm2d"]
    assert {change.name for change in report.skipped} == {"0", "2", "3", "4"}
    x = torch.randn(5, 3, 4, 4, dtype=torch.float64)
    for module, old in zip(model, before):
        assert_close(module(x), old(x))


@pytest.mark.filterwarnings("ignore:to_torch kept modules")
@pytest.mark.parametrize("name", NETS)
def test_a_norm_that_is_kept_gives_back_what_it_took_over(name: str) -> None:
    """Without running statistics L1 has no equal, but its block, ReLU and pool are their own again."""
    model = make(name)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.track_running_stats, norm.num_batches_tracked = False, None
            norm.running_mean = norm.running_var = None
    model = convert(model, "l1").eval()
    expected = model(batch())
    to_torch(model)
    assert not any(isinstance(module, FusedBlock) for module in model.modules())
    assert_close(model(batch()), expected)


class _Doubled(L1BatchNorm2d):
    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        return 2 * super().forward(input, residual)


class _Exp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


class _Wide(L1BatchNorm2d):
    """Has other defaults, and nothing more."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=0.5)


def changed_norms() -> nn.Sequential:
    """Three norms that are more than their class says, and one that is not."""
    torch.manual_seed(0)
    model = nn.Sequential(_Doubled(3), L1BatchNorm2d(3), L1BatchNorm2d(3), _Wide(3))
    parametrize.register_parametrization(model[1], "weight", _Exp())
    model[2].forward = lambda input: -input  # type: ignore[method-assign]
    return model.double().eval()


@pytest.mark.parametrize("go", [to_torch, fold, convert_sync_batchnorm])
def test_norms_with_a_forward_or_a_parametrization_of_their_own_are_kept(go: Callable[..., nn.Module]) -> None:
    model = changed_norms()
    expected, kinds = model(batch()), [type(norm) for norm in model]
    with pytest.warns(UserWarning, match=r"0 .*_Doubled has a forward.*, 1 .*parametrized.*, 2 .*replaced"):
        model = go(model)  # type: ignore[assignment]
    assert [type(norm) for norm in model][:3] == kinds[:3]
    assert type(model[3]) is (SyncLpBatchNorm if go is convert_sync_batchnorm else nn.BatchNorm2d)
    assert_close(model(batch()), expected)


def test_synchronizing_keeps_the_activations_of_torchs_norms() -> None:
    model = to_torch(nn.Sequential(nn.Conv2d(3, 4, 1), L1BatchNorm2d(4, act="relu"))).double().eval()
    model.append(nn.BatchNorm2d(4).double().eval())
    expected = model(batch())
    with pytest.warns(UserWarning, match=r"kept norms .* 1 \(BatchNormReLU2d has a forward of its own\)"):
        convert_sync_batchnorm(model)
    assert [type(module) for module in model[1:]] == [BatchNormReLU2d, nn.SyncBatchNorm]
    assert_close(model(batch()), expected)


def test_weight_norms_are_removed_unless_asked() -> None:
    model = convert(make("vgg"), "l1")
    apply_weight_norm(model)
    expected = model.eval()(batch())
    kept = to_torch(copy.deepcopy(model), remove_weight_norms=False)
    assert kept.state_dict().keys() == model.state_dict().keys()
    assert_close(kept(batch()), expected)
    to_torch(model)
    assert_close(model(batch()), expected)
    assert model.state_dict().keys() == make("vgg").state_dict().keys()


def test_root_norm_copy_and_wrong_input() -> None:
    norm = L1BatchNorm1d(3)
    plain = to_torch(norm)
    assert type(plain) is nn.BatchNorm1d
    assert plain.weight is norm.weight
    model = convert(make("resnet"), "l1")
    other = to_torch(model, inplace=False)
    assert type(other.bn1) is nn.BatchNorm2d
    assert type(model.bn1) is L1BatchNorm2d
    assert_same_step(model.eval(), other.eval())
    with pytest.raises(TypeError, match="got list"):
        to_torch([model])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="report must be a ConversionReport to fill"):
        to_torch(model, report=True)  # type: ignore[arg-type]
    assert isinstance(model, FusedBlock)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain_model = make("timm")
        assert to_torch(plain_model) is plain_model


def test_torchs_norms_have_an_eps_that_every_torch_takes() -> None:
    """Torch 2.11 refuses 0, which mean-only norms have."""
    act = LpBatchNormAct2d(3, eps=0.0)
    act.drop, act.activation = nn.Identity(), nn.SiLU()
    model = to_torch(nn.Sequential(MeanOnlyBatchNorm2d(3), act))
    assert [type(norm).__name__ for norm in model] == ["BatchNorm2d", "BatchNormAct2d"]
    assert all(0 < norm.eps < 1e-30 for norm in model)
