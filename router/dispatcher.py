"""One request end to end: place, reserve and prefill at once, merge the token streams, move on when a node is lost.

A request that lost a node is placed again with what it has said appended to its prompt. Draws are keyed by (seed,
position), so it goes on with the tokens it would have had; the client sees a pause.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count

import msgspec

from common.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NodeLost,
    Overloaded,
    Preempted,
    RequestError,
    Unavailable,
)
from common.messages.decode_inbox import Reserve
from common.messages.generation import FINISH_STOP
from common.messages.identity import Role, new_room, routing_id
from common.messages.image_inbox import LINK, ImageData
from common.messages.node_inbox import Abort
from common.messages.prefill_inbox import Prefill
from common.observability.logs import Log
from router.attempt import Attempt
from router.generation import AnswerComplete, GenerationRequest, TokenDelta
from router.metrics import RouterMetrics
from router.node_registry import Node, NodeRegistry
from router.placement import PlacementPolicy
from router.timeline import Timeline, Timelines

FULL_QUEUE_SECONDS = 0.25  # before a request whose node's queue is full is tried again; doubled each time
MOST_FULL_QUEUE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """From the router section of the config."""

    max_attempts: int
    max_requests: int
    request_timeout: float
    placement_wait: float


class Dispatcher:
    """Implements router.generation.Generator."""

    def __init__(
        self,
        registry: NodeRegistry,
        policies: dict[Role, PlacementPolicy],
        send: Callable[[str, msgspec.Struct], bool],
        limits: DispatchLimits,
        metrics: RouterMetrics,
        log: Log,
    ) -> None:
        """`send` takes (routing id, message) and returns False if the node cannot be reached."""
        self._registry = registry
        self._policies = policies
        self._send = send
        self._limits = limits
        self._metrics = metrics
        self._log = log
        self._attempts: dict[int, Attempt] = {}  # room -> attempt under way
        self._changed = asyncio.Event()  # replaced at every change of the registry
        self._active = 0
        self._ending: RequestError | None = None  # what every request ends with, once `end_all` was called
        self.timelines = Timelines()

    @property
    def active(self) -> int:
        """Requests in flight."""
        return self._active

    def attempt(self, room: int) -> Attempt | None:
        """For the control plane: whom a node's message concerns."""
        return self._attempts.get(room)

    def nodes_changed(self) -> None:
        """Wake everybody who waits for a node."""
        self._changed.set()
        self._changed = asyncio.Event()

    def node_lost(self, node: Node, reason: str) -> None:
        for room in list(node.rooms):
            attempt = self._attempts.get(room)
            if attempt is not None:
                attempt.lose(node, reason)

    def end_all(self, error: RequestError) -> None:
        """Every request ends with this error, which is not `retryable`; those that wait for a node, too."""
        self._ending = error
        self.nodes_changed()
        for attempt in list(self._attempts.values()):
            attempt.fail(error)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenDelta, None]:
        """Yields tokens as they come; raises RequestError; closing it at any point frees both nodes."""
        if self._active >= self._limits.max_requests:
            self._metrics.request_refused(Overloaded.code)
            raise Overloaded(f"{self._limits.max_requests} requests are in flight; try again later")
        loop = asyncio.get_running_loop()
        timeout = min(request.timeout_s or self._limits.request_timeout, self._limits.request_timeout)
        timeline = Timeline(request.request_id, time.monotonic())
        self.timelines.add(timeline)
        self._active += 1
        finished: str | None = None
        tokens = 0
        try:
            async with aclosing(self._attempt_until_done(request, timeline, loop.time() + timeout)) as deltas:
                async for delta in deltas:
                    finished = delta.finish_reason
                    tokens += len(delta.tokens)
                    yield delta
            timeline.outcome = finished or "aborted"
        except AnswerComplete:
            timeline.outcome = FINISH_STOP
        except RequestError as error:
            timeline.outcome = f"error: {error.code}"
            raise
        finally:
            self._active -= 1
            if timeline.outcome == "running":
                ended = "sibling failed" if request.batch.failed else "client gone"
                timeline.outcome = finished or ended
            timeline.mark("finished", time.monotonic())
            self._metrics.request_finished(timeline, len(request.token_ids), tokens)
            self._log.info("request finished", tokens=tokens, **timeline.report())

    async def _attempt_until_done(
        self, request: GenerationRequest, timeline: Timeline, deadline: float
    ) -> AsyncGenerator[TokenDelta, None]:
        said: list[int] = []
        avoid: set[str] = set()
        failures = 0
        loop = asyncio.get_running_loop()
        patience = math.inf  # when it stops waiting for room in the nodes' queues
        pause = FULL_QUEUE_SECONDS
        for number in count(1):
            before = len(said)
            try:
                # closed here and not by the garbage collector: a client that leaves frees both nodes at once
                async with aclosing(
                    self._attempt(request, said, avoid, timeline, deadline, number > 1)
                ) as deltas:
                    async for delta in deltas:
                        said.extend(token.id for token in delta.tokens)
                        yield delta
                return
            except Overloaded:
                # a new request gets 503; one that was taken in before waits, with its text so far
                if number == 1:
                    raise
                now = loop.time()
                if patience == math.inf:
                    self._metrics.retries.labels(Overloaded.code).inc()
                    pause = FULL_QUEUE_SECONDS
                patience = min(patience, now + self._limits.placement_wait, deadline)
                # requests of a lost node come all at once, and must not come so again
                apart = pause * random.uniform(0.5, 1.0)
                if now + apart > patience:
                    raise
                await asyncio.sleep(apart)  # nodes do not say when there is room
                pause = min(2 * pause, MOST_FULL_QUEUE_SECONDS)
            except RequestError as error:
                patience = math.inf
                # a preempted request that got further has not failed: its text and its deadline bound how often
                failures += not (isinstance(error, Preempted) and len(said) > before)
                if not error.retryable or failures >= self._limits.max_attempts:
                    raise
                self._metrics.retries.labels(error.code).inc()
                self._log.warning(
                    "placing a request again",
                    request_id=request.request_id,
                    attempt=number,
                    tokens=len(said),
                    reason=str(error),
                )

    async def _attempt(
        self,
        request: GenerationRequest,
        said: list[int],
        avoid: set[str],
        timeline: Timeline,
        deadline: float,
        retry: bool,
    ) -> AsyncGenerator[TokenDelta, None]:
        """`avoid` gains the nodes that are to blame if this fails."""
        attempt = await self._place(request, said, avoid, timeline, deadline, retry)
        first = not said
        try:
            while True:
                try:
                    async with asyncio.timeout_at(deadline):
                        await attempt.woken.wait()
                except TimeoutError:
                    raise DeadlineExceeded("the request took longer than its timeout") from None
                tokens = attempt.take()
                if tokens:
                    timeline.mark("first_token", time.monotonic())
                done = attempt.finish_reason if not attempt.pending else None
                if tokens or done:
                    yield TokenDelta(tokens, done, attempt.cached_tokens if first else None)
                    first = False
                if done:
                    return
                if attempt.error is not None:
                    raise attempt.error
        finally:
            avoid |= attempt.blamed
            self._close(attempt)

    async def _place(
        self,
        request: GenerationRequest,
        said: list[int],
        avoid: set[str],
        timeline: Timeline,
        deadline: float,
        retry: bool,
    ) -> Attempt:
        """Choose a pair of nodes and send both halves of the request."""
        loop = asyncio.get_running_loop()
        patience = loop.time() + self._limits.placement_wait if retry else loop.time()
        while True:
            if self._ending is not None:
                raise self._ending
            changed = self._changed
            prefill = self._registry.choose("prefill", self._policies["prefill"], avoid)
            decode = self._registry.choose("decode", self._policies["decode"], avoid)
            if prefill is not None and decode is not None:
                break
            missing = "prefill" if prefill is None else "decode"
            until = min(patience, deadline)
            if loop.time() >= until:
                raise Unavailable(f"no {missing} node can take requests now; try again in a few seconds")
            try:
                async with asyncio.timeout_at(until):
                    await changed.wait()
            except TimeoutError:
                continue
        attempt = Attempt(new_room(), prefill, decode)
        tokens = [*request.token_ids, *said]
        limit = self._registry.max_model_len
        if limit is not None and len(request.token_ids) + request.sampling.max_tokens > limit:
            raise InvalidRequest(
                f"prompt and max_tokens make {len(request.token_ids) + request.sampling.max_tokens} tokens, "
                f"this cluster serves at most {limit}",
                param="max_tokens",
            )
        self._attempts[attempt.room] = attempt
        now = time.monotonic()
        self.timelines.open(attempt.room, timeline, now, prefill.incarnation, decode.incarnation)
        prefill.rooms[attempt.room] = len(tokens)
        decode.rooms[attempt.room] = 0
        timeline.mark("placed", now)
        timeline.nodes.append({"prefill": prefill.name, "decode": decode.name})
        remaining_ms = max(int((deadline - loop.time()) * 1000), 1)
        spans = tuple(image.span for image in request.images)
        reserve = Reserve(
            room=attempt.room,
            request_id=request.request_id,
            token_ids=tokens,
            emitted=len(said),
            sampling=request.sampling,
            prefill=prefill.register.node,
            deadline_ms=remaining_ms,
            salt=request.salt,
            images=spans,
        )
        prompt = Prefill(
            room=attempt.room,
            request_id=request.request_id,
            token_ids=tokens,
            emitted=len(said),
            sampling=request.sampling,
            decode=decode.incarnation,
            deadline_ms=remaining_ms,
            salt=request.salt,
            images=spans,
        )
        parts = [
            (routing_id(prefill.name, prefill.incarnation, LINK), prefill, data)
            for data in _image_data(request)
        ]
        for address, node, part in (
            (decode.routing_id, decode, reserve),
            *parts,
            (prefill.routing_id, prefill, prompt),
        ):
            if not self._send(address, part):
                attempt.blamed.add(node.incarnation)
                attempt.fail(NodeLost(f"{node.role} node {node.name} went away while the request was placed"))
                break
        return attempt

    def _close(self, attempt: Attempt) -> None:
        """End an attempt, finished or not: whatever a node still holds of it is aborted."""
        del self._attempts[attempt.room]
        self.timelines.close(attempt.room)
        finished = attempt.finish_reason is not None
        reason = "finished" if finished else "the request ended at the router"
        # where the last token has come the prompt was handed over: the prefill node is about to say so
        prefill_over = attempt.prefill_over or finished
        for node, over in ((attempt.prefill, prefill_over), (attempt.decode, attempt.decode_over)):
            node.rooms.pop(attempt.room, None)
            if not over:
                self._send(node.routing_id, Abort(room=attempt.room, reason=reason))


def _image_data(request: GenerationRequest) -> list[ImageData]:
    """Each image once, however often the prompt shows it."""
    by_content = {image.span.digest: image.data for image in request.images}
    return [ImageData(digest=digest, data=data, salt=request.salt) for digest, data in by_content.items()]
