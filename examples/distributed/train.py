"""Train on several processes as on one: DDP or FSDP2, batch norm over the whole batch, weight decay made explicit.

torchrun --nproc-per-node 2 examples/distributed/train.py states.pt

Trains the same network by each strategy, prints how far they are apart, and saves their states.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import normmatters as nm


def train(strategy: str, rank: int, world: int) -> dict[str, Tensor]:
    """Four steps of a small network; returns its whole state and, but for FSDP2, the norms on the way."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    layers += [nn.Conv2d(8, 12, 3, bias=False), nn.BatchNorm2d(12), nn.ReLU()]
    model: Any = nm.convert(nn.Sequential(*layers, nn.Flatten(), nn.Linear(192, 4)), norm="l1")

    # All that changes modules or parameters comes before DDP and fully_shard, the optimizer after them.
    nm.bounded_weight_norm(model[3])
    if strategy != "one process":
        model = nm.convert_sync_batchnorm(model)
    if strategy == "fsdp":
        mesh = init_device_mesh("cpu", (world,))  # without it, the GPUs of a machine that has some
        for layer in (model[0], model[3], model):
            fully_shard(layer, mesh=mesh)
    network = DistributedDataParallel(model) if strategy == "ddp" else model

    first = model[0].weight  # a convolution before a norm: to it weight decay is a step size, and no more
    rest = [parameter for parameter in model.parameters() if parameter is not first]
    groups = [{"params": [first]}, {"params": rest, "weight_decay_free": False}]
    optimizer = nm.optim.WeightDecayFreeSGD(groups, lr=0.1, momentum=0.9, weight_decay=5e-4)
    recorder = None if strategy == "fsdp" else nm.optim.NormRecorder({"0.weight": first}, optimizer)

    patterns, labels = torch.randn(4, 1, 8, 8), torch.arange(16) % 4
    for _ in range(4):
        images = patterns[labels] + torch.randn(16, 1, 8, 8)
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(images[rank::world]), labels[rank::world]).backward()
        optimizer.step()

    state: dict[str, Tensor] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return state if recorder is None else state | {"norms": recorder.recording().norms["0.weight"]}


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)  # to compare to the last digits
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    states = {"one process": train("one process", 0, 1)}
    states |= {strategy: train(strategy, rank, world) for strategy in ("ddp", "fsdp")}
    if rank == 0:
        for strategy, state in states.items():
            apart = max(float((value - states["one process"][name]).abs().max()) for name, value in state.items())
            print(f"{strategy}: at most {apart:.1e} from one process")
        torch.save(states, sys.argv[1])
    dist.destroy_process_group()
