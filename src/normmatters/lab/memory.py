"""How many runs fit side by side: a rough estimate of their memory against what is free, before any starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from normmatters.lab.config import RunConfig

_GIB = 2**30
# Activations of one training image in fp32, in MiB, at the size that the network is made for (side in pixels).
_IMAGE_MIB = {
    "small_cnn": (0.2, 8),
    "vgg11": (2.5, 32),
    "resnet8": (2.0, 32),
    "resnet20": (5.0, 32),
    "resnet56": (14.0, 32),
    "resnet110": (28.0, 32),
    "resnet18": (55.0, 224),
    "resnet50": (190.0, 224),
}
_SIDE = {"digits": 8, "cifar10": 32, "tiny_imagenet": 64, "imagefolder": 224}
_TOKEN_MIB = {"lstm": 0.4, "transformer": 1.2, "transformer_small": 0.4}
_PROCESS = {"cpu": 0.45, "cuda": 0.8}  # GiB: libraries and data; a CUDA context and its workspaces


def need_bytes(config: RunConfig, device: str) -> int:
    """Roughly the device memory that one run takes."""
    data, model = config.data, config.model
    if model.name in _TOKEN_MIB:
        mib = _TOKEN_MIB[model.name] * data.tokens * ((model.d_model or 512) / 512)
    else:
        per_image, side = _IMAGE_MIB[model.name]
        mib = per_image * ((data.image_size or _SIDE[data.name]) / side) ** 2 * model.width * data.batch_size
    half = 0.5 if config.precision.amp != "none" else 1.0
    return int(mib * half * 2**20 + _PROCESS["cuda" if device.startswith("cuda") else "cpu"] * _GIB)


def free_bytes(device: str) -> int | None:
    """Free memory on the device; None if the system does not tell."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), None)


def check_memory(configs: Sequence[RunConfig], jobs: int, device: str, free: int | None = None) -> None:
    """Raise ValueError when the ``jobs`` largest of the runs would not fit beside each other."""
    free = free if free is not None else free_bytes(device)
    if free is None or not configs:
        return
    needs = sorted((need_bytes(c, device) for c in configs), reverse=True)
    need = sum(needs[:jobs])
    if need > free:
        fit = next((n for n in range(jobs, 0, -1) if sum(needs[:n]) <= free), 0)
        advice = f"at most --jobs {fit}" if fit else "not even one fits: make data.batch_size (or data.tokens) smaller"
        wanted = f"{jobs} runs side by side need about {need / _GIB:.1f} GiB on {device}"
        raise ValueError(f"{wanted}, {free / _GIB:.1f} GiB are free: {advice}")
