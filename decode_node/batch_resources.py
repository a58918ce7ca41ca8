"""Tracks which requests hold pages and a batch row, and therefore take part in the next step.

It retracts and resumes requests; admission is part of the node, because it needs the receiver. It moves requests only
between the queues arrived, running and retracted.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

from common.errors import Preempted
from common.kv_cache.page_space import PageLease
from common.observability.event_log import NO_EVENTS, EventLog
from decode_node.admission import choose_victim, headroom_pages
from decode_node.parts import Scheduling
from decode_node.quarantine_wait import QuarantineWait
from decode_node.queues import Queues
from decode_node.request import DecodeRequest

NO_BACKUP = "pages and backup memory ran out (decode.backup_mib, and decode.host_mib if that is set)"
QUARANTINED = (
    "the pages that it waits for are in quarantine, until a prefill node proves that it writes no more"
)


class StepBatch(NamedTuple):
    """The requests of a step, with pages for what it writes."""

    requests: Sequence[DecodeRequest]
    forced_width: int = 0  # width of the step for forced tokens; 0: a usual step


class BatchResources:
    """The pages and rows of the batch. Owned by the node's main loop."""

    def __init__(self, queues: Queues, scheduling: Scheduling, events: EventLog = NO_EVENTS) -> None:
        limits, rules = scheduling.limits, scheduling.rules
        self._events = events
        self._queues = queues
        self._space = scheduling.space
        self._rows = scheduling.rows
        self._retraction = scheduling.retraction
        self._tier = scheduling.tier
        self._rules = rules
        self._extra_slots = rules.extra_slots
        self._needs_results = rules.drafts.needs_results
        # At least what a step needs after an unread step that drew few tokens: a resumed request must not immediately
        # need the very page that another one lacks.
        self._reserved_tokens = max(limits.reserved_tokens, 2 * rules.most_tokens - 1)
        self._max_running = limits.max_running
        self._quarantine_wait = QuarantineWait(queues)
        self.retractions = 0

    def try_lease(self, request: DecodeRequest) -> PageLease | None:
        """Lease pages for a prompt, unless that would leave too few for the requests that already hold pages."""
        pages = self._space.pages_for(len(request.prompt))
        keys = self._space.keys(request.contents)
        lease = self._space.lease(keys, pages, max_cached_tokens=len(keys), salt=request.salt)
        if lease is not None and not self._leaves_headroom(request, needed=0):
            lease.release()
            return None
        return lease

    def start_arrived(self) -> None:
        """Add arrived requests to the batch while there are free rows.

        Others pass those whose grammar is compiling, or whose prefix comes from host memory.
        """
        arrived, running = self._queues.arrived, self._queues.running
        for request in [each for each in arrived if each.compilation is None and not each.fetching]:
            if not self._has_row():
                return
            arrived.remove(request)
            self._retraction.occupy(request)
            running[request.room] = request

    def batch(self) -> StepBatch:
        """Return the requests that have pages for what the step writes; the others skip the step.

        It is empty while the masks of some request, or a draft from its text, need the results of a step in flight.
        If some requests skip the step and no pages are about to be freed, one running request is retracted.
        """
        batch: list[DecodeRequest] = []
        short = False
        candidates = [request for request in self._queues.running.values() if request.takes_part]
        # Requests that arrived meanwhile wait too: a step of their own would delay the others by a whole step, and so
        # would every later step.
        if any(request.in_flight and self._needs_results_of(request) for request in candidates):
            return StepBatch(batch)
        for request in candidates:
            request.masked = request.needs_masks(self._rules.most_tokens)
        width = self._forced_width(candidates)
        tokens = self._rules.tokens_of(width)
        for request in candidates:
            if self._grow(request, tokens):
                batch.append(request)
            else:
                short = True
        freeing = self._frees_pages or any(each.retract for each in self._queues.running.values())
        if short and not freeing:
            victim = choose_victim(self._queues.running.values())
            if victim is not None:
                victim.retract = True
                batch = [request for request in batch if request is not victim]
        return StepBatch(batch, width)

    def grow_ahead(self) -> None:
        """Allocate the pages of the next usual step while there are some, so that `batch` need not."""
        tokens = self._rules.tokens_of(0)
        for request in self._queues.running.values():
            if request.takes_part and not self._grow(request, tokens):
                return

    def _needs_results_of(self, request: DecodeRequest) -> bool:
        """Return whether its next step needs the tokens of a step whose results are unread."""
        return self._needs_results or request.needs_masks(self._rules.most_tokens)

    def _forced_width(self, candidates: Sequence[DecodeRequest]) -> int:
        """Find the tokens that are forced next, and return the width of the step for them; 0: a usual one."""
        most = self._rules.most_forced(len(candidates))
        for request in candidates:
            request.forced = tuple(request.matcher.forced(most)) if most and request.matcher else ()
        return self._rules.forced_width([request.forced_row for request in candidates])

    def settle_retractions(
        self, unsaved: Container[int], now: float
    ) -> list[tuple[DecodeRequest, Preempted]]:
        """Remove victims that no step writes to any more. Return requests that must leave the node, and why.

        They are victims whose KV could not be kept, and requests that wait for pages in quarantine. `unsaved`: keys of
        earlier victims whose save has not ended; the pages of the others become free.
        """
        self._retraction.settle(unsaved)
        overdue = self._quarantine_wait.overdue(self._frees_pages, now)
        leaving = [(each, Preempted(QUARANTINED)) for each in overdue]
        for request in list(self._queues.running.values()):
            if request.retract and request.in_flight == 0 and not request.ended and not request.checks:
                del self._queues.running[request.room]
                self.retractions += 1
                self._events.add("retracted", request.room)
                if self._retraction.save(request):
                    self._queues.retracted.append(request)
                else:
                    leaving.append((request, Preempted(NO_BACKUP)))
        return leaving

    def resume(self, now: float) -> None:
        """Resume retracted requests in order of retraction, while their pages and the others' headroom fit.

        One whose pages are being fetched has them already, so that the next one need not wait for it.
        """
        for request in list(self._queues.retracted):
            needed = self._space.pages_for(request.seq_len + 1)
            fits = request.lease is not None or self._leaves_headroom(request, needed)
            if not self._has_row() or not fits:
                return
            if not self._retraction.restore(request):
                if request.lease is None:
                    return
                continue
            self._queues.retracted.remove(request)
            request.mark("resumed", now)
            pages = [] if request.lease is None else request.lease.pages[request.lease.cached_pages :]
            self._events.add("resumed", request.room, pages=pages)
            self._queues.running[request.room] = request

    def planned(self, generation: int) -> None:
        """Record that all moves decided so far are part of this plan."""
        self._retraction.planned(generation)

    def read(self, generation: int) -> None:
        """Note that a plan is complete; the pages that it saves become free when their copies have ended."""
        self._retraction.read(generation)

    def leave(self, request: DecodeRequest) -> None:
        """Remove an ended request from the batch once no step in flight writes to its pages."""
        if request.in_flight == 0 and self._queues.running.pop(request.room, None) is not None:
            assert request.lease is not None
            if request.trusted and not request.checks:
                request.lease.commit(self._space.keys(request.computed()))
                self._tier.store(request)
            self._retraction.release(request)
            self._events.add("freed", request.room)

    def vacate(self, request: DecodeRequest) -> None:
        """Release what a request holds; no step and no peer may still write to it."""
        self._retraction.drop(request)
        self._tier.defer_release(request)
        self._retraction.release(request)
        self._events.add("freed", request.room)

    @property
    def _frees_pages(self) -> bool:
        """Return whether pages become free once they are copied to host memory."""
        return self._retraction.frees_pages or self._tier.frees_pages

    def _has_row(self) -> bool:
        return len(self._queues.running) < self._max_running and self._rows.free > 0

    def _leaves_headroom(self, request: DecodeRequest, needed: int) -> bool:
        """Return whether `needed` pages may go to this request. They may if no other request holds pages."""
        active = list(self._queues.holding())
        if not active:
            return True
        headroom = headroom_pages([*active, request], self._reserved_tokens, self._space.page_size)
        return self._space.available_pages >= needed + headroom

    def _grow(self, request: DecodeRequest, tokens: int) -> bool:
        """Allocate pages for `tokens` that the next step writes. Return False if there are none."""
        assert request.lease is not None
        held = len(request.lease.pages)
        wanted = min(request.seq_len + tokens, request.most_kv + self._extra_slots)
        missing = self._space.pages_for(wanted) - held
        if missing <= 0:
            return True
        fresh = request.lease.grow(missing)
        if fresh is None:
            return False
        self._rows.append(request.row, held, fresh)
        self._events.add("grown", request.room, pages=fresh)
        return True
