"""The prefill node's main loop: receives messages, runs chunks of prompts, sends pages and first tokens.

It has one thread. Each turn drains all sockets (control first), moves requests between queues, launches at most one
forward and reads the results of the previous one (common.node.overlap).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq

from common.errors import (
    CacheDamaged,
    ClientGone,
    Moved,
    NodeLost,
    Overloaded,
    RequestError,
    TransferFailed,
)
from common.grammar.no_token import no_token
from common.grammar.token_rules import constraint_of
from common.kv_cache.image_keys import with_images
from common.kv_cache.radix_cache import Keys
from common.messages.generation import ImageSpan, OutputToken
from common.messages.prefill_inbox import Prefill
from common.messages.router_inbox import MAX_RUN, Failed, FirstToken, PrefillDone, PromptScores
from common.node.announced_work import AnnouncedWork
from common.node.hidden_states import send_states
from common.node.life import NodeLife
from common.node.overlap import OverlapLoop
from common.node.to_router import ToRouter
from kv_transfer.sender import Delivered, SlotsGranted, TransferLost
from prefill_node.absent_peers import AbsentPeers
from prefill_node.admission import PromptAdmission
from prefill_node.grammar_state import compiled
from prefill_node.images import ARRIVAL_SECONDS
from prefill_node.parts import Links, Observation, Scheduling
from prefill_node.peer_frames import take_peer_frames
from prefill_node.planner import Planned, Planner, PromptProgress
from prefill_node.queues import Queues
from prefill_node.report import Report
from prefill_node.request import PrefillRequest
from prefill_node.send_orders import SendOrders
from prefill_node.step_result import Launched, Worker

WATCH_INTERVAL = 0.0001  # seconds between checks of transfers while a forward or a write runs
# timeout while images arrive, grammars are compiled or prefixes stored, whose end no message announces
BUSY_WAIT_MS = 1
IDLE_WAIT_MS = 100
DECODE_GONE = "the decode node of this request is gone"


class PrefillNode:
    """Built by build.py. `run` returns when the node has drained."""

    def __init__(
        self,
        links: Links,
        scheduling: Scheduling,
        worker: Worker,
        orders: SendOrders,
        observation: Observation,
    ) -> None:
        """`orders` decides what the worker sends, and when."""
        self._routers = links.routers
        self._peers = links.peers
        self._sender = links.transfers
        self._absent = AbsentPeers(links.peers.reachable)
        self._images = links.images
        self._space = scheduling.space
        self._tier = scheduling.tier
        self._limits = scheduling.limits
        self._grammars = scheduling.grammars
        self._times = scheduling.times
        self._pacing = scheduling.pacing
        self._worker = worker
        self._orders = orders
        self._events = observation.events
        self._clock = observation.clock
        self._garbage = observation.garbage
        self.queues = Queues()  # also read by tests
        self._planner = Planner(self.queues, scheduling)
        drain, log, profiler = self._limits.drain_timeout, observation.log, observation.profiler
        self.life = NodeLife(
            links.incarnation, self._routers, Prefill, drain, log, self._clock, profiler, links.role
        )
        self._report = Report(
            self.queues, self._space, self._sender, self._times, observation, self._tier.totals
        )
        self._admission = PromptAdmission(self.queues, scheduling, self._report, self._events)
        self._poller = zmq.Poller()
        for each in (*self._routers.sockets, self._peers.socket, *links.reports):
            self._poller.register(each, zmq.POLLIN)
        self._images.watch(self._poller)
        self.loop = OverlapLoop(
            self._prepare,
            self._launch,
            self._finish,
            self._idle,
            self.life.stopping,
            self._watch,
            AnnouncedWork(self.announce, self._planner.work, self._clock, links.others),
            self._end_turn,
        )

    def run(self) -> None:
        self.life.run(self.loop.run)

    def announce(self, seconds: float) -> None:
        """Tell routers and peers that the main loop, whose thread calls this, may not turn for `seconds`."""
        self._routers.announce(seconds)
        self._sender.heartbeats.announce(seconds)

    # -- one turn ----------------------------------------------------------------------------------------------

    def _prepare(self) -> Planned | None:
        self._pacing.hold(self._watch)
        now = self._clock()
        self.life.receive(self, now)
        take_peer_frames(self._peers, self._sender)
        self._move_transfers()
        self._images.receive()
        self._claim_images()
        self._claim_grammars(now)
        self.life.look_after(self, now)
        for request in self._admission.admit(now):
            if request.computed:
                self._send_pages(request)  # send the cached prefix before anything is computed
        for request in self._tier.settle():
            self._release_if_settled(request)
        return self._planner.next(now)

    def _end_turn(self) -> None:
        """Report the state of the node. Launches and first tokens come first, because somebody waits for them."""
        refused = self._routers.refused_messages + self._images.refused_messages
        held = ((each.router, each.remaining) for each in self.queues.live())
        counters = self._report.counters(refused, self._routers.unsent_messages)
        self.life.publish(self._report.load(), counters, held)
        now = self._clock()
        self.life.end_turn(len(self.queues), now)
        self._garbage.end_turn(now)
        self._events.flush()

    def _launch(self, planned: Planned) -> Launched:
        self._planner.begin(planned, self._clock())
        for chunk in planned.chunks:
            self._events.add("chunk", chunk.request.room, start=chunk.start, length=chunk.length)
        self._report.forward_launched(planned.chunks)
        self._orders.begin(planned.plan.generation, planned.chunks)
        launched = self._worker.apply(planned.plan)
        self._pacing.launched(launched.completion, self._times.latest_seconds)
        self._move_transfers()  # process grants now: results may be read before the next turn
        return launched

    def _finish(self, launched: Launched) -> None:
        """Send the pages that this launch has completed, and finish the prompts whose last chunk it ran."""
        for progress in self._planner.read(launched):
            request = progress.request
            if progress.damaged and not request.ended:
                self._fail(request, CacheDamaged("a prefix of it in host memory has changed"))
            if request.ended:
                self._release_if_settled(request)
                continue
            self._send_computed(progress)
            if progress.drawn is None:
                self._send_pages(request)
            else:
                request.draft = progress.drawn.draft
                self._complete(request, progress.drawn.token)

    def _send_computed(self, progress: PromptProgress) -> None:
        """Send the router the hidden states and the log-probabilities of the prompt that it asked for."""
        request, scores = progress.request, progress.scores
        if progress.states is not None:
            first = request.computed - len(progress.states)
            send_states(request.router, request.room, first, progress.states)
        for at in range(0, len(scores), MAX_RUN):
            run = list(scores[at : at + MAX_RUN])
            request.router.send(PromptScores(room=request.room, start=progress.first_scored + at, tokens=run))

    def _move_transfers(self) -> None:
        while events := self._sender.poll():  # one event may cause the next: granted, written, delivered
            for event in events:
                self._on_transfer(event)

    def _watch(self) -> None:
        """Process prompts, grants, deliveries and images while a forward runs, rather than when it ends."""
        self.life.receive(self, self._clock())
        take_peer_frames(self._peers, self._sender)
        self._move_transfers()
        self._images.receive()
        time.sleep(WATCH_INTERVAL)

    def _idle(self) -> None:
        # No message announces the end of a write, and a decode node waits for the record that follows the last.
        interval = self._sender.poll_interval
        wait_ms = IDLE_WAIT_MS if interval is None else int(interval * 1000)
        if interval is not None and not wait_ms:  # shorter than a poller can wait
            time.sleep(interval)
            return
        busy = self._images.busy or self.queues.compiling or self._tier.busy
        self._poller.poll(BUSY_WAIT_MS if busy else wait_ms)

    # -- handlers of NodeLife ----------------------------------------------------------------------------------

    def take(self, message: Prefill, router: ToRouter, now: float) -> None:
        try:
            keys = self._check(message)
            self._images.check(message.images, self._waiting_images() if message.images else ())
            with_images(keys, message.images)  # raises InvalidRequest for spans that do not fit
            vocab_size = self._limits.vocab_size
            compilation = constraint_of(message.sampling, self._grammars, vocab_size, self._clock)
            deadline, pages = now + message.deadline_ms / 1000, self._space.pages_for(len(keys))
            self._sender.expect(message.room, deadline, (message.decode,), pages)
        except RequestError as error:
            router.send(Failed.of(message.room, error))
            return
        request = PrefillRequest.of(message, keys, router, now, compilation)
        self._report.requests += 1
        self._images.expect(request.room, request.images)
        self.queues.wait(request)
        self._events.add("taken", request.room, request=request.request_id, decode=request.decode)

    def _waiting_images(self) -> list[ImageSpan]:
        return [image for request in self.queues.waiting.values() for image in request.images]

    def _check(self, message: Prefill) -> Keys:
        if not self.life.takes(message.decode):
            raise NodeLost("this node takes no prompts now")
        if len(self.queues.waiting) >= self._limits.max_queue:
            raise Overloaded(
                f"{self._limits.max_queue} prompts wait on this prefill node already; try again later"
            )
        return self._limits.check(message, self._space)

    def abort(self, router: ToRouter, room: int, reason: str) -> None:
        request = self.queues.find(room)
        if request is not None and request.router is router:
            self._fail(request, ClientGone(reason))

    def pair_lost(self, router: ToRouter, incarnation: str) -> None:
        self._lose(lambda each: each.router is router and each.decode == incarnation, DECODE_GONE)

    def peer_lost(self, incarnation: str) -> None:
        self._sender.peer_lost(incarnation)
        self._lose(lambda each: each.decode == incarnation, DECODE_GONE)

    def peer_draining(self, router: ToRouter, incarnation: str) -> None:
        for request in list(self.queues.waiting.values()):
            if request.router is router and request.decode == incarnation:
                self._fail(request, Moved("its decode node drains, and its prompt has not begun"))

    def flush_cache(self) -> None:
        self._space.flush()
        self._tier.flush()

    def router_lost(self, router: ToRouter, last: bool) -> int:
        return self._lose(lambda each: each.router is router, "the router of this request is gone")

    def _lose(self, lost: Callable[[PrefillRequest], bool], reason: str) -> int:
        """End the requests that are `lost`; return how many there were."""
        found = [each for each in self.queues.live() if lost(each)]
        for request in found:
            self._fail(request, NodeLost(reason))
        return len(found)

    def sweep(self, now: float) -> None:
        """End the requests whose images are late or whose decode node is gone. `_sender` reports those out of time."""
        for peer in self._absent.look(self._sender.peers.all(), now):
            self.peer_lost(peer.leader)
        for request in self.queues.live():
            if now > request.received + ARRIVAL_SECONDS and not self._images.arrived(request.room):
                self._fail(request, TransferFailed("its images did not reach the prefill node"))

    # -- moving between queues ---------------------------------------------------------------------------------

    def _claim_images(self) -> None:
        for request in list(self.queues.arriving.values()):
            try:
                ready = self._images.claim(request.room)
            except RequestError as error:
                self._fail(request, error)
            else:
                if ready:
                    self.queues.arrived(request)

    def _claim_grammars(self, now: float) -> None:
        for request, error in compiled(self.queues.compiling.values(), self._limits.vocab_size, now):
            if error is None:
                self.queues.compiled(request)
            else:
                self._fail(request, error)

    def _complete(self, request: PrefillRequest, token: OutputToken | None) -> None:
        """Record that the whole prompt is computed and its first output token drawn."""
        assert request.lease is not None
        now = self._clock()
        request.mark("prefill_end", now)
        if token is None:
            vocab_size = self._limits.vocab_size
            self._fail(request, no_token(request.sampling, request.emitted, request.matcher, vocab_size))
            return
        self._report.generated_tokens += 1
        self._events.add("first_token", request.room, id=token.id)
        reason = request.follow(token.id)
        if request.failure is not None:
            self._keep(request)
            self._fail(request, request.failure)
            return
        request.router.send(
            FirstToken(
                room=request.room,
                token=token,
                finish_reason=reason,
                cached_tokens=request.reused,
                stages=None if reason is None else request.stages,
            )
        )
        if reason is not None:
            self._keep(request)
            self._end(request, "finished", "the request ended with its first token")
            return
        request.first_token = token
        self.queues.handing_over[request.room] = self.queues.computing.pop(request.room)
        self._send_pages(request)
        self._keep(request)  # a decode node does not wait for this

    def _keep(self, request: PrefillRequest) -> None:
        """Let later prompts use the pages of a computed one."""
        assert request.lease is not None
        keys = self._space.keys(request.contents)
        request.lease.commit(keys)
        self._tier.store(request, keys)

    def _send_pages(self, request: PrefillRequest) -> None:
        """Send every complete page that was not sent, and the handoff record after the last one."""
        order = self._orders.of(request)
        if order is None:
            return
        if order.pages:
            self._events.add("posted", request.room, generation=order.generation, pages=order.pages)
        if order.record is not None:
            request.mark("last_page_sent", self._clock())
            self._events.add("record_posted", request.room, generation=order.generation)
        self._worker.send(order)

    def _on_transfer(self, event: SlotsGranted | Delivered | TransferLost) -> None:
        request = self.queues.find(event.room) or self.queues.ending.get(event.room)
        if request is None:
            return
        if isinstance(event, SlotsGranted):
            request.granted = True
            request.mark("slots", self._clock())
            if request.lease is not None:
                self._send_pages(request)
                self._worker.granted()
            return
        request.settled = True
        self._events.add("settled", request.room, delivered=isinstance(event, Delivered))
        if isinstance(event, Delivered):
            self._report.transfers += 1
            request.mark("record_sent", self._clock())
            request.router.send(PrefillDone(room=request.room, stages=request.stages))
        elif not request.ended:
            self._report.transfer_failures += 1
            request.router.send(Failed(room=request.room, code=event.code, message=event.reason))
            self._stop(request)
        self._release_if_settled(request)

    def _end(self, request: PrefillRequest, code: str, reason: str) -> None:
        """End a request. Its pages are freed once its launches and writes have settled."""
        self._stop(request)
        self._events.add("ended", request.room, code=code)
        self._sender.cancel(request.room, code, reason)
        self._release_if_settled(request)

    def _fail(self, request: PrefillRequest, error: RequestError) -> None:
        """End a request and tell its router why."""
        self._end(request, error.code, str(error))
        request.router.send(Failed.of(request.room, error))

    def _stop(self, request: PrefillRequest) -> None:
        """Exclude a request from further plans."""
        self.queues.end(request)
        self._planner.ended(request)

    def _release_if_settled(self, request: PrefillRequest) -> None:
        if request.releasable:
            if request.lease is not None:
                self._tier.loaded(request)
                request.lease.release()
                request.lease = None
                self._events.add("released", request.room)
            self.queues.forget(request)
