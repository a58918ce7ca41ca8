"""The ranks of a node with several devices, as layers see them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch
from typing import cast

from torch import nn

from common.engine.collectives.group import CollectiveGroup
from common.engine.collectives.parallel_modules import (
    ColumnParallelLinear,
    ParallelExperts,
    ParallelTokenNorms,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from common.engine.layers.expert_products import ExpertProducts
from common.engine.layers.linear import Embedding, Linear
from common.engine.layers.ranks import DivideExperts, ExpertShare, Module, divide_by_tensor
from common.engine.layers.token_norms import TokenNorms
from common.kv_cache.shard import Shard


@dataclass(frozen=True, eq=False, slots=True)
class GroupRanks:
    """The `Ranks` of one rank, which combines its results with those of the group's other ranks."""

    group: CollectiveGroup
    divide_experts: DivideExperts = divide_by_tensor

    @property
    def shard(self) -> Shard:
        return self.group.shard

    def expert_share(self, total: int, inner: int, what: str) -> ExpertShare:
        return self.divide_experts(self.shard, total, inner, what)

    def summed(self, module: Module) -> Module:
        return cast(Module, _summed(module, self.group))

    def gathered(self, module: Module, columns: int) -> Module:
        return cast(Module, _gathered(module, self.group, columns))


@singledispatch
def _summed(module: nn.Module, group: CollectiveGroup) -> nn.Module:
    raise TypeError(f"ranks cannot sum the outputs of a {type(module).__name__}")


_summed.register(Linear, RowParallelLinear)
_summed.register(ExpertProducts, ParallelExperts)
_summed.register(Embedding, VocabParallelEmbedding)
_summed.register(TokenNorms, ParallelTokenNorms)


@singledispatch
def _gathered(module: nn.Module, group: CollectiveGroup, columns: int) -> nn.Module:
    raise TypeError(f"ranks cannot gather the outputs of a {type(module).__name__}")


_gathered.register(Linear, ColumnParallelLinear)
