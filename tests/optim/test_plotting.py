"""Figures and TensorBoard scalars of a recording."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from normmatters.optim import NormRecorder, Recording
from normmatters.optim.plotting import plot, to_tensorboard


@pytest.fixture(scope="module")
def recording() -> Recording:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = NormRecorder(model, optimizer)
    for _ in range(12):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        optimizer.step()
    return recorder.recording()


class Writer:
    """What TensorBoard would get."""

    def __init__(self) -> None:
        self.written: dict[tuple[str, int], float] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.written[tag, step] = value


def test_scalars_are_norms_and_medians(recording: Recording) -> None:
    writer, other = Writer(), Writer()
    to_tensorboard(recording, writer, every=4)
    written = writer.written
    assert written["norms/norm/0.weight", 12] == recording.norm("0.weight", layer=True)[12].item()
    assert (
        written["norms/effective_step_size/1.weight", 4] == recording.effective_step_size("1.weight")[4].median().item()
    )
    assert written["norms/angle/1.weight", 8] == recording.angle("1.weight")[8].median().item()
    assert {step for _, step in written} == {0, 4, 8, 12}
    recording.to_tensorboard(other, prefix="mine", every=4)  # the method is the function
    assert other.written == {(tag.replace("norms/", "mine/", 1), step): v for (tag, step), v in written.items()}


def test_a_figure_of_some_weights(recording: Recording, tmp_path: Path) -> None:
    plot(recording, tmp_path / "norms.png", names=["0.weight"])
    assert (tmp_path / "norms.png").read_bytes()[:4] == b"\x89PNG"
    recording.plot(tmp_path / "all.png")
    figure = recording.plot()  # for a notebook: nothing is saved
    assert [axes.get_title() for axes in figure.axes] == ["norm", "effective step size", "angle"]
    assert (tmp_path / "all.png").read_bytes() != (tmp_path / "norms.png").read_bytes()
    with pytest.raises(ValueError, match="no 'nothing'"):
        plot(recording, tmp_path / "norms.png", names=["nothing"])
