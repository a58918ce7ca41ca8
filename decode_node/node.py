"""The decode node: reservations in, pages and records from prefill nodes in, tokens out.

One thread. Each turn drains all sockets (control first), moves requests between queues, launches at most one step and
reads the results of the previous one (common.engine.overlap). The host's view of a request is exact but one step old.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from common.engine.kv_cache.page_space import PageSpace
from common.engine.kv_cache.relay_state import DraftRow, DraftShape
from common.engine.kv_cache.request_table import RequestTable
from common.engine.overlap import OverlapLoop
from common.engine.sampling_plan import finish_reason
from common.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NodeLost,
    Overloaded,
    Preempted,
    RequestError,
    TransferFailed,
    Unavailable,
)
from common.ipc.router_link import RouterLink
from common.messages.decode_inbox import DecodeMessage, Reserve
from common.messages.generation import OutputToken
from common.messages.identity import NodeCounters, NodeLoad, NodeState
from common.messages.node_inbox import Abort, Drain, PeerLost, Rejected
from common.messages.router_inbox import Failed, Goodbye, TokenRun, Tokens
from common.observability.logs import Log
from decode_node.accept_counters import AcceptCounters
from decode_node.occupancy import Occupancy
from decode_node.peers import PeerConnections
from decode_node.queues import Queues
from decode_node.request import DecodeRequest, Emission
from decode_node.retraction import Retraction
from decode_node.scheduler import admit
from decode_node.step import DecodeStep, LaunchedStep
from kv_transfer import receiver as transfer
from kv_transfer.receiver import Receiver

SWEEP_INTERVAL = 0.25  # seconds between looks at deadlines
IDLE_WAIT_MS = 100
TRANSFER_WAIT_MS = 5  # while pages are on the way: deadlines and deaths are seen by polling


@dataclass(frozen=True, slots=True)
class DecodeLimits:
    """What the scheduler may take; from the config, checked in build."""

    max_running: int
    max_transferring: int
    max_queue: int
    max_model_len: int
    reserved_tokens: int
    skip_ahead: int
    drain_timeout: float


class DecodeNode:
    """Composed in build.py; `run` returns when the node has drained."""

    def __init__(
        self,
        incarnation: str,
        link: RouterLink[DecodeMessage],
        peers: PeerConnections,
        poller: zmq.Poller,
        receiver: Receiver,
        space: PageSpace,
        table: RequestTable,
        retraction: Retraction,
        step: DecodeStep,
        limits: DecodeLimits,
        draft: DraftShape,
        log: Log,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._incarnation = incarnation
        self._link = link
        self._peers = peers
        self._poller = poller
        self._receiver = receiver
        self._space = space
        self._step = step
        self._limits = limits
        self._draft = draft
        self._log = log
        self._clock = clock
        self._queues = Queues()
        self._occupancy = Occupancy(
            self._queues,
            space,
            table,
            retraction,
            step.tokens_per_step,
            step.slack,
            step.needs_results,
            limits.reserved_tokens,
            limits.max_running,
        )
        self._state: NodeState = "up"
        self._stopping = False
        self._drain_until = float("inf")
        self._swept = 0.0
        self._requests = self._prompt_tokens = self._cached_tokens = self._generated = 0
        self._steps = self._transfers = self._transfer_failures = 0
        self._speculation = AcceptCounters()
        poller.register(link.socket, zmq.POLLIN)
        self.loop = OverlapLoop(self._prepare, self._launch, self._finish, self._idle, lambda: self._stopping)

    @property
    def queues(self) -> Queues:
        """For tests: what is where."""
        return self._queues

    def run(self) -> None:
        self.loop.run()
        self._link.send(Goodbye(incarnation=self._incarnation))

    def drain(self) -> None:
        """Take nothing new, finish what is here, stop. Safe to call from a signal handler."""
        if self._state != "draining":
            self._state = "draining"
            self._drain_until = self._clock() + self._limits.drain_timeout

    # -- one turn ----------------------------------------------------------------------------------------------

    def _prepare(self) -> list[DecodeRequest] | None:
        now = self._clock()
        self._receive(now)
        for event in self._receiver.poll():
            self._on_transfer(event, now)
        if now - self._swept > SWEEP_INTERVAL:
            self._swept = now
            self._sweep(now)
        for request in self._occupancy.settle_retractions():
            self._fail(request, Preempted.code, "pages and backup memory ran out (decode.backup_mib)")
        self._occupancy.resume(now)
        self._admit(now)
        self._occupancy.start_arrived(now)
        batch = self._occupancy.batch()
        self._publish()
        if self._state == "draining" and (not len(self._queues) or now > self._drain_until):
            self._stopping = True
        return batch or None

    def _launch(self, batch: list[DecodeRequest]) -> LaunchedStep:
        launched = self._step.launch(batch)
        for request in batch:
            request.step_launched(self._step.tokens_per_step)
        self._steps += 1
        return launched

    def _finish(self, launched: LaunchedStep) -> None:
        now = self._clock()
        runs: list[TokenRun] = []
        for emission in launched.read():
            emission.request.step_read(self._step.tokens_per_step, len(emission.tokens))
            if not emission.request.ended:
                self._speculation.count(emission)
                run = self._accept(emission, now)
                if run is not None:
                    runs.append(run)
            if emission.request.ended:
                self._occupancy.leave(emission.request)
        if runs:
            self._link.send(Tokens(runs=runs))

    def _idle(self) -> None:
        busy = self._queues.transferring or self._queues.quarantined
        self._poller.poll(TRANSFER_WAIT_MS if busy else IDLE_WAIT_MS)

    # -- messages ----------------------------------------------------------------------------------------------

    def _receive(self, now: float) -> None:
        for message in self._link.drain():
            if isinstance(message, Reserve):
                self._on_reserve(message, now)
            elif isinstance(message, Abort):
                request = self._queues.find(message.room)
                if request is not None and not request.ended:
                    self._drop(request, message.reason)
            elif isinstance(message, PeerLost):
                self._on_peer_lost(message.incarnation)
            elif isinstance(message, Drain):
                self.drain()
            elif isinstance(message, Rejected):
                self._log.error("the router refused this node", reason=message.reason)
                self._stopping = True
        self._peers.pump()
        if self._link.lost():
            self._log.warning("no answer from the router: dropping its requests", requests=len(self._queues))
            for request in self._queues.live():
                if not request.ended:
                    # told even so: a router that only stalled still counts on this node
                    self._fail(request, NodeLost.code, "the router of this request is gone")

    def _on_peer_lost(self, incarnation: str) -> None:
        """Transfers under way fail by the receiver's events, reservations that wait for pages here."""
        self._peers.lost(incarnation)
        for request in list(self._queues.waiting):
            if request.prefill.incarnation == incarnation:
                self._fail(request, NodeLost.code, "the prefill node of this request is gone")

    def _on_reserve(self, message: Reserve, now: float) -> None:
        request = DecodeRequest(
            room=message.room,
            request_id=message.request_id,
            prompt=message.token_ids,
            emitted=message.emitted,
            sampling=message.sampling,
            prefill=message.prefill,
            received=now,
            deadline=now + message.deadline_ms / 1000,
        )
        try:
            self._check(request)
            self._peers.ensure(message.prefill)
        except RequestError as error:
            self._link.send(Failed(room=message.room, code=error.code, message=str(error)))
            return
        self._requests += 1
        self._queues.waiting.append(request)

    def _check(self, request: DecodeRequest) -> None:
        if self._state != "up":
            raise NodeLost("this decode node is draining")
        if len(self._queues.waiting) >= self._limits.max_queue:
            raise Overloaded(
                f"{self._limits.max_queue} requests wait on this decode node already; try again later"
            )
        if self._queues.find(request.room) is not None or request.room in self._queues.quarantined:
            raise InvalidRequest(f"room {request.room} is in use")
        if not request.prompt or request.max_output < 1:
            raise InvalidRequest("a reservation needs a prompt and room for at least one token")
        most = len(request.prompt) + request.max_output
        if most > self._limits.max_model_len:
            raise InvalidRequest(
                f"prompt and max_tokens make {most} tokens, this cluster serves at most "
                f"{self._limits.max_model_len}; lower max_tokens",
                param="max_tokens",
            )
        if self._space.pages_for(most + self._step.slack) > self._space.total_pages:
            raise InvalidRequest(
                f"prompt and max_tokens make {most} tokens, the decode node's pool holds "
                f"{self._space.total_pages * self._space.page_size - self._step.slack}; lower max_tokens",
                param="max_tokens",
            )

    # -- moving between queues ---------------------------------------------------------------------------------

    def _admit(self, now: float) -> None:
        """Set pages aside and tell the prefill node where they are. Retracted requests come first."""
        slots = self._limits.max_transferring - len(self._queues.transferring) - len(self._queues.arrived)
        if not self._queues.waiting or self._queues.retracted or slots <= 0:
            return
        for request in admit(tuple(self._queues.waiting), slots, self._limits.skip_ahead, self._try_reserve):
            self._queues.waiting.remove(request)
            if request.lease is None:
                continue  # refused by the receiver: the router has been told
            self._prompt_tokens += len(request.prompt)
            self._cached_tokens += request.lease.cached_tokens
            request.mark("reserved", now)
            self._queues.transferring[request.room] = request

    def _try_reserve(self, request: DecodeRequest) -> bool:
        lease = self._occupancy.try_lease(request)
        if lease is None:
            return False
        try:
            self._receiver.open(
                request.room,
                request.prefill.incarnation,
                lease.pages[lease.cached_pages :],
                lease.cached_pages,
                request.deadline,
            )
        except Overloaded:  # the record slots are taken, by quarantined requests too: wait for one
            lease.release()
            return False
        except RequestError as error:
            lease.release()
            code = error.code
            if isinstance(
                error, Unavailable
            ):  # lost while this request waited: the next one says Hello again
                self._peers.lost(request.prefill.incarnation)
                code = NodeLost.code
            self._link.send(Failed(room=request.room, code=code, message=str(error)))
            return True  # taken from the queue, without a lease
        request.lease = lease
        return True

    def _on_transfer(
        self,
        event: transfer.Arrived | transfer.Failed | transfer.PagesFree | transfer.PeerRefused,
        now: float,
    ) -> None:
        if isinstance(event, transfer.PeerRefused):
            self._log.error("a prefill node and this node cannot work together", reason=event.reason)
            self._peers.lost(event.incarnation)
            return
        if isinstance(event, transfer.PagesFree):
            request = self._queues.quarantined.pop(event.room, None)
            if request is not None:
                self._occupancy.vacate(request)
            return
        request = self._queues.transferring.pop(event.room, None)
        if request is None:
            return
        if isinstance(event, transfer.Failed):
            self._queues.quarantined[request.room] = request
            request.ended = True
            if event.code != "finished":  # finished: the first token was the last one, the router knows
                self._transfer_failures += 1
                self._link.send(Failed(room=request.room, code=event.code, message=event.reason))
            return
        self._receiver.close(request.room)
        if event.record.num_tokens != len(request.prompt):
            self._fail(
                request, TransferFailed.code, "the record is of another prompt length than the reservation"
            )
            return
        record = event.record
        draft = DraftRow(record.draft_topk_p, record.draft_topk_ids, record.draft_hidden)
        if not draft.fits(self._draft) or record.draft_hidden_dtype != self._draft.dtype_name:
            self._fail(
                request,
                TransferFailed.code,
                "the record's draft state is not that of this node's draft model",
            )
            return
        assert request.lease is not None
        request.draft = draft
        self._transfers += 1
        request.mark("record_accepted", now)
        request.output.append(event.record.first_token)
        request.launched = 1
        request.lease.commit(self._space.keys(request.prompt))
        self._queues.arrived.append(request)

    def _accept(self, emission: Emission, now: float) -> TokenRun | None:
        """Take over what a step drew; None if the request failed."""
        request = emission.request
        offset = len(request.output)
        tokens: list[OutputToken] = []
        reason: str | None = None
        for token in emission.tokens:
            if token is None:
                request.ended = True
                request.trusted = False
                self._link.send(
                    Failed(
                        room=request.room,
                        code=InternalError.code,
                        message="the model produced logits that are not finite",
                    )
                )
                return None
            tokens.append(token)
            request.output.append(token.id)
            reason = finish_reason(token.id, request.emitted + len(request.output), request.sampling)
            if reason is not None:
                break
        self._generated += len(tokens)
        stages = None
        if reason is not None:
            request.ended = True
            request.mark("finished", now)
        if offset == 1 or reason is not None:
            request.mark("first_decode", now)
            stages = request.stages
        return TokenRun(request.room, offset, tokens, reason, stages)

    def _drop(self, request: DecodeRequest, reason: str) -> None:
        """Nobody waits for this request any more: free what it holds as soon as that is safe."""
        request.ended = True
        if self._queues.transferring.pop(request.room, None) is not None:
            self._queues.quarantined[request.room] = request
            self._receiver.abort(request.room, reason)
        elif request.room in self._queues.running:
            self._occupancy.leave(request)
        else:
            for queue in (self._queues.waiting, self._queues.arrived, self._queues.retracted):
                if request in queue:
                    queue.remove(request)
            self._occupancy.vacate(request)

    def _fail(self, request: DecodeRequest, code: str, reason: str) -> None:
        """As _drop, and the router hears of it. The request is in no queue, or in any."""
        self._link.send(Failed(room=request.room, code=code, message=reason))
        self._drop(request, reason)

    def _sweep(self, now: float) -> None:
        for request in self._queues.live():
            if not request.ended and now > request.deadline:
                self._fail(request, DeadlineExceeded.code, "the request's deadline passed on the decode node")
        self._peers.close_unused({request.prefill.incarnation for request in self._queues})

    # -- what others see ---------------------------------------------------------------------------------------

    def _publish(self) -> None:
        queues, received = self._queues, self._receiver.counters
        load = NodeLoad(
            queued=len(queues.waiting) + len(queues.retracted),
            running=len(queues.running),
            transferring=len(queues.transferring) + len(queues.arrived),
            free_pages=self._space.free_pages,
            cached_pages=self._space.cache.cached_pages,
            quarantined_pages=self._receiver.quarantined_pages,
            total_pages=self._space.total_pages,
        )
        counters = NodeCounters(
            requests=self._requests,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated,
            steps=self._steps,
            retractions=self._occupancy.retractions,
            transfers=self._transfers,
            transfer_failures=self._transfer_failures,
            transferred_pages=received.pages_received,
            checksum_failures=received.checksum_failures,
            record_failures=received.record_failures.total(),
            refused_messages=self._link.refused_messages + received.malformed + received.unknown_room,
            spec_drafts=self._speculation.drafts,
            spec_draft_tokens=self._speculation.draft_tokens,
            spec_accepted_tokens=self._speculation.accepted_tokens,
            avg_spec_accept_length=self._speculation.mean_length,
        )
        self._link.publish(self._state, load, counters)
