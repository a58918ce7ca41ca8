"""Reserves pages for waiting requests, and tells their prefill nodes where to send what is missing."""

from __future__ import annotations

from common.errors import NodeLost, Overloaded, RequestError, Unavailable
from common.messages.router_inbox import Failed
from common.observability.event_log import EventLog
from decode_node.admission import admit
from decode_node.batch_resources import BatchResources
from decode_node.parts import Scheduling
from decode_node.peers import PeerConnections
from decode_node.queues import Queues
from decode_node.report import Report
from decode_node.request import DecodeRequest
from kv_transfer.receiving import PageReceiver


class Reservations:
    """Moves requests from `waiting` to `transferring`."""

    def __init__(
        self,
        queues: Queues,
        scheduling: Scheduling,
        resources: BatchResources,
        receiver: PageReceiver,
        peers: PeerConnections,
        report: Report,
        events: EventLog,
    ) -> None:
        self._queues = queues
        self._limits = scheduling.limits
        self._tier = scheduling.tier
        self._resources = resources
        self._receiver = receiver
        self._peers = peers
        self._report = report
        self._events = events

    def admit(self, now: float) -> None:
        """Reserve pages while there are any. Retracted requests have priority."""
        queues = self._queues
        slots = self._limits.max_transferring - len(queues.transferring) - len(queues.arrived)
        if not queues.waiting or queues.retracted or slots <= 0:
            return
        for request in admit(tuple(queues.waiting), slots, self._limits.skip_ahead, self._try_reserve):
            queues.waiting.remove(request)
            if request.lease is None:
                continue  # the receiver refused it, and the failure was reported to the router
            self._report.prompt_tokens += len(request.prompt)
            self._report.cached_tokens += request.lease.cached_tokens
            request.mark("reserved", now)
            queues.transferring[request.room] = request

    def _try_reserve(self, request: DecodeRequest) -> bool:
        lease = self._resources.try_lease(request)
        if lease is None:
            return False
        found = self._tier.find(request, lease)
        first = max(lease.cached_pages, found.pages)
        opened, held = lease.pages[first:], lease.pages[:first]
        try:
            generation = self._receiver.open(
                request.room, (request.prefill.incarnation,), opened, first, request.deadline, lease.slot
            )
        except RequestError as error:
            self._tier.release(found)
            lease.release()
            # All record slots are taken, partly by quarantined requests: wait for one.
            return not isinstance(error, Overloaded) and self._refused(request, error)
        request.lease = lease
        self._tier.fetch(request, found)
        self._events.add("opened", request.room, generation=generation, pages=opened, held=held)
        return True

    def _refused(self, request: DecodeRequest, error: RequestError) -> bool:
        """Fail a request whose transfer cannot be opened. It leaves the queue without a lease."""
        code = error.code
        if isinstance(error, Unavailable):
            # The peer was lost while this request waited: the next request sends Hello again.
            self._peers.lost(request.prefill.incarnation)
            code = NodeLost.code
        request.router.send(Failed(room=request.room, code=code, message=str(error)))
        return True
