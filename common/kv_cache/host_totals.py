"""The totals of host memory that a node reports."""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import structs

from common.messages.identity import NodeCounters, NodeLoad


@dataclass(slots=True)
class HostTotals:
    """Totals since the node's start, and sizes."""

    queries: int = 0  # tokens of prompts that the device's cache lacked
    hits: int = 0  # among them: tokens that were copied from host memory
    loads: int = 0  # prompts for which something was copied
    loaded_bytes: int = 0
    stores: int = 0  # prompts of which something was stored
    stored_bytes: int = 0
    evicted_blocks: int = 0
    checksum_failures: int = 0  # blocks and states whose bytes had changed
    block_tokens: int = 0
    cached_blocks: int = 0
    total_blocks: int = 0

    def in_load(self, load: NodeLoad) -> NodeLoad:
        """Return the load with what host memory holds."""
        return structs.replace(
            load,
            host_cached_tokens=self.cached_blocks * self.block_tokens,
            host_total_tokens=self.total_blocks * self.block_tokens,
        )

    def in_counters(self, counters: NodeCounters) -> NodeCounters:
        return structs.replace(
            counters,
            host_queries=self.queries,
            host_hits=self.hits,
            host_loads=self.loads,
            host_loaded_bytes=self.loaded_bytes,
            host_stores=self.stores,
            host_stored_bytes=self.stored_bytes,
            host_evicted_tokens=self.evicted_blocks * self.block_tokens,
            host_checksum_failures=self.checksum_failures,
        )
