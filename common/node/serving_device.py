"""Finds the device that a node is configured to serve on, and refuses one that its kernels do not run on."""

from __future__ import annotations

import torch

from common.errors import ConfigError
from common.mps import mps_is_used
from common.node.product_check import check_products

# Lowest compute capability that kernels are compiled for (tests/fakes/compile_for.py).
OLDEST_GPU = (8, 0)


def serving_device(name: str) -> torch.device:
    """Return the device of that name, made current. Raises ConfigError if it does not exist or cannot serve."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError("device", f"{name!r} is not a device; write cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError("device", f"{name!r} is not supported; write cpu, cuda or cuda:N")
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise ConfigError("device", f"{name!r}: torch finds no CUDA device on this machine; use cpu")
    index, count = device.index or 0, torch.cuda.device_count()
    if index >= count:
        raise ConfigError(
            "device", f"{name!r}: this machine has {count} CUDA devices, cuda:0 to cuda:{count - 1}"
        )
    if torch.version.hip is not None:
        raise ConfigError(
            "device",
            f"{name!r}: this PyTorch is built for ROCm {torch.version.hip}; graphs and kernels need an NVIDIA GPU "
            "and a CUDA build of PyTorch, or write cpu",
        )
    major, minor = torch.cuda.get_device_capability(index)
    if (major, minor) < OLDEST_GPU:
        raise ConfigError(
            "device",
            f"{name!r} has compute capability {major}.{minor}; the kernels need 8.0 (A100 and later), or write cpu",
        )
    torch.cuda.set_device(index)  # kernels are launched on the current device
    device = torch.device("cuda", index)
    if mps_is_used():
        check_products(device)
    return device
