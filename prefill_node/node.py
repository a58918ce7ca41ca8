"""The prefill node: messages in, chunks of prompts through the step, pages and first tokens out.

One thread. Each turn drains all sockets (control first), moves requests between queues, launches at most one forward
and reads the results of the previous one (common.node.overlap).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import zmq

from common.engine.sampling.sampler import read_tokens
from common.engine.sampling.sampling_plan import finish_reason
from common.engine.state.draft_row import DraftShape
from common.engine.state.relay_state import draft_rows
from common.errors import (
    DeadlineExceeded,
    InternalError,
    NodeLost,
    Overloaded,
    RequestError,
    TransferFailed,
)
from common.ipc import RouterSocket
from common.kv_cache.image_keys import with_images
from common.kv_cache.page_space import PageLease, PageSpace
from common.kv_cache.radix_cache import Keys
from common.messages.generation import ImageSpan, OutputToken
from common.messages.identity import GraphTotals
from common.messages.prefill_inbox import Prefill, PrefillMessage
from common.messages.router_inbox import Failed, FirstToken, PrefillDone
from common.node.announced_work import AnnouncedWork
from common.node.life import NodeLife
from common.node.overlap import OverlapLoop
from common.node.router_link import RouterLink
from common.observability.event_log import NO_EVENTS, EventLog
from common.observability.logs import Log
from kv_transfer.sender import Delivered, Sender, SlotsGranted, TransferLost
from prefill_node.images import ARRIVAL_SECONDS, Images
from prefill_node.limits import PrefillLimits
from prefill_node.page_sending import PageSending
from prefill_node.peer_frames import take_peer_frames
from prefill_node.queues import Queues
from prefill_node.report import Report
from prefill_node.request import PrefillRequest
from prefill_node.scheduler import Chunk, chunk_work, in_order, plan_chunks
from prefill_node.step import LaunchedPrefill, PrefillStep

WATCH_INTERVAL = 0.0001  # seconds between looks at transfers while a forward runs
BUSY_WAIT_MS = 1  # while writes are on the way that no message announces
IDLE_WAIT_MS = 100


class PrefillNode:
    """Composed in build.py; `run` returns when the node has drained."""

    def __init__(
        self,
        incarnation: str,
        link: RouterLink[PrefillMessage],
        peers: RouterSocket,
        sender: Sender,
        space: PageSpace,
        step: PrefillStep,
        sending: PageSending,
        images: Images,
        limits: PrefillLimits,
        draft: DraftShape,
        graphs: Callable[[], Sequence[GraphTotals]],
        log: Log,
        clock: Callable[[], float] = time.monotonic,
        events: EventLog = NO_EVENTS,
    ) -> None:
        self._events = events
        self._link = link
        self._peers = peers
        self._sender = sender
        self._space = space
        self._step = step
        self._sending = sending
        self._images = images
        self._limits = limits
        self._draft = draft
        self._clock = clock
        self.queues = Queues()  # for tests, too: what is where
        self.life = NodeLife(incarnation, link, Prefill, limits.drain_timeout, log, clock)
        self._report = Report(self.queues, space, sender, graphs)
        self._poller = zmq.Poller()
        self._poller.register(link.socket, zmq.POLLIN)
        self._poller.register(peers.socket, zmq.POLLIN)
        images.watch(self._poller)
        self._longest = space.pages_for(limits.max_model_len)
        self.loop = OverlapLoop(
            self._prepare,
            self._launch,
            self._finish,
            self._idle,
            self.life.stopping,
            self._watch_transfers,
            AnnouncedWork(self._announce, chunk_work, clock),
        )

    def run(self) -> None:
        self.life.run(self.loop.run)

    def _announce(self, seconds: float) -> None:
        self._link.announce(seconds)
        self._sender.signs.announce(seconds)

    # -- one turn ----------------------------------------------------------------------------------------------

    def _prepare(self) -> list[Chunk] | None:
        now = self._clock()
        self.life.receive(self, now)
        take_peer_frames(self._peers, self._sender)
        self._move_transfers()
        self._images.receive()
        self._claim_images()
        self.life.look_after(self, len(self.queues), now)
        self._admit(now)
        refused = self._link.refused_messages + self._images.refused_messages
        self.life.publish(self._report.load(), self._report.counters(refused))
        self.life.end_turn(len(self.queues), now)
        self._events.flush()
        computing, limits = self.queues.computing.values(), self._limits
        return plan_chunks(computing, now, limits.chunk_tokens, limits.max_batch) or None

    def _launch(self, chunks: list[Chunk]) -> LaunchedPrefill:
        now = self._clock()
        for chunk in chunks:
            chunk.request.mark("prefill_start", now)
            chunk.request.launched_at = now
            chunk.request.scheduled += chunk.length
            chunk.request.in_flight += 1
            self._events.add("chunk", chunk.request.room, start=chunk.start, length=chunk.length)
        self._report.steps += 1
        with self._sending.during(chunks):
            launched = self._step.launch(chunks)
        self._move_transfers()  # grants that came meanwhile are no news once results are read
        return launched

    def _finish(self, launched: LaunchedPrefill) -> None:
        """Pages written by this launch are complete: send them; finish the prompts that ended with it."""
        tokens: list[OutputToken | None] = []
        if launched.sampled is not None:
            tokens = read_tokens(
                launched.sampled, [chunk.request.sampling.logprobs for chunk in launched.finals]
            )
        drawn = {chunk.request.room: token for chunk, token in zip(launched.finals, tokens)}
        if launched.draft is not None:
            state = launched.draft
            for chunk, row in zip(launched.finals, draft_rows(state.probs, state.ids, state.hidden)):
                chunk.request.draft = row
        for chunk in launched.chunks:
            request = chunk.request
            request.in_flight -= 1
            request.computed = chunk.start + chunk.length
            if request.ended:
                self._release_if_settled(request)
            elif chunk.final:
                self._complete(request, drawn[request.room])
            else:
                self._send_pages(request)

    def _move_transfers(self) -> None:
        while events := self._sender.poll():  # an event may cause the next one: granted, written, delivered
            for event in events:
                self._on_transfer(event)

    def _watch_transfers(self) -> None:
        """While a forward runs: pages that have landed are announced, and images taken in, not when it ends."""
        self._move_transfers()
        self._images.receive()
        time.sleep(WATCH_INTERVAL)

    def _idle(self) -> None:
        self._poller.poll(BUSY_WAIT_MS if self._sender.writing or self._images.busy else IDLE_WAIT_MS)

    # -- duties ----------------------------------------------------------------------------------------------

    def take(self, message: Prefill, now: float) -> None:
        try:
            keys = self._check(message)
            images = self._images.expect(message.images, self._waiting_images() if message.images else ())
            with_images(keys, message.images)  # spans that do not fit are refused here
            self._sender.expect(message.room, now + message.deadline_ms / 1000, (message.decode,))
        except RequestError as error:
            self._link.send(Failed.of(message.room, error))
            return
        request = PrefillRequest(
            room=message.room,
            request_id=message.request_id,
            keys=keys,
            images=images,
            salt=message.salt,
            emitted=message.emitted,
            sampling=message.sampling,
            decode=message.decode,
            received=now,
            deadline=now + message.deadline_ms / 1000,
        )
        self._report.requests += 1
        self.queues.wait(request)
        self._events.add("taken", request.room, request=request.request_id, decode=request.decode)

    def _waiting_images(self) -> list[ImageSpan]:
        return [image.span for request in self.queues.waiting.values() for image in request.images]

    def _check(self, message: Prefill) -> Keys:
        if not self.life.takes_requests:
            raise NodeLost("this prefill node is draining")
        if len(self.queues.waiting) >= self._limits.max_queue:
            raise Overloaded(
                f"{self._limits.max_queue} prompts wait on this prefill node already; try again later"
            )
        return self._limits.check(message, self._space)

    def abort(self, room: int, reason: str) -> None:
        request = self.queues.find(room)
        if request is not None:
            self._end(request, "client_gone", reason)

    def peer_lost(self, incarnation: str) -> None:
        self._sender.peer_lost(incarnation)
        for request in self.queues:
            if request.decode == incarnation and not request.ended:
                self._end(request, NodeLost.code, "the decode node of this request is gone")

    def router_lost(self) -> None:
        for request in self.queues:
            if not request.ended:
                self._end(request, NodeLost.code, "the router of this request is gone")

    def sweep(self, now: float) -> None:
        for request in self.queues:
            if request.ended:
                continue
            if now > request.deadline:
                self._end(request, DeadlineExceeded.code, "the request's deadline passed on the prefill node")
            elif now > request.received + ARRIVAL_SECONDS and not self._images.arrived(request.images):
                self._end(request, TransferFailed.code, "its images did not reach the prefill node")

    # -- moving between queues ---------------------------------------------------------------------------------

    def _admit(self, now: float) -> None:
        """In the order of the scheduler, until a prompt with decode pages does not fit.

        A prompt gets all its pages at once, so two can never wait for each other. One without decode pages that does
        not fit (see `_lease`) is passed by those that have them, and by no others: they leave by themselves, so there
        is room for it in the end. Nobody passes one with decode pages, except new prompts of a lower cost.
        """
        order = in_order(self.queues.ready(), now)
        while len(self.queues.computing) < self._limits.max_batch:
            request = next(order, None)
            if request is None:
                return
            lease = self._lease(request)
            if lease is not None:
                self._begin(request, lease, now)
            elif request.granted:
                return
            else:
                order = in_order((each for each in self.queues.ready() if each.granted), now)

    def _begin(self, request: PrefillRequest, lease: PageLease, now: float) -> None:
        self.queues.admit(request)
        request.lease = lease
        request.scheduled = request.computed = lease.cached_tokens
        self._report.prompt_tokens += request.num_tokens
        self._report.cached_tokens += lease.cached_tokens
        request.mark("queued", now)
        self._events.add("leased", request.room, pages=lease.pages, cached=lease.cached_pages)
        self._send_pages(request)  # the cached prefix leaves before anything is computed

    def _claim_images(self) -> None:
        for request in list(self.queues.arriving.values()):
            try:
                self._images.claim(request.images)
            except RequestError as error:
                self._end(request, error.code, str(error))
            else:
                if request.ready:
                    self.queues.arrived(request)

    def _lease(self, request: PrefillRequest) -> PageLease | None:
        """Pages for a prompt, or None while there is not enough room.

        A prompt may be computed before the decode node has pages for it, but never with the room that the longest
        prompt needs: it would hold that room until another request leaves the decode node, which may be one whose
        pages are reserved there and whose prompt waits here for the same room.
        """
        # at least one token has to be computed: its logits give the first output token
        keys, pages = self._space.keys(request.contents), self._space.pages_for(request.num_tokens)
        request.keyed, request.rewrites = len(keys), self._step.rewrites
        lease = self._space.lease(keys, pages, max_cached_tokens=request.num_tokens - 1, salt=request.salt)
        if lease is not None and not request.granted and self._space.available_pages < self._longest:
            lease.release()
            return None
        return lease

    def _complete(self, request: PrefillRequest, token: OutputToken | None) -> None:
        """The whole prompt is computed and its next token drawn."""
        assert request.lease is not None
        now = self._clock()
        request.mark("prefill_end", now)
        if token is None:
            self._end(request, InternalError.code, "the model produced logits that are not finite")
            return
        request.lease.commit(self._space.keys(request.contents))
        self._report.generated_tokens += 1
        self._events.add("first_token", request.room, id=token.id)
        reason = finish_reason(token.id, request.emitted + 1, request.sampling)
        self._link.send(
            FirstToken(
                room=request.room,
                token=token,
                finish_reason=reason,
                cached_tokens=request.lease.cached_tokens,
            )
        )
        if reason is not None:
            self._end(request, "finished", "the request ended with its first token", tell_router=False)
            return
        request.first_token = token
        self.queues.handing_over[request.room] = self.queues.computing.pop(request.room)
        self._send_pages(request)

    def _send_pages(self, request: PrefillRequest) -> None:
        """Give the sender every page that is complete and not sent yet; after the last one, the record."""
        slots = self._sender.slots(request.room)
        if slots is None or request.ended:
            return
        assert request.lease is not None
        computed, page_size = request.computed, self._space.page_size
        self._sender.complete(request.room, request.complete_pages(computed, page_size))
        pages = request.take_pages(computed, slots.held_pages, page_size)
        if pages.src_pages:
            self._sender.send_pages(request.room, pages.src_pages, pages.first)
            self._events.add("posted", request.room, generation=slots.generation, pages=pages.src_pages)
        if computed == request.num_tokens and request.first_token is not None:
            request.mark("last_page_sent", self._clock())
            self._events.add("record_posted", request.room, generation=slots.generation)
            self._sender.finish(
                request.room,
                request.record(self._draft.dtype_name),
            )

    def _on_transfer(self, event: SlotsGranted | Delivered | TransferLost) -> None:
        request = self.queues.find(event.room) or self.queues.ending.get(event.room)
        if request is None:
            return
        if isinstance(event, SlotsGranted):
            request.granted = True
            request.mark("slots", self._clock())
            if request.lease is not None:
                self._send_pages(request)
            return
        request.settled = True
        self._events.add("settled", request.room, delivered=isinstance(event, Delivered))
        if isinstance(event, Delivered):
            self._report.transfers += 1
            request.mark("record_sent", self._clock())
            self._link.send(PrefillDone(room=request.room, stages=request.stages))
        elif not request.ended:
            self._report.transfer_failures += 1
            self._link.send(Failed(room=request.room, code=event.code, message=event.reason))
            self.queues.end(request)
        self._release_if_settled(request)

    def _end(self, request: PrefillRequest, code: str, reason: str, tell_router: bool = True) -> None:
        """Stop a request that has not ended; it is gone once launches and writes have settled."""
        self.queues.end(request)
        self._events.add("ended", request.room, code=code)
        self._sender.cancel(request.room, code, reason)
        if tell_router:
            self._link.send(Failed(room=request.room, code=code, message=reason))
        self._release_if_settled(request)

    def _release_if_settled(self, request: PrefillRequest) -> None:
        if request.releasable:
            if request.lease is not None:
                request.lease.release()
                request.lease = None
                self._events.add("released", request.room)
            self.queues.forget(request)
