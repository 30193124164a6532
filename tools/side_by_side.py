"""How many steps a second do small networks take side by side on one GPU?

    python tools/side_by_side.py                                # L1, L2, Top(10), mean-only; 1, 4, 8 and 12 of them
    python tools/side_by_side.py --norm topk --runs 12 --no-overlap --connections 8

Each network's whole step is a CUDA graph on a stream of its own, as in the lab's runs (`normmatters reproduce --jobs`);
the host only replays. `--no-overlap`: kernels do not take their places before the one before has ended (`launch.py`).
`--connections`: the device's queues for streams; CUDA's own default is 8, and streams that share one wait in turn.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NORMS = ("l1", "l2", "linf", "topk", "range", "mean_only", "native")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--norm", nargs="+", default=["l1", "l2", "topk", "mean_only"], choices=NORMS)
    parser.add_argument("--runs", nargs="+", type=int, default=[1, 4, 8, 12])
    parser.add_argument("--model", default="resnet56")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=1.0, help="of replays, for each number")
    parser.add_argument("--no-overlap", action="store_true")
    parser.add_argument("--connections", type=int, default=32)
    given = parser.parse_args()
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(given.connections)  # read when CUDA starts

    import torch

    if not torch.cuda.is_available():
        raise SystemExit("this measures a GPU, and torch finds none here")
    torch.backends.cudnn.benchmark = True
    if given.no_overlap:
        from normmatters.kernels.triton import launch

        launch.can_overlap = lambda device: False  # type: ignore[assignment]
    print(f"{torch.cuda.get_device_name()}, overlap {not given.no_overlap}, {given.connections} connections")
    print("norm       runs  ms a step of all  steps/s in all")
    for norm in given.norm:
        graphs = [_graph(norm, given.model, given.batch) for _ in range(max(given.runs))]
        for count in given.runs:
            ms = _time(graphs[:count], given.seconds)
            print(f"{norm:10} {count:4} {ms:17.2f} {1000 * count / ms:15.0f}", flush=True)


def _graph(norm: str, name: str, batch: int) -> tuple[torch.cuda.CUDAGraph, torch.cuda.Stream]:
    """One network's step, forward, backward and SGD, on random images."""
    import torch
    from torch.nn.functional import cross_entropy

    from normmatters.lab.capture import all_at_once
    from normmatters.lab.config import ModelConfig
    from normmatters.lab.models import build_image_model

    kind = {"weight_norm": "bwn"} if norm == "mean_only" else {"norm": norm}
    model = build_image_model(ModelConfig(name=name, **kind), channels=3, classes=10, size=32)  # type: ignore[arg-type]
    model = model.cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    images = torch.randn(batch, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(10, (batch,), device="cuda")

    def gradients() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = cross_entropy(model(images), labels)
        loss.backward()

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            gradients()
            optimizer.step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        with all_at_once(model, torch.bfloat16):
            gradients()
        optimizer.step()
    return graph, stream


def _time(graphs: list[tuple[torch.cuda.CUDAGraph, torch.cuda.Stream]], seconds: float) -> float:
    """Milliseconds in which each of them takes one step."""
    import torch

    def rounds(count: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for i in range(count):
            for graph, stream in graphs:
                with torch.cuda.stream(stream):
                    graph.replay()
            if i % 16 == 15:  # not too far ahead
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / count

    count = max(16, int(seconds / rounds(16)))
    return 1000 * rounds(count)


if __name__ == "__main__":
    main()
