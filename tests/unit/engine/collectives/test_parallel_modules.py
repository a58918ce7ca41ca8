"""Modules of several ranks keep the group that their operations find by its number."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from common.engine.collectives.fake_group import FakeGroup
from common.engine.collectives.group_ranks import GroupRanks
from common.engine.layers.activations import DENSE, Activations
from common.engine.layers.expert_products import ExpertProducts
from common.engine.layers.linear import Embedding
from common.engine.layers.piece import Piece
from common.engine.layers.ranks import ExpertShare, Module
from common.kv_cache.shard import Shard


class OneExpert(ExpertProducts):
    """Returns its input."""

    reads = DENSE
    share = ExpertShare(range(1), 1, range(4))

    def parts(self, x: Activations, experts: Tensor, shares: Tensor) -> Tensor:
        return x.tensor()[:, None]

    def pieces(self) -> Iterator[Piece]:
        return iter(())


def summed(module: Module) -> Module:
    """Return the module of one of two ranks, to which nobody else keeps the group."""
    made = GroupRanks(FakeGroup(Shard(0, 2))).summed(module)
    gc.collect()
    return made


def test_an_embedding_keeps_its_group() -> None:
    weight = torch.randn(4, 8)
    embedding = summed(Embedding("embed", 8, range(4), nn.Parameter(weight)))
    assert torch.equal(embedding(torch.tensor([3, 5])), torch.stack((weight[3], torch.zeros(8))))


def test_experts_keep_their_group() -> None:
    x, experts = torch.randn(3, 4), torch.zeros(3, 1, dtype=torch.int32)
    assert torch.equal(summed(OneExpert()).product(Activations(x), experts, torch.ones(3, 1)), x)
