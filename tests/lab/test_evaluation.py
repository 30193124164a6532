"""The validation set gives the same numbers by graphs as by hand: those of the weights and statistics of now."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from normmatters.lab.config import RunConfig
from normmatters.lab.data import ImageData, Shard, load_data
from normmatters.lab.models import build_model
from normmatters.lab.objective import Classification
from normmatters.lab.side_by_side.graph_steps import GraphEvaluation
from normmatters.lab.side_by_side.graphs import CudaGraphs
from normmatters.lab.side_by_side.small_conv import use_small_convolutions
from normmatters.lab.steps import Arithmetic, Evaluation
from support.fake_graphs import FakeGraphs
from support.lab_runs import small_run


def looks(config: RunConfig, device: torch.device, graphs: Any) -> list[Tensor]:
    """The sums of three looks, with other weights and statistics before each; the last batch is the shorter one."""
    torch.manual_seed(0)
    data = load_data(config.data, None, seed=0, device=device, shard=Shard())
    assert isinstance(data, ImageData)
    model = build_model(config.model, data).to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    objective = Classification(data, 0.0, device)
    use_small_convolutions(model)
    evaluation = Evaluation(model, objective, Arithmetic(config.precision, device), lambda: None)
    if graphs is not None:
        evaluation = GraphEvaluation(evaluation, graphs)
    found = []
    for _ in range(3):
        model.train()
        for images, labels in data.train.epoch(0):
            objective.measure(model, (images, labels), smooth=False)  # which moves the running statistics
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.2 * p.std(correction=0) * torch.randn(p.shape).to(device))
        found.append(evaluation(data.val).clone())
        assert not model.training
    return found


def config(device: str, **model: str) -> RunConfig:
    return small_run(
        data={"eval_batch_size": 80},
        model=model,
        precision={"amp": "bf16", "tf32": False},
        runtime={"device": device},
    )


def test_by_graphs_as_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeGraphs, "recorded", [])
    device = torch.device("cpu")
    by_hand, by_graphs = looks(config("cpu"), device, None), looks(config("cpu"), device, FakeGraphs(device))
    assert [(name, images[0]) for name, (images, _) in FakeGraphs.recorded] == [("evaluation", 80), ("evaluation", 40)]
    assert torch.equal(torch.stack(by_graphs), torch.stack(by_hand))
    losses = [float(sums[0]) for sums in by_hand]
    assert len(set(losses)) == 3
    assert all(sums[2] == 200 for sums in by_hand)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "model",
    [{"norm": "native"}, {"norm": "l1"}, {"norm": "topk"}, {"weight_norm": "wn"}, {"weight_norm": "bwn"}],
    ids=lambda model: next(iter(model.values())),
)
def test_on_a_gpu_by_graphs_as_by_hand(model: dict[str, str]) -> None:
    device = torch.device("cuda")
    by_hand = torch.stack(looks(config("cuda", **model), device, None))
    by_graphs = torch.stack(looks(config("cuda", **model), device, CudaGraphs(device)))
    torch.testing.assert_close(by_graphs[:, 0], by_hand[:, 0], rtol=2e-3, atol=0)  # another kernel of cuDNN's at most
    assert (by_graphs[:, 1] - by_hand[:, 1]).abs().max() <= 1
    assert len(set(by_hand[:, 0].tolist())) == 3
