"""Converts between the engine's tensors and the transports' memory, on CPUs and on GPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from kv_transfer.transport.base import DeviceMemory, Memory
from kv_transfer.transport.cuda.cudart import device_tensor


def as_memory(storage: Tensor) -> Memory:
    """Return the flat bytes of a pool for `SenderEndpoint.register`; valid while `storage` lives."""
    if storage.is_cuda:
        return DeviceMemory(storage.data_ptr(), storage.nbytes, storage.get_device())
    return storage.numpy().data


def as_storage(memory: Memory) -> Tensor:
    """Return [bytes] uint8 over the result of `ReceiverEndpoint.allocate`, without owning it."""
    if isinstance(memory, DeviceMemory):
        return device_tensor(memory.address, memory.nbytes)
    return torch.frombuffer(memory, dtype=torch.uint8)
