"""The ranks of a node: the share of a model that this one holds, and how all of them combine what each has computed.

Layers declare what is divided (`layers/parts.py`) where they are built, and get modules that combine the ranks'
results. Forward code does not know that there are ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, TypeAlias, TypeVar

from torch import nn

from common.errors import ModelError
from common.kv_cache.plane import HeadGroup
from common.kv_cache.shard import WHOLE, Shard

Module = TypeVar("Module", bound=nn.Module)


class ExpertShare(NamedTuple):
    """The part of a layer's experts that one rank computes."""

    experts: range  # of the routed experts and the shared ones, which follow them
    total: int  # routed and shared experts of all ranks
    inner: range  # the inner values of each of these experts

    def place(self, index: int) -> int | None:
        """Return where this rank stores an expert; None if another one does."""
        return index - self.experts.start if index in self.experts else None

    @property
    def divided(self) -> bool:
        """True if other ranks have other experts."""
        return len(self.experts) < self.total


# Returns a rank's share, given the number of experts, the inner values of each, and a name for errors.
DivideExperts: TypeAlias = Callable[[Shard, int, int, str], ExpertShare]


def divide_by_tensor(shard: Shard, total: int, inner: int, what: str) -> ExpertShare:
    """Give every rank an even part of each expert. Raises ModelError if that is impossible."""
    return ExpertShare(range(total), total, shard.addends(HeadGroup(inner, 1), what))


def divide_by_expert(shard: Shard, total: int, inner: int, what: str) -> ExpertShare:
    """Give every rank whole experts, whose number differs by one at most. Raises ModelError if there are too few."""
    if total < shard.size:
        raise ModelError(f"{what}: {total} experts are too few for {shard.size} ranks; divide them by tensor")
    return ExpertShare(shard.tokens(total), total, range(inner))


def expert_division(by_expert: bool) -> DivideExperts:
    """Return the division by expert, or else the one by tensor."""
    return divide_by_expert if by_expert else divide_by_tensor


class Ranks(Protocol):
    """Called while a model is built; what is returned runs in forward passes, in the same order on every rank."""

    @property
    def shard(self) -> Shard:
        """The share of this rank."""
        ...

    def expert_share(self, total: int, inner: int, what: str) -> ExpertShare:
        """Return the share of this rank of `total` experts, routed and shared, with `inner` inner values each.

        Raises ModelError, which says `what` is divided, if that is impossible.
        """
        ...

    def summed(self, module: Module) -> Module:
        """Return a module of the same type, the sum of whose outputs over all ranks is the result on each of them.

        `module` is a `Linear` that reads divided inputs, the `ExpertProducts` of a layer, or a divided `Embedding`.
        A sum precedes the residual addition and the norm of an `add_norm`. `TokenNorms` get sums of squares.
        """
        ...

    def gathered(self, module: Module, columns: int) -> Module:
        """Return a module of the same type whose product has the columns of all ranks, in the order of the ranks.

        `module` is the `Linear` of an LM head with a divided vocabulary of `columns` tokens.
        """
        ...


@dataclass(frozen=True, slots=True)
class OneRank:
    """A node with one device, which holds all of the model.

    With another shard it describes the share of a rank without the others, such as its size.
    """

    shard: Shard = WHOLE
    divide_experts: DivideExperts = divide_by_tensor

    def expert_share(self, total: int, inner: int, what: str) -> ExpertShare:
        return self.divide_experts(self.shard, total, inner, what)

    def summed(self, module: Module) -> Module:
        return module

    def gathered(self, module: Module, columns: int) -> Module:
        return module


ONE_RANK: Final = OneRank()
