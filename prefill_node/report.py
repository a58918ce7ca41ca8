"""The reports of a prefill node: its load, and totals since its start."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from common.kv_cache.host_totals import HostTotals
from common.kv_cache.page_space import PageSpace
from common.messages.identity import BucketTotals, NodeCounters, NodeLoad
from common.observability.histogram import STEP_TOKENS, Histogram
from kv_transfer.sending import PageSender
from prefill_node.forward_times import ForwardTimes
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
            self._step_tokens.observe(sum([chunk.length for chunk in chunks]))

    def load(self) -> NodeLoad:
        queues, computing = self._queues, self._queues.computing
        load = NodeLoad(
            queued=len(queues.waiting),
            queued_tokens=queues.waiting_tokens + sum(r.remaining for r in computing.values()),
            queued_ms=round(self._times.queued_ms(queues), 3),
            prompt_times=self._times.prompt_times(),
            running=len(computing),
            transferring=len(queues.handing_over) + len(queues.ending),
            free_pages=self._space.free_pages,
            cached_pages=self._space.cache.evictable_pages,
            total_pages=self._space.total_pages,
        )
        return self._host().in_load(load)

    def counters(self, refused_messages: int, unsent_messages: int) -> NodeCounters:
        """Return all totals.

        Args:
            refused_messages: those of routers; those of peers are added here.
            unsent_messages: those to routers; those to peers are added here.
        """
        sent = self._sender.counters
        counters = NodeCounters(
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
            transfer_timeouts={"stall": sent.stalled, "slots": sent.ungranted},
            transfer_bytes=BucketTotals.of(sent.bytes_per_room),
            duplicate_messages=sent.duplicate_slots,
            transferred_pages=sent.pages_written,
            layered_pages=sent.pages_by_layer,
            refused_messages=refused_messages + sent.malformed + sent.invalid_slots,
            unsent_messages=unsent_messages + sent.unsent,
            late_messages=sent.stale_incarnation,
            kv_events_dropped=self._kv_events.dropped,
            kv_events_failures=self._kv_events.failures,
            kv_events_problem=self._kv_events.problem,
            graphs=tuple(self._graphs()),
            ranks=tuple(self._ranks()),
        )
        return self._host().in_counters(counters)
