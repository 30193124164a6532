"""A picture of ``layers``: time against the size of the tensor, between what memory allows and what peers take.

``python -m normmatters.bench.roofline results/bench/layers.json docs/img/roofline.svg``
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Fixed order, so that a series keeps its color whatever rows a file holds.
SERIES = {
    "native": ("native, eager", "#9a9a9a", "s"),
    "native_compiled": ("native, torch.compile", "#4d4d4d", "D"),
    "naive_l1_compiled": ("naive L1, torch.compile", "#c8a2c8", "v"),
    "l1": ("L1", "#1f77b4", "o"),
    "l1_lean": ("L1, lean", "#d62728", "o"),
}
FLOOR_PASSES = 5  # 2 forward (read x, write z), 3 backward (read g and z, write dx)


def draw(data: Mapping[str, Any], path: Path, *, dtype: str = "fp16", layout: str = "cl", form: str = "relu") -> Path:
    """Draw forward + backward time of the rows of one dtype, layout and form. The suffix of ``path`` names the format.

    Args:
        data: what ``results/bench/layers.json`` holds.
        path: an SVG or PNG file to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    chosen = [
        row
        for row in data["rows"]
        if row["status"] == "ok" and (row["dtype"], row["layout"], row["form"]) == (dtype, layout, form)
    ]
    if not chosen:
        raise ValueError(f"no rows of {dtype}, {layout}, {form} to draw")
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    sizes = sorted({row["tensor_bytes"] for row in chosen})
    for count, style in ((FLOOR_PASSES, "-"), (2 * FLOOR_PASSES, "--")):
        times = [count * size / data["copy_bandwidth"] * 1e3 for size in sizes]
        axes.plot([s / 1e6 for s in sizes], times, style, color="#222222", lw=1, label=f"{count} passes at copy speed")
    for name, (label, color, marker) in SERIES.items():
        points = sorted((r["tensor_bytes"] / 1e6, r["fwd_ms"] + r["bwd_ms"]) for r in chosen if r["variant"] == name)
        if points:
            x, y = zip(*points)
            axes.plot(x, y, marker, color=color, ms=6, ls="-", lw=0.8, label=label)
    axes.set(xscale="log", yscale="log", xlabel="size of the tensor in MB", ylabel="forward + backward in ms")
    title = (
        f"batch norm + {'add + ' if form == 'add_relu' else ''}ReLU, {dtype}, {layout}: {data['environment']['device']}"
    )
    axes.set_title(title, fontsize=10)
    axes.grid(True, which="both", lw=0.3)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the picture of a layers.json."""
    parser = argparse.ArgumentParser(prog="python -m normmatters.bench.roofline", description=main.__doc__)
    parser.add_argument("json", type=Path)
    parser.add_argument("picture", type=Path, help="SVG or PNG")
    parser.add_argument("--dtype", default="fp16")
    parser.add_argument("--layout", default="cl")
    parser.add_argument("--form", default="relu")
    chosen = parser.parse_args(arguments)
    data = json.loads(chosen.json.read_text(encoding="utf-8"))
    draw(data, chosen.picture, dtype=chosen.dtype, layout=chosen.layout, form=chosen.form)


if __name__ == "__main__":
    main()
