"""The decode node: takes reservations from routers and pages from prefill nodes, and returns tokens.

It has one thread. Each turn processes messages until the next step is due (pacing.py), moves requests between
queues, launches at most one step and reads the results of the previous one (common.node.overlap). The host's view of a
request is exact but one step old.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable

import zmq

from common.engine.state.draft_row import DraftShape
from common.errors import (
    CacheDamaged,
    DeadlineExceeded,
    InvalidRequest,
    Moved,
    NodeLost,
    Overloaded,
    RequestError,
    TransferFailed,
)
from common.grammar.no_token import no_token
from common.grammar.token_rules import constraint_of
from common.messages.decode_inbox import Reserve
from common.messages.generation import OutputToken
from common.messages.router_inbox import Failed, TokenRun, Tokens
from common.node.announced_work import AnnouncedWork
from common.node.hidden_states import send_states
from common.node.life import NodeLife
from common.node.overlap import OverlapLoop
from common.node.to_router import ToRouter
from decode_node.arrived_pages import ArrivedPages
from decode_node.batch_resources import BatchResources
from decode_node.grammar_masks import SLOWEST_MASK, failed_grammars, follow_compiled, step_masks
from decode_node.handed_over import take_record
from decode_node.parts import Links, Observation, Scheduling
from decode_node.planner import Planned, Planner
from decode_node.queues import Queues
from decode_node.report import Report
from decode_node.request import DecodeRequest, Emission
from decode_node.reservations import Reservations
from decode_node.step_result import Launched, Worker
from decode_node.step_times import StepTimes
from kv_transfer import receiver as transfer

IDLE_WAIT_MS = 100
WATCH_INTERVAL = 0.00005  # seconds between polls of messages while a step runs
PREFILL_LOST = "the prefill node of this request was lost"
BUSY_WAIT_MS = 5  # timeout while grammars are compiled or pages saved, whose end no message announces


class DecodeNode:
    """Composed in build.py. `run` returns when the node has drained."""

    def __init__(
        self,
        links: Links,
        scheduling: Scheduling,
        worker: Worker,
        draft: DraftShape,
        observation: Observation,
    ) -> None:
        """`draft`: the required shape of the draft state in handoff records."""
        self._routers = links.routers
        self._peers = links.peers
        self._poller = links.poller
        self._receiver = links.receiver
        self._space = scheduling.space
        self._tier = scheduling.tier
        self._rules = scheduling.rules
        self._limits = scheduling.limits
        self._grammars = scheduling.grammars
        self._worker = worker
        self._draft = draft
        self._drafts = observation.drafts
        self._events = observation.events
        self._log = observation.log
        self._clock = observation.clock
        self._garbage = observation.garbage
        self.queues = Queues()  # public for tests
        self._resources = BatchResources(self.queues, scheduling, self._events)
        self._planner = Planner(self._resources, scheduling.rows, scheduling.rules)
        self._step_times = StepTimes()
        own, drain, profiler = links.incarnation, self._limits.drain_timeout, observation.profiler
        self.life = NodeLife(own, self._routers, Reserve, drain, self._log, self._clock, profiler, links.role)
        self._report = Report(
            self.queues, self._space, self._receiver, self._resources, observation, self._tier.totals
        )
        self._pages = ArrivedPages(self._space, self._report)
        self._reservations = Reservations(
            self.queues, scheduling, self._resources, self._receiver, self._peers, self._report, self._events
        )
        for each in self._routers.sockets:
            self._poller.register(each, zmq.POLLIN)
        self.loop = OverlapLoop(
            self._prepare,
            self._launch,
            self._finish,
            self._idle,
            self.life.stopping,
            self._watch,
            AnnouncedWork(self.announce, self._planner.work, self._clock, links.others),
        )

    def run(self) -> None:
        self.life.run(self.loop.run)

    def announce(self, seconds: float) -> None:
        """Tell routers and peers that the main loop, whose thread calls this, may not turn for `seconds`."""
        self._routers.announce(seconds)
        self._receiver.heartbeats.announce(seconds)

    # -- one turn ----------------------------------------------------------------------------------------------

    def _prepare(self) -> Planned | None:
        now = self._clock()
        self.life.receive(self, now)
        self._move_transfers()
        self._fail_all(self._pages.settle())
        self._fail_all(self._resources.settle_retractions(self._worker.unsaved(), now))
        for request, intact in self._tier.settle():
            self._fetched(request, intact)
        self._resources.resume(now)
        self._reservations.admit(now)
        self._fail_all(follow_compiled(self.queues.arrived, now))
        self._resources.start_arrived()
        planned = self._planner.next(self._clock())
        if planned is None:
            self._end_turn(now)
        return planned

    def _end_turn(self, now: float) -> None:
        """Handle events of time, report and collect garbage: after a launch, for which the device may be waiting."""
        self.life.look_after(self, now)
        counters = self._report.counters(self._routers.refused_messages, self._routers.unsent_messages)
        self.life.publish(self._report.load(), counters, ((each.router, 0) for each in self.queues.live()))
        self.life.end_turn(self.queues.num_live, now, len(self.queues.quarantined))
        self._garbage.end_turn(now)
        self._events.flush()

    def _launch(self, planned: Planned) -> Launched:
        # An idle device begins with the launch, which takes longest while masks are computed.
        now = self._clock()
        launched = self._worker.apply(planned.plan)
        self._planner.launched(planned)
        if planned.plan.masked:
            generation, batch = planned.plan.generation, planned.batch
            self.announce(SLOWEST_MASK * self._planner.most_masks(planned))
            # Computed while the forward runs.
            self._worker.draw(step_masks(generation, batch, self._worker.trees(), self._limits.vocab_size))
            self._fail_all(failed_grammars(batch))
        self._step_times.launched(now)
        self._report.steps += bool(planned.batch)
        self._end_turn(now)
        return launched

    def _finish(self, launched: Launched) -> None:
        now = self._clock()
        began = self._step_times.ended(now)
        runs: defaultdict[ToRouter, list[TokenRun]] = defaultdict(list)
        emissions = self._planner.read(launched)
        self._fail_all(self._pages.verify(each.request for each in emissions if each.request.unchecked))
        for emission in emissions:
            if not emission.request.ended:
                emission.request.mark("step_started", began)
                run = self._accept(emission, now)
                if run is not None:
                    runs[emission.request.router].append(run)
            if emission.request.ended:
                self._resources.leave(emission.request)
        for router, own in runs.items():
            for message in Tokens.of(own):
                router.send(message)
        self._report.step_read(now)
        self._drafts.check(self._report.speculation)

    def _move_transfers(self) -> None:
        self._peers.pump()
        if waiting := self.queues.waiting:
            self._receiver.heartbeats.send_due((each.prefill.incarnation, each.room) for each in waiting)
        for event in self._receiver.poll():
            self._on_transfer(event)

    def _watch(self) -> None:
        """Process messages while a step runs: records whose requests join the next step, and new requests."""
        now, requests = self._clock(), self._report.requests
        self.life.receive(self, now)
        self._move_transfers()
        if self._report.requests > requests:
            self._reservations.admit(now)
        self._set_rows()
        time.sleep(WATCH_INTERVAL)

    def _set_rows(self) -> None:
        """Set, while a step runs, what the next launch would otherwise set: rows of arrived requests, pages of others.

        The device does so after the running step. Retracted requests come before arrived ones.
        """
        if self.queues.arrived and not self.queues.retracted:
            self._resources.start_arrived()
        plan = self._planner.rows()
        if plan is not None:
            self._worker.apply(plan)

    def _idle(self) -> None:
        # Requests that have arrived here wait for the compilation of their grammar, retracted ones for their save, and
        # others for copies from and to host memory or the comparison of their pages.
        # Everything else is announced by messages. More turns than needed would take the processor from the forward of
        # a prefill node on the same host.
        busy = self.queues.arrived or self.queues.retracted or self._tier.busy or self._pages.comparing
        self._poller.poll(BUSY_WAIT_MS if busy else IDLE_WAIT_MS)

    # -- handlers of NodeLife ----------------------------------------------------------------------------------

    def take(self, message: Reserve, router: ToRouter, now: float) -> None:
        try:
            request = DecodeRequest.of(message, router, now)
            self._check(request)
            vocab_size = self._limits.vocab_size
            request.compilation = constraint_of(request.sampling, self._grammars, vocab_size, self._clock)
            self._peers.ensure(message.prefill)
        except RequestError as error:
            router.send(Failed.of(message.room, error))
            return
        self._report.requests += 1
        self.queues.waiting.append(request)
        self._events.add(
            "taken", request.room, request=request.request_id, prefill=request.prefill.incarnation
        )

    def abort(self, router: ToRouter, room: int, reason: str) -> None:
        request = self.queues.find(room)
        if request is not None and request.router is router and not request.ended:
            self._drop(request, reason)

    def pair_lost(self, router: ToRouter, incarnation: str) -> None:
        self._move_transfers()
        for request in (*self.queues.waiting, *self.queues.transferring.values()):
            if request.router is router and request.prefill.incarnation == incarnation:
                self._fail(request, NodeLost(PREFILL_LOST))

    def peer_lost(self, incarnation: str) -> None:
        """Fail reservations that wait for pages. The receiver's events fail transfers in progress.

        Records that the prefill node has sent are read first: one that drains ends right after the last of them.
        """
        self._move_transfers()
        self._peers.lost(incarnation)
        for request in list(self.queues.waiting):
            if request.prefill.incarnation == incarnation:
                self._fail(request, NodeLost(PREFILL_LOST))

    def peer_draining(self, router: ToRouter, incarnation: str) -> None:
        """No-op: a prefill node that drains finishes its prompts, whose pages this node expects."""

    def flush_cache(self) -> None:
        self._space.flush()
        self._tier.flush()

    def router_lost(self, router: ToRouter, last: bool) -> int:
        lost = [each for each in self.queues.live() if each.router is router and not each.ended]
        for request in lost:
            # Still report it: if the router had only stalled, it continues to rely on this node.
            self._fail(request, NodeLost("this decode node lost its router"))
        if last:
            self._peers.all_lost()
        return len(lost)

    def sweep(self, now: float) -> None:
        """Enforce deadlines and sort the waiting queue, which is too expensive before every step."""
        self.queues.sort_waiting(now)
        for request in self.queues.live():
            if not request.ended and now > request.deadline:
                self._fail(request, DeadlineExceeded("the request's deadline passed on the decode node"))
        self._peers.close_unused({request.prefill.incarnation for request in self.queues})

    def _check(self, request: DecodeRequest) -> None:
        if not self.life.takes(request.prefill.incarnation):
            raise NodeLost("this node takes no requests for decoding now")
        if len(self.queues.waiting) >= self._limits.max_queue:
            raise Overloaded(
                f"{self._limits.max_queue} requests already wait on this decode node; try again later"
            )
        if self.queues.find(request.room) is not None or request.room in self.queues.quarantined:
            raise InvalidRequest(f"room {request.room} is already in use")
        self._limits.check(request, self._space, self._rules.extra_slots)

    # -- moving between queues ---------------------------------------------------------------------------------

    def _on_transfer(self, event: transfer.ReceiverEvent) -> None:
        if isinstance(event, transfer.PeerRefused):
            self._log.error("a prefill node refused to work with this node", reason=event.reason)
            self._peers.lost(event.incarnation)
            return
        if isinstance(event, transfer.PeerForgot):
            self._log.info("a prefill node had lost this node, which greets it again", peer=event.incarnation)
            self._peers.lost(event.incarnation)
            return
        if isinstance(event, transfer.PagesFree):
            self._events.add("unwritable", event.room, pages=event.pages)
            request = self.queues.quarantined.pop(event.room, None)
            if request is not None:
                self._resources.vacate(request)
            return
        request = self.queues.transferring.pop(event.room, None)
        if request is None:
            return
        if isinstance(event, transfer.RoomFailed):
            self.queues.quarantined[request.room] = request
            request.ended = True
            self._events.add("lost", request.room, code=event.code)
            if event.code != "finished":  # "finished": the first token was the last one, as the router knows
                self._report.transfer_failures += event.code != Moved.code
                request.router.send(Failed(room=request.room, code=event.code, message=event.reason))
            return
        self._receiver.close(request.room)
        problem = take_record(request, event, self._draft, self._limits.vocab_size, self._clock())
        if problem is not None:
            self._fail(request, TransferFailed(problem))
            return
        self._report.transfers += 1
        self._events.add("accepted", request.room, id=event.record.first_token)
        self.queues.arrived.append(request)
        self._pages.take(request, event.checks)

    def _fetched(self, request: DecodeRequest, intact: bool) -> None:
        """Go on with a request whose prefix has come from host memory."""
        if request.ended:
            return
        if not intact:
            self._fail(request, CacheDamaged("a prefix of it in host memory has changed"))
        elif request in self.queues.arrived:
            self._pages.keep(request)

    def _accept(self, emission: Emission, now: float) -> TokenRun | None:
        """Add the tokens of a step to their request; return None if the request failed."""
        request = emission.request
        offset = len(request.output)
        tokens: list[OutputToken] = []
        reason: str | None = None
        for token in emission.tokens:
            if token is None:
                request.ended = True
                output_tokens = request.emitted + len(request.output)
                error = no_token(request.sampling, output_tokens, request.matcher, self._limits.vocab_size)
                request.trusted = isinstance(error, InvalidRequest)
                request.router.send(Failed.of(request.room, error))
                return None
            tokens.append(token)
            reason = request.append(token.id)
            if request.failure is not None:
                request.ended = True
                request.router.send(Failed.of(request.room, request.failure))
                return None
            if reason is not None:
                break
        if emission.states is not None:
            start = len(request.prompt) + offset - 1
            send_states(request.router, request.room, start, emission.states[: len(tokens)])
        self._report.drawn(emission, len(tokens), now)
        self._events.add_tokens("tokens", offset, tokens, request.room, finish=reason)
        stages = None
        if reason is not None:
            request.ended = True
            request.mark("finished", now)
        if offset == 1 or reason is not None:
            request.mark("first_decode", now)
            stages = request.stages
        length = None if reason is None else request.accept_length
        return TokenRun(request.room, offset, tokens, reason, stages, emission.verified_drafts, length)

    def _drop(self, request: DecodeRequest, reason: str) -> None:
        """End a request that nobody waits for, and free what it holds as soon as that is safe."""
        request.ended = True
        self._events.add("dropped", request.room, reason=reason)
        if self.queues.transferring.pop(request.room, None) is not None:
            self.queues.quarantined[request.room] = request
            self._receiver.abort(request.room, reason)
        elif request.room in self.queues.running:
            self._resources.leave(request)
        else:
            for queue in (self.queues.waiting, self.queues.arrived, self.queues.retracted):
                if request in queue:
                    queue.remove(request)
            self._resources.vacate(request)

    def _fail(self, request: DecodeRequest, error: RequestError) -> None:
        """Drop a request and tell its router why. The request may be in any queue or in none."""
        request.router.send(Failed.of(request.room, error))
        self._drop(request, str(error))

    def _fail_all(self, failures: Iterable[tuple[DecodeRequest, RequestError]]) -> None:
        for request, error in failures:
            self._fail(request, error)
