"""Figures and TensorBoard scalars of a `Recording`. Apart from it, because they need matplotlib or a writer."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torch import Tensor

from normmatters.optim.recording import Recording

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(recording: Recording, path: str | os.PathLike[str] | None = None, *, names: list[str] | None = None) -> Figure:
    """Draw a figure with a panel each for layer norm, effective step size and angle (medians over channels).

    Args:
        path: the file to save it to; None saves none. A notebook shows the figure that is returned.
        names: the weights to draw; None draws all.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plotting needs matplotlib: pip install matplotlib") from error
    drawn = recording.names if names is None else names
    for name in drawn:
        recording.norm(name)  # raises on a name that it does not have
    curves = [curve for curve in _curves(recording) if curve[1] in drawn]
    tags = list(dict.fromkeys(tag for tag, _, _ in curves))
    figure = Figure(figsize=(3.6 * len(tags), 3.2), layout="constrained")
    for axes, title in zip(figure.subplots(1, len(tags), squeeze=False)[0], tags):
        for tag, name, curve in curves:
            if tag == title:
                axes.plot(recording.steps[: len(curve)].numpy(), curve.numpy(), label=name, linewidth=1)
        axes.set(title=title.replace("_", " "), xlabel="step", yscale="log")
    if len(drawn) <= 10:
        figure.axes[0].legend(fontsize=8)
    if path is not None:
        with rc_context({"axes.formatter.min_exponent": 3}):  # ticks such as 0.02
            figure.savefig(os.fspath(path), dpi=100)
    return figure


def to_tensorboard(recording: Recording, writer: Any, *, prefix: str = "norms", every: int = 1) -> None:
    """Write layer norm, median effective step size and median angle of every weight as scalars.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`, or anything with its `add_scalar`.
        every: write every so many rows.
    """
    for tag, name, curve in _curves(recording):
        for row in range(0, len(curve), every):
            writer.add_scalar(f"{prefix}/{tag}/{name}", curve[row].item(), int(recording.steps[row]))


def _curves(recording: Recording) -> list[tuple[str, str, Tensor]]:
    """(quantity, weight, one number per row)."""
    curves = [("norm", n, recording.norm(n, layer=True)) for n in recording.names]
    if recording.lr.shape[1]:
        steps = ((n, recording.effective_step_size(n)) for n in recording.names)
        curves += [("effective_step_size", n, step.median(1).values) for n, step in steps]
    if recording.angles:
        curves += [("angle", n, recording.angles[n].nanmedian(1).values) for n in recording.names]
    return curves
