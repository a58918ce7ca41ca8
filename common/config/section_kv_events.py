"""The section kv_events of a cluster file."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from common.config.section import Section

FixedPort = Annotated[int, Meta(ge=1, le=65_535)]  # 0 would be a port that nobody knows


class KvEventsSection(Section, frozen=True, kw_only=True):
    """KV events in vLLM's format: nodes publish which blocks their prefix caches hold."""

    enabled: bool = False
    # Address that nodes bind to; own: process.address. Off loopback only with security.isolated_network.
    host: str = "127.0.0.1"
    # Ports of the first node of this file, prefill nodes first; each further one takes the next.
    first_port: FixedPort = 5557
    first_replay_port: FixedPort = 5757  # repeats events that a subscriber has missed
    token_ids: bool = True  # events have the tokens of prompts without API key and cache_salt
    # The last batches, which a node can repeat; in all at most 64 MiB.
    replay_batches: Annotated[int, Meta(ge=1, le=1_000_000)] = 10_000
    max_queue: Annotated[int, Meta(ge=64, le=1_000_000)] = 10_000  # unpublished changes; more are dropped
