"""How many steps per second do small networks take side by side on one GPU?

    python tools/side_by_side.py                                # L1, L2, Top(10), mean-only; 1, 4, 8 and 12 of them
    python tools/side_by_side.py --norm topk --runs 12 --no-overlap --connections 8

Each network's whole step is a CUDA graph on a stream of its own that a thread of its own replays, as in the lab's runs
(`normmatters reproduce --jobs`). `--ahead`: how many replays a thread may be ahead of the device before it looks (it is
at most twice as many). `--no-overlap`: kernels do not take their places before the one before has ended (`launch.py`).
`--connections`: the device's queues for streams; CUDA's own default is 8, and streams that share one wait in turn.
`--cudnn`: the same without the lab's own convolutions, which is what they have to be compared with.
"host" is the time that a thread's processor works for a step: where that of all threads together is the time of a step,
the host is what the device waits for.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normmatters.lab.side_by_side.graphs import CudaGraphs

NORMS = ("l1", "l2", "linf", "topk", "range", "mean_only", "native")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--norm", nargs="+", default=["l1", "l2", "topk", "mean_only"], choices=NORMS)
    parser.add_argument("--runs", nargs="+", type=int, default=[1, 4, 8, 12])
    parser.add_argument("--ahead", nargs="+", type=int, default=[4])
    parser.add_argument("--model", default="resnet56")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=1.0, help="of replays, for each number")
    parser.add_argument("--no-overlap", action="store_true")
    parser.add_argument("--cudnn", action="store_true", help="small convolutions by cuDNN, not by the lab's kernels")
    parser.add_argument("--connections", type=int, default=8)
    given = parser.parse_args()
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(given.connections)  # read when CUDA starts

    import torch

    if not torch.cuda.is_available():
        raise SystemExit("this measures a GPU, and torch finds none here")
    torch.backends.cudnn.benchmark = True
    if given.no_overlap:
        from normmatters.kernels.triton import launch

        launch.can_overlap = lambda device: False  # type: ignore[assignment]
    how = f"overlap {not given.no_overlap}, cudnn {given.cudnn}, {given.connections} connections"
    print(f"{torch.cuda.get_device_name()}, {how}")
    print("norm       runs  ahead  ms per step of all  steps/s in all  host, ms per step")
    for norm in given.norm:
        graphs = [_graph(norm, given.model, given.batch, given.cudnn) for _ in range(max(given.runs))]
        for ahead in given.ahead:
            for count in given.runs:
                steps, host = _time(graphs[:count], ahead, given.seconds)
                ms = 1000 * count / steps
                print(f"{norm:10} {count:4} {ahead:6} {ms:18.2f} {steps:15.0f} {1000 * host:17.3f}", flush=True)


def _graph(norm: str, name: str, batch: int, cudnn: bool) -> CudaGraphs:
    """One network's step, forward, backward and SGD, on random images."""
    import torch
    from torch.nn.functional import cross_entropy

    from normmatters.lab.config import ModelConfig
    from normmatters.lab.models import build_image_model
    from normmatters.lab.side_by_side.fewer_launches import fewer_launches
    from normmatters.lab.side_by_side.graphs import CudaGraphs
    from normmatters.lab.side_by_side.small_conv import use_small_convolutions

    kind = {"weight_norm": "bwn"} if norm == "mean_only" else {"norm": norm}
    model = build_image_model(ModelConfig(name=name, **kind), channels=3, classes=10, size=32)  # type: ignore[arg-type]
    if not cudnn:
        use_small_convolutions(model)
    model = model.cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    images = torch.randn(batch, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(10, (batch,), device="cuda")

    def gradients() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = cross_entropy(model(images), labels)
        loss.backward()

    def step() -> None:
        with fewer_launches(model, torch.bfloat16):
            gradients()
        optimizer.step()

    graphs = CudaGraphs(torch.device("cuda"))  # with a stream of its own
    with graphs.warm_up():
        for _ in range(3):
            gradients()
            optimizer.step()
    graphs.record("step", step)
    graphs.works_on = model, optimizer, images, labels  # type: ignore[attr-defined]  # a graph has addresses alone
    return graphs


def _time(runs: list[CudaGraphs], ahead: int, seconds: float) -> tuple[float, float]:
    """Steps per second of all together, and the seconds that a processor works for one of them."""
    import torch

    taken: list[int] = []
    worked: list[float] = []
    start = threading.Barrier(len(runs) + 1)

    def replay(graphs: CudaGraphs) -> None:
        with torch.cuda.stream(graphs._stream):
            graphs.ahead = ahead
            try:
                for _ in range(4):
                    graphs.replay("step")
                torch.cuda.current_stream().synchronize()
            except BaseException:
                start.abort()  # or the others would wait for this one for ever
                raise
            start.wait()
            end, before, count = time.perf_counter() + seconds, time.thread_time(), 0
            while time.perf_counter() < end:
                graphs.replay("step")
                count += 1
            torch.cuda.current_stream().synchronize()
            taken.append(count)
            worked.append((time.thread_time() - before) / count)

    threads = [threading.Thread(target=replay, args=(graphs,)) for graphs in runs]
    for thread in threads:
        thread.start()
    start.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - began
    return sum(taken) / elapsed, sum(worked) / len(worked)


if __name__ == "__main__":
    main()
