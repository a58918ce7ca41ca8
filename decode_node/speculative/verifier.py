"""The acceptance rule: which nodes of a draft tree the target accepts.

Sampling is argmax(logits / temperature + g) with Gumbel noise g keyed by (seed, position), so the token that plain
decoding draws at a position is a function of the text before it. The verify forward gives every node the logits that
plain decoding would compute there. So the same draw is made at every node, and a draft is accepted if it equals the
draw at its parent. The emitted text equals that of plain decoding, token for token, at any temperature. Rejection
sampling would accept more drafts at high temperatures, but give another text for the same seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from common.engine.forward.draft_inputs import TreeVerifyInput
from common.engine.state.pool import KvPool
from decode_node.speculative.rounds import Round


@dataclass(frozen=True, slots=True)
class Accepted:
    """The accepted paths through B trees, at most D nodes deep, including the root."""

    path: Tensor  # [B, D] int64: nodes, the root first; entries past `drafts` are arbitrary nodes
    drafts: Tensor  # [B] int64: number of accepted drafts; drafts + 1 tokens are emitted


class Acceptor(Protocol):
    """Accepts nodes of the trees and moves their KV so that accepted nodes form a chain."""

    @property
    def extra_slots(self) -> int:
        """The largest offset between a node's slot and its position."""
        ...

    def accept(self, drafts: TreeVerifyInput, drawn: Tensor) -> Accepted:
        """Find the accepted paths. drawn [B, N] int64: the token that the target draws after each node."""
        ...

    def along(self, accepted: Accepted, values: Tensor) -> Tensor:
        """Gather values [B, N, ...] along the paths: [B, D, ...]."""
        ...

    def settle(self, accepted: Accepted, batch: Round) -> None:
        """Move the KV of accepted nodes to the front of their window, which starts at `batch.seq_len`."""
        ...


class ChainAcceptor:
    """Accepts a chain up to its first draft that the target does not draw. The KV is already in place."""

    extra_slots = 0

    def accept(self, drafts: TreeVerifyInput, drawn: Tensor) -> Accepted:
        hits = drafts.tokens[:, 1:] == drawn[:, :-1]
        return Accepted(drafts.depth, hits.long().cumprod(1).sum(1))

    def along(self, accepted: Accepted, values: Tensor) -> Tensor:
        return values

    def settle(self, accepted: Accepted, batch: Round) -> None:
        """No-op: the KV of a chain is already in place."""


class TreeAcceptor:
    """Accepts trees with at most `depth` drafts per path, within `lookahead_slots` slots; `pools` hold their KV."""

    def __init__(self, lookahead_slots: int, depth: int, pools: tuple[KvPool, ...]) -> None:
        self.extra_slots = lookahead_slots - 1
        self._depth = depth
        self._pools = pools

    def accept(self, drafts: TreeVerifyInput, drawn: Tensor) -> Accepted:
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
        _, slots, _ = batch.places(batch.index[: self.extra_slots + 1])
        source, target = slots.gather(1, node).flatten(), slots[:, : len(index)].flatten()
        for pool in self._pools:
            pool.move_slots(source, target)
