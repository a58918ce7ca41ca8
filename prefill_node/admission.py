"""Admits prompts to the pages of the pool, and looks up which part of each is cached and need not be computed."""

from __future__ import annotations

from collections.abc import Iterator

from common.kv_cache.page_space import PageLease
from common.kv_cache.radix_cache import Keys
from common.observability.event_log import EventLog
from prefill_node.parts import Scheduling
from prefill_node.queues import Queues
from prefill_node.report import Report
from prefill_node.request import PrefillRequest
from prefill_node.scheduler import in_order


class PromptAdmission:
    """Moves prompts from `waiting` to `computing`."""

    def __init__(self, queues: Queues, scheduling: Scheduling, report: Report, events: EventLog) -> None:
        self._queues = queues
        self._space = scheduling.space
        self._rules = scheduling.rules
        self._limits = scheduling.limits
        self._tier = scheduling.tier
        self._report = report
        self._events = events
        self._longest = self._space.pages_for(self._limits.max_model_len)

    def admit(self, now: float) -> Iterator[PrefillRequest]:
        """Admit prompts in scheduling order until one whose decode pages are granted does not fit. Yield each.

        A prompt gets all its pages at once, so two prompts can never wait for each other. Prompts without granted pages
        that do not fit (see `_lease`) are overtaken by prompts with granted pages, and by no others. Those leave
        without waiting for anything, so room appears in the end. Only new prompts of a lower cost overtake a prompt
        with granted pages.
        """
        order = in_order(self._queues.ready(), now)
        while len(self._queues.computing) < self._limits.max_batch:
            request = next(order, None)
            if request is None:
                return
            keys = self._space.keys(request.contents)
            lease = self._lease(request, keys)
            if lease is not None:
                self._begin(request, lease, keys, now)
                yield request
            elif request.granted:
                return
            else:
                order = in_order((each for each in self._queues.ready() if each.granted), now)

    def _begin(self, request: PrefillRequest, lease: PageLease, keys: Keys, now: float) -> None:
        request.lease = lease
        request.scheduled = request.computed = lease.cached_tokens
        self._tier.plan_load(request, keys)
        self._queues.admit(request, now)
        self._report.prompt_tokens += request.num_tokens
        self._report.cached_tokens += lease.cached_tokens
        request.mark("queued", now)
        self._events.add("leased", request.room, pages=lease.pages, cached=lease.cached_pages)

    def _lease(self, request: PrefillRequest, keys: Keys) -> PageLease | None:
        """Return pages and a state slot for a prompt, or None if there is not enough room.

        A prompt may be computed before the decode node has granted pages, but then it never takes the room that the
        longest prompt needs, its pages and the last state slot. It would hold that room until some request leaves the
        decode node, and that request may itself have pages reserved there while its prompt waits here for the same
        room: a deadlock.
        """
        # At least one token must be computed: its logits give the first output token.
        pages = self._space.pages_for(request.num_tokens)
        request.keyed, request.rewrites = len(keys), self._rules.rewrites
        cached = request.max_cached
        lease = self._space.lease(keys, pages, max_cached_tokens=cached, salt=request.salt)
        if lease is not None and not request.granted and not self._space.has_room(self._longest):
            lease.release()
            return None
        return lease
