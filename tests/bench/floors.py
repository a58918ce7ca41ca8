"""Lower bounds of the time of forwards: bytes that must be read, and operations of matrix products.

Experts count as they are used: an eager step runs with hooks on its routers, which count the experts that its tokens
choose in each layer.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn

from common.engine.formats.dense import DenseLinear
from common.engine.formats.fp8 import Fp8Linear
from common.engine.layers.expert_products import ExpertProducts
from common.engine.layers.experts import Experts
from common.engine.layers.linear import Embedding
from common.engine.layers.router import ExpertRouter
from common.engine.state.pool import KvPool
from tests.bench.timing import copy_bandwidth, graph_us, matmul_rate


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a forward, in bytes."""

    dense: int  # what every forward reads
    expert: int  # one expert
    chosen: int  # experts of one token, over all layers, shared ones included
    itemsize: int


def weights_of(model: nn.Module, without: Collection[nn.Module] = ()) -> Weights:
    """Return the weights of a forward through a model, except embeddings and the parts `without`."""
    chosen, expert, skipped = 0, 0, set[int]()
    for module in model.modules():
        if isinstance(module, Experts):
            shape = module.router.experts
            chosen += shape.router.chosen + shape.shared
            # Matrices and scales of all experts are stacked; scales of inputs are not.
            expert = sum(each[0].nbytes for each in module.experts.parameters() if each.dim() > 1)
        if isinstance(module, ExpertProducts | Embedding) or module in without:
            skipped |= {id(parameter) for parameter in module.parameters()}
    parameters = list(model.parameters())
    dense = sum(each.nbytes for each in parameters if id(each) not in skipped)
    return Weights(dense, expert, chosen, parameters[0].itemsize)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The measured limits of the device."""

    bytes_per_s: float
    flop_per_s: float

    @classmethod
    def measure(cls, device: torch.device) -> Ceilings | None:
        return cls(copy_bandwidth(), matmul_rate()) if device.type == "cuda" else None

    def ms(self, weights: Weights, used: float, moved: float, rows: int) -> float:
        """Return the floor of one forward of `rows` rows.

        Args:
            used: experts that are read, over all layers.
            moved: bytes of keys, values and states that are read or written.
        """
        read = weights.dense + used * weights.expert + moved
        values = (weights.dense + weights.chosen * weights.expert) / weights.itemsize
        return 1e3 * max(read / self.bytes_per_s, 2 * rows * values / self.flop_per_s)

    def experts_ms(self, weights: Weights, used: float, rows: int) -> float:
        """Return the floor of only the experts, all layers together."""
        values = weights.chosen * weights.expert / weights.itemsize
        return 1e3 * max(used * weights.expert / self.bytes_per_s, 2 * rows * values / self.flop_per_s)


class UsedExperts:
    """Counts, while it is entered, the experts that eager forwards of a model read."""

    def __init__(self, model: nn.Module) -> None:
        self._routers = [module for module in model.modules() if isinstance(module, ExpertRouter)]
        # (router, rows of the forward) -> experts of each forward
        self._counts: dict[tuple[int, int], list[int]] = defaultdict(list)

    def __enter__(self) -> Self:
        self._handles = [router.register_forward_hook(self._count) for router in self._routers]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _count(self, router: nn.Module, inputs: object, output: tuple[Tensor, Tensor]) -> None:
        experts = output[0].unique()
        self._counts[id(router), len(output[0])].append(int((experts >= 0).sum()))

    def per_forward(self, rows: int) -> float:
        """Return the experts of a forward of `rows` rows, over all layers: the mean of those that were seen.

        One row has different experts, which a kernel may choose without the router's forward.
        """
        unseen = {
            id(router): router.experts.router.chosen + router.experts.shared if rows == 1 else 0
            for router in self._routers
        }
        seen = [self._counts.get((id(router), rows), [unseen[id(router)]]) for router in self._routers]
        return sum(statistics.fmean(counts) for counts in seen)


def products_ms(model: nn.Module, tokens: int, device: torch.device) -> float:
    """Return the time of the matrix products of a model's layers on `tokens` rows, those of experts excepted.

    A product in FP8 counts as half of one in bfloat16 of its shape.
    """
    layers = model.get_submodule("layers")
    eight = [each.codes for each in layers.modules() if isinstance(each, Fp8Linear)]
    if eight:
        return _measured_ms([torch.randn(each.shape, device=device).bfloat16() for each in eight], tokens) / 2
    weights = [each.dense() for each in layers.modules() if isinstance(each, DenseLinear)]
    weights += [each.rows for each in layers.modules() if isinstance(each, ExpertRouter)]
    return _measured_ms(weights, tokens)


def _measured_ms(weights: Sequence[Tensor], tokens: int) -> float:
    device, dtype = weights[0].device, weights[0].dtype
    rows = {
        width: torch.randn(tokens, width, device=device).to(dtype) for width in {w.shape[1] for w in weights}
    }

    def products() -> None:
        for weight in weights:
            torch.nn.functional.linear(rows[weight.shape[1]], weight)

    return graph_us([products], 1) / 1e3


class Floors:
    """Lower bounds of prompts and steps of one model; 0 on a CPU.

    Args:
        context: tokens that a decode step's requests have on average.
        more: tokens that one of them has besides.
    """

    def __init__(self, model: nn.Module, pool: KvPool, context: float, more: int = 0) -> None:
        self._model, self._pool = model, pool
        self._context, self._more = context, more
        self._weights = weights_of(model)
        self.ceilings = Ceilings.measure(pool.device)

    def prompt(self, tokens: int, used: float) -> float:
        """Return the time of the layers' products: measured ones, and the floor of the experts."""
        if self.ceilings is None:
            return 0.0
        products = products_ms(self._model, tokens, self._pool.device)
        return products + self.ceilings.experts_ms(self._weights, used, tokens)

    def step(self, batch: int, used: float) -> float:
        """Return the time to read weights, used experts and KV, and to read and write states."""
        if self.ceilings is None:
            return 0.0
        pool = self._pool
        tokens = batch * self._context + self._more
        moved = tokens * pool.page_bytes / pool.page_size + 2 * batch * pool.state_bytes
        return self.ceilings.ms(self._weights, used, moved, batch)
