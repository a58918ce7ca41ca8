"""The reports of a decode node: its load, and totals since its start."""

from __future__ import annotations

from collections.abc import Callable

from common.kv_cache.host_totals import HostTotals
from common.kv_cache.page_space import PageSpace
from common.messages.identity import BucketTotals, NodeCounters, NodeLoad
from common.observability.histogram import STEP_TOKENS, TOKEN_SECONDS, Histogram
from decode_node.accept_counters import AcceptCounters
from decode_node.batch_resources import BatchResources
from decode_node.parts import Observation
from decode_node.queues import Queues
from decode_node.request import DecodeRequest, Emission
from kv_transfer.receiving import PageReceiver


class TokenGaps:
    """The times between outputs of a request. Requests that took part in two steps in a row share one observation."""

    def __init__(self) -> None:
        self.seconds = Histogram(TOKEN_SECONDS)
        self._previous = 0.0  # monotonic seconds when the previous step was read
        self._continuing = 0  # requests of this step that took part in the previous one

    def drawn(self, request: DecodeRequest, now: float) -> None:
        """Note that the step that was read at `now` drew tokens of this request."""
        if request.drawn_at == self._previous:
            self._continuing += 1
        else:
            self.seconds.observe(max(now - request.drawn_at, 0.0))
        request.drawn_at = now

    def step_ended(self, now: float) -> None:
        """Note that all requests of this step were given to `drawn`."""
        if self._continuing:
            self.seconds.observe(now - self._previous, self._continuing)
            self._continuing = 0
        self._previous = now


class Report:
    """Builds the reports. It holds the counters of the node itself and reads all others where they are counted."""

    def __init__(
        self,
        queues: Queues,
        space: PageSpace,
        receiver: PageReceiver,
        resources: BatchResources,
        observation: Observation,
        host: Callable[[], HostTotals],
    ) -> None:
        self._queues = queues
        self._space = space
        self._receiver = receiver
        self._resources = resources
        self._host = host
        self._graphs = observation.graphs
        self._ranks = observation.ranks
        self._kv_events = observation.kv_events
        self._phase_seconds = observation.phase_seconds
        self._pacing = observation.pacing
        self.requests = self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self.steps = self.transfers = self.transfer_failures = 0
        self.speculation = AcceptCounters()
        self._gaps = TokenGaps()
        self._step_tokens = Histogram(STEP_TOKENS)
        self._step_began = 0  # value of `generated_tokens` before the step that is being read

    def drawn(self, emission: Emission, emitted: int, now: float) -> None:
        """Count one request's part of a step, of which the first `emitted` tokens became part of the answer."""
        self.speculation.count(emission, emitted)
        self.generated_tokens += emitted
        self._gaps.drawn(emission.request, now)

    def step_read(self, now: float) -> None:
        """Count a step whose emissions were all counted."""
        if self.generated_tokens > self._step_began:
            self._step_tokens.observe(self.generated_tokens - self._step_began)
            self._step_began = self.generated_tokens
        self._gaps.step_ended(now)

    def load(self) -> NodeLoad:
        queues = self._queues
        load = NodeLoad(
            queued=len(queues.waiting) + len(queues.retracted),
            running=len(queues.running),
            retracted=len(queues.retracted),
            transferring=len(queues.transferring) + len(queues.arrived),
            free_pages=self._space.free_pages,
            cached_pages=self._space.cache.evictable_pages,
            quarantined_pages=self._receiver.quarantined_pages,
            total_pages=self._space.total_pages,
        )
        return self._host().in_load(load)

    def counters(self, refused_messages: int, unsent_messages: int) -> NodeCounters:
        """Return all totals.

        Args:
            refused_messages: those of routers; those of peers are added here.
            unsent_messages: those to routers; those to peers are added here.
        """
        received, speculation = self._receiver.counters, self.speculation
        counters = NodeCounters(
            requests=self.requests,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.generated_tokens,
            steps=self.steps,
            inter_token=BucketTotals.of(self._gaps.seconds),
            step_tokens=BucketTotals.of(self._step_tokens),
            late_launches=self._pacing.late,
            missing_marks=self._pacing.missing,
            retractions=self._resources.retractions,
            transfers=self.transfers,
            transfer_failures=self.transfer_failures,
            transfer_timeouts=dict(received.timeouts),
            quarantined_transfers=received.quarantined,
            duplicate_messages=received.duplicates,
            abort_retries=received.abort_retries,
            transferred_pages=received.pages_received,
            checksum_failures=received.checksum_failures,
            record_failures=received.record_failures.total(),
            refused_messages=refused_messages + received.malformed,
            unsent_messages=unsent_messages + received.unsent,
            late_messages=received.unknown_room + received.stale_generation + received.stale_incarnation,
            spec_drafts=speculation.drafts,
            spec_draft_tokens=speculation.draft_tokens,
            spec_accepted_tokens=speculation.accepted_tokens,
            spec_forced_tokens=speculation.forced_tokens,
            spec_accepted_forced=speculation.accepted_forced,
            avg_spec_accept_length=speculation.mean_emitted,
            avg_spec_verified_length=speculation.mean_verified,
            spec_accepted_at=tuple(speculation.accepted_at),
            kv_events_dropped=self._kv_events.dropped,
            kv_events_failures=self._kv_events.failures,
            kv_events_problem=self._kv_events.problem,
            phase_seconds=dict(self._phase_seconds),
            graphs=tuple(self._graphs()),
            ranks=tuple(self._ranks()),
        )
        return self._host().in_counters(counters)
