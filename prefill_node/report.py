"""The reports of a prefill node: its load, and totals since its start."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from common.kv_cache.page_space import PageSpace
from common.messages.identity import BucketTotals, NodeCounters, NodeLoad
from common.observability.histogram import STEP_TOKENS, Histogram
from kv_transfer.sending import PageSender
from prefill_node.forward_times import ForwardTimes
from prefill_node.host_tier import HostTotals
from prefill_node.parts import Observation
from prefill_node.queues import Queues
from prefill_node.scheduler import Chunk


class Report:
    """Builds the reports. It holds the counters of the node itself and reads all others where they are counted."""

    def __init__(
        self,
        queues: Queues,
        space: PageSpace,
        sender: PageSender,
        times: ForwardTimes,
        observation: Observation,
        host: Callable[[], HostTotals],
    ) -> None:
        self._queues = queues
        self._space = space
        self._sender = sender
        self._times = times
        self._graphs = observation.graphs
        self._ranks = observation.ranks
        self._kv_events = observation.kv_events
        self._host = host
        self.requests = self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self.transfers = self.transfer_failures = 0
        self._step_tokens = Histogram(STEP_TOKENS)

    def forward_launched(self, chunks: Sequence[Chunk]) -> None:
        """Count a forward over these chunks; without chunks there was none."""
        if chunks:
            self._step_tokens.observe(sum(chunk.length for chunk in chunks))

    def load(self) -> NodeLoad:
        queues, computing, host = self._queues, self._queues.computing, self._host()
        return NodeLoad(
            queued=len(queues.waiting),
            queued_tokens=queues.waiting_tokens + sum(r.remaining for r in computing.values()),
            queued_ms=round(self._times.queued_ms(queues), 3),
            prompt_times=self._times.prompt_times(),
            running=len(computing),
            transferring=len(queues.handing_over) + len(queues.ending),
            free_pages=self._space.free_pages,
            cached_pages=self._space.cache.cached_pages,
            total_pages=self._space.total_pages,
            host_cached_tokens=host.cached_blocks * host.block_tokens,
            host_total_tokens=host.total_blocks * host.block_tokens,
        )

    def counters(self, refused_messages: int) -> NodeCounters:
        """Return all totals. `refused_messages` counts those of the router; those of peers are added here."""
        sent, host = self._sender.counters, self._host()
        return NodeCounters(
            requests=self.requests,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.generated_tokens,
            steps=sum(self._step_tokens.counts),
            step_tokens=BucketTotals.of(self._step_tokens),
            forward_seconds=self._times.measured_seconds,
            predicted_forward_seconds=self._times.predicted_seconds,
            transfers=self.transfers,
            transfer_failures=self.transfer_failures,
            transfer_timeouts={"stall": sent.stalled},
            transfer_bytes=BucketTotals.of(sent.bytes_per_room),
            duplicate_messages=sent.duplicate_slots,
            transferred_pages=sent.pages_written,
            layered_pages=sent.pages_by_layer,
            refused_messages=refused_messages + sent.malformed + sent.invalid_slots,
            late_messages=sent.stale_generation + sent.stale_incarnation,
            host_queries=host.queries,
            host_hits=host.hits,
            host_loads=host.loads,
            host_loaded_bytes=host.loaded_bytes,
            host_stores=host.stores,
            host_stored_bytes=host.stored_bytes,
            host_evicted_tokens=host.evicted_blocks * host.block_tokens,
            host_checksum_failures=host.checksum_failures,
            kv_events_dropped=self._kv_events.dropped,
            graphs=tuple(self._graphs()),
            ranks=tuple(self._ranks()),
        )
