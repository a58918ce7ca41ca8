"""The ranks of a node: the share of a model that this one holds, and how all of them combine what each has computed.

Layers declare what is divided (`layers/parts.py`) where they are built, and get modules that combine the ranks'
results. Forward code does not know that there are ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

from torch import nn

from common.kv_cache.shard import WHOLE, Shard

Module = TypeVar("Module", bound=nn.Module)


class Ranks(Protocol):
    """Called while a model is built; what is returned runs in forward passes, in the same order on every rank."""

    @property
    def shard(self) -> Shard:
        """The share of this rank."""
        ...

    def summed(self, module: Module) -> Module:
        """Return a module of the same type, the sum of whose outputs over all ranks is the result on each of them.

        `module` is a `Linear` that reads divided inputs, the `ExpertProducts` of a layer, or a divided `Embedding`.
        A sum precedes the residual addition and the norm of an `add_norm`.
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

    def summed(self, module: Module) -> Module:
        return module

    def gathered(self, module: Module, columns: int) -> Module:
        return module


ONE_RANK: Final = OneRank()
