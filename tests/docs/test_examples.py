"""Every script under ``examples/`` runs on its small data, leaves its plot, and shows what its card says it shows."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
Names = dict[str, Any]


def _numbers(pattern: str, printed: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, printed)]


def angular(names: Names, printed: str) -> None:
    sgd, ours, adamw = _numbers(r"at the end ([\d.]+),", printed)
    assert ours == pytest.approx((2 * 0.1 * 5e-3 / 1.9) ** 0.5, abs=1e-5)  # √(2ηλ/(1+μ)), at every step
    assert adamw == pytest.approx(0.0229, abs=1e-5)
    assert sgd == pytest.approx(ours, rel=0.15)  # the median of its last quarter, since single steps scatter
    assert min(_numbers(r"accuracy ([\d.]+)", printed)) > 0.95


def constants(names: Names, printed: str) -> None:
    exact, paper = names["exact"], names["paper"]
    for rows in exact.values():  # 400 batches: three standard errors, and the sample mean's √(1−1/n) below
        assert all(1 - 1 / n - 3 * s / 20 < mean < 1 + 3 * s / 20 for n, (mean, s) in zip(names["SIZES"], rows))
    assert all(1.33 < mean < 1.50 for mean, _ in paper["L∞"])  # 38 % to 47 % too large
    assert all(1.13 < mean < 1.35 for mean, _ in paper["Top(10)"])
    assert paper["L1"] == exact["L1"]
    scatter = [exact[kind][-1][1] for kind in ("L2", "L1", "Top(10)", "range", "L∞")]
    assert scatter == sorted(scatter)


def convert_cnn(names: Names, printed: str) -> None:
    final = {norm: curve[-1] for norm, curve in names["errors"].items()}
    assert printed.count("2 converted, 2 fused, 0 skipped") == 3
    assert final["nn.BatchNorm2d"] < 4
    assert all(abs(error - final["nn.BatchNorm2d"]) < 1.5 for error in final.values())


def corrected_decay(names: Names, printed: str) -> None:
    falls = []
    for recording in names["runs"].values():
        norm = recording.norm("3.weight", layer=True)
        falls.append((norm[len(norm) // 3] / norm[-1]).item())
    assert falls[0] > 1.4  # with a constant decay the norm falls with the learning rate,
    assert falls[1] < 1.15  # and stays if the decay follows it


def equilibrium(names: Names, printed: str) -> None:
    measured, predicted = float(sum(names["norms"][-250:]) / 250), names["predicted"][-5:].mean().item()
    assert measured == pytest.approx(predicted, rel=0.1)
    assert float(sum(names["angles"][-250:]) / 250) ** 0.5 == pytest.approx(0.0229, rel=0.1)  # √(2ηλ/(1+μ))
    assert "0.02294 rad" in printed


def l1_layer_norm(names: Names, printed: str) -> None:
    l2, l1 = (curve[-1] for curve in names["perplexities"].values())
    assert l2 < 1.05
    assert l1 == pytest.approx(l2, abs=0.02)
    assert names["perplexities"]["nm.L1LayerNorm"] != names["perplexities"]["nn.LayerNorm"]


def low_precision(names: Names, printed: str) -> None:
    at = {label: dict(zip(names["sigmas"], row)) for label, row in names["spreads"].items()}
    assert all(spread == pytest.approx(1, abs=0.01) for spread in at["L1, fp16 sums"].values())
    for label in ("L2, fp16 sums", "L2, fp32 sums"):
        assert at[label][1.0] == pytest.approx(1, abs=0.01)
        assert at[label][1000.0] == 0  # the squares overflowed
        assert names["losses"][label][-1] > 2.2  # log 10 = 2.3: nothing learned
    assert names["losses"]["L1, fp16 sums"][-1] < 0.5


def norm_recorder(names: Names, printed: str) -> None:
    recording = names["recording"]
    assert list(recording.names) == ["0.weight", "3.weight"]
    step = recording.effective_step_size("3.weight").median(1).values
    drop = len(step) // 2  # the learning rate falls after epoch 12 of 24
    assert step[drop - 1] > 2 * step[drop // 4]  # weight decay shortens the weights,
    assert step[drop + 1] < 0.2 * step[drop - 1]  # until the learning rate falls


def norm_schedule(names: Names, printed: str) -> None:
    by_rate, by_norm = _numbers(r"final loss ([\d.]+)", printed)
    assert by_rate == pytest.approx(by_norm, abs=2e-6)  # printed to six digits


def scale_invariance(names: Names, printed: str) -> None:
    assert [str(names["result"][f"{layer}.weight"]) for layer in (0, 3, 8)] == [
        "channel, dim 0",
        "tensor, with 3.bias",
        "no",
    ]
    assert "weight decay acts on the step size alone: ['0.weight']" in printed


def step_size_correction(names: Names, printed: str) -> None:
    decay, without, corrected = (recording.norm("3.weight", layer=True)[-1] for recording in names["runs"].values())
    assert decay < without < corrected  # opposite norms,
    angles = [recording.angle("3.weight") for recording in names["runs"].values()]
    off = [(angle[:50] / angles[0][:50]).log().abs().median() for angle in angles[1:]]
    assert off[1] < 0.01  # and one and the same angle
    assert off[0] > 10 * off[1]


def weight_decay_free(names: Names, printed: str) -> None:
    decay, free, without = _numbers(r"final loss ([\d.]+)", printed)
    assert free == pytest.approx(decay, rel=1e-6)
    assert without != pytest.approx(decay, rel=1e-2)
    norms = _numbers(r"second layer ([\d.]+)", printed)
    assert norms[1] > 2 * norms[0]


def weight_norm(names: Names, printed: str) -> None:
    errors = {kind: curves[0][-1] for kind, curves in names["runs"].items()}
    norms = {kind: curves[1] for kind, curves in names["runs"].items()}
    assert max(errors.values()) < 6
    assert norms["bounded weight norm"][0] == pytest.approx(norms["bounded weight norm"][-1], rel=1e-6)
    assert norms["weight norm"][-1] > norms["weight norm"][0]


SHOWS: dict[str, Callable[[Names, str], None]] = {
    check.__name__: check
    for check in (
        *(angular, constants, convert_cnn, corrected_decay, equilibrium, l1_layer_norm, low_precision),
        *(norm_recorder, norm_schedule, scale_invariance, step_size_correction, weight_decay_free, weight_norm),
    )
}


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_example_shows_what_it_says(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("Agg")
    plot = tmp_path / "deep" / "plot.png"
    monkeypatch.chdir(tmp_path)  # whatever else it writes goes nowhere
    monkeypatch.setattr(sys, "argv", [script.name, str(plot)])
    try:
        names = runpy.run_path(str(script))
    finally:
        pyplot.close("all")
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert plot.stat().st_size > 10_000  # an empty plot is a few kilobytes
    SHOWS[script.stem](names, capsys.readouterr().out)


def test_every_example_is_short_and_its_picture_is_shown() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    assert {script.stem for script in EXAMPLES} == set(SHOWS)
    for script in EXAMPLES:
        assert len(script.read_text(encoding="utf-8").splitlines()) < 60, script.name
        picture = ROOT / "docs" / "img" / f"{script.stem}.png"
        assert picture.stat().st_size < 60_000, picture
        assert f"img/{script.stem}.png)" in pages, picture
        assert f"examples/{script.stem}.py)" in pages, script
