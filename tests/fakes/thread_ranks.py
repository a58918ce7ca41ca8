"""Ranks as threads of one process, which exchange tensors at a barrier. Layers and loading are those of a node."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.checkpoint.model_config import Activation
from common.engine.layers.activations import Activations, Reads
from common.engine.layers.expert_products import ExpertProducts
from common.engine.layers.linear import Embedding, Linear
from common.engine.layers.norm import RmsNorm
from common.engine.layers.piece import Piece
from common.engine.layers.ranks import Module
from common.kv_cache.shard import Shard
from tests.fakes.waiting import PATIENCE

Result = TypeVar("Result")


class Meeting:
    """Where all ranks exchange tensors. Raises BrokenBarrierError if a rank has failed or does not come."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self._given = [torch.empty(0)] * size

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, in the order of the ranks."""
        self._given[rank] = tensor
        self.barrier.wait(PATIENCE)
        given = list(self._given)
        self.barrier.wait(PATIENCE)
        return given


@dataclass(frozen=True, eq=False)
class ThreadRanks:
    """One of the ranks. Sums are made in the order of the ranks, so that all have the same."""

    meeting: Meeting
    shard: Shard

    def total(self, tensor: Tensor) -> Tensor:
        return torch.stack(self.meeting.exchange(self.shard.rank, tensor)).sum(0)

    def columns(self, tensor: Tensor) -> Tensor:
        return torch.cat(self.meeting.exchange(self.shard.rank, tensor), dim=-1)

    def summed(self, module: Module) -> Module:
        if isinstance(module, Embedding):
            return cast(Module, SummedEmbedding(module, self))
        if isinstance(module, ExpertProducts):
            return cast(Module, SummedExperts(module, self))
        assert isinstance(module, Linear)
        return cast(Module, JoinedLinear(module, self.total))

    def gathered(self, module: Module) -> Module:
        assert isinstance(module, Linear)
        return cast(Module, JoinedLinear(module, self.columns))


class JoinedLinear(Linear):
    """A product whose results the ranks join by `join` before anything else reads them."""

    def __init__(self, inner: Linear, join: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.reads = inner, inner.reads
        self._join = join

    def product(self, x: Activations) -> Tensor:
        return self._join(self.inner.product(x))

    def gated(self, x: Activations, reads: Reads, activation: Activation = "silu") -> Activations:
        raise AssertionError("no gate follows a product that is joined")

    def add_norm(self, x: Activations, stream: Tensor, norm: RmsNorm) -> tuple[Activations, Tensor]:
        normed, total = norm.add(self.product(x), stream)
        return Activations(normed), total

    def dense(self) -> Tensor:
        return self.inner.dense()

    def pieces(self) -> Iterator[Piece]:
        return self.inner.pieces()


class SummedExperts(ExpertProducts):
    """Experts of which every rank computes a share."""

    def __init__(self, inner: ExpertProducts, ranks: ThreadRanks) -> None:
        super().__init__()
        self.inner, self.reads, self._ranks = inner, inner.reads, ranks

    def parts(self, x: Activations, experts: Tensor, shares: Tensor) -> Tensor:
        return self.inner.parts(x, experts, shares)

    def product(self, x: Activations, experts: Tensor, shares: Tensor) -> Tensor:
        return self._ranks.total(self.inner.product(x, experts, shares))

    def add_norm(
        self, x: Activations, experts: Tensor, shares: Tensor, stream: Tensor, norm: RmsNorm
    ) -> tuple[Activations, Tensor]:
        normed, total = norm.add(self.product(x, experts, shares), stream)
        return Activations(normed), total

    def pieces(self) -> Iterator[Piece]:
        return self.inner.pieces()


class SummedEmbedding(Embedding):
    """An embedding of which every rank has some rows; it shares its weight with `inner`."""

    def __init__(self, inner: Embedding, ranks: ThreadRanks) -> None:
        nn.Module.__init__(self)
        self.name, self.vocab_size, self.tokens = inner.name, inner.vocab_size, inner.tokens
        self.weight, self._ranks = inner.weight, ranks

    def forward(self, ids: Tensor) -> Tensor:
        own = (ids >= self.tokens.start) & (ids < self.tokens.stop)
        rows = F.embedding(torch.where(own, ids - self.tokens.start, 0), self.weight)
        return self._ranks.total(torch.where(own[:, None], rows, 0))


def run_ranks(size: int, run: Callable[[ThreadRanks], Result]) -> list[Result]:
    """Run a function on every rank at once and return the results in their order. Raises what the first one raised."""
    meeting = Meeting(size)

    def guarded(rank: int) -> Result:
        try:
            return run(ThreadRanks(meeting, Shard(rank, size)))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        running = [pool.submit(guarded, rank) for rank in range(size)]
    failures = [each.exception() for each in running if each.exception() is not None]
    for failure in sorted(failures, key=lambda each: isinstance(each, threading.BrokenBarrierError)):
        assert failure is not None
        raise failure
    return [each.result() for each in running]
