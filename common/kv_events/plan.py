"""The part of a node's plan that the section kv_events sets."""

from __future__ import annotations

import msgspec


class KvEventsPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The sockets and limits with which a node publishes KV events."""

    address: str  # of the PUB socket
    replay_address: str
    topic: str
    block_tokens: int
    token_ids: bool
    replay_batches: int
    max_queue: int  # changes that wait for the thread
