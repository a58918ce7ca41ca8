"""The memory of a KV pool as transports see it: allocated on a GPU, and converted from and to the engine's tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from common.errors import ConfigError
from kv_transfer.transport.base import DeviceMemory, Memory
from kv_transfer.transport.cuda.cudart import CudaError, CudaRuntime, device_tensor


def allocate_pool(cuda: CudaRuntime, device: int, nbytes: int) -> DeviceMemory:
    """Allocate the KV pool of a decode node, zeroed. Raises ConfigError if the GPU has no room for it."""
    try:
        return DeviceMemory(cuda.malloc(device, nbytes), nbytes, device)
    except CudaError as error:
        raise ConfigError(
            "",
            f"{nbytes >> 20} MiB of KV pages cannot be allocated on cuda:{device} ({error}); "
            "lower decode.pool_tokens, or free memory of that GPU",
        ) from None


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
