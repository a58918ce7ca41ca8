"""The rules of placement that the cluster file sets."""

from __future__ import annotations

from dataclasses import dataclass

from common.messages.identity import Role


@dataclass(frozen=True, slots=True)
class PlacementRules:
    """The keys of `router.placement`, except for the policies. The config has their defaults.

    Attributes:
        block_tokens: tokens of a block, the unit in which prefixes are known.
        index_bytes: memory that the estimates of both roles may take.
        prefix_ttl: seconds after which an unused block counts as evicted.
        max_imbalance_ms: a cached prefix or a session counts for nothing on a prefill node whose queue is longer than
            the shortest one by more than this.
        session_ttl: seconds for which the nodes of a session are remembered.
        session_ms: by how much later a first token may come for a request to stay with its session.
        busy_first_token_ms: a prefill node is busy if it predicts a first token later than this; None: never.
        local_tokens: uncached tokens of a prompt that a movable decode node may compute itself (router.local_prefill).
        uncached: roles whose prefix caches are off.
        busy_pool_share: a decode node is busy if requests use more than this share of its pool; None: never.
    """

    block_tokens: int
    index_bytes: int
    prefix_ttl: float
    max_imbalance_ms: float
    session_ttl: float
    session_ms: float
    busy_first_token_ms: float | None
    busy_pool_share: float | None
    local_tokens: int
    uncached: frozenset[Role]
