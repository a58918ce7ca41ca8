"""Checks before loading whether a node fits on its GPU: weights, KV pool and workspace against free memory."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from common.checkpoint.safetensors_header import FLOATS, WeightFile
from common.engine.host_memory import GIB, host_memory
from common.errors import ConfigError
from common.node_plan import PoolBudget

RELEASE_SECONDS = 15.0
WORKING_BYTES = 2 * GIB  # CUDA context, libraries, activations of one forward


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The bytes that one node takes of its GPU."""

    weights: int
    pool: int
    working: int = WORKING_BYTES
    sampling: int = 0  # penalties and biases: common.engine.sampling.logit_adjustments
    graphs: int | None = None  # measured by a trial (graph_start.py); None before it
    images: int = 0  # cache of image embeddings
    encoder: int = 0  # for a forward of the vision part: encoder_memory.py
    state: int = 0  # slots and windows of a model that keeps a state per request
    snapshots: int = 0  # saved states of cached prefixes of such a model
    weight_format: str = ""  # of `weights`, unless they have the dtype of activations

    @property
    def total(self) -> int:
        beside = self.working + self.sampling + (self.graphs or 0) + self.images + self.encoder
        return self.weights + self.pool + beside + self.state + self.snapshots

    def __str__(self) -> str:
        stored = f" ({self.weight_format})" if self.weight_format else ""
        graphs = "graphs not measured yet" if self.graphs is None else f"graphs {_gib(self.graphs)}"
        return (
            f"weights {_gib(self.weights)}{stored} + KV pool {_gib(self.pool)} + {graphs} + "
            f"room to work {_gib(self.working)} + sampling state {_gib(self.sampling)}"
            + (f" + state of requests {_gib(self.state)}" if self.state else "")
            + (f" + states of cached prefixes {_gib(self.snapshots)}" if self.snapshots else "")
            + (f" + image encoder {_gib(self.encoder)}" if self.encoder else "")
            + (f" + cache of images {_gib(self.images)}" if self.images else "")
            + f" = {_gib(self.total)}"
        )


def plan_pool(total: int, plan: MemoryPlan, budget: PoolBudget, page_bytes: int) -> int:
    """Return the pages, including the padding page, that a share of `total` bytes leaves after `plan` without pool.

    Raises ConfigError with the arithmetic if there is not one page for tokens.
    """
    share = int(total * budget.fraction)
    pages = (share - plan.total) // page_bytes
    if pages < 2:
        least = (plan.total + 2 * page_bytes) / total
        remedy = f"write at least {least + 0.005:.2f}" if least < 0.97 else "use a larger GPU"
        raise ConfigError(
            budget.key,
            f"{budget.fraction:g} of {_gib(total)} is {_gib(share)}, which leaves no room for KV: {plan}; {remedy}",
        )
    return pages


def weight_bytes(files: list[WeightFile], dtype: torch.dtype, without: tuple[str, ...] = ()) -> int:
    """Return the bytes of a loaded checkpoint without the tensors whose names begin with one of `without`.

    Floats are loaded as `dtype`; tensors of a quantised format keep their own.
    """
    tensors = (item for file in files for item in file.tensors.items())
    return sum(
        math.prod(entry.shape) * dtype.itemsize if entry.dtype in FLOATS else entry.end - entry.begin
        for name, entry in tensors
        if not name.startswith(without)
    )


def check_share(
    device: torch.device, plan: MemoryPlan, beside: int, budget: PoolBudget, page_bytes: int
) -> None:
    """Check a node whose pool is what its share leaves, before the graphs are known; see `check_memory`."""
    share = int(torch.cuda.mem_get_info(device)[1] * budget.fraction)
    free, total = _wait_for_free(device, share, beside)
    if share + beside > total:
        raise ConfigError(
            budget.key,
            f"{budget.fraction:g} of {device} is {_gib(share)}, and this cluster's other nodes there take "
            f"{_gib(beside)}: together more than its {_gib(total)}; lower the fractions",
        )
    if share > free:
        raise ConfigError(
            budget.key,
            f"{budget.fraction:g} of {device} is {_gib(share)}, only {_gib(free)} of {_gib(total)} are free; "
            f"write at most {free / total - 0.005:.2f}, or free memory there",
        )
    plan_pool(total, plan, budget, page_bytes)


def check_memory(
    device: torch.device, plan: MemoryPlan, beside: int, pool_key: str, bytes_per_token: int, held: int = 0
) -> None:
    """Raise ConfigError with the arithmetic if the plan does not fit.

    Memory of a killed decode node stays in use until prefill nodes release it, so a node that would fit on an empty
    GPU waits RELEASE_SECONDS for it.

    Args:
        beside: bytes that other nodes of the same cluster take of this GPU, whether or not they have started. Their
            graphs, which only they can measure, count as memory that is not free once they are captured.
        held: bytes of `plan` that this process has already taken.
    """
    free, total = _wait_for_free(device, plan.total - held, beside + held)
    if plan.total > free + held:
        own = f", {_gib(held)} its own" if held else ""
        raise ConfigError(
            pool_key,
            f"does not fit on {device}: {plan}, {_gib(free)} of {_gib(total)} are free{own}; "
            + _remedy(free + held - plan.total + plan.pool, bytes_per_token),
        )
    if plan.total + beside > total:
        raise ConfigError(
            pool_key,
            f"does not fit on {device} together with this cluster's other nodes: {plan}, the others "
            f"{_gib(beside)}, together more than its {_gib(total)}; "
            + _remedy(total - beside - plan.total + plan.pool, bytes_per_token),
        )


def check_host_pool(nbytes: int, bytes_per_token: int, key: str) -> None:
    """Raise ConfigError for the KV pool of a node on the CPU that is larger than the machine's memory."""
    memory = host_memory()
    if nbytes > memory:
        raise ConfigError(
            key,
            f"a KV pool of {_gib(nbytes)} is more than the {_gib(memory)} of this machine's memory; "
            + _remedy(memory, bytes_per_token),
        )


def _wait_for_free(device: torch.device, needed: int, beside: int) -> tuple[int, int]:
    """Return (free, total) bytes of a GPU, once `needed` are free or waiting cannot help."""
    free, total = torch.cuda.mem_get_info(device)
    until = time.monotonic() + RELEASE_SECONDS
    while free < needed <= total - beside and time.monotonic() < until:
        time.sleep(0.25)
        free, total = torch.cuda.mem_get_info(device)
    return free, total


def _remedy(room: int, bytes_per_token: int) -> str:
    tokens = room // bytes_per_token
    if tokens < 1:
        return "the node leaves no room for a pool: use a larger GPU, or one GPU per node"
    return f"with the other values unchanged there is room for {tokens} tokens"


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"
