"""What the target accepts of a draft tree.

Draws are argmax(logits / temperature + g) with Gumbel noise g keyed by (seed, position): the token that plain decoding
draws at a position is a function of the text before it. The verify forward gives every node the logits that plain
decoding would see there, so the same draw is made at every node, and a draft is accepted if it equals the draw of its
parent. What is emitted is plain decoding's text, token for token, at any temperature: the target's distribution is
unchanged because nothing is drawn in another way. (Rejection sampling accepts more often at high temperatures, and
gives another text for the same seed.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from common.engine.forward.draft_inputs import EagleVerifyInput
from common.engine.state.pool import KvPool
from decode_node.speculative.rounds import Round


@dataclass(frozen=True, slots=True)
class Accepted:
    """The path that was taken through B trees, at most D nodes deep, the root included."""

    path: Tensor  # [B, D] int64: its nodes, the root first; behind `drafts` any node
    drafts: Tensor  # [B] int64: accepted drafts, so that drafts + 1 tokens are emitted


class Acceptor(Protocol):
    """Walks the trees and makes what was accepted look like a chain."""

    @property
    def slack(self) -> int:
        """How many slots behind its position a node may lie."""
        ...

    def accept(self, drafts: EagleVerifyInput, drawn: Tensor) -> Accepted:
        """drawn [B, N] int64: what the target draws behind each node."""
        ...

    def along(self, accepted: Accepted, values: Tensor) -> Tensor:
        """values [B, N, ...] of the nodes on the path: [B, D, ...]."""
        ...

    def settle(self, accepted: Accepted, batch: Round) -> None:
        """Bring the KV of accepted nodes to the front of their window, which begins at `batch.seq_len`."""
        ...


class ChainAcceptor:
    """A chain is accepted up to its first draft that the target does not draw; its KV is in place already."""

    slack = 0

    def accept(self, drafts: EagleVerifyInput, drawn: Tensor) -> Accepted:
        hits = drafts.tokens[:, 1:] == drawn[:, :-1]
        return Accepted(drafts.depth, hits.long().cumprod(1).sum(1))

    def along(self, accepted: Accepted, values: Tensor) -> Tensor:
        return values

    def settle(self, accepted: Accepted, batch: Round) -> None:
        """It lies there."""


class TreeAcceptor:
    """Trees of at most `depth` drafts on a path, within `reach` slots; `pools` hold their KV."""

    def __init__(self, reach: int, depth: int, pools: tuple[KvPool, ...]) -> None:
        self.slack = reach - 1
        self._depth = depth
        self._pools = pools

    def accept(self, drafts: EagleVerifyInput, drawn: Tensor) -> Accepted:
        node = torch.zeros_like(drafts.tokens[:, :1])  # [B, 1]
        alive = torch.ones_like(node, dtype=torch.bool)
        path, count = [node], torch.zeros_like(node)
        for _ in range(self._depth):
            child = (drafts.parents == node) & (drafts.tokens == drawn.gather(1, node))  # at most one
            alive = alive & child.any(1, keepdim=True)
            node = torch.where(alive, child.long().argmax(1, keepdim=True), node)
            count = count + alive
            path.append(node)
        return Accepted(torch.cat(path, 1), count[:, 0])

    def along(self, accepted: Accepted, values: Tensor) -> Tensor:
        rest = values.shape[2:]
        path = accepted.path.view(*accepted.path.shape, *(1 for _ in rest))
        return values.gather(1, path.expand(-1, -1, *rest))

    def settle(self, accepted: Accepted, batch: Round) -> None:
        index = batch.index[: accepted.path.shape[1]]
        node = torch.where(index <= accepted.drafts[:, None], accepted.path, index)
        _, slots, _ = batch.places(batch.index[: self.slack + 1])
        source, target = slots.gather(1, node).flatten(), slots[:, : len(index)].flatten()
        for pool in self._pools:
            pool.move_slots(source, target)
