"""Waits until a pair of nodes can take a request: for a bounded time, and in few turns of the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial

from common.errors import Overloaded, RequestError
from common.messages.identity import Role
from router.dispatch.in_flight import InFlight
from router.dispatch.limits import DispatchLimits
from router.metrics.placement_metrics import PlacementMetrics
from router.nodes.placed_prompt import PlacedPrompt
from router.nodes.placer import Placer, unavailable
from router.nodes.registry import Node, NodeRegistry
from router.process.turns import Turns


class PairWait:
    """Finds pairs for requests. A request waits here while no node of a role can take it."""

    def __init__(
        self,
        placer: Placer,
        registry: NodeRegistry,
        limits: DispatchLimits,
        metrics: PlacementMetrics,
        turns: Turns,
    ) -> None:
        """`turns` spreads placements over turns of the event loop: a thousand requests may wait for the same node."""
        self._placer = placer
        self._registry = registry
        self._limits = limits
        self._metrics = metrics
        self._turns = turns
        self._changed = asyncio.Event()  # replaced at every change of the registry
        self._ending: RequestError | None = None

    def nodes_changed(self) -> None:
        """Wake every request that waits."""
        self._changed.set()
        self._changed = asyncio.Event()

    def end_all(self, error: RequestError) -> None:
        """End all requests with `error`: from now on, none gets a pair."""
        self._ending = error
        self.nodes_changed()

    def check_busy(self, flight: InFlight) -> None:
        """Raise Overloaded if the cluster is too busy for a new request."""
        flight.prompt = self._prompt(flight)
        try:
            self._placer.check_busy(flight.prompt)
        except Overloaded:
            self._metrics.refused_busy.inc()
            raise

    def _prompt(self, flight: InFlight) -> PlacedPrompt:
        request = flight.request
        spans = [image.span for image in request.images] if request.images else ()
        make = partial(self._placer.prompt, flight.tokens, request.salt, spans, request.session)
        # The choices of one prompt hash it once.
        return make() if flight.delivered else request.share.hashed(make)

    def until(self, flight: InFlight, started: float) -> float:
        """Return the time until which a request may wait for a pair, if its wait began at `started`."""
        return min(started + self._limits.placement_wait, flight.deadline)

    def now(self, flight: InFlight, avoid: Collection[str]) -> tuple[Node, Node] | Role:
        """Return a pair that can take the request at once, or the role that has no node for it.

        `avoid`: incarnations to avoid while others are left.
        """
        if self._ending is not None:
            raise self._ending
        if flight.prompt.tokens != flight.num_tokens:
            flight.prompt = self._prompt(flight)
        found = self._placer.choose(avoid, flight.request.share.nodes, flight.prompt)
        if isinstance(found, str) or flight.delivered:
            return found
        return self._placer.spared(found, avoid, flight.prompt)

    async def find(
        self, flight: InFlight, missing: Role, avoid: Callable[[], Collection[str]], started: float
    ) -> tuple[Node, Node]:
        """Wait for a pair: a retry waits for `placement_wait`; a new request waits only if a node is expected back.

        `missing`: the role that `now` has returned. `avoid` returns the incarnations to avoid at that moment.
        """
        loop = asyncio.get_running_loop()
        waited: Role | None = None
        while True:
            changed = self._changed
            if waited != missing:
                waited = missing
                self._metrics.waited.labels(missing).inc()
            until = self.until(flight, started)
            if flight.attempts == 1:
                until = min(until, loop.time() + self._registry.expected_within(missing))
            if loop.time() >= until:
                self._metrics.refused.labels(missing).inc()
                raise unavailable(missing)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await changed.wait()
            await self._turns.wait()
            found = self.now(flight, avoid())
            if not isinstance(found, str):
                return found
            missing = found
