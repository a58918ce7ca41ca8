"""Copies between host and device on the current stream: nobody waits for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def on_device(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """int64, by one copy from pinned memory."""
    tensor = torch.tensor(values, dtype=torch.int64)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


def on_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, to be read once the stream has come here; on a CPU the tensor itself.

    Read from the device itself it would come behind whatever was launched since: a whole step late.
    """
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
