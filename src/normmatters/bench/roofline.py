"""A picture of ``layers``: time against the size of the tensor, between what memory allows and what peers take.

``python -m normmatters.bench.roofline results/bench/layers.json docs/img/roofline.svg``
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from normmatters.bench.harness import passes

# Fixed order, so that a series keeps its color whatever rows a file holds.
SERIES = {
    "native": ("native, eager", "#9a9a9a", "s"),
    "native_compiled": ("native, torch.compile", "#4d4d4d", "D"),
    "naive_l1_compiled": ("naive L1, torch.compile", "#c8a2c8", "v"),
    "l1": ("L1", "#1f77b4", "o"),
    "l1_lean": ("L1, lean", "#d62728", "o"),
}
# Forward reads x (and the residual) and writes z; backward reads g and z and writes dx (and the residual's gradient).
FLOOR_PASSES = {"relu": 2 + 3, "add_relu": 3 + 4}
LAYOUTS = {"cl": "channels_last", "nchw": "contiguous"}


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
        if row["status"] == "ok" and (row.get("dtype"), row.get("layout"), row.get("form")) == (dtype, layout, form)
    ]
    if not data.get("memory_bandwidth"):
        raise ValueError("the file says nothing of the memory's bandwidth")
    if not chosen:
        raise ValueError(f"no rows of {dtype}, {layout}, {form} to draw")
    figure, (time, share) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    sizes = sorted({row["tensor_bytes"] for row in chosen})
    megabytes = [size / 1e6 for size in sizes]
    for count, style in ((FLOOR_PASSES[form], "-"), (2 * FLOOR_PASSES[form], "--")):
        label = f"{count} passes at copy speed"
        time.plot(megabytes, [count * s / data["memory_bandwidth"] * 1e3 for s in sizes], style, color="#222222", lw=1)
        share.plot(megabytes, [count] * len(sizes), style, color="#222222", lw=1, label=label)
    for name, (label, color, marker) in SERIES.items():
        rows = [row for row in chosen if row["variant"] == name]
        if rows:
            x, y = [row["tensor_bytes"] / 1e6 for row in rows], [row["fwd_ms"] + row["bwd_ms"] for row in rows]
            time.plot(x, y, marker, color=color, ms=6, ls="", label=label)
            y = [passes(ms, data["memory_bandwidth"], row["tensor_bytes"]) for ms, row in zip(y, rows)]
            share.plot(x, y, marker, color=color, ms=6, ls="")
    time.set(yscale="log", ylabel="forward + backward in ms")
    share.set(ylabel="the same in passes over the tensor")
    share.set_ylim(bottom=0)
    time.legend(fontsize=8)
    share.legend(fontsize=8)
    for axes in (time, share):
        axes.set(xscale="log", xlabel="size of the tensor in MB")
        axes.set_xticks(megabytes, [f"{mb:.3g}" for mb in megabytes])
        axes.minorticks_off()
        axes.grid(True, lw=0.3)
    layer = f"batch norm + {'add + ' if form == 'add_relu' else ''}ReLU"
    figure.suptitle(f"{layer}, {dtype}, {LAYOUTS[layout]}: {data['environment']['device']}", fontsize=10)
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
    try:
        data = json.loads(chosen.json.read_text(encoding="utf-8"))
        draw(data, chosen.picture, dtype=chosen.dtype, layout=chosen.layout, form=chosen.form)
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
