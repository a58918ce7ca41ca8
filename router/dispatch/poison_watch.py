"""Keeps a request that crashes nodes from crashing the whole fleet: refuses, isolates and clears requests.

`suspects.py` decides which request is to blame; this module applies its verdicts to the requests in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from common.errors import DeadlineExceeded, PoisonRequest
from router.dispatch.attempt import Attempt
from router.dispatch.in_flight import InFlight
from router.dispatch.isolation import NO_TRIAL, Isolation, Trial
from router.dispatch.limits import TOO_LONG
from router.dispatch.suspects import Suspects, fingerprint
from router.nodes.registry import Node, NodeRegistry

EXPIRY = 300.0  # seconds that a request remains suspected or refused


class PoisonWatch:
    """Tracks suspected requests. It costs nothing while no node has crashed."""

    def __init__(self, clock: Callable[[], float], max_crashes: int) -> None:
        """`max_crashes`: crashes of nodes under one request, as in Suspects."""
        self.suspects = Suspects(EXPIRY, clock, max_crashes)
        self._isolation = Isolation()

    def check(self, flight: InFlight) -> None:
        """Raise PoisonRequest if the same request has crashed nodes. Called before each wait and each placement."""
        if self.suspects.empty:
            return
        key = flight.suspect or fingerprint(flight.request)
        if self.suspects.is_quarantined(key):
            raise poison_error()
        if self.suspects.is_suspect(key):
            flight.suspect = key

    def crashed(self, node: Node, aboard: Iterable[tuple[Attempt, InFlight]]) -> list[Attempt]:
        """Note that a node died under these requests. Return the attempts of requests that must not run again."""
        attempts = [(attempt, flight) for attempt, flight in aboard if _had(node, attempt)]
        emitted: dict[bytes, int] = {}
        for attempt, flight in attempts:
            flight.suspect = flight.suspect or fingerprint(flight.request)
            emitted[flight.suspect] = max(emitted.get(flight.suspect, 0), attempt.answer_tokens)
        convicted = self.suspects.crashed(node.incarnation, node.role, emitted)
        return [attempt for attempt, flight in attempts if flight.suspect == convicted]

    def look_for_survivors(self, registry: NodeRegistry) -> None:
        """Clear suspicions if a node registers again under its old incarnation: only its connection was lost."""
        for incarnation in self.suspects.presumed_crashed():
            if registry.get(incarnation) is not None:
                self.suspects.returned(incarnation)

    async def trial(self, flight: InFlight, timeout: float) -> Trial:
        """Wait until the request may run: at once, unless it must be isolated from other suspects.

        It waits for at most `timeout` seconds; then it runs without isolation. Raises PoisonRequest or
        DeadlineExceeded.
        """
        self.check(flight)
        if not flight.suspect or not self.suspects.needs_isolation(flight.suspect):
            return NO_TRIAL
        left = flight.deadline - asyncio.get_running_loop().time()
        trial = await self._isolation.enter(self.suspects.crashes(flight.suspect), min(timeout, left))
        if not trial.isolated and left <= timeout:
            raise DeadlineExceeded(TOO_LONG)
        return trial

    def avoided_by(self, flight: InFlight, others: Iterable[tuple[Attempt, InFlight]]) -> set[str]:
        """Return the incarnations of nodes on which other suspects run."""
        return {
            incarnation
            for attempt, other in others
            if other is not flight and other.suspect and self.suspects.is_suspect(other.suspect)
            for incarnation in (attempt.prefill.incarnation, attempt.decode.incarnation)
        }

    def progressed(self, flight: InFlight, emitted: int, trial: Trial) -> None:
        """Record progress of a suspected request.

        Past the position of its crash the request is cleared, and the next one gets its trial.
        """
        self.suspects.progressed(flight.suspect, emitted)
        if trial.isolated and not self.suspects.needs_isolation(flight.suspect):
            trial.release()

    def prefilled(self, flight: InFlight) -> None:
        if flight.suspect:
            self.suspects.prefilled(flight.suspect)

    def completed(self, flight: InFlight) -> None:
        if flight.suspect:
            self.suspects.completed(flight.suspect)


def _had(node: Node, attempt: Attempt) -> bool:
    """Return whether a node of the attempt had it last, if both are halves of one process, which die together."""
    together = attempt.prefill.name == attempt.decode.name
    return not together or (node.role == "decode") == attempt.transferred


_REFUSED = (
    "this request has crashed nodes and is refused for some minutes; "
    "change the request, or contact the operator of this cluster"
)


def poison_error() -> PoisonRequest:
    """Return the error of a request whose nodes have crashed."""
    return PoisonRequest(_REFUSED)
