"""The dtype of stored keys and values on a device."""

from __future__ import annotations

import torch

from common.errors import ConfigError
from common.kv_cache.kv_values import ATTENTION_PLANES, FP8
from common.kv_cache.pool_spec import PoolSpec

OLDEST_FP8 = (8, 9)  # compute capability whose instructions convert e4m3


def kv_dtype(spec: PoolSpec) -> str | None:
    """Return the dtype of keys and values in pages; None for a model without attention layers."""
    return next((plane.dtype for plane in spec.planes if plane.name in ATTENTION_PLANES), None)


def check_kv_dtype(spec: PoolSpec, device: torch.device) -> None:
    """Raise ConfigError if kernels cannot read keys and values of this dtype on the device."""
    if device.type != "cuda" or kv_dtype(spec) != FP8:
        return
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < OLDEST_FP8:
        raise ConfigError(
            "kv.dtype",
            f"fp8 needs compute capability 8.9 (L4, RTX 4090, H100 and later), {device} has {major}.{minor}; "
            "write auto",
        )
