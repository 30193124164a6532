"""Weight norm under what is done to a model: save, load, copy, pickle, average, cast, compile, distribute."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel

from normmatters.functional.weight import bounded_weight, slice_norm
from normmatters.weight_norm import (
    apply_weight_norm,
    bounded_weight_norm,
    classic_weight_norm,
    initial_rho,
    remove_weight_norm,
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.up = nn.ConvTranspose2d(4, 3, 2)
        self.head = nn.Linear(3, 5)

    def forward(self, x):
        return self.head(self.up(self.conv(x).relu()).relu().mean((2, 3)))


def make(kind="bounded", seed=0):
    torch.manual_seed(seed)
    model = Net()
    report = apply_weight_norm(model, kind=kind)
    assert len(report.applied) == 3
    return model


X = torch.randn(2, 2, 6, 6, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("kind", ["bounded", "classic"])
def test_state_dict_round_trip(kind):
    model, other = make(kind), make(kind, seed=1)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    other.load_state_dict(state)
    assert torch.equal(other(X), model(X))
    if kind == "bounded":
        assert "conv.parametrizations.weight.0.rho" in state
        assert "conv.parametrizations.weight.original" in state


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("p", [1, 2])
def test_plain_checkpoint_loads_into_a_bounded_model(p, assign):
    plain = Net()
    state = plain.state_dict()
    before = {key: value.clone() for key, value in state.items()}
    model = Net()
    apply_weight_norm(model, p=p)
    outcome = model.load_state_dict(state, assign=assign)
    assert not outcome.missing_keys
    assert not outcome.unexpected_keys
    for name, dim in [("conv", 0), ("up", 1), ("head", 0)]:
        w = plain.get_submodule(name).weight.detach()
        expected = bounded_weight(w, initial_rho(w, dim=dim, p=p), dim=dim, p=p)
        torch.testing.assert_close(model.get_submodule(name).weight.detach(), expected)
    torch.testing.assert_close(model.head.bias, plain.head.bias)
    assert list(state) == list(before)  # the caller's state dict is as it was
    assert all(torch.equal(state[key], before[key]) for key in state)


def test_plain_checkpoint_into_classic_gives_the_same_function():
    plain, model = Net(), make("classic", seed=3)
    model.load_state_dict(plain.state_dict())
    torch.testing.assert_close(model(X), plain(X))


@pytest.mark.parametrize("kind", ["bounded", "classic"])
def test_plain_checkpoint_of_another_precision(kind):
    """The lengths are those of the checkpoint's weights in the model's precision, not rounded to the checkpoint's."""
    plain, model = nn.Linear(6, 4).double(), nn.Linear(6, 4).double()
    apply_weight_norm(model, kind=kind)
    state = plain.bfloat16().state_dict()
    model.load_state_dict(state)
    expected = state["weight"].double()
    if kind == "bounded":
        expected = bounded_weight(expected, initial_rho(expected))
    torch.testing.assert_close(model.weight, expected, rtol=1e-14, atol=1e-14)
    model.load_state_dict(state, assign=True)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_plain_checkpoint_keeps_a_rho_that_was_given():
    layer = bounded_weight_norm(nn.Linear(3, 2), rho=0.5)
    layer.load_state_dict(nn.Linear(3, 2).state_dict())
    torch.testing.assert_close(layer.weight.norm(dim=1), torch.full((2,), 0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("assign", [False, True])
def test_a_rho_that_was_given_on_the_meta_device(assign, dtype):
    """A large model is made without memory, then given memory and a checkpoint, or a checkpoint's memory."""
    layer = bounded_weight_norm(nn.Linear(3, 2, device="meta"), rho=0.5).to(dtype)
    if not assign:
        layer.to_empty(device="cpu")
        assert layer.parametrizations.weight[0].rho == 0.5
    layer.load_state_dict(nn.Linear(3, 2, dtype=dtype).state_dict(), assign=assign)
    assert layer.parametrizations.weight[0].rho.dtype == torch.float32
    torch.testing.assert_close(layer.weight.float().norm(dim=1), torch.full((2,), 0.5), rtol=0, atol=1e-2)


def test_plain_checkpoint_into_recurrent_layers():
    lstm, plain = nn.LSTM(3, 4), nn.LSTM(3, 4)
    apply_weight_norm(lstm)
    lstm.load_state_dict(plain.state_dict())
    w = plain.weight_hh_l0.detach()
    torch.testing.assert_close(lstm.weight_hh_l0.detach(), bounded_weight(w, initial_rho(w)))


def test_strict_loading_still_finds_what_is_wrong():
    model = make()
    state = model.state_dict()
    del state["conv.parametrizations.weight.0.rho"]
    with pytest.raises(RuntimeError, match=r"Missing key.*conv\.parametrizations\.weight\.0\.rho"):
        model.load_state_dict(state)
    state = dict(model.state_dict(), **{"conv.weight": torch.ones(4, 2, 3, 3)})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*conv\.weight"):
        model.load_state_dict(state)
    state = Net().state_dict()
    del state["head.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*head\.parametrizations\.weight\.original"):
        make().load_state_dict(state)
    with pytest.raises(RuntimeError, match="size mismatch"):
        make().load_state_dict(dict(Net().state_dict(), **{"head.weight": torch.ones(5, 4)}))
    with pytest.raises(RuntimeError, match=r"head\.weight.*zero everywhere"):
        make().load_state_dict(dict(Net().state_dict(), **{"head.weight": torch.zeros(5, 3)}))


def test_pickle_round_trip_in_a_fresh_process(tmp_path):
    models = [nn.Sequential(nn.Conv1d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(9, 4)) for _ in range(2)]
    for model, kind in zip(models, ("bounded", "classic"), strict=True):
        apply_weight_norm(model, kind=kind)
    x = torch.randn(2, 2, 4)
    (tmp_path / "in.pkl").write_bytes(pickle.dumps((models, x)))
    program = (
        "import pickle, sys\n"
        "models, x = pickle.load(open(sys.argv[1], 'rb'))\n"
        "outs = [model(x) for model in models]; sum(outs).sum().backward()\n"
        "pickle.dump((models, [out.detach() for out in outs]), open(sys.argv[2], 'wb'))\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "in.pkl"), str(tmp_path / "out.pkl")], check=True)
    for model, returned, out in zip(models, *pickle.loads((tmp_path / "out.pkl").read_bytes()), strict=True):
        assert torch.equal(out, model(x))
        assert torch.equal(returned(x), model(x))
        assert isinstance(returned[0], nn.Conv1d)
        remove_weight_norm(returned)  # and it is whole: it can be taken apart
        assert type(returned[0]) is nn.Conv1d
        torch.testing.assert_close(returned(x), model(x))  # the weight is now computed by the plain equation


def test_pickled_lstm_computes_the_same_after_a_forward():
    lstm, x = nn.LSTM(3, 4, num_layers=2, bidirectional=True), torch.randn(5, 2, 3)
    apply_weight_norm(lstm)
    assert "_flat_weights" not in vars(lstm)  # a list of its own would hold on to v after a cast, and be pickled too
    expected = lstm(x)[0]
    for copied in (pickle.loads(pickle.dumps(lstm)), copy.deepcopy(lstm)):
        assert torch.equal(copied(x)[0], expected)
        copied.load_state_dict(nn.LSTM(3, 4, num_layers=2, bidirectional=True).state_dict())
        assert not torch.equal(copied(x)[0], expected)
        assert torch.equal(lstm(x)[0], expected)


@pytest.mark.parametrize("kind", ["bounded", "classic"])
def test_copies_are_independent(kind):
    model = make(kind)
    expected = model(X)
    copied = copy.deepcopy(model)
    assert torch.equal(copied(X), expected)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.add_(1)
    assert not torch.equal(copied(X), expected)
    remove_weight_norm(copied)  # torch's copies share a class, so that this would break the original
    assert torch.equal(model(X), expected)
    remove_weight_norm(model)
    assert torch.allclose(model(X), expected)


def test_pickle_and_copy_keep_sharing():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    assert len(apply_weight_norm(model).applied) == 2
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other[0].parametrizations.weight.original is other[1].parametrizations.weight.original
        assert other[0].parametrizations.weight.original is not model[0].parametrizations.weight.original


def test_averaged_model():
    model = make()
    average = AveragedModel(model)
    average.update_parameters(model)
    first = model.conv.parametrizations.weight.original.detach().clone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(torch.rand_like(parameter))
    average.update_parameters(model)
    mean_v = (first + model.conv.parametrizations.weight.original.detach()) / 2
    rho = model.conv.parametrizations.weight[0].rho
    torch.testing.assert_close(average.module.conv.weight.detach(), bounded_weight(mean_v, rho))
    assert not torch.equal(average(X), model(X))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_cast_to_half_does_not_round_rho(dtype):
    model = make()
    rho = model.head.parametrizations.weight[0].rho.clone()
    model.to(dtype)
    assert model.head.weight.dtype == dtype
    assert torch.equal(model.head.parametrizations.weight[0].rho, rho)
    norms = slice_norm(model.head.weight)
    torch.testing.assert_close(norms, rho.expand_as(norms), rtol=torch.finfo(dtype).eps, atol=0)
    assert model(X.to(dtype)).dtype == dtype
    state = model.state_dict()
    model.float()
    assert model.head.weight.dtype == torch.float32
    model.load_state_dict(state)
    model.double()
    assert model.head.parametrizations.weight[0].rho.dtype == torch.float64
    torch.testing.assert_close(slice_norm(model.head.weight).flatten(), rho.double().expand(5))


def test_half_weights_get_an_fp32_rho():
    layer = bounded_weight_norm(nn.Linear(400, 3).half())
    assert layer.parametrizations.weight[0].rho.dtype == torch.float32
    assert bounded_weight_norm(nn.Linear(4, 3).half(), rho=1.5).parametrizations.weight[0].rho.dtype == torch.float32
    assert layer.weight.dtype == torch.float16
    assert classic_weight_norm(nn.Linear(4, 3).half()).weight.dtype == torch.float16


@pytest.mark.parametrize("kind", ["bounded", "classic"])
@pytest.mark.parametrize("p", [1, 2])
def test_compiles_whole(p, kind):
    torch.manual_seed(0)
    model = Net()
    apply_weight_norm(model, p=p, kind=kind)
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    out = compiled(X)
    torch.testing.assert_close(out, eager(X))
    out.square().sum().backward()
    eager(X).square().sum().backward()
    for (name, a), b in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)


def test_buffers_are_all_that_ddp_must_broadcast():
    names = {name: value.shape for name, value in make().named_buffers()}
    assert names == {f"{layer}.parametrizations.weight.0.rho": torch.Size([]) for layer in ("conv", "up", "head")}
    assert all(parameter.is_leaf and parameter.requires_grad for parameter in make().parameters())


@pytest.mark.parametrize("kind", ["bounded", "classic"])
def test_functional_call_and_vmap_over_an_ensemble(kind):
    models = [make(kind, seed=seed) for seed in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)
    out = torch.vmap(lambda p, b: torch.func.functional_call(models[0], (p, b), (X,)))(parameters, buffers)
    torch.testing.assert_close(out, torch.stack([model(X) for model in models]))


@pytest.mark.parametrize("kind", ["bounded", "classic"])
@pytest.mark.parametrize("layer", [nn.Linear(4, 5), nn.LSTM(4, 5)], ids=["linear", "lstm"])
def test_replicas_of_data_parallel(layer, kind, monkeypatch):
    """They have no parameters but computed tensors; copies on the CPU stand for the broadcast to other GPUs."""
    module = sys.modules["torch.nn.parallel.replicate"]
    monkeypatch.setattr(module, "_get_device_index", lambda device, *_: device)
    copies = lambda tensors, *_, **__: [[t.clone() for t in tensors]]  # noqa: E731
    monkeypatch.setattr(module, "_broadcast_coalesced_reshape", copies)
    model = nn.Sequential(copy.deepcopy(layer))
    apply_weight_norm(model, kind=kind)
    (replica,) = module.replicate(model, [0])
    x = torch.randn(3, 2, 4)
    outputs = [out[0] if isinstance(out, tuple) else out for out in (model(x), replica(x))]
    torch.testing.assert_close(*outputs)
    parameters = list(model.parameters())
    own, of_replica = (torch.autograd.grad(out.square().sum(), parameters) for out in outputs)
    for a, b in zip(own, of_replica):
        torch.testing.assert_close(a, b)


@pytest.fixture
def one_process():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("kind", ["bounded", "classic"])
@pytest.mark.parametrize("layer", [nn.Linear(4, 5), nn.LSTM(4, 5)], ids=["linear", "lstm"])
def test_a_layer_that_is_sharded_by_itself(layer, kind):
    """fully_shard puts a class of its own on top of the parametrized one. Loading raised, and an LSTM's forward."""
    layer, other = copy.deepcopy(layer), copy.deepcopy(layer)
    for one in (layer, other):
        apply_weight_norm(one, kind=kind)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(torch.rand_like(parameter) + 0.5)
    x = torch.randn(3, 2, 4)
    expected = other(x)
    fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    set_model_state_dict(layer, other.state_dict(), options=StateDictOptions(full_state_dict=True))
    torch.testing.assert_close(layer(x), expected)
    layer.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(x), expected)
    with pytest.raises(ValueError, match="FSDPParametrized"):
        remove_weight_norm(nn.Sequential(layer))
    torch.testing.assert_close(layer(x), expected)


def test_a_class_on_top_of_a_parametrized_layer():
    plain, layer = nn.Linear(4, 5), bounded_weight_norm(nn.Linear(4, 5))
    layer.__class__ = type("Mine", (type(layer),), {})
    layer.load_state_dict(plain.state_dict())
    torch.testing.assert_close(layer.weight, bounded_weight(plain.weight, initial_rho(plain.weight)))
    for use in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="Mine stands on top of ParametrizedLinear"):
            use(layer)
    with pytest.raises(ValueError, match="Mine"):
        remove_weight_norm(layer)
