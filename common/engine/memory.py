"""Whether a node fits on its GPU: weights, KV pool and room to work, against what is free. Refused before loading."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from common.errors import ConfigError
from common.model_config import ModelConfig
from common.model_files import WeightFile

GIB = 1 << 30
PATIENCE = 15.0
WORKING_BYTES = 2 * GIB  # CUDA context, libraries, activations of one forward, graphs


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What one node takes of its GPU: bytes."""

    weights: int
    pool: int
    working: int = WORKING_BYTES
    sampling: int = 0  # penalties and biases: common.engine.logit_adjustments

    @property
    def total(self) -> int:
        return self.weights + self.pool + self.working + self.sampling

    def __str__(self) -> str:
        return (
            f"weights {_gib(self.weights)} + KV pool {_gib(self.pool)} + room to work {_gib(self.working)} + "
            f"sampling state {_gib(self.sampling)} = {_gib(self.total)}"
        )


def weight_bytes(files: list[WeightFile], dtype: torch.dtype) -> int:
    """Of a checkpoint once it is loaded as `dtype`."""
    return dtype.itemsize * sum(math.prod(entry.shape) for file in files for entry in file.tensors.values())


def token_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """KV of one token over all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def check_memory(
    device: torch.device, plan: MemoryPlan, beside: int, pool_key: str, bytes_per_token: int
) -> None:
    """Raises ConfigError with the arithmetic.

    Memory of a decode node that was killed stays taken until prefill nodes let go of it, so a node that would
    fit on an empty GPU waits PATIENCE seconds for it.

    Args:
        beside: bytes that other nodes of the same cluster take of this GPU, whether they have started or not.
    """
    free, total = torch.cuda.mem_get_info(device)
    until = time.monotonic() + PATIENCE
    while free < plan.total <= total - beside and time.monotonic() < until:
        time.sleep(0.25)
        free, total = torch.cuda.mem_get_info(device)
    if plan.total > free:
        raise ConfigError(
            pool_key,
            f"does not fit on {device}: {plan}, {_gib(free)} of {_gib(total)} are free; "
            + _remedy(free - plan.total + plan.pool, bytes_per_token),
        )
    if plan.total + beside > total:
        raise ConfigError(
            pool_key,
            f"does not fit on {device} beside this cluster's other nodes there: {plan}, the others "
            f"{_gib(beside)}, together more than its {_gib(total)}; "
            + _remedy(total - beside - plan.total + plan.pool, bytes_per_token),
        )


def _remedy(room: int, bytes_per_token: int) -> str:
    tokens = room // bytes_per_token
    if tokens < 1:
        return "the weights alone leave no room: use a larger GPU, or one GPU per node"
    return f"with all else equal there is room for {tokens} tokens"


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"
