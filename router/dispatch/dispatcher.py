"""Runs one request from start to end: placement, reservation and prefill, token merging, retry on lost nodes.

A request whose node is lost is placed again, with its answer so far appended to the prompt; the client sees a pause.
Sampling is keyed by (seed, position): in float32 the answer continues exactly, in 16 bits up to near-ties.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from functools import partial

from common.errors import (
    ChecksumFailed,
    InternalError,
    Moved,
    Overloaded,
    RequestError,
    TransferFailed,
    Unavailable,
)
from common.messages.generation import FINISH_STOP
from common.messages.identity import new_room
from common.observability.event_log import EventLog
from common.observability.logs import Log
from router.dispatch.admission import Admission, NodeRoom
from router.dispatch.attempt import Attempt
from router.dispatch.delivery import Delivery
from router.dispatch.first_token_hold import FirstTokenHold
from router.dispatch.generation import (
    FINISH_ABORT,
    AnswerComplete,
    GenerationRequest,
    TakeNow,
    TokenDelta,
    take_nothing,
)
from router.dispatch.in_flight import InFlight
from router.dispatch.isolation import NO_TRIAL, Trial
from router.dispatch.limits import DispatchLimits
from router.dispatch.open_attempts import OpenAttempts
from router.dispatch.pair_wait import PairWait
from router.dispatch.placement_feedback import PlacementFeedback
from router.dispatch.placement_messages import check_length, placement_messages
from router.dispatch.poison_watch import PoisonWatch, poison_error
from router.dispatch.retries import Retries
from router.dispatch.retry_budget import RetryBudget
from router.dispatch.running_requests import RunningRequests
from router.metrics.router_metrics import RouterMetrics
from router.metrics.timeline import Timeline, Timelines
from router.nodes.health import NodeHealth
from router.nodes.outbox import Outbox, Parcel, SendAll
from router.nodes.placer import Placer, unavailable
from router.nodes.registry import Node, NodeRegistry
from router.process.turns import Turns

LOSSES_PER_TURN = 64  # requests that learn of the loss of their node in one turn of the loop


class Dispatcher:
    """Places and runs requests. Implements router.dispatch.generation.Generator."""

    def __init__(
        self,
        registry: NodeRegistry,
        placer: Placer,
        send_all: SendAll,
        limits: DispatchLimits,
        metrics: RouterMetrics,
        log: Log,
        health: NodeHealth,
        events: EventLog,
    ) -> None:
        """`send_all` sends messages to a node, as the outbox does. `health` is what `placer` considers."""
        self._registry = registry
        self.health = health
        self._placer = placer
        self._outbox = Outbox(send_all)
        self._limits = limits
        self._metrics = metrics
        self._log = log
        self._events = events
        self.poison = PoisonWatch(self.health.clock, limits.max_crashes)
        room = NodeRoom(registry, limits.requests_per_node)
        self.admission = Admission(room, limits.reserved_tokens, limits.queue_wait, time.monotonic)
        metrics.placement.count_waiting(lambda: self.admission.waiting)
        self._budget = RetryBudget(limits.retry_ratio, self.health.clock)
        self._turns = Turns()  # spreads placements over turns of the event loop
        self._pairs = PairWait(self._placer, registry, limits, metrics.placement, self._turns)
        self.feedback = PlacementFeedback(placer.history, self.health, metrics.placement)
        self._losses = Turns(LOSSES_PER_TURN)
        self._active = 0
        self._ended = asyncio.Event()
        self._ending: RequestError | None = None  # ends every request once `end_all` was called
        self.timelines = Timelines()
        self.running = RunningRequests()
        self._open = OpenAttempts(self.timelines, self.feedback, self.health, events, self._outbox)
        # Returns the attempt of a room, for messages of nodes; None once it has ended.
        self.attempt: Callable[[int], Attempt | None] = self._open.by_room.get

    @property
    def active(self) -> int:
        """Number of requests in flight."""
        return self._active

    def nodes_changed(self) -> None:
        """Wake every request that waits for a node."""
        self.poison.look_for_survivors(self._registry)
        self._pairs.nodes_changed()

    def node_lost(self, node: Node, reason: str) -> None:
        self.health.lost(node)
        self._placer.history.lost(node)
        aboard = [attempt for room in list(node.rooms) if (attempt := self.attempt(room)) is not None]
        if node.lost_by == "closed":
            found = [(attempt, self._open.flight(attempt)) for attempt in aboard]
            for attempt in self.poison.crashed(node, found):
                quarantined = self._open.flight(attempt).request.request_id
                self._log.error("quarantined a request", request_id=quarantined)
                self._metrics.placement.quarantined.inc()
                attempt.fail(poison_error())
        for attempt in aboard:
            # Each call wakes a request.
            self._losses.call(partial(attempt.lose, node, reason))

    def transferred(self, attempt: Attempt, stages: Mapping[str, float]) -> None:
        """Note that the prefill node has handed over the pages. `stages`: seconds since it received the prompt."""
        attempt.transferred = True
        flight = self._open.flight(attempt)
        self.poison.prefilled(flight)
        flight.request.share.handed_over()
        self._metrics.prefill_queue.observe(stages.get("prefill_start", 0.0))
        self.feedback.transferred(attempt, stages, len(flight.request.token_ids) + attempt.emitted)

    def failed(self, attempt: Attempt, node: Node, error: RequestError) -> None:
        """Note that one node of the attempt reported a failure."""
        if isinstance(error, ChecksumFailed):
            self.health.corrupted(attempt.prefill, attempt.decode)
        elif isinstance(error, TransferFailed):
            # Either end, or the network between them, may be the cause.
            self.health.transfer_failed(attempt.prefill, attempt.decode)
        elif isinstance(error, InternalError):
            self.health.node_failed(node)
        elif isinstance(error, Moved):
            attempt.blamed.clear()
        attempt.fail(error)

    def end_all(self, error: RequestError) -> None:
        """End every request, including those that wait for a node, with `error`, which must not be `retryable`."""
        self._ending = error
        self._ended.set()
        self._pairs.end_all(error)
        self.admission.open_all()
        self.nodes_changed()
        for attempt in list(self._open.by_room.values()):
            attempt.fail(error)

    async def generate(
        self, request: GenerationRequest, take_now: TakeNow = take_nothing
    ) -> AsyncGenerator[TokenDelta, None]:
        """Yield tokens as they arrive. Raises RequestError. Closing the generator at any point frees both nodes."""
        if self._ending is not None:
            self._metrics.request_refused(self._ending.code)
            raise self._ending
        if self._active >= self._limits.max_requests:
            self._metrics.request_refused(Overloaded.code)
            raise Overloaded(f"{self._limits.max_requests} requests are in flight; try again later")
        loop = asyncio.get_running_loop()
        timeout = self._limits.request_timeout
        timeline = Timeline.entered(request.request_id, request.arrived, request.client, request.trace)
        self.timelines.add(timeline)
        task = asyncio.current_task()
        flight = InFlight(request, timeline, loop.time() + timeout, task, take_now=take_now)
        self.running.add(flight)
        self._active += 1
        self._budget.request()
        if self._events.records:
            self._events.add("received", request=request.request_id, prompt=len(request.token_ids))
        finished: str | None = None
        try:
            self.poison.check(flight)
            await request.share.wait(timeout)
            cost = self.admission.let_in(request)
            if cost is None:
                cost = await self.admission.enter(request, timeout)
            try:
                timeline.mark("admitted", time.monotonic())
                deltas = self._attempt_until_done(flight)
                try:
                    async for delta in deltas:
                        finished = delta.finish_reason
                        yield delta
                finally:
                    await deltas.aclose()
            finally:
                self.admission.leave(request.client, cost)
            timeline.outcome = finished or "aborted"
        except AnswerComplete:
            timeline.outcome = FINISH_STOP
            self.poison.completed(flight)
        except (RequestError, asyncio.CancelledError) as error:
            if isinstance(error, RequestError):
                timeline.outcome = f"error: {error.code}"
            if not flight.ended_by_abort(error):
                raise
            timeline.outcome = FINISH_ABORT
            yield TokenDelta([], FINISH_ABORT, None)
        except Exception:
            # A defect. The client is answered with status 500.
            timeline.outcome = f"error: {InternalError.code}"
            raise
        finally:
            self.running.remove(flight)
            self._active -= 1
            request.share.ended()
            if timeline.outcome == "running":
                ended = "sibling failed" if request.batch.failed else "client gone"
                timeline.outcome = finished or ended
            timeline.mark("finished", time.monotonic())
            timeline.accept_length = request.steps.accept_length
            tokens = len(flight.delivered)
            if self._events.records:
                self._events.add("ended", request=request.request_id, outcome=timeline.outcome, tokens=tokens)
            self._metrics.request_finished(timeline, flight.figures())
            self._log.info("request finished", tokens=tokens, **timeline.report())

    async def _attempt_until_done(self, flight: InFlight) -> AsyncGenerator[TokenDelta, None]:
        limits = self._limits
        self._pairs.check_busy(flight)
        retries: Retries | None = None
        while True:
            before = len(flight.delivered)
            flight.attempts += 1
            deltas = self._attempt(flight)
            try:
                try:
                    async for delta in deltas:
                        yield delta
                finally:
                    # Here rather than in the garbage collector: a client that leaves must free both nodes at once.
                    await deltas.aclose()
                self.poison.completed(flight)
                return
            except RequestError as error:
                if retries is None:
                    retries = Retries(limits.max_attempts, limits.placement_wait, flight.deadline)
                pause = self._pause_after(error, flight, len(flight.delivered) > before, retries)
                if pause is None:
                    raise
            if pause:
                await self.pause(pause)

    def _pause_after(
        self, error: RequestError, flight: InFlight, progress: bool, retries: Retries
    ) -> float | None:
        """Return the seconds until the request is placed again after a failed attempt; None if `error` ends it.

        `progress`: the attempt yielded tokens. Raises Unavailable if the retry budget is used up.
        """
        request = flight.request.request_id
        self._events.add("failed", request=request, attempt=flight.attempts, code=error.code)
        elsewhere = self._placer.has_others(flight.avoid)
        # The router itself ran it together with other suspects: a crash there is no failure of the request.
        progress = progress or flight.shared_trial
        pause = retries.pause(error, progress, elsewhere, asyncio.get_running_loop().time())
        if pause is None or flight.aborted:
            return None
        if retries.repeated and not self._budget.take():
            self._metrics.placement.over_budget.inc()
            reason = f"the retry budget of the cluster is used up; the last failure: {error}"
            raise Unavailable(reason) from error
        self._metrics.retries.labels(error.code).inc()
        if not isinstance(error, Moved):
            flight.queued = None
        if not isinstance(error, Overloaded | Moved):
            self._log.warning(
                "placing a request again",
                request_id=request,
                attempt=flight.attempts,
                tokens=len(flight.delivered),
                reason=str(error),
                pause=round(pause, 3),
            )
        return pause

    async def pause(self, seconds: float) -> None:
        """Wait, but no longer than until `end_all`: its error must reach the client before the connection closes."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ended.wait()

    async def _attempt(self, flight: InFlight) -> AsyncGenerator[TokenDelta, None]:
        """Run one attempt. If it fails, the nodes to blame are added to `flight.avoid`."""
        started = asyncio.get_running_loop().time()
        if self.poison.suspects.empty:
            trial = NO_TRIAL
        else:
            trial = await self.poison.trial(flight, self._limits.placement_wait)
        flight.shared_trial = trial.companions > 0
        try:
            if not self._turns.passes():
                await self._turns.wait()
            attempt = await self._place(flight, trial, started)
        except BaseException:
            trial.release()
            raise
        first = not flight.delivered
        delivery = Delivery(flight, attempt, trial, self.health, self.poison, self._events)
        try:
            while True:
                if not attempt.woken.is_set:
                    if not first:
                        attempt.direct = delivery.take_now
                    await attempt.woken.future()
                tokens = attempt.take()
                if tokens:
                    delivery.record(tokens)
                done = attempt.finish_reason if not attempt.pending else None
                if tokens or done:
                    yield attempt.delta(tokens, done, first)
                    first = False
                if done:
                    return
                if attempt.pending:
                    await asyncio.sleep(0)
                elif attempt.error is not None:
                    await self._turns.wait()  # one lost node may fail a thousand requests
                    raise attempt.error
        finally:
            trial.release()
            flight.avoid |= attempt.blamed
            self._open.close(attempt)

    async def _place(self, flight: InFlight, trial: Trial, started: float) -> Attempt:
        """Choose a pair of nodes, send both halves of the request, and wait for the first token or a failure.

        `started`: when the wait for a pair began. A node to which sending fails counts as unreachable until it is heard
        from; that is not a failed attempt.
        """
        loop = asyncio.get_running_loop()
        tokens = flight.tokens
        while True:
            pair = self._pairs.now(flight, self._avoided(flight, trial))
            if isinstance(pair, str):
                pair = await self._pairs.find(flight, pair, partial(self._avoided, flight, trial), started)
            self.poison.check(flight)
            prefill, decode = pair
            check_length(flight.request, self._registry.max_model_len)
            attempt = Attempt(
                new_room(), prefill, decode, emitted=len(flight.delivered), steps=flight.request.steps
            )
            if self._limits.first_token_hold and flight.request.streamed and not flight.delivered:
                attempt.hold = FirstTokenHold(self._limits.first_token_hold, loop.call_later)
            self._open.open(attempt, flight)
            now = loop.time()
            remaining_ms = max(int((flight.deadline - now) * 1000), 1)
            if flight.queued is None:
                flight.queued = now
            waited_ms = int((now - flight.queued) * 1000)
            messages = placement_messages(flight.request, attempt, tokens, remaining_ms, waited_ms)
            parcel = Parcel(messages, attempt.not_sent, trial.placed if trial.isolated else None)
            self._outbox.put(parcel)
            try:
                await attempt.woken.future()
            except BaseException:
                if parcel.cancel():
                    # Nothing was sent.
                    attempt.prefill_over = attempt.decode_over = True
                self._open.close(attempt)
                raise
            if (unreached := attempt.unreached) is None:
                return attempt
            if isinstance(unreached, Exception):
                self._open.close(attempt)
                raise unreached
            self._registry.unreachable(unreached)
            self.health.node_failed(unreached)
            self._open.close(attempt)
            flight.check_aborted()
            if loop.time() >= self._pairs.until(flight, started):
                raise unavailable(unreached.role)

    def _avoided(self, flight: InFlight, trial: Trial) -> set[str]:
        """Return the incarnations to blame for failed attempts; on trial, also those with other suspects."""
        if not trial.isolated:
            return flight.avoid
        return flight.avoid | self.poison.avoided_by(flight, self._open)
