"""The ranks of a node as a group, and its collectives as operations that graphs and traces record as one call.

Every rank calls the same collectives in the same order. A call names its group by a number, which is unique in its
process: a graph stores numbers, and ranks may be threads of one process.
"""

from __future__ import annotations

import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.ops.fp8_codes import FP8, empty_scales
from common.engine.ops.fp8_rms_norm import fp8_add_rms_norm
from common.engine.ops.registration import register_op
from common.engine.ops.rms_norm import add_rms_norm
from common.errors import RankFailed
from common.kv_cache.shard import Shard

_groups: weakref.WeakValueDictionary[int, CollectiveGroup] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_capturing: ContextVar[bool] = ContextVar("capturing", default=False)


@contextmanager
def capturing() -> Iterator[None]:
    """Let collectives of this thread's context use each group's `for_capture`: a graph is captured."""
    token = _capturing.set(True)
    try:
        yield
    finally:
        _capturing.reset(token)


class CollectiveGroup(ABC):
    """One rank's end of a group. After a failure every call raises the same RankFailed.

    A call waits for the other ranks, and raises RankFailed with the rank that has ended, does not answer in time, or
    calls something else.
    """

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        # Seconds in which the host has waited for other ranks; 0 if kernels wait on a device.
        self.waited = 0.0
        self.number = next(_numbers)
        _groups[self.number] = self

    @property
    def for_capture(self) -> CollectiveGroup:
        """The group that runs while a graph is captured, whose results nobody reads; this group by default.

        If it waits for no other rank, a capture that fails on one rank leaves the others as they are.
        """
        return self

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of x over all ranks, a new tensor with the same bits on every rank.

        The order of additions depends only on shape and dtype, so equal values have equal sums.
        """

    def all_reduce_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return (rms_norm(y + residual), y + residual) for the sum y of x over all ranks; all [T, H]."""
        return add_rms_norm(self.all_reduce(x), residual, weight, eps)

    def all_reduce_fp8_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, blocks: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return `fp8_add_rms_norm` of the sum of x over all ranks: (codes, scales, y + residual), x is [T, H]."""
        return fp8_add_rms_norm(self.all_reduce(x), residual, weight, eps, blocks)

    @abstractmethod
    def all_gather(self, x: Tensor, columns: int) -> Tensor:
        """Return the x [..., C] of all ranks in their order, concatenated along the last axis to `columns` in total.

        C may differ between ranks, the other axes may not.
        """

    @abstractmethod
    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Return the x of rank `source`, a new tensor. Other ranks pass a tensor of its shape and dtype."""

    @abstractmethod
    def check(self) -> None:
        """Raise RankFailed if the group has failed; never waits.

        Calls on a GPU do not raise: their results are undefined if this raises after they have been computed.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave the group. Ranks that still wait for this one fail."""


class DeviceGroup(CollectiveGroup):
    """A group whose calls return before they have been computed on a GPU, where kernels wait for the other ranks."""

    @property
    def for_capture(self) -> CollectiveGroup:
        """This group in a graph that is being captured, which computes nothing yet; `fake` in a warm-up."""
        return self if torch.cuda.is_current_stream_capturing() else self.fake

    @property
    @abstractmethod
    def fake(self) -> CollectiveGroup:
        """The group for warm-ups: its results are undefined, but it compiles every kernel, and waits for no rank."""

    @abstractmethod
    def abandon(self, rank: int) -> None:
        """Let no kernel wait any longer, because this rank has ended. Any thread may call it.

        `check` raises RankFailed with that rank from then on, and close may be called.
        """


def gather_columns(
    x: Tensor, shard: Shard, columns: int, gather: Callable[[Tensor], Sequence[Tensor]]
) -> Tensor:
    """Do as `CollectiveGroup.all_gather` for shares of `Shard.tokens`, by a `gather` of tensors of equal shapes."""
    widths = [len(Shard(rank, shard.size).tokens(columns)) for rank in range(shard.size)]
    assert x.shape[-1] == widths[shard.rank], f"{x.shape[-1]} columns of {widths}"
    padded = F.pad(x, (0, max(widths) - x.shape[-1])).contiguous()
    return torch.cat([part[..., :width] for part, width in zip(gather(padded), widths, strict=True)], dim=-1)


def rank_ended(rank: int) -> RankFailed:
    """Return the failure of a group that a rank has left."""
    return RankFailed(rank, f"rank {rank} has ended; the ranks of a node end together, restart the node")


def _group(number: int) -> CollectiveGroup:
    found = _groups[number]
    return found.for_capture if _capturing.get() else found


def _all_reduce(x: Tensor, group: int) -> Tensor:
    return _group(group).all_reduce(x)


def _all_reduce_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: int
) -> tuple[Tensor, Tensor]:
    return _group(group).all_reduce_norm(x, residual, weight, eps)


def _all_reduce_fp8_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, blocks: bool, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _group(group).all_reduce_fp8_norm(x, residual, weight, eps, blocks)


def _all_gather(x: Tensor, group: int, columns: int) -> Tensor:
    return _group(group).all_gather(x, columns)


def _broadcast(x: Tensor, group: int, source: int) -> Tensor:
    return _group(group).broadcast(x, source)


def _fake_same(x: Tensor, group: int, source: int = 0) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: int) -> tuple[Tensor, Tensor]:
    return _fake_same(x, group), _fake_same(x, group)


def _fake_fp8_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, blocks: bool, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    total = _fake_same(x, group)
    return torch.empty_like(total, dtype=FP8), empty_scales(x, x.shape[-1], blocks), total


def _fake_gather(x: Tensor, group: int, columns: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], columns))


all_reduce = register_op("all_reduce", _all_reduce, mutates=(), fake=_fake_same, inlined=False)
all_reduce_norm = register_op("all_reduce_norm", _all_reduce_norm, mutates=(), fake=_fake_norm, inlined=False)
all_reduce_fp8_norm = register_op(
    "all_reduce_fp8_norm", _all_reduce_fp8_norm, mutates=(), fake=_fake_fp8_norm, inlined=False
)
all_gather = register_op("all_gather", _all_gather, mutates=(), fake=_fake_gather, inlined=False)
broadcast = register_op("broadcast", _broadcast, mutates=(), fake=_fake_same, inlined=False)
